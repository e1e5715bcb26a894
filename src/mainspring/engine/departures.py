"""What of a partition leaves now: its due rows, the heads of its lanes, occurrences of its schedules."""

from collections.abc import Sequence
from math import inf
from typing import Final

from ..store.codec import SCHEDULED
from ..store.fire import MOST_TOUCHES
from ..store.keys import Slice
from .begun import Begun
from .boarding import Boarding
from .chains import Chains
from .flight import Flight
from .held_work import HeldWork
from .holds import Gates
from .lanes import Lanes
from .live import LiveSlice
from .waiting import INDEX_MASK, Due

MOST_SLICES: Final = 200
"""Slices that one tick touches at most in a partition."""

MOST_LANES: Final = 4_096
"""Lanes that are asked in one tick who may leave: as many may go on at once as there are."""

LANE_SLICES: Final = MOST_TOUCHES - 2 * MOST_SLICES
"""Slices out of which tasks of lanes leave in one tick at most: with those that are due and those that are committed no
more than a call may carry."""

_NOTHING_DUE: Final = Due([], [], 0)

Slices = dict[Slice, LiveSlice]


class Leaving:
    """Flights, and where they come from."""

    __slots__ = ("alike", "flights", "max_due_ms", "places", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        """So many more may leave."""
        self.flights: list[Flight] = []
        self.places: dict[LiveSlice, Sequence[int]] = {}
        """The places of their rows."""
        self.max_due_ms = -1
        """The latest due time among them."""
        self.alike: str | None = None
        """Their target, if all have the same and none expires."""


class Departures:
    """Decides who leaves; takes them back if they did not."""

    def __init__(self, chains: Chains, lanes: Lanes, held_work: HeldWork, gates: Gates) -> None:
        self._chains = chains
        self._lanes = lanes
        self._held_work = held_work
        self._gates = gates
        self.boarding = Boarding(chains, lanes, held_work)

    def room_of(self, live: LiveSlice, most: int) -> int:
        """How many of a hold slice may leave now: its hold may let them out little by little."""
        room = None if live.pace is None else self._gates.room(live.pace)
        return most if room is None else min(most, room)

    def take(self, slices: Slices, now_ms: int, limit: int, *, whole: bool) -> Leaving:
        """Everything that may leave, up to the limit. With `whole` no part of a slice that is overdue as a whole."""
        leaving = self._take_due(slices, now_ms, limit, whole=whole)
        if self._lanes.early:
            self._lanes.stir_due(now_ms)
        # With no room left nobody leaves, lanes included: what is not delivered must not be marked as fired.
        if (self._chains.ready or self._lanes.stirred) and (leaving.room > 0 or leaving.flights):
            apart = [*self._occurrences(now_ms), *self._heads(slices, now_ms)]
            leaving.max_due_ms = max([leaving.max_due_ms, *(flight.place_ms for flight in apart)])
            leaving.flights += apart
            leaving.alike = None if apart else leaving.alike
            for live, places in _places(apart).items():
                leaving.places[live] = [*leaving.places.get(live, ()), *places]
        return leaving

    def _take_due(self, slices: Slices, now_ms: int, limit: int, *, whole: bool) -> Leaving:
        leaving = Leaving(limit)
        targets: set[str | None] = set()
        for live in slices.values():
            room = leaving.room
            if live.from_ms > now_ms or room <= 0 or len(leaving.places) >= MOST_SLICES:
                break
            waiting = len(live.queue)
            if not waiting or live.blocks_its_lane:
                continue
            if waiting > room and (leaving.flights or (whole and live.slice.end_ms <= now_ms)):
                break  # a slice that leaves whole costs less than one that leaves in two parts
            most = room if live.pace is None else self.room_of(live, room)
            due = live.take_due(now_ms, most) if most else _NOTHING_DUE
            if due.rows:
                targets.add(self._board(leaving, live, due, now_ms))
        leaving.alike = targets.pop() if len(targets) == 1 else None
        return leaving

    def _board(self, leaving: Leaving, live: LiveSlice, due: Due, now_ms: int) -> str | None:
        """Those that are not held back leave. Returns the target of all."""
        leaving.room -= len(due.rows)
        flights, target = self.boarding.flights(live, due, now_ms)
        if flights and (live.pace is not None or self._gates.closed):
            flights = self._held_work.sort_out(flights, now_ms)
        if flights:
            leaving.max_due_ms = max(leaving.max_due_ms, live.from_ms + due.latest)
            leaving.flights += flights
            all_leave = len(flights) == len(due.rows)
            leaving.places[live] = due.indexes if all_leave else [flight.index for flight in flights]
        return target

    def _occurrences(self, now_ms: int) -> list[Flight]:
        """Occurrences of schedules that the planner had to be asked for, or that could not begin the last time."""
        leaving = []
        for flight in self._chains.take_ready():
            flight.live.held.discard(flight.index)
            if not self.boarding.waits_for_turn(flight):
                leaving.append(flight)
        return self._held_work.sort_out(leaving, now_ms) if leaving and self._gates.closed else leaving

    def _heads(self, slices: Slices, now_ms: int) -> list[Flight]:
        """Of lanes whose turn it is."""
        may = self._held_work.may_leave if self._gates.closed else None
        return self._lanes.leaving(_barrier_ms(slices), now_ms, may, most=MOST_LANES, most_slices=LANE_SLICES)

    def take_back(self, begun: Begun) -> None:
        """None of these has left: everything waits again."""
        keys: dict[LiveSlice, list[int]] = {}
        for flight in begun.flights:
            keys.setdefault(flight.live, []).append(flight.key)
        for live, passes in zip(begun.touched, begun.passes, strict=True):
            some = keys.get(live, [])
            live.unmark_fired([key & INDEX_MASK for key in some])
            if live.passes != passes and some:
                live.restart()  # its rows were let go while the call was under way
            else:
                # What lanes and schedules hold does not come out of the slice again: its row may be gone.
                apart = {flight.index for flight in begun.flights if flight.live is live and _is_apart(flight)}
                live.held |= apart
                live.put_back([key for key in some if key & INDEX_MASK not in apart])
        for flight in begun.flights:
            waits = flight.index in flight.live.held  # else its row is read again, and offered then
            if flight.body.lane is not None:
                (self._lanes.take_back if waits else self._lanes.give_up)(flight.body.lane, flight)
            elif waits and flight.row[4] & SCHEDULED:
                self._chains.ready.append(flight)


def _barrier_ms(slices: Slices) -> float:
    """No lane's task from here on may leave: earlier ones were let go for want of room, and are not held.

    Hold slices are not meant: each holds tasks of one lane, which knows it, or tasks without lanes.
    """
    ends = (live.from_ms + (live.high >> 32) for live in slices.values() if live.deferred and not live.slice.is_hold)
    return min(ends, default=inf)


def _is_apart(flight: Flight) -> bool:
    return flight.body.lane is not None or flight.row[4] & SCHEDULED != 0


def _places(flights: list[Flight]) -> dict[LiveSlice, list[int]]:
    places: dict[LiveSlice, list[int]] = {}
    for flight in flights:
        places.setdefault(flight.live, []).append(flight.index)
    return places
