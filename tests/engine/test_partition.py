"""What a partition begins, and what it leaves for later calls."""

from mainspring.engine.flight import Flight, FlightGroup
from mainspring.engine.outcomes import Outcomes
from mainspring.engine.partition import MOST_OUTCOMES, BeginCall, Partition, Settled
from mainspring.engine.slice import LiveSlice, is_set
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Body, Response
from mainspring.model.retry import Policies, RetryPolicy
from mainspring.model.run import DELIVERED, HistoryRules, Run, RunDetails, RunRecord
from mainspring.roles import Failures
from mainspring.store.codec import INDEXED, LANE, entry
from mainspring.store.keys import Keyspace, Slice
from mainspring.store.owner.fire import MOST_BYTES, Death, NewPlace
from mainspring.store.runs import RUNS_AN_ENTRY
from tests.support.flows import open_flow

KEYS = Keyspace("main", 1).partitions[0]
ROWS = 600


def partition_with(*starts_ms: int) -> Partition:
    """A partition with full slices of a second that begin then."""
    partition = Partition(KEYS, b"1.a", 1e9, open_flow())
    for start_ms in starts_ms:
        live = LiveSlice(KEYS, Slice(1000, start_ms), start_ms / 1000)
        live.load_bitmaps(b"", b"")
        live.absorb([entry(n, 0, n.to_bytes(16, "big"), Body("log:", b"1")) for n in range(ROWS)])
        partition.add(live)
    return partition


def begun(partition: Partition, now_ms: int, limit: int, *, whole: bool) -> int:
    work = partition.begin(now_ms, limit, commit=False, whole=whole)
    if work is None:
        return 0
    partition.answered(work, "ok", [b""] * len(work.touched))
    return len(work.flights)


def test_an_overdue_slice_is_not_cut_to_fill_what_others_left_of_a_tick() -> None:
    partition = partition_with(1_000)
    assert begun(partition, 5_000, ROWS - 1, whole=True) == 0
    assert partition.soonest_ms == 1_000, "it waits, and is due"
    assert begun(partition, 5_000, ROWS, whole=True) == ROWS


def test_an_overdue_slice_larger_than_a_tick_leaves_in_parts_when_it_comes_first() -> None:
    partition = partition_with(0)
    assert [begun(partition, 5_000, 400, whole=False) for _ in range(3)] == [400, 200, 0]


def test_due_tasks_of_the_present_second_leave_even_with_little_room() -> None:
    partition = partition_with(0)
    assert begun(partition, 9, 400, whole=True) == 10
    assert begun(partition, 599, 100, whole=True) == 100


def test_a_slice_that_does_not_fit_behind_another_waits_whole() -> None:
    partition = partition_with(0, 1_000)
    assert begun(partition, 5_000, 2 * ROWS - 1, whole=False) == ROWS


# -- what is written, and when -------------------------------------------------------------------------------------


def taken(partition: Partition, now_ms: int, limit: int) -> BeginCall:
    call = partition.begin(now_ms, limit, commit=True)
    assert call is not None
    return call


def leave(partition: Partition, now_ms: int, limit: int) -> list[Flight]:
    """Begin some tasks, and let the server say that they may leave."""
    call = taken(partition, now_ms, limit)
    partition.answered(call, "ok", [b""] * len(call.touched))
    return call.flights


def fail(partition: Partition, flight: Flight) -> None:
    retry = NewPlace(flight.idh, Slice(1000, 60_000), flight.row, flight.address)
    partition.settle(Settled(flight.live, (flight.index,), retry=retry), [flight])


def is_done(flight: Flight) -> bool:
    return is_set(flight.live.bits.done, 0, flight.index)


def test_a_failed_task_is_done_with_the_commit_that_writes_its_retry_and_not_before() -> None:
    partition = partition_with(0)
    first, second, third = leave(partition, 5_000, 3)
    fail(partition, first)
    fail(partition, second)
    partition.settle(Settled(third.live, (third.index,), delivered=True), [third])
    begun = taken(partition, 5_000, 1)
    assert [is_done(one) for one in (first, second, third)] == [False, False, True], "any call may write done bits"
    partition.answered(begun, "ok", [b""] * len(begun.touched))
    call = partition.commit(room=1)
    assert call is not None
    assert [retry.idh for retry in call.work.retries] == [first.idh]
    assert [is_done(one) for one in (first, second)] == [True, False]


def test_an_outcome_of_a_slice_that_is_read_again_is_dropped_with_the_slice() -> None:
    partition = partition_with(0)
    [flight] = leave(partition, 5_000, 1)
    fail(partition, flight)
    partition.forget(flight.live)
    assert partition.commit() is None, "the row comes back as fired and not done, and has another outcome"
    assert partition.drained


def test_a_lane_continues_on_the_server_although_the_outcome_that_freed_it_was_dropped() -> None:
    partition = Partition(KEYS, b"1.a", 1e9, open_flow())
    live = LiveSlice(KEYS, Slice(1000, 0), 0.5)
    live.load_bitmaps(b"", b"")
    retry = Body("log:", b"1", lane="l", attempt=2, original_due_ms=0)
    live.absorb([entry(0, INDEXED | LANE, bytes(16), retry)])
    partition.add(live)
    partition.hold_lane("l", bytes(16), 0, 0)
    [head] = leave(partition, 5_000, 10)
    partition.settle(Settled(live, (head.index,), death=Death(head.idh, b"letter", 5_000)), [head])
    partition.forget(live)
    call = partition.commit()
    assert call is not None
    assert call.work.deaths == []
    assert call.work.holds == [("l", b"")], "the server must not hold it for the next owner"


def test_successes_that_left_together_are_done_with_the_commit_that_writes_their_records() -> None:
    partition = partition_with(0)
    flights = leave(partition, 5_000, 4)
    runs = tuple(Run(RunRecord.of(flight, DELIVERED, DONE, 5_000, 5_000, "node")) for flight in flights)
    together = Settled(flights[0].live, tuple(flight.index for flight in flights), delivered=True, runs=runs)
    partition.settle(together, flights)
    assert not any(map(is_done, flights))
    assert not partition.drained
    call = partition.commit()
    assert call is not None
    assert all(map(is_done, flights))
    assert (len(call.work.runs), call.work.finished, call.size) == (4, 4, 4)


def test_a_commit_writes_few_records_however_many_left_together() -> None:
    partition = partition_with(0)
    flights = leave(partition, 1_000, ROWS)
    outcomes = Outcomes(Policies(RetryPolicy()), ManualClock(1_000), Failures(), history=HistoryRules({"log:": "all"}))
    for settled, some in outcomes.done(FlightGroup(flights[0].live, flights, range(ROWS)), (), [1_000] * ROWS):
        partition.settle(settled, some)
    assert partition.unwritten == ROWS
    sizes = []
    while (call := partition.commit()) is not None:
        sizes.append(len(call.work.runs))
        partition.answered(call, "ok")
    assert sum(sizes) == ROWS
    assert max(sizes) < MOST_OUTCOMES + RUNS_AN_ENTRY
    assert partition.unwritten == 0


def test_details_of_runs_count_in_the_size_of_a_commit() -> None:
    partition = partition_with(0)
    flights = leave(partition, 1_000, 100)
    body = bytes(MOST_BYTES // 10 + 1)
    for flight in flights:
        record = RunRecord.of(flight, DELIVERED, DONE, 1_000, 1_000, "node")
        details = RunDetails(Response(200, (), body))
        partition.settle(Settled(flight.live, (flight.index,), delivered=True, runs=(Run(record, details),)), [flight])
    sizes = []
    while (call := partition.commit()) is not None:
        sizes.append(len(call.work.runs))
        partition.answered(call, "ok")
    assert sum(sizes) == len(flights)
    assert max(sizes) <= 10


def test_nothing_moves_behind_a_failed_head_before_the_head_is_written() -> None:
    partition = partition_with(0)
    live = LiveSlice(KEYS, Slice(1000, 1_000), 0.5)
    live.load_bitmaps(b"", b"")
    live.absorb([entry(n, LANE, n.to_bytes(16, "little"), Body("log:", b"1", lane="l")) for n in range(60)])
    partition.add(live)
    *others, head = leave(partition, 5_000, 1_000)
    assert [one.lane for one in (*others, head)] == [None] * ROWS + ["l"]
    large = NewPlace(others[0].idh, Slice(1000, 60_000), bytes(MOST_BYTES), others[0].address)
    partition.settle(Settled(others[0].live, (others[0].index,), retry=large), [others[0]])
    hold = partition.hold_lane("l", head.idh, 3_600_000, 5_000)
    retry = NewPlace(head.idh, Slice(1000, 3_600_000), head.row, head.address)
    partition.settle(Settled(live, (head.index,), is_over=False, retry=retry, holds=(hold,)), [head])
    sizes = []
    while (call := partition.commit()) is not None:
        sizes.append((len(call.work.holds), len(call.work.moves)))
        partition.answered(call, "ok")
    assert sizes == [(0, 0), (1, 1)], "the first call is full, and the tasks behind the head do not go before it"


def test_a_partition_makes_no_other_call_while_one_is_unanswered() -> None:
    partition = partition_with(0)
    first, _ = leave(partition, 5_000, 2)
    fail(partition, first)
    call = taken(partition, 5_000, 1)
    assert partition.unanswered is call
    assert partition.commit() is None
    assert partition.begin(5_000, 1, commit=True) is None
    partition.answered(call, "early")
    assert partition.commit() is not None


def test_the_count_of_finished_tasks_stays_with_their_done_bits_when_a_begin_is_refused() -> None:
    partition = partition_with(0)
    flights = leave(partition, 5_000, 3)
    for flight in flights:
        partition.settle(Settled(flight.live, (flight.index,), delivered=True), [flight])
    refused = taken(partition, 5_000, 1)
    assert refused.section.finished == 3
    partition.answered(refused, "early")
    again = taken(partition, 5_000, 1)
    assert (again.section.finished, again.section.touches[0].d) == (3, refused.section.touches[0].d)


def test_a_slice_that_is_not_the_one_that_was_read_is_read_again_with_all_that_a_call_touched() -> None:
    partition = partition_with(0, 1_000)
    call = taken(partition, 5_000, 2 * ROWS)
    partition.answered(call, "stale")
    assert not partition.lives
    assert partition.needs_listing
    assert partition.seq == 0, "the server has not counted the call"
