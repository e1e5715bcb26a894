"""The reads of an owner: counters, the list of slices, entries. See docs/internals/protocol.md#read."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from math import inf, isfinite
from typing import NamedTuple

from ...model.errors import StoreError
from ..keys import PartitionKeys, Slice
from ..redis.connection import RedisCommand
from ..redis.sender import Group
from ..store import Store

log = logging.getLogger("mainspring.store")


# Members of the sorted set of live slices.
#
# A member that is not a slice, written by hand or by another program, is skipped and logged once. `mainspring verify`
# also finds it, and removes it on request.


class Listed(NamedTuple):
    """A slice as listed in the sorted set."""

    slice: Slice
    g: float


class Stranger(NamedTuple):
    """A member that is not a slice."""

    name: bytes
    score: float


def slice_named(name: bytes) -> Slice | None:
    """Return the slice of that name, or None if the name is not a slice's."""
    try:
        place = Slice.parse(name)
    except ValueError:
        return None
    return place if place.name.encode() == name and place.is_well_formed else None


def slices_in(keys: PartitionKeys, reply: list[bytes]) -> list[Listed]:
    """Return the members that are slices, with their scores."""
    return sorted_out(keys, reply)[0]


def sorted_out(keys: PartitionKeys, reply: list[bytes]) -> tuple[list[Listed], list[Stranger]]:
    """Return the slices, and the members that are not slices."""
    slices: list[Listed] = []
    strangers: list[Stranger] = []
    for i in range(0, len(reply), 2):
        name, score = reply[i], float(reply[i + 1])
        place = slice_named(name)
        if place is not None and isfinite(score):
            slices.append(Listed(place, score))
        else:
            _warn_unreadable(keys.slices, name)
            strangers.append(Stranger(name, score))
    return slices, strangers


@lru_cache(maxsize=1024)
def _warn_unreadable(key: str, name: bytes) -> None:
    """Log each name once: every listing contains it."""
    shown = name[:64].decode("utf-8", "backslashreplace")
    log.error("%s holds '%s', which is not a slice and is ignored; `mainspring verify` can remove it", key, shown)


class SliceListing(NamedTuple):
    """The slices of a partition that start before a time, earliest first."""

    slices: list[Listed]
    strangers: list[Stranger]
    """Members among them that are not slices."""
    next_ms: int | None
    """When the first slice after them starts."""

    @property
    def members(self) -> int:
        return len(self.slices) + len(self.strangers)


class Chunk(NamedTuple):
    """The rows of a slice to read, and whether to read its bitmaps too."""

    partition: int
    slice: Slice
    first: int
    rows: int
    bitmaps: bool
    overlap: int = 0
    """Rows to read again before the first: they show that the list is still the one that was read."""


class SliceRows(NamedTuple):
    rows: list[bytes]
    fired: bytes
    done: bytes
    before: list[bytes]
    """The rows of the overlap; fewer if the list has become shorter."""


async def accepted_counts(store: Store, partitions: Sequence[int]) -> list[int | StoreError]:
    """Read the cheapest sign of new tasks. These sums never fall: repairs count written-off tasks separately."""
    groups: list[Group] = []
    for p in partitions:
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HMGET", keys.n, "accepted", "retried", "written_off")]))
    return [
        result if isinstance(result, StoreError) else sum(int(value or 0) for value in result[0])
        for result in await store.run(groups)
    ]


async def list_slices(
    store: Store, partitions: Sequence[int], *, before_ms: int, limits: Sequence[int]
) -> list[SliceListing | StoreError]:
    """Return, per partition, the slices that start before a time, and when the first one after them starts."""
    limit_s = f"({-(-before_ms // 1000)}"
    groups: list[Group] = []
    for p, limit in zip(partitions, limits, strict=True):
        keys = store.keys.partitions[p]
        now: RedisCommand = (
            "ZRANGE", keys.slices, "-inf", limit_s, "BYSCORE", "LIMIT", 0, limit, "WITHSCORES",
        )  # fmt: skip
        later: RedisCommand = (
            "ZRANGE", keys.slices, limit_s[1:], "+inf", "BYSCORE", "LIMIT", 0, 1, "WITHSCORES",
        )  # fmt: skip
        groups.append((keys.slot, [now, later]))
    return [
        result if isinstance(result, StoreError) else _listing(store.keys.partitions[p], *result)
        for p, result in zip(partitions, await store.run(groups), strict=True)
    ]


def _listing(keys: PartitionKeys, now: list[bytes], later: list[bytes]) -> SliceListing:
    slices, strangers = sorted_out(keys, now)
    # Use its score: the member may not be a slice, and slices may follow it.
    next_s = float(later[1]) if later else inf
    return SliceListing(slices, strangers, int(next_s) * 1000 if isfinite(next_s) else None)


async def read_chunks(store: Store, chunks: Sequence[Chunk]) -> list[SliceRows | StoreError]:
    groups: list[Group] = []
    for chunk in chunks:
        keys = store.keys.partitions[chunk.partition]
        s, f, d, _ = keys.slice_keys(chunk.slice.name)
        commands: list[RedisCommand] = [("LRANGE", s, chunk.first - chunk.overlap, chunk.first + chunk.rows - 1)]
        if chunk.bitmaps:
            commands += [("GET", f), ("GET", d)]
        groups.append((keys.slot, commands))
    answers: list[SliceRows | StoreError] = []
    for chunk, result in zip(chunks, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            answers.append(result)
            continue
        rows = result[0]
        before = rows[: chunk.overlap] if chunk.overlap else []
        if before:
            del rows[: chunk.overlap]
        fired, done = (result[1] or b"", result[2] or b"") if chunk.bitmaps else (b"", b"")
        answers.append(SliceRows(rows, fired, done, before))
    return answers


async def cancelled_bits(store: Store, wanted: Sequence[tuple[int, Slice, int, int]]) -> list[bytes | StoreError]:
    """Read a range of bitmap bytes of each slice (partition, name): which entries are cancelled or replaced."""
    groups: list[Group] = []
    for p, place, first, last in wanted:
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("GETRANGE", keys.slice_keys(place.name)[3], first, last)]))
    return [result if isinstance(result, StoreError) else result[0] for result in await store.run(groups)]
