"""Tasks in hold slices: they were due and may not go out yet. However many there are, a page reads few of them.

Their slices are in no order of due times. So lists show them before all others, slice by slice as they were held, and a
count over a part of the past estimates where there are very many.
"""

from typing import Final, NamedTuple

from ..model.choice import TaskFilter
from ..model.errors import StoreError
from .keys import HOLDS_FROM_S, PartitionKeys, Slice, r_of
from .listing import slices_in
from .rows import Place, Row, Sliced, any_of, fits, rows_of
from .store import Group, Store
from .wire import Command

AT_ONCE: Final = 4_096
"""Entries that one round trip may bring, or a little more."""

COUNTED_AT_MOST: Final = 20_000
"""Entries that a count looks at one by one; of more it takes samples."""

_SAMPLES: Final = 8
_SAMPLE: Final = 64
_SLICES: Final = 256
"""Hold slices of which a count asks at one time."""


class Held(NamedTuple):
    """A part of a page: rows, how many were looked through, and where to go on (None when that was all)."""

    rows: list[Row]
    searched: int
    next: Place | None


async def held_rows(
    store: Store, after: Place | None, span: tuple[int, int], where: TaskFilter, wanted: int, budget: int
) -> Held:
    """Up to `wanted` tasks due in [from, to) that fit, behind a place; it stops when `budget` were looked through."""
    rows: list[Row] = []
    searched, at = 0, after or _START
    while True:
        chunk = _chunk(wanted - len(rows))
        slices = await _slices_from(store, at, AT_ONCE // chunk)
        if not slices:
            return Held(rows, searched, None)
        for one, first, entries, bits, score in await _read(store, slices, at, chunk):
            if score is None or float(score) != one[2]:
                break  # gone, or written anew: its entries stand elsewhere now
            found = rows_of(one, entries, bits, where.state, first=first)
            passed = at[3] if _goes_on(one, at) else -1
            inside = [row for row in found if span[0] <= row.fires_ms < span[1] and row.place[3] > passed]
            fitting = [row for row in inside if fits(where, row.row)]
            searched += len(entries)
            at = (0, one[0], one[1].start_ms, first + len(entries) - 1, r_of(one[2]))
            if len(rows) + len(fitting) >= wanted:
                rows += fitting[: wanted - len(rows)]
                return Held(rows, searched, rows[-1].place)
            rows += fitting
            if len(entries) == chunk:
                break  # there may be more of this slice: it comes before the slices behind it
            at = (0, one[0], one[1].start_ms, _END, r_of(one[2]))
        if searched >= budget:
            return Held(rows, searched, at)


_END: Final = (1 << 32) - 1
"""Behind every index."""
_START: Final[Place] = (0, -1, -1, -1, -1)


def _goes_on(one: Sliced, at: Place) -> bool:
    """Is this the slice in which that place is, and was it not written anew since?"""
    return (one[0], one[1].start_ms, r_of(one[2])) == (at[1], at[2], at[4])


def _chunk(wanted: int) -> int:
    """How many entries of a slice are read at once: whole bytes of its bitmaps."""
    return min(1_024, max(64, -(-wanted // 8) * 8))


async def _slices_from(store: Store, at: Place, most: int) -> list[Sliced]:
    """Hold slices from a place on, by partition and start."""
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
    behind = (partition, start_ms, index == _END)
    return sorted(one for one in found if (one[0], one[1].start_ms, False) >= behind)[:most]


def _list_from(keys: PartitionKeys, low: int, most: int) -> Command:
    return ("ZRANGE", keys.slices, max(low, HOLDS_FROM_S), "+inf", "BYSCORE", "LIMIT", 0, most, "WITHSCORES")


async def _read(
    store: Store, slices: list[Sliced], at: Place, chunk: int
) -> list[tuple[Sliced, int, list[bytes], list[bytes | None], bytes | None]]:
    """A chunk of each: its index, its entries, their bits and its score. The first slice goes on behind `at`."""
    groups: list[Group] = []
    firsts = []
    for one in slices:
        p, place, _ = one
        keys = store.keys.partitions[p]
        first = (at[3] + 1) // 8 * 8 if _goes_on(one, at) else 0
        firsts.append(first)
        slot, commands = _window(keys, place, first, first + chunk - 1)
        groups.append((slot, [*commands, ("ZSCORE", keys.slices, place.name)]))
    read = []
    for one, first, result in zip(slices, firsts, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        read.append((one, first, result[0], result[1:-1], result[-1]))
    return read


def _window(keys: PartitionKeys, place: Slice, first: int, last: int) -> Group:
    """Reads entries of a slice and their bits; `first` begins a byte of the bitmaps."""
    s, *maps = keys.slice_keys(place.name)
    bits: list[Command] = [("GETRANGE", key, first // 8, last // 8) for key in maps]
    return keys.slot, [("LRANGE", s, first, last), *bits]


# -- counting --------------------------------------------------------------------------------------------------


async def count_held(store: Store, from_ms: int, to_ms: int) -> tuple[float, bool]:
    """Pending tasks of hold slices that were due in a range, and whether that is exact."""
    total, exact, budget = 0.0, True, COUNTED_AT_MOST
    at = _START
    while slices := await _slices_from(store, at, _SLICES):
        looks: list[_Look] = []
        for one, length, pending in await _pending(store, slices):
            if from_ms <= one[1].from_ms and to_ms > store.clock.now_ms():
                total += pending  # whatever is held was due before now
            elif pending:
                whole = length <= budget
                budget -= length if whole else 0
                exact = exact and whole
                looks.append(_Look(one, length, whole))
        total += await _count(store, looks, from_ms, to_ms)
        at = (0, slices[-1][0], slices[-1][1].start_ms, _END, -1)
    return total, exact


class _Look(NamedTuple):
    """A slice of so many entries, of which all are to be looked at, or samples."""

    at: Sliced
    length: int
    whole: bool

    @property
    def windows(self) -> list[tuple[int, int]]:
        if self.whole:
            return [(0, self.length)]
        step = max(_SAMPLE, self.length // _SAMPLES // 8 * 8)
        return [(first, min(first + _SAMPLE, self.length)) for first in range(0, self.length, step)]


async def _count(store: Store, looks: list[_Look], from_ms: int, to_ms: int) -> float:
    """Tasks that are pending and were due in the range; where samples are taken, what is to be expected."""
    groups: list[Group] = []
    wanted = [(look, window) for look in looks for window in look.windows]
    for look, (first, end) in wanted:
        groups.append(_window(store.keys.partitions[look.at[0]], look.at[1], first, end - 1))
    total = 0.0
    for (look, (first, _)), result in zip(wanted, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        rows = rows_of(look.at, result[0], result[1:], "pending", first=first)
        seen = sum(end - start for start, end in look.windows)
        total += sum(from_ms <= row.fires_ms < to_ms for row in rows) * look.length / max(1, seen)
    return total


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
