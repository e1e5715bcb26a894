"""Looking at tasks: one by address, a page in due order, a count by time."""

from heapq import nsmallest
from math import sqrt
from typing import Any, Final, NamedTuple

import msgspec

from ..model.choice import ListedState, TaskFilter
from ..model.delivery import Body
from ..model.errors import StoreError
from ..model.task import Count, Page, State, TaskInfo
from .codec import FORWARD, HEADER_BYTES, INDEXED, RESENT, TOMB, TOMB_BYTES, decode, decode_payload, is_tomb
from .keys import HOLDS_FROM_S, HOUR_MS, Address, PartitionKeys, Slice, r_of
from .queue_state import Queued
from .store import Group, Store
from .wire import Command


class Found(NamedTuple):
    """An entry as it stands, or what is left of it."""

    state: State
    body: Body | None = None
    due_ms: int | None = None
    moved_to: Address | None = None
    queued: Queued | None = None
    """Its place in a queue."""


async def look_at(store: Store, wanted: list[tuple[Address, bytes]]) -> list[Found]:
    """The state of entries by address; `finished` when the slice is gone."""
    groups: list[Group] = []
    for address, idh in wanted:
        keys = store.keys.partitions[address.partition]
        names = [keys.slices, *keys.slice_keys(address.slice.name), keys.dead_times]
        call = store.scripts.call("look", names, [address.slice.name, address.index, idh])
        groups.append((keys.slot, [call]))
    found = []
    for (address, idh), result in zip(wanted, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        [reply] = result
        entry = _found(address, idh, *reply)
        found.append(await _by_first_copy(store, address, reply[1], entry))
    return found


async def _by_first_copy(store: Store, address: Address, row: bytes | None, entry: Found) -> Found:
    """A put that was sent again stands in its slice more than once; the first copy is the task."""
    if row is None or entry.body is None or not row[4] & RESENT:
        return entry
    keys = store.keys.partitions[address.partition]
    s = keys.entries(address.slice.name)
    original = row[:4] + bytes((row[4] & ~RESENT,)) + row[5:]
    places = await store.run_one(keys.slot, [("LPOS", s, original), ("LPOS", s, row)])
    first = min([address.index, *(place for place in places if place is not None)])
    if first == address.index:
        return entry
    [entry] = await look_at(store, [(address._replace(index=first), row[5:HEADER_BYTES])])
    return entry


def _found(
    address: Address, idh: bytes, score: Any, row: bytes | None, f: int, d: int, x: int, died_ms: bytes | None
) -> Found:
    if score is None or row is None or float(score) != address.score:
        return _ended("finished", died_ms, address.slice.since_ms)
    if len(row) == TOMB_BYTES:
        return Found("cancelled" if row == idh[:TOMB_BYTES] else "finished")
    if row[5:HEADER_BYTES] != idh:
        return _ended("finished", died_ms, address.slice.since_ms)
    if row[4] & FORWARD:
        return Found("replaced", moved_to=Address.unpack(address.partition, row[HEADER_BYTES:]))
    if row[4] & TOMB:
        return Found("cancelled")
    state: State = "cancelled" if x else "done" if d else "fired" if f else "pending"
    due_ms = address.slice.from_ms + int.from_bytes(row[:4], "big")
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _ended(state, died_ms, due_ms)
    return _ended(state, died_ms, due_ms)._replace(body=body, due_ms=due_ms if body.due_ms is None else body.due_ms)


def _ended(state: State, died_ms: bytes | None, since_ms: int) -> Found:
    """Done, or dead? A dead letter older than this task belongs to an earlier one with the same id."""
    if state in ("done", "finished") and died_ms is not None and float(died_ms) >= since_ms:
        return Found("dead")
    return Found(state)


def describe(task_id: str, found: Found) -> TaskInfo:
    body, place = found.body, found.queued
    told: dict[str, Any] = {}
    if place is not None:
        told = {"queue": place.queue, "worker": place.worker, "since_ms": place.since_ms}
    if body is None:
        return TaskInfo(task_id, found.state, found.due_ms, **told)
    return TaskInfo(
        id=task_id,
        state=found.state,
        due_ms=found.due_ms,
        target=body.target,
        payload=decode_payload(body),
        lane=body.lane,
        attempt=body.attempt,
        expires_ms=body.expires_ms,
        errors=body.errors,
        retry=body.retry,
        **told,
    )


# -- pages -------------------------------------------------------------------------------------------------

Place = tuple[int, int, int, int]
"""Where a task stands in the order of pages: when it fires, partition, width (of a hold slice, its start),
index."""

SEARCHED_AT_MOST: Final = 20_000
"""Entries one page looks through; with a filter it may be short, and still name a next one."""

_COUNTERS = ("accepted", "queued", "done", "cancelled", "replaced", "dead")


class _Row(NamedTuple):
    place: Place
    address: Address
    row: bytes


class _Listed(NamedTuple):
    """The earliest slices of all partitions, complete up to `until_ms` (None: to the end of the range)."""

    slices: list[tuple[int, Slice, float]]
    until_ms: int | None
    rows_a_slice: float
    holds: list[tuple[int, Slice, float]]
    """Hold slices: of tasks that were due before and may not go out yet."""


async def page(
    store: Store,
    *,
    from_ms: int,
    to_ms: int,
    after: Place | None,
    limit: int,
    where: TaskFilter = TaskFilter(),  # noqa: B008  # frozen
) -> Page:
    """Tasks in due order. Two round trips where slices hold about as much as they do on average."""
    rows: list[_Row] = []
    held: list[_Row] | None = [] if from_ms > store.clock.now_ms() else None
    searched, cut_ms = 0, None
    start_ms, slices_wanted = from_ms, limit + 16
    first = after or (from_ms, -1, -1, -1)
    while True:
        listed = await _list_slices(store, start_ms, to_ms, slices_wanted)
        if held is None:
            held = await _rows(store, listed.holds, where.state) if listed.holds else []
        chosen, until_ms = _choose(listed, start_ms, limit + 1 - len(rows))
        if until_ms is not None and until_ms <= start_ms:
            slices_wanted *= 8  # so many slices start in this one second that they did not fit
            continue
        end_ms = to_ms if until_ms is None else min(to_ms, until_ms)
        # What lies beyond the end is read again in its turn, together with all that comes before it.
        found = await _rows(store, chosen, where.state)
        searched += len(found)
        rows += [
            row
            for row in (*found, *held)
            if start_ms <= row.place[0] < end_ms and first < row.place and (not where.by_content or _fits(where, row))
        ]
        if len(rows) > limit or until_ms is None or until_ms >= to_ms:
            break
        start_ms = until_ms
        if searched >= SEARCHED_AT_MOST:
            cut_ms = until_ms
            break
    best = nsmallest(limit + 1, rows, key=lambda row: row.place)
    tasks = [_info(row, where.state) for row in best[:limit]]
    if len(best) > limit:
        return Page(tasks, _place_text(best[limit - 1].place))
    return Page(tasks, None if cut_ms is None else _place_text((cut_ms, -1, -1, -1)))


def _place_text(place: Place) -> str:
    return ".".join(map(str, place))


def _fits(where: TaskFilter, row: _Row) -> bool:
    try:
        body = decode(row.row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # nobody can say where it goes
    return where.fits(body.target, body.lane)


def parse_place(text: str) -> Place:
    due, partition, width, index = (int(piece) for piece in text.split("."))
    if not 0 <= due < 1 << 48 or not all(-1 <= number < 1 << 44 for number in (partition, width, index)):
        raise ValueError(text)
    return due, partition, width, index


def _info(row: _Row, state: ListedState) -> TaskInfo:
    idh = row.row[5:HEADER_BYTES]
    try:
        body = decode(row.row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return TaskInfo(idh.hex(), state, row.place[0])
    task_id = body.id or f"{idh.hex()}~{row.address.text()}"
    return describe(task_id, Found(state, body, row.place[0] if body.due_ms is None else body.due_ms))


async def _list_slices(store: Store, start_ms: int, to_ms: int, limit: int) -> _Listed:
    """One round trip: the slices from a time on, and how full they are on average."""
    high = f"({min(-(-to_ms // 1000), HOLDS_FROM_S)}"
    # Of the slices that began in an earlier second only the one of this hour can reach so far.
    hour = Slice.at(start_ms, HOUR_MS)
    groups: list[Group] = []
    for keys in store.keys.partitions:
        commands: list[Command] = [
            ("ZSCORE", keys.slices, hour.name),
            ("ZRANGE", keys.slices, start_ms // 1000, high, "BYSCORE", "LIMIT", 0, limit, "WITHSCORES"),
            ("HMGET", keys.n, *_COUNTERS),
            ("ZCARD", keys.slices),
            _holds_of(keys),
        ]
        groups.append((keys.slot, commands))
    found: list[tuple[int, Slice, float]] = []
    holds: list[tuple[int, Slice, float]] = []
    until_ms: int | None = None
    pending = total = 0
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        score, reply, counters, slices, held = result
        holds += [(p, Slice.parse(held[i]), float(held[i + 1])) for i in range(0, len(held), 2)]
        pending, total = pending + _open(counters), total + slices
        listed = [(p, Slice.parse(reply[i]), float(reply[i + 1])) for i in range(0, len(reply), 2)]
        if len(listed) == limit:
            last_ms = listed[-1][1].start_ms // 1000 * 1000
            until_ms = last_ms if until_ms is None else min(until_ms, last_ms)
        if score is not None and hour.start_ms // 1000 < start_ms // 1000:
            listed.append((p, hour, float(score)))
        found += [one for one in listed if one[1].end_ms > start_ms]
    return _Listed(found, until_ms, max(pending, 1) / max(total, 1), holds)


def _choose(listed: _Listed, start_ms: int, rows_needed: int) -> tuple[list[tuple[int, Slice, float]], int | None]:
    """Whole seconds, until enough rows are to be expected in them; and up to which time nothing is left out."""
    slices, until_ms, rows_a_slice, _ = listed
    if until_ms is not None:
        slices = [one for one in slices if one[1].start_ms < until_ms]
    slices.sort(key=lambda one: one[1].start_ms)
    enough = rows_needed + 3 * sqrt(rows_needed) + 1
    expected, last_ms = 0.0, 0
    for _, place, _ in slices:
        second_ms = place.start_ms // 1000 * 1000
        if expected >= enough and second_ms > max(last_ms, start_ms):
            return [one for one in slices if one[1].start_ms < second_ms], second_ms
        last_ms = second_ms
        expected += rows_a_slice * (place.end_ms - max(place.start_ms, start_ms)) / place.width_ms
    return slices, until_ms


async def _rows(store: Store, slices: list[tuple[int, Slice, float]], state: ListedState) -> list[_Row]:
    """The entries of some slices that are in one state."""
    groups: list[Group] = []
    for p, place, _ in slices:
        keys = store.keys.partitions[p]
        s, f, d, x = keys.slice_keys(place.name)
        groups.append((keys.slot, [("LRANGE", s, 0, -1), ("GET", f), ("GET", d), ("GET", x)]))
    rows: list[_Row] = []
    for (p, place, g), result in zip(slices, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        entries, fired, *over = result
        settled = ~_any_of([fired]) | _any_of(over) if state == "fired" else _any_of([fired, *over])
        r = r_of(g)
        copies = _copies(entries)
        for index, row in enumerate(entries):
            if len(row) < HEADER_BYTES or is_tomb(row) or settled >> index & 1:
                continue
            named_by = copies.get(index, index)
            if named_by >= 0:
                where = (_fires_ms(place, row), p, place.start_ms if place.is_hold else place.width_ms, index)
                rows.append(_Row(where, Address(p, place, r, named_by), row))
    return rows


def _holds_of(keys: PartitionKeys) -> Command:
    return ("ZRANGE", keys.slices, HOLDS_FROM_S, "+inf", "BYSCORE", "WITHSCORES")


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


_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _any_of(bitmaps: list[bytes | None]) -> int:
    """The union of bitmaps as one number: bit i of it is bit i of the maps."""
    union = 0
    for bits in bitmaps:
        # Redis numbers bits from the top of each byte; reversed and read little-endian they count up.
        union |= int.from_bytes((bits or b"").translate(_REVERSED), "little")
    return union


# -- counts ------------------------------------------------------------------------------------------------


async def count_all(store: Store) -> Count:
    """Everything pending or under way, from the counters: exact up to what is in flight."""
    pending = 0
    for result in await store.run([(keys.slot, [("HMGET", keys.n, *_COUNTERS)]) for keys in store.keys.partitions]):
        if isinstance(result, StoreError):
            raise result
        pending += _open(result[0])
    return Count(pending, exact=True)


def _open(counters: list[bytes | None]) -> int:
    accepted, *settled = (int(value or 0) for value in counters)
    return accepted - sum(settled)


async def count_between(store: Store, from_ms: int, to_ms: int) -> Count:
    """Pending tasks due in a range; a slice that lies across an edge counts by its share."""
    slices: list[tuple[int, Slice]] = []
    low, high = from_ms // 1000 - 3600, f"({min(-(-to_ms // 1000), HOLDS_FROM_S)}"
    groups: list[Group] = [
        (keys.slot, [("ZRANGE", keys.slices, low, high, "BYSCORE"), _holds_of(keys)]) for keys in store.keys.partitions
    ]
    holds: list[tuple[int, Slice, float]] = []
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        names, held = result
        slices += [(p, place) for name in names if (place := Slice.parse(name)).end_ms > from_ms]
        holds += [(p, Slice.parse(held[i]), float(held[i + 1])) for i in range(0, len(held), 2)]
    rows = await _rows(store, holds, "pending") if holds and from_ms <= store.clock.now_ms() else []
    total, exact = float(sum(from_ms <= row.place[0] < to_ms for row in rows)), True
    for at in range(0, len(slices), 10_000):
        some = slices[at : at + 10_000]
        for (_, place), pending in zip(some, await _pending_in(store, some), strict=True):
            inside = min(place.end_ms, to_ms) - max(place.start_ms, from_ms)
            if inside <= 0:
                continue
            exact = exact and (inside == place.width_ms or not pending)
            total += pending * inside / place.width_ms
    return Count(round(total), exact)


async def _pending_in(store: Store, slices: list[tuple[int, Slice]]) -> list[int]:
    now_ms = store.clock.now_ms()
    groups: list[Group] = []
    for p, place in slices:
        keys = store.keys.partitions[p]
        s, f, d, x = keys.slice_keys(place.name)
        bitmaps: list[Command] = [("GET", f), ("GET", d), ("GET", x)]
        # Before its time a slice can only have cancelled entries.
        untouched: list[Command] = [("BITCOUNT", x)]
        groups.append((keys.slot, [("LLEN", s), *(bitmaps if place.start_ms <= now_ms + 1000 else untouched)]))
    counts = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        length, *rest = result
        settled = rest[0] if len(rest) == 1 else _any_of(rest).bit_count()
        counts.append(length - settled)
    return counts
