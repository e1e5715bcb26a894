"""Reading: bounded memory, nothing left out, damaged entries to the dead letters, big slices beside small ones."""

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Body, Delivery
from mainspring.model.errors import Unavailable
from mainspring.model.task import Task
from mainspring.store.codec import FORWARD, LANE, RESENT, TOMBSTONE, entry
from mainspring.store.keys import HOUR_MS, Slice, partition_of
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.tasks.put import fresh_score
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, uses
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner

Tickers = Callable[..., Awaitable[Ticker]]


def lane_in(store: Store, partition: int) -> str:
    return next(lane for lane in map(str, range(10_000)) if partition_of(lane, len(store.keys)) == partition)


async def append(store: Store, place: Slice, *rows: bytes, partition: int = 0) -> None:
    """Write entries as any client in any language may."""
    owner = HandOwner(store, partition, b"")
    await owner.raw("ZADD", owner.keys.slices, "NX", fresh_score(place), place.name)
    await owner.raw("RPUSH", owner.keys.entries(place.name), *rows)
    await owner.raw("HINCRBY", owner.keys.n, "accepted", len(rows))


GOOD = entry(500, 0, b"\7" * 16, Body("log:", b'"good"'))
ENTRY_OF_35 = entry(500, 0, b"\7" * 16, Body("log:", b'"long"'))
DAMAGED = {
    "empty": b"",
    "short": b"\0\0\1",
    "as long as what a cancel leaves": b"junk",
    "no body": GOOD[:21],
    "half a header": GOOD[:13],
    "cut body": GOOD[:-3],
    "trailing bytes": GOOD + b"\x01",
    "not msgpack": GOOD[:21] + b"\xc1\xc1",
    "wrong types": GOOD[:21] + msgspec.msgpack.encode([1, 2]),
    "not text": GOOD[:21] + b"\x92\xa4\xff\xff\xff\xff\xc4\x01x",
    "offset beyond the slice": b"\xff\xff\xff\xff" + GOOD[4:],
    "a map": GOOD[:21] + msgspec.msgpack.encode({"target": "log:"}),
    "lane flag on rubbish": GOOD[:4] + bytes([LANE]) + GOOD[5:21] + b"rubbish",
    "two bodies": GOOD + GOOD[21:],
    "tombstone flag and a body": GOOD[:4] + bytes([TOMBSTONE]) + GOOD[5:],
    "flags of a mark and a body": GOOD[:4] + bytes([TOMBSTONE | FORWARD]) + GOOD[5:],
    "the same, as long as a mark": ENTRY_OF_35[:4] + bytes([TOMBSTONE | FORWARD]) + ENTRY_OF_35[5:],
    "flags of a resent tombstone and a body": GOOD[:4] + bytes([TOMBSTONE | RESENT]) + GOOD[5:],
    "all flags": GOOD[:4] + b"\xff" + GOOD[5:],
}


@pytest.mark.parametrize("damage", DAMAGED)
async def test_a_damaged_entry_goes_to_the_dead_letters_and_the_rest_fires(
    ticker: Ticker, clock: ManualClock, damage: str
) -> None:
    place = Slice.at(clock.now_ms() + 2_000, 1000)
    before, after = (GOOD[:5] + bytes([n]) * 16 + GOOD[21:] for n in (1, 2))
    await append(ticker.store, place, before, DAMAGED[damage], after)
    fired = await ticker.advance(seconds=10)
    assert sorted(one.idh[0] for one in fired) == [1, 2]
    [dead_letter] = await list_dead(ticker.store)
    assert dead_letter.entry == DAMAGED[damage]
    assert "cannot be read" in dead_letter.reason
    books = await balance(ticker.store)
    assert (books.done, books.dead) == (2, 1)


async def test_the_remains_of_a_cancel_are_not_mistaken_for_damage_also_after_a_lost_reply(
    ticker: Ticker, clock: ManualClock
) -> None:
    place = Slice.at(clock.now_ms() + 2_000, 1000)
    await append(ticker.store, place, b"junk", GOOD)
    names = [name for name in map(str, range(10_000)) if partition_of(name, len(ticker.store.keys)) == 0][:3]
    await ticker.client.put_many(Task("log:", name, at=place.start_ms, id=name) for name in names)
    await ticker.client.cancel_many(names[:2])
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("GETRANGE"))
        with pytest.raises(Unavailable):
            await ticker.advance(seconds=2)
    assert [one.value() for one in await ticker.advance(seconds=10)] == [names[2], "good"]
    assert [dead_letter.entry for dead_letter in await list_dead(ticker.store)] == [b"junk"]
    books = await balance(ticker.store)
    assert (books.done, books.dead, books.cancelled) == (2, 1, 2)


async def test_every_damaged_entry_keeps_a_dead_letter_of_its_own(ticker: Ticker, clock: ManualClock) -> None:
    place = Slice.at(clock.now_ms() + 2_000, 1000)
    await append(ticker.store, place, *[b""] * 3, *[GOOD[:21]] * 2)
    await ticker.advance(seconds=10)
    assert len(await list_dead(ticker.store)) == 5
    assert (await balance(ticker.store)).dead == 5


async def test_all_entries_damaged_is_no_reason_to_stop(ticker: Ticker, clock: ManualClock) -> None:
    place = Slice.at(clock.now_ms() + 2_000, 1000)
    # Each with an id of its own: what says that it was sent again makes copies of those with the same.
    rows = [row[:5] + bytes([n]) * len(row[5:21]) + row[21:] for n, row in enumerate(DAMAGED.values())]
    await append(ticker.store, place, *rows)
    await ticker.client.put("log:", "fine", after="3s")
    assert [one.value() for one in await ticker.advance(seconds=20)] == ["fine"]
    assert len(await list_dead(ticker.store)) == len(DAMAGED)


async def test_a_stray_tombstone_does_not_stop_its_slice(ticker: Ticker, clock: ManualClock, store: Store) -> None:
    place = Slice.at(clock.now_ms() + 2_000, 1000)
    tombstone = GOOD[:4] + bytes([TOMBSTONE]) + b"\6" * 16
    await append(store, place, tombstone, GOOD)
    owner = HandOwner(store, 0, b"")
    await owner.raw("SETBIT", owner.keys.slice_keys(place.name)[3], 0, 1)
    await owner.raw("HINCRBY", owner.keys.n, "cancelled", 1)
    assert [one.value() for one in await ticker.advance(seconds=10)] == ["good"]


@pytest.mark.parametrize("reach_tasks", [100, 100_000])
async def test_a_slice_larger_than_memory_fires_whole_and_in_order(
    tickers: Tickers, store: Store, reach_tasks: int
) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=reach_tasks)))
    count = 2_500
    lane = lane_in(store, 1)
    due_ms = ticker.clock.now_ms() + 5_000
    offsets = [n * 7919 % 1000 for n in range(count)]
    rows = [entry(offset, 0, n.to_bytes(16, "big"), Body("log:", b"%d" % n)) for n, offset in enumerate(offsets)]
    await append(store, Slice.at(due_ms, 1000), *rows, partition=1)
    await ticker.client.put("log:", -1, at=due_ms + 500, lane=lane)
    ticker.clock.set(due_ms - 50)
    fired = await ticker.turn()
    most = max(sum(live.waiting for live in one.lives) for one in ticker.engine.owned.values())
    assert most <= max(reach_tasks, 2_000)
    for _ in range(21):
        ticker.clock.advance(ms=50)
        fired += await ticker.turn()
    assert sorted(one.value() for one in fired) == [-1, *range(count)]
    late_ms = [one.due_ms for one in fired if one.value() >= 0]
    assert late_ms == sorted(late_ms), "earlier ones first"
    assert (await balance(store)).done == count + 1


@pytest.mark.parametrize("lanes", [0, 5])
async def test_large_tasks_take_as_little_memory_as_many_small_ones(tickers: Tickers, store: Store, lanes: int) -> None:
    most_bytes, size, count = 2 * 2**20, 8_000, 2_000
    ticker = await tickers(options=EngineOptions(reach=Reach(bytes=most_bytes)))
    due_ms = ticker.clock.now_ms() // 1000 * 1000 + 5_000
    await ticker.client.put_many(
        Task("log:", f"{n:0{size}}", at=due_ms + n * 7919 % 1000, lane=str(n % lanes) if lanes else None)
        for n in range(count)
    )
    ticker.clock.set(due_ms - 50)
    fired: list[Delivery] = []
    for _ in range(40):
        fired += await ticker.turn()
        held = sum(one.waiting + one.lanes.behind for one in ticker.engine.owned.values())
        assert held * size < most_bytes * (4 if lanes else 2), "in lanes twice as many may wait besides"
        ticker.clock.advance(ms=50)
    assert sorted(int(one.value()[-4:]) for one in fired) == list(range(count))
    for lane in map(str, range(lanes)):
        dues_ms = [one.due_ms for one in fired if one.lane == lane]
        assert dues_ms == sorted(dues_ms)


@pytest.mark.parametrize("reach_tasks", [50, 100_000])
async def test_an_hour_slice_is_held_a_window_at_a_time(tickers: Tickers, store: Store, reach_tasks: int) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=reach_tasks)))
    now_ms = ticker.clock.now_ms()
    start_ms = now_ms - now_ms % HOUR_MS + 2 * HOUR_MS
    count = 600
    due = [start_ms + n * 5_987 % HOUR_MS for n in range(count)]
    await ticker.client.put_many(Task("log:", n, at=at_ms) for n, at_ms in enumerate(due))
    ticker.clock.set(start_ms - 1_000)
    fired: list[Delivery] = []
    for _ in range(62):
        fired += await ticker.advance(minutes=1) if len(fired) < 40 else await _jump(ticker, 60)
        held = ticker.engine.lookahead.held
        assert held <= 60 + reach_tasks
    assert sorted(one.value() for one in fired) == list(range(count))
    assert not [one for one in fired[:40] if one.due_ms > ticker.clock.now_ms()]
    await ticker.advance(minutes=5)
    assert (await balance(store)).done == count
    for keys in store.keys.partitions:
        assert await store.run_one(keys.slot, [("ZCARD", keys.slices)]) == [0], "all slices are dropped"


async def _jump(ticker: Ticker, seconds: int) -> list[Delivery]:
    ticker.clock.advance(seconds=seconds)
    return await ticker.turn()


async def test_a_huge_slice_does_not_stall_another_partition(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=20_000)))
    due_ms = ticker.clock.now_ms() + 4_000
    count = 200_000
    for first in range(0, count, 20_000):
        rows = [
            entry((first + n) % 1000, 0, (first + n).to_bytes(16, "big"), Body("null:", b"0")) for n in range(20_000)
        ]
        await append(store, Slice.at(due_ms, 1000), *rows, partition=1)
    await ticker.client.put("log:", "small", at=due_ms, lane=lane_in(store, 2))
    ticker.clock.set(due_ms)
    await ticker.engine.keeper.step()
    steps = 0
    while not ticker.deliveries:
        await ticker.engine.lookahead.step()
        await ticker.engine.dispatcher.step()
        steps += 1
        assert steps < 20, "the small one waits for the huge slice"


async def test_rows_that_took_the_place_of_forgotten_ones_are_read(ticker: Ticker, clock: ManualClock) -> None:
    """A failover forgot the last put, and others came since: the list is as long again as the owner remembers it."""
    place = Slice.at(clock.now_ms() + 2_000, 1000)
    kept, forgotten, *new = (entry(500, 0, bytes([n]) * 16, Body("log:", b"%d" % n)) for n in range(1, 5))
    await append(ticker.store, place, kept, forgotten)
    await ticker.turn()
    owner = HandOwner(ticker.store, 0, b"")
    await owner.raw("RPOP", owner.keys.entries(place.name))
    await owner.raw("HINCRBY", owner.keys.n, "accepted", -1)
    await append(ticker.store, place, *new)
    await ticker.turn()
    delivered = [one.value() for one in await ticker.advance(seconds=4)]
    assert sorted(delivered) == [1, 3, 4]
    assert (await balance(ticker.store)).done == 3


async def test_after_a_clock_went_back_an_hour_what_comes_is_still_found(ticker: Ticker, clock: ManualClock) -> None:
    engine = ticker.engine
    await engine.keeper.step()
    clock.advance(seconds=3600)
    await engine.lookahead.step()
    clock.advance(seconds=-3600)
    await ticker.client.put("log:", after="2s")
    while await engine.lookahead.step() == 0.0:
        pass
    assert engine.lookahead.held == 1
