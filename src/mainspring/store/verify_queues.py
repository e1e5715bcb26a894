"""Looks at the queues of a partition: every task in a stream has its place, and every place its task."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from .keys import ADDRESS_BYTES, Address, PartitionKeys
from .store import Store
from .verify_report import Finding, Repair

TASKS_A_PAGE: Final = 200
"""Few: a page of a stream brings the payloads along."""

_PROBLEMS: Final = {
    "entry": "an entry of a stream that is not among the queued tasks: it can neither be found nor cancelled",
    "place": "a queued task whose entry is gone from its stream: no worker will get it",
}

Task = tuple[bytes, bytes, bytes]
"""idh, stream id, packed address."""


async def check_queues(store: Store, keys: PartitionKeys) -> AsyncIterator[Finding]:
    queues = await _names(store, keys)
    told: set[bytes] = set()
    async for queue, tasks in _pages(store, keys, queues):
        for (idh, entry, address), there in await _halves(store, keys, queue, tasks):
            if idh not in told:
                told.add(idh)
                repair = partial(_repair, store, keys, queue, (idh, entry, address))
                where = f"{keys.queue(queue)} {entry.decode()}"
                yield Finding(f"queue-{there}", keys.number, where, _PROBLEMS[there], repair)
    queued, aside, places, entries, _ = await _count(store, keys, queues, set_right=False)
    if queued + aside != places or places != entries:
        problem = f"counted are {queued} and {aside} of lanes; there are {places} places and {entries} entries"
        yield Finding("queue-count", keys.number, keys.n, problem, partial(_recount, store, keys, queues))


async def _names(store: Store, keys: PartitionKeys) -> list[str]:
    names: set[bytes] = set()
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("SSCAN", keys.queues, cursor, "COUNT", TASKS_A_PAGE)])
        cursor = int(reply[0])
        names.update(reply[1])
        if not cursor:
            return sorted(name.decode() for name in names)


async def _pages(store: Store, keys: PartitionKeys, queues: Sequence[str]) -> AsyncIterator[tuple[str, list[Task]]]:
    """All that is in the streams, then all that is said to be."""
    for queue in queues:
        first = b"-"
        while True:
            [rows] = await store.run_one(keys.slot, [("XRANGE", keys.queue(queue), first, "+", "COUNT", TASKS_A_PAGE)])
            yield queue, [(row[1][1][19:35], row[0], row[1][1][:ADDRESS_BYTES]) for row in rows]
            if len(rows) < TASKS_A_PAGE:
                break
            first = b"(" + rows[-1][0]
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.queued, cursor, "COUNT", TASKS_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        found: dict[str, list[Task]] = {}
        for idh, place in zip(flat[::2], flat[1::2], strict=True):
            entry, queue = place[ADDRESS_BYTES:].split(b" ")[:2]
            found.setdefault(queue.decode(), []).append((idh, entry, place[:ADDRESS_BYTES]))
        for name, tasks in found.items():
            yield name, tasks
        if not cursor:
            return


async def _halves(store: Store, keys: PartitionKeys, queue: str, tasks: Sequence[Task]) -> list[tuple[Task, str]]:
    found: list[tuple[Task, str]] = []
    for first in range(0, len(tasks), TASKS_A_PAGE):
        some = tasks[first : first + TASKS_A_PAGE]
        args = [value for idh, entry, _ in some for value in (idh, entry)]
        reply = await store.call(
            keys.number, "verify_queues", [keys.queued, keys.queue(queue)], [len(some), *args]
        )  # fmt: skip
        found += [(some[at - 1], there.decode()) for at, there in zip(reply[::2], reply[1::2], strict=True)]
    return found


async def _repair(store: Store, keys: PartitionKeys, queue: str, task: Task) -> Repair:
    idh, entry, address = task
    s, _, d, _ = keys.slice_keys(Address.unpack(keys.number, address).slice.name)
    names = [keys.queued, keys.queue(queue), keys.slices, s, d, keys.own, keys.fence]
    match await store.call(keys.number, "repair_queue", names, [idh, entry, queue]):
        case b"placed":
            return Repair(True, "it is among the queued tasks again")
        case b"again":
            return Repair(True, "its entry stands in its slice: the owner of the partition hands it off again")
        case b"lost":
            return Repair(True, "nothing is left of it; its place is removed, and the books are set right without it")
        case _:
            return Repair(True, "it has changed by now, and is fine")


async def _count(store: Store, keys: PartitionKeys, queues: Sequence[str], *, set_right: bool) -> list[int]:
    names = [keys.n, keys.queued, *map(keys.queue, queues)]
    counts: list[int] = await store.call(keys.number, "count_queues", names, [int(set_right), *queues])
    return counts


async def _recount(store: Store, keys: PartitionKeys, queues: Sequence[str]) -> Repair:
    counts = await _count(store, keys, queues, set_right=True)
    if counts[4]:
        return Repair(True, f"counted again: there are {counts[2]} tasks in queues")
    return Repair(False, f"there are {counts[2]} tasks in queues, too many for one step; verify again later")
