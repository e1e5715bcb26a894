"""Pages of tasks: the rows of slices in due order, and those in hold slices."""

import asyncio
from heapq import nsmallest
from math import sqrt
from typing import Final, NamedTuple

import msgspec

from ...model.errors import StoreError
from ...model.task import ListedState, TaskFilter
from ..codec import (
    HEADER_BYTES,
    INDEXED,
    RESENT,
    TOMBSTONE,
    decode_head,
    header,
    is_cut,
    is_tombstone,
    same_entry,
    whole_bytes,
)
from ..keys import HOLDS_FROM_S, HOUR_MS, SECOND_MS, Address, PartitionKeys, Slice, r_of
from ..owner.read import slices_in
from ..redis.connection import RedisCommand
from ..redis.sender import Group, Replies
from ..store import Store

Place = tuple[int, int, int, int, int]
"""Sort key of a task in pages: when it fires (0 in a hold slice: those come first), partition, width (of a hold slice,
its start), index; and the slice's incarnation, because in another one the index means nothing."""

Sliced = tuple[int, Slice, float]
"""A slice: its partition, place and score; the score tells its incarnation."""


INDEX_MASK: Final = 0xFFFFFFFF
_END: Final = 1 << 96
"""Behind every key."""


class Row(NamedTuple):
    place: Place
    address: Address
    row: bytes
    fires_ms: int


class Scan:
    """The first wanted entries of one slice, gathered chunk by chunk.

    A row's key is `fires_ms << 32 | index`: within a slice, keys are in page order. A `Row` is made only of the entries
    that remain in the end.
    """

    def __init__(
        self,
        at: Sliced,
        where: TaskFilter,
        keys: tuple[int, int] = (0, _END),
        wanted: int = _END,
        watched: frozenset[bytes] = frozenset(),
    ) -> None:
        """Look for keys from `keys[0]` up to `keys[1]`. `watched` are tasks that were sent again."""
        self._at, self._where, self._wanted = at, where, wanted
        self._low, self._high = self._keys = keys
        self._watched = watched
        self._first_of: dict[bytes, int] = {}
        self._named_by: dict[int, int] = {}
        """For tasks that were sent again: index of the first copy -> the copy that names it."""
        self._kept: dict[int, bytes] = {}
        self.seen = 0
        """Number of tasks in the requested state."""
        self.resent: set[bytes] = set()
        """Tasks that were sent again and are not watched. The first copy is known only in a second scan, because an
        earlier copy may carry no flag."""

    def watching(self) -> "Scan":
        """Return a scan for a second pass from the start, which can tell copies apart."""
        return Scan(self._at, self._where, self._keys, self._wanted, self._watched | self.resent)

    def take(self, first: int, entries: list[bytes], bits: list[bytes | None]) -> None:
        """Take rows from index `first` on; the bitmaps (fired, done, cancelled) start with the byte of its bit."""
        place, where = self._at[1], self._where
        start_ms, width_ms = place.from_ms, place.width_ms
        chosen, by_content = _in_state(bits, where.state, first & 7, len(entries)), where.by_content
        for at, row in enumerate(entries):
            if len(row) < HEADER_BYTES or ((self._watched or row[4] & RESENT) and self._is_repeat(row, first + at)):
                continue
            if not chosen[at >> 3] >> (at & 7) & 1 or (row[4] & TOMBSTONE and is_tombstone(row)):
                continue
            self.seen += 1
            offset = int.from_bytes(row[:4], "big")
            # An entry that is damaged, or was overdue when it was put, fires with its slice.
            key = start_ms + (offset if offset < width_ms else 0) << 32 | first + at
            if self._low <= key < self._high and (not by_content or fits(where, row)):
                self._kept[key] = row
        if len(self._kept) > 2 * self._wanted:
            kept = nsmallest(self._wanted, self._kept)
            self._kept, self._high = {key: self._kept[key] for key in kept}, kept[-1]

    def _is_repeat(self, row: bytes, index: int) -> bool:
        # Retries and moved tasks carry the index flag: they share the id but are not copies.
        idh = row[5:HEADER_BYTES]
        if row[4] & INDEXED:
            return False
        if idh not in self._watched:
            if row[4] & RESENT:
                self.resent.add(idh)
            return False
        first = self._first_of.setdefault(idh, index)
        if first != index and row[4] & RESENT:
            self._named_by[first] = index
        return first != index

    def rows(self) -> list[Row]:
        p, place, g = self._at
        r, rows = r_of(g), []
        for key, row in self._kept.items():
            fires_ms, index = key >> 32, key & INDEX_MASK
            order = (0, p, place.start_ms) if place.is_hold else (fires_ms, p, place.width_ms)
            address = Address(p, place, r, self._named_by.get(index, index))
            rows.append(Row((*order, index, r), address, row, fires_ms))
        return rows


def rows_of(
    at: Sliced, entries: list[bytes], bits: list[bytes | None], state: ListedState, *, first: int = 0
) -> list[Row]:
    """Return the tasks of a chunk in one state, without repeated copies."""
    scan = Scan(at, TaskFilter(state=state))
    scan.take(first, entries, bits)
    if scan.resent:
        scan = scan.watching()
        scan.take(first, entries, bits)
    return scan.rows()


def fits(where: TaskFilter, row: bytes) -> bool:
    if not where.by_content:
        return True
    try:
        body = decode_head(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # its target is unknown
    return where.fits(body.target, body.lane)


def _in_state(bits: list[bytes | None], state: ListedState, skip: int, count: int) -> bytes:
    """Return a bitmap (bit i % 8 of byte i // 8, lowest first) of the entries in that state. The input bitmaps have
    `skip` bits before the first entry."""
    fired, *over = bits
    size = count + 7 >> 3
    every = (1 << 8 * size) - 1
    chosen = any_of([fired]) & ~any_of(over) if state == "fired" else ~any_of([fired, *over])
    return (chosen >> skip & every).to_bytes(size, "little")


_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def any_of(bitmaps: list[bytes | None]) -> int:
    """Return the union of bitmaps as one number: its bit i is bit i of the maps."""
    union = 0
    for bits in bitmaps:
        # Redis numbers bits from the top of each byte; reversed and read as little-endian they count up.
        union |= int.from_bytes((bits or b"").translate(_REVERSED), "little")
    return union


# The first tasks of some slices, in page order, however large the slices are.
#
# Entries of a slice are in order of arrival, so all of them must be read. They are read in chunks, and the event loop
# gets control in between: on a node, firing continues meanwhile. A slice that is compacted meanwhile (see
# `compact.lua`) is read again from its start, because its entries have moved.

CHUNK_ROWS: Final = 1_024
AT_ONCE_ROWS: Final = 16 * CHUNK_ROWS
"""Most rows returned in one round trip from slices that hold more than expected."""
AT_ONCE_BYTES: Final = 8 << 20
"""Bytes of entries that the server reads in one round trip, or one entry of each slice: it serves no other client
meanwhile."""
PAGE_BYTES: Final = 4 << 20
"""Most bytes of entries in a page; it ends before the entry that would exceed them."""
_LEAST_ROWS: Final = 64


class Look(NamedTuple):
    """A search: matching tasks due in [from, to), after a cursor, up to a limit."""

    where: TaskFilter
    span: tuple[int, int]
    after: Place
    wanted: int

    def keys_in(self, at: Sliced) -> tuple[int, int]:
        """Return the search range as keys of one slice, end exclusive."""
        fires_ms, partition, width_ms, index, r = self.after
        mine = (at[0], at[1].width_ms)
        if mine == (partition, width_ms):
            # If the slice was compacted since the last page, show tasks of this millisecond again: twice is better than
            # never.
            low = (fires_ms << 32) + (min(index, INDEX_MASK) + 1 if r == r_of(at[2]) else 0)
        else:
            low = fires_ms + (mine < (partition, width_ms)) << 32
        return max(low, self.span[0] << 32), self.span[1] << 32


class _Reading:
    """A slice that is read chunk by chunk."""

    def __init__(self, at: Sliced, look: Look) -> None:
        self.at = at
        self.next = 0
        self.scan = Scan(at, look.where, look.keys_in(at), look.wanted)

    def take(self, entries: list[bytes], bits: list[bytes | None], length: int) -> bool:
        """Take a chunk; return True if there is more to read. The slice had `length` entries."""
        self.scan.take(self.next, entries, bits)
        only = self.next == 0
        self.next += len(entries)
        if self.next < length:
            return True
        if not self.scan.resent:
            return False
        self.scan, self.next = self.scan.watching(), 0
        if only:
            self.scan.take(0, entries, bits)
        return not only


async def earliest(store: Store, slices: list[Sliced], look: Look, rows_a_slice: float) -> tuple[list[Row], int]:
    """Return the first rows, unordered, and the number in the wanted state. One round trip unless a slice holds far
    more than `rows_a_slice`."""
    rows: list[Row] = []
    seen = taken = 0
    waiting = [_Reading(one, look) for one in slices]
    chunk, at_once = _first_chunk(len(slices), rows_a_slice), len(slices)
    while waiting:
        batch, waiting, unfinished = waiting[:at_once], waiting[at_once:], []
        read = await _read_batch(store, batch, chunk, content=look.where.by_content)
        for reading, ((length, *entries), *bits, score) in zip(batch, read, strict=True):
            if score is None:
                continue  # the slice is gone, and all its tasks are over
            if float(score) != reading.at[2]:
                unfinished.append(_Reading((*reading.at[:2], float(score)), look))
            elif reading.take(entries, bits, length):
                unfinished.append(reading)
            else:
                seen += reading.scan.seen
                rows += reading.scan.rows()
                rows = _roughly_first(look.wanted, rows)
            taken += len(entries)
            if taken >= CHUNK_ROWS:
                taken = 0
                await asyncio.sleep(0)
        waiting = unfinished + waiting
        chunk, at_once = CHUNK_ROWS, AT_ONCE_ROWS // CHUNK_ROWS
    return rows, seen


def _roughly_first(wanted: int, rows: list[Row]) -> list[Row]:
    """Keep at least the first `wanted` rows; a few more may stay, because sorting after each slice costs more."""
    return nsmallest(wanted, rows, key=lambda row: row.place) if len(rows) > 4 * wanted else rows


def _first_chunk(slices: int, rows_a_slice: float) -> int:
    """Return a chunk size that covers ordinary slices: whole bytes of the bitmaps."""
    ordinary = max(_LEAST_ROWS, AT_ONCE_ROWS // max(1, slices), int(2 * rows_a_slice))
    return min(CHUNK_ROWS, ordinary) // 8 * 8


async def _read_batch(store: Store, batch: list[_Reading], chunk: int, *, content: bool) -> list[Replies]:
    """Return for each slice its length, next entries, their bits, and its score."""
    most = AT_ONCE_BYTES // len(batch)
    groups = [heads(store, one.at[0], one.at[1], one.next, chunk, most, content=content) for one in batch]
    replies = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        replies.append(result)
    return replies


def heads(
    store: Store, partition: int, place: Slice, first: int, rows: int, most_bytes: int, *, content: bool
) -> Group:
    """Return commands that read entries of a slice without large payloads, their bits, and its score. With `content`
    the entries keep target and lane."""
    keys = store.keys.partitions[partition]
    s, *maps = keys.slice_keys(place.name)
    entries = store.scripts.call("heads", [s], [first, rows, most_bytes, int(content)])
    bits: list[RedisCommand] = [("GETRANGE", key, first // 8, (first + rows - 1) // 8) for key in maps]
    # The score comes last: if it is still the listed one, it was so when the entries were read.
    return keys.slot, [entries, *bits, ("ZSCORE", keys.slices, place.name)]


def bounded(rows: list[Row]) -> list[Row]:
    """Return the first rows that fit in a page together, at least one."""
    total = 0
    for number, row in enumerate(rows):
        total += whole_bytes(row.row)
        if total > PAGE_BYTES and number:
            return rows[:number]
    return rows


async def completed(store: Store, rows: list[Row]) -> list[Row] | None:
    """Return the rows with their payloads, without those cancelled or done since; None if a slice was compacted since,
    which moved its entries."""
    cut = [row for row in rows if is_cut(row.row)]
    groups: list[Group] = []
    for row in cut:
        keys, place = store.keys.partitions[row.address.partition], row.address.slice
        groups.append(
            (keys.slot, [("LINDEX", keys.entries(place.name), row.place[3]), ("ZSCORE", keys.slices, place.name)])
        )
    whole: dict[Place, bytes | None] = {}
    for row, result in zip(cut, await store.run(groups) if groups else [], strict=True):
        if isinstance(result, StoreError):
            raise result
        entry, score = result
        if score is not None and r_of(float(score)) != row.place[4]:
            return None
        there = (
            score is not None and entry is not None and not is_tombstone(entry) and same_entry(entry, header(row.row))
        )
        whole[row.place] = entry if there else None
    every = [(row, whole.get(row.place, row.row)) for row in rows]
    return [row._replace(row=entry) for row, entry in every if entry is not None]


# The first tasks of all slices in due order, except hold slices.
#
# A slice of an hour overlaps many slices of a second, so the first tasks are known only when all slices that start
# before them have been read. Each slice is read once per page; later rows of an hour slice wait for their turn.

COUNTERS: Final = ("accepted", "queued", "done", "cancelled", "replaced", "dead")
_GROWTH: Final = 8
"""Factor by which the number of slices read at once may grow if they held less than expected."""


class EarliestSlices(NamedTuple):
    """The earliest slices of all partitions, complete up to `until_ms` (None: to the end of the range)."""

    slices: list[Sliced]
    until_ms: int | None
    rows_a_slice: float
    held: bool
    """True if there are hold slices: they hold tasks that are due but may not leave yet."""


class PagePart(NamedTuple):
    """Rows in page order, and a cursor if the search stopped early."""

    rows: list[Row]
    next: Place | None


class _Ripening:
    """Rows of all slices read so far; a row is ripe if no unread row can precede it."""

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
        """Read `slices`: all unread ones that start before `end_ms`."""
        self._read.update(one[:2] for one in slices)
        found, seen = await earliest(self._store, slices, self._look, rows_a_slice)
        self.seen += seen
        self._narrow += sum(one[1].width_ms <= SECOND_MS for one in slices)
        self._narrow_rows += sum(row.address.slice.width_ms <= SECOND_MS for row in found)
        self._rows += found
        self.ripe = [row for row in self._rows if row.fires_ms < end_ms]

    def learned(self, rows_a_slice: float) -> float:
        """Return the expected rows per slice, from those read so far: fewer than the overall average, mostly because
        hour slices hold more. With a filter, assume no fewer."""
        if self._look.where.by_content or not self._narrow:
            return rows_a_slice
        return min(rows_a_slice, max(self._narrow_rows / self._narrow, rows_a_slice / _GROWTH))


async def in_due_order(
    store: Store, listing: EarliestSlices, span: tuple[int, int], look: Look, searched_at_most: int
) -> PagePart:
    """Return the first rows from `span` on. With a filter on content, stop after `searched_at_most` entries beyond the
    slices that had to be read first."""
    start_ms, to_ms = span
    rows, slices_wanted, rate = _Ripening(store, look), look.wanted + 15, listing.rows_a_slice
    begun_with: int | None = None
    while True:
        fresh = listing._replace(slices=rows.unread(listing.slices), rows_a_slice=rate)
        chosen, until_ms = _choose(fresh, start_ms, look.wanted - len(rows.ripe))
        if until_ms is not None and until_ms <= start_ms:
            slices_wanted *= 8  # more slices start in this second than fit
            listing = await list_slices(store, start_ms, to_ms, slices_wanted)
            continue
        end_ms = to_ms if until_ms is None else min(to_ms, until_ms)
        await rows.read(chosen, rate, end_ms)
        if len(rows.ripe) >= look.wanted or end_ms == to_ms:
            return PagePart(_exactly_first(look.wanted, rows.ripe), None)
        begun_with = rows.seen if begun_with is None else begun_with
        if look.where.by_content and rows.seen - begun_with >= searched_at_most:
            return PagePart(_exactly_first(look.wanted, rows.ripe), start_of(end_ms))
        start_ms, rate = end_ms, rows.learned(rate)
        if until_ms == listing.until_ms:
            listing = await list_slices(store, start_ms, to_ms, slices_wanted)


def _exactly_first(wanted: int, rows: list[Row]) -> list[Row]:
    return nsmallest(wanted, rows, key=lambda row: row.place)


def start_of(due_ms: int) -> Place:
    """Return the place before all tasks that fire from then on."""
    return due_ms, -1, -1, -1, -1


async def list_slices(store: Store, start_ms: int, to_ms: int, limit: int) -> EarliestSlices:
    """List the slices from a time on, and how full they are on average, in one round trip."""
    high = f"({min(-(-to_ms // 1000), HOLDS_FROM_S)}"
    # Among slices that began in an earlier second, only the hour slice can reach this far.
    hour = Slice.at(start_ms, HOUR_MS)
    groups: list[Group] = []
    for keys in store.keys.partitions:
        commands: list[RedisCommand] = [
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
    return EarliestSlices(found, until_ms, max(pending, 1) / max(total, 1), held)


def still_open(counters: list[bytes | None]) -> int:
    """Return the accepted tasks that are not settled, from a partition's COUNTERS."""
    accepted, *settled = (int(value or 0) for value in counters)
    return accepted - sum(settled)


def _choose(listing: EarliestSlices, start_ms: int, rows_needed: int) -> tuple[list[Sliced], int | None]:
    """Choose whole seconds until they are likely to hold enough rows; return them, and the time up to which they are
    complete."""
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
        if place.width_ms > SECOND_MS:  # its rows may all be due after the second reached
            of_hours, hours_end_ms = of_hours + share, place.end_ms
        else:
            expected += share
    return slices, until_ms


# Tasks in hold slices: due, but not allowed to go out yet. A page reads few of them, however many there are.
#
# Hold slices are not ordered by due time. Lists therefore show them first, slice by slice in the order they were held,
# and a count over a part of the past estimates when there are very many.

AT_ONCE: Final = 4_096
"""Entries per round trip, approximately."""

COUNTED_AT_MOST: Final = 20_000
"""Entries that a count reads one by one; beyond that it samples."""

_SAMPLES: Final = 8
_SAMPLE: Final = 64
_SLICES: Final = 256
"""Hold slices read at once by a count."""


class Held(NamedTuple):
    """A part of a page: rows, the number scanned, and the cursor (None at the end)."""

    rows: list[Row]
    searched: int
    next: Place | None


async def held_rows(
    store: Store, after: Place | None, span: tuple[int, int], where: TaskFilter, wanted: int, budget: int
) -> Held:
    """Return up to `wanted` matching tasks due in [from, to) after a place; stop when `budget` entries were read."""
    rows: list[Row] = []
    searched, at = 0, after or _START
    while True:
        chunk = _chunk(wanted - len(rows))
        slices = await _slices_from(store, at, AT_ONCE // chunk)
        if not slices:
            return Held(rows, searched, None)
        for one, first, length, entries, bits, score in await _read_held(store, slices, at, chunk, where):
            if score is None or float(score) != one[2]:
                break  # gone or compacted: its entries are elsewhere now
            found = rows_of(one, entries, bits, where.state, first=first)
            inside = [row for row in found if span[0] <= row.fires_ms < span[1]]
            fitting = [row for row in inside if fits(where, row.row)]
            searched += len(entries)
            at = (0, one[0], one[1].start_ms, first + len(entries) - 1, r_of(one[2]))
            if len(rows) + len(fitting) >= wanted:
                rows += fitting[: wanted - len(rows)]
                return Held(rows, searched, rows[-1].place)
            rows += fitting
            if first + len(entries) < length:
                break  # the rest of this slice precedes the next slices
            at = (0, one[0], one[1].start_ms, _LAST_INDEX, r_of(one[2]))
        if searched >= budget:
            return Held(rows, searched, at)


_LAST_INDEX: Final = (1 << 32) - 1
"""Behind every index."""
_START: Final[Place] = (0, -1, -1, -1, -1)


def _goes_on(one: Sliced, at: Place) -> bool:
    """Return True if the place is in this slice, and the slice was not compacted since."""
    return (one[0], one[1].start_ms, r_of(one[2])) == (at[1], at[2], at[4])


def _chunk(wanted: int) -> int:
    """Return how many entries of a slice to read at once: whole bytes of its bitmaps."""
    return min(1_024, max(64, -(-wanted // 8) * 8))


async def _slices_from(store: Store, at: Place, most: int) -> list[Sliced]:
    """Return hold slices from a place on, by partition and start."""
    _, partition, start_ms, index, _ = at
    groups: list[Group] = []
    wanted = [keys for keys in store.keys.partitions if keys.number >= partition]
    for keys in wanted:
        low = start_ms // 1000 if keys.number == partition else HOLDS_FROM_S
        groups.append((keys.slot, [_list_from(keys, low, most + 1)]))
    found: list[Sliced] = []
    for keys, result in zip(wanted, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        found += [(keys.number, *one) for one in slices_in(keys, result[0])]
    behind = (partition, start_ms, index == _LAST_INDEX)
    return sorted(one for one in found if (one[0], one[1].start_ms, False) >= behind)[:most]


def _list_from(keys: PartitionKeys, low: int, most: int) -> RedisCommand:
    return ("ZRANGE", keys.slices, max(low, HOLDS_FROM_S), "+inf", "BYSCORE", "LIMIT", 0, most, "WITHSCORES")


async def _read_held(
    store: Store, slices: list[Sliced], at: Place, chunk: int, where: TaskFilter
) -> list[tuple[Sliced, int, int, list[bytes], list[bytes | None], bytes | None]]:
    """Read a chunk of each slice: its index, the slice's length, entries, bits and score. The first slice continues
    after `at`."""
    groups: list[Group] = []
    firsts = []
    for one in slices:
        first = at[3] + 1 if _goes_on(one, at) else 0
        firsts.append(first)
        groups.append(heads(store, *one[:2], first, chunk, AT_ONCE_BYTES // len(slices), content=where.by_content))
    read = []
    for one, first, result in zip(slices, firsts, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        (length, *entries), *bits, score = result
        read.append((one, first, length, entries, bits, score))
    return read


# -- counting --------------------------------------------------------------------------------------------------


async def count_held(store: Store, from_ms: int, to_ms: int) -> tuple[float, bool]:
    """Count pending tasks of hold slices that were due in a range; return the count and whether it is exact."""
    total, exact, budget = 0.0, True, COUNTED_AT_MOST
    at = _START
    while slices := await _slices_from(store, at, _SLICES):
        whole: list[Sliced] = []
        sampled: list[tuple[Sliced, int]] = []
        for one, length, pending in await _pending(store, slices):
            if from_ms <= one[1].from_ms and to_ms > store.clock.now_ms():
                total += pending  # every held task was due before now
            elif pending and length <= budget:
                budget -= length
                whole.append(one)
            elif pending:
                exact = False
                sampled.append((one, length))
        look = Look(TaskFilter(), (from_ms, to_ms), _START, _END)
        total += len((await earliest(store, whole, look, CHUNK_ROWS))[0])
        for one, length in sampled:
            total += await _estimate(store, one, length, from_ms, to_ms)
        at = (0, slices[-1][0], slices[-1][1].start_ms, _LAST_INDEX, -1)
    return total, exact


async def _estimate(store: Store, at: Sliced, length: int, from_ms: int, to_ms: int) -> float:
    """Estimate from samples how many tasks of a slice are pending and due in the range."""
    step = max(_SAMPLE, length // _SAMPLES // 8 * 8)
    firsts = range(0, length, step)
    groups = [heads(store, *at[:2], first, _SAMPLE, AT_ONCE_BYTES // len(firsts), content=False) for first in firsts]
    seen = found = 0
    for first, result in zip(firsts, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        (_, *entries), *bits, _ = result
        seen += len(entries)
        found += sum(from_ms <= row.fires_ms < to_ms for row in rows_of(at, entries, bits, "pending", first=first))
    return found * length / max(1, seen)


async def _pending(store: Store, slices: list[Sliced]) -> list[tuple[Sliced, int, int]]:
    groups: list[Group] = []
    for p, place, _ in slices:
        keys = store.keys.partitions[p]
        s, *maps = keys.slice_keys(place.name)
        groups.append((keys.slot, [("LLEN", s), *(("GET", key) for key in maps)]))
    counted = []
    for one, result in zip(slices, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        counted.append((one, result[0], result[0] - any_of(result[1:]).bit_count()))
    return counted
