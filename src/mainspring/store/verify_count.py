"""What one partition holds, counted at one moment of its server, without looking at the entries."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .keys import PartitionKeys, Slice
from .listing import slice_named
from .store import Store
from .verify_report import Books

AT_ONCE: Final = 4_000
"""Slices counted in one call: some 12 ms of the server. More are counted in pages while nothing changes."""

MOST_AT_ONCE: Final = 20_000
"""Slices counted in one call when a busy partition leaves no other way: some 60 ms."""

PAGE: Final = 1_000
TRIES: Final = 5
_COUNTERS: Final = ("accepted", "queued", "done", "cancelled", "replaced", "dead", "retried", "spilled")


class SliceCount(NamedTuple):
    slice: Slice
    score: float
    length: int
    pending: int
    fired: int
    stray: bool
    """Bits are set past the end of the list."""


class Reading(NamedTuple):
    """A partition as it stood."""

    exact: bool
    """False when it changed while it was read: the sum of the books says nothing then."""
    books: Books
    slices: list[SliceCount]
    nameless: list[tuple[bytes, float]]
    """What stands among the live slices under a name that is no slice's, with its score."""
    garbled: dict[str, str]
    """Counters that hold no whole number; they count as 0."""
    repairs: bytes
    """How often something was repaired here: books read before a repair are not those after it."""


class _Counted(NamedTuple):
    counters: list[bytes | None]
    live: int
    slices: list[SliceCount | None]


async def list_live(store: Store, keys: PartitionKeys) -> dict[bytes, float]:
    """Everything that stands among the live slices, with its score; page by page."""
    found: dict[bytes, float] = {}
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("ZSCAN", keys.slices, cursor, "COUNT", PAGE)])
        cursor, pairs = int(reply[0]), reply[1]
        found.update(zip(pairs[::2], map(float, pairs[1::2]), strict=True))
        if not cursor:
            return found


async def read_partition(store: Store, keys: PartitionKeys) -> Reading:
    """Count a partition so that all of it was true at one moment."""
    tries = 0
    while True:
        tries += 1
        reading = await _read(store, keys, most=AT_ONCE if tries <= TRIES else MOST_AT_ONCE)
        if reading.exact or tries == 2 * TRIES:
            return reading


async def _read(store: Store, keys: PartitionKeys, *, most: int) -> Reading:
    [before] = await store.run_one(keys.slot, [("HMGET", keys.n, *_COUNTERS, "repairs")])
    listed = await list_live(store, keys)
    slices = [place for name in listed if (place := slice_named(name)) is not None]
    size = len(slices) if len(slices) <= most else PAGE
    parts = [await _count(store, keys, slices[at : at + size]) for at in range(0, len(slices), size or 1)]
    parts = parts or [await _count(store, keys, [])]
    # At one moment; or in parts between which no counter moved. Every change of what is pending or fired moves one, and
    # none ever goes back but `queued`, which does so only when another one moves; a slice that was dropped meanwhile
    # held nothing of either.
    still = all(part.counters == before for part in parts)
    return _reading(parts, listed, exact=_whole(parts[0], listed) if len(parts) == 1 else still)


def _whole(counted: _Counted, listed: dict[bytes, float]) -> bool:
    """Was everything that was live at that moment counted?"""
    return counted.live == len(listed) and None not in counted.slices


def _reading(parts: Sequence[_Counted], listed: dict[bytes, float], *, exact: bool) -> Reading:
    counters, garbled = _numbers(parts[-1].counters)
    slices = [one for part in parts for one in part.slices if one is not None]
    books = Books(
        **counters, pending=sum(one.pending for one in slices), fired=sum(one.fired for one in slices)
    )  # fmt: skip
    nameless = [(name, score) for name, score in listed.items() if slice_named(name) is None]
    return Reading(exact, books, slices, nameless, garbled, parts[-1].counters[-1] or b"0")


def _numbers(raw: Sequence[bytes | None]) -> tuple[dict[str, int], dict[str, str]]:
    numbers: dict[str, int] = {}
    garbled: dict[str, str] = {}
    for name, value in zip(_COUNTERS, raw, strict=False):
        try:
            numbers[name] = int(value or 0)
        except ValueError:
            numbers[name] = 0
            garbled[name] = (value or b"").decode("utf-8", "backslashreplace")
    return numbers, garbled


async def _count(store: Store, keys: PartitionKeys, slices: Sequence[Slice]) -> _Counted:
    names = [place.name for place in slices]
    all_keys = [keys.slice_keys(name) for name in names]
    call_keys = [keys.n, keys.slices, *(s for s, _, _, _ in all_keys)]
    call_keys += [bitmap for _, *bitmaps in all_keys for bitmap in bitmaps]
    reply = await store.call(keys.number, "verify_count", call_keys, [len(names), *names])
    return _counted(slices, *reply)


def _counted(
    slices: Sequence[Slice], counters: list[bytes | None], live: int, scores: list[Any], lengths: list[int], bits: Any
) -> _Counted:
    bitmaps = dict(zip(bits[::2], bits[1::2], strict=True))
    counted: list[SliceCount | None] = []
    for i, (place, score, length) in enumerate(zip(slices, scores, lengths, strict=True)):
        if score is None:
            counted.append(None)
            continue
        f, d, x = (bitmaps.get(i * 3 + which, b"") for which in (1, 2, 3))
        pending, fired = open_entries(length, f, d, x)
        stray = any(past_the_end(length, one) for one in (f, d, x))
        counted.append(SliceCount(place, float(score), length, pending, fired, stray))
    return _Counted(counters, live, counted)


def open_entries(length: int, f: bytes, d: bytes, x: bytes) -> tuple[int, int]:
    """How many of so many entries are pending, and how many fired: neither done nor cancelled."""
    if not (f or d or x):
        return length, 0
    size = length + 7 >> 3
    # Bit 0 is the top one of the first byte, so the first entries are the highest bits of these numbers.
    fired, done, gone = (int.from_bytes(one[:size].ljust(size, b"\0"), "big") for one in (f, d, x))
    entries = ((1 << length) - 1) << (size * 8 - length)
    unsettled = entries & ~(done | gone)
    under_way = (unsettled & fired).bit_count()
    return unsettled.bit_count() - under_way, under_way


def past_the_end(length: int, bits: bytes) -> bool:
    """Is a bit set that belongs to no entry?"""
    whole, rest = divmod(length, 8)
    if len(bits) <= whole:
        return False
    return bool(bits[whole] & (0xFF >> rest)) or bits[whole + 1 :].strip(b"\0") != b""
