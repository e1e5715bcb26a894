"""Those that are held back step aside, and are moved a few at a time; nobody waits for that."""

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from mainspring.engine import dispatcher
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]


async def one_tick(ticker: Ticker) -> None:
    engine = ticker.engine
    await engine.pauses.step()
    await engine.dispatcher.step()


@pytest.fixture
async def paused(ticker: Ticker, store: Store, monkeypatch: pytest.MonkeyPatch) -> Ticker:
    """300 tasks of a paused target and 300 of another are due; ten at a time are moved into hold slices."""
    monkeypatch.setattr(dispatcher, "SPILL_TASKS", 10)
    await ticker.client.put_many(
        Task(f"kafka:{name}", name, after="1s") for _ in range(300) for name in ("held", "free")
    )
    await ticker.turn()
    await ticker.client.pause(target="kafka:held")
    ticker.clock.advance(seconds=1)
    await one_tick(ticker)
    return ticker


def aside(ticker: Ticker) -> int:
    return sum(partition.held_work.aside.count for partition in ticker.engine.owned.values())


async def test_the_others_leave_before_those_are_moved(paused: Ticker) -> None:
    for _ in range(3):
        await one_tick(paused)
    await paused.engine.dispatcher.drain()
    assert Counter(one.value() for one in paused.deliveries) == {"free": 300}
    assert aside(paused) >= 300 - 5 * 10
    assert paused.engine.lookahead.held == aside(paused), "they count as what is in memory"


async def test_in_the_end_all_are_moved_and_come_back(paused: Ticker, store: Store) -> None:
    await paused.turn()
    assert aside(paused) == 0
    assert (await balance(store)).spilled == 300
    await paused.client.resume(target="kafka:held")
    await paused.turn()
    assert Counter(one.value() for one in paused.deliveries) == {"free": 300, "held": 300}


async def test_those_not_moved_yet_step_back_when_the_hold_ends(paused: Ticker, store: Store) -> None:
    await one_tick(paused)
    spilled = (await balance(store)).spilled
    assert spilled <= 20
    await paused.client.resume(target="kafka:held")
    await paused.turn()
    assert Counter(one.value() for one in paused.deliveries) == {"free": 300, "held": 300}
    assert paused.engine.commits.moved <= 40, "most never left their slice"


async def test_one_that_is_cancelled_meanwhile_does_not_fire(ticker: Ticker, store: Store) -> None:
    await ticker.client.put("kafka:held", id="gone", after="1s")
    await ticker.client.put("kafka:held", id="stays", after="1s")
    await ticker.turn()
    await ticker.client.pause(target="kafka:held")
    ticker.clock.advance(seconds=1)
    await ticker.engine.pauses.step()
    for partition in ticker.engine.owned.values():
        partition.begin(ticker.clock.now_ms(), 100, commit=False)
    assert aside(ticker) == 2
    assert await ticker.client.cancel("gone") == "cancelled"
    await ticker.turn()
    await ticker.client.resume(target="kafka:held")
    await ticker.turn()
    assert [one.id for one in ticker.deliveries] == ["stays"]
    books = await balance(store)
    assert (books.done, books.cancelled, books.pending) == (1, 1, 0)
