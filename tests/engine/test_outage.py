"""The server is full, gone, or back with an old state: clear errors, no loss, and recovery without help."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.client.sync import SyncClient
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.errors import OutOfMemory, Refused, TaskFailed, Unavailable
from mainspring.model.task import Task
from mainspring.store.redis.servers import LinkOptions
from mainspring.store.store import Store
from mainspring.store.verify.keys import check_keys, check_types
from mainspring.testing.balance import balance
from mainspring.testing.faults import NetworkFaults, bad_road
from mainspring.testing.servers import Kind, Server, standalone, wait_until
from mainspring.testing.ticker import RecordingSink, Ticker

QUICK = LinkOptions(connect_timeout_s=10, timeout_s=20)


@pytest.fixture
def server(kind: Kind) -> Iterator[Server]:
    """A server of the test's own: it is filled, killed and started again."""
    with standalone(kind, aof=True, extra_config={"appendfsync": "always", "maxmemory-policy": "noeviction"}) as one:
        yield one


async def fill(ticker: Ticker, server: Server) -> int:
    """Put until the server takes no more; return how many it took."""
    used = int(server.info("memory")["used_memory"])
    server.call("CONFIG", "SET", "maxmemory", used + 3_000_000)
    taken = 0
    for n in range(1_000):
        try:
            await ticker.client.put_many(Task("log:", "x" * 1_000, after=f"{1 + n % 5}s") for _ in range(100))
        except OutOfMemory:
            return taken
        taken += 100
    raise AssertionError("the server did not fill up")


async def test_a_full_server_refuses_puts_whole_and_keeps_firing(server: Server) -> None:
    async with Ticker(server.url) as ticker:
        handle = await ticker.client.put("log:", "early", id="before", after="1s")
        lane = await ticker.client.put("log:", "lane", lane="a", after="2s")
        await fill(ticker, server)
        before = await balance(ticker.store)
        # Hours ahead, so that memory for a new slice is needed in any case.
        server.call("CONFIG", "SET", "maxmemory", int(server.info("memory")["used_memory"]) // 2)
        for task in (Task("log:", after="5h"), Task("log:", id="new", after="5h"), Task("log:", lane="b", after="5h")):
            with pytest.raises(OutOfMemory, match="takes no new tasks") as refused:
                await ticker.client.put_many([task])
            assert refused.value.stored == 0
        with pytest.raises(OutOfMemory):
            await ticker.client.put("log:", id="before", after="5h", on_conflict="replace")
        assert await balance(ticker.store) == before, "a refused put leaves no trace"
        assert await ticker.client.cancel(lane.id) == "cancelled"
        fired = await ticker.advance(seconds=6)
        assert len(fired) == before.pending - 1
        assert (await ticker.client.get(handle.id)).state in ("done", "finished")
        await ticker.advance(seconds=5)
        assert (await balance(ticker.store)).pending == 0
        server.call("CONFIG", "SET", "maxmemory", int(server.info("memory")["used_memory"]) + 1_000_000)
        assert (await ticker.client.put("log:", after="5h")).outcome == "created"


@pytest.mark.parametrize("handles", [True, False])
async def test_a_call_that_a_full_server_refuses_midway_reports_what_is_stored(server: Server, handles: bool) -> None:
    tasks = [Task("log:", "x" * 1_000, after="5h", id=f"id-{n}" if n % 2 else None) for n in range(6_000)]
    async with Ticker(server.url) as ticker:
        server.call("CONFIG", "SET", "maxmemory", int(server.info("memory")["used_memory"]) + 3_000_000)
        with pytest.raises(OutOfMemory, match="tasks of this call are stored") as refused:
            await ticker.client.put_many(tasks, handles=handles)
        server.call("CONFIG", "SET", "maxmemory", 0)
        error = refused.value
        assert 0 < error.stored < len(tasks)
        assert (await balance(ticker.store)).pending == error.stored
        assert error.handles is not None
        assert len(error.handles) == len(tasks)
        rest = [task for task, handle in zip(tasks, error.handles, strict=True) if handle is None]
        assert len(rest) == len(tasks) - error.stored
        await ticker.client.put_many(rest)
        assert (await balance(ticker.store)).pending == len(tasks)


async def test_a_server_that_refuses_writes_still_answers_questions(server: Server) -> None:
    async with Ticker(server.url) as ticker:
        await ticker.client.put("log:", 1, id="a", after="1h")
        server.call("CONFIG", "SET", "min-replicas-to-write", 1)
        with pytest.raises(Refused, match="NOREPLICAS"):
            await ticker.client.put("log:", 2, id="b")
        assert (await ticker.client.get("a")).state == "pending"
        assert (await ticker.client.explain("a")).code == "not-due"
        assert (await ticker.client.dead_list()).letters == []
        assert [one async for one in check_types(ticker.store)] == []
        assert [one async for one in check_keys(ticker.store, set())] == []
        server.call("CONFIG", "SET", "min-replicas-to-write", 0)


async def test_a_node_can_start_on_a_full_server(server: Server) -> None:
    """Firing frees memory: a node that could not even start would leave the server full for ever."""
    clock = ManualClock()
    async with Ticker(server.url, clock=clock) as first:
        await first.client.put("log:", "waits", after="1s")
    server.call("CONFIG", "SET", "maxmemory", 1_000_000)
    async with Ticker(server.url, clock=clock) as second:
        assert [one.value() for one in await second.advance(seconds=1)] == ["waits"]


async def test_puts_to_an_unavailable_server_fail_clearly(server: Server) -> None:
    async with Client(server.url, options=QUICK) as client:
        server.kill()
        for task in (Task("log:"), Task("log:", id="id"), Task("log:", lane="a")):
            with pytest.raises(Unavailable, match=r"connect|closed|broke"):
                await client.put_many([task])
        with pytest.raises(Unavailable):
            await client.get("id")
        with pytest.raises(Unavailable):
            await client.cancel("id")
        server.restart()
        assert (await client.put("log:", id="id")).outcome == "created"


async def test_puts_wait_for_the_server_by_option(server: Server) -> None:
    async with Client(server.url, options=QUICK, wait_s=60) as client:
        await client.put("log:", id="known", after="1h")
        server.kill()
        with bad_road(client.store) as road:
            waiting: list[asyncio.Task[Any]] = [
                asyncio.create_task(client.put("log:", "plain", after="1h")),
                asyncio.create_task(client.put("log:", "named", id="new", after="1h")),
                asyncio.create_task(client.put("log:", "other", id="known", after="2h", on_conflict="replace")),
                asyncio.create_task(client.put_many(Task("log:", "bulk", after="1h") for _ in range(1_000))),
            ]
            # A call that does not wait gives up after its second attempt.
            words = (b"plain", b"named", b"other", b"bulk")
            await until(lambda: any(task.done() for task in waiting) or all(attempts(road, word) > 5 for word in words))
            assert not any(task.done() for task in waiting)
        await asyncio.to_thread(server.restart)
        await asyncio.gather(*waiting)
        assert (await client.count()).pending == 1_003
        await balance(client.store)


@pytest.mark.parametrize(("wait_s", "at_most"), [(0, "60s"), (60, None)])
async def test_waiting_for_a_result_includes_waiting_for_the_server(
    server: Server, wait_s: int, at_most: str | None
) -> None:
    async with Client(server.url, options=QUICK, wait_s=wait_s) as client:
        handle = await client.put("log:", id="waits", after="1h")
        waiting = asyncio.create_task(handle.result(timeout=at_most))
        for _ in range(2):
            server.kill()
            with bad_road(client.store) as road:
                await until(lambda: waiting.done() or len(road.trips) > 5)  # all in vain
            assert not waiting.done()
            await asyncio.to_thread(server.restart)
        assert await client.cancel("waits") == "cancelled"
        with pytest.raises(TaskFailed, match="cancelled before it ran"):
            await waiting


async def test_a_result_without_a_timeout_waits_as_long_as_a_put(server: Server) -> None:
    async with Client(server.url, options=QUICK) as client:
        handle = await client.put("log:", id="waits", after="1h")
        server.kill()
        with pytest.raises(Unavailable):
            await handle.result()
        with pytest.raises(TimeoutError, match=r"not over after 0\.2, and the server is unavailable: .*connect"):
            await handle.result(timeout=0.2)
        with pytest.raises(Unavailable):
            await client.find_result("waits")


def test_a_blocking_wait_for_a_result_waits_for_the_server_too(server: Server) -> None:
    with SyncClient(server.url, options=QUICK) as client, ThreadPoolExecutor(1) as threads:
        handle = client.put("log:", id="waits", after="1h")
        server.kill()
        with bad_road(client._client.store) as road:
            waiting = threads.submit(handle.result, timeout=60)
            wait_until(lambda: waiting.done() or len(road.trips) > 5, "it has asked in vain")
        assert not waiting.done()
        server.restart()
        assert client.cancel("waits") == "cancelled"
        with pytest.raises(TaskFailed, match="cancelled before it ran"):
            waiting.result(60)


def attempts(road: NetworkFaults, word: bytes) -> int:
    """How often a task with this in its payload was sent, or would have been if there was a server."""
    return sum(
        any(word in part for command in commands for part in command if isinstance(part, bytes))
        for _, commands in road.trips
    )


async def test_a_connection_that_breaks_under_a_put_loses_and_doubles_nothing(server: Server) -> None:
    store = await Store.open(server.url, options=QUICK)
    client = Client.over(store, wait_s=60)
    sink = RecordingSink()
    engine = Engine(store, {"log": sink}, EngineOptions(lease_s=2))
    await engine.start()

    async def breaker() -> None:
        """Between two breaks either a put or a delivery gets through: both are broken while they are at work."""
        for n in range(15):
            put, fired = count, len(sink.deliveries)
            await until(lambda: len(sink.deliveries) > fired if n % 2 else count > put)  # noqa: B023
            await asyncio.to_thread(server.call, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    count = 0
    breaking = asyncio.create_task(breaker())
    while not breaking.done():
        await client.put_many(Task("log:", count + n, after="30ms") for n in range(50))
        count += 50
    await breaking
    await until(lambda: len({one.value() for one in sink.deliveries}) == count)
    assert engine.crashed is None
    await engine.stop()
    seen = Counter(one.value() for one in sink.deliveries)
    assert set(seen) == set(range(count))
    assert len({one.idempotency_key for one in sink.deliveries}) == count
    await balance(store)
    await store.aclose()


async def test_a_node_recovers_by_itself_when_its_server_comes_back(server: Server) -> None:
    store = await Store.open(server.url, options=QUICK)
    client = Client.over(store)
    sink = RecordingSink()
    engine = Engine(store, {"log": sink}, EngineOptions(lease_s=2))
    await engine.start()
    await client.put_many(Task("log:", n, after=f"{n * 10}ms") for n in range(100))
    await until(lambda: len(sink.deliveries) > 10)
    server.kill()
    with bad_road(store) as road:
        await until(lambda: len(road.trips) > 5)  # all in vain
    await until(lambda: not engine.healthy)
    assert engine.crashed is None
    await asyncio.to_thread(server.restart)
    await until(lambda: {one.value() for one in sink.deliveries} == set(range(100)))
    await until(lambda: engine.healthy)
    await client.put("log:", "after")
    await until(lambda: sink.deliveries[-1].value() == "after")
    assert len({one.idempotency_key for one in sink.deliveries}) == 101
    assert await engine.stop()
    assert (await balance(store)).done == 101
    await store.aclose()


async def test_a_server_that_hangs_is_noticed_and_its_tasks_fire_later(server: Server) -> None:
    store = await Store.open(server.url, options=LinkOptions(connect_timeout_s=3, timeout_s=3))
    client = Client.over(store)
    sink = RecordingSink()
    engine = Engine(store, {"log": sink}, EngineOptions(lease_s=1))
    await engine.start()
    await client.put_many(Task("log:", n, after=f"{n * 20}ms") for n in range(50))
    await until(lambda: len(sink.deliveries) > 3)
    server.pause()
    with pytest.raises(Unavailable):
        await client.put("log:", "hangs")
    await until(lambda: not engine.owned)
    await until(lambda: not engine.healthy)
    assert engine.crashed is None
    server.resume()
    await until(lambda: {one.value() for one in sink.deliveries} >= set(range(50)))
    async with asyncio.timeout(60):
        while (await balance(store)).pending:
            pass  # what hung was stored after all, perhaps in another partition
    assert await engine.stop()
    books = await balance(store)
    assert books.pending == books.fired == 0
    await store.aclose()


async def test_an_emptied_server_is_no_crash(server: Server) -> None:
    store = await Store.open(server.url, options=QUICK)
    sink = RecordingSink()
    # Renewed every second, so that the tasks that are gone come due before the keeper can notice.
    engine = Engine(store, {"log": sink}, EngineOptions(lease_s=3))
    await engine.start()
    client = Client.over(store)

    async def held(fired: int) -> bool:
        """A standstill of the machine may use up their time."""
        await client.put_many(Task("log:", n, after="600ms") for n in range(20))
        await until(lambda: engine.lookahead.held == 20 or len(sink.deliveries) == fired + 20)
        return engine.lookahead.held == 20

    while not await held(len(sink.deliveries)):
        pass
    server.call("FLUSHALL")
    await until(lambda: engine.crashed is not None or engine.keeper.takeovers >= 2 * len(store.keys))
    assert engine.crashed is None
    await client.put("log:", "new")
    await until(lambda: bool(sink.deliveries) and sink.deliveries[-1].value() == "new")
    assert engine.crashed is None
    await engine.stop()
    await store.aclose()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """The one place here where time passes."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
