"""Intake: every check before anything is written, and the entry that comes of a good task."""

from binascii import crc_hqx
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.client.client import handles_of
from mainspring.model.errors import InvalidInput
from mainspring.model.ids import idh_of
from mainspring.model.limits import HORIZON_MS
from mainspring.model.shared_settings import SharedSettings
from mainspring.model.task import Handle, Task
from mainspring.store.codec import INDEXED, LANE, decode
from mainspring.store.durability import SERVER
from mainspring.store.keys import HOUR_MS, Keyspace, Slice, partition_of
from mainspring.store.tasks import put
from mainspring.store.tasks.encode import FEW, STRETCH, Batch, Intake
from mainspring.store.tasks.put import Widths

NOW_MS = 1_800_000_000_250
KEYS = Keyspace("main", 8)


def take(*tasks: Task, widths: Widths | None = None) -> Batch:
    return Intake(KEYS, widths or Widths(), SharedSettings({"max_payload_bytes": "100"})).take(tasks, NOW_MS)


def handles(batch: Batch) -> list[Handle]:
    """Entries of tasks without ids, as if all were written."""
    places = {(p, place): (1, 0) for p, slices in batch.rows.groups.items() for place in slices}
    found = handles_of(batch, places, [None] * len(batch.named), SERVER)
    return [handle for handle in found if handle is not None]


def rows_of(batch: Batch) -> list[tuple[int, Slice, bytes]]:
    return [
        (p, place, row) for p, places in batch.rows.groups.items() for place, rows in places.items() for row in rows
    ]


def only_row(batch: Batch) -> tuple[int, Slice, bytes]:
    [row] = rows_of(batch)
    return row


def offset(row: bytes) -> int:
    return int.from_bytes(row[:4], "big")


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, 98])
def test_a_plain_task_becomes_an_entry_of_its_second(count: int) -> None:
    batch = take(*[Task("log:", {"n": n}, at=NOW_MS + 1_000 + n) for n in range(count)])
    assert batch.rows.size == count
    found = sorted(rows_of(batch), key=lambda one: one[2])
    for n, (partition, place, row) in enumerate(found):
        idh = row[5:21]
        assert place == Slice(1000, 1_800_000_001_000)
        assert (offset(row), row[4]) == (250 + n, 0)
        assert partition == crc_hqx(idh, 0) % 8
        assert decode(row).payload == b'{"n":%d}' % n


def written(batch: Batch) -> list[tuple[Slice, bytes]]:
    """Rows without their ids, which are drawn in every call."""
    return sorted((place, row[:5] + row[21:]) for _, place, row in rows_of(batch))


def test_many_and_one_by_one_are_written_alike() -> None:
    tasks = [Task("kafka:ticks", "x" * n, at=NOW_MS + n * 100) for n in range(98)]
    tasks += [Task(f"log:{n % 3}", payload, at=NOW_MS + n) for n, payload in enumerate([None, {"a": None}, [1], 2.5])]
    singly = [entry for task in tasks for entry in written(take(task))]
    assert written(take(*tasks)) == sorted(singly)


NEAR = st.integers(NOW_MS - 2_000, NOW_MS + 5_000)
FAR = st.one_of(
    st.integers(NOW_MS + HOUR_MS - 500, NOW_MS + 3 * HOUR_MS),
    st.integers(NOW_MS + HORIZON_MS - 2 * HOUR_MS, NOW_MS + HORIZON_MS),
    st.sampled_from([NOW_MS + HOUR_MS - 1, NOW_MS + HOUR_MS, NOW_MS + HORIZON_MS]),
)
TIMES = st.one_of(st.none(), NEAR, FAR, st.sampled_from(["2027-01-15T09:00:00Z", NOW_MS + 0.5]))
PAYLOADS = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=9),
    st.binary(max_size=9),
    st.just({"a": None}),
    st.just(msgspec.Raw(b"[1]")),
)
TARGETS = st.sampled_from(["log:", "kafka:ticks", "https://a.example/x"])
USUAL = st.builds(Task, TARGETS, st.integers(), st.one_of(NEAR, FAR), id=st.sampled_from([None, "order-42", "a"]))
TASKS = st.builds(
    Task,
    TARGETS,
    PAYLOADS,
    TIMES,
    id=st.sampled_from([None, None, None, "order-42", "x" * 40, "\xe4"]),
    lane=st.sampled_from([None, None, None, "left"]),
    expires=st.sampled_from([None, None, None, "2h"]),
    retry=st.sampled_from([None, None, None, "retries=2"]),
    timeout=st.sampled_from([None, None, None, "3s"]),
)


CROWDS = st.sampled_from([(), (Slice.at(NOW_MS, 1_000),), (Slice.at(NOW_MS + 2 * HOUR_MS, HOUR_MS),)])


@given(st.one_of(st.lists(TASKS, max_size=20), st.lists(USUAL, max_size=20)), CROWDS)
@settings(max_examples=400, deadline=None)
def test_tasks_put_together_are_written_as_each_alone(tasks: list[Task], crowds: tuple[Slice, ...]) -> None:
    widths = Widths()
    for partition, place in product(range(8), crowds):
        widths.saw(partition, place, put.CROWDED + 1)
    batch, alone = take(*tasks, widths=widths), [take(task, widths=widths) for task in tasks]
    assert written(batch) == sorted(entry for one in alone for entry in written(one))
    named = [named for one in alone for named in one.named.values()]
    assert list(batch.named.values()) == named
    assert list(batch.named) == [number for number, task in enumerate(tasks) if task.id is not None]
    assert [handle.due_ms for handle in handles(batch)] == [due for one in alone for due in dues_of(one)]


def dues_of(batch: Batch) -> list[int]:
    return [handle.due_ms for handle in handles(batch)]


def test_uncommon_tasks_do_not_keep_their_neighbours_from_being_encoded_together() -> None:
    usual = [Task("log:", n, at=NOW_MS + 500) for n in range(50)]
    rare = [Task("log:", n, at=NOW_MS + 500, expires="1m") for n in range(50)]
    batch = take(*(task for pair in zip(usual, rare, strict=True) for task in pair))
    assert sorted(decode(row).payload for _, _, row in rows_of(batch)) == sorted(b"%d" % n for n in [*range(50)] * 2)
    assert len(batch.rows.groups) <= 2


def test_tasks_of_one_second_share_slices() -> None:
    tasks = [Task("log:", n, at=NOW_MS + n % 20 * 1_000) for n in range(2_000)]
    slices = [(p, place) for p, slices in take(*tasks).rows.groups.items() for place in slices]
    assert len(slices) <= 20 + 8


def test_tasks_of_one_far_hour_share_slices() -> None:
    tasks = [Task("log:", n, at=NOW_MS + 2 * HOUR_MS + n % 20 * HOUR_MS) for n in range(2_000)]
    slices = [(p, place) for p, slices in take(*tasks).rows.groups.items() for place in slices]
    assert {place.width_ms for _, place in slices} == {HOUR_MS}
    assert len(slices) <= 20 + 8


def partitions_of(intake: Intake, calls: int, tasks: list[Task]) -> set[int]:
    """Return where the first of these tasks goes, call after call."""
    batches = [intake.take(tasks, NOW_MS) for _ in range(calls)]
    first = [run for batch in batches for run in batch.runs if 0 in run.numbers]
    assert len(first) == calls
    return {run.partition for run in first}


def test_calls_of_one_kind_bring_a_second_to_every_partition() -> None:
    tasks = [Task("log:", at=NOW_MS + n * 10) for n in range(8 * STRETCH)]
    lanes = [Task("log:", lane="left") for _ in range(FEW)]
    assert partitions_of(Intake(KEYS, Widths()), 8, tasks) == set(range(8))
    assert partitions_of(Intake(KEYS, Widths()), 8, tasks[:FEW] + lanes) == set(range(8))


def test_calls_that_spread_over_many_hours_fill_the_same_slices() -> None:
    tasks = [Task("log:", at=NOW_MS + 2 * HOUR_MS + n * 97 % 500 * HOUR_MS) for n in range(8 * STRETCH)]
    intake = Intake(KEYS, Widths())
    batches = [intake.take(tasks, NOW_MS) for _ in range(8)]
    places = {(p, place) for batch in batches for p, slices in batch.rows.groups.items() for place in slices}
    assert len(places) <= 500 + 8


@pytest.mark.parametrize("ahead_ms", [2_095, 2 * HOUR_MS, HORIZON_MS])
@pytest.mark.parametrize(
    "task_id", ["a", "order-42", "x" * 31, "x" * 32, "x" * 256, "ä {1}:\n", "\U0001f600", "f" * 31]
)
@pytest.mark.parametrize("payload", [None, "x" * 90, {"n": 1}])
def test_many_and_one_by_one_write_ids_alike(task_id: str, payload: object, ahead_ms: int) -> None:
    task = Task("log:", payload, at=NOW_MS + ahead_ms, id=task_id)
    [careful] = take(task).named.values()
    *_, fast = take(*[task] * FEW).named.values()
    assert fast == careful
    assert (decode(fast.row.row).id, fast.row.idh) == (task_id, idh_of(task_id))
    assert fast.partition == partition_of(task_id, 8)


def test_tasks_with_ids_keep_their_order() -> None:
    tasks = [Task("log:", at=NOW_MS + 1, id=f"{n}" if n % 3 else "x" * 40 + f"{n}") for n in range(30)]
    tasks.insert(7, Task("log:", at=NOW_MS + 1))
    batch = take(*tasks)
    assert list(batch.named) == [n for n in range(31) if n != 7]
    assert [named.id for named in batch.named.values()] == [task.id for task in tasks if task.id is not None]


def test_handles_come_in_the_order_of_the_tasks() -> None:
    tasks = [Task("log:", n, at=NOW_MS + n * 377 % 4_000) for n in range(700)]
    tasks.insert(3, Task("log:", after="1h30m"))
    tasks.insert(400, Task("log:", at=NOW_MS - 86_400_000))
    batch = take(*tasks)
    found = handles(batch)
    wanted = [NOW_MS + 5_400_000 if task.at is None else task.at for task in tasks]
    assert [handle.due_ms for handle in found] == wanted
    payloads = {row[5:21].hex(): decode(row).payload for _, _, row in rows_of(batch)}
    told = [payloads[handle.id.partition("~")[0]] for handle in found]
    assert told == [b"null" if task.payload is None else b"%d" % task.payload for task in tasks]


def test_generated_ids_are_all_different() -> None:
    rows = rows_of(take(*[Task("log:") for _ in range(500)]))
    assert len({row[5:21] for _, _, row in rows}) == 500


def test_a_task_with_an_id_is_indexed_and_goes_where_its_id_says() -> None:
    [item] = take(Task("log:", id="order-42", after="5s")).named.values()
    assert (item.id, item.partition) == ("order-42", partition_of("order-42", 8))
    assert (item.row.idh, item.row.row[4]) == (idh_of("order-42"), INDEXED)
    assert decode(item.row.row).id == "order-42"


def test_a_task_with_a_lane_goes_where_its_lane_says() -> None:
    batch = take(Task("log:", lane="user-7"), Task("log:", lane="user-7", id="order-42"))
    [named] = batch.named.values()
    partition, _, row = only_row(batch)
    assert partition == named.partition == partition_of("user-7", 8)
    assert (row[4], named.row.row[4]) == (LANE, LANE | INDEXED)
    assert decode(row).lane == decode(named.row.row).lane == "user-7"


def test_a_task_without_a_time_is_due_now() -> None:
    [handle] = handles(take(Task("log:")))
    assert (handle.due_ms, handle.past) == (NOW_MS, False)


def test_a_delay_counts_from_the_servers_now() -> None:
    [handle] = handles(take(Task("log:", after="1h30m")))
    assert handle.due_ms == NOW_MS + 5_400_000


def test_a_task_an_hour_or_more_ahead_goes_into_an_hour_slice() -> None:
    _, near, _ = only_row(take(Task("log:", at=NOW_MS + HOUR_MS - 1)))
    _, far, row = only_row(take(Task("log:", at=NOW_MS + HOUR_MS)))
    assert (near.width_ms, far.width_ms) == (1_000, HOUR_MS)
    assert far.start_ms + offset(row) == NOW_MS + HOUR_MS


def test_an_overdue_task_is_first_in_the_present_slice_and_keeps_its_due_time() -> None:
    batch = take(Task("log:", at=NOW_MS - 86_400_000))
    _, place, row = only_row(batch)
    assert (place, offset(row), decode(row).due_ms) == (Slice(1000, 1_800_000_000_000), 0, NOW_MS - 86_400_000)
    [handle] = handles(batch)
    assert (handle.due_ms, handle.past) == (NOW_MS - 86_400_000, True)


def test_a_task_overdue_within_this_second_needs_no_due_time_of_its_own() -> None:
    batch = take(Task("log:", at=NOW_MS - 200))
    _, _, row = only_row(batch)
    assert (offset(row), decode(row).due_ms) == (50, None)
    assert handles(batch)[0].past


def test_tasks_after_a_crowded_slice_go_into_finer_ones() -> None:
    widths = Widths()
    for p in range(8):
        widths.saw(p, Slice(1000, 1_800_000_001_000), put.CROWDED + 1)
    batch = take(*[Task("log:", at=1_800_000_001_060) for _ in range(9)], widths=widths)
    assert {place for _, place, _ in rows_of(batch)} == {Slice(50, 1_800_000_001_050)}
    assert {offset(row) for _, _, row in rows_of(batch)} == {10}


@pytest.mark.parametrize("timeout", ["1m30s", timedelta(seconds=90), "PT1M30S"])
@pytest.mark.parametrize("task_id", [None, "order-42"])
def test_a_timeout_goes_with_its_task_and_no_other(timeout: Any, task_id: str | None) -> None:
    plain = Task("log:", at=NOW_MS + 1_000)
    batch = take(plain, msgspec.structs.replace(plain, id=task_id, timeout=timeout), plain)
    named = [item.row.row for item in batch.named.values()]
    rows = named + [row for _, _, row in rows_of(batch)]
    assert sorted(str(decode(row).timeout_ms) for row in rows) == ["90000", "None", "None"]


@pytest.mark.parametrize(
    ("expires", "expires_ms"),
    [("10s", NOW_MS + 15_000), (NOW_MS + 7_000, NOW_MS + 7_000), ("2027-01-15T08:01:00Z", 1_800_000_060_000)],
)
def test_expiry_is_an_instant_or_counts_from_the_due_time(expires: Any, expires_ms: int) -> None:
    _, _, row = only_row(take(Task("log:", after="5s", expires=expires)))
    assert decode(row).expires_ms == expires_ms


@pytest.mark.parametrize("count", [1, FEW])
@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Task("ftp:x"), "scheme"),
        (Task("log:", at=NOW_MS, after="1s"), "both at and after"),
        (Task("log:", at=datetime(2027, 1, 1)), "naive"),  # noqa: DTZ001
        (Task("log:", at=float("nan")), "nan"),
        (Task("log:", at=NOW_MS + HORIZON_MS + 1), "ten years"),
        (Task("log:", at=NOW_MS * 1000), "microseconds"),
        (Task("log:", at=-1), "1970"),
        (Task("log:", after="-1s"), "delay"),
        (Task("log:", "x" * 99), "101 bytes; at most 100"),
        (Task("log:", b"x" * 101), "101 bytes"),
        (Task("log:", object()), "JSON"),
        (Task("log:", {"x": [float("inf")]}, at=NOW_MS), "inf"),
        (Task("log:", id=""), "id is empty"),
        (Task("log:", id="x" * 257), "257 bytes"),
        (Task("log:", id="0" * 32 + "~0.rs.0.0.0"), "generated"),
        (Task("log:", lane=""), "lane is empty"),
        (Task("log:", lane="ä" * 129), "258 bytes"),
        (Task("log:", id="a", lane=""), "lane is empty"),
        (Task("log:", after="5s", expires=NOW_MS), "expires lies before"),
        (Task("log:", expires="soon"), "expires"),
        (Task("log:", at=True), "bool"),
        (Task("log:", timeout="soon"), "timeout: 'soon' is not a delay"),
        (Task("log:", timeout="0s"), "timeout is '0s'; leave it out"),
        (Task("log:", timeout=5), "timeout is of type int"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_task_stops_the_whole_batch(task: Task, why: str, count: int) -> None:
    usual = Task("log:", at=NOW_MS)
    with pytest.raises(InvalidInput, match=why):
        take(*[usual] * count, task, *[usual] * count)


@pytest.mark.parametrize("other", [Task("log:", lane=""), Task("log:", object(), at=NOW_MS), Task("ftp:x", at=NOW_MS)])
def test_the_first_wrong_one_is_reported(other: Task) -> None:
    usual = [Task("log:", at=NOW_MS)] * FEW
    with pytest.raises(InvalidInput, match="nan"):
        take(*usual, Task("log:", {"x": float("nan")}, at=NOW_MS), *usual, other)
