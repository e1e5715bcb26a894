"""Settings that the namespace keeps: nodes, workers and clients agree on them, or are refused."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from mainspring import Client, Scheduler
from mainspring.config.config import Config
from mainspring.model.errors import ConfigError, InvalidInput
from mainspring.model.lane import LanePolicy
from mainspring.model.queue_rules import QueueRules
from mainspring.model.shared_settings import DEFAULTS, SharedSettings, checked_setting
from mainspring.node.node import Node
from mainspring.scheduler.worker_process import Workplace
from mainspring.sinks.log import NullSink
from mainspring.store.store import Store
from mainspring.testing.servers import Server, standalone

PARK = QueueRules.read({"mail": {"lane_policy": "park"}})
SKIP = QueueRules.read({"mail": {"lane_policy": "skip"}})


@pytest.fixture
def own() -> Iterator[Server]:
    """A server of its own: other tests' namespaces say other things."""
    with standalone() as server:
        yield server


def config_of(server: Server, **settings: Any) -> Config:
    return Config(redis_url=server.url, partitions=4, lease_s=1, **settings)


def node_of(server: Server, **settings: Any) -> Node:
    return Node(config_of(server, **settings), {"null": NullSink()})


@contextlib.asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def place_of(server: Server, **settings: Any) -> Workplace:
    config = config_of(server, **settings)
    scheduler = Scheduler(config)
    scheduler.handler(queue="mail", name="send")(lambda: None)
    return Workplace(scheduler, config)


def kept(server: Server) -> dict[str, str]:
    flat = [one.decode() for one in server.call("HGETALL", "{main}:meta")]
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.removeprefix("set:"): value for name, value in pairs if name.startswith("set:")}


def configure(server: Server, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mainspring", "config", *words, "--redis-url", server.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # nodes tell nothing: there is only polling
            await asyncio.sleep(0.02)


async def test_the_first_node_writes_its_settings_and_nodes_without_any_take_them(own: Server) -> None:
    async with running(node_of(own, dedupe_window_s=7200, max_payload_bytes=100, queue=PARK)):
        assert kept(own) == DEFAULTS | {
            "dedupe_window": "7200000ms",
            "max_payload_bytes": "100",
            "queue.mail.lane_policy": "park",
        }
        async with Client(own.url) as client:
            assert client.store.shared.dedupe_window_ms == 7_200_000
            with pytest.raises(InvalidInput, match="at most 100 are allowed"):
                await client.put("null:", "x" * 200, after="1h")
        async with running(node_of(own)) as second:
            assert second.engine is not None
            assert second.engine.options.queue_lanes == {"mail": LanePolicy("park")}


async def test_a_node_without_settings_writes_the_defaults_and_a_client_writes_nothing(own: Server) -> None:
    async with Client(own.url, partitions=4, dedupe_window="5m") as client:
        assert (client.store.shared.dedupe_window_ms, kept(own)) == (300_000, {})
    async with running(node_of(own)):
        assert kept(own) == DEFAULTS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dedupe_window_s": 60}, r"dedupe_window is '60000ms' here and '3600000ms' in namespace 'main'"),
        (
            {"max_payload_bytes": 10},
            r"max_payload_bytes is '10' here and '65536' in .*config set max_payload_bytes '10'",
        ),
        ({"queue": SKIP}, r"queue\.mail\.lane_policy is 'skip' here and 'park' in namespace 'main'"),
    ],
)
async def test_nodes_and_workers_with_other_settings_are_refused(
    own: Server, settings: dict[str, Any], message: str
) -> None:
    async with running(node_of(own, queue=PARK)):
        for other in (node_of(own, **settings), node_of(own, roles=("api",), **settings), place_of(own, **settings)):
            with pytest.raises(ConfigError, match=message):
                await other.start()
            await other.stop()
        async with running(node_of(own, dedupe_window_s=3600, queue=PARK)) as agreeing:
            assert agreeing.healthy


async def test_a_client_with_other_settings_is_refused(own: Server) -> None:
    async with running(node_of(own)):
        with pytest.raises(ConfigError, match="dedupe_window is '60000ms' here and '3600000ms' in"):
            await Client(own.url, dedupe_window="1m").open()
        with pytest.raises(ConfigError, match="max_payload_bytes is '5' here and '65536' in"):
            await Client(own.url, max_payload_bytes=5).open()
        async with Client(own.url, dedupe_window="1h", max_payload_bytes=65_536):
            pass


async def test_a_change_reaches_running_nodes_workers_and_clients(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainspring.model.clock.OLD_S", 0.0)  # how long a client counts on from what it last saw
    place = place_of(own)
    async with running(node_of(own, queue=PARK)) as node, Client(own.url) as client:
        await place.start()
        assert place.worker is not None
        assert node.engine is not None
        for words in (("dedupe_window", "2h"), ("max_payload_bytes", "9"), ("queue.mail.lane_policy", "skip")):
            ended = await asyncio.to_thread(configure, own, "set", *words)
            assert ended.returncode == 0, ended.stderr
        policies = (node.engine.options.queue_lanes, place.worker.options.queue_lanes)
        await until(lambda: policies == ({"mail": LanePolicy("skip")},) * 2)
        await until(lambda: node.engine is not None and node.engine.store.shared.dedupe_window_ms == 7_200_000)
        with pytest.raises(InvalidInput, match="at most 9 are allowed"):
            await client.put("null:", "x" * 10, after="1h")
        await place.stop()


def test_the_command_shows_before_and_after_and_refuses_what_is_wrong(own: Server) -> None:
    assert configure(own, "shared").stdout == ""
    ended = configure(own, "set", "dedupe_window", "2h")
    assert ended.stdout == "dedupe_window of namespace main: not set -> 2h\n"
    ended = configure(own, "set", "dedupe_window", "3h")
    assert ended.stdout == "dedupe_window of namespace main: 2h -> 3h\n"
    assert configure(own, "shared").stdout == "SETTING        VALUE\ndedupe_window  3h\n"
    for words in (
        ("port", "1"),
        ("dedupe_window", "soon"),
        ("queue.mail.lane_policy", "wait"),
        ("max_payload_bytes", "-1"),
    ):
        ended = configure(own, "set", *words)
        assert ended.returncode == 2, words
    assert kept(own) == {"dedupe_window": "10800000ms"}


async def test_settings_that_a_server_lost_are_written_again(own: Server) -> None:
    async with running(node_of(own, dedupe_window_s=60)):
        assert (await asyncio.to_thread(configure, own, "set", "dedupe_window", "2h")).returncode == 0
        changed = DEFAULTS | {"dedupe_window": "7200000ms"}
        await until(lambda: kept(own) == changed)
        own.call("FLUSHALL")
        await until(lambda: kept(own) == changed)


async def test_a_node_starts_on_a_full_server_that_has_no_settings_yet(
    own: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.aclosing(await Store.open(own.url, partitions=4)):
        own.call("CONFIG", "SET", "maxmemory", 1)
    async with running(node_of(own, dedupe_window_s=60)) as node:
        assert node.engine is not None
        assert node.engine.store.shared.dedupe_window_ms == 60_000
    assert "its shared settings are written later" in caplog.text


def test_settings_of_a_later_version_are_ignored() -> None:
    shared = SharedSettings()
    shared.take({"colour": "blue", "dedupe_window": "unreadable", "max_payload_bytes": "7"})
    assert (shared.dedupe_window_ms, shared.max_payload_bytes) == (3_600_000, 7)


@pytest.mark.parametrize(
    ("name", "text", "as_kept"),
    [
        ("dedupe_window", "2h", "7200000ms"),
        ("max_payload_bytes", "010", "10"),
        ("queue.a.b.lane_policy", "park", "park"),
    ],
)
def test_equal_values_are_equal_texts(name: str, text: str, as_kept: str) -> None:
    assert checked_setting(name, text) == as_kept
