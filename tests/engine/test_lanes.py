"""Lanes: earlier due first, one at a time; a failing head holds up its own lane and no other."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.clock import ManualClock, steady_s
from mainspring.model.delivery import Body, Dead, Delivery, Retry
from mainspring.model.errors import StoreError, Unavailable
from mainspring.model.ids import idh_of
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import Task
from mainspring.store.codec import INDEXED, LANE, entry
from mainspring.store.keys import Slice, partition_of
from mainspring.store.owner import read
from mainspring.store.store import Store
from mainspring.store.tasks.index import IdRow, replace
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]


def values(deliveries: list[Delivery]) -> list[object]:
    return [one.value() for one in deliveries]


def fail_the_first(one: Delivery) -> Retry | None:
    return Retry("no", after_ms=60_000) if one.value() == "first" else None


async def first_delivery(ticker: Ticker) -> None:
    while not ticker.deliveries:  # noqa: ASYNC110 - a sink that hangs says nothing
        await asyncio.sleep(0)


async def test_a_lane_goes_by_due_time_not_by_arrival(ticker: Ticker, clock: ManualClock) -> None:
    now_ms = clock.now_ms()
    order = [5, 1, 9, 3, 7, 0, 8, 2, 6, 4]
    await ticker.client.put_many(Task("log:", n, at=now_ms + 1_000 + n * 300, lane="a") for n in order)
    clock.advance(seconds=60)  # all overdue at once, over several slices
    assert values(await ticker.turn()) == sorted(order)


async def test_equal_due_times_go_by_arrival(ticker: Ticker, clock: ManualClock) -> None:
    await ticker.client.put_many(Task("log:", n, at=clock.now_ms() + 500, lane="a") for n in range(20))
    assert values(await ticker.advance(seconds=1)) == list(range(20))


async def test_far_and_near_slices_of_one_lane_go_by_due_time(ticker: Ticker, clock: ManualClock) -> None:
    """Tasks put hours ahead are in an hour slice, those put shortly before in second slices: the owner merges both."""
    start_ms = clock.now_ms() - clock.now_ms() % 3_600_000 + 2 * 3_600_000
    await ticker.client.put_many(Task("log:", n, at=start_ms + n * 1_000, lane="a") for n in (2, 4, 6))
    clock.set(start_ms - 10_000)
    await ticker.client.put_many(Task("log:", n, at=start_ms + n * 1_000, lane="a") for n in (1, 3, 5))
    clock.set(start_ms + 10_000)
    assert values(await ticker.turn()) == [1, 2, 3, 4, 5, 6]


async def test_a_turn_renews_its_leases_before_they_run_out(tickers: Tickers, clock: ManualClock) -> None:
    """A partition that is given up in the middle of a turn would come back with what it has delivered already."""
    ticker = await tickers(options=EngineOptions(lease_s=30))
    await ticker.client.put_many(Task("log:", n, at=clock.now_ms() + n, lane="a") for n in range(20))
    left_s: list[float] = []

    def take_long(_: Delivery) -> None:
        for partition in ticker.engine.owned.values():
            left_s.append(partition.lease_until - steady_s())
            partition.lease_until -= 10
        ticker.engine.keeper._renew_at -= 10

    ticker.answer("log", take_long)
    clock.advance(seconds=1)
    assert values(await ticker.turn()) == list(range(20))
    assert min(left_s) > 15


async def test_one_at_a_time(ticker: Ticker) -> None:
    running = 0

    async def slow(one: Delivery) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        running -= 1

    ticker.answer("kafka", slow)
    # Targets of their own, so that a batch does not hide two at a time.
    await ticker.client.put_many(Task(f"kafka:{n}", n, after="1s", lane="a") for n in range(10))
    assert values(await ticker.advance(seconds=1)) == list(range(10))


async def test_a_late_arrival_is_not_overtaken_by_a_later_one(ticker: Ticker, clock: ManualClock) -> None:
    """Accepted before the later one's begin, though the owner has not heard of it."""
    await ticker.client.put("log:", "later", after="500ms", lane="a")
    await ticker.turn()
    clock.advance(ms=500)
    await ticker.client.put("log:", "earlier", at=clock.now_ms() - 200, lane="a")
    engine = ticker.engine
    await engine.dispatcher.step()
    assert ticker.deliveries == [], "the server says that there is more to read"
    await ticker.turn()
    assert values(ticker.deliveries) == ["earlier", "later"]


async def test_a_late_arrival_in_an_unknown_slice_is_not_overtaken(ticker: Ticker, clock: ManualClock) -> None:
    await ticker.client.put("log:", "later", after="2500ms", lane="a")
    await ticker.turn()
    await ticker.client.put("log:", "earlier", after="1200ms", lane="a")
    clock.advance(ms=2_500)
    await ticker.engine.dispatcher.step()
    await ticker.turn()
    assert values(ticker.deliveries) == ["earlier", "later"]


async def test_a_slice_that_is_dropped_while_it_is_listed_stops_no_lane(
    ticker: Ticker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known and not on the server, it could never be read to its end, and lanes wait for that."""
    list_slices = read.list_slices

    async def list_before_a_drop(
        store: Store, partitions: Sequence[int], *, before_ms: int, limits: Sequence[int]
    ) -> list[read.SliceListing | StoreError]:
        answer = await list_slices(store, partitions, before_ms=before_ms, limits=limits)
        await ticker.engine.sweeper.drop_finished()
        return answer

    await ticker.client.put("log:", 1, after="1s", lane="a")
    assert values(await ticker.advance(seconds=1)) == [1]
    clock.advance(seconds=5)
    with monkeypatch.context() as patched:
        patched.setattr(read, "list_slices", list_before_a_drop)
        ticker.engine.lookahead.reconnected()
        await ticker.engine.lookahead.step()
    assert ticker.engine.sweeper.dropped == 1
    assert not any(one.lives for one in ticker.engine.owned.values())
    await ticker.client.put("log:", 2, after="1s", lane="a")
    assert values(await ticker.advance(seconds=1)) == [2]


async def test_a_lane_that_waits_for_a_listing_does_not_wait_for_other_servers(
    ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> list[read.SliceRows | StoreError]:
        raise Unavailable("another server is away", sent=False)

    await ticker.client.put("log:", 1, after="1s", lane="a")
    await ticker.turn()
    for partition in ticker.engine.owned.values():
        partition.block(ticker.clock.now_ms())
    with monkeypatch.context() as patched:
        patched.setattr(read, "read_chunks", away)
        with pytest.raises(Unavailable):
            await ticker.engine.lookahead.step()
    assert all(partition.may_begin for partition in ticker.engine.owned.values())


async def test_a_failing_head_holds_only_its_own_lane(ticker: Ticker, store: Store) -> None:
    other = next(f"x{n}" for n in range(100) if partition_of(f"x{n}", 4) == partition_of("a", 4))
    ticker.answer("log", lambda one: Retry("no", after_ms=5_000) if (one.value(), one.attempt) == ("a0", 1) else None)
    await ticker.client.put_many(Task("log:", f"a{n}", after=f"{1000 + n}ms", lane="a") for n in range(3))
    await ticker.client.put_many(Task("log:", f"b{n}", after=f"{1001 + n}ms", lane=other) for n in range(3))
    assert values(await ticker.advance(seconds=2)) == ["a0", "b0", "b1", "b2"]
    assert values(await ticker.advance(seconds=10)) == ["a0", "a1", "a2"]
    await balance(store)


async def test_hundreds_of_slices_behind_a_failing_head_do_not_stop_the_partition(ticker: Ticker) -> None:
    other = next(f"x{n}" for n in range(100) if partition_of(f"x{n}", 4) == partition_of("a", 4))
    ticker.answer("log", lambda one: Retry("no", after_ms=900_000) if (one.value(), one.attempt) == (0, 1) else None)
    now_ms = ticker.clock.now_ms()
    await ticker.client.put_many(Task("log:", n, at=now_ms + n * 1000, lane="a") for n in range(400))
    await ticker.client.put("log:", "other", at=now_ms + 399_500, lane=other)
    await ticker.turn()
    ticker.clock.advance(seconds=400)
    await ticker.turn()
    assert values(ticker.deliveries) == [0, "other"]
    ticker.clock.advance(seconds=600)
    await ticker.turn()
    assert values(ticker.deliveries)[2:] == list(range(400))


async def test_a_held_lane_stays_held_after_a_takeover(tickers: Tickers, store: Store) -> None:
    first = await tickers(handlers={"log": lambda one: Retry("no", after_ms=30_000) if one.value() == 0 else None})
    await first.client.put_many(Task("log:", n, after=f"{1 + n}s", lane="a") for n in range(3))
    assert values(await first.advance(seconds=5)) == [0]
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    assert values(await second.turn()) == [], "the lane waits for the retry of its head"
    assert values(await second.advance(seconds=60)) == [0, 1, 2]
    for keys in store.keys.partitions:
        assert await store.run_one(keys.slot, [("HLEN", keys.held)]) == [0]


async def test_a_head_in_flight_at_a_crash_goes_first_again(tickers: Tickers, store: Store) -> None:
    async def hang(one: Delivery) -> None:
        await asyncio.Event().wait()

    first = await tickers(handlers={"log": hang})
    await first.client.put_many(Task("log:", n, after=f"{1 + n}s", lane="a") for n in range(3))
    await first.turn()
    first.clock.advance(seconds=4)
    await first.engine.lookahead.step()
    await first.engine.dispatcher.step()
    await first_delivery(first)
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    assert values(await second.turn()) == [0, 1, 2]
    await balance(store)


async def test_a_head_in_flight_at_a_crash_goes_before_an_earlier_one_that_came_since(
    tickers: Tickers, store: Store
) -> None:
    """It has begun: it may have arrived already, so it is delivered again first."""

    async def hang(one: Delivery) -> None:
        await asyncio.Event().wait()

    first = await tickers(handlers={"log": hang})
    await first.client.put("log:", "begun", after="1500ms", lane="a")
    await first.turn()
    first.clock.advance(seconds=2)
    await first.engine.lookahead.step()
    await first.engine.dispatcher.step()
    await first_delivery(first)
    await first.client.put("log:", "since", at=first.clock.now_ms() - 1_000, lane="a")
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    assert values(await second.turn()) == ["begun", "since"]


@pytest.mark.parametrize("read_before", [True, False])
async def test_cancelling_the_retry_of_a_head_frees_its_lane(tickers: Tickers, store: Store, read_before: bool) -> None:
    wait_ms = 2_000 if read_before else 60_000
    ticker = await tickers(handlers={"log": lambda one: Retry("no", after_ms=wait_ms) if one.value() == 0 else None})
    handle = await ticker.client.put("log:", 0, after="1s", lane="a")
    await ticker.client.put("log:", 1, after="2s", lane="a")
    await ticker.advance(seconds=1)
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert values(await ticker.advance(minutes=2)) == [1]
    for keys in store.keys.partitions:
        assert await store.run_one(keys.slot, [("HLEN", keys.held)]) == [0]
    await balance(store)


async def test_a_cancelled_neighbour_of_a_failed_head_frees_no_lane(tickers: Tickers) -> None:
    """Four bytes of its id are left of a cancelled task, and ids of one call may begin alike."""
    first = await tickers(handlers={"log": lambda one: Retry("no", after_ms=60_000) if one.value() == 0 else None})
    neighbours = [Task("log:", 0, after="1s", lane="a"), Task("log:", "never", after="50s", lane="a")]
    summary = await first.client.put_many(neighbours, handles=True)
    await first.client.put("log:", 1, after="2s", lane="a")
    await first.advance(seconds=1)
    assert summary.handles is not None
    assert await first.client.cancel(summary.handles[1].id) == "cancelled"
    await first.crash()
    second = await tickers()
    assert values(await second.advance(seconds=55)) == []
    assert values(await second.advance(seconds=10)) == [0, 1]


async def test_cancelling_one_that_waits_behind_the_head_leaves_the_others(ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Retry("no", after_ms=5_000) if (one.value(), one.attempt) == (0, 1) else None)
    summary = await ticker.client.put_many(
        [Task("log:", n, after=f"{1000 + n}ms", lane="a") for n in range(4)], handles=True
    )
    ids = [handle.id for handle in summary.handles or ()]
    await ticker.advance(seconds=2)
    assert await ticker.client.cancel(ids[2]) == "cancelled"
    assert values(await ticker.advance(seconds=10)) == [0, 1, 3]


async def test_a_dead_head_frees_its_lane(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(retry=RetryPolicy(max_attempts=3, base_ms=1000, jitter="none")))
    ticker.answer("log", lambda one: (Dead("no") if one.attempt == 1 else Retry("x")) if one.value() < 2 else None)
    await ticker.client.put_many(Task("log:", n, after="1s", lane="a") for n in range(4))
    assert values(await ticker.advance(minutes=1)) == [0, 1, 2, 3]
    await balance(store)


async def test_an_expired_or_damaged_one_does_not_stop_its_lane(ticker: Ticker, clock: ManualClock) -> None:
    await ticker.client.put("log:", "expires", after="1s", expires="1s", lane="a")
    await ticker.client.put("log:", "next", after="1s", lane="a")
    clock.advance(seconds=5)
    assert values(await ticker.turn()) == ["next"]


async def test_lanes_keep_their_order_when_memory_is_short(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=20)))
    now_ms = ticker.clock.now_ms()
    tasks = [Task("log:", n, at=now_ms + 1_000 + n * 7, lane=f"lane-{n % 3}") for n in range(300)]
    await ticker.client.put_many(tasks)
    for _ in range(40):
        ticker.clock.advance(ms=100)
        await ticker.turn()
    by_lane: dict[str | None, list[int]] = {}
    for one in ticker.deliveries:
        by_lane.setdefault(one.lane, []).append(one.value())
    assert sum(map(len, by_lane.values())) == 300
    assert all(lane == sorted(lane) for lane in by_lane.values())


async def test_resent_lane_tasks_go_once_and_in_order(ticker: Ticker) -> None:
    from mainspring.testing.faults import bad_road, uses

    with bad_road(ticker.store) as road:
        for n in range(6):
            road.next("lose reply" if n % 2 else "hold back", only=uses("MULTI"))
            await ticker.client.put("log:", n, after=f"{500 + n}ms", lane="a")
        await road.deliver_held()
    assert values(await ticker.advance(seconds=5)) == list(range(6))
    await balance(ticker.store)


async def test_a_failed_head_that_is_replaced_frees_its_lane_for_the_next_owner_too(
    tickers: Tickers, store: Store
) -> None:
    former = await tickers(handlers={"log": fail_the_first})
    await former.client.put("log:", "first", after="1s", id="job", lane="a")
    await former.advance(seconds=1)
    await former.client.put("log:", "second", after="5s", id="job", lane="a", on_conflict="replace")
    assert values(await former.advance(seconds=5)) == ["second"]
    await former.crash()
    former.clock.advance(seconds=6)
    later = await tickers()
    await later.client.put("log:", "third", after="1s", lane="a")
    assert values(await later.advance(seconds=1)) == ["third"], "the lane still waits for a task that is gone"


@pytest.mark.parametrize("lane", ["another", None])
async def test_the_same_id_in_another_lane_of_its_partition_leaves_a_failed_head_alone(
    tickers: Tickers, store: Store, lane: str | None
) -> None:
    ticker = await tickers(handlers={"log": fail_the_first})
    task_id, other = _neighbours("a", lane, len(store.keys))
    await ticker.client.put("log:", "first", after="1s", id=task_id, lane="a")
    await ticker.advance(seconds=1)
    await ticker.client.put("log:", "next", lane="a")
    assert values(await ticker.advance(seconds=1)) == []
    other_put = await ticker.client.put("log:", "second", after="1h", id=task_id, lane=other, on_conflict="replace")
    assert other_put.outcome == "created"
    assert await ticker.client.lane_skip_head("a") == "ok", "it is still the head of its lane"
    assert values(await ticker.advance(seconds=2)) == ["next"]
    assert (await ticker.client.lane("a")).state == "flowing"


@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_failed_head_that_is_replaced_in_its_own_lane_holds_it_up_no_longer(
    tickers: Tickers, cancelled: bool, taken_over: bool
) -> None:
    ticker = await tickers(handlers={"log": fail_the_first})
    await ticker.client.put("log:", "first", after="1s", id="job", lane="a")
    await ticker.advance(seconds=1)
    if taken_over:
        await ticker.crash()
        ticker = await tickers()
    if cancelled:  # and put again before its owner has seen that
        assert await ticker.client.cancel("job", lane="a") == "cancelled"
    put = await ticker.client.put("log:", "second", after="1h", id="job", lane="a", on_conflict="replace")
    assert put.outcome == ("created" if cancelled else "replaced")
    await ticker.client.put("log:", "next", after="1s", lane="a")
    assert await ticker.client.lane_skip_head("a") == "no head"
    assert values(await ticker.advance(seconds=8 if taken_over else 2)) == ["next"]
    assert (await ticker.client.lane("a")).state == "flowing"
    assert values(await ticker.advance(seconds=3_600)) == ["second"]


async def test_a_task_under_the_id_of_a_failed_head_does_not_go_before_earlier_ones_of_its_lane(
    tickers: Tickers,
) -> None:
    ticker = await tickers(handlers={"log": fail_the_first})
    await ticker.client.put("log:", "first", after="1s", id="job", lane="a")
    await ticker.client.put("log:", "next", after="2s", lane="a")
    assert values(await ticker.advance(seconds=5)) == ["first"]
    await ticker.client.put("log:", "second", id="job", lane="a", on_conflict="replace")
    assert values(await ticker.advance(seconds=2)) == ["next", "second"]


async def test_a_failed_head_that_is_rescheduled_is_waited_for(tickers: Tickers) -> None:
    def fail_once(one: Delivery) -> Retry | None:
        return fail_the_first(one) if one.attempt == 1 else None

    ticker = await tickers(handlers={"log": fail_once})
    await ticker.client.put("log:", "first", after="1s", id="job", lane="a")
    await ticker.advance(seconds=1)
    await ticker.client.reschedule("job", lane="a", after="1h")
    await ticker.client.put("log:", "next", after="1s", lane="a")
    assert values(await ticker.advance(seconds=600)) == []
    assert (await ticker.client.lane("a")).state == "retrying"
    assert values(await ticker.advance(seconds=3_600)) == ["first", "next"]


async def test_get_and_explain_agree_about_a_skipped_head(tickers: Tickers) -> None:
    ticker = await tickers(handlers={"log": lambda _: Retry("no", after_ms=60_000)})
    put = await ticker.client.put("log:", "first", after="1s", id="job", lane="a")
    await ticker.advance(seconds=1)
    assert await ticker.client.lane_skip_head("a", reason="nobody wants it") == "ok"
    await ticker.advance(seconds=1)
    for lane in ("a", None):
        found, why = await ticker.client.get("job", lane=lane), await ticker.client.explain("job", lane=lane)
        assert (found.state, found.due_ms, found.target, found.lane) == ("dead", put.due_ms, "log:", "a")
        assert (why.state, why.due_ms, why.attempt, why.errors) == ("dead", put.due_ms, found.attempt, found.errors)


def _neighbours(lane: str, other: str | None, partitions: int) -> tuple[str, str | None]:
    """An id, and a lane or none, that fall into the partition of this lane."""
    wanted = partition_of(lane, partitions)
    names = [name for name in map(str, range(1_000)) if partition_of(name, partitions) == wanted]
    return names[0], None if other is None else names[1]


async def test_one_id_in_several_lanes_is_several_tasks_with_keys_of_their_own(ticker: Ticker) -> None:
    client = ticker.client
    lanes = [None, *(f"lane {number}" for number in range(2 * len(client.store.keys)))]
    for lane in lanes:
        assert (await client.put("log:", lane, id="dup", lane=lane, after="1s")).outcome == "created"
    attempts: list[str] = []
    ticker.answer("log", lambda one: Retry("busy") if one.attempt == 1 else Dead("no"))
    attempts += [one.idempotency_key for one in await ticker.advance(minutes=1)]
    dead_letters = {dead_letter.lane: dead_letter for dead_letter in (await client.dead_list()).letters}
    assert set(dead_letters) == set(lanes)
    assert len(set(attempts)) == len(lanes)
    assert all(attempts.count(key) == 2 for key in attempts)
    namespace = client.store.keys.namespace
    assert {dead_letter.as_dict(namespace)["idempotency_key"] for dead_letter in dead_letters.values()} == set(attempts)
    ticker.answer("log", lambda _: None)
    for lane in lanes[1:]:
        assert (await client.dead_replay("dup", lane=lane)).outcome == "replayed"
    assert {one.idempotency_key for one in await ticker.turn()} <= set(attempts)


async def test_an_entry_of_an_older_version_keeps_its_key_without_the_lane(ticker: Ticker) -> None:
    body = Body("log:", b"1", "old", "l")
    store, due_ms = ticker.store, ticker.clock.now_ms() + 1000
    place = Slice.at(due_ms, 1000)
    row = entry(due_ms - place.start_ms, INDEXED | LANE, idh_of("old"), body)
    partition = partition_of("l", len(store.keys))
    await replace(
        store, IdRow(idh_of("old"), place, row, due_ms), partition=partition, expected=None, old=None, now_ms=due_ms
    )
    ticker.answer("log", lambda one: Retry("busy") if one.attempt == 1 else None)
    keys = [one.idempotency_key for one in await ticker.advance(minutes=1)]
    assert keys == [f"{store.keys.namespace}/old/{due_ms}"] * 2
