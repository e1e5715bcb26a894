"""Putting tasks with ids: the entries and the index change in one step. See PROTOCOL "Put"."""

from collections.abc import Sequence
from typing import Any, Final

from ..model.errors import StoreError
from .durable import SERVER, Durability
from .index import MOST_AT_ONCE, IdRow
from .keys import Address, PartitionKeys, Slice, address_prefix
from .put import WAKE_MS, Widths, fresh_score
from .store import Group, Store
from .wire import Command

MANY: Final = 32
"""From so many entries on a transaction costs less than handing all of them to a script."""

By = dict[Slice, list[int]]
"""The numbers of rows by slice: that is the order in which they are sent."""


async def put_ids(
    store: Store,
    by_partition: dict[int, list[IdRow]],
    widths: Widths,
    *,
    now_ms: int,
    durability: Durability = SERVER,
) -> dict[int, dict[int, Address] | StoreError]:
    """Put rows unless their id is known: returns, per partition, row numbers and addresses of the known ones.

    The ids of a partition must be distinct within one call.
    """
    calls = [
        (p, first, rows[first : first + MOST_AT_ONCE])
        for p, rows in by_partition.items()
        for first in range(0, len(rows), MOST_AT_ONCE)
    ]
    groups: list[Group] = []
    orders: list[By] = []
    for p, _, rows in calls:
        keys = store.keys.partitions[p]
        order: By = {}
        for i, row in enumerate(rows):
            order.setdefault(row.slice, []).append(i)
        commands = _many(store, keys, rows, order) if len(rows) >= MANY else [_few(store, keys, rows, order)]
        if min(row.due_ms for row in rows) < now_ms + WAKE_MS:
            commands.append(("SPUBLISH", keys.wake, "1"))
        if durability.confirm is not None:
            # Where every id was known nothing was written, and WAIT would confirm nothing at once.
            commands.append(("HINCRBY", keys.n, "accepted", 0))
        groups.append((keys.slot, commands))
        orders.append(order)
    answers: dict[int, dict[int, Address] | StoreError] = {p: {} for p in by_partition}
    results = await store.run(groups, durability)
    for (p, first, rows), order, result in zip(calls, orders, results, strict=True):
        so_far = answers[p]
        if isinstance(result, StoreError) or isinstance(so_far, StoreError):
            answers[p] = result if isinstance(result, StoreError) else so_far
        else:
            reply = result[_EXEC + len(order)][-1] if len(rows) >= MANY else result[0]
            so_far.update(_known(p, first, order, reply, widths))
    return answers


def _few(store: Store, keys: PartitionKeys, rows: Sequence[IdRow], order: By) -> Command:
    """One script that gets everything."""
    args: list[Any] = [len(order)]
    for place, members in order.items():
        args += (place.name, fresh_score(place), address_prefix(place), len(members))
        args += [rows[i].row for i in members]
    names = [keys.n, keys.slices, keys.ids, *(keys.entries(place.name) for place in order)]
    return store.scripts.call("put_ids", names, args)


_EXEC: Final = 3
"""Where the reply of EXEC stands, not counting the pushes: behind MULTI, ZADD and the script."""


def _many(store: Store, keys: PartitionKeys, rows: Sequence[IdRow], order: By) -> list[Command]:
    """Plain appends, and a script that gets the ids alone."""
    scores: list[Any] = []
    pushes: list[Command] = []
    names = [keys.n, keys.slices, keys.ids]
    idhs: list[bytes] = []
    args: list[Any] = []
    for place, members in order.items():
        name = place.name
        s = keys.entries(name)
        scores += (fresh_score(place), name)
        pushes.append(("RPUSH", s, *[rows[i].row for i in members]))
        idhs += [rows[i].idh for i in members]
        names.append(s)
        args += (name, address_prefix(place), len(members))
    return [
        ("MULTI",),
        ("ZADD", keys.slices, "NX", *scores),
        *pushes,
        store.scripts.whole("register", names, [b"".join(idhs), *args]),
        ("EXEC",),
    ]


def _known(partition: int, first: int, order: By, reply: Any, widths: Widths) -> dict[int, Address]:
    put, taken = reply
    for at, (place, members) in enumerate(order.items()):
        widths.saw(partition, place, put[at * 2 + 1] + len(members))
    if not taken:
        return {}
    sent = [i for members in order.values() for i in members]
    return {
        first + sent[position - 1]: Address.unpack(partition, raw)
        for position, raw in zip(taken[::2], taken[1::2], strict=True)
    }
