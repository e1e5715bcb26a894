"""Putting tasks with ids: the entries and the index change in one step. See PROTOCOL "Put"."""

from collections.abc import Sequence
from typing import Any, Final

from ..model.errors import NotConfirmed, StoreError
from .durable import SERVER, Durability, executed
from .index import MOST_AT_ONCE, IdRow
from .keys import Address, PartitionKeys, Slice, address_prefix
from .put import CROWDED, WAKE_MS, Widths, fresh_score
from .store import Group, Store
from .wire import Command

MANY: Final = 32
"""From so many entries on a transaction costs less than handing all of them to a script."""

SHARES_AT_ONCE: Final = 32
"""Partitions of one such script at most: the server does nothing else meanwhile."""

By = dict[Slice, list[int]]
"""The numbers of rows by slice: that is the order in which they are sent."""


class _Share:
    """Rows of one partition in one call."""

    __slots__ = ("first", "keys", "order", "rows")

    def __init__(self, keys: PartitionKeys, first: int, rows: Sequence[IdRow]) -> None:
        self.keys, self.first, self.rows = keys, first, rows
        self.order: By = {rows[0].slice: [0]}
        if len(rows) > 1:
            for i in range(1, len(rows)):
                self.order.setdefault(rows[i].slice, []).append(i)


async def put_ids(
    store: Store,
    by_partition: dict[int, list[IdRow]],
    widths: Widths,
    *,
    now_ms: int,
    durability: Durability = SERVER,
    short: dict[int, NotConfirmed] | None = None,
) -> dict[int, dict[int, Address] | StoreError]:
    """Put rows unless their id is known: returns, per partition, row numbers and addresses of the known ones.

    The ids of a partition must be distinct within one call. `short` gets the partitions that have their rows, but not
    as safe as was asked for.
    """
    shares: list[_Share] = []
    for p, rows in by_partition.items():
        keys = store.keys.partitions[p]
        if len(rows) <= MOST_AT_ONCE:
            shares.append(_Share(keys, 0, rows))
        else:
            shares += [_Share(keys, at, rows[at : at + MOST_AT_ONCE]) for at in range(0, len(rows), MOST_AT_ONCE)]
    calls = _calls(shares, together=not store.links.cluster)
    groups = [_group(store, call, now_ms, durability) for call in calls]
    answers: dict[int, dict[int, Address] | StoreError] = {p: {} for p in by_partition}
    for call, result in zip(calls, await store.run(groups, durability), strict=True):
        done = executed(result)
        for at, share in enumerate(call):
            p = share.keys.number
            so_far = answers[p]
            if done is None or isinstance(so_far, StoreError):
                answers[p] = result if isinstance(result, StoreError) else so_far
                continue
            if short is not None and isinstance(result, NotConfirmed):
                short[p] = result
            many = len(share.rows) >= MANY
            so_far.update(_known(share, done[_EXEC + len(share.order)][-1] if many else done[0][at], widths))
    return answers


def _calls(shares: list[_Share], *, together: bool) -> list[list[_Share]]:
    """Those with few rows share calls where one server takes all slots: such a call costs more than its rows."""
    if not together:
        return [[share] for share in shares]
    few = [share for share in shares if len(share.rows) < MANY]
    return [[share] for share in shares if len(share.rows) >= MANY] + [
        few[at : at + SHARES_AT_ONCE] for at in range(0, len(few), SHARES_AT_ONCE)
    ]


def _group(store: Store, call: list[_Share], now_ms: int, durability: Durability) -> Group:
    many = len(call[0].rows) >= MANY
    commands = _many(store, call[0]) if many else [_few(store, call)]
    soon_ms = now_ms + WAKE_MS
    wakes = {share.keys.wake: None for share in call for row in share.rows if row.due_ms < soon_ms}
    commands += [("SPUBLISH", wake, "1") for wake in wakes]
    if durability.confirm is not None:
        # Where every id was known nothing was written, and WAIT would confirm nothing at once.
        commands.append(("HINCRBY", call[0].keys.n, "accepted", 0))
    return call[0].keys.slot, commands


def _few(store: Store, call: list[_Share]) -> Command:
    """One script that gets everything."""
    args: list[Any] = [len(call)]
    names: list[str] = []
    for share in call:
        keys, rows = share.keys, share.rows
        names += (keys.n, keys.slices, keys.ids)
        if len(rows) == 1:  # most are such where single puts of many callers travel together
            place = rows[0].slice
            name = place.name
            names.append(keys.entries(name))
            args += (1, name, fresh_score(place), address_prefix(place), 1, rows[0].row)
            continue
        args.append(len(share.order))
        for place, members in share.order.items():
            name = place.name
            names.append(keys.entries(name))
            args += (name, fresh_score(place), address_prefix(place), len(members))
            args += [rows[i].row for i in members]
    return store.scripts.call("put_ids", names, args)


_EXEC: Final = 3
"""Where the reply of EXEC stands, not counting the pushes: behind MULTI, ZADD and the script."""


def _many(store: Store, share: _Share) -> list[Command]:
    """Plain appends, and a script that gets the ids alone."""
    keys, rows = share.keys, share.rows
    scores: list[Any] = []
    pushes: list[Command] = []
    names = [keys.n, keys.slices, keys.ids]
    idhs: list[bytes] = []
    args: list[Any] = []
    for place, members in share.order.items():
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


def _known(share: _Share, reply: Any, widths: Widths) -> dict[int, Address]:
    put, taken = reply
    partition = share.keys.number
    if max(put[1::2]) + len(share.rows) > CROWDED:
        for at, (place, members) in enumerate(share.order.items()):
            widths.saw(partition, place, put[at * 2 + 1] + len(members))
    if not taken:
        return {}
    sent = [i for members in share.order.values() for i in members]
    return {
        share.first + sent[position - 1]: Address.unpack(partition, raw)
        for position, raw in zip(taken[::2], taken[1::2], strict=True)
    }
