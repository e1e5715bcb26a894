"""The first tasks of some slices in the order of pages, however much these hold.

Entries of a slice are in the order in which they came, so all of them have to be looked at. They are read in chunks,
and the event loop is given away in between: on a node, firing goes on meanwhile. A slice that is written anew meanwhile
(see `compact.lua`) is read from its start again: its entries have moved up, and those that were passed are others now.
"""

import asyncio
from heapq import nsmallest
from typing import Final, NamedTuple

from ..model.choice import TaskFilter
from ..model.errors import StoreError
from .keys import PartitionKeys, r_of
from .rows import INDEX_MASK, Place, Row, Scan, Sliced
from .store import Group, Replies, Store
from .wire import Command

CHUNK_ROWS: Final = 1_024
AT_ONCE_ROWS: Final = 16 * CHUNK_ROWS
"""What one round trip may bring of slices that hold more than was expected."""
_LEAST_ROWS: Final = 64


class Look(NamedTuple):
    """What is looked for: tasks that fit, due in [from, to), behind a place, and how many."""

    where: TaskFilter
    span: tuple[int, int]
    after: Place
    wanted: int

    def keys_in(self, at: Sliced) -> tuple[int, int]:
        """The same as keys of one slice: from the first up to the other."""
        fires_ms, partition, width_ms, index, r = self.after
        mine = (at[0], at[1].width_ms)
        if mine == (partition, width_ms):
            # Where its slice was written anew since the last page, those of this millisecond are shown again: better
            # twice than never.
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

    def take(self, entries: list[bytes], bits: list[bytes | None], asked: int) -> bool:
        """True when there may be more to read."""
        self.scan.take(self.next, entries, bits)
        only = self.next == 0
        self.next += len(entries)
        if len(entries) == asked:
            return True
        if not self.scan.resent:
            return False
        self.scan, self.next = self.scan.watching(), 0
        if only:
            self.scan.take(0, entries, bits)
        return not only


async def earliest(store: Store, slices: list[Sliced], look: Look, rows_a_slice: float) -> tuple[list[Row], int]:
    """The first rows in no order, and how many were in their state. One round trip where no slice holds far more than
    `rows_a_slice`."""
    rows: list[Row] = []
    seen = taken = 0
    waiting = [_Reading(one, look) for one in slices]
    chunk, at_once = _first_chunk(len(slices), rows_a_slice), len(slices)
    while waiting:
        batch, waiting, unfinished = waiting[:at_once], waiting[at_once:], []
        for reading, (entries, *bits, score) in zip(batch, await _read(store, batch, chunk), strict=True):
            if score is None:
                continue  # it is gone, and all that stood there is over
            if float(score) != reading.at[2]:
                unfinished.append(_Reading((*reading.at[:2], float(score)), look))
            elif reading.take(entries, bits, chunk):
                unfinished.append(reading)
            else:
                seen += reading.scan.seen
                rows += reading.scan.rows()
                rows = _first(look.wanted, rows)
            taken += len(entries)
            if taken >= CHUNK_ROWS:
                taken = 0
                await asyncio.sleep(0)
        waiting = unfinished + waiting
        chunk, at_once = CHUNK_ROWS, AT_ONCE_ROWS // CHUNK_ROWS
    return rows, seen


def _first(wanted: int, rows: list[Row]) -> list[Row]:
    """Enough of the first; few more are left in, because sorting them out at each slice costs more."""
    return nsmallest(wanted, rows, key=lambda row: row.place) if len(rows) > 4 * wanted else rows


def _first_chunk(slices: int, rows_a_slice: float) -> int:
    """Enough for slices of the ordinary kind; whole bytes of the bitmaps."""
    ordinary = max(_LEAST_ROWS, AT_ONCE_ROWS // max(1, slices), int(2 * rows_a_slice))
    return min(CHUNK_ROWS, ordinary) // 8 * 8


async def _read(store: Store, batch: list[_Reading], chunk: int) -> list[Replies]:
    """The next entries of each, their bits, and its score."""
    groups = [_window(store.keys.partitions[one.at[0]], one, chunk) for one in batch]
    replies = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        replies.append(result)
    return replies


def _window(keys: PartitionKeys, one: _Reading, chunk: int) -> Group:
    s, *maps = keys.slice_keys(one.at[1].name)
    first, last = one.next, one.next + chunk - 1
    bits: list[Command] = [("GETRANGE", key, first // 8, last // 8) for key in maps]
    # The score last: if it is still the one that was listed, so it was when the entries were read.
    return keys.slot, [("LRANGE", s, first, last), *bits, ("ZSCORE", keys.slices, one.at[1].name)]
