"""Looks through all keys of a namespace, and counts the tasks of each partition at one moment of its server."""

import re
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import hiredis

from ...model.errors import StoreError
from ..keys import Keyspace, PartitionKeys, Slice
from ..owner.read import slice_named
from ..redis.sender import Group
from ..redis.servers import Primary
from ..store import Store, error_of
from ..tasks.put import fresh_score
from .report import Repair, TaskCounters, VerifyFinding

KEYS_A_PAGE: Final = 1_000
_PARTITION_TYPES: Final = {
    "slices": b"zset",
    "own": b"hash",
    "fence": b"string",
    "n": b"hash",
    "dead": b"hash",
    "dead_times": b"zset",
    "held": b"hash",
    "ids": b"hash",
    "queued": b"hash",
    "acks": b"hash",
    "queues": b"set",
    "holds": b"hash",
    "sched": b"hash",
    "next": b"hash",
    "off": b"list",
    "runs_n": b"hash",
    "runs": b"stream",
    "failed_runs": b"stream",
    "run_details": b"stream",
    "run_rings": b"hash",
}
_NAMESPACE_TYPES: Final = {
    "meta": b"hash",
    "nodes": b"hash",
    "beats": b"zset",
    "leader": b"hash",
    "plan": b"hash",
    "pauses": b"hash",
    "access": b"hash",
    "audit": b"stream",
    "task_audit": b"stream",
    "workers": b"hash",
    "worker_times": b"zset",
    "notes": b"hash",
    "watched": b"hash",
}
_PASSING: Final = re.compile(
    rb"\{[^}]*\}:(?:idem:[0-9a-f]+|r:[0-9a-f]{32}|log:[0-9a-f]{32}|runs:[mh]:\d+|lanes:[0-9a-f]{32}"
    rb"|once:[0-9a-f]{32}\.\d+|limit:.*|quota:.*|box:.*|box-seen:.*)",
    re.DOTALL,
)
"""Keys that expire by themselves and that nothing else depends on."""
_SLICE_TYPES: Final = {b"s": b"list", b"f": b"string", b"d": b"string", b"x": b"string"}
_NAMED: Final = (
    (re.compile(rb"\{([^}]*)\}:q:[A-Za-z0-9._-]{1,64}"), b"stream"),
    (re.compile(rb"\{([^}]*)\}:rev:.*", re.DOTALL), b"list"),
)
"""Keys of a partition that contain the name of a queue or a schedule, and the type of their value."""
_SLICE_KEY: Final = re.compile(rb"\{([^}]*)\}:([sfdx]):(.*)", re.DOTALL)

Fixed = dict[bytes, tuple[int | None, bytes]]
"""Keys that do not belong to a slice: their partition and the type of their value."""


def fixed_keys(keyspace: Keyspace) -> Fixed:
    known: Fixed = {getattr(keyspace, name).encode(): (None, kind) for name, kind in _NAMESPACE_TYPES.items()}
    for keys in keyspace.partitions:
        known |= {getattr(keys, name).encode(): (keys.number, kind) for name, kind in _PARTITION_TYPES.items()}
    return known


async def check_types(store: Store) -> AsyncIterator[VerifyFinding]:
    """Check that keys with a fixed name hold the right type, or nothing."""
    by_partition: dict[int | None, list[tuple[bytes, bytes]]] = {}
    for key, (number, kind) in fixed_keys(store.keys).items():
        by_partition.setdefault(number, []).append((key, kind))
    groups: list[Group] = []
    for number, members in by_partition.items():
        slot = store.keys.slot if number is None else store.keys.partitions[number].slot
        groups.append((slot, [("TYPE", key) for key, _ in members]))
    for (number, members), types in zip(by_partition.items(), await store.run(groups), strict=True):
        if isinstance(types, StoreError):
            raise types
        for (key, kind), found in zip(members, types, strict=True):
            if found not in (kind, b"none"):
                yield _wrong_type(number, key, kind, found)


async def check_keys(store: Store, unreadable: Collection[int]) -> AsyncIterator[VerifyFinding]:
    """Check all keys of all servers, page by page, except partitions whose own keys are unreadable."""
    fixed = fixed_keys(store.keys)
    by_tag = {keys.tag.encode(): keys for keys in store.keys.partitions}
    reported: set[tuple[str, str]] = set()  # a scan may show a key twice, and a slice has several keys
    for primary in store.servers.all():
        async for page in _pages(primary, store.keys.namespace):
            loose = [key for key in page if key not in fixed and not _PASSING.fullmatch(key)]
            async for finding in _check_page(store, primary, loose, by_tag, unreadable):
                if (finding.kind, finding.where) not in reported:
                    reported.add((finding.kind, finding.where))
                    yield finding


async def _pages(primary: Primary, namespace: str) -> AsyncIterator[list[bytes]]:
    cursor = b"0"
    while True:
        [reply] = await primary.pipeline([("SCAN", cursor, "MATCH", f"{{{namespace}[:}}]*", "COUNT", KEYS_A_PAGE)])
        if isinstance(reply, hiredis.ReplyError):
            raise error_of(reply)
        cursor, keys = reply
        yield keys
        if cursor == b"0":
            return


async def _check_page(
    store: Store,
    primary: Primary,
    page: Sequence[bytes],
    by_tag: dict[bytes, PartitionKeys],
    unreadable: Collection[int],
) -> AsyncIterator[VerifyFinding]:
    types = await primary.pipeline([("TYPE", key) for key in page])
    places: dict[int, set[Slice]] = {}
    for key, found in zip(page, types, strict=True):
        match = _SLICE_KEY.fullmatch(key)
        keys = by_tag.get(match[1]) if match is not None else None
        place = slice_named(match[3]) if match is not None else None
        if isinstance(found, hiredis.ReplyError) or found == b"none":
            continue  # its slot is moving, or it is gone by now: no finding
        if (named := _named(key, by_tag)) is not None:
            if found != named[1]:
                yield _wrong_type(named[0].number, key, named[1], found)
            continue
        if match is None or keys is None or place is None:
            yield _unknown(key, found)
        elif found != _SLICE_TYPES[match[2]]:
            yield _wrong_type(keys.number, key, _SLICE_TYPES[match[2]], found)
        elif keys.number not in unreadable:
            places.setdefault(keys.number, set()).add(place)
    for number, some in places.items():
        for finding in await _without_slice(store, store.keys.partitions[number], list(some)):
            yield finding


def _named(key: bytes, by_tag: dict[bytes, PartitionKeys]) -> tuple[PartitionKeys, bytes] | None:
    for pattern, kind in _NAMED:
        match = pattern.fullmatch(key)
        if match is not None and match[1] in by_tag:
            return by_tag[match[1]], kind
    return None


async def _without_slice(store: Store, keys: PartitionKeys, places: list[Slice]) -> list[VerifyFinding]:
    """Return findings for slices that have keys but are not live; read in one atomic step, so none is in transition."""
    names = [place.name for place in places]
    call_keys = [keys.slices, *(key for name in names for key in keys.slice_keys(name))]
    reply = await store.call(keys.number, "verify_keys", call_keys, [len(names), *names])
    findings = []
    for position, entries, bitmaps in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
        place = places[position - 1]
        if entries:
            problem = f"entries in no live slice ({entries}): they will never fire"
            repair = partial(put_back, store, keys, place)
            findings.append(VerifyFinding("orphan-list", keys.number, keys.entries(place.name), problem, repair))
        else:
            problem = f"bitmaps without a slice ({bitmaps}): new tasks of that time would look finished"
            repair = partial(remove_remains, store, keys, place, "")
            where = f"{{{keys.tag}}}:[fdx]:{place.name}"
            findings.append(VerifyFinding("orphan-bitmap", keys.number, where, problem, repair))
    return findings


async def put_back(store: Store, keys: PartitionKeys, place: Slice) -> Repair:
    """Make the slice of a list live again, as a new incarnation, and tell the owner."""
    score = fresh_score(place)
    reply = await _place(store, keys, place, "", score)
    if not isinstance(reply, int):
        return Repair(True, "it is gone, or live again, by now")
    return Repair(True, f"put back among the live slices, with the score {score}: unfinished tasks fire")


async def set_score(store: Store, keys: PartitionKeys, place: Slice, old: float, new: float) -> Repair:
    reply = await _place(store, keys, place, repr(old), repr(new))
    if not isinstance(reply, int):
        return Repair(True, "the slice is gone, or has another score, by now")
    return Repair(True, f"the score is {new!r} now; {reply} entries")


async def _place(store: Store, keys: PartitionKeys, place: Slice, old: str, new: str) -> Any:
    call_keys = [keys.slices, keys.entries(place.name), keys.n]
    call = store.scripts.call("repair_place", call_keys, [place.name, old, new])
    # No counter that owners watch has changed: without the message they would not look.
    return (await store.run_one(keys.slot, [call, ("SPUBLISH", keys.wake, "1")]))[0]


async def remove_remains(store: Store, keys: PartitionKeys, place: Slice, score: str) -> Repair:
    """Remove the bits of a slice without entries, and its place among the live ones."""
    call_keys = [keys.slices, *keys.slice_keys(place.name)]
    reply = await store.call(keys.number, "repair_remains", call_keys, [place.name, score])
    return Repair(True, "removed" if reply == b"ok" else "it has entries by now: nothing to remove")


def _wrong_type(number: int | None, key: bytes, expected: bytes, found: bytes) -> VerifyFinding:
    return VerifyFinding(
        "wrong-type",
        number,
        shown(key),
        f"is a {found.decode()}, not a {expected.decode()}"
        + ("" if number is None else "; the partition was not checked any further"),
        advice="its former value is lost and cannot be restored; inspect the key, rename it, and verify again",
    )


def _unknown(key: bytes, found: bytes) -> VerifyFinding:
    return VerifyFinding(
        "unknown-key",
        None,
        shown(key),
        f"a {found.decode()} that no part of Mainspring writes",
        advice="its purpose is unknown; inspect it, and remove it by hand if it is not needed",
    )


def shown(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


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


class PartitionReading(NamedTuple):
    """A partition as it was read."""

    exact: bool
    """False if the partition changed during the read: then the sum of the counters means nothing."""
    counters: TaskCounters
    slices: list[SliceCount]
    nameless: list[tuple[bytes, float]]
    """Members of the live slices whose name is not a slice's, with their scores."""
    garbled: dict[str, str]
    """Counters that hold no whole number; they count as 0."""
    repairs: bytes
    """Number of repairs so far: counters read before a repair differ from those after it."""


class _Counted(NamedTuple):
    counters: list[bytes | None]
    live: int
    slices: list[SliceCount | None]


async def list_live(store: Store, keys: PartitionKeys) -> dict[bytes, float]:
    """Return all members of the live slices with their scores, read page by page."""
    found: dict[bytes, float] = {}
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("ZSCAN", keys.slices, cursor, "COUNT", PAGE)])
        cursor, pairs = int(reply[0]), reply[1]
        found.update(zip(pairs[::2], map(float, pairs[1::2]), strict=True))
        if not cursor:
            return found


async def read_partition(store: Store, keys: PartitionKeys) -> PartitionReading:
    """Count a partition so that all numbers were true at the same moment."""
    tries = 0
    while True:
        tries += 1
        reading = await _read(store, keys, most=AT_ONCE if tries <= TRIES else MOST_AT_ONCE)
        if reading.exact or tries == 2 * TRIES:
            return reading


async def _read(store: Store, keys: PartitionKeys, *, most: int) -> PartitionReading:
    [before] = await store.run_one(keys.slot, [("HMGET", keys.n, *_COUNTERS, "repairs")])
    listed = await list_live(store, keys)
    slices = [place for name in listed if (place := slice_named(name)) is not None]
    size = len(slices) if len(slices) <= most else PAGE
    parts = [await _count(store, keys, slices[at : at + size]) for at in range(0, len(slices), size or 1)]
    parts = parts or [await _count(store, keys, [])]
    # Read at one moment, or in parts between which no counter moved. Every change of pending or fired tasks moves a
    # counter, and counters never fall, except `queued`, which falls only when another one moves. A slice that was
    # dropped meanwhile held no pending or fired task.
    still = all(part.counters == before for part in parts)
    return _reading(parts, listed, exact=_whole(parts[0], listed) if len(parts) == 1 else still)


def _whole(counted: _Counted, listed: dict[bytes, float]) -> bool:
    """Return True if every slice that was live at that moment was counted."""
    return counted.live == len(listed) and None not in counted.slices


def _reading(parts: Sequence[_Counted], listed: dict[bytes, float], *, exact: bool) -> PartitionReading:
    stored, garbled = _numbers(parts[-1].counters)
    slices = [one for part in parts for one in part.slices if one is not None]
    counters = TaskCounters(
        **stored, pending=sum(one.pending for one in slices), fired=sum(one.fired for one in slices)
    )  # fmt: skip
    nameless = [(name, score) for name, score in listed.items() if slice_named(name) is None]
    return PartitionReading(exact, counters, slices, nameless, garbled, parts[-1].counters[-1] or b"0")


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
    """Return how many of `length` entries are pending, and how many fired: neither done nor cancelled."""
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
    """Return whether a bit is set that belongs to no entry."""
    whole, rest = divmod(length, 8)
    if len(bits) <= whole:
        return False
    return bool(bits[whole] & (0xFF >> rest)) or bits[whole + 1 :].strip(b"\0") != b""
