"""Select the tasks of a partition that are due now: rows of slices, heads of lanes, occurrences of schedules."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from math import inf
from typing import Final, NamedTuple, cast

import msgspec

from ..store.codec import decode, decode_many, target_of_all, without_headers
from ..store.keys import Slice
from ..store.owner.fire import MOST_TOUCHES
from .flight import Flight, FlightGroup, grouped
from .flow import Flow
from .holds import HoldPolicy
from .lanes import Lanes
from .occurrences import Chains
from .slice import Due, LiveSlice

MOST_SLICES: Final = 200
"""Most slices that one tick touches in a partition."""

MOST_LANES: Final = 4_096
"""Most lanes examined per tick."""

LANE_SLICES: Final = MOST_TOUCHES - 2 * MOST_SLICES
"""Most slices from which tasks of lanes leave in one tick: together with slices that are due or committed, not
more than a call may carry."""


class Damaged(NamedTuple):
    """An entry whose body cannot be read."""

    live: LiveSlice
    row_index: int
    row: bytes
    reason: str


class DueSelector:
    """Chooses the tasks that leave, and takes them back if they did not leave."""

    def __init__(self, chains: Chains, lanes: Lanes, hold_policy: HoldPolicy, flow: Flow) -> None:
        self._chains = chains
        self._lanes = lanes
        self._hold_policy = hold_policy
        self._flow = flow
        self.damaged: list[Damaged] = []
        """Entries that cannot be read, until the partition takes them."""

    def room_of(self, live: LiveSlice, most: int) -> int:
        """Return how many rows of a hold slice may leave now: its hold may release them gradually."""
        return most if live.pace is None else int(min(most, self._flow.room(live.pace)))

    def take(
        self, slices: Mapping[Slice, LiveSlice], now_ms: int, limit: int, *, whole: bool
    ) -> tuple[list[FlightGroup], int]:
        """Take everything that may leave, up to the limit. With `whole`, take no part of an overdue slice.

        Return it slice by slice, and the latest time at which one of these tasks is placed.
        """
        groups: list[FlightGroup] = []
        latest_ms, room = -1, limit
        for live in slices.values():
            if live.from_ms > now_ms or room <= 0 or len(groups) >= MOST_SLICES:
                break
            waiting = len(live.queue)
            if not waiting or live.blocks_its_lane:
                continue
            if waiting > room and (groups or (whole and live.slice.end_ms <= now_ms)):
                break  # a slice that leaves whole costs less than in two parts
            most = self.room_of(live, room)
            due = live.take_due(now_ms, most) if most else None
            if due is None or not due.rows:
                continue
            room -= len(due.rows)
            if (group := self._group(live, due, now_ms)) is not None:
                groups.append(group)
                latest_ms = max(latest_ms, live.from_ms + due.latest)
        # With no room left, no task leaves, lanes included: a task that is not delivered must not be marked as fired.
        if self._lanes.woken and (room > 0 or groups):
            may = self._hold_policy.may_leave if self._flow.closed else None
            barrier_ms = _barrier_ms(slices.values())
            apart = self._lanes.leaving(barrier_ms, now_ms, may, most=MOST_LANES, most_slices=LANE_SLICES)
            latest_ms = max([latest_ms, *(flight.place_ms for flight in apart)])
            groups += grouped(apart)
        return groups, latest_ms

    def _group(self, live: LiveSlice, due: Due, now_ms: int) -> FlightGroup | None:
        """Return the tasks of these rows that are not held back."""
        flights, target = self._decoded(live, due)
        if live.has_schedules:
            flights = self._chains.cleared(flights, now_ms)
        if live.has_lanes:
            flights = [flight for flight in flights if not self.waits_for_turn(flight)]
        if flights and (live.pace is not None or self._flow.closed):
            flights = self._hold_policy.sort_out(flights, now_ms)
        if not flights:
            return None
        all_leave = len(flights) == len(due.rows)
        indexes = due.indexes if all_leave else [flight.index for flight in flights]
        return FlightGroup(live, flights, indexes, target)

    def _decoded(self, live: LiveSlice, due: Due) -> tuple[list[Flight], str | None]:
        """Return the flights of these rows, and their target if all have the same and none expires."""
        rows = cast("list[bytes]", due.rows)
        if not live.damaged:
            try:
                written = without_headers(rows)
                bodies, target = decode_many(written), target_of_all(written)
                return list(map(Flight, bodies, rows, due.indexes, repeat(live))), target
            except (TypeError, msgspec.DecodeError, UnicodeDecodeError):
                pass  # a row is gone, or a body damaged
        return self._one_by_one(live, due.indexes), None

    def _one_by_one(self, live: LiveSlice, indexes: Sequence[int]) -> list[Flight]:
        """Decode rows one by one because one is damaged: it must not hold up the others."""
        flights = []
        for index in indexes:
            row = live.queue.rows[index] or b""
            try:
                if index in live.damaged:
                    raise msgspec.DecodeError("the header is damaged")
                body = decode(row)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.damaged.append(Damaged(live, index, row, str(error)))
                live.held.add(index)  # another pass over the list must not take it again
                continue
            flights.append(Flight(body, row, index, live))
        return flights

    def waits_for_turn(self, flight: Flight) -> bool:
        """Let a task of a lane wait behind those before it; return False for a task of no lane."""
        if flight.body.lane is None:
            return False
        flight.live.held.add(flight.index)
        self._lanes.offer(flight.body.lane, flight)
        return True

    def take_back(self, groups: Iterable[FlightGroup]) -> None:
        """Make all tasks of a refused call wait again."""
        for group in groups:
            live = group.live
            live.unmark_fired(group.indexes)
            plain = group.flights
            if live.has_lanes:
                plain = [flight for flight in plain if flight.body.lane is None]
                for flight in group.flights:
                    if flight.body.lane is not None:
                        # In its lane: rows of earlier tasks may be left in their slices while later ones leave.
                        flight.live.held.add(flight.index)
                        self._lanes.take_back(flight.body.lane, flight)
            live.step_back((flight.key, flight.row) for flight in plain)


def _barrier_ms(lives: Iterable[LiveSlice]) -> float:
    """Return the time from which no lane's task may leave: earlier ones were dropped to save memory.

    Hold slices do not count: each holds tasks of one lane, which tracks them, or tasks without lanes.
    """
    ends = (live.from_ms + (live.high >> 32) for live in lives if live.deferred and not live.slice.is_hold)
    return min(ends, default=inf)
