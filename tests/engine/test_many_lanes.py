"""Thousands of lanes that stall or resume at once: other tasks do not wait for that."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec import json

from mainspring.engine import dispatcher, due, lookahead, partition
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.engine.holds import FEW_BEHIND
from mainspring.engine.lookahead import LANE_WINDOW, Reach
from mainspring.engine.partition import BeginCall
from mainspring.model.delivery import Retry
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import TARGET, HandWorker

Tickers = Callable[..., Awaitable[Ticker]]

LANES = 200
EACH = 3


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in proportion to a test's: one commit of ten moves a step, four lanes of a partition back at a time."""
    monkeypatch.setattr(dispatcher, "ROUND_OUTCOMES", 1)
    monkeypatch.setattr(partition, "MOST_MOVES", 10)
    monkeypatch.setattr(lookahead, "LANES_AT_ONCE", 4)


@pytest.fixture
async def paused(ticker: Ticker, store: Store, few_at_a_time: None) -> Ticker:
    """Tasks of many lanes to a paused target and a few to another are due."""
    held = [Task("kafka:held", (lane, n), lane=f"l{lane}", after="1s") for n in range(EACH) for lane in range(LANES)]
    free = [Task("log:", "free", after="1s") for _ in range(8)]
    await ticker.client.put_many(held + free)
    await ticker.turn()
    await ticker.client.pause(target="kafka:held")
    ticker.clock.advance(seconds=1)
    await ticker.engine.pauses.step()
    return ticker


def standing(ticker: Ticker) -> int:
    return sum(one.hold_policy.standing for one in ticker.engine.owned.values())


def in_memory(ticker: Ticker) -> int:
    return standing(ticker) + sum(one.lanes.behind for one in ticker.engine.owned.values())


def arrived(ticker: Ticker) -> dict[int, list[int]]:
    """By lane, what was delivered, in this order."""
    by_lane: dict[int, list[int]] = {}
    for lane, n in (one.value() for one in ticker.deliveries if one.value() != "free"):
        by_lane.setdefault(lane, []).append(n)
    return by_lane


async def test_the_others_leave_while_lanes_are_moved_aside(paused: Ticker) -> None:
    engine = paused.engine
    steps = 0
    while sum(one.value() == "free" for one in paused.deliveries) + engine.deliveries.in_flight < 8:
        await engine.dispatcher.step()
        steps += 1
        assert steps < 10, "they wait for tasks that are moved"
    assert engine.dispatcher.moved <= steps * partition.MOST_MOVES, "one commit a step"
    assert in_memory(paused) >= LANES * EACH - steps * partition.MOST_MOVES


async def test_tasks_that_wait_to_be_moved_count_as_in_memory(paused: Ticker, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        await paused.engine.dispatcher.step()
    moved = paused.engine.dispatcher.moved
    assert 0 < moved < LANES * EACH
    assert in_memory(paused) == LANES * EACH - moved
    assert paused.engine.lookahead.held == standing(paused), "lanes have their own bound"
    monkeypatch.setattr(lookahead, "MOST_IN_LANES", 0)
    assert paused.engine.lookahead.held == LANES * EACH - moved, "and beyond it nothing more is read"


async def test_lanes_come_back_a_few_at_a_time_and_in_their_order(paused: Ticker, store: Store) -> None:
    engine = paused.engine
    await paused.turn()
    assert (await balance(store)).spilled == LANES * EACH
    await paused.client.resume(target="kafka:held")
    await engine.pauses.step()
    await engine.lookahead.step()
    back = [sum(live.slice.is_hold for live in one.lives) for one in engine.owned.values()]
    assert 0 < max(back) <= lookahead.LANES_AT_ONCE
    while len(arrived(paused)) < LANES or await engine.sweeper.drop_finished():
        before = len(paused.deliveries)
        await paused.turn()
        assert len(paused.deliveries) > before, "those that wait are forgotten"
    assert all(some == list(range(EACH)) for some in arrived(paused).values())
    assert (await balance(store)).pending == 0


async def test_a_new_owner_resumes_many_lanes(paused: Ticker, tickers: Tickers, store: Store) -> None:
    await paused.turn()
    await paused.client.resume(target="kafka:held")
    await paused.engine.keeper.release()
    second = await tickers(options=EngineOptions(reach=Reach(tasks=1_000)))
    for _ in range(LANES):
        await second.turn()
        if len(second.deliveries) == LANES * EACH:
            break
    assert all(some == list(range(EACH)) for some in arrived(second).values())
    assert (await balance(store)).pending == 0


async def nothing_in_flight(engine: Engine) -> None:
    while engine.deliveries.in_flight:  # noqa: ASYNC110 - deliveries tell nothing
        await asyncio.sleep(0)


async def test_many_failures_at_once_are_written_while_others_leave(
    tickers: Tickers, store: Store, few_at_a_time: None
) -> None:
    """A step writes a few outcomes; the others wait, and what is due leaves in between."""
    # A long lease: a machine that stalls for seconds must not cost the partitions.
    options = EngineOptions(lease_s=300.0)
    ticker = await tickers(handlers={"kafka": lambda _: Retry("broken", after_ms=60_000)}, options=options)
    engine = ticker.engine
    await ticker.client.put_many(Task("kafka:broken", n, id=f"b{n}", after="1s") for n in range(64))
    await ticker.client.put_many(Task("log:", "free", id=f"f{n}", after="1200ms") for n in range(8))
    await ticker.turn()
    ticker.clock.advance(seconds=1)
    await engine.dispatcher.step()
    await nothing_in_flight(engine)
    failed = [one for one in engine.owned.values() if one.unwritten]
    assert len(failed) > 2, "failures in several partitions"
    ticker.clock.advance(ms=200)
    await engine.dispatcher.step()
    assert 0 < sum(one.unwritten for one in failed) < 64, "some are written, not all"
    await nothing_in_flight(engine)
    assert sum(one.value() == "free" for one in ticker.deliveries) == 8, "nobody waits for that"
    await engine.dispatcher.drain()
    books = await balance(store)
    assert (books.pending, books.retried, books.done) == (64, 64, 8)


async def test_behind_a_head_that_runs_for_long_memory_stays_bounded_and_the_order_is_kept(
    tickers: Tickers, store: Store
) -> None:
    ticker = await tickers(workers=True, options=EngineOptions(reach=Reach(tasks=128)))
    worker = HandWorker(ticker.store)
    await ticker.client.put(TARGET, "head", id="head", lane="a")
    await ticker.turn()
    running = await worker.take_one()
    await ticker.client.put_many(Task(TARGET, n, id=f"n{n}", lane="a", after=f"{1_000 + n}ms") for n in range(400))
    for passed_ms in (*[40] * 50, *[1_000] * 10):  # some at a time: none alone at its millisecond matters here
        ticker.clock.advance(ms=passed_ms)
        await ticker.turn()
        behind = sum(one.lanes.behind for one in ticker.engine.owned.values())
        assert behind + ticker.engine.lookahead.held <= 128 + LANE_WINDOW + FEW_BEHIND
    assert (await balance(store)).spilled > 200
    told = await ticker.client.explain("n350", lane="a")
    assert (told.code, told.head_id) == ("behind-head", "head")
    ran: list[object] = []
    while True:
        assert await worker.end(running) == ["ok"]
        ran.append(json.decode(running.body.payload))
        await ticker.turn()
        if len(ran) > 400:
            break
        running = await worker.take_one()
    assert ran == ["head", *range(400)]
    assert (await balance(store)).done == 401


async def test_lanes_that_resume_at_once_from_many_slices_leave_in_several_calls(
    ticker: Ticker, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "LANE_SLICES", 3)
    heads = [Task("log:", "head", lane=f"l{n}", after="1s") for n in range(40)]
    await ticker.client.put_many(heads + [Task("log:", n, lane=f"l{n}", after=f"{2 + n}s") for n in range(40)])
    ticker.clock.advance(seconds=60)
    touched: list[int] = []
    begin = partition.Partition.begin

    def watched(self: partition.Partition, *args: int, **how: bool) -> BeginCall | None:
        begun = begin(self, *args, **how)
        if begun is not None and all(flight.value() != "head" for flight in begun.flights):
            touched.append(sum(bool(touch.f) for touch in begun.section.touches))
        return begun

    monkeypatch.setattr(partition.Partition, "begin", watched)
    await ticker.turn()
    assert len(ticker.deliveries) == 80
    assert max(touched) <= 3
    assert (await balance(store)).done == 80
