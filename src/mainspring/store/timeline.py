"""The first tasks of all slices in due order, hold slices apart.

Slices of an hour lie across many of a second, so what comes first is known only when all slices that start before it
have been read. Each is read once for a page: from one of an hour, the rows that come later wait for their turn.
"""

from heapq import nsmallest
from math import sqrt
from typing import Final, NamedTuple

from ..model.errors import StoreError
from .earliest import Look, earliest
from .keys import HOLDS_FROM_S, HOUR_MS, SECOND_MS, Slice
from .listing import slices_in
from .rows import Place, Row, Sliced
from .store import Group, Store
from .wire import Command

COUNTERS: Final = ("accepted", "queued", "done", "cancelled", "replaced", "dead")
_GROWTH: Final = 8
"""So many times more slices at most are read at once than the time before, when they held less than was expected."""


class Listing(NamedTuple):
    """The earliest slices of all partitions, complete up to `until_ms` (None: to the end of the range)."""

    slices: list[Sliced]
    until_ms: int | None
    rows_a_slice: float
    held: bool
    """Whether there are hold slices: of tasks that were due before and may not go out yet."""


class Part(NamedTuple):
    """Rows in the order of pages, and where to go on if not all could be searched."""

    rows: list[Row]
    next: Place | None


class _Ripening:
    """The rows of all slices that were read; ripe are those that nothing unread can come before."""

    def __init__(self, store: Store, look: Look) -> None:
        self._store, self._look = store, look
        self._read: set[tuple[int, Slice]] = set()
        self._rows: list[Row] = []
        self._narrow = self._narrow_rows = 0
        self.ripe: list[Row] = []
        self.seen = 0

    def unread(self, slices: list[Sliced]) -> list[Sliced]:
        return [one for one in slices if one[:2] not in self._read]

    async def read(self, slices: list[Sliced], rows_a_slice: float, end_ms: int) -> None:
        """`slices` are all that were not read and start before `end_ms`."""
        self._read.update(one[:2] for one in slices)
        found, seen = await earliest(self._store, slices, self._look, rows_a_slice)
        self.seen += seen
        self._narrow += sum(one[1].width_ms <= SECOND_MS for one in slices)
        self._narrow_rows += sum(row.address.slice.width_ms <= SECOND_MS for row in found)
        self._rows += found
        self.ripe = [row for row in self._rows if row.fires_ms < end_ms]

    def learned(self, rows_a_slice: float) -> float:
        """How much to expect of a slice, after what those so far held: less than the average of all, mostly because
        slices of an hour hold more. With a filter they are not known to hold less."""
        if self._look.where.by_content or not self._narrow:
            return rows_a_slice
        return min(rows_a_slice, max(self._narrow_rows / self._narrow, rows_a_slice / _GROWTH))


async def in_due_order(
    store: Store, listing: Listing, span: tuple[int, int], look: Look, searched_at_most: int
) -> Part:
    """The first rows from `span` on. With a filter on content the search ends when, after the slices that it had to
    begin with, it went through `searched_at_most` entries."""
    start_ms, to_ms = span
    rows, slices_wanted, rate = _Ripening(store, look), look.wanted + 15, listing.rows_a_slice
    begun_with: int | None = None
    while True:
        fresh = listing._replace(slices=rows.unread(listing.slices), rows_a_slice=rate)
        chosen, until_ms = _choose(fresh, start_ms, look.wanted - len(rows.ripe))
        if until_ms is not None and until_ms <= start_ms:
            slices_wanted *= 8  # so many slices start in this one second that they did not fit
            listing = await list_slices(store, start_ms, to_ms, slices_wanted)
            continue
        end_ms = to_ms if until_ms is None else min(to_ms, until_ms)
        await rows.read(chosen, rate, end_ms)
        if len(rows.ripe) >= look.wanted or end_ms == to_ms:
            return Part(_first(look.wanted, rows.ripe), None)
        begun_with = rows.seen if begun_with is None else begun_with
        if look.where.by_content and rows.seen - begun_with >= searched_at_most:
            return Part(_first(look.wanted, rows.ripe), start_of(end_ms))
        start_ms, rate = end_ms, rows.learned(rate)
        if until_ms == listing.until_ms:
            listing = await list_slices(store, start_ms, to_ms, slices_wanted)


def _first(wanted: int, rows: list[Row]) -> list[Row]:
    return nsmallest(wanted, rows, key=lambda row: row.place)


def start_of(due_ms: int) -> Place:
    """Before all tasks that fire from then on."""
    return due_ms, -1, -1, -1, -1


async def list_slices(store: Store, start_ms: int, to_ms: int, limit: int) -> Listing:
    """One round trip: the slices from a time on, and how full they are on average."""
    high = f"({min(-(-to_ms // 1000), HOLDS_FROM_S)}"
    # Of the slices that began in an earlier second only the one of this hour can reach so far.
    hour = Slice.at(start_ms, HOUR_MS)
    groups: list[Group] = []
    for keys in store.keys.partitions:
        commands: list[Command] = [
            ("ZSCORE", keys.slices, hour.name),
            ("ZRANGE", keys.slices, start_ms // 1000, high, "BYSCORE", "LIMIT", 0, limit, "WITHSCORES"),
            ("HMGET", keys.n, *COUNTERS),
            ("ZCARD", keys.slices),
            ("ZRANGE", keys.slices, HOLDS_FROM_S, "+inf", "BYSCORE", "LIMIT", 0, 1),
        ]
        groups.append((keys.slot, commands))
    found: list[Sliced] = []
    until_ms: int | None = None
    pending = total = 0
    held = False
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        score, reply, counters, slices, holds = result
        held = held or bool(holds)
        pending, total = pending + still_open(counters), total + slices
        listed: list[Sliced] = [(p, *one) for one in slices_in(store.keys.partitions[p], reply)]
        if len(reply) == 2 * limit:
            last_ms = int(float(reply[-1])) * 1000
            until_ms = last_ms if until_ms is None else min(until_ms, last_ms)
        if score is not None and hour.start_ms // 1000 < start_ms // 1000:
            listed.append((p, hour, float(score)))
        found += [one for one in listed if one[1].end_ms > start_ms]
    return Listing(found, until_ms, max(pending, 1) / max(total, 1), held)


def still_open(counters: list[bytes | None]) -> int:
    """Of a partition's COUNTERS: what was accepted and is not settled."""
    accepted, *settled = (int(value or 0) for value in counters)
    return accepted - sum(settled)


def _choose(listing: Listing, start_ms: int, rows_needed: int) -> tuple[list[Sliced], int | None]:
    """Whole seconds, until enough rows are to be expected in them; and up to which time nothing is left out."""
    slices, until_ms, rows_a_slice, _ = listing
    if until_ms is not None:
        slices = [one for one in slices if one[1].start_ms < until_ms]
    slices.sort(key=lambda one: one[1].start_ms)
    enough = rows_needed + 3 * sqrt(rows_needed) + 1
    expected, last_ms = 0.0, 0
    of_hours, hours_end_ms = 0.0, 0
    for _, place, _ in slices:
        second_ms = place.start_ms // 1000 * 1000
        if second_ms >= hours_end_ms:
            expected, of_hours = expected + of_hours, 0.0
        if expected >= enough and second_ms > max(last_ms, start_ms):
            return [one for one in slices if one[1].start_ms < second_ms], second_ms
        last_ms = second_ms
        share = rows_a_slice * (place.end_ms - max(place.start_ms, start_ms)) / place.width_ms
        if place.width_ms > SECOND_MS:  # its rows may all lie behind the second that is reached
            of_hours, hours_end_ms = of_hours + share, place.end_ms
        else:
            expected += share
    return slices, until_ms
