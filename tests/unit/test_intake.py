"""Intake: every check before anything is written, and the entry that comes of a good task."""

from binascii import crc_hqx
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from mainspring.model.errors import InvalidInput
from mainspring.model.ids import idh_of
from mainspring.model.limits import HORIZON_MS
from mainspring.model.task import Task
from mainspring.store import put
from mainspring.store.codec import INDEXED, LANE, decode
from mainspring.store.intake import Batch, Intake, Named, Plain
from mainspring.store.keys import HOUR_MS, Keyspace, Slice, partition_of
from mainspring.store.put import Widths

NOW_MS = 1_800_000_000_250
KEYS = Keyspace("main", 8)


def take(*tasks: Task, items: bool = True, widths: Widths | None = None) -> Batch:
    return Intake(KEYS, widths or Widths(), max_payload_bytes=100).take(tasks, NOW_MS, items=items)


def rows_of(batch: Batch) -> list[tuple[int, Slice, bytes]]:
    return [
        (p, place, row) for p, places in batch.rows.groups.items() for place, rows in places.items() for row in rows
    ]


def only_row(batch: Batch) -> tuple[int, Slice, bytes]:
    [row] = rows_of(batch)
    return row


def offset(row: bytes) -> int:
    return int.from_bytes(row[:4], "big")


@pytest.mark.parametrize("items", [True, False])
def test_a_plain_task_becomes_an_entry_of_its_second(items: bool) -> None:
    batch = take(*[Task("log:", {"n": n}, at=NOW_MS + 1_000 + n) for n in range(3)], items=items)
    assert len(batch.items) == (3 if items else 0)
    assert batch.rows.size == 3
    found = sorted(rows_of(batch), key=lambda one: one[2])
    for n, (partition, place, row) in enumerate(found):
        idh = row[5:21]
        assert place == Slice(1000, 1_800_000_001_000)
        assert (offset(row), row[4]) == (250 + n, 0)
        assert partition == crc_hqx(idh, 0) % 8
        assert decode(row).payload == b'{"n":%d}' % n


def test_the_fast_way_and_the_careful_way_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda size: bytes(i % 251 for i in range(size)))
    monkeypatch.setattr("random.randrange", lambda _most: 0)
    tasks = [Task("kafka:ticks", "x" * n, at=NOW_MS + n * 100) for n in range(98)]
    assert rows_of(take(*tasks, items=True)) == rows_of(take(*tasks, items=False))


@pytest.mark.parametrize(
    "task_id", ["a", "order-42", "x" * 31, "x" * 32, "x" * 256, "ä {1}:\n", "\U0001f600", "f" * 31]
)
@pytest.mark.parametrize("payload", [None, "x" * 90, {"n": 1}])
def test_the_fast_way_and_the_careful_way_write_ids_alike(task_id: str, payload: object) -> None:
    task = Task("log:", payload, at=NOW_MS + 2_345, id=task_id)
    [careful] = take(task).items  # the first task of a target is looked at with care
    _, fast = take(task, task).items
    assert fast == careful
    assert isinstance(fast, Named)
    assert (decode(fast.row.row).id, fast.row.idh) == (task_id, idh_of(task_id))
    assert fast.partition == partition_of(task_id, 8)


def test_generated_ids_are_all_different() -> None:
    rows = rows_of(take(*[Task("log:") for _ in range(500)]))
    assert len({row[5:21] for _, _, row in rows}) == 500


def test_a_task_with_an_id_is_indexed_and_goes_where_its_id_says() -> None:
    [item] = take(Task("log:", id="order-42", after="5s")).items
    assert isinstance(item, Named)
    assert (item.id, item.partition) == ("order-42", partition_of("order-42", 8))
    assert (item.row.idh, item.row.row[4]) == (idh_of("order-42"), INDEXED)
    assert decode(item.row.row).id == "order-42"


def test_a_task_with_a_lane_goes_where_its_lane_says() -> None:
    batch = take(Task("log:", lane="user-7"), Task("log:", lane="user-7", id="order-42"))
    plain, named = batch.items
    assert isinstance(plain, Plain)
    assert isinstance(named, Named)
    partition, _, row = only_row(batch)
    assert partition == named.partition == partition_of("user-7", 8)
    assert (row[4], named.row.row[4]) == (LANE, LANE | INDEXED)
    assert decode(row).lane == decode(named.row.row).lane == "user-7"


def test_a_task_without_a_time_is_due_now() -> None:
    [item] = take(Task("log:")).items
    assert isinstance(item, Plain)
    assert (item.due_ms, item.past) == (NOW_MS, False)


def test_a_delay_counts_from_the_servers_now() -> None:
    [item] = take(Task("log:", after="1h30m")).items
    assert isinstance(item, Plain)
    assert item.due_ms == NOW_MS + 5_400_000


def test_a_task_an_hour_or_more_ahead_goes_into_an_hour_slice() -> None:
    _, near, _ = only_row(take(Task("log:", at=NOW_MS + HOUR_MS - 1)))
    _, far, row = only_row(take(Task("log:", at=NOW_MS + HOUR_MS)))
    assert (near.width_ms, far.width_ms) == (1_000, HOUR_MS)
    assert far.start_ms + offset(row) == NOW_MS + HOUR_MS


def test_an_overdue_task_stands_first_in_the_slice_of_now_and_keeps_its_due_time() -> None:
    batch = take(Task("log:", at=NOW_MS - 86_400_000))
    _, place, row = only_row(batch)
    assert (place, offset(row), decode(row).due_ms) == (Slice(1000, 1_800_000_000_000), 0, NOW_MS - 86_400_000)
    [item] = batch.items
    assert item.past


def test_a_task_overdue_within_this_second_needs_no_due_time_of_its_own() -> None:
    batch = take(Task("log:", at=NOW_MS - 200))
    _, _, row = only_row(batch)
    assert (offset(row), decode(row).due_ms) == (50, None)
    assert batch.items[0].past


def test_what_follows_a_crowded_slice_goes_into_finer_ones() -> None:
    widths = Widths()
    for p in range(8):
        widths.saw(p, Slice(1000, 1_800_000_001_000), put.CROWDED + 1)
    batch = take(*[Task("log:", at=1_800_000_001_060) for _ in range(9)], items=False, widths=widths)
    assert {place for _, place, _ in rows_of(batch)} == {Slice(50, 1_800_000_001_050)}
    assert {offset(row) for _, _, row in rows_of(batch)} == {10}


@pytest.mark.parametrize("timeout", ["1m30s", timedelta(seconds=90), "PT1M30S"])
@pytest.mark.parametrize("task_id", [None, "order-42"])
def test_a_timeout_goes_with_its_task_and_no_other(timeout: Any, task_id: str | None) -> None:
    plain = Task("log:", at=NOW_MS + 1_000)
    batch = take(plain, msgspec.structs.replace(plain, id=task_id, timeout=timeout), plain)
    named = [item.row.row for item in batch.items if isinstance(item, Named)]
    rows = named + [row for _, _, row in rows_of(batch)]
    assert sorted(str(decode(row).timeout_ms) for row in rows) == ["90000", "None", "None"]


@pytest.mark.parametrize(
    ("expires", "expires_ms"),
    [("10s", NOW_MS + 15_000), (NOW_MS + 7_000, NOW_MS + 7_000), ("2027-01-15T08:01:00Z", 1_800_000_060_000)],
)
def test_expiry_is_an_instant_or_counts_from_the_due_time(expires: Any, expires_ms: int) -> None:
    _, _, row = only_row(take(Task("log:", after="5s", expires=expires)))
    assert decode(row).expires_ms == expires_ms


@pytest.mark.parametrize("items", [True, False])
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
        (Task("log:", id=""), "id is empty"),
        (Task("log:", id="x" * 257), "257 bytes"),
        (Task("log:", id="0" * 32), "generated"),
        (Task("log:", lane=""), "lane is empty"),
        (Task("log:", lane="ä" * 129), "258 bytes"),
        (Task("log:", id="a", lane=""), "lane is empty"),
        (Task("log:", after="5s", expires=NOW_MS), "expires lies before"),
        (Task("log:", expires="soon"), "expires"),
        (Task("log:", at=True), "bool"),
        (Task("log:", timeout="soon"), "timeout: 'soon' is not a delay"),
        (Task("log:", timeout="0s"), "timeout is '0s'; leave it out"),
        (Task("log:", timeout=5), "timeout is a int"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_task_stops_the_whole_batch(task: Task, why: str, items: bool) -> None:
    with pytest.raises(InvalidInput, match=why):
        take(Task("log:"), task, items=items)
