"""Entries of slices as lists and counts see them: which are in a state, and their place in the order of pages."""

from heapq import nsmallest
from typing import Final, NamedTuple

import msgspec

from ..model.choice import ListedState, TaskFilter
from .codec import HEADER_BYTES, INDEXED, RESENT, TOMB, decode, is_tomb
from .keys import Address, Slice, r_of

Place = tuple[int, int, int, int, int]
"""Where a task stands in the order of pages: when it fires (0 of one in a hold slice: those come first), partition,
width (of a hold slice, its start), index; and the incarnation of the slice, for in another an index says nothing."""

Sliced = tuple[int, Slice, float]
"""A slice: its partition and its score, which tells its incarnation."""


INDEX_MASK: Final = 0xFFFFFFFF
_END: Final = 1 << 96
"""Behind every key."""


class Row(NamedTuple):
    place: Place
    address: Address
    row: bytes
    fires_ms: int


class Scan:
    """The first entries of one slice that are wanted, gathered chunk by chunk.

    A row's key is `fires_ms << 32 | index`: within a slice, keys are in the order of pages. Only of those that stay to
    the end a `Row` is made.
    """

    def __init__(
        self,
        at: Sliced,
        where: TaskFilter,
        keys: tuple[int, int] = (0, _END),
        wanted: int = _END,
        watched: frozenset[bytes] = frozenset(),
    ) -> None:
        """Keys from the first of `keys` up to the other are looked for. `watched` are tasks that were sent again."""
        self._at, self._where, self._wanted = at, where, wanted
        self._low, self._high = self._keys = keys
        self._watched = watched
        self._first_of: dict[bytes, int] = {}
        self._named_by: dict[int, int] = {}
        """Of tasks that were sent again: index of the first copy -> the copy that names it."""
        self._kept: dict[int, bytes] = {}
        self.seen = 0
        """So many are in the state that was asked for."""
        self.resent: set[bytes] = set()
        """Tasks that were sent again and are not watched. Which copy is the first is known on a second scan only: one
        that came before may carry no flag."""

    def watching(self) -> "Scan":
        """For a second scan from the start on, which tells copies apart."""
        return Scan(self._at, self._where, self._keys, self._wanted, self._watched | self.resent)

    def take(self, first: int, entries: list[bytes], bits: list[bytes | None]) -> None:
        """`entries` begin with index `first`, and so do the bitmaps (fired, done, cancelled)."""
        place, where = self._at[1], self._where
        start_ms, width_ms = place.from_ms, place.width_ms
        chosen, by_content = _in_state(bits, where.state, len(entries)), where.by_content
        for at, row in enumerate(entries):
            if len(row) < HEADER_BYTES or ((self._watched or row[4] & RESENT) and self._is_repeat(row, first + at)):
                continue
            if not chosen[at >> 3] >> (at & 7) & 1 or (row[4] & TOMB and is_tomb(row)):
                continue
            self.seen += 1
            offset = int.from_bytes(row[:4], "big")
            # One that was overdue when it was put, or is damaged, fires with its slice.
            key = start_ms + (offset if offset < width_ms else 0) << 32 | first + at
            if self._low <= key < self._high and (not by_content or fits(where, row)):
                self._kept[key] = row
        if len(self._kept) > 2 * self._wanted:
            kept = nsmallest(self._wanted, self._kept)
            self._kept, self._high = {key: self._kept[key] for key in kept}, kept[-1]

    def _is_repeat(self, row: bytes, index: int) -> bool:
        # Retries and moved tasks carry the index flag: they are not copies, though they share the id.
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
    """Those of a chunk in one state; copies are told apart within it."""
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
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # nobody can say where it goes
    return where.fits(body.target, body.lane)


def _in_state(bits: list[bytes | None], state: ListedState, count: int) -> bytes:
    """Bit i % 8 of byte i // 8, counted from the lowest, says whether entry i is in that state."""
    fired, *over = bits
    size = count + 7 >> 3
    every = (1 << 8 * size) - 1
    chosen = any_of([fired]) & ~any_of(over) if state == "fired" else ~any_of([fired, *over])
    return (chosen & every).to_bytes(size, "little")


_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def any_of(bitmaps: list[bytes | None]) -> int:
    """The union of bitmaps as one number: bit i of it is bit i of the maps."""
    union = 0
    for bits in bitmaps:
        # Redis numbers bits from the top of each byte; reversed and read little-endian they count up.
        union |= int.from_bytes((bits or b"").translate(_REVERSED), "little")
    return union
