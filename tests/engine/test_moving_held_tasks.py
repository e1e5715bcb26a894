"""Held tasks step aside, and are moved a few at a time; other tasks do not wait for that."""

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from mainspring.engine import dispatcher
from mainspring.model.delivery import Body
from mainspring.model.task import Task
from mainspring.store.codec import RESENT, entry
from mainspring.store.keys import HOUR_MS, Slice
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
    return sum(partition.hold_policy.aside for partition in ticker.engine.owned.values())


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


async def test_tasks_not_moved_yet_step_back_when_the_hold_ends(paused: Ticker, store: Store) -> None:
    await one_tick(paused)
    spilled = (await balance(store)).spilled
    assert spilled <= 20
    await paused.client.resume(target="kafka:held")
    await paused.turn()
    assert Counter(one.value() for one in paused.deliveries) == {"free": 300, "held": 300}
    assert paused.engine.dispatcher.moved <= 40, "most never left their slice"


async def test_a_task_that_is_cancelled_while_it_is_held_does_not_fire(ticker: Ticker, store: Store) -> None:
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


@pytest.mark.parametrize("read_to_the_end", [False, True])
async def test_tasks_whose_slice_is_read_again_meanwhile_step_back_once(
    paused: Ticker, store: Store, read_to_the_end: bool
) -> None:
    """A put that was sent twice makes the owner read the whole slice again."""
    lookahead = paused.engine.lookahead
    place = Slice.at(paused.clock.now_ms(), 1000)
    for keys in store.keys.partitions:
        late = entry(
            paused.clock.now_ms() - place.start_ms, RESENT, b"%016d" % keys.number, Body("kafka:free", b'"late"')
        )
        put = ("RPUSH", keys.slice_keys(place.name)[0], late)
        await store.run_one(keys.slot, [put, ("HINCRBY", keys.n, "accepted", 1)])
    lookahead.reconnected()
    await lookahead.step()
    while read_to_the_end and await lookahead.step() == 0.0:
        pass
    assert aside(paused) > 200
    await paused.client.resume(target="kafka:held")
    await one_tick(paused)
    await paused.turn()
    delivered = Counter(one.value() for one in paused.deliveries)
    assert delivered == {"free": 300, "held": 300, "late": len(store.keys.partitions)}
    assert (await balance(store)).dead == 0


async def test_tasks_of_an_hour_slice_step_back_although_its_next_window_is_read(
    ticker: Ticker, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "SPILL_TASKS", 10)
    start_ms = (ticker.clock.now_ms() // HOUR_MS + 2) * HOUR_MS
    await ticker.client.put_many(Task("kafka:held", n, id=f"h{n}", at=start_ms + 283_000) for n in range(300))
    await ticker.client.put_many(Task("kafka:free", n, id=f"f{n}", at=start_ms + 600_000) for n in range(40))
    ticker.clock.set(start_ms)
    await ticker.turn()
    await ticker.client.pause(target="kafka:held")
    ticker.clock.set(start_ms + 299_000)
    await one_tick(ticker)
    hours = [live for one in ticker.engine.owned.values() for live in one.lives if not live.slice.is_hold]
    windows = [live.low for live in hours]
    while await ticker.engine.lookahead.step() == 0.0:
        pass
    assert all(live.low > before for live, before in zip(hours, windows, strict=True)), "no window was opened"
    await ticker.client.resume(target="kafka:held")
    await ticker.turn()
    assert Counter(one.target for one in ticker.deliveries) == {"kafka:held": 300}
    books = await balance(store)
    assert (books.dead, books.pending) == (0, 40)
