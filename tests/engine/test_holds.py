"""Held work: tasks behind a failed head are moved aside, starve no others, and come back in order."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mainspring.engine import holds
from mainspring.engine.engine import EngineOptions
from mainspring.engine.holds import FEW_BEHIND
from mainspring.engine.lookahead import Reach
from mainspring.engine.partition import Partition
from mainspring.engine.sweeper import Sweeper
from mainspring.model.clock import ServerClock
from mainspring.model.delivery import Delivery, Outcome, Retry
from mainspring.model.errors import Unavailable
from mainspring.model.lane import HoldRecord
from mainspring.model.task import Task
from mainspring.store.keys import HOLDS_FROM_S, HOUR_MS, Slice, partition_of
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.ticker import Ticker, turn
from tests.support.flows import open_flow

Tickers = Callable[..., Awaitable[Ticker]]
MANY = FEW_BEHIND + 8
OTHER = next(f"x{n}" for n in range(100) if partition_of(f"x{n}", 4) == partition_of("a", 4))
"""A lane of the same partition as lane "a"."""


def values(deliveries: list[Delivery]) -> list[Any]:
    return [one.value() for one in deliveries]


def failing_once(wait_ms: int) -> Callable[[Delivery], Outcome | None]:
    return lambda one: Retry("no", after_ms=wait_ms) if (one.value(), one.attempt) == (0, 1) else None


async def hold_slices(store: Store) -> list[Slice]:
    keys = store.keys.partitions[partition_of("a", 4)]
    [names] = await store.run_one(keys.slot, [("ZRANGE", keys.slices, HOLDS_FROM_S, "+inf", "BYSCORE")])
    return [Slice.parse(name) for name in names]


async def slices_in_time(store: Store) -> int:
    keys = store.keys.partitions[partition_of("a", 4)]
    [count] = await store.run_one(keys.slot, [("ZCOUNT", keys.slices, "-inf", HOLDS_FROM_S)])
    return int(count)


async def put_lane(ticker: Ticker, count: int = MANY, lane: str = "a", gap_ms: int = 1) -> list[str]:
    """Task n of the lane is due at one second and n gaps; 0 is the head."""
    now_ms = ticker.clock.now_ms()
    tasks = [Task("log:", n, at=now_ms + 1_000 + n * gap_ms, lane=lane) for n in range(count)]
    return [one.id for one in (await ticker.client.put_many(tasks, handles=True)).handles or ()]


async def come_due(ticker: Ticker, seconds: int) -> None:
    """Lets hundreds come due, some at a time: those of a lane whose head has failed wait whenever they are due."""
    for _ in range(20):
        ticker.clock.advance(ms=seconds * 50)
        await ticker.turn()


async def test_tasks_behind_a_failed_head_are_moved_aside_and_come_back_in_order(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", failing_once(60_000))
    await put_lane(ticker)
    assert values(await ticker.advance(seconds=5)) == [0]
    [place] = await hold_slices(store)
    assert (await balance(store)).spilled == MANY - 1
    assert not (await verify(store)).reported
    ticker.clock.advance(seconds=5)
    await ticker.turn()
    assert await slices_in_time(store) == 1, "only the slice of the retry is left: the others could be dropped"
    assert values(await ticker.advance(seconds=60)) == list(range(MANY))
    await ticker.advance(seconds=5)
    assert await hold_slices(store) == []
    assert not (await verify(store)).reported
    assert place.is_hold


async def test_few_tasks_and_a_short_wait_are_not_moved(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", failing_once(3_000))
    await put_lane(ticker, 5)
    await ticker.advance(seconds=2)
    assert await hold_slices(store) == []
    assert values(await ticker.advance(seconds=5)) == [0, 1, 2, 3, 4]


async def test_many_times_the_look_ahead_behind_a_dead_head_starve_no_other_task(
    tickers: Tickers, store: Store
) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=64)), handlers={"log": failing_once(3_600_000)})
    await put_lane(ticker, 800)
    await ticker.advance(seconds=1)
    ticker.clock.advance(seconds=10)
    for _ in range(3):
        await ticker.turn()
    assert ticker.engine.lookahead.held < 64, "held work does not count in K"
    await ticker.client.put_many(Task("log:", f"b{n}", after=f"{n}ms", lane=OTHER) for n in range(20))
    await ticker.client.put_many(Task("log:", f"c{n}", after=f"{n}ms") for n in range(20))
    fired = values(await ticker.advance(seconds=2))
    assert [one for one in fired if str(one).startswith("b")] == [f"b{n}" for n in range(20)]
    assert len(fired) == 40
    assert (await balance(store)).spilled == 799
    ticker.clock.advance(seconds=7_200)
    for _ in range(200):
        if len(ticker.deliveries) >= 41 + 800:
            break
        await ticker.turn()
    assert values(ticker.deliveries)[41:] == list(range(800))
    assert ticker.engine.owned[partition_of("a", 4)].lanes.of("a").behind == []
    await balance(store)


async def test_a_takeover_resumes_held_work(tickers: Tickers, store: Store) -> None:
    first = await tickers(handlers={"log": failing_once(60_000)})
    await put_lane(first)
    await first.advance(seconds=5)
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    assert values(await second.turn()) == [], "the lane waits for its head, and its tasks with it"
    await second.client.put("log:", "new", after="1s", lane="a")
    assert values(await second.advance(seconds=5)) == []
    assert values(await second.advance(seconds=60)) == [*range(MANY), "new"]
    await second.advance(seconds=5)
    assert await hold_slices(store) == []
    await balance(store)


async def test_a_takeover_in_the_middle_of_coming_back_keeps_the_order(tickers: Tickers, store: Store) -> None:
    first = await tickers(handlers={"log": failing_once(20_000)}, options=EngineOptions(reach=Reach(tasks=64)))
    await put_lane(first, 300)
    await come_due(first, 5)
    first.clock.advance(seconds=30)
    engine = first.engine
    while len(first.deliveries) < 100:
        await engine.keeper.step()
        await engine.lookahead.step()
        await engine.dispatcher.step()
        await engine.dispatcher.drain()
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    await second.turn()
    fired = values(first.deliveries) + values(second.deliveries)
    seen = list(dict.fromkeys(fired[1:]))
    assert seen == list(range(300)), "repeats may be, but no other order"
    await balance(store)


async def test_new_arrivals_join_those_that_wait_and_leave_in_order(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", failing_once(30_000))
    await put_lane(ticker)
    await ticker.advance(seconds=3)
    late = await ticker.client.put("log:", "late", at=ticker.clock.now_ms() - 1_000, lane="a")
    await ticker.client.put("log:", "next", after="1s", lane="a")
    await ticker.advance(seconds=3)
    [place] = await hold_slices(store)
    keys = store.keys.partitions[partition_of("a", 4)]
    assert await store.run_one(keys.slot, [("LLEN", keys.entries(place.name))]) == [MANY - 1 + 2]
    assert (await ticker.client.get(late.id)).state == "pending"
    fired = values(await ticker.advance(seconds=60))
    assert fired == [*range(MANY), "late", "next"], "an overdue one counts from when it was put"


async def test_an_earlier_one_that_comes_while_the_others_come_back_goes_by_its_time(tickers: Tickers) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=64)))
    ticker.answer("log", failing_once(20_000))
    await put_lane(ticker, 200, gap_ms=50)
    await come_due(ticker, 12)
    ticker.clock.advance(seconds=20)
    engine = ticker.engine
    while len(ticker.deliveries) < 50:
        await engine.keeper.step()
        await engine.lookahead.step()
        await engine.dispatcher.step()
        await engine.dispatcher.drain()
    await ticker.client.put("log:", "since", at=ticker.clock.now_ms(), lane="a")
    await ticker.turn()
    assert values(ticker.deliveries)[1:] == [*range(200), "since"]


async def test_a_head_that_fails_again_lets_the_rest_go(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=64)))
    ticker.answer(
        "log", lambda one: Retry("no", after_ms=30_000) if (one.value(), one.attempt) in ((0, 1), (9, 1)) else None
    )
    await put_lane(ticker, 200)
    await come_due(ticker, 5)
    assert values(await ticker.advance(seconds=28)) == list(range(10))
    partition = ticker.engine.owned[partition_of("a", 4)]
    assert partition.lanes.of("a").number_behind == 0
    assert partition.waiting == 0
    ticker.clock.advance(seconds=60)
    assert values(await ticker.turn()) == list(range(9, 200))
    await balance(store)


async def test_a_spilled_task_can_be_found_listed_counted_moved_and_cancelled(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", failing_once(60_000))
    now_ms = ticker.clock.now_ms()
    ids = await put_lane(ticker)
    named = await ticker.client.put("log:", "named", at=now_ms + 1_500, id="named", lane="a")
    await ticker.advance(seconds=5)
    client = ticker.client
    assert len(await hold_slices(store)) == 1
    info = await client.get(ids[3])
    assert (info.state, info.due_ms, info.payload) == ("pending", now_ms + 1_003, 3)
    assert (await client.get(named.id)).due_ms == now_ms + 1_500
    listed = (await client.list(due_after=now_ms - 600_000, limit=500)).tasks
    assert [one.payload for one in listed] == [*range(1, MANY), "named", 0]
    assert (await client.count(due_after=now_ms - 600_000, due_before=ticker.clock.now_ms())).pending == MANY
    assert await client.cancel(ids[3]) == "cancelled"
    await client.reschedule(ids[4], after="5m")
    await client.reschedule("named", after="6m")
    assert (await client.put("log:", "again", id="named", lane="a", after="1s")).outcome == "kept"
    await balance(store)
    assert not (await verify(store)).reported
    assert values(await ticker.advance(minutes=2)) == [n for n in range(MANY) if n not in (3, 4)]
    assert values(await ticker.advance(minutes=6)) == [4, "named"]


async def test_a_task_cancelled_while_it_is_moved_stays_cancelled(ticker: Ticker, store: Store) -> None:
    """The cancel reaches the server before the commit that moves the task."""
    ticker.answer("log", failing_once(60_000))
    ids = await put_lane(ticker)
    await ticker.turn()
    ticker.clock.advance(seconds=2)
    await ticker.engine.lookahead.step()
    await ticker.engine.dispatcher.step()
    while ticker.engine.deliveries.in_flight:  # noqa: ASYNC110 - deliveries tell nothing
        await asyncio.sleep(0)
    partition = ticker.engine.owned[partition_of("a", 4)]
    assert partition.hold_policy.has_outcomes
    assert await ticker.client.cancel(ids[7]) == "cancelled"
    await ticker.turn()
    assert (await ticker.client.get(ids[7])).state in ("cancelled", "finished")
    assert values(await ticker.advance(minutes=2)) == [n for n in range(MANY) if n != 7]
    await balance(store)


async def test_a_failed_head_that_was_moved_while_its_owner_was_suspended_does_not_stop_its_lane(
    ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both its times are over. At the old one it is begun, and comes to nothing; at the new one it joined those that it
    holds up, and all of them waited for it."""
    monkeypatch.setattr(holds, "FEW_BEHIND", 0)
    ticker.answer("log", failing_once(2_500))
    head, *_ = await put_lane(ticker, 3)
    ticker.clock.advance(seconds=2)
    for _ in range(3):
        await turn(ticker.engine)
    assert values(ticker.deliveries) == [0]
    await ticker.client.reschedule(head, after="1m")
    ticker.clock.advance(seconds=61)
    for _ in range(6):
        await turn(ticker.engine)
    assert values(ticker.deliveries) == [0, 0, 1, 2]


@pytest.mark.parametrize("fault", ["lose reply", "never sent", "hold back"])
async def test_a_spilling_commit_that_failed_is_sent_again_unchanged(
    ticker: Ticker, store: Store, fault: Fault
) -> None:
    ticker.answer("log", failing_once(20_000))
    await put_lane(ticker)
    await ticker.turn()
    with bad_road(ticker.store) as road:
        road.next(fault, fault, only=calls("commit"))
        for _ in range(6):
            try:
                await ticker.advance(seconds=1)
            except Unavailable:
                continue
            finally:
                await road.deliver_held()
    ticker.clock.advance(seconds=30)
    await ticker.turn()
    assert values(ticker.deliveries) == [0, *range(MANY)]
    assert (await balance(store)).spilled == MANY - 1


async def test_a_former_owner_cannot_move_anything(tickers: Tickers, store: Store) -> None:
    first = await tickers(handlers={"log": failing_once(60_000)})
    await put_lane(first)
    await first.turn()
    first.clock.advance(seconds=2)
    await first.engine.lookahead.step()
    await first.engine.dispatcher.step()
    while first.engine.deliveries.in_flight:  # noqa: ASYNC110 - deliveries tell nothing
        await asyncio.sleep(0)
    first.clock.advance(seconds=6)
    second = await tickers()
    await second.engine.keeper.step()
    await first.engine.dispatcher.step()
    assert (await balance(store)).spilled == 0
    assert partition_of("a", 4) not in first.engine.owned
    assert values(await second.turn())[0] == 0
    assert values(second.deliveries) == list(range(MANY))


async def test_spilled_tasks_expire_where_they_wait(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", failing_once(60_000))
    await put_lane(ticker)
    await ticker.client.put("log:", "short", id="short", after="1500ms", expires="20s", lane="a")
    await ticker.client.put("log:", "long", after="1600ms", expires="10m", lane="a")
    await ticker.advance(seconds=5)
    assert values(await ticker.advance(seconds=70)) == [*range(MANY), "long"]
    assert [(one.id, one.reason) for one in await list_dead(store)] == [("short", "expired")]


async def test_ids_of_spilled_tasks_are_kept_for_the_window_after_they_are_done(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(handlers={"log": failing_once(3_000_000)})
    ticker.store.shared.take({"dedupe_window": "600s"})
    await ticker.client.put("log:", 0, after="1s", lane="a")
    await ticker.client.put("log:", "named", after="2s", id="named", lane="a")
    await ticker.advance(minutes=55)
    assert values(ticker.deliveries) == [0, 0, "named"]
    await ticker.advance(seconds=5)
    assert await hold_slices(store) == []
    keys = store.keys.partitions[partition_of("a", 4)]
    for _ in range(8):
        await ticker.engine.sweeper.step()
    assert await store.run_one(keys.slot, [("HLEN", keys.ids)]) != [0]
    again = await ticker.client.put("log:", "again", after="1s", id="named", lane="a")
    assert again.outcome == "kept"
    ticker.clock.advance(seconds=4_200)
    await ticker.turn()
    for _ in range(8):
        await ticker.engine.sweeper.step()
    assert await store.run_one(keys.slot, [("HLEN", keys.ids), ("HLEN", keys.holds)]) == [0, 0]


class Ahead(ServerClock):
    """A node's clock that is an hour ahead of the server's."""

    def now_ms(self) -> int:
        return super().now_ms() + HOUR_MS


async def test_a_clock_that_runs_ahead_forgets_no_record_of_a_hold_before_its_window_is_over(
    mainspring_url: str, mainspring_namespace: str
) -> None:
    """Without the record the ids of its tasks count as over: a repeated put would be a new task."""
    store = await Store.open(mainspring_url, namespace=mainspring_namespace, partitions=1, clock=Ahead())
    keys = store.keys.partitions[0]
    now_ms = await store.sample_clock() - HOUR_MS
    owned = Partition(keys, b"token", 0.0, open_flow())
    ended = owned.hold_policy.ended
    for age_ms in (60_000, 1_000, 30_000):
        place = Slice.held_since(now_ms - age_ms)
        ended[place.name] = now_ms - age_ms
        await store.run_one(keys.slot, [("HSET", keys.holds, place.name, HoldRecord("all").encode())])
    store.shared.take({"dedupe_window": "600s"})
    await Sweeper(store, {0: owned}).step()
    assert (await store.run_one(keys.slot, [("HLEN", keys.holds)]), len(ended)) == ([3], 3)
    store.shared.take({"dedupe_window": "20s"})
    await Sweeper(store, {0: owned}).step()
    [left] = await store.run_one(keys.slot, [("HKEYS", keys.holds)])
    assert [name.decode() for name in left] == list(ended) == [Slice.held_since(now_ms - 1_000).name]
    await store.aclose()


async def test_a_hold_slice_without_a_record_goes_out_all_the_same(tickers: Tickers, store: Store) -> None:
    first = await tickers(handlers={"log": failing_once(60_000)})
    await put_lane(first)
    await first.advance(seconds=5)
    await first.crash()
    keys = store.keys.partitions[partition_of("a", 4)]
    [records] = await store.run_one(keys.slot, [("HVALS", keys.holds)])
    assert [HoldRecord.decode(one).key for one in records] == ["lane:a"]  # type: ignore[union-attr]
    await store.run_one(keys.slot, [("DEL", keys.holds)])
    first.clock.advance(seconds=6)
    second = await tickers()
    assert values(await second.advance(seconds=80)) == list(range(MANY))


async def test_commit_moves_tasks_on_a_full_server(ticker: Ticker, store: Store) -> None:
    """Otherwise held tasks could never leave memory."""
    from mainspring.store.scripts import text_of

    assert text_of("commit", True).startswith("#!lua flags=allow-oom")
    ticker.answer("log", failing_once(20_000))
    await put_lane(ticker)
    await ticker.turn()
    keys = store.keys.partitions[partition_of("a", 4)]
    await store.run_one(keys.slot, [("CONFIG", "SET", "maxmemory", "1")])
    try:
        await ticker.advance(seconds=5)
        assert (await balance(store)).spilled == MANY - 1
    finally:
        await store.run_one(keys.slot, [("CONFIG", "SET", "maxmemory", "0")])
    assert values(await ticker.advance(seconds=30)) == list(range(MANY))


async def test_held_tasks_that_arrive_faster_than_others_leave_wait_in_the_same_slice(
    tickers: Tickers, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were read from the hold slice and not begun must not be forgotten."""
    monkeypatch.setattr(holds, "FEW_BEHIND", 2)
    ticker = await tickers(handlers={"log": failing_once(20_000)}, options=EngineOptions(reach=Reach(tasks=64)))
    await put_lane(ticker, 200, gap_ms=1)
    await come_due(ticker, 5)
    ticker.clock.advance(seconds=20)
    engine = ticker.engine
    for n in range(40):
        await ticker.client.put_many(
            Task("log:", 1_000 + n * 5 + i, at=ticker.clock.now_ms(), lane="a") for i in range(5)
        )
        ticker.clock.advance(ms=1)
        engine.lookahead.reconnected()
        while await engine.lookahead.step() == 0.0:
            pass
        await engine.dispatcher.step()
        await engine.dispatcher.drain()
    for _ in range(5):
        await ticker.turn()
    assert values(ticker.deliveries)[1:] == [*range(200), *range(1_000, 1_200)]
    assert (await balance(store)).spilled > 200
