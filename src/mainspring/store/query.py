"""Looking at tasks: one by address, a page in due order, a count by time."""

from heapq import nsmallest
from typing import Any, NamedTuple

import msgspec

from ..model.delivery import Body
from ..model.errors import StoreError
from ..model.task import Count, Page, State, TaskInfo
from .codec import FORWARD, HEADER_BYTES, TOMB_BYTES, decode, decode_payload, is_tomb
from .keys import Address, Slice, r_of
from .store import Group, Store
from .wire import Command


class Found(NamedTuple):
    """An entry as it stands, or what is left of it."""

    state: State
    body: Body | None = None
    due_ms: int | None = None
    moved_to: Address | None = None


async def look_at(store: Store, wanted: list[tuple[Address, bytes]]) -> list[Found]:
    """The state of entries by address; `finished` when the slice is gone."""
    groups: list[Group] = []
    for address, idh in wanted:
        keys = store.keys.partitions[address.partition]
        s, f, d, x = keys.slice_keys(address.slice.name)
        commands: list[Command] = [
            ("MULTI",),
            ("ZSCORE", keys.slices, address.slice.name),
            ("LINDEX", s, address.index),
            *(("GETBIT", bits, address.index) for bits in (f, d, x)),
            ("HEXISTS", keys.dead, idh),
            ("EXEC",),
        ]
        groups.append((keys.slot, commands))
    found = []
    for (address, idh), result in zip(wanted, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        found.append(_found(address, idh, *result[-1]))
    return found


def _found(address: Address, idh: bytes, score: Any, row: bytes | None, f: int, d: int, x: int, dead: int) -> Found:
    if dead:
        return Found("dead")
    if score is None or row is None or float(score) != address.score:
        return Found("finished")
    if len(row) == TOMB_BYTES:
        return Found("cancelled" if row == idh[:TOMB_BYTES] else "finished")
    if row[5:HEADER_BYTES] != idh:
        return Found("finished")
    if row[4] & FORWARD:
        return Found("replaced", moved_to=Address.unpack(address.partition, row[HEADER_BYTES:]))
    state: State = "cancelled" if x else "done" if d else "fired" if f else "pending"
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Found(state)
    due_ms = body.due_ms if body.due_ms is not None else address.slice.start_ms + int.from_bytes(row[:4], "big")
    return Found(state, body, due_ms)


def describe(task_id: str, found: Found) -> TaskInfo:
    body = found.body
    if body is None:
        return TaskInfo(task_id, found.state, found.due_ms)
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
    )


# -- pages -------------------------------------------------------------------------------------------------

Place = tuple[int, int, int, int]
"""Where a task stands in the order of pages: due, partition, width, index."""


class _Row(NamedTuple):
    place: Place
    address: Address
    row: bytes


async def page(store: Store, *, from_ms: int, to_ms: int, after: Place | None, limit: int) -> Page:
    """Pending tasks in due order. Two round trips where the first slices hold a page's worth."""
    rows: list[_Row] = []
    start_ms = from_ms
    first = after or (from_ms, -1, -1, -1)
    while len(rows) <= limit:
        slices, next_ms = await _slices_from(store, start_ms, to_ms, limit - len(rows) + 1)
        rows += [row for row in await _pending_rows(store, slices) if first < row.place and row.place[0] < to_ms]
        if next_ms is None:
            break
        start_ms = next_ms
    best = nsmallest(limit + 1, rows, key=lambda row: row.place)
    more = len(best) > limit
    tasks = [_info(row) for row in best[:limit]]
    return Page(tasks, ".".join(map(str, best[limit - 1].place)) if more else None)


def parse_place(text: str) -> Place:
    due, partition, width, index = (int(piece) for piece in text.split("."))
    return due, partition, width, index


def _info(row: _Row) -> TaskInfo:
    idh = row.row[5:HEADER_BYTES]
    try:
        body = decode(row.row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return TaskInfo(idh.hex(), "pending", row.place[0])
    task_id = body.id or f"{idh.hex()}~{row.address.text()}"
    return describe(task_id, Found("pending", body, row.place[0]))


async def _slices_from(
    store: Store, start_ms: int, to_ms: int, enough: int
) -> tuple[list[tuple[int, Slice, float]], int | None]:
    """The earliest slices of all partitions: whole seconds until there are enough, and where to go on."""
    # An hour slice that began before the range may reach into it.
    low, high = start_ms // 1000 - 3600, f"({-(-to_ms // 1000)}"
    groups: list[Group] = []
    for keys in store.keys.partitions:
        command: Command = (
            "ZRANGE", keys.slices, low, high, "BYSCORE", "LIMIT", 0, enough + 64, "WITHSCORES",
        )  # fmt: skip
        groups.append((keys.slot, [command]))
    found: list[tuple[int, Slice, float]] = []
    cut_ms: int | None = None
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        reply = result[0]
        listed = [(p, Slice.parse(reply[i]), float(reply[i + 1])) for i in range(0, len(reply), 2)]
        if len(listed) == enough + 64:
            last = listed[-1][1].start_ms // 1000 * 1000
            cut_ms = last if cut_ms is None else min(cut_ms, last)
        found += [one for one in listed if one[1].end_ms > start_ms]
    seconds = sorted(max(one[1].start_ms, start_ms) // 1000 * 1000 for one in found)
    if len(seconds) > enough:
        bound = seconds[enough] + 1000
        cut_ms = bound if cut_ms is None else min(cut_ms, bound)
    if cut_ms is None:
        return found, None
    # Rows of a wide slice beyond the cut come again in the next round; the caller keeps the smallest anyway.
    return [one for one in found if one[1].start_ms < cut_ms], cut_ms


async def _pending_rows(store: Store, slices: list[tuple[int, Slice, float]]) -> list[_Row]:
    groups: list[Group] = []
    for p, place, _ in slices:
        keys = store.keys.partitions[p]
        s, f, d, x = keys.slice_keys(place.name)
        groups.append((keys.slot, [("LRANGE", s, 0, -1), ("GET", f), ("GET", d), ("GET", x)]))
    rows: list[_Row] = []
    for (p, place, g), result in zip(slices, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        entries, *bitmaps = result
        settled = _any_of(bitmaps)
        r = r_of(g)
        for index, row in enumerate(entries):
            if len(row) >= HEADER_BYTES and not is_tomb(row) and not settled >> index & 1:
                due_ms = _due_of(place, row)
                where = (due_ms, p, place.width_ms, index)
                rows.append(_Row(where, Address(p, place, r, index), row))
    return rows


def _due_of(place: Slice, row: bytes) -> int:
    offset = int.from_bytes(row[:4], "big")
    if offset:
        return place.start_ms + offset
    try:
        due_ms = decode(row).due_ms
    except (msgspec.DecodeError, UnicodeDecodeError):
        return place.start_ms
    return place.start_ms if due_ms is None else due_ms


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
    fields = ("accepted", "done", "cancelled", "replaced", "dead")
    for result in await store.run([(keys.slot, [("HMGET", keys.n, *fields)]) for keys in store.keys.partitions]):
        if isinstance(result, StoreError):
            raise result
        accepted, *settled = (int(value or 0) for value in result[0])
        pending += accepted - sum(settled)
    return Count(pending, exact=True)


async def count_between(store: Store, from_ms: int, to_ms: int) -> Count:
    """Pending tasks due in a range; a slice that lies across an edge counts by its share."""
    slices: list[tuple[int, Slice]] = []
    low, high = from_ms // 1000 - 3600, f"({-(-to_ms // 1000)}"
    groups: list[Group] = [
        (keys.slot, [("ZRANGE", keys.slices, low, high, "BYSCORE")]) for keys in store.keys.partitions
    ]
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        slices += [(p, place) for name in result[0] if (place := Slice.parse(name)).end_ms > from_ms]
    total, exact = 0.0, True
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
