"""Thousands of lanes that come to stand still, or go on, at once: nobody else waits for that."""

from collections.abc import Awaitable, Callable

import pytest

from mainspring.engine import dispatcher, hold_watch, partition
from mainspring.engine.engine import EngineOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]

LANES = 200
EACH = 3


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in proportion to a test's: one commit of ten moves a step, four lanes of a partition back at a time."""
    monkeypatch.setattr(dispatcher, "MOVE_S", 0.0)
    monkeypatch.setattr(partition, "MOST_MOVES", 10)
    monkeypatch.setattr(hold_watch, "LANES_AT_ONCE", 4)


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
    return sum(one.held_work.standing for one in ticker.engine.owned.values())


def arrived(ticker: Ticker) -> dict[int, list[int]]:
    """By lane, what was delivered, in this order."""
    lanes: dict[int, list[int]] = {}
    for lane, n in (one.value() for one in ticker.deliveries if one.value() != "free"):
        lanes.setdefault(lane, []).append(n)
    return lanes


async def test_the_others_leave_while_lanes_are_moved_aside(paused: Ticker) -> None:
    engine = paused.engine
    steps = 0
    while sum(one.value() == "free" for one in paused.deliveries) + engine.deliveries.in_flight < 8:
        await engine.dispatcher.step()
        steps += 1
        assert steps < 10, "they wait for tasks that are moved"
    assert engine.commits.moved <= steps * partition.MOST_MOVES, "one commit a step"
    assert standing(paused) >= LANES * EACH - steps * partition.MOST_MOVES


async def test_what_waits_to_be_moved_counts_as_what_is_in_memory(paused: Ticker) -> None:
    for _ in range(3):
        await paused.engine.dispatcher.step()
    moved = paused.engine.commits.moved
    assert 0 < moved < LANES * EACH
    assert paused.engine.lookahead.held == standing(paused) == LANES * EACH - moved


async def test_lanes_come_back_a_few_at_a_time_and_in_their_order(paused: Ticker, store: Store) -> None:
    engine = paused.engine
    await paused.turn()
    assert (await balance(store)).spilled == LANES * EACH
    await paused.client.resume(target="kafka:held")
    await engine.pauses.step()
    await engine.lookahead.step()
    back = [sum(place.is_hold for place in one.slices) for one in engine.owned.values()]
    assert 0 < max(back) <= hold_watch.LANES_AT_ONCE
    while len(arrived(paused)) < LANES or await engine.sweeper.drop_finished():
        before = len(paused.deliveries)
        await paused.turn()
        assert len(paused.deliveries) > before, "those that wait are forgotten"
    assert all(some == list(range(EACH)) for some in arrived(paused).values())
    assert (await balance(store)).pending == 0


async def test_a_new_owner_lets_many_lanes_go_on(paused: Ticker, tickers: Tickers, store: Store) -> None:
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
