"""Holds: tasks that must not be delivered now, why they are held, and the slices in which they wait.

Commit moves held tasks that were not begun into a hold slice. When the hold ends, that slice is read like any
other, so cancel, get, takeover and drop need no special case. See docs/decisions/0014.
"""

from collections import Counter, deque
from collections.abc import Set
from itertools import groupby, islice, repeat
from math import inf
from operator import attrgetter
from typing import Final, NamedTuple

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
from .lanes import Lane, Lanes
from .slice import LiveSlice


class Hold:
    """One hold of one partition: its slice on the server, and the part of it in memory."""

    __slots__ = ("closing", "has_head", "lane", "live", "open", "pending", "place", "record")

    def __init__(self, place: Slice, record: HoldRecord, lane: Lane | None) -> None:
        self.place = place
        self.record = record
        self.lane = lane
        """The lane whose tasks it holds; None if it holds tasks without lanes."""
        self.open = False
        """The hold has ended: its slice is read and delivered."""
        self.closing = False
        """All tasks in its slice are done and it is being dropped: nothing may be added."""
        self.pending = 0
        """Tasks that are to be moved into its slice."""
        self.has_head = False
        """The failed head that its lane waits for is in its slice too."""
        self.live: LiveSlice | None = None

    def barrier_ms(self) -> float:
        """Return the time from which no task of the lane may leave: an earlier one may be unread in this slice."""
        live = self.live
        if self.closing:
            return inf
        if not self.open or self.pending or live is None or live.unread:
            return -inf
        return live.from_ms + (live.high >> 32) if live.deferred else inf

    def _places(self) -> list[int]:
        """Return the times of tasks that were read from its slice and wait in their lane."""
        behind = [] if self.lane is None or self.live is None else self.lane.behind
        return [at_ms for at_ms, _, _, flight in behind if flight.live is self.live]

    def has_plenty(self) -> bool:
        """Return True if enough tasks of its slice wait in their lane: no more have to be read yet."""
        barrier_ms = self.barrier_ms()
        return self.live is not None and sum(at < barrier_ms for at in self._places()) > self.live.kept // 4

    def trim(self, live: LiveSlice, most: int) -> None:
        """Keep at most `most` tasks of its slice in memory, including those that wait in the lane."""
        waiting = self._places()
        room = max(0, most - len(waiting))
        if live.waiting > room:
            # Keep some of the earliest rows even if memory is full: one of them is due next.
            first = not waiting or (live.next_due_ms() or 0) <= min(waiting)
            live.trim(most // 2 + 1 if first else room)


class TakenMoves(NamedTuple):
    """Moves on their way to the server."""

    moves: list[Moves]
    records: list[tuple[str, bytes]]
    holds: Counter[Hold]
    """Number of tasks moved into each hold."""
    lives: list[LiveSlice]

    def answered(self) -> None:
        """Note that the moves are written, or never will be: the holds may be read."""
        for hold, count in self.holds.items():
            hold.pending -= count
            if hold.live is not None:
                hold.live.unread = True


LaneHold = tuple[str, bytes]
"""A lane and the failed head it waits for; empty once the lane waits no more."""


def row_in(place: Slice, flight: Flight) -> bytes:
    """Return the entry of a task for a hold slice: the same entry at another offset."""
    offset = flight.place_ms - place.from_ms
    if 0 <= offset < HOLD_MS:
        return b"%b%c%b" % (offset.to_bytes(4, "big"), _flags(flight), flight.row[5:])
    return row_of(place, flight, msgspec.structs.replace(flight.body, due_ms=flight.due_ms))


def row_of(place: Slice, flight: Flight, body: Body) -> bytes:
    """Like `row_in`, with the due time in the body: the offset cannot express times this far away."""
    offset = min(max(flight.place_ms - place.from_ms, 0), HOLD_MS - 1)
    return entry(offset, _flags(flight), flight.idh, body)


def _flags(flight: Flight) -> int:
    return INDEXED | (IN_LANE if flight.body.lane is not None else 0) | (flight.row[4] & SCHEDULED)


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
    """Decides which tasks of a partition are held. Tasks of a lane wait under the hold of the lane, for any cause.

    Moving a task into a hold slice costs the server far more than delivering it. So held tasks first step aside in
    memory, which costs nothing, and are moved a few at a time. If their hold ends before that, they become due again.
    """

    def __init__(self, flow: Flow, lanes: Lanes) -> None:
        self.flow = flow
        self.lanes = lanes
        self._by_key: dict[str, Hold] = {}
        """Holds of tasks without lanes. The hold of a lane is kept with the lane."""
        self.by_place: dict[Slice, Hold] = {}
        self._waiting: dict[str, dict[Hold, None]] = {}
        """Closed holds, by the key under which their tasks wait for room."""
        self._to_find: dict[Hold, None] = {}
        """Holds that have ended and whose slices are not in memory."""
        self._to_look_at: list[Hold] = []
        self.ended: dict[str, int] = {}
        """Names of dropped hold slices, and when they were dropped: their records are kept as long as the ids."""
        self._latest_ms = 0
        """When the latest hold began: no two slices may have one name."""
        self.records: dict[str, bytes] = {}
        """Records that are still to be written, by slice name."""
        self._aside: dict[str, deque[Flight]] = {}
        """Held tasks in memory that are still to be moved, by the keys under which they wait, oldest first."""
        self.aside = 0
        self._moves: deque[tuple[Flight, Hold]] = deque()
        """Tasks to be moved with the next commits."""

    @property
    def has_outcomes(self) -> bool:
        return bool(self._moves or self.records)

    @property
    def to_move(self) -> bool:
        """True if held tasks are in memory and may have to be moved."""
        return bool(self.aside or self.lanes.crowded)

    @property
    def standing(self) -> int:
        """Number of tasks that are in memory only until they are moved. While there are many, no more are read."""
        return self.aside + len(self._moves)

    # -- holds -----------------------------------------------------------------------------------------------

    def make(self, record: HoldRecord, now_ms: int) -> Hold:
        """Close and return the hold with this key; make a new one with a new slice if there is none."""
        lane = None if record.lane is None else self.lanes.of(record.lane)
        hold = self._by_key.get(record.key) if lane is None else lane.hold
        if hold is None or hold.closing:
            # Each hold has its own slice, with a name that was never used before.
            self._latest_ms = max(now_ms, self._latest_ms + 1)
            hold = self._add(Hold(Slice.held_since(self._latest_ms), record, lane))
        elif (hold.record.cause, hold.record.reason) == (record.cause, record.reason) and not hold.open:
            return hold
        else:
            record = msgspec.structs.replace(record, since_ms=hold.record.since_ms)
        self._close(hold, record)
        self.records[hold.place.name] = record.encode()
        return hold

    def _add(self, hold: Hold) -> Hold:
        self.by_place[hold.place] = hold
        if hold.lane is None:
            self._by_key[hold.record.key] = hold
        else:
            hold.lane.hold = hold
        return hold

    def _close(self, hold: Hold, record: HoldRecord) -> None:
        """Close the hold (again), and drop rows of its slice that were read and not begun."""
        self._unlist(hold)
        hold.record, hold.open = record, False
        if hold.live is not None:
            hold.live.suspend()
        if record.cause not in (RETRY, PARKED):
            self._waiting.setdefault(record.cause, {})[hold] = None

    def _end(self, hold: Hold) -> None:
        self._unlist(hold)
        hold.open = True
        if hold.live is None:
            self._to_find[hold] = None
        elif hold.live.suspended:
            hold.live.resume()

    def _unlist(self, hold: Hold) -> None:
        """Forget what the hold waits for: room, or to be found."""
        self._to_find.pop(hold, None)
        some = self._waiting.get(hold.record.cause, {})
        some.pop(hold, None)
        if not some:
            self._waiting.pop(hold.record.cause, None)

    def _record(self, key: str, cause: str, now_ms: int) -> HoldRecord:
        why = self.flow.why(cause)
        return HoldRecord(key, cause, now_ms, why.reason, why.who, why.until_ms, code=why.code)

    # -- tasks without lanes ---------------------------------------------------------------------------------

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
        own = self._by_key.get(key)
        if own is None or own.live is not flight.live:
            flight.live.held.add(flight.index)  # another pass over its list must not take it again
            self._aside.setdefault(key, deque()).append(flight)
            self.aside += 1
        elif own.open and self._hold_of(key, now_ms).open:
            flight.live.step_back([(flight.key, flight.row)])
        # Otherwise its row was released when its hold closed, and stays in the hold slice.

    def _hold_of(self, key: str, now_ms: int) -> Hold:
        own = self._by_key.get(key)
        if own is None or not own.open or own.closing or not is_gradual(key):
            return self.make(self._record(key, key, now_ms), now_ms)
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
            self.records[hold.place.name] = fresh.encode()

    # -- into hold slices ------------------------------------------------------------------------------------

    def spill(self, most: int, now_ms: int) -> int:
        """Queue some held tasks for the next commits to move; return how many were examined."""
        if len(self._moves) >= MOST_UNDER_WAY:
            return 0
        looked_at = self._spill_aside(most, now_ms) if self.aside else 0
        return looked_at + self.spill_lanes(now_ms, most - looked_at)

    def _spill_aside(self, most: int, now_ms: int) -> int:
        looked_at = 0
        for key, flights in list(self._aside.items()):
            if looked_at >= most:
                break
            if self.flow.room(key) == inf:
                looked_at += len(flights)
                for live, run in groupby(flights, key=_LIVE):
                    if not live.forgotten:
                        live.step_back((flight.key, flight.row) for flight in run)
                flights.clear()
            else:
                some = [flights.popleft() for _ in range(min(len(flights), most - looked_at))]
                looked_at += len(some)
                if known := [flight for flight in some if not flight.live.forgotten]:
                    hold = self._hold_of(key, now_ms)
                    for flight in known:
                        self.move(flight, hold)
            if not flights:
                del self._aside[key]
        self.aside -= looked_at
        return looked_at

    def move(self, flight: Flight, hold: Hold) -> None:
        """Move a task into the slice of the hold with the next commit. The row must not have been begun."""
        flight.live.held.add(flight.index)  # another pass over its list must not take it again
        self._moves.append((flight, hold))
        hold.pending += 1

    def take_moves(self, most: int, needed: Set[str] = frozenset()) -> TakenMoves:
        """Take some pending moves, settled in their slices; drop those whose slice is being read again.

        With them go the records of the hold slices that receive tasks: these, and those named in `needed`.
        """
        groups: dict[tuple[LiveSlice, Hold], list[Flight]] = {}
        size = 0
        for _ in range(min(most, len(self._moves))):
            if size >= MOST_BYTES:
                break
            flight, hold = self._moves.popleft()
            size += len(flight.row)
            if flight.live.forgotten:
                hold.pending -= 1
            else:
                groups.setdefault((flight.live, hold), []).append(flight)
        moves, holds = [], Counter[Hold]()
        for (live, hold), flights in groups.items():
            head = Address(live.partition, live.slice, r_of(live.g), 0).pack()[:-4]
            rows = [part for one in flights for part in (one.index, one.mark, row_in(hold.place, one))]
            moves.append(Moves(live.keys, head, *live.move_out([one.index for one in flights]), hold.place, rows))
            holds[hold] += len(flights)
        needed = needed | {hold.place.name for hold in holds}
        names = [name for name in self.records if name in needed]
        names += islice((name for name in self.records if name not in needed), max(0, most - len(names)))
        records = [(name, self.records.pop(name)) for name in names]
        return TakenMoves(moves, records, holds, list(dict.fromkeys(live for live, _ in groups)))

    # -- lanes -----------------------------------------------------------------------------------------------

    def may_leave(self, lane: Lane, flight: Flight, now_ms: float) -> bool:
        """Return True if the next task of a lane may leave. If it has to wait, the whole lane waits."""
        # A task that was held for another reason is not overdue because of it.
        behind = not flight.live.slice.is_hold or (lane.hold is not None and lane.hold.record.cause == CATCH_UP)
        overdue = behind and flight.place_ms < now_ms - self.flow.overdue_after_ms
        _, key = self.flow.admit(flight.body.target, lane.name, overdue=overdue)
        if key:
            self.lanes.hold_up(lane, key)
        return not key

    def spill_lanes(self, now_ms: int, most: int = MOST_UNDER_WAY) -> int:
        """Move tasks out of stalled lanes if they are many or the stall is long. Some lanes at a time: thousands may
        have stalled at once."""
        before, looked_at = len(self._moves), 0
        while self.lanes.crowded and before < MOST_UNDER_WAY and looked_at < most:
            self._spill_lane(self.lanes.crowded.pop(), now_ms)
            looked_at += 1 + len(self._moves) - before
            before = len(self._moves)
        return looked_at

    def _spill_lane(self, lane: Lane, now_ms: int) -> None:
        hold = None if lane.hold is None or lane.hold.closing else lane.hold  # a closing one takes no more tasks
        behind = lane.number_behind
        if lane.is_closed:
            long = lane.until_ms - now_ms > LONG_WAIT_MS
            if hold is not None or lane.gate is not None or behind > FEW_BEHIND or (long and behind):
                self._move_behind(lane, self.make(self._lane_record(lane, now_ms), now_ms))
            return
        large = self.lanes.is_full and lane.bytes_behind > FEW_BYTES
        if large or (behind > FEW_BEHIND and (hold is not None or self.lanes.is_full)):
            # Tasks arrive faster than the earlier ones leave. In an open hold they keep their order, and are read
            # again, a window at a time.
            if hold is None:
                hold = self.make(self._lane_record(lane, now_ms), now_ms)
                self._end(hold)
            self._move_behind(lane, hold)

    def _move_behind(self, lane: Lane, hold: Hold) -> None:
        # Even if the head is in flight: a failed head that got another time may be begun at its old place, is dropped
        # there, and the lane waits for the one that is moved here.
        for flight in self.lanes.take_behind(lane):
            hold.has_head = hold.has_head or flight.idh == lane.head
            self.move(flight, hold)

    def _lane_record(self, lane: Lane, now_ms: int) -> HoldRecord:
        if lane.gate is not None:
            return self._record(LANE + lane.name, lane.gate, now_ms)
        if lane.hold is not None and lane.hold.record.cause == PARKED and lane.hold.has_head:
            return lane.hold.record
        return HoldRecord(LANE + lane.name, RETRY, now_ms)

    def free_lane(self, name: str, idh: bytes) -> LaneHold | None:
        """Let the next task of a lane leave if this was its head. Return the hold to be cleared on the server."""
        if not self.lanes.free(name, idh):
            return None
        lane = self.lanes.of(name)
        if lane.hold is not None and not lane.hold.open and lane.gate is None:
            self._end_if_over(lane.hold)
        return name, b""

    # -- out of hold slices ----------------------------------------------------------------------------------

    def look_again(self, lanes: int) -> bool:
        """End the holds for which there is room again, of at most `lanes` lanes. Return True if more could be ended."""
        more = False
        for cause, some in list(self._waiting.items()):
            own = self._by_key.get(cause)  # the hold of all tasks without lanes
            first = [own] if own is not None and own in some else []
            for hold in dict.fromkeys((*first, *islice(some, max(0, lanes)))):
                if self._still_held(hold):
                    break  # the others are held by the same cause
                lanes -= hold is not own
                self._unlist(hold)
                self._end_if_over(hold)
            else:
                more = more or bool(some)
        return more

    def look_at_some(self, most: int = SOME_LANES) -> None:
        """Check some holds, whatever they wait for; repeated calls cover all of them."""
        if not self._to_look_at:
            self._to_look_at = list(self.by_place.values())
        some, self._to_look_at = self._to_look_at[:most], self._to_look_at[most:]
        for hold in some:
            if self.by_place.get(hold.place) is hold:
                if not hold.open and not self._still_held(hold):
                    self._end_if_over(hold)
                self._refresh_record(hold)

    def _still_held(self, hold: Hold) -> bool:
        if hold.lane is None:
            return self.flow.room(hold.record.key) < 1
        if hold.lane.gate is None:
            return False
        if not self.flow.may_open(hold.lane.gate):
            return True
        self.lanes.release(hold.lane)
        return False

    def _end_if_over(self, hold: Hold) -> None:
        waits = hold.lane is not None and hold.lane.waits_for is not None
        if not waits or (hold.has_head and hold.record.cause != PARKED):
            self._end(hold)

    def to_find(self, lanes: int) -> tuple[list[Hold], bool]:
        """Return ended holds whose slices are not in memory, of at most `lanes` lanes, and whether there are more."""
        ended = [hold for hold in self._to_find if not hold.pending]
        some = [hold for hold in ended if hold.lane is None]
        some += islice((hold for hold in ended if hold.lane is not None), max(0, lanes))
        return some, len(some) < len(self._to_find)

    def found(self, hold: Hold, live: LiveSlice | None) -> None:
        """Set the slice of a hold; None if there is none because every task to be moved had been cancelled."""
        hold.live = live
        self._to_find.pop(hold, None)
        if live is None:
            self.records[hold.place.name] = b""
            self.gone(hold.place)
        elif is_gradual(hold.record.key):
            live.pace = hold.record.key

    def forget(self, live: LiveSlice) -> None:
        """Forget a slice that is read again, or gone."""
        hold = self.by_place.get(live.slice)
        if hold is not None and hold.live is live:
            hold.live = None
            if hold.open:
                self._to_find[hold] = None

    def may_drop(self, place: Slice) -> HoldRecord | None:
        """Return the record to keep when the hold's slice, in which all is done, is dropped; None if it must stay."""
        hold = self.by_place.get(place)
        if hold is None:
            return HoldRecord("")
        if not hold.open or hold.pending:
            return None
        hold.closing = True
        return hold.record

    def gone(self, place: Slice, now_ms: int | None = None) -> None:
        """Note that the slice of a hold is dropped. Another hold may have its key by now."""
        hold = self.by_place.pop(place, None)
        if hold is not None:
            self._unlist(hold)
            if hold.lane is not None:
                hold.lane.hold = None if hold.lane.hold is hold else hold.lane.hold
                self.lanes.woken.add(hold.lane)
            elif self._by_key.get(hold.record.key) is hold:
                del self._by_key[hold.record.key]
        if now_ms is not None:
            self.ended[place.name] = now_ms

    # -- taking over -----------------------------------------------------------------------------------------

    def inherit(self, inherited: Inherited) -> None:
        """Resume the holds of the former owner. For a slice without a record, its tasks show why they wait."""
        self.ended = dict(inherited.ended)
        places = (*inherited.slices, *map(Slice.parse, inherited.ended))
        self._latest_ms = max((place.since_ms for place in places), default=0)
        for name, failed in inherited.heads.items():
            self.lanes.wait(name, failed.idh, since_ms=failed.since_ms)
        for known in filter(None, inherited.slices.values()):
            self.flow.inherited(known)
        taken: set[str] = set()
        for place, record in inherited.slices.items():
            if record is None or record.key in taken:  # lost, or an earlier hold, in which all is done
                record = HoldRecord(f"lost:{place.name}", since_ms=place.since_ms)
            taken.add(record.key)
            lane = None if record.lane is None else self.lanes.of(record.lane)
            hold = self._add(Hold(place, record, lane))
            self._close(hold, record)
            if lane is not None:
                hold.has_head = lane.name in inherited.heads_inside
                if self.flow.room(record.cause) < inf:
                    # With some room, as many lanes continue as fit: `may_open` counts them.
                    self.lanes.hold_up(lane, record.cause)
        self.look_again(SOME_LANES)
        self.look_at_some()
