"""A server that loses its data while nodes, workers and clients run: none continues with another partition count."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from mainspring import Client, Scheduler
from mainspring.config.config import Config
from mainspring.model.errors import WrongFormat
from mainspring.node.node import Node
from mainspring.scheduler.worker_process import Workplace
from mainspring.sinks.log import NullSink
from mainspring.testing.servers import Server, standalone

OURS, OTHERS = 4, 8


@pytest.fixture
def emptied() -> Iterator[Server]:
    """A server of its own: what runs here is not prepared for the data of other tests."""
    with standalone() as server:
        yield server


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # nodes tell nothing: there is only polling
            await asyncio.sleep(0.02)


def meta(server: Server) -> list[bytes | None]:
    found: list[bytes | None] = server.call("HMGET", "{main}:meta", "format", "partitions")
    return found


def make_anew(server: Server) -> None:
    """Do what another program does that comes first after the loss, and wants another count."""
    server.call("FLUSHALL")
    server.call("HSET", "{main}:meta", "format", 1, "partitions", OTHERS)


@contextlib.asynccontextmanager
async def running(server: Server, *roles: str) -> AsyncIterator[Node]:
    node = Node(config_of(server, *roles), {"null": NullSink()})
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def config_of(server: Server, *roles: str) -> Config:
    return Config(redis_url=server.url, partitions=OURS, lease_s=1, roles=roles or ("scheduler",))


@pytest.mark.parametrize("role", ["scheduler", "api"])
async def test_a_node_writes_the_partition_count_again_after_the_server_lost_it(emptied: Server, role: str) -> None:
    """A client with another count would make the namespace again, and put tasks where no node looks."""
    async with running(emptied, role) as node:
        emptied.call("FLUSHALL")
        await until(lambda: None not in meta(emptied))
        assert meta(emptied) == [b"1", b"%d" % OURS]
        with pytest.raises(WrongFormat, match=f"has {OURS} partitions, {OTHERS} were asked for"):
            await Client(emptied.url, partitions=OTHERS).open()
        assert node.failure is None
        async with Client(emptied.url) as client:
            assert len(client.store.keys) == OURS


@pytest.mark.parametrize("role", ["scheduler", "api"])
async def test_a_node_stops_if_the_namespace_was_made_again_with_another_count(
    emptied: Server, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(config_of(emptied, role), {"null": NullSink()})
    assert await node.run_until_signal(started=lambda: make_anew(emptied)) == 2
    assert f"the node cannot continue: namespace 'main' has {OTHERS} partitions, {OURS} were asked for" in caplog.text
    assert meta(emptied) == [b"1", b"%d" % OTHERS]


async def test_a_worker_stops_if_the_namespace_was_made_again_with_another_count(
    emptied: Server, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(emptied)
    scheduler = Scheduler(config)
    scheduler.handler(queue="mail", name="send")(lambda: None)
    workplace = Workplace(scheduler, config)
    assert await workplace.run_until_signal(started=lambda: make_anew(emptied)) == 2
    assert "the worker cannot continue: namespace 'main' has" in caplog.text


async def test_an_open_client_is_refused_if_the_namespace_was_made_again(
    emptied: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks would wait in partitions that no node owns."""
    monkeypatch.setattr("mainspring.model.clock.OLD_S", 0.0)  # how long it counts on from what it last saw
    async with Client(emptied.url, partitions=OURS) as client:
        await client.put("null:", after="1h")
        make_anew(emptied)
        with pytest.raises(WrongFormat, match="restart what still uses the old count"):
            await client.put("null:", after="1h")
        assert emptied.call("KEYS", "{main:*") == []
