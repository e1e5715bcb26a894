"""Rows that are due become flights; those of lanes and schedules wait for their turn elsewhere."""

from collections.abc import Sequence
from itertools import repeat
from typing import cast

import msgspec

from ..store.codec import HEADER_BYTES, TOMB, decode, decode_many, target_of_all, without_headers
from .chains import Chains
from .flight import Flight
from .held_work import HeldWork
from .lanes import Lanes
from .live import LiveSlice
from .waiting import Due


class Damaged:
    """An entry whose body cannot be read."""

    __slots__ = ("index", "live", "reason", "row")

    def __init__(self, live: LiveSlice, index: int, row: bytes, reason: str) -> None:
        self.live, self.index, self.row, self.reason = live, index, row, reason


class Boarding:
    """Decodes many rows at once, and one by one where one of them is damaged."""

    def __init__(self, chains: Chains, lanes: Lanes, held_work: HeldWork) -> None:
        self._chains = chains
        self._lanes = lanes
        self._held_work = held_work
        self.damaged: list[Damaged] = []
        """Until they are buried."""

    def flights(self, live: LiveSlice, due: Due, now_ms: int) -> tuple[list[Flight], str | None]:
        """And their target, if all have the same and none expires."""
        rows = cast("list[bytes]", due.rows)
        try:
            if live.sieve.damaged:
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
        """Slowly, because one of these entries is damaged: that one must not hold up the others."""
        flights = []
        for index in indexes:
            row = live.queue.rows[index] or b""
            try:
                if len(row) < HEADER_BYTES or row[4] & TOMB or int.from_bytes(row[:4], "big") >= live.slice.width_ms:
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
        if not self._held_work.takes(lane, flight):
            flight.live.held.add(flight.index)
            self._lanes.offer(lane, flight)
        return True
