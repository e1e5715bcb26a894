"""The index of caller-given ids: replace, look up, forget; with backoff when other callers change the same task."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from ...model.errors import Conflict, NotConfirmed, StoreError
from ...model.ids import idh_of
from ..durability import SERVER, Durability, executed
from ..keys import HOUR_MS, Address, PartitionKeys, Slice, address_prefix, partition_of
from ..redis.sender import Group
from ..store import Store
from .put import WAKE_MS, fresh_score

CONFLICT_RETRY_S: Final = 30.0
"""Seconds that a call keeps retrying, at least."""

_FIRST_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 0.1


class ConflictBackoff:
    """Random pauses between attempts, so that callers that change the same task succeed one after another."""

    def __init__(self, about: str, wait_s: float = 0.0) -> None:
        self._about = about
        self._deadline = time.monotonic() + max(wait_s, CONFLICT_RETRY_S)
        self._pause_s = 0.0

    async def wait(self) -> None:
        """Wait before the next attempt; raise Conflict when the time is up."""
        if time.monotonic() >= self._deadline:
            raise Conflict(f"{self._about} keeps changing; try again")
        await asyncio.sleep(random.uniform(0, self._pause_s))
        self._pause_s = min(_MAX_PAUSE_S, self._pause_s * 2 or _FIRST_PAUSE_S)


class IdRow(NamedTuple):
    """An entry that carries a caller-given id."""

    idh: bytes
    slice: Slice
    row: bytes
    due_ms: int


IDS_IN_LANES: Final = "ids_in_lanes"
"""Counter of a partition: how often the lane of an id was noted there."""

LANES_KEPT_MS: Final = 7 * 24 * HOUR_MS
"""How long an id alone leads to a task in a lane, counted from the end of its dedupe window."""

MOST_LANES: Final = 1_000
"""Most lanes of an id that are searched if the caller names none: those whose notes last longest."""

MOST_AT_ONCE: Final = 2_000
"""Most tasks in one call: Lua cannot unpack many more."""


class Replaced(NamedTuple):
    status: Literal["ok", "changed", "cancelled", "too late", "gone"]
    address: Address | None = None
    """The new place; with "changed", the address in the index instead (None if there is none)."""
    shortfall: NotConfirmed | None = None
    """Applied, but not at the requested durability."""


async def replace(
    store: Store,
    new: IdRow,
    *,
    partition: int,
    expected: Address | None,
    old: Address | None,
    now_ms: int,
    durability: Durability = SERVER,
) -> Replaced:
    """Replace `old` (which must be pending) by a task; add the task if `old` is None."""
    keys = store.keys.partitions[partition]
    from_place = old.slice if old is not None else new.slice
    s, f, _, x = keys.slice_keys(from_place.name)
    names = [keys.n, keys.slices, keys.ids, keys.entries(new.slice.name), s, f, x]
    args: list[Any] = [
        "move" if old is not None else "new",
        new.idh,
        expected.pack() if expected is not None else "",
        new.slice.name,
        fresh_score(new.slice),
        address_prefix(new.slice),
        new.row,
        from_place.name,
        repr(old.score) if old is not None else 0,
        old.index if old is not None else 0,
    ]
    commands = [store.scripts.call("replace", names, args)]
    if new.due_ms < now_ms + WAKE_MS:
        commands.append(("SPUBLISH", keys.wake, "1"))
    [result] = await store.run([(keys.slot, commands)], durability)
    shortfall = result if isinstance(result, NotConfirmed) else None
    if (done := executed(result)) is None:
        assert isinstance(result, StoreError)
        raise result
    reply = done[0]
    status = reply[0].decode()
    if status == "ok":
        return Replaced("ok", Address(partition, new.slice, reply[1], reply[2]), shortfall)
    if status == "changed":
        return Replaced("changed", Address.unpack(partition, reply[1]) if reply[1] else None, shortfall)
    return Replaced(status, None, shortfall)


async def look_up(store: Store, wanted: Sequence[tuple[int, bytes]]) -> list[Address | None]:
    """Return the addresses in the index for (partition, idh)."""
    raws = await look_up_packed(store, wanted)
    return [Address.unpack(p, raw) if raw is not None else None for (p, _), raw in zip(wanted, raws, strict=True)]


async def look_up_packed(store: Store, wanted: Sequence[tuple[int, bytes]]) -> list[bytes | None]:
    """Return the 14-byte packed addresses in the index for (partition, idh)."""
    return await fields_of(store, attrgetter("ids"), wanted)


async def fields_of(
    store: Store, hash_of: Callable[[PartitionKeys], str], wanted: Sequence[tuple[int, bytes]]
) -> list[bytes | None]:
    """Return the value of each (partition, idh) in a hash of the partition."""
    found: list[bytes | None] = []
    for one in await fields_or_failures(store, hash_of, wanted):
        if isinstance(one, StoreError):
            raise one
        found.append(one)
    return found


async def fields_or_failures(
    store: Store, hash_of: Callable[[PartitionKeys], str], wanted: Sequence[tuple[int, bytes]]
) -> list[bytes | StoreError | None]:
    """The same; what could not be read is answered by the failure."""
    groups: list[Group] = []
    asked: list[list[int]] = []
    for p, members in _by_partition(wanted).items():
        keys = store.keys.partitions[p]
        # A call of many thousands would block the server for all other callers.
        for first in range(0, len(members), MOST_AT_ONCE):
            some = members[first : first + MOST_AT_ONCE]
            groups.append((keys.slot, [("HMGET", hash_of(keys), *[wanted[i][1] for i in some])]))
            asked.append(some)
    found: list[bytes | StoreError | None] = [None] * len(wanted)
    for members, result in zip(asked, await store.run(groups), strict=True):
        values = [result] * len(members) if isinstance(result, StoreError) else result[0]
        for i, raw in zip(members, values, strict=True):
            found[i] = raw
    return found


class IdInLane(NamedTuple):
    """A task with a caller-given id and a lane."""

    task_id: str
    lane: str
    due_ms: int


async def note_lanes(store: Store, tasks: Sequence[IdInLane], now_ms: int) -> list[StoreError | None]:
    """Note the lanes of ids, before the tasks are put: an id alone must lead to all that are stored. A task whose lane
    could not be noted is answered by the failure."""
    by_partition: dict[int, list[int]] = {}
    for i, task in enumerate(tasks):
        by_partition.setdefault(partition_of(task.task_id, len(store.keys)), []).append(i)
    kept_ms = store.shared.dedupe_window_ms + LANES_KEPT_MS
    groups: list[Group] = []
    sent: list[list[int]] = []
    for p, members in by_partition.items():
        keys = store.keys.partitions[p]
        for first in range(0, len(members), MOST_AT_ONCE):
            names = [keys.n]
            args: list[Any] = [now_ms]
            some = members[first : first + MOST_AT_ONCE]
            for task_id, lane, due_ms in [tasks[i] for i in some]:
                names.append(keys.lanes_of(idh_of(task_id)))
                args += (max(due_ms, now_ms) + kept_ms, lane)
            groups.append((keys.slot, [store.scripts.call("note_lanes", names, args)]))
            sent.append(some)
    failures: list[StoreError | None] = [None] * len(tasks)
    for some, result in zip(sent, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            for i in some:
                failures[i] = result
    return failures


async def forget_lane(store: Store, task_id: str, lane: str) -> None:
    keys = store.keys.partitions[partition_of(task_id, len(store.keys))]
    await store.run_one(keys.slot, [("ZREM", keys.lanes_of(idh_of(task_id)), lane)])


async def is_noted(store: Store, task_id: str, lane: str) -> bool:
    keys = store.keys.partitions[partition_of(task_id, len(store.keys))]
    [until_ms] = await store.run_one(keys.slot, [("ZSCORE", keys.lanes_of(idh_of(task_id)), lane)])
    return until_ms is not None


async def noted_lanes(store: Store, wanted: Sequence[tuple[int, bytes]]) -> list[list[str]]:
    """The lanes that are noted for (partition, idh) of ids."""
    groups: list[Group] = []
    asked: list[list[int]] = []
    for p, members in _by_partition(wanted).items():
        keys = store.keys.partitions[p]
        for first in range(0, len(members), MOST_AT_ONCE):
            some = members[first : first + MOST_AT_ONCE]
            ranges = [("ZRANGE", keys.lanes_of(wanted[i][1]), 0, MOST_LANES - 1, "REV") for i in some]
            groups.append((keys.slot, list(ranges)))
            asked.append(some)
    found: list[list[str]] = [[] for _ in wanted]
    for members, result in zip(asked, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        for i, lanes in zip(members, result, strict=True):
            found[i] = [lane.decode() for lane in lanes]
    return found


def _by_partition(wanted: Sequence[tuple[int, bytes]]) -> dict[int, list[int]]:
    """The numbers of (partition, idh), by partition."""
    by_partition: dict[int, list[int]] = {}
    for i, (p, _) in enumerate(wanted):
        by_partition.setdefault(p, []).append(i)
    return by_partition


async def sweep(store: Store, partition: int, cursor: int, *, window_ms: int, count: int = 256) -> tuple[int, int]:
    """Check some ids and forget those finished longer ago than the window; return the next cursor and the number
    forgotten."""
    before_ms = store.clock.now_ms() - window_ms
    keys = store.keys.partitions[partition]
    [reply] = await store.run_one(keys.slot, [("HSCAN", keys.ids, cursor, "COUNT", count)])
    following, pairs = int(reply[0]), reply[1]
    old: list[bytes] = []
    for idh, raw in zip(pairs[::2], pairs[1::2], strict=True):
        if Address.unpack(partition, raw).slice.over_ms < before_ms:
            old += (idh, raw)
    removed = 0
    if old:
        names = [keys.slices, keys.ids, keys.holds, keys.queued]
        removed = await store.call(partition, "sweep", names, [window_ms, *old])
    return following, removed
