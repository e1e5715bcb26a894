"""Holds: tasks that must not be delivered now, why they are held, and the slices in which they wait.

Commit moves held tasks that were not begun into a hold slice. When the hold ends, that slice is read like any
other, so cancel, get, takeover and drop need no special case. See docs/decisions/0014.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Set
from itertools import groupby, islice, repeat
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ..model.delivery import Body
from ..model.lane import CATCH_UP, LANE, PARKED, RETRY, HoldRecord
from ..store.codec import INDEXED, SCHEDULED, entry
from ..store.codec import LANE as IN_LANE
from ..store.keys import HOLD_MS, Address, Slice, r_of
from ..store.owner.fire import MOST_BYTES, Moves
from ..store.owner.holds import Inherited
from .flight import Flight
from .flow import Flow, is_gradual
from .slice import LiveSlice

if TYPE_CHECKING:
    from .lanes import Lanes


class Hold:
    """One hold of one partition: its slice on the server, and the part of it in memory."""

    __slots__ = ("closing", "from_ms", "has_head", "live", "open", "pending", "place", "record")

    def __init__(self, place: Slice, record: HoldRecord) -> None:
        self.place = place
        self.from_ms = place.from_ms
        self.record = record
        self.open = False
        """The hold has ended: its slice is read and delivered."""
        self.closing = False
        """All tasks in its slice are done and it is being dropped: nothing may be added."""
        self.pending = 0
        """Tasks that are to be moved into its slice."""
        self.has_head = False
        """The failed head that its lane waits for is in its slice too."""
        self.live: LiveSlice | None = None

    @property
    def lane(self) -> str | None:
        return self.record.lane

    def barrier_ms(self) -> float:
        """Return the time from which no task of the lane may leave: an earlier one may be unread in this slice."""
        live = self.live
        if self.closing:
            return inf
        if not self.open or self.pending or live is None or live.unread:
            return -inf
        return live.from_ms + (live.high >> 32) if live.deferred else inf

    def close(self, record: HoldRecord) -> None:
        """Let the hold last (again), and drop rows of its slice that were read and not begun."""
        self.record, self.open = record, False
        if self.live is not None:
            self.live.suspend()

    def end(self) -> None:
        self.open = True
        if self.live is not None and self.live.suspended:
            self.live.resume()


class Holds:
    """The holds of one partition, and the tasks to be moved into their slices."""

    def __init__(self) -> None:
        self.by_key: dict[str, Hold] = {}
        self.by_place: dict[Slice, Hold] = {}
        self.waiting: dict[str, dict[Hold, None]] = {}
        """Holds that last as long as the flow has no room under a key, by that key."""
        self.to_find: dict[Hold, None] = {}
        """Holds that have ended and whose slices are not in memory."""
        self.ended: dict[str, int] = {}
        """Names of dropped hold slices, and when they were dropped: their records are kept as long as the ids."""
        self._moves: list[tuple[Flight, Hold]] = []
        self._latest_ms = 0
        self.records: dict[str, bytes] = {}
        """Records that are still to be written, by slice name."""

    def __iter__(self) -> Iterator[Hold]:
        return iter(list(self.by_key.values()))

    @property
    def has_outcomes(self) -> bool:
        return bool(self._moves or self.records)

    @property
    def under_way(self) -> int:
        """Tasks to be moved into hold slices that no commit has taken yet."""
        return len(self._moves)

    def of_lane(self, lane: str) -> Hold | None:
        return self.by_key.get(LANE + lane)

    def make(self, record: HoldRecord, now_ms: int) -> Hold:
        """Close and return the hold with this key; make a new one with a new slice if there is none."""
        hold = self.by_key.get(record.key)
        if hold is None or hold.closing:
            # Each hold has its own slice, with a name that was never used before.
            self._latest_ms = max(now_ms, self._latest_ms + 1)
            hold = self.add(Hold(Slice.held_since(self._latest_ms), record))
        elif (hold.record.cause, hold.record.reason) == (record.cause, record.reason) and not hold.open:
            return hold
        else:
            record = msgspec.structs.replace(record, since_ms=hold.record.since_ms)
        self.close(hold, record)
        self.records[hold.place.name] = record.encode()
        return hold

    def add(self, hold: Hold) -> Hold:
        self.by_key[hold.record.key] = self.by_place[hold.place] = hold
        return hold

    def close(self, hold: Hold, record: HoldRecord) -> None:
        self.stop_waiting(hold)
        self.to_find.pop(hold, None)
        hold.close(record)
        if record.cause not in (RETRY, PARKED):
            self.waiting.setdefault(record.cause, {})[hold] = None

    def stop_waiting(self, hold: Hold) -> None:
        """Note that this hold waits for no room any more."""
        some = self.waiting.get(hold.record.cause, {})
        some.pop(hold, None)
        if not some:
            self.waiting.pop(hold.record.cause, None)

    def end(self, hold: Hold) -> None:
        self.stop_waiting(hold)
        hold.end()
        if hold.live is None:
            self.to_find[hold] = None

    def remove(self, hold: Hold) -> None:
        """Remove a hold whose slice is gone. Another hold may have its key by now."""
        self.stop_waiting(hold)
        self.to_find.pop(hold, None)
        self.by_place.pop(hold.place, None)
        if self.by_key.get(hold.record.key) is hold:
            del self.by_key[hold.record.key]

    # -- moving in -------------------------------------------------------------------------------------------

    def move(self, flight: Flight, hold: Hold) -> None:
        """Move a task into the slice of the hold with the next commit. The row must not have been begun."""
        flight.live.held.add(flight.index)  # another pass over its list must not take it again
        self._moves.append((flight, hold))
        hold.pending += 1

    def known(self, place: Slice) -> None:
        """Note that a slice exists or existed: new holds get later names."""
        self._latest_ms = max(self._latest_ms, place.since_ms)

    def take_moves(self, most: int, needed: Set[str] = frozenset()) -> "TakenMoves":
        """Take some pending moves, settled in their slices; drop those whose slice is being read again.

        With them go the records of the hold slices named in `needed`: tasks come there too.
        """
        some: list[tuple[Flight, Hold]] = []
        size = 0
        for flight, hold in self._moves[:most]:
            if size >= MOST_BYTES:
                break
            some.append((flight, hold))
            size += len(flight.row)
        del self._moves[: len(some)]
        groups: dict[tuple[LiveSlice, Hold], tuple[list[int], list[bytes | int]]] = {}
        for flight, hold in some:
            if flight.live.forgotten:
                hold.pending -= 1
                continue
            indexes, rows = groups.setdefault((flight.live, hold), ([], []))
            indexes.append(flight.index)
            rows += (flight.index, flight.mark, row_in(hold.place, hold.from_ms, flight))
        moves = []
        for (live, hold), (indexes, rows) in groups.items():
            head = Address(live.partition, live.slice, r_of(live.g), 0).pack()[:-4]
            moves.append(Moves(live.keys, head, *live.move_out(indexes), hold.place, rows))
        holds = {hold: 0 for _, hold in groups}
        records = self._take_records(needed | {hold.place.name for hold in holds}, most)
        for (_, hold), (indexes, _) in groups.items():
            holds[hold] += len(indexes)
        return TakenMoves(moves, records, holds, list(dict.fromkeys(live for live, _ in groups)))

    def _take_records(self, needed: Set[str], most: int) -> list[tuple[str, bytes]]:
        """Take the records of slices that receive tasks now, and some more."""
        names = [name for name in self.records if name in needed]
        names += islice((name for name in self.records if name not in needed), max(0, most - len(names)))
        return [(name, self.records.pop(name)) for name in names]


class TakenMoves(NamedTuple):
    moves: list[Moves]
    records: list[tuple[str, bytes]]
    holds: dict[Hold, int]
    """How many tasks are moved into each."""
    lives: list[LiveSlice]

    def answered(self) -> None:
        """Note that the moves are written, or never will be: the holds may be read."""
        for hold, count in self.holds.items():
            hold.pending -= count
            if hold.live is not None:
                hold.live.unread = True


def row_in(place: Slice, from_ms: int, flight: Flight) -> bytes:
    """Return the entry of a task for a hold slice: the same entry at another offset."""
    offset = flight.place_ms - from_ms
    if 0 <= offset < HOLD_MS:
        return b"%b%c%b" % (offset.to_bytes(4, "big"), _flags(flight), flight.row[5:])
    return row_of(place, flight, msgspec.structs.replace(flight.body, due_ms=flight.due_ms))


def row_of(place: Slice, flight: Flight, body: Body) -> bytes:
    """Like `row_in`, with the due time in the body: the offset cannot express times this far away."""
    offset = min(max(flight.place_ms - place.from_ms, 0), HOLD_MS - 1)
    return entry(offset, _flags(flight), flight.idh, body)


def _flags(flight: Flight) -> int:
    return INDEXED | (IN_LANE if flight.body.lane is not None else 0) | (flight.row[4] & SCHEDULED)


# Moving a task into a hold slice costs the server far more than delivering it. So held tasks are first queued in
# memory, which costs nothing, and moved a few at a time. If their hold ends before that, they just become due again.


class SpillQueue:
    """Held tasks in memory that are still to be moved into hold slices, by the keys of their holds, oldest first."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._waiting: dict[str, deque[Flight]] = {}
        self.count = 0

    def add(self, key: str, flight: Flight) -> None:
        flight.live.held.add(flight.index)  # another pass over its list must not take it again
        self._waiting.setdefault(key, deque()).append(flight)
        self.count += 1

    def take(self, most: int, move: Callable[[str, list[Flight]], None]) -> int:
        """Move some tasks; return how many were examined."""
        looked_at = 0
        for key in list(self._waiting):
            waiting = self._waiting[key]
            if self._flow.room(key) == inf:
                looked_at += len(waiting)
                self._step_back(waiting)
                waiting.clear()
            else:
                some = [waiting.popleft() for _ in range(min(len(waiting), most - looked_at))]
                looked_at += len(some)
                move(key, [flight for flight in some if not flight.live.forgotten])
            if not waiting:
                del self._waiting[key]
            if looked_at >= most:
                break
        self.count -= looked_at
        return looked_at

    def _step_back(self, flights: "deque[Flight]") -> None:
        """Make tasks due again in their slices: they are no longer held."""
        for live, run in groupby(flights, key=lambda flight: flight.live):
            if not live.forgotten:
                live.step_back((flight.key, flight.row) for flight in run)


FEW_BEHIND: Final = 32
"""Tasks behind a failed head that may wait in memory; more are moved into a hold slice."""

FEW_BYTES: Final = 64 * 1024
"""Bytes of a lane that may wait in memory when lanes fill it, however few tasks these are."""

MOST_UNDER_WAY: Final = 2_000
"""Pending moves into hold slices at which no further ones are started."""

SOME_LANES: Final = 128
"""Holds checked per poll for whether they have ended: checking thousands would block the loop."""

LONG_WAIT_MS: Final = 10_000
"""Behind a head with a longer retry wait than this, no task waits in memory: its slice could not be dropped."""

_LIVE: Final = attrgetter("live")
_TARGET: Final = attrgetter("body.target")


def _due_ms(flight: Flight) -> float:
    """Return the due time that counts for catching up: a task that was held is not overdue because of it."""
    live = flight.live
    return inf if live.slice.is_hold and live.pace != CATCH_UP else flight.place_ms


class HoldPolicy:
    """Decides which tasks of a partition are held. Tasks of a lane wait under the hold of the lane, for any cause."""

    lanes: "Lanes"

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.holds = Holds()
        self._to_look_at: list[Hold] = []
        self.spill_queue = SpillQueue(flow)

    @property
    def has_outcomes(self) -> bool:
        return self.holds.has_outcomes

    def take_moves(self, most: int, needed: Set[str]) -> TakenMoves:
        return self.holds.take_moves(most, needed)

    @property
    def to_move(self) -> bool:
        """True if held tasks are in memory and may have to be moved."""
        return bool(self.spill_queue.count or self.lanes.crowded)

    @property
    def standing(self) -> int:
        """Number of tasks that are in memory only until they are moved. While there are many, no more are read."""
        return self.spill_queue.count + self.holds.under_way

    def barrier_ms(self, lane: str) -> float:
        hold = self.holds.of_lane(lane)
        return inf if hold is None else hold.barrier_ms()

    # -- into hold slices ----------------------------------------------------------------------------------

    def sort_out(self, flights: list[Flight], now_ms: int) -> list[Flight]:
        """Return the tasks (without lanes) that may go out now, and hold back the others."""
        before_ms = now_ms - self.flow.overdue_after_ms
        overdue = repeat(False) if before_ms == -inf else (_due_ms(flight) < before_ms for flight in flights)
        kinds = list(zip(map(_TARGET, flights), overdue, strict=False))
        refused: dict[tuple[str, bool], str] = {}
        admitted: dict[tuple[str, bool], int] = {}
        for kind, wanted in Counter(kinds).items():
            target, is_overdue = kind
            admitted[kind], key = self.flow.admit(target, None, wanted, overdue=is_overdue)
            if key:
                refused[kind] = key
        if not refused:
            return flights
        leaving = []
        for flight, kind in zip(flights, kinds, strict=True):
            # A task begun by a former owner may have been delivered: it goes out again even if it is held now.
            if kind not in refused or flight.live.to_redo(flight.index):
                leaving.append(flight)
            elif admitted[kind]:
                admitted[kind] -= 1
                leaving.append(flight)
            else:
                self._hold_back(flight, refused[kind], now_ms)
        return leaving

    def _hold_back(self, flight: Flight, key: str, now_ms: int) -> None:
        own = self.holds.by_key.get(key)
        if own is None or own.live is not flight.live:
            self.spill_queue.add(key, flight)
        elif own.open and self._hold_of(key, now_ms).open:
            flight.live.put_back([flight.key])
        # Otherwise its row was released when its hold closed, and stays in the hold slice.

    def spill(self, most: int, now_ms: int) -> int:
        """Queue some held tasks for the next commits to move; return how many were examined."""
        if self.holds.under_way >= MOST_UNDER_WAY:
            return 0
        looked_at = self._spill_queued(most, now_ms) if self.spill_queue.count else 0
        return looked_at + self.spill_lanes(now_ms, most - looked_at)

    def _spill_queued(self, most: int, now_ms: int) -> int:
        """Move some tasks of the spill queue into hold slices with the next commit."""

        def move(key: str, flights: list[Flight]) -> None:
            hold = self._hold_of(key, now_ms) if flights else None
            for flight in flights:
                if hold is not None:
                    self.holds.move(flight, hold)

        return self.spill_queue.take(most, move)

    def _hold_of(self, key: str, now_ms: int) -> Hold:
        why = self.flow.why(key)
        record = HoldRecord(key, key, now_ms, why.reason, why.who, why.until_ms, code=why.code)
        own = self.holds.by_key.get(key)
        if own is None or not own.open or own.closing or not is_gradual(key):
            return self.holds.make(record, now_ms)
        # Its tasks go out gradually: do not close it because others join them.
        self._refresh_record(own)
        return own

    def _refresh_record(self, hold: Hold) -> None:
        """Keep the reason of a hold up to date, so that `explain` reports the present state of a breaker."""
        why = self.flow.why(hold.record.cause)
        if hold.closing or (not why.code and not (hold.record.code and hold.open)):
            return  # nothing but a receiver's state changes while its tasks wait
        fresh = msgspec.structs.replace(hold.record, reason=why.reason, until_ms=why.until_ms, code=why.code)
        if fresh != hold.record:
            hold.record = fresh
            self.holds.records[hold.place.name] = fresh.encode()

    def takes(self, lane: str, flight: Flight) -> bool:
        """Move a task straight into the hold slice of its stalled lane, if there is one; return True if so."""
        hold = self.holds.of_lane(lane) if self.holds.by_key else None
        if hold is None or hold.open or hold.closing or hold.live is flight.live or not self.lanes.is_closed(lane):
            return False
        head = None if lane in self.lanes.held_by else self.lanes.waits_for(lane)
        if flight.is_retry_of(head) or flight.live.to_redo(flight.index):
            return False
        hold.has_head = hold.has_head or flight.is_retry_of(self.lanes.waits_for(lane))
        self.holds.move(flight, hold)
        return True

    def may_leave(self, lane: str, flight: Flight, now_ms: float) -> bool:
        """Return True if the next task of a lane may leave. If it has to wait, the whole lane waits."""
        hold = self.holds.of_lane(lane)
        # A task that was held for another reason is not overdue because of it.
        behind = not flight.live.slice.is_hold or (hold is not None and hold.record.cause == CATCH_UP)
        overdue = behind and flight.place_ms < now_ms - self.flow.overdue_after_ms
        _, key = self.flow.admit(flight.body.target, lane, overdue=overdue)
        if key:
            self.lanes.hold_up(lane, key)
        return not key

    def spill_lanes(self, now_ms: int, most: int = MOST_UNDER_WAY) -> int:
        """Move tasks out of stalled lanes if they are many or the stall is long. Some lanes at a time: thousands may
        have stalled at once."""
        before, looked_at = self.holds.under_way, 0
        while self.lanes.crowded and before < MOST_UNDER_WAY and looked_at < most:
            self._spill_lane(self.lanes.crowded.pop(), now_ms)
            looked_at += 1 + self.holds.under_way - before
            before = self.holds.under_way
        return looked_at

    def _spill_lane(self, lane: str, now_ms: int) -> None:
        hold = self.holds.of_lane(lane)
        if hold is not None and hold.closing:
            hold = None  # all tasks in its slice are done
        behind = self.lanes.number_behind(lane, None if hold is None else hold.live)
        if not self.lanes.is_closed(lane):
            large = self.lanes.is_full and self.lanes.bytes_behind(lane) > FEW_BYTES
            if large or (behind > FEW_BEHIND and (hold is not None or self.lanes.is_full)):
                # Tasks arrive faster than the earlier ones leave. In the hold slice they keep their order.
                self._move_behind(lane, hold or self._open_hold(lane, now_ms))
            return
        long = self.lanes.until.get(lane, 0) - now_ms > LONG_WAIT_MS
        if hold is not None or lane in self.lanes.held_by or behind > FEW_BEHIND or (long and behind):
            self._move_behind(lane, self.holds.make(self._record(lane, now_ms), now_ms))

    def _open_hold(self, lane: str, now_ms: int) -> Hold:
        """Open a hold for tasks behind a head in flight: they are read again, a window at a time."""
        hold = self.holds.make(self._record(lane, now_ms), now_ms)
        self.holds.end(hold)
        return hold

    def _move_behind(self, lane: str, hold: Hold) -> None:
        # Even if the head is in flight: a failed head that got another time may be begun at its old place, is dropped
        # there, and the lane waits for the one that is moved here.
        head = self.lanes.head_of(lane)
        for flight in self.lanes.take_behind(lane, hold.live):
            hold.has_head = hold.has_head or flight.idh == head
            self.holds.move(flight, hold)

    def _record(self, lane: str, now_ms: int) -> HoldRecord:
        key = self.lanes.held_by.get(lane)
        if key is None:
            known = self.holds.of_lane(lane)
            parked = known is not None and known.record.cause == PARKED and known.has_head
            if parked and known is not None:
                return known.record
            return HoldRecord(LANE + lane, RETRY, now_ms)
        why = self.flow.why(key)
        return HoldRecord(LANE + lane, key, now_ms, why.reason, why.who, why.until_ms, code=why.code)

    def park(self, lane: str, reason: str, now_ms: int) -> Hold:
        """Park a lane until it is resumed by hand."""
        return self.holds.make(HoldRecord(LANE + lane, PARKED, now_ms, reason), now_ms)

    def head_stands(self, lane: str, *, inside: bool) -> None:
        """Note whether the failed head of a lane waits in the hold slice of the lane or in the timeline."""
        hold = self.holds.of_lane(lane)
        if hold is not None:
            hold.has_head = inside

    # -- moving out ------------------------------------------------------------------------------------------

    def look_again(self, lanes: int) -> bool:
        """End the holds for which there is room again, of at most `lanes` lanes. Return True if more could be ended."""
        more = False
        for cause, some in list(self.holds.waiting.items()):
            own = self.holds.by_key.get(cause)  # the hold of all tasks without lanes
            first = [own] if own is not None and own in some else []
            for hold in (*first, *islice(some, max(0, lanes))):
                if self._still_held(hold):
                    break  # the others are held by the same cause
                lanes -= hold is not own
                self.holds.stop_waiting(hold)
                self._end_if_over(hold)
            else:
                more = more or bool(some)
        return more

    def look_at_some(self, most: int = SOME_LANES) -> None:
        """Check some holds, whatever they wait for; repeated calls cover all of them."""
        if not self._to_look_at:
            self._to_look_at = list(self.holds)
        some, self._to_look_at = self._to_look_at[:most], self._to_look_at[most:]
        for hold in some:
            known = self.holds.by_place.get(hold.place) is hold
            if known and not hold.open and not self._still_held(hold):
                self._end_if_over(hold)
            if known:
                self._refresh_record(hold)

    def lane_is_free(self, lane: str) -> None:
        """End the hold of a lane whose head is settled."""
        hold = self.holds.of_lane(lane) if self.holds.by_key else None
        if hold is not None and not hold.open and lane not in self.lanes.held_by:
            self._end_if_over(hold)

    def _still_held(self, hold: Hold) -> bool:
        if hold.lane is None:
            return self.flow.room(hold.record.key) < 1
        key = self.lanes.held_by.get(hold.lane)
        if key is None:
            return False
        if not self.flow.may_open(key):
            return True
        self.lanes.release(hold.lane)
        return False

    def _end_if_over(self, hold: Hold) -> None:
        waits = hold.lane is not None and self.lanes.waits_for(hold.lane) is not None
        if not waits or (hold.has_head and hold.record.cause != PARKED):
            self.holds.end(hold)

    def to_find(self, lanes: int) -> list[Hold]:
        """Return ended holds whose slices are not in memory, of at most `lanes` lanes."""
        ended = [hold for hold in self.holds.to_find if not hold.pending]
        return [hold for hold in ended if hold.lane is None] + [hold for hold in ended if hold.lane][: max(0, lanes)]

    def found(self, hold: Hold, live: LiveSlice | None) -> None:
        """Set the slice of a hold; None if there is none because every task to be moved had been cancelled."""
        hold.live = live
        self.holds.to_find.pop(hold, None)
        if live is not None and is_gradual(hold.record.key):
            live.pace = hold.record.key
        if live is None:
            self.holds.records[hold.place.name] = b""
            self.gone(hold.place)

    def forget(self, live: LiveSlice) -> None:
        """Forget a slice that is read again, or gone."""
        hold = self.holds.by_place.get(live.slice)
        if hold is not None and hold.live is live:
            hold.live = None
            if hold.open:
                self.holds.to_find[hold] = None

    def may_drop(self, place: Slice) -> HoldRecord | None:
        """Return the record to keep when the hold's slice, in which all is done, is dropped; None if it must stay."""
        hold = self.holds.by_place.get(place)
        if hold is None:
            return HoldRecord("")
        if not hold.open or hold.pending:
            return None
        hold.closing = True
        return hold.record

    def gone(self, place: Slice, now_ms: int | None = None) -> None:
        """Note that the slice of a hold is dropped."""
        hold = self.holds.by_place.get(place)
        if hold is not None:
            self.holds.remove(hold)
            if hold.lane is not None:
                self.lanes.woken.add(hold.lane)
        if now_ms is not None:
            self.holds.ended[place.name] = now_ms

    # -- taking over ---------------------------------------------------------------------------------------

    def inherit(self, inherited: Inherited) -> None:
        """Resume the holds of the former owner. For a slice without a record, its tasks show why they wait."""
        self.holds.ended = dict(inherited.ended)
        for place in (*inherited.slices, *map(Slice.parse, inherited.ended)):
            self.holds.known(place)
        for lane, head in inherited.heads.items():
            self.lanes.hold(lane, head.idh, since_ms=head.since_ms)
        for known in filter(None, inherited.slices.values()):
            self.flow.inherited(known)
        for place, record in inherited.slices.items():
            hold = Hold(place, record or HoldRecord(f"lost:{place.name}", since_ms=place.since_ms))
            if hold.record.key in self.holds.by_key:  # an earlier hold, in which all is done
                hold.record = HoldRecord(f"lost:{place.name}", since_ms=place.since_ms)
            self.holds.add(hold)
            self.holds.close(hold, hold.record)
            if hold.lane is not None:
                hold.has_head = hold.lane in inherited.heads_inside
                if self.flow.room(hold.record.cause) < inf:
                    # With some room, as many lanes continue as fit: `may_open` counts them.
                    self.lanes.hold_up(hold.lane, hold.record.cause)
        self.look_again(SOME_LANES)
        self.look_at_some()
