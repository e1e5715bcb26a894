"""Hold slices: their names, their places in time, and the entries that are moved there."""

import pytest

from mainspring.engine.flight import Flight
from mainspring.engine.holds import HoldPolicy, row_in
from mainspring.engine.lanes import Lanes
from mainspring.engine.slice import LiveSlice
from mainspring.model.delivery import Body
from mainspring.model.lane import HoldRecord
from mainspring.store.codec import INDEXED, LANE, RESENT, decode, entry
from mainspring.store.keys import Address, Keyspace, Slice, r_of, score_of
from mainspring.store.owner.holds import Inherited
from tests.support.flows import open_flow

KEYS = Keyspace("main", 1).partitions[0]
NOW_MS = 1_800_000_000_123
DAY_MS = 86_400_000


def flight(due_ms: int, *, flags: int = LANE, due_at_put_ms: int | None = None) -> Flight:
    place = Slice.at(due_ms, 1000)
    live = LiveSlice(KEYS, place, score_of(place.start_ms, 7))
    body = Body("log:", b"1", None, "l", due_ms=due_at_put_ms)
    row = entry(due_ms - place.start_ms, flags, b"i" * 16, body)
    live.load_bitmaps(b"", b"")
    live.absorb([row])
    return Flight(body, row, 0, live)


def test_the_name_of_a_hold_slice_says_when_its_hold_began() -> None:
    place = Slice.held_since(NOW_MS)
    assert (place.is_hold, place.since_ms, place.over_ms) == (True, NOW_MS, 0)
    assert Slice.parse(place.name) == place
    assert place.is_well_formed
    assert not Slice(place.width_ms, 5).is_well_formed


@pytest.mark.parametrize("r", [0, 1, 0xFFFFF])
def test_the_score_of_a_hold_slice_is_exact_and_beyond_all_times(r: int) -> None:
    place = Slice.held_since(NOW_MS)
    score = score_of(place.start_ms, r)
    assert r_of(score) == r
    assert int(score) == place.start_ms // 1000
    assert score > NOW_MS / 1000 + 20 * 366 * 86_400
    address = Address(3, place, r, 12)
    assert Address.unpack(3, address.pack()) == address
    assert Address.parse(address.text()) == address


@pytest.mark.parametrize("ago_ms", [0, 1, 60_000, 20 * DAY_MS])
def test_an_entry_keeps_its_time_its_body_and_its_id(ago_ms: int) -> None:
    place, one = Slice.held_since(NOW_MS), flight(NOW_MS - ago_ms, flags=LANE | RESENT)
    row = row_in(place, one)
    assert place.from_ms + int.from_bytes(row[:4], "big") == NOW_MS - ago_ms
    assert (row[4], row[5:21]) == (LANE | INDEXED, one.idh)
    assert decode(row) == one.body


@pytest.mark.parametrize("after_ms", [-30 * DAY_MS, 30 * DAY_MS])
def test_past_the_edge_an_entry_says_itself_when_it_was_due(after_ms: int) -> None:
    place, one = Slice.held_since(NOW_MS), flight(NOW_MS + after_ms)
    body = decode(row_in(place, one))
    assert body.due_ms == NOW_MS + after_ms


def test_each_hold_has_its_own_slice_even_if_many_begin_at_once() -> None:
    holds = HoldPolicy(open_flow(), Lanes())
    holds.inherit(Inherited({}, {}, {Slice.held_since(NOW_MS + 5).name: 0}, set()))
    places = {holds.make(HoldRecord(f"lane:{n}", "retry", NOW_MS), NOW_MS).place for n in range(100)}
    assert len(places) == 100
    assert Slice.held_since(NOW_MS + 5) not in places


def test_the_same_hold_is_the_same_slice_until_it_is_dropped() -> None:
    holds = HoldPolicy(open_flow(), Lanes())
    record = HoldRecord("lane:a", "retry", NOW_MS)
    first = holds.make(record, NOW_MS)
    assert holds.make(record, NOW_MS + 1) is first
    first.closing = True
    assert holds.make(record, NOW_MS + 2) is not first


def test_a_moved_task_is_fired_and_done_only_once_the_commit_is_made() -> None:
    """Written before, the fired bit would make it look begun after a crash."""
    holds, one = HoldPolicy(open_flow(), Lanes()), flight(NOW_MS)
    hold = holds.make(HoldRecord("lane:l", "retry", NOW_MS), NOW_MS)
    holds.move(one, hold)
    assert not any(one.live.bits.fired)
    assert hold.pending == 1
    taken = holds.take_moves(10)
    assert one.live.bits.fired == one.live.bits.done == bytearray(b"\x80")
    [moves] = taken.moves
    assert moves.head + bytes(4) == one.address
    taken.answered()
    assert hold.pending == 0


def test_a_move_from_a_slice_that_is_read_again_is_dropped() -> None:
    holds, one = HoldPolicy(open_flow(), Lanes()), flight(NOW_MS)
    hold = holds.make(HoldRecord("lane:l", "retry", NOW_MS), NOW_MS)
    holds.move(one, hold)
    one.live.forgotten = True
    assert holds.take_moves(10).moves == []
    assert hold.pending == 0
