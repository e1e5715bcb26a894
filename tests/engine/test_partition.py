"""What a partition begins, and what it leaves for later."""

from mainspring.engine.partition import Partition
from mainspring.engine.slice import LiveSlice
from mainspring.model.delivery import Body
from mainspring.store.codec import entry
from mainspring.store.keys import Keyspace, Slice

KEYS = Keyspace("main", 1).partitions[0]
ROWS = 600


def partition_with(*starts_ms: int) -> Partition:
    """A partition with full slices of a second that begin then."""
    partition = Partition(KEYS, b"1.a", 1e9)
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


def test_due_tasks_of_the_present_second_leave_however_little_room_there_is() -> None:
    partition = partition_with(0)
    assert begun(partition, 9, 400, whole=True) == 10
    assert begun(partition, 599, 100, whole=True) == 100


def test_a_slice_that_does_not_fit_behind_another_waits_whole() -> None:
    partition = partition_with(0, 1_000)
    assert begun(partition, 5_000, 2 * ROWS - 1, whole=False) == ROWS
