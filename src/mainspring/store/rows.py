"""Entries of slices as lists and counts see them: which are in a state, and their place in the order of pages."""

from typing import Final, NamedTuple

import msgspec

from ..model.choice import ListedState, TaskFilter
from .codec import HEADER_BYTES, INDEXED, RESENT, decode, is_tomb
from .keys import Address, Slice, r_of

Place = tuple[int, int, int, int]
"""Where a task stands in the order of pages: when it fires (0 of one in a hold slice: those come first), partition,
width (of a hold slice, its start), index."""

Sliced = tuple[int, Slice, float]
"""A slice: its partition and its score, which tells its incarnation."""


class Row(NamedTuple):
    place: Place
    address: Address
    row: bytes
    fires_ms: int


def rows_of(
    at: Sliced, entries: list[bytes], bits: list[bytes | None], state: ListedState, *, first: int = 0
) -> list[Row]:
    """Those in one state; `entries` begin with index `first`, and so do the bitmaps (fired, done, cancelled)."""
    p, place, g = at
    fired, *over = bits
    settled = ~any_of([fired]) | any_of(over) if state == "fired" else any_of([fired, *over])
    r = r_of(g)
    copies = _copies(entries)
    rows = []
    for index, row in enumerate(entries):
        if len(row) < HEADER_BYTES or is_tomb(row) or settled >> index & 1:
            continue
        named_by = copies.get(index, index)
        if named_by >= 0:
            fires_ms = _fires_ms(place, row)
            order = (0, p, place.start_ms) if place.is_hold else (fires_ms, p, place.width_ms)
            rows.append(Row((*order, first + index), Address(p, place, r, first + named_by), row, fires_ms))
    return rows


def fits(where: TaskFilter, row: Row) -> bool:
    if not where.by_content:
        return True
    try:
        body = decode(row.row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # nobody can say where it goes
    return where.fits(body.target, body.lane)


def _copies(rows: list[bytes]) -> dict[int, int]:
    """Of tasks that were sent again: index of the first copy -> the copy that names it; of every other one -> -1."""
    if not any(len(row) >= HEADER_BYTES and row[4] & RESENT for row in rows):
        return {}
    first_of: dict[bytes, int] = {}
    copies: dict[int, int] = {}
    for index, row in enumerate(rows):
        # Retries and moved tasks carry the index flag: they are not copies, though they share the id.
        if len(row) < HEADER_BYTES or row[4] & INDEXED:
            continue
        first = first_of.setdefault(row[5:HEADER_BYTES], index)
        if first != index:
            copies[index] = -1
            if row[4] & RESENT:
                copies[first] = index
    return copies


def _fires_ms(place: Slice, row: bytes) -> int:
    """When an entry fires. One that was overdue when it was put, or is damaged, fires with its slice."""
    offset = int.from_bytes(row[:4], "big")
    return place.from_ms + (offset if offset < place.width_ms else 0)


_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def any_of(bitmaps: list[bytes | None]) -> int:
    """The union of bitmaps as one number: bit i of it is bit i of the maps."""
    union = 0
    for bits in bitmaps:
        # Redis numbers bits from the top of each byte; reversed and read little-endian they count up.
        union |= int.from_bytes((bits or b"").translate(_REVERSED), "little")
    return union
