"""Read tasks: one by address, a page in due order, a page of queued tasks, a count by time."""

import re
from typing import Any, Final, NamedTuple

import msgspec

from ...model.delivery import Body
from ...model.errors import StoreError
from ...model.task import Count, ListedState, Page, QueueFilter, State, TaskFilter, TaskInfo
from ..codec import FORWARD, HEADER_BYTES, TOMBSTONE_BYTES, decode, decode_payload, is_tombstone
from ..keys import ADDRESS_BYTES, HOLDS_FROM_S, Address, Slice
from ..owner.read import slices_in
from ..queue_state import Queued
from ..redis.connection import RedisCommand
from ..redis.sender import Group
from ..store import Store
from .pages import (
    COUNTERS,
    PAGE_BYTES,
    Look,
    Place,
    Row,
    any_of,
    bounded,
    completed,
    count_held,
    held_rows,
    in_due_order,
    list_slices,
    start_of,
    still_open,
)


class Found(NamedTuple):
    """An entry, or what is left of it."""

    state: State
    body: Body | None = None
    due_ms: int | None = None
    moved_to: Address | None = None
    queued: Queued | None = None
    """Its place in a queue, if it is in one."""


async def look_at(store: Store, wanted: list[tuple[Address, bytes]]) -> list[Found]:
    """Return the state of entries by address; `finished` if the slice is gone."""
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
        found.append(_found(address, idh, *result[0]))
    return found


def _found(
    address: Address, idh: bytes, score: Any, row: bytes | None, f: int, d: int, x: int, died_ms: bytes | None
) -> Found:
    if score is None or row is None or float(score) != address.score:
        return _ended("finished", died_ms, address.slice.since_ms)
    if len(row) == TOMBSTONE_BYTES:
        return Found("cancelled" if row == idh[:TOMBSTONE_BYTES] else "finished")
    if row[5:HEADER_BYTES] != idh:
        return _ended("finished", died_ms, address.slice.since_ms)
    if is_tombstone(row):
        if row[4] & FORWARD:
            return Found("replaced", moved_to=Address.unpack(address.partition, row[HEADER_BYTES:]))
        # Giving up the failed head of a lane marks it as cancelled, but writes a dead letter.
        return Found("cancelled" if died_ms is None else "dead")
    state: State = "cancelled" if x else "done" if d else "fired" if f else "pending"
    due_ms = address.slice.from_ms + int.from_bytes(row[:4], "big")
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _ended(state, died_ms, due_ms)
    return _ended(state, died_ms, due_ms)._replace(body=body, due_ms=due_ms if body.due_ms is None else body.due_ms)


def _ended(state: State, died_ms: bytes | None, since_ms: int) -> Found:
    """Return done or dead. A dead letter older than this task belongs to an earlier one with the same id."""
    if state in ("done", "finished") and died_ms is not None and float(died_ms) >= since_ms:
        return Found("dead")
    return Found(state)


def describe(task_id: str, found: Found) -> TaskInfo:
    body, place = found.body, found.queued
    fields: dict[str, Any] = {}
    if place is not None:
        fields = {"queue": place.queue, "worker": place.worker, "since_ms": place.since_ms}
    if body is None:
        return TaskInfo(task_id, found.state, found.due_ms, **fields)
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
        timeout_ms=body.timeout_ms,
        **fields,
    )


# -- pages -------------------------------------------------------------------------------------------------

SEARCHED_AT_MOST: Final = 20_000
"""Entries read for one page; a filtered page may be short and still have a cursor."""
SCANNED: Final = 64
"""Queued tasks read in one step: few, because each may carry 64 KiB."""


async def page(
    store: Store,
    *,
    from_ms: int,
    to_ms: int,
    after: Place | None,
    limit: int,
    where: TaskFilter = TaskFilter(),  # noqa: B008  # frozen
) -> Page:
    """Return tasks in due order, after those in hold slices. Two round trips for slices of average size; one more for
    large payloads. A page of large payloads may be short and still have a cursor."""
    while True:
        rows, following = await _first_rows(store, from_ms, to_ms, after, limit, where)
        shown = bounded(rows[:limit])
        tasks = await completed(store, shown)
        if tasks is not None:
            at = shown[-1].place if len(rows) > len(shown) else following
            return Page([_info(row, where.state) for row in tasks], None if at is None else _place_text(at))


async def _first_rows(
    store: Store, from_ms: int, to_ms: int, after: Place | None, limit: int, where: TaskFilter
) -> tuple[list[Row], Place | None]:
    """Return up to one row more than the limit, and a cursor if the search stopped early."""
    span, rows, searched = (from_ms, to_ms), [], 0
    listing = await list_slices(store, from_ms, to_ms, limit + 16)
    among_held = after is None or after[0] == 0
    if among_held and listing.held and from_ms <= store.clock.now_ms():
        held = await held_rows(store, after, span, where, limit + 1, SEARCHED_AT_MOST)
        rows, searched = held.rows, held.searched
        if held.next is not None:
            return rows, held.next
    first = start_of(from_ms) if after is None or among_held else after
    look = Look(where, span, first, limit + 1 - len(rows))
    rest = await in_due_order(store, listing, span, look, SEARCHED_AT_MOST - searched)
    return [*rows, *rest.rows], rest.next


def _place_text(place: Place) -> str:
    return ".".join(map(str, place))


def parse_place(text: str) -> Place:
    due, partition, width, index, r = (int(piece) for piece in text.split("."))
    if not 0 <= due < 1 << 48 or not all(-1 <= number < 1 << 44 for number in (partition, width, index, r)):
        raise ValueError(text)
    return due, partition, width, index, r


def _info(row: Row, state: ListedState) -> TaskInfo:
    idh = row.row[5:HEADER_BYTES]
    try:
        body = decode(row.row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return TaskInfo(idh.hex(), state, row.fires_ms)
    task_id = body.id or f"{idh.hex()}~{row.address.text()}"
    return describe(task_id, Found(state, body, row.fires_ms if body.due_ms is None else body.due_ms))


# -- counts ------------------------------------------------------------------------------------------------


async def count_all(store: Store) -> Count:
    """Count everything pending or under way, from the counters: exact up to what is in flight."""
    pending = 0
    for result in await store.run([(keys.slot, [("HMGET", keys.n, *COUNTERS)]) for keys in store.keys.partitions]):
        if isinstance(result, StoreError):
            raise result
        pending += still_open(result[0])
    return Count(pending, exact=True)


async def count_between(store: Store, from_ms: int, to_ms: int) -> Count:
    """Count pending tasks due in a range; a slice that crosses an edge counts by its share."""
    slices: list[tuple[int, Slice]] = []
    low, high = from_ms // 1000 - 3600, f"({min(-(-to_ms // 1000), HOLDS_FROM_S)}"
    groups: list[Group] = [
        (keys.slot, [("ZRANGE", keys.slices, low, high, "BYSCORE", "WITHSCORES")]) for keys in store.keys.partitions
    ]
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        slices += [(p, place) for place, _ in slices_in(store.keys.partitions[p], result[0]) if place.end_ms > from_ms]
    total, exact = await count_held(store, from_ms, to_ms) if from_ms <= store.clock.now_ms() else (0.0, True)
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
        bitmaps: list[RedisCommand] = [("GET", f), ("GET", d), ("GET", x)]
        # Before a slice is due, its only finished entries are cancelled ones.
        untouched: list[RedisCommand] = [("BITCOUNT", x)]
        groups.append((keys.slot, [("LLEN", s), *(bitmaps if place.start_ms <= now_ms + 1000 else untouched)]))
    counts = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        length, *rest = result
        settled = rest[0] if len(rest) == 1 else any_of(rest).bit_count()
        counts.append(length - settled)
    return counts


_PLACE: Final = re.compile(r"q(\d{1,4})\.(\d{1,20})(?:\.((?:[0-9a-f]{2}){1,64}))?")
QueuePlace = tuple[int, int, bytes]
"""A partition, the cursor of the scan of its hash, and the last task shown of that step (empty: none).

A step of a small hash returns the whole hash, which may be far more than a page. Its rows are sorted: if the hash has
changed when the step is repeated, rows may be shown again, but those shown before are the only ones passed over."""


def parse_queue_place(text: str) -> QueuePlace:
    """Parse a cursor; raise ValueError if it is malformed."""
    match = _PLACE.fullmatch(text)
    if match is None or int(match[2]) >= 1 << 64:
        raise ValueError(text)
    return int(match[1]), int(match[2]), bytes.fromhex(match[3] or "")


_QUEUED_AT_ONCE: Final = 64


async def queued_page(store: Store, where: QueueFilter, *, after: QueuePlace | None, limit: int) -> Page:
    """Return `limit` tasks, or fewer large ones."""
    partition, cursor, shown = after or (0, 0, b"")
    found: list[TaskInfo] = []
    searched = size = 0
    while partition < len(store.keys) and len(found) < limit and searched < SEARCHED_AT_MOST and size < PAGE_BYTES:
        keys = store.keys.partitions[partition]
        [[raw_cursor, rows]] = await store.run_one(
            keys.slot, [("HSCAN", keys.queued, cursor, "COUNT", min(limit, SCANNED))]
        )
        places = [(idh, Queued.parse(raw)) for idh, raw in zip(rows[::2], rows[1::2], strict=True) if idh > shown]
        wanted = sorted(one for one in places if where.in_state(running=one[1].worker is not None))
        searched += len(places)
        while wanted and len(found) < limit and size < PAGE_BYTES:
            most = min(limit - len(found), _QUEUED_AT_ONCE)
            some, wanted = wanted[:most], wanted[most:]
            for one, entry_bytes in await _read(store, partition, dict(some)):
                size += entry_bytes
                found += [one] if where.fits(one) else []
            shown = some[-1][0]
        if wanted:
            return Page(found, f"q{partition}.{cursor}.{shown.hex()}")
        cursor, shown = int(raw_cursor), b""
        partition += not cursor
    return Page(found, f"q{partition}.{cursor}" if partition < len(store.keys) else None)


async def _read(store: Store, partition: int, places: dict[bytes, Queued]) -> list[tuple[TaskInfo, int]]:
    """Return tasks and the sizes of their entries."""
    keys = store.keys.partitions[partition]
    groups: list[Group] = [
        (keys.slot, [("XRANGE", keys.queue(place.queue), place.entry, place.entry)]) for place in places.values()
    ]
    infos = []
    for (idh, place), result in zip(places.items(), await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        [rows] = result
        if rows:  # otherwise it has left its queue since
            row = rows[0][1][1][ADDRESS_BYTES:]
            infos.append((_queued_info(partition, idh, place, row), len(row)))
    return infos


def _queued_info(partition: int, idh: bytes, place: Queued, row: bytes) -> TaskInfo:
    address = Address.unpack(partition, place.address)
    due_ms = address.slice.start_ms + int.from_bytes(row[:4], "big")
    state: State = "queued" if place.worker is None else "running"
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return describe(idh.hex(), Found(state, None, due_ms, queued=place))
    task_id = body.id or f"{row[5:HEADER_BYTES].hex()}~{address.text()}"
    return describe(task_id, Found(state, body, due_ms if body.due_ms is None else body.due_ms, queued=place))
