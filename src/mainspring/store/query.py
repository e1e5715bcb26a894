"""Looking at tasks: one by address, a page in due order, a count by time."""

from heapq import nsmallest
from math import sqrt
from typing import Any, Final, NamedTuple

import msgspec

from ..model.choice import ListedState, TaskFilter
from ..model.delivery import Body
from ..model.errors import StoreError
from ..model.task import Count, Page, State, TaskInfo
from .codec import FORWARD, HEADER_BYTES, TOMB_BYTES, decode, decode_payload, is_tomb
from .earliest import Look, earliest
from .held_rows import count_held, held_rows
from .keys import HOLDS_FROM_S, HOUR_MS, Address, Slice
from .listing import slices_in
from .queue_state import Queued
from .rows import Place, Row, Sliced, any_of
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
        found.append(_found(address, idh, *result[0]))
    return found


def _found(
    address: Address, idh: bytes, score: Any, row: bytes | None, f: int, d: int, x: int, died_ms: bytes | None
) -> Found:
    if score is None or row is None or float(score) != address.score:
        return _ended("finished", died_ms, address.slice.since_ms)
    if len(row) == TOMB_BYTES:
        return Found("cancelled" if row == idh[:TOMB_BYTES] else "finished")
    if row[5:HEADER_BYTES] != idh:
        return _ended("finished", died_ms, address.slice.since_ms)
    if is_tomb(row):
        if row[4] & FORWARD:
            return Found("replaced", moved_to=Address.unpack(address.partition, row[HEADER_BYTES:]))
        # The failed head of a lane that was given up leaves as a cancelled task does, but with a letter.
        return Found("cancelled" if died_ms is None else "dead")
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
        timeout_ms=body.timeout_ms,
        **told,
    )


# -- pages -------------------------------------------------------------------------------------------------

SEARCHED_AT_MOST: Final = 20_000
"""Entries one page looks through; with a filter it may be short, and still name a next one."""

_COUNTERS = ("accepted", "queued", "done", "cancelled", "replaced", "dead")


class _Listed(NamedTuple):
    """The earliest slices of all partitions, complete up to `until_ms` (None: to the end of the range)."""

    slices: list[Sliced]
    until_ms: int | None
    rows_a_slice: float
    held: bool
    """Whether there are hold slices: of tasks that were due before and may not go out yet."""


async def page(
    store: Store,
    *,
    from_ms: int,
    to_ms: int,
    after: Place | None,
    limit: int,
    where: TaskFilter = TaskFilter(),  # noqa: B008  # frozen
) -> Page:
    """Tasks in due order, those in hold slices before all others. Two round trips where slices hold about as much as
    they do on average."""
    span, rows, searched = (from_ms, to_ms), [], 0
    listed = await _list_slices(store, from_ms, to_ms, limit + 16)
    among_held = after is None or after[0] == 0
    if among_held and listed.held and from_ms <= store.clock.now_ms():
        held = await held_rows(store, after, span, where, limit + 1, SEARCHED_AT_MOST)
        rows, searched = held.rows, held.searched
        if held.next is not None:
            return _page(rows, limit, where.state, _place_text(held.next))
    rest = await _timeline(store, listed, span, None if among_held else after, limit + 1 - len(rows), where, searched)
    return _page([*rows, *rest.rows], limit, where.state, rest.next)


class _Part(NamedTuple):
    rows: list[Row]
    next: str | None


def _page(rows: list[Row], limit: int, state: ListedState, following: str | None) -> Page:
    tasks = [_info(row, state) for row in rows[:limit]]
    return Page(tasks, _place_text(rows[limit - 1].place) if len(rows) > limit else following)


async def _timeline(
    store: Store, listed: _Listed, span: tuple[int, int], after: Place | None, wanted: int, where: TaskFilter, seen: int
) -> _Part:
    """The first tasks of all slices that are no hold slices, in due order."""
    rows: list[Row] = []
    start_ms, to_ms = span
    first = after or _start_of(start_ms)
    slices_wanted, cut_ms = wanted + 15, None
    while True:
        chosen, until_ms = _choose(listed, start_ms, wanted - len(rows))
        if until_ms is not None and until_ms <= start_ms:
            slices_wanted *= 8  # so many slices start in this one second that they did not fit
            listed = await _list_slices(store, start_ms, to_ms, slices_wanted)
            continue
        end_ms = to_ms if until_ms is None else min(to_ms, until_ms)
        # What lies beyond the end is read again in its turn, together with all that comes before it.
        look = Look(where, (start_ms, end_ms), first, wanted - len(rows))
        found, looked_at = await earliest(store, chosen, look, listed.rows_a_slice)
        seen += looked_at
        rows += found
        if len(rows) >= wanted or until_ms is None or until_ms >= to_ms:
            break
        start_ms = until_ms
        if seen >= SEARCHED_AT_MOST:
            cut_ms = until_ms
            break
        listed = await _list_slices(store, start_ms, to_ms, slices_wanted)
    best = nsmallest(wanted, rows, key=lambda row: row.place)
    return _Part(best, None if cut_ms is None or len(best) >= wanted else _place_text(_start_of(cut_ms)))


def _start_of(due_ms: int) -> Place:
    """Before all tasks that fire from then on."""
    return due_ms, -1, -1, -1, -1


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
            ("ZRANGE", keys.slices, HOLDS_FROM_S, "+inf", "BYSCORE", "LIMIT", 0, 1),
        ]
        groups.append((keys.slot, commands))
    found: list[Sliced] = []
    until_ms: int | None = None
    pending = total = 0
    held = False
    for p, result in enumerate(await store.run(groups)):
        if isinstance(result, StoreError):
            raise result
        score, reply, counters, slices, holds = result
        held = held or bool(holds)
        pending, total = pending + _open(counters), total + slices
        listed: list[Sliced] = [(p, *one) for one in slices_in(store.keys.partitions[p], reply)]
        if len(reply) == 2 * limit:
            last_ms = int(float(reply[-1])) * 1000
            until_ms = last_ms if until_ms is None else min(until_ms, last_ms)
        if score is not None and hour.start_ms // 1000 < start_ms // 1000:
            listed.append((p, hour, float(score)))
        found += [one for one in listed if one[1].end_ms > start_ms]
    return _Listed(found, until_ms, max(pending, 1) / max(total, 1), held)


def _choose(listed: _Listed, start_ms: int, rows_needed: int) -> tuple[list[Sliced], int | None]:
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
        bitmaps: list[Command] = [("GET", f), ("GET", d), ("GET", x)]
        # Before its time a slice can only have cancelled entries.
        untouched: list[Command] = [("BITCOUNT", x)]
        groups.append((keys.slot, [("LLEN", s), *(bitmaps if place.start_ms <= now_ms + 1000 else untouched)]))
    counts = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        length, *rest = result
        settled = rest[0] if len(rest) == 1 else any_of(rest).bit_count()
        counts.append(length - settled)
    return counts
