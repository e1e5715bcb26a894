"""One node in this process: start, stop, trouble at the start, and an embedded server that dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mainspring.client.client import Client
from mainspring.config.config import Config
from mainspring.model.delivery import DONE, Delivery, Outcome
from mainspring.model.errors import ConfigError, InvalidInput, StoreError, Unavailable
from mainspring.model.task import Task
from mainspring.node.node import Node
from mainspring.store import server_checks
from mainspring.testing.servers import Server, standalone


class Basket:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.closed = False

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.ids += [one.id for one in batch]
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        self.closed = True


@asynccontextmanager
async def running(config: Config, basket: Basket) -> AsyncIterator[Node]:
    node = Node(config, {"log": basket})
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def until(condition: Callable[[], bool], what: str) -> None:
    del what  # a timeout shows this line
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # other processes tell us nothing: there is only polling
            await asyncio.sleep(0.02)


async def put(node: Node, id: str, after: str) -> None:
    """As a patient caller does: with the same id, until there is an answer."""
    async with asyncio.timeout(60):
        while True:
            try:
                assert node.client is not None
                await node.client.put("log:", after=after, id=id)
                return
            except StoreError:
                await asyncio.sleep(0.05)


def server_pid(node: Node) -> int:
    assert node.embedding is not None
    assert node.embedding.server is not None
    return node.embedding.server.pid


def written(data: Path, id: bytes) -> bool:
    """On a slow disk the server holds writes back for up to two seconds."""
    return any(id in file.read_bytes() for file in (data / "appendonlydir").glob("*.incr.aof"))


async def test_a_node_starts_with_its_own_server_delivers_and_leaves_nothing_running(tmp_path: Path) -> None:
    basket = Basket()
    async with running(Config(data_dir=tmp_path / "data"), basket) as node:
        assert (node.ready, node.healthy, await node.outage()) == (True, True, None)
        pid = server_pid(node)
        await put(node, "soon", "0s")
        await until(lambda: basket.ids == ["soon"], "the task is delivered")
    assert (node.ready, node.healthy) == (False, False)
    assert basket.closed
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_node_logs_the_limit_of_its_embedded_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mainspring.node")
    config = Config(data_dir=tmp_path / "data", embedded_memory_bytes=64 * 1024 * 1024)
    async with running(config, Basket()) as node:
        assert node.client is not None
        [info] = await node.client.store.run_one(0, [("INFO", "memory")])
        assert b"maxmemory:67108864\r\n" in info
    assert "maxmemory is 64 MiB, noeviction" in caplog.text


async def test_a_killed_embedded_server_is_brought_back_with_its_tasks(tmp_path: Path) -> None:
    basket = Basket()
    async with running(Config(data_dir=tmp_path / "data", lease_s=1), basket) as node:
        pid = server_pid(node)
        await put(node, "before", "8s")
        await until(lambda: written(tmp_path / "data", b"before"), "it is on disk")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: server_pid(node) != pid, "another server runs")
        await put(node, "after", "0s")
        await until(lambda: {"before", "after"} <= set(basket.ids), "both are delivered")
        await until(lambda: node.healthy, "the node is well again")


async def test_a_node_that_shares_a_server_takes_it_over_when_its_owner_stops(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path / "data", lease_s=1)
    first, second = Basket(), Basket()
    owner = Node(config, {"log": first})
    await owner.start()
    async with running(config, second) as sharer:
        pid = server_pid(sharer)
        assert pid == server_pid(owner)
        await put(sharer, "kept", "8s")
        await owner.stop()
        await until(lambda: server_pid(sharer) != pid, "the sharer has started a server")
        await until(lambda: second.ids == ["kept"], "the task is delivered by the one that is left")
        assert first.ids == []


async def test_a_node_that_cannot_reach_its_server_says_so_and_holds_nothing() -> None:
    node = Node(Config(redis_url="redis://127.0.0.1:1"), {"log": Basket()})
    with pytest.raises(Unavailable):
        await node.start()
    assert not node.ready


async def test_a_replica_is_refused_in_plain_words() -> None:
    with standalone() as primary, standalone() as replica:
        replica.call("REPLICAOF", "127.0.0.1", primary.port)
        node = Node(Config(redis_url=replica.url), {"log": Basket()})
        with pytest.raises(ConfigError, match=r"replica of .* name the primary in the URL"):
            await node.start()


async def test_warnings_of_the_checks_are_logged_and_the_node_starts(caplog: pytest.LogCaptureFixture) -> None:
    with standalone() as server:
        async with running(Config(redis_url=server.url), Basket()):
            pass
    assert "nothing is written to disk" in caplog.text


async def test_a_crashed_engine_ends_the_node_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def boom(_: object) -> float:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mainspring.engine.sweeper.Sweeper.step", boom)
    with standalone() as server:
        node = Node(Config(redis_url=server.url), {"log": Basket()})
        assert await node.run_until_signal() == 1
    assert "a part of the node broke down" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_node_cleanly_and_its_echo_does_no_harm(number: signal.Signals) -> None:
    with standalone() as server:
        node = Node(Config(redis_url=server.url), {"log": Basket()})

        def started() -> None:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

        assert await node.run_until_signal(started=started) == 0


async def test_a_signal_during_a_long_start_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object) -> list[server_checks.Check]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("mainspring.node.node.check_server", hang)
    with standalone() as server:
        node = Node(Config(redis_url=server.url), {"log": Basket()})
        assert await node.run_until_signal() == 0


async def test_a_stop_that_is_given_up_in_the_middle_still_closes_everything(tmp_path: Path) -> None:
    class Holding(Basket):
        def __init__(self) -> None:
            super().__init__()
            self.begun = asyncio.Event()

        async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
            self.begun.set()
            await asyncio.Event().wait()
            return await super().deliver(batch)

    holding = Holding()
    node = Node(Config(data_dir=tmp_path / "data"), {"log": holding})
    await node.start()
    assert node.client is not None
    links, pid = node.client.store.servers.all(), server_pid(node)
    await node.client.put("log:", after="0s")
    await asyncio.wait_for(holding.begun.wait(), 60)
    stop = asyncio.create_task(node.stop())
    await until(lambda: node.seat is None, "it has begun to stop, and waits for the delivery")
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    assert holding.closed
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for link in links:
        with pytest.raises(Unavailable, match="closed"):
            await link.pipeline([("PING",)])


async def test_a_node_fires_while_a_request_of_its_clients_still_waits_for_its_reply() -> None:
    basket = Basket()
    with standalone() as server:
        async with running(Config(redis_url=server.url), basket) as node:
            assert node.client is not None
            await put(node, "before", "1s")
            store = node.client.store
            blocked = asyncio.create_task(store.run_one(store.keys.slot, [("BLPOP", "nothing", 0)]))
            await until(lambda: basket.ids == ["before"], "it fires")
            assert not blocked.done()
            blocked.cancel()


async def test_a_program_on_the_server_learns_at_the_put_which_addresses_no_node_may_reach(
    server: Server, namespace: str
) -> None:
    inside, metadata = "http://10.1.2.3/hook", "http://169.254.169.254/latest"
    async with Client(server.url, namespace=namespace) as client:
        await client.put(metadata, after="1h", id="early")  # no node runs, so this is not known
        config = Config(redis_url=server.url, namespace=namespace, http_allow=("10.0.0.0/8",))
        async with running(config, Basket()):
            for refused in (
                client.put(metadata, after="1h"),
                client.put_many([Task("log:", after="1h"), Task(metadata, after="1h")]),
                client.schedules.add("spy", cron="@daily", target=metadata),
            ):
                with pytest.raises(InvalidInput, match=r"169\.254\.169\.254 is a metadata service"):
                    await refused
            await client.put(inside, after="1h", id="allowed")
            await client.put("http://hooks.internal/", after="1h", id="a name")
            assert await client.schedules.get("spy") is None
            assert sorted(one.id for one in (await client.list()).tasks) == ["a name", "allowed", "early"]
