"""Select the tasks of a partition that are due now: rows of slices, heads of lanes, occurrences of schedules."""

from collections.abc import Sequence
from itertools import repeat
from math import inf
from typing import Final, cast

import msgspec

from ..store.codec import HEADER_BYTES, SCHEDULED, TOMBSTONE, decode, decode_many, target_of_all, without_headers
from ..store.keys import Slice
from ..store.owner.fire import MOST_TOUCHES, Section
from .flight import Flight, FlightGroup, grouped
from .flow import Flow
from .holds import HoldPolicy
from .lanes import Lanes
from .occurrences import Chains
from .slice import Due, LiveSlice, is_set


class BeginCall:
    """A section on its way to the server, and the flights that leave when the reply arrives."""

    __slots__ = ("groups", "section", "touched")

    def __init__(self, section: Section, groups: list[FlightGroup], touched: list[LiveSlice]) -> None:
        self.section, self.groups, self.touched = section, groups, touched

    @property
    def flights(self) -> list[Flight]:
        return [flight for group in self.groups for flight in group.flights]

    @property
    def tasks(self) -> int:
        return sum(len(group.flights) for group in self.groups)

    def part(self, x: list[bytes]) -> tuple[list[FlightGroup], list[Flight]]:
        """Split into groups that leave and flights cancelled before, whose bits are set in the reply."""
        cancelled: dict[LiveSlice, tuple[int, bytes]] = {}
        for live, touch, bits in zip(self.touched, self.section.touches, x, strict=True):
            if bits.strip(b"\0"):
                cancelled[live] = (max(touch.f_at, 0), bits)
        if not cancelled:
            return self.groups, []
        leaving: list[FlightGroup] = []
        gone: list[Flight] = []
        for group in self.groups:
            if group.live not in cancelled:
                leaving.append(group)
                continue
            first_byte, bits = cancelled[group.live]
            left = [flight for flight in group.flights if not is_set(bits, first_byte, flight.index)]
            gone += (flight for flight in group.flights if is_set(bits, first_byte, flight.index))
            if left:
                leaving.append(group.part(left))
        return leaving, gone


class Damaged:
    """An entry whose body cannot be read."""

    __slots__ = ("index", "live", "reason", "row")

    def __init__(self, live: LiveSlice, index: int, row: bytes, reason: str) -> None:
        self.live, self.index, self.row, self.reason = live, index, row, reason


class RowDecoder:
    """Decodes many rows at once; one by one if any of them is damaged."""

    def __init__(self, chains: Chains, lanes: Lanes, hold_policy: HoldPolicy) -> None:
        self._chains = chains
        self._lanes = lanes
        self._hold_policy = hold_policy
        self.damaged: list[Damaged] = []
        """Damaged entries that are still to be buried."""

    def flights(self, live: LiveSlice, due: Due, now_ms: int) -> tuple[list[Flight], str | None]:
        """Return the flights of these rows, and their target if all have the same and none expires."""
        rows = cast("list[bytes]", due.rows)
        try:
            if live.row_filter.damaged:
                return self._one_by_one(live, due.indexes, now_ms), None
            written = without_headers(rows)
            bodies, target = decode_many(written), target_of_all(written)
        except (TypeError, msgspec.DecodeError, UnicodeDecodeError):  # a row is gone, or a body damaged
            return self._one_by_one(live, due.indexes, now_ms), None
        flights = list(map(Flight, bodies, rows, due.indexes, repeat(live)))
        if live.has_schedules:
            flights = self._chains.cleared(flights, now_ms)
        if live.has_lanes:
            flights = [flight for flight in flights if not self.waits_for_turn(flight)]
        return flights, target

    def _one_by_one(self, live: LiveSlice, indexes: Sequence[int], now_ms: int) -> list[Flight]:
        """Decode rows one by one because one is damaged: it must not hold up the others."""
        flights = []
        for index in indexes:
            row = live.queue.rows[index] or b""
            try:
                if (
                    len(row) < HEADER_BYTES
                    or row[4] & TOMBSTONE
                    or int.from_bytes(row[:4], "big") >= live.slice.width_ms
                ):
                    raise msgspec.DecodeError("the header is damaged")
                body = decode(row)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.damaged.append(Damaged(live, index, row, str(error)))
                continue
            flights.append(Flight(body, row, index, live))
        if live.has_schedules:
            flights = self._chains.cleared(flights, now_ms)
        return [flight for flight in flights if not self.waits_for_turn(flight)]

    def waits_for_turn(self, flight: Flight) -> bool:
        lane = flight.body.lane
        if lane is None:
            return False
        if not self._hold_policy.takes(lane, flight):
            flight.live.held.add(flight.index)
            self._lanes.offer(lane, flight)
        return True


MOST_SLICES: Final = 200
"""Most slices that one tick touches in a partition."""

MOST_LANES: Final = 4_096
"""Most lanes examined per tick."""

LANE_SLICES: Final = MOST_TOUCHES - 2 * MOST_SLICES
"""Most slices from which tasks of lanes leave in one tick: together with slices that are due or committed, not
more than a call may carry."""

_NOTHING_DUE: Final = Due([], [], 0)

LiveSlices = dict[Slice, LiveSlice]


class Leaving:
    """Groups of flights that leave in one tick."""

    __slots__ = ("groups", "max_due_ms", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        """How many more tasks may leave."""
        self.groups: list[FlightGroup] = []
        self.max_due_ms = -1
        """The latest due time among them."""

    @property
    def places(self) -> dict[LiveSlice, Sequence[int]]:
        """Indexes of their rows, by slice."""
        places: dict[LiveSlice, Sequence[int]] = {}
        for group in self.groups:
            known = places.get(group.live)
            places[group.live] = group.indexes if known is None else [*known, *group.indexes]
        return places


class DueSelector:
    """Chooses the tasks that leave, and takes them back if they did not leave."""

    def __init__(self, chains: Chains, lanes: Lanes, hold_policy: HoldPolicy, flow: Flow) -> None:
        self._chains = chains
        self._lanes = lanes
        self._hold_policy = hold_policy
        self._flow = flow
        self.row_decoder = RowDecoder(chains, lanes, hold_policy)

    def room_of(self, live: LiveSlice, most: int) -> int:
        """Return how many rows of a hold slice may leave now: its hold may release them gradually."""
        return most if live.pace is None else int(min(most, self._flow.room(live.pace)))

    def take(self, slices: LiveSlices, now_ms: int, limit: int, *, whole: bool) -> Leaving:
        """Take everything that may leave, up to the limit. With `whole`, take no part of an overdue slice."""
        leaving = self._take_due(slices, now_ms, limit, whole=whole)
        if self._lanes.early:
            self._lanes.wake_due(now_ms)
        # With no room left, no task leaves, lanes included: a task that is not delivered must not be marked as fired.
        if (self._chains.ready or self._lanes.woken) and (leaving.room > 0 or leaving.groups):
            apart = [*self._occurrences(now_ms), *self._heads(slices, now_ms)]
            leaving.max_due_ms = max([leaving.max_due_ms, *(flight.place_ms for flight in apart)])
            leaving.groups += grouped(apart)
        return leaving

    def _take_due(self, slices: LiveSlices, now_ms: int, limit: int, *, whole: bool) -> Leaving:
        leaving = Leaving(limit)
        for live in slices.values():
            room = leaving.room
            if live.from_ms > now_ms or room <= 0 or len(leaving.groups) >= MOST_SLICES:
                break
            waiting = len(live.queue)
            if not waiting or live.blocks_its_lane:
                continue
            if waiting > room and (leaving.groups or (whole and live.slice.end_ms <= now_ms)):
                break  # a slice that leaves whole costs less than in two parts
            most = room if live.pace is None else self.room_of(live, room)
            due = live.take_due(now_ms, most) if most else _NOTHING_DUE
            if due.rows:
                self._select(leaving, live, due, now_ms)
        return leaving

    def _select(self, leaving: Leaving, live: LiveSlice, due: Due, now_ms: int) -> None:
        """Add the due rows that are not held back."""
        leaving.room -= len(due.rows)
        flights, target = self.row_decoder.flights(live, due, now_ms)
        if flights and (live.pace is not None or self._flow.closed):
            flights = self._hold_policy.sort_out(flights, now_ms)
        if flights:
            leaving.max_due_ms = max(leaving.max_due_ms, live.from_ms + due.latest)
            all_leave = len(flights) == len(due.rows)
            indexes = due.indexes if all_leave else [flight.index for flight in flights]
            leaving.groups.append(FlightGroup(live, flights, indexes, target))

    def _occurrences(self, now_ms: int) -> list[Flight]:
        """Return occurrences of schedules that had to wait for the planner, or that could not begin last time."""
        leaving = []
        for flight in self._chains.take_ready():
            flight.live.held.discard(flight.index)
            if not self.row_decoder.waits_for_turn(flight):
                leaving.append(flight)
        return self._hold_policy.sort_out(leaving, now_ms) if leaving and self._flow.closed else leaving

    def _heads(self, slices: LiveSlices, now_ms: int) -> list[Flight]:
        """Return the heads of lanes that may leave now."""
        may = self._hold_policy.may_leave if self._flow.closed else None
        return self._lanes.leaving(_barrier_ms(slices), now_ms, may, most=MOST_LANES, most_slices=LANE_SLICES)

    def take_back(self, begun: BeginCall) -> None:
        """Make all tasks of a refused call wait again."""
        for group in begun.groups:
            live = group.live
            live.unmark_fired(group.indexes)
            plain = group.flights
            if live.has_lanes or live.has_schedules:
                plain = [flight for flight in plain if not self._is_apart(flight)]
            live.step_back((flight.key, flight.row) for flight in plain)

    def _is_apart(self, flight: Flight) -> bool:
        """Return a task of a lane or schedule to where it waited: its row does not come out of the slice again."""
        if flight.body.lane is not None:
            flight.live.held.add(flight.index)
            self._lanes.take_back(flight.body.lane, flight)
        elif flight.row[4] & SCHEDULED:
            flight.live.held.add(flight.index)
            self._chains.ready.append(flight)
        else:
            return False
        return True


def _barrier_ms(slices: LiveSlices) -> float:
    """Return the time from which no lane's task may leave: earlier ones were dropped to save memory.

    Hold slices do not count: each holds tasks of one lane, which tracks them, or tasks without lanes.
    """
    ends = (live.from_ms + (live.high >> 32) for live in slices.values() if live.deferred and not live.slice.is_hold)
    return min(ends, default=inf)
