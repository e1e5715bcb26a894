"""The index of caller-given ids, and everything that goes through it: put with id, replace, cancel, sweep."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

from ..model.errors import StoreError
from .durable import SERVER, Durability
from .keys import Address, PartitionKeys, Slice, address_prefix, bucket_of
from .put import WAKE_MS, Widths, fresh_score
from .store import Group, Store


class IdRow(NamedTuple):
    """An entry that carries a caller-given id."""

    idh: bytes
    slice: Slice
    row: bytes
    due_ms: int


class Taken(NamedTuple):
    """Not put: where the task stands that has this id."""

    address: Address


async def put_ids(
    store: Store,
    by_partition: dict[int, list[IdRow]],
    widths: Widths,
    *,
    now_ms: int,
    durability: Durability = SERVER,
) -> dict[int, list[Address | Taken] | StoreError]:
    """Put rows unless their id is known. The ids of a partition must be distinct within one call."""
    groups: list[Group] = []
    orders: list[list[int]] = []
    for p, rows in by_partition.items():
        keys = store.keys.partitions[p]
        call, order = _put_call(store, keys, rows)
        commands = [call]
        if min(row.due_ms for row in rows) < now_ms + WAKE_MS:
            commands.append(("SPUBLISH", keys.wake, "1"))
        if durability.confirm is not None:
            # Where every id was known nothing was written, and WAIT would confirm nothing at once.
            commands.append(("HINCRBY", keys.n, "accepted", 0))
        groups.append((keys.slot, commands))
        orders.append(order)
    answers: dict[int, list[Address | Taken] | StoreError] = {}
    results = await store.run(groups, durability)
    for (p, rows), order, result in zip(by_partition.items(), orders, results, strict=True):
        answers[p] = result if isinstance(result, StoreError) else _put_answer(p, rows, order, result[0], widths)
    return answers


def _put_call(store: Store, keys: PartitionKeys, rows: list[IdRow]) -> tuple[Any, list[int]]:
    places = {place: i for i, place in enumerate(dict.fromkeys(row.slice for row in rows), 1)}
    buckets: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        buckets.setdefault(bucket_of(row.idh), []).append(i)
    args: list[Any] = [len(places), len(buckets)]
    for place in places:
        args += (place.name, fresh_score(place), address_prefix(place))
    order: list[int] = []
    for members in buckets.values():
        args.append(len(members))
        for i in members:
            idh, place, entry, _ = rows[i]
            args += (places[place], idh, entry)
        order += members
    names = [keys.n, keys.slices, *(keys.entries(place.name) for place in places), *map(keys.ids, buckets)]
    return store.scripts.call("put_ids", names, args), order


def _put_answer(
    partition: int, rows: list[IdRow], order: list[int], reply: Any, widths: Widths
) -> list[Address | Taken]:
    places = list(dict.fromkeys(row.slice for row in rows))
    incarnations = dict(zip(places, reply[0], strict=True))
    answers: list[Any] = [None] * len(rows)
    for i, outcome in zip(order, reply[1], strict=True):
        place = rows[i].slice
        if isinstance(outcome, int):
            answers[i] = Address(partition, place, incarnations[place], outcome)
            widths.saw(partition, place, outcome + 1)
        else:
            answers[i] = Taken(Address.unpack(partition, outcome))
    return answers


class Replaced(NamedTuple):
    status: Literal["ok", "changed", "cancelled", "too late", "gone"]
    address: Address | None = None
    """The new place; with "changed", what the index holds instead (None: nothing)."""


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
    """Put a task in the place of `old` (which must be pending), or anew where `old` is None."""
    keys = store.keys.partitions[partition]
    from_place = old.slice if old is not None else new.slice
    s, f, _, x = keys.slice_keys(from_place.name)
    names = [keys.n, keys.slices, keys.ids(bucket_of(new.idh)), keys.entries(new.slice.name), s, f, x]
    args: list[Any] = [
        "move" if old is not None else "anew",
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
    reply = (await store.run_one(keys.slot, commands, durability))[0]
    status = reply[0].decode()
    if status == "ok":
        return Replaced("ok", Address(partition, new.slice, reply[1], reply[2]))
    if status == "changed":
        return Replaced("changed", Address.unpack(partition, reply[1]) if reply[1] else None)
    return Replaced(status)


class Cancel(NamedTuple):
    address: Address
    idh: bytes
    indexed: bool


CancelStatus = Literal["cancelled", "too late", "gone"]


async def cancel(store: Store, cancels: Sequence[Cancel]) -> list[CancelStatus | Address | StoreError]:
    """Cancel by address. An Address in the answer is where the task was moved to."""
    by_partition: dict[int, list[int]] = {}
    for i, one in enumerate(cancels):
        by_partition.setdefault(one.address.partition, []).append(i)
    groups: list[Group] = []
    orders: list[list[int]] = []
    for p, members in by_partition.items():
        keys = store.keys.partitions[p]
        call, order = _cancel_call(store, keys, cancels, members)
        groups.append((keys.slot, [call]))
        orders.append(order)
    answers: list[Any] = [None] * len(cancels)
    for order, result in zip(orders, await store.run(groups), strict=True):
        for at, i in enumerate(order):
            answers[i] = result if isinstance(result, StoreError) else _cancelled(cancels[i], result[0][at])
    return answers


def _cancelled(one: Cancel, word: bytes) -> CancelStatus | Address:
    if len(word) == 14:
        return Address.unpack(one.address.partition, word)
    return cast("CancelStatus", word.decode())


def _cancel_call(
    store: Store, keys: PartitionKeys, cancels: Sequence[Cancel], members: list[int]
) -> tuple[Any, list[int]]:
    by_slice: dict[tuple[Slice, int], list[int]] = {}
    buckets: dict[int, int] = {}
    for i in sorted(members, key=lambda i: cancels[i].address.index):
        one = cancels[i]
        by_slice.setdefault((one.address.slice, one.address.r), []).append(i)
        if one.indexed:
            buckets.setdefault(bucket_of(one.idh), len(buckets) + 1)
    args: list[Any] = [len(by_slice), len(buckets)]
    names = [keys.n, keys.slices]
    order: list[int] = []
    for (place, _), some in by_slice.items():
        s, f, _, x = keys.slice_keys(place.name)
        names += (s, f, x)
        args += (place.name, repr(cancels[some[0]].address.score), len(some))
        for i in some:
            one = cancels[i]
            args += (one.address.index, one.idh, buckets[bucket_of(one.idh)] if one.indexed else 0)
        order += some
    names += map(keys.ids, buckets)
    return store.scripts.call("cancel", names, args), order


async def look_up(store: Store, wanted: Sequence[tuple[int, bytes]]) -> list[Address | None]:
    """Addresses the index holds for (partition, idh)."""
    by_bucket: dict[tuple[int, int], list[int]] = {}
    for i, (p, idh) in enumerate(wanted):
        by_bucket.setdefault((p, bucket_of(idh)), []).append(i)
    groups: list[Group] = []
    for (p, bucket), members in by_bucket.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HMGET", keys.ids(bucket), *(wanted[i][1] for i in members))]))
    found: list[Address | None] = [None] * len(wanted)
    for ((p, _), members), result in zip(by_bucket.items(), await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        for i, raw in zip(members, result[0], strict=True):
            found[i] = Address.unpack(p, raw) if raw is not None else None
    return found


async def sweep(store: Store, partition: int, buckets: Iterable[int], *, before_ms: int) -> tuple[int, int]:
    """Forget ids of finished tasks due before a time. Returns how many went and how many are left."""
    keys = store.keys.partitions[partition]
    names = [keys.slices, *map(keys.ids, buckets)]
    removed, left = await store.call(partition, "sweep", names, [before_ms])
    return removed, left
