"""What may not go out now: who says so, and the slices in which it waits.

A hold is opened by moving tasks that were not begun into a slice of its own, one step of commit, and ends by reading
that slice like any other. So cancel, get, takeovers and drops need nothing new. docs/decisions/0014 has the choice.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from ..model.delivery import Body
from ..model.hold import LANE, PARKED, RETRY, HoldRecord
from ..store.codec import INDEXED, SCHEDULED, entry
from ..store.codec import LANE as IN_LANE
from ..store.fire import Moves
from ..store.keys import HOLD_MS, Address, Slice, r_of
from .flight import Flight
from .live import LiveSlice
from .waiting import INDEX_MASK


class Why(NamedTuple):
    """Why something is held up, for people."""

    reason: str = ""
    who: str = ""
    until_ms: int | None = None
    code: str = ""
    """For programs: what `explain` calls it."""


class Gate(Protocol):
    """Somebody who can hold up tasks: a pause, a circuit breaker, a rate limit."""

    @property
    def closed(self) -> bool:
        """Is anything held up at all? Asked for every batch; all else only when it is so."""

    def governs(self, target: str) -> bool:
        """May tasks of this target have to wait?"""

    def hold_for(self, target: str, lane: str | None, due_ms: float) -> str | None:
        """The key of the hold under which such a task has to wait now; None when it may go out, and does."""

    def is_closed(self, key: str) -> bool:
        """Does this hold still last?"""

    def room(self, key: str) -> int | None:
        """How many of those that wait under this key may leave now; None when nothing but the hold bounds them."""

    def may_open(self, key: str) -> bool:
        """May one more lane that waits under this key try its luck?"""

    def inherited(self, record: HoldRecord) -> None:
        """A former owner held tasks up, and left this of it. Told before it is asked anything of them."""

    def why(self, key: str) -> Why: ...


class Gates:
    """All who can hold up tasks, as one. The first who does counts."""

    def __init__(self) -> None:
        self.all: list[Gate] = []

    @property
    def closed(self) -> bool:
        return any(gate.closed for gate in self.all)

    def governs(self, target: str) -> bool:
        return any(gate.closed and gate.governs(target) for gate in self.all)

    def hold_for(self, target: str, lane: str | None, due_ms: float) -> str | None:
        for gate in self.all:
            if (key := gate.hold_for(target, lane, due_ms)) is not None:
                return key
        return None

    def is_closed(self, key: str) -> bool:
        return any(gate.is_closed(key) for gate in self.all)

    def room(self, key: str) -> int | None:
        return next((room for gate in self.all if (room := gate.room(key)) is not None), None)

    def may_open(self, key: str) -> bool:
        return all(gate.may_open(key) for gate in self.all)

    def inherited(self, record: HoldRecord) -> None:
        for gate in self.all:
            gate.inherited(record)

    def why(self, key: str) -> Why:
        """Also of one that lets some through: the others wait for the same reason."""
        gates = (gate for gate in self.all if gate.is_closed(key) or gate.room(key) is not None)
        return next((gate.why(key) for gate in gates), Why())


class Hold:
    """One hold of one partition: its slice on the server, and what of it is in memory."""

    __slots__ = ("closing", "from_ms", "has_head", "live", "open", "pending", "place", "record")

    def __init__(self, place: Slice, record: HoldRecord) -> None:
        self.place = place
        self.from_ms = place.from_ms
        self.record = record
        self.open = False
        """It has ended: its slice is read and goes out."""
        self.closing = False
        """All that was in its slice is done, and it is being dropped: nothing may be added."""
        self.pending = 0
        """Tasks on their way into its slice."""
        self.has_head = False
        """The failed head that its lane waits for stands in its slice as well."""
        self.live: LiveSlice | None = None

    @property
    def lane(self) -> str | None:
        return self.record.lane

    def barrier_ms(self) -> float:
        """No task of its lane from here on may leave: an earlier one may stand in this slice, unread."""
        live = self.live
        if self.closing:
            return inf
        if not self.open or self.pending or live is None or live.unread:
            return -inf
        return live.from_ms + (live.high >> 32) if live.deferred else inf

    def close(self, record: HoldRecord) -> None:
        """It lasts (again): what was read of its slice and not begun is let go."""
        self.record, self.open = record, False
        if self.live is not None:
            self.live.suspend()

    def end(self) -> None:
        self.open = True
        if self.live is not None and self.live.suspended:
            self.live.resume()


class Holds:
    """The holds of one partition, and what is on its way into their slices."""

    def __init__(self) -> None:
        self.by_key: dict[str, Hold] = {}
        self.by_place: dict[Slice, Hold] = {}
        self.waiting: dict[str, dict[Hold, None]] = {}
        """Holds that last as long as a gate is closed, by what it calls their cause."""
        self.to_find: dict[Hold, None] = {}
        """Holds that have ended and whose slices are not in memory."""
        self.ended: dict[str, int] = {}
        """Names of slices that are gone, and since when: their records are kept as long as the ids of their tasks."""
        self._moves: list[tuple[LiveSlice, Hold, int, bytes, bytes]] = []
        """Slice it leaves, hold, index there, mark that stays there, entry for the hold slice."""
        self._latest_ms = 0
        self.records: dict[str, bytes] = {}
        """To be written, by the names of their slices."""

    def __iter__(self) -> Iterator[Hold]:
        return iter(list(self.by_key.values()))

    @property
    def has_outcomes(self) -> bool:
        return bool(self._moves or self.records)

    @property
    def under_way(self) -> int:
        """Tasks on their way into hold slices that no commit has taken along yet."""
        return len(self._moves)

    def of_lane(self, lane: str) -> Hold | None:
        return self.by_key.get(LANE + lane)

    def make(self, record: HoldRecord, now_ms: int) -> Hold:
        """The hold with this key, closed; a new one with a slice of its own where there is none."""
        hold = self.by_key.get(record.key)
        if hold is None or hold.closing:
            # Each has a slice of its own, and none the name of one that ever was.
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
        self.no_gate(hold)
        self.to_find.pop(hold, None)
        hold.close(record)
        if record.cause not in (RETRY, PARKED):
            self.waiting.setdefault(record.cause, {})[hold] = None

    def no_gate(self, hold: Hold) -> None:
        """It waits for no gate (any more)."""
        some = self.waiting.get(hold.record.cause, {})
        some.pop(hold, None)
        if not some:
            self.waiting.pop(hold.record.cause, None)

    def end(self, hold: Hold) -> None:
        self.no_gate(hold)
        hold.end()
        if hold.live is None:
            self.to_find[hold] = None

    def remove(self, hold: Hold) -> None:
        """Its slice is gone. Another one may have its key by now."""
        self.no_gate(hold)
        self.to_find.pop(hold, None)
        self.by_place.pop(hold.place, None)
        if self.by_key.get(hold.record.key) is hold:
            del self.by_key[hold.record.key]

    # -- on the way in ---------------------------------------------------------------------------------------

    def move(self, flight: Flight, hold: Hold) -> None:
        """Into its slice, with the next commit. The row must not have been begun."""
        live, index = flight.live, flight.key & INDEX_MASK
        live.held.add(index)  # another pass over its list must not take it again
        self._moves.append((live, hold, index, flight.mark, row_in(hold.place, hold.from_ms, flight)))
        hold.pending += 1

    def known(self, place: Slice) -> None:
        """There is, or was, such a slice."""
        self._latest_ms = max(self._latest_ms, place.since_ms)

    def take_moves(self, most: int) -> "Taken":
        """Some of those on the way, settled in their slices; less those whose slice is read anew."""
        some, self._moves = self._moves[:most], self._moves[most:]
        groups: dict[tuple[LiveSlice, Hold], tuple[list[int], list[bytes | int]]] = {}
        for live, hold, index, mark, row in some:
            if live.forgotten:
                hold.pending -= 1
                continue
            indexes, rows = groups.setdefault((live, hold), ([], []))
            indexes.append(index)
            rows += (index, mark, row)
        moves = []
        for (live, hold), (indexes, rows) in groups.items():
            head = Address(live.partition, live.slice, r_of(live.g), 0).pack()[:-4]
            moves.append(Moves(live.keys, head, *live.move_out(indexes), hold.place, rows))
        holds = {hold: 0 for _, hold in groups}
        records = self._take_records({hold.place.name for hold in holds}, most)
        for (_, hold), (indexes, _) in groups.items():
            holds[hold] += len(indexes)
        return Taken(moves, records, holds, list(dict.fromkeys(live for live, _ in groups)))

    def _take_records(self, needed: set[str], most: int) -> list[tuple[str, bytes]]:
        """Those of slices that tasks are moved into now, and some more."""
        names = [name for name in self.records if name in needed]
        names += islice((name for name in self.records if name not in needed), max(0, most - len(names)))
        return [(name, self.records.pop(name)) for name in names]


class Taken(NamedTuple):
    moves: list[Moves]
    records: list[tuple[str, bytes]]
    holds: dict[Hold, int]
    """How many are moved into each."""
    lives: list[LiveSlice]

    def answered(self) -> None:
        """It is written, or will not be: those that wait for these tasks look again."""
        for hold, count in self.holds.items():
            hold.pending -= count
            if hold.live is not None:
                hold.live.unread = True


def row_in(place: Slice, from_ms: int, flight: Flight) -> bytes:
    """The entry of a task as it stands in a hold slice: the same, at another offset."""
    offset = flight.place_ms - from_ms
    if 0 <= offset < HOLD_MS:
        return b"%b%c%b" % (offset.to_bytes(4, "big"), _flags(flight), flight.row[5:])
    return row_of(place, flight, msgspec.structs.replace(flight.body, due_ms=flight.due_ms))


def row_of(place: Slice, flight: Flight, body: Body) -> bytes:
    """The same with another body that says when it was due: past the edge of what offsets can say, places do not."""
    offset = min(max(flight.place_ms - place.from_ms, 0), HOLD_MS - 1)
    return entry(offset, _flags(flight), flight.idh, body)


def _flags(flight: Flight) -> int:
    return INDEXED | (IN_LANE if flight.body.lane is not None else 0) | (flight.row[4] & SCHEDULED)
