"""A slice in its owner's memory: order, windows, repeats, and bits that must not be lost."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.engine.partition import BeginCall, Partition
from mainspring.engine.slice import LiveSlice, is_set
from mainspring.model.delivery import Body
from mainspring.store.codec import INDEXED, LANE, RESENT, TOMBSTONE, entry
from mainspring.store.keys import HOUR_MS, Keyspace, Slice
from tests.support.flows import open_flow

START_MS = 1_800_000_000_000
KEYS = Keyspace("ns", 1).partitions[0]


def idh(n: int) -> bytes:
    return n.to_bytes(16, "big")


def row(offset_ms: int, n: int, flags: int = 0, payload: bytes = b"1") -> bytes:
    return entry(offset_ms, flags, idh(n), Body("log:", payload))


def live_slice(width_ms: int = 1000) -> LiveSlice:
    return LiveSlice(KEYS, Slice(width_ms, START_MS), 1_800_000_000.25)


def taken(live: LiveSlice, until_ms: int = 10**9, limit: int = 10**9) -> list[int]:
    """Indexes that leave, in the order they leave; their fired bits are set."""
    indexes = list(live.take_due(START_MS + until_ms, limit).indexes)
    if indexes:
        live.touch(indexes, commit=False)
    return indexes


def test_rows_leave_by_millisecond_then_by_arrival() -> None:
    live = live_slice()
    live.absorb([row(500, 1), row(20, 2), row(500, 3), row(0, 4)])
    assert taken(live, 499) == [3, 1]
    assert taken(live, 500) == [0, 2]
    assert live.next_due_ms() is None


def test_a_resent_copy_of_a_task_that_has_left_does_not_leave_again() -> None:
    live = live_slice()
    live.absorb([row(0, 1), row(0, 2)])
    assert taken(live) == [0, 1]
    live.absorb([row(0, 1, RESENT)])
    live.absorb([row(0, 1), row(0, 2), row(0, 1, RESENT)])
    assert taken(live) == []
    assert len(live.repeats) == 1


def test_the_original_that_arrives_after_its_resend_is_the_same_task() -> None:
    live = live_slice()
    live.absorb([row(0, 1, RESENT)])
    live.absorb([row(0, 1, RESENT)])
    assert taken(live) == [0]
    live.absorb([row(0, 1)])
    assert taken(live) == []
    assert len(live.repeats) == 1


def test_a_retry_in_the_same_slice_as_a_resent_task_is_not_a_repeat() -> None:
    live = live_slice()
    live.absorb([row(0, 1, RESENT)])
    live.absorb([row(0, 1, RESENT)])
    assert taken(live) == [0]
    live.settle_many([0])
    live.absorb([row(100, 1, INDEXED)])
    assert taken(live) == [1]
    assert not live.repeats


def test_the_late_original_of_a_cancelled_resend_does_not_leave() -> None:
    live = live_slice()
    tombstone = row(0, 1, RESENT | TOMBSTONE)[:21]
    live.absorb([tombstone])
    live.absorb([tombstone, row(0, 1)])
    assert taken(live) == []


def test_repeats_are_counted_once_although_the_list_is_read_again() -> None:
    live = live_slice()
    rows = [row(0, 1, RESENT), row(0, 1), row(900, 2)]
    live.absorb(rows)
    live.absorb(rows)
    live.restart()
    live.absorb(rows)
    assert len(live.repeats) == 1
    assert taken(live) == [0, 2]


def test_tasks_that_a_former_owner_fired_and_did_not_finish_leave_again() -> None:
    live = live_slice()
    live.load_bitmaps(fired=b"\xe0", done=b"\x80")
    live.absorb([row(i, i) for i in range(4)])
    assert taken(live) == [1, 2, 3]


@pytest.mark.parametrize("width_ms", [1000, HOUR_MS])
def test_windows_lose_nothing_and_keep_order(width_ms: int) -> None:
    seed = random.Random(width_ms)
    rows = [row(seed.randrange(width_ms), n) for n in range(500)]
    live = live_slice(width_ms)
    order: list[int] = []
    for _ in range(1000):
        if live.unread:
            chunk = rows[live.cursor : live.cursor + 50]
            live.unread = len(chunk) == 50
            live.open_window(START_MS + width_ms // 7 * (1 + len(order) // 80))
            if chunk:
                live.absorb(chunk)
                live.trim(40)
        elif live.waiting:
            order += taken(live, limit=7)
        elif live.needs_next_window(START_MS + width_ms, 0):
            live.next_window(START_MS + width_ms)
        else:
            break
        assert live.waiting <= 90
    assert order == sorted(range(500), key=lambda i: (int.from_bytes(rows[i][:4], "big"), i))


def partition_with(live: LiveSlice) -> Partition:
    partition = Partition(KEYS, b"token", lease_until=float("inf"), flow=open_flow())
    partition.add(live)
    return partition


def begin(partition: Partition, now_ms: int, limit: int = 100) -> BeginCall | None:
    return partition.begin(now_ms, limit, commit=True)


def test_a_begin_that_is_undone_after_the_list_is_read_again_keeps_the_task_readable() -> None:
    live = live_slice()
    rows = [row(0, n) for n in range(3)]
    live.absorb(rows)
    partition = partition_with(live)
    begun = begin(partition, START_MS, 2)
    assert begun is not None
    live.restart()
    partition.answered(begun, "early")
    live.absorb(rows[live.cursor :])
    again = begin(partition, START_MS, 10)
    assert again is not None
    assert not partition.take_notes()[0]
    assert sorted(flight.index for flight in again.flights) == [0, 1, 2]


def test_a_begin_taken_back_after_the_next_window_opened_keeps_the_task_readable() -> None:
    live = live_slice()
    rows = [row(n, n) for n in range(10)]
    live.absorb(rows)
    live.unread = False
    live.trim(4)
    partition = partition_with(live)
    begun = begin(partition, START_MS + 999, 4)
    assert begun is not None
    assert live.needs_next_window(START_MS, 1000)
    live.next_window(START_MS + 1000)
    partition.answered(begun, "early")
    live.absorb(rows[live.cursor :])
    again = begin(partition, START_MS + 999, 100)
    assert again is not None
    assert not partition.take_notes()[0]
    assert [flight.index for flight in again.flights] == list(range(10))


def aside(live: LiveSlice, count: int) -> list[int]:
    """Rows that were due and are held back."""
    indexes = list(live.take_due(START_MS + 999, count).indexes)
    live.held.update(indexes)
    return indexes


def step_back(live: LiveSlice, indexes: list[int], rows: list[bytes]) -> None:
    live.step_back((int.from_bytes(rows[i][:4], "big") << 32 | i, rows[i]) for i in indexes)


@pytest.mark.parametrize("read_before", [0, 2, 6])
def test_rows_that_step_back_while_the_list_is_read_again_leave_once(read_before: int) -> None:
    live = live_slice()
    rows = [row(n, n) for n in range(6)]
    live.absorb(rows)
    some = aside(live, 4)
    live.restart()
    live.absorb(rows[:read_before])
    step_back(live, some, rows)
    live.absorb(rows[live.cursor :])
    due = live.take_due(START_MS + 999, 100)
    assert list(due.indexes) == list(range(6))
    assert due.rows == rows


@pytest.mark.parametrize("read_before", [0, 2, 10])
def test_rows_that_step_back_while_the_next_window_is_read_leave_once(read_before: int) -> None:
    live = live_slice()
    rows = [row(n, n) for n in range(10)]
    live.absorb(rows)
    live.unread = False
    live.trim(4)
    some = aside(live, 4)
    live.next_window(START_MS + 1000)
    live.absorb(rows[:read_before])
    step_back(live, some, rows)
    live.absorb(rows[live.cursor :])
    due = live.take_due(START_MS + 999, 100)
    assert list(due.indexes) == list(range(10))
    assert due.rows == rows


def test_a_row_that_steps_back_behind_the_end_of_the_window_does_not_hide_those_before_it() -> None:
    live = live_slice()
    rows = [row(500, 0), row(1, 1), row(2, 2), row(3, 3)]
    live.absorb(rows[:1])
    some = aside(live, 1)
    live.absorb(rows[1:])
    live.unread = False
    live.trim(1)
    step_back(live, some, rows)
    assert taken(live, 1) == [1]
    live.next_window(START_MS + 1000)
    live.absorb(rows)
    assert taken(live, 999) == [2, 3, 0]


def test_a_redelivery_taken_back_stays_fired_on_the_server() -> None:
    live = live_slice()
    live.load_bitmaps(fired=b"\x80", done=b"")
    live.absorb([row(0, 1), row(5, 2)])
    partition = partition_with(live)
    begun = begin(partition, START_MS, 10)
    assert begun is not None
    partition.answered(begun, "early")
    assert live.bits.fired[0] & 0x80, "a cancel would now succeed for a task that may have been delivered"
    again = begin(partition, START_MS + 5, 10)
    assert again is not None
    assert [flight.index for flight in again.flights] == [0, 1]


def test_a_damaged_offset_does_not_leave_as_a_task() -> None:
    live = live_slice()
    live.absorb([row(1_000_000, 1), row(3, 2)])
    partition = partition_with(live)
    begun = begin(partition, START_MS + 999, 10)
    assert begun is not None
    assert [flight.index for flight in begun.flights] == [1]
    assert [damaged.row_index for damaged in partition.take_notes()[0]] == [0]


def test_an_empty_body_beside_a_double_one_does_not_shift_payloads() -> None:
    live = live_slice()
    hollow = row(0, 1)[:21]
    double = row(0, 2) + msgspec.msgpack.encode(["log:", b"2"])
    live.absorb([hollow, double, row(0, 3, payload=b"3")])
    partition = partition_with(live)
    begun = begin(partition, START_MS, 10)
    assert begun is not None
    assert {flight.idh: flight.payload for flight in begun.flights} == {idh(3): b"3"}
    assert [damaged.row_index for damaged in partition.take_notes()[0]] == [0, 1]


DEEP = b"\xdc\x00\x0e" + msgspec.msgpack.encode(Body("log:", b"1"))[1:] + b"\x91" * 60_000 + b"\xc0"
"""A body with a field that we do not know, lists in lists."""


@pytest.mark.parametrize(
    "bodies",
    [
        [b"\x92\xa4log:", b"\xc4\x011" + b"\x92\xa4log:\xc4\x012"],
        [b"\x92\xa4log:\xc4\x03a", b"bc" + b"\x92\xa4log:\xc4\x012"],
        [b"\x92\xa4log:\xc4\x03\x92\xa4", b"l" + b"\x92\xa4log:\xc4\x012"],
        [DEEP],
    ],
    ids=["one has what the other lacks", "a payload goes on in the next", "it looks like a body", "too deep"],
)
def test_damaged_bodies_leave_as_such_and_stop_no_other(bodies: list[bytes]) -> None:
    live = live_slice()
    live.absorb([row(0, 1)[:21] + body for body in bodies] + [row(0, 2, payload=b"2")])
    partition = partition_with(live)
    begun = begin(partition, START_MS, 10)
    assert begun is not None
    assert [flight.payload for flight in begun.flights] == [b"2"]
    assert [damaged.row_index for damaged in partition.take_notes()[0]] == list(range(len(bodies)))


def test_lane_rows_are_taken_once_over_several_passes() -> None:
    live = live_slice()
    rows = [entry(n, LANE, idh(n), Body("log:", b"%d" % n, lane="a")) for n in range(3)]
    live.absorb(rows)
    partition = partition_with(live)
    begun = begin(partition, START_MS + 10, 10)
    assert begun is not None
    assert [flight.index for flight in begun.flights] == [0]
    live.restart()
    live.absorb(rows)
    assert begin(partition, START_MS + 10, 10) is None


def test_neighbours_that_leave_together_set_exactly_their_own_bits() -> None:
    live = live_slice()
    live.absorb([row(1, n) for n in range(300)])
    assert taken(live) == list(range(300))
    assert fired_of(live) == set(range(300))
    live.absorb([row(1, n) for n in range(300, 803)])
    assert taken(live) == list(range(300, 803))
    assert fired_of(live) == set(range(803))


def test_neighbours_of_which_some_left_before_are_distinguished() -> None:
    live = live_slice()
    live.absorb([row(n % 7, n) for n in range(700)])
    first = taken(live, 3)
    rest = taken(live)
    assert sorted(first + rest) == list(range(700))
    assert fired_of(live) == set(range(700))


came = st.lists(st.integers(0, 999), max_size=12).map(lambda offsets: ("came", offsets))
crowd = st.integers(0, 999).map(lambda first: ("came", [(first + 7 * n) % 1000 for n in range(300)]))
left = st.tuples(st.integers(0, 1_500), st.sampled_from([1, 3, 400, 10**9])).map(lambda took: ("left", took))


@given(st.lists(came | crowd | left, max_size=12))
def test_rows_that_come_and_leave_in_any_order_leave_once_and_in_time(steps: list[Any]) -> None:
    live = live_slice()
    rows: list[int] = []
    waiting: set[int] = set()
    for what, value in [*steps, ("left", (10**6, 10**9))]:
        if what == "came":
            waiting.update(range(len(rows), len(rows) + len(value)))
            live.absorb([row(offset, len(rows) + n) for n, offset in enumerate(value)])
            rows += value
        else:
            until_ms, limit = value
            due = live.take_due(START_MS + until_ms, limit)
            offsets = [rows[i] for i in due.indexes]
            assert len(due.indexes) == min(limit, sum(rows[i] <= until_ms for i in waiting))
            assert waiting.issuperset(due.indexes)
            assert due.latest == max(offsets, default=0) <= until_ms
            assert until_ms >= 1_000 or offsets == sorted(offsets), "only what is overdue as a whole leaves as it came"
            assert [one and one[5:21] for one in due.rows] == [idh(i) for i in due.indexes]
            waiting.difference_update(due.indexes)
        assert live.waiting == len(waiting)
        assert live.next_due_ms() == min((START_MS + rows[i] for i in waiting), default=None)
    assert not waiting


def fired_of(live: LiveSlice) -> set[int]:
    return {index for index in range(len(live.bits.fired) * 8) if is_set(bytes(live.bits.fired), 0, index)}
