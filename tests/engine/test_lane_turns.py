"""Lanes: one at a time, the earlier due first."""

from itertools import count

import pytest

from mainspring.engine.flight import Flight
from mainspring.engine.lanes import Lanes
from mainspring.engine.partition import Partition
from mainspring.engine.slice import LiveSlice
from mainspring.model.delivery import Body
from mainspring.store.codec import LANE, entry
from mainspring.store.keys import Keyspace, Slice
from mainspring.store.owner.fire import WriteStatus
from tests.support.flows import open_flow

KEYS = Keyspace("main", 1).partitions[0]
_number = count(1)


@pytest.fixture
def lanes() -> Lanes:
    return Lanes()


def flight(due_ms: int, *, lane: str = "l", attempt: int = 1, idh: bytes = b"") -> Flight:
    n = next(_number)
    body = Body("log:", b"1", None, lane, attempt=attempt, original_due_ms=None if attempt == 1 else 1)
    live = LiveSlice(KEYS, Slice(1000, 0), 0.5)
    row = entry(due_ms, 0, idh or n.to_bytes(16, "big"), body)
    return Flight(body, row, n, live)


def offer(lanes: Lanes, *flights: Flight) -> None:
    for one in flights:
        assert one.lane is not None
        lanes.offer(one.lane, one)


def test_the_first_of_a_lane_leaves_at_once(lanes: Lanes) -> None:
    first = flight(5)
    offer(lanes, first)
    assert lanes.leaving() == [first]
    assert lanes.leaving() == []


def test_the_next_leaves_when_the_one_before_it_is_settled(lanes: Lanes) -> None:
    first, second = flight(5), flight(6)
    offer(lanes, first, second)
    assert lanes.leaving() == [first]
    assert lanes.leaving() == []
    lanes.free("l", first.idh)
    assert lanes.leaving() == [second]


def test_a_bounded_number_of_lanes_is_asked_at_once_and_none_is_forgotten(lanes: Lanes) -> None:
    offer(lanes, *(flight(5, lane=f"l{n}") for n in range(5)))
    assert [len(lanes.leaving(most=2)) for _ in range(4)] == [2, 2, 1, 0]


def test_lanes_leave_from_a_bounded_number_of_slices_and_none_is_forgotten(lanes: Lanes) -> None:
    apart = [flight(5, lane=f"l{n}") for n in range(5)]
    together = [flight(5, lane=f"m{n}") for n in range(5)]
    for one in together:
        one.live = together[0].live
    offer(lanes, *apart, *together)
    leaving = []
    for _ in range(3):
        some = lanes.leaving(most_slices=2)
        assert len({id(one.live) for one in some}) == 2
        leaving += some
    assert len(leaving) + len(lanes.leaving()) == 10


def test_tasks_that_wait_in_memory_are_counted(lanes: Lanes) -> None:
    first, second, third = flight(5), flight(6), flight(7)
    offer(lanes, first, second, third)
    assert lanes.behind == 3
    assert lanes.leaving() == [first]
    assert lanes.behind == 2
    lanes.take_back("l", first)
    assert lanes.behind == 3
    assert lanes.leaving() == [first]
    lanes.wait("l", first.idh)
    assert lanes.take_behind(lanes.of("l")) == [second, third]
    assert lanes.behind == 0


def test_the_earlier_due_leaves_first_even_if_it_came_later(lanes: Lanes) -> None:
    late, early = flight(6), flight(5)
    offer(lanes, late, early)
    assert lanes.leaving() == [early]


def test_the_first_accepted_of_two_tasks_due_at_once_leaves_first(lanes: Lanes) -> None:
    first, second = flight(5), flight(5)
    offer(lanes, second, first)
    assert lanes.leaving() == [first]


def test_lanes_do_not_wait_for_one_another(lanes: Lanes) -> None:
    left, right = flight(5, lane="left"), flight(6, lane="right")
    offer(lanes, left, right)
    assert sorted(lanes.leaving(), key=lambda one: one.due_ms) == [left, right]


def test_a_lane_waits_for_the_retry_of_its_head(lanes: Lanes) -> None:
    head, behind = flight(5), flight(6)
    offer(lanes, head, behind)
    assert lanes.leaving() == [head]
    lanes.wait("l", head.idh)
    assert lanes.leaving() == []
    retry = flight(900, attempt=2, idh=head.idh)
    offer(lanes, retry)
    assert lanes.leaving() == [retry]
    lanes.free("l", head.idh)
    assert lanes.leaving() == [behind]


def test_a_new_owner_of_a_held_lane_waits_too(lanes: Lanes) -> None:
    lanes.wait("l", b"h" * 16)
    offer(lanes, flight(5))
    assert lanes.leaving() == []
    retry = flight(900, attempt=2, idh=b"h" * 16)
    offer(lanes, retry)
    assert lanes.leaving() == [retry]


def test_every_failed_head_is_asked_for_before_one_is_asked_for_again(lanes: Lanes) -> None:
    for lane in ("k", "l", "m"):
        lanes.wait(lane, lane.encode() * 16)
    asked = [*lanes.heads_to_ask(2), *lanes.heads_to_ask(2)]
    assert {lane.name for lane, _ in asked} == {"k", "l", "m"}
    assert len(asked) == 3
    assert len(lanes.heads_to_ask(3)) == 3, "and then all of them again"


def test_only_the_head_frees_its_lane(lanes: Lanes) -> None:
    first, second = flight(5), flight(6)
    offer(lanes, first, second)
    assert lanes.leaving() == [first]
    lanes.free("l", second.idh)
    lanes.free("nobody", first.idh)
    assert lanes.leaving() == []


def test_a_task_that_did_not_leave_lets_an_earlier_one_pass(lanes: Lanes) -> None:
    later = flight(6)
    offer(lanes, later)
    assert lanes.leaving() == [later]
    lanes.take_back("l", later)
    earlier = flight(5)
    offer(lanes, earlier)
    assert lanes.leaving() == [earlier]
    lanes.free("l", earlier.idh)
    assert lanes.leaving() == [later]


def test_a_retry_that_did_not_leave_is_still_the_one_its_lane_waits_for(lanes: Lanes) -> None:
    retry = flight(900, attempt=2)
    lanes.wait("l", retry.idh)
    offer(lanes, retry)
    assert lanes.leaving() == [retry]
    lanes.take_back("l", retry)
    offer(lanes, flight(5))
    assert lanes.leaving() == [retry]


def test_tasks_of_a_forgotten_slice_are_skipped(lanes: Lanes) -> None:
    first, gone, last = flight(5), flight(6), flight(7)
    offer(lanes, first, gone, last)
    assert lanes.leaving() == [first]
    gone.live.forgotten = True
    lanes.free("l", first.idh)
    assert lanes.leaving() == [last]


# -- taken before its time, let go, read anew ----------------------------------------------------------------


@pytest.fixture
def live(partition: Partition) -> LiveSlice:
    """A slice in which nothing waits yet."""
    live = LiveSlice(KEYS, Slice(1000, 0), 0.5)
    live.load_bitmaps(b"", b"")
    partition.add(live)
    return live


@pytest.fixture
def partition() -> Partition:
    return Partition(KEYS, b"1.a", 1e9, open_flow())


def row_of_lane(due_ms: int, idh: bytes, *, attempt: int = 1) -> bytes:
    body = Body("log:", b"1", None, "l", attempt=attempt, original_due_ms=None if attempt == 1 else 1)
    return entry(due_ms, LANE, idh, body)


def begun_at(partition: Partition, now_ms: int, *, status: WriteStatus = "ok") -> list[bytes]:
    """Begin what is due; return the ids of the tasks that left, by the server's answer."""
    begun = partition.begin(now_ms, 100, commit=False)
    if begun is None:
        return []
    partition.answered(begun, status, [b""] * len(begun.section.touches))
    return [one.idh for one in begun.flights]


def test_one_that_was_taken_before_its_time_waits_for_it(partition: Partition, live: LiveSlice) -> None:
    """This node's clock had run ahead: the server refuses it, and all that is due with it."""
    live.absorb([row_of_lane(500, b"first".ljust(16)), row_of_lane(505, b"later".ljust(16))])
    assert begun_at(partition, 600, status="early") == [b"first".ljust(16)]
    assert begun_at(partition, 400) == []
    assert (partition.soonest_ms, partition.behind) == (500, 0)
    assert begun_at(partition, 499) == []
    assert begun_at(partition, 600) == [b"first".ljust(16)]
    assert begun_at(partition, 600) == [], "the lane is under way"


def test_an_earlier_one_that_comes_while_it_waits_goes_first(partition: Partition, live: LiveSlice) -> None:
    live.absorb([row_of_lane(500, b"second".ljust(16))])
    assert begun_at(partition, 600, status="early") == [b"second".ljust(16)]
    assert begun_at(partition, 100) == []
    live.absorb([row_of_lane(400, b"first".ljust(16))])
    assert begun_at(partition, 600) == [b"first".ljust(16)]


def test_a_retry_that_was_taken_before_its_time_waits_for_it(partition: Partition, live: LiveSlice) -> None:
    partition.lanes.wait("l", b"head".ljust(16))
    live.absorb([row_of_lane(500, b"head".ljust(16), attempt=2), row_of_lane(400, b"other".ljust(16))])
    assert begun_at(partition, 600, status="early") == [b"head".ljust(16)]
    assert begun_at(partition, 450) == []
    assert (partition.soonest_ms, partition.behind) == (500, 1)
    assert begun_at(partition, 500) == [b"head".ljust(16)]


def test_a_head_whose_slice_is_read_again_leaves_again(lanes: Lanes) -> None:
    """Its outcome will not be taken: were the lane to wait for it, it would wait for ever."""
    head = flight(5)
    offer(lanes, head, flight(6))
    assert lanes.leaving() == [head]
    head.live.forgotten = True
    lanes.forget(head.live)
    again = flight(5, idh=head.idh)
    offer(lanes, again)
    assert lanes.leaving() == [again]


def test_a_head_on_its_retry_whose_slice_is_read_again_is_still_the_head(lanes: Lanes) -> None:
    head = flight(5, attempt=2)
    lanes.wait("l", head.idh)
    offer(lanes, head, flight(1))
    assert lanes.leaving() == [head]
    head.live.forgotten = True
    lanes.forget(head.live)
    assert lanes.leaving() == []
    again = flight(5, attempt=2, idh=head.idh)
    offer(lanes, again)
    assert lanes.leaving() == [again]


def test_another_slice_read_again_changes_nothing_for_the_head(lanes: Lanes) -> None:
    head, other = flight(5), flight(6)
    offer(lanes, head, other)
    assert lanes.leaving() == [head]
    lanes.forget(other.live)
    assert lanes.leaving() == []


def test_a_head_that_did_not_leave_and_whose_row_was_released_does_not_block_its_lane() -> None:
    partition = Partition(KEYS, b"1.a", 1e9, open_flow())
    live = LiveSlice(KEYS, Slice(1000, 0), 0.5)
    partition.add(live)
    row = entry(5, LANE, b"i" * 16, Body("log:", b"1", None, "l"))
    live.load_bitmaps(b"", b"")
    live.absorb([row])
    begun = partition.begin(10, 100, commit=False)
    assert begun is not None
    live.let_rows_go()
    partition.answered(begun, "early")
    live.absorb([row])  # read again
    again = partition.begin(10, 100, commit=False)
    assert again is not None
    assert [one.idh for one in again.flights] == [b"i" * 16]
