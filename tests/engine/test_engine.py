"""The engine as a whole: takeovers, lost state, clean stops, backlogs; nothing lost, nothing twice without a fault."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Delivery, Outcome, Retry
from mainspring.model.errors import Conflict, Unavailable
from mainspring.model.task import Task
from mainspring.store.keys import partition_of
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, calls
from mainspring.testing.servers import Server, ServerCluster
from mainspring.testing.ticker import RecordingSink, Ticker
from tests.support.fleets import PARTITIONS

Tickers = Callable[..., Awaitable[Ticker]]


async def test_every_task_fires_once_at_its_time_in_order(ticker: Ticker, clock: ManualClock) -> None:
    start_ms = clock.now_ms()
    delays = [0, 1, 999, 1000, 1001, 2500, 59_999, 60_000, 3_599_999, 3_600_000, 7_200_001, 86_400_000]
    await ticker.client.put_many(Task("log:", ms, at=start_ms + ms) for ms in reversed(delays))
    fired = []
    for one in await ticker.advance(hours=25):
        assert one.due_ms == start_ms + one.value()
        fired.append(one.value())
    assert fired == delays
    assert (await balance(ticker.store)).done == len(delays)


async def test_the_counters_balance_at_every_step(ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Retry("x", after_ms=700) if one.value() % 5 == 0 and one.attempt < 3 else None)
    ids = []
    for n in range(60):
        handle = await ticker.client.put("log:", n, after=f"{n * 50}ms", lane=f"lane-{n % 4}" if n % 2 else None)
        ids.append(handle.id)
        if n % 7 == 0:
            await ticker.client.cancel(ids[n // 2])
        if n % 11 == 0:
            with suppress(Conflict):  # it may have left
                await ticker.client.reschedule(ids[n - n // 3], after="4s")
        await balance(ticker.store)
        await ticker.advance(ms=40)
        await balance(ticker.store)
    await ticker.advance(minutes=1)
    books = await balance(ticker.store)
    assert books.pending == books.fired == 0
    assert books.done + books.cancelled == 60


async def test_a_new_owner_delivers_again_what_was_fired_and_not_done(tickers: Tickers, store: Store) -> None:
    stuck = asyncio.Event()
    first = await tickers(handlers={"kafka": lambda _: _after(stuck)})
    await first.client.put("kafka:a", "stuck", after="1s")
    await first.client.put("log:", "done", after="1s")
    await first.turn()
    first.clock.advance(seconds=1)
    while len(first.deliveries) < 2:
        await first.engine.lookahead.step()
        await first.engine.dispatcher.step()
        await asyncio.sleep(0)
    while first.engine.deliveries.in_flight > 1:  # noqa: ASYNC110 - the other one hangs
        await asyncio.sleep(0)
    await first.engine.dispatcher.flush()
    assert (await balance(store)).fired == 1
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    assert [one.value() for one in await second.turn()] == ["stuck"]
    assert second.deliveries[0].idempotency_key in {one.idempotency_key for one in first.deliveries}
    books = await balance(store)
    assert (books.done, books.fired) == (2, 0)


async def _after(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_takeover_with_many_slices_fires_nothing_twice(tickers: Tickers, store: Store) -> None:
    """More slices than one listing shows: the bitmaps of all of them count."""
    # By this machine's clock a lease that no loaded machine uses up: time stands still on the server meanwhile.
    first = await tickers(options=EngineOptions(lease_s=300.0))
    seconds = 700
    start_ms = first.clock.now_ms()
    # One task of every second is never done: it keeps its slice alive. The others are in lanes of one partition: in one
    # lane each would wait for the one before, which is not looked at here.
    of_one = (name for n in count() if partition_of(name := f"x{n}", PARTITIONS) == partition_of("a", PARTITIONS))
    tasks = [Task("log:", n, at=start_ms + 1000 * n, lane=next(of_one) if n else "b") for n in range(seconds)]
    await first.client.put_many(tasks)
    await first.client.put_many(Task("http://stuck", n, at=start_ms + 1000 * n, lane=f"a{n}") for n in range(seconds))
    first.answer("http", lambda _: _after(asyncio.Event()))
    first.clock.advance(seconds=seconds)
    engine = first.engine
    await engine.keeper.step()
    async with asyncio.timeout(100):
        while sum(one.target == "log:" for one in first.deliveries) < seconds or engine.deliveries.in_flight != seconds:
            await engine.keeper.step()
            await engine.lookahead.step()
            await engine.dispatcher.step()
            await asyncio.sleep(0)
        while (await balance(store)).done < seconds:
            await engine.dispatcher.flush()
    await first.crash()
    assert (await balance(store)).done == seconds
    first.clock.advance(seconds=301)
    second = await tickers()
    again = await second.turn()
    assert Counter(one.target for one in again) == {"http://stuck": seconds}
    await balance(store)


async def test_a_fenced_owner_stops_and_the_other_continues(tickers: Tickers, store: Store) -> None:
    first = await tickers(options=EngineOptions(node="first"))
    await first.client.put_many(Task("log:", n, after=f"{n}s") for n in range(20))
    await first.turn()
    first.clock.advance(seconds=10)  # paused for longer than its lease
    second = await tickers(options=EngineOptions(node="second"))
    assert len(await second.turn()) == 10
    for _ in range(2):
        await first.engine.dispatcher.step()
    assert len(first.deliveries) == 1, "it had read them all, and may not fire one"
    await first.engine.keeper.step()
    assert not first.engine.owned
    assert len(await second.advance(seconds=10)) == 9
    assert (await balance(store)).done == 20


async def test_a_rolled_back_server_makes_the_owner_read_everything_again(ticker: Ticker, store: Store) -> None:
    """A failover to a replica that had not got the last writes: tasks come again, none is lost."""
    await ticker.client.put_many(Task("log:", n, after=f"{n // 10 * 100}ms") for n in range(400))
    await ticker.advance(seconds=1)
    dumps = await dump(store)
    await ticker.advance(seconds=1)
    await restore(store, dumps)
    await ticker.advance(seconds=3)
    fired = Counter(one.value() for one in ticker.deliveries)
    assert set(fired) == set(range(400))
    assert all(count <= 2 for count in fired.values())
    keys = Counter(one.idempotency_key for one in ticker.deliveries)
    assert len(keys) == 400, "what comes again carries the same key"
    assert (await balance(store)).done == 400


async def dump(store: Store) -> dict[int, list[tuple[bytes, bytes]]]:
    found: dict[int, list[tuple[bytes, bytes]]] = {}
    for keys in store.keys.partitions:
        primary = store.servers.for_slot(keys.slot)
        [names] = await primary.pipeline([("KEYS", "{" + keys.tag + "}*")])
        dumps = await primary.pipeline([("DUMP", name) for name in names])
        found[keys.number] = list(zip(names, dumps, strict=True))
    return found


async def restore(store: Store, dumps: dict[int, list[tuple[bytes, bytes]]]) -> None:
    for keys in store.keys.partitions:
        primary = store.servers.for_slot(keys.slot)
        [names] = await primary.pipeline([("KEYS", "{" + keys.tag + "}*")])
        if names:
            await primary.pipeline([("UNLINK", name) for name in names])
        await primary.pipeline([("RESTORE", name, 0, value) for name, value in dumps[keys.number]])


async def test_a_backlog_of_many_small_slices_is_worked_off(
    fleet: Server | ServerCluster, namespace: str, clock: ManualClock
) -> None:
    """Ten minutes of an outage: thousands of slices with a task or two, begun in as few calls as possible."""
    patient = EngineOptions(lease_s=300.0)  # one turn of this may take a loaded machine longer than a usual lease
    async with Ticker(fleet.url, namespace=namespace, partitions=32, clock=clock, options=patient) as ticker:
        start_ms = clock.now_ms()
        tasks = [Task("null:", n, at=start_ms + 1000 * (n // 128)) for n in range(128 * 300)]
        await ticker.client.put_many(tasks)
        clock.advance(seconds=400)
        await ticker.turn()
        assert (await balance(ticker.store)).done == len(tasks)
        await ticker.advance(seconds=5)
        for keys in ticker.store.keys.partitions:
            assert await ticker.store.run_one(keys.slot, [("ZCARD", keys.slices)]) == [0]


@pytest.mark.parametrize("fault", ["lose reply", "never sent"])
@pytest.mark.parametrize("script", ["tick", "acquire", "renew", "drop"])
async def test_any_call_may_fail_once_and_everything_fires_once(ticker: Ticker, script: str, fault) -> None:  # type: ignore[no-untyped-def]
    await ticker.client.put_many(Task("log:", n, after=f"{n * 300}ms") for n in range(20))
    with bad_road(ticker.store) as road:
        for _ in range(12):
            road.next(fault, only=calls(script))
            with suppress(Unavailable):
                await ticker.advance(ms=700)
    await ticker.advance(seconds=10)
    assert sorted(one.value() for one in ticker.deliveries) == list(range(20))
    assert (await balance(ticker.store)).done == 20


async def test_two_engines_share_the_partitions_without_a_double(tickers: Tickers, store: Store) -> None:
    first = await tickers(options=EngineOptions(node="first"))
    second = await tickers(options=EngineOptions(node="second"))
    first.engine.keeper.wanted = {0, 1}
    second.engine.keeper.wanted = {2, 3}
    await first.client.put_many(Task("log:", n, after="1s") for n in range(200))
    await asyncio.gather(first.turn(), second.turn())
    first.clock.advance(seconds=1)
    await asyncio.gather(first.turn(), second.turn())
    fired = [one.value() for one in first.deliveries + second.deliveries]
    assert sorted(fired) == list(range(200))
    assert first.deliveries
    assert second.deliveries


# -- running by itself, on the server's clock ----------------------------------------------------------------


class Running:
    """An engine with its loops, on real time."""

    def __init__(self, store: Store, **options: Any) -> None:
        self.store = store
        self.sink = RecordingSink()
        # A lease that no hiccup of a loaded machine uses up: what is repeated here is repeated by a mistake.
        self.engine = Engine(store, {"log": self.sink}, EngineOptions(lease_s=30.0, **options))
        self.client = Client.over(store)

    async def until(self, count: int) -> None:
        await until(lambda: len(self.sink.deliveries) >= count)

    async def at_rest(self) -> bool:
        """Everything that was ever put is done on the server, and nothing is held or under way here."""
        busy = self.engine.lookahead.held or self.engine.deliveries.in_flight
        return not busy and (await self.client.count()).pending == 0


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 60) -> None:
    """The one place here where time passes."""
    async with asyncio.timeout(seconds):
        while not (await met if isinstance(met := condition(), Awaitable) else met):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture
async def real(fleet: Server | ServerCluster, namespace: str):  # type: ignore[no-untyped-def]
    stores = []

    async def start(**options: Any) -> Running:
        store = await Store.open(fleet.url, namespace=namespace, partitions=4)
        stores.append(store)
        running = Running(store, **options)
        await running.engine.start()
        return running

    yield start
    for store in stores:
        await store.aclose()


async def test_a_near_put_wakes_the_owner(real) -> None:  # type: ignore[no-untyped-def]
    rarely_ms = 3_600_000
    running = await real(reach=Reach(poll_ms=rarely_ms, idle_poll_ms=rarely_ms))  # polling alone would take an hour
    for n in range(10):
        handle = await running.client.put("log:", n, after="20ms")
        await running.until(n + 1)
        assert running.store.clock.now_ms() >= handle.due_ms
    assert await running.engine.stop()


async def test_a_clean_stop_repeats_nothing(real) -> None:  # type: ignore[no-untyped-def]
    """Stopped in the middle of a stream, at any point; the next engine takes over at once."""
    seen: Counter[int] = Counter()
    count = 0
    for some in (1, 7, 30, 90):
        running = await real()
        for _ in range(10):
            await running.client.put_many(Task("log:", count + n, after=f"{n}ms") for n in range(200))
            count += 200
            # The stream continues until some more are delivered; fewer only if a slow machine left fewer.
            left = count - sum(seen.values()) - len(running.sink.deliveries)
            await running.until(len(running.sink.deliveries) + min(some, left))
        assert await running.engine.stop()
        seen.update(one.value() for one in running.sink.deliveries)
    last = await real()
    await until(last.at_rest)
    assert await last.engine.stop()
    seen.update(one.value() for one in last.sink.deliveries)
    assert set(seen) == set(range(count))
    assert set(seen.values()) == {1}
    assert (await balance(last.store)).done == count


async def test_a_stop_waits_for_what_is_in_flight(real) -> None:  # type: ignore[no-untyped-def]
    running = await real()
    gate = asyncio.Event()
    running.sink.handlers["log"] = lambda _: _after(gate)
    await running.client.put("log:", "slow")
    await running.until(1)
    asyncio.get_running_loop().call_later(0.1, gate.set)
    assert await running.engine.stop()
    assert (await balance(running.store)).done == 1


async def test_a_failure_that_comes_in_after_the_lease_is_not_placed_by_a_clock_that_may_have_jumped(
    ticker: Ticker,
) -> None:
    def answer(delivery: Delivery) -> Outcome:
        if len(ticker.deliveries) > 1:
            return DONE
        for partition in ticker.engine.owned.values():
            partition.lease_until = 0.0  # the node's clock jumped ahead: by that clock no lease lasts any longer
        return Retry("busy", after_ms=3_600_000)

    ticker.answer("log", answer)
    await ticker.client.put("log:", "x", after="1s")
    fired = await ticker.advance(seconds=30)
    assert [(one.attempt, one.idempotency_key) for one in fired] == [(1, fired[0].idempotency_key)] * 2


async def test_by_hand_the_clock_moves_on_when_nothing_is_due_any_more(ticker: Ticker) -> None:
    async def next_one(delivery: Delivery) -> Outcome:
        if (number := delivery.value()) < 5:
            await ticker.client.put("log:", number + 1)
        return DONE

    ticker.answer("log", next_one)
    await ticker.client.put("log:", 1, after="1s")
    assert [one.value() for one in await ticker.advance(minutes=1)] == [1, 2, 3, 4, 5]
    assert {one.due_ms for one in ticker.deliveries} == {ticker.deliveries[0].due_ms}
