"""Cancel by address: task by task, or most of a slice at once. See docs/internals/protocol.md#cancel."""

import random
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

from ...model.errors import StoreError
from ...model.ids import IDH_BYTES
from ..keys import ADDRESS_BYTES, R_UNIT, Address, PartitionKeys, score_of
from ..redis.connection import RedisCommand
from ..redis.sender import Group
from ..store import Store
from .index import MOST_AT_ONCE

DENSE_TASKS: Final = 32
"""Cancels in one slice from which the rest of the list may be rewritten, if they are at least a quarter of it."""

_NEAR_MS: Final = 10_000
"""An owner may have read slices that start within this time, so it is notified of new entries."""

_PLACE_BYTES: Final = 10
"""Bytes of a packed address that name the slice and its incarnation."""


class Cancel(NamedTuple):
    partition: int
    at: bytes
    """The address, packed."""
    idh: bytes
    indexed: bool
    """True if the address comes from the index."""


CancelStatus = Literal["cancelled", "too late", "gone"]
CancelAnswers = list[CancelStatus | Address | StoreError]
Members = list[int]
"""Positions of the cancels that concern one slice."""


async def cancel(store: Store, cancels: Sequence[Cancel]) -> CancelAnswers:
    """Cancel by address. An Address in the answer is where the task was moved to."""
    await store.fresh_ms()  # the scripts note when an id was cancelled
    by_slice: dict[tuple[int, bytes, bool], Members] = {}
    for i, (p, at, _, indexed) in enumerate(cancels):
        by_slice.setdefault((p, at[:_PLACE_BYTES], indexed), []).append(i)
    answers: CancelAnswers = ["cancelled"] * len(cancels)
    dense: dict[int, list[tuple[Members, bytes]]] = {}
    scattered: dict[int, list[Members]] = {}
    for (p, _, indexed), members in by_slice.items():
        members.sort(key=lambda i: cancels[i].at)
        rows = _rows_of(cancels, members) if indexed and len(members) >= DENSE_TASKS else None
        if rows is None:
            scattered.setdefault(p, []).append(members)
        else:
            dense.setdefault(p, []).append((members, rows))
    for p, refused in (await _compact(store, cancels, dense, answers)).items():
        scattered.setdefault(p, []).extend(refused)
    await _cancel_each(store, cancels, scattered, answers)
    return answers


def _rows_of(cancels: Sequence[Cancel], members: Members) -> bytes | None:
    """Return a bitmap of the places if they are dense enough to be a good part of the slice, else None."""
    last = int.from_bytes(cancels[members[-1]].at[_PLACE_BYTES:], "big")
    if len(members) * 4 < last:
        return None
    rows = bytearray(last // 8 + 1)
    for i in members:
        at = cancels[i].at
        index = int.from_bytes(at[_PLACE_BYTES:], "big")
        rows[index >> 3] |= 0x80 >> (index & 7)
    whole = int.from_bytes(rows, "big").bit_count() == len(members)
    return bytes(rows) if whole else None  # otherwise a place was listed twice


def _calls(slices: Sequence[tuple[Members, Any]]) -> list[list[int]]:
    """Group slices into calls. A slice is cancelled in one call, which is cheaper; a call takes as many as are safe."""
    calls: dict[int, list[int]] = {}
    size = 0
    for number, (members, _) in enumerate(slices):
        size += len(members)
        calls.setdefault(size // MOST_AT_ONCE, []).append(number)
    return list(calls.values())


async def _compact(
    store: Store, cancels: Sequence[Cancel], dense: dict[int, list[tuple[Members, bytes]]], answers: CancelAnswers
) -> dict[int, list[Members]]:
    """Cancel most of some slices; return those that have to be cancelled task by task."""
    groups: list[Group] = []
    sent: list[tuple[int, list[Members]]] = []
    for p, slices in dense.items():
        keys = store.keys.partitions[p]
        for numbers in _calls(slices):
            some = [slices[number] for number in numbers]
            groups.append((keys.slot, _compact_call(store, keys, cancels, some, first=numbers[0] == 0)))
            sent.append((p, [members for members, _ in some]))
    refused: dict[int, list[Members]] = {}
    for (p, all_members), result in zip(sent, await store.run(groups), strict=True):
        for number, members in enumerate(all_members):
            if isinstance(result, StoreError):
                for i in members:
                    answers[i] = result
            elif not result[0][number]:
                refused.setdefault(p, []).append(members)
    return refused


def _compact_call(
    store: Store, keys: PartitionKeys, cancels: Sequence[Cancel], slices: list[tuple[Members, bytes]], *, first: bool
) -> list[RedisCommand]:
    names = [keys.n, keys.slices, keys.ids, keys.held, keys.off]
    args: list[Any] = [_time_bytes(store.clock.now_ms()), KEPT]
    near_ms = store.clock.now_ms() + _NEAR_MS
    near = False
    for members, rows in slices:
        earliest = cancels[members[0]]
        place, r = Address.unpack(earliest.partition, earliest.at)[1:3]
        other = score_of(place.start_ms, (r + random.randrange(1, R_UNIT)) % R_UNIT)
        names += keys.slice_keys(place.name)
        idhs = b"".join([cancels[i].idh for i in members])
        args += (place.name, repr(score_of(place.start_ms, r)), repr(other), earliest.at[:7], rows, idhs)
        near = near or place.start_ms < near_ms
    # Send the script's text with the first call of a partition: the calls are many and long, and all would be sent
    # again if the server did not know it.
    call = (store.scripts.whole if first else store.scripts.call)("compact", names, args)
    return [call, ("SPUBLISH", keys.wake, "1")] if near else [call]


async def _cancel_each(
    store: Store, cancels: Sequence[Cancel], scattered: dict[int, list[Members]], answers: CancelAnswers
) -> None:
    groups: list[Group] = []
    orders: list[list[int]] = []
    for p, slices in scattered.items():
        keys = store.keys.partitions[p]
        for numbers in _calls([(members, None) for members in slices]):
            some = [slices[number] for number in numbers]
            groups.append((keys.slot, [_cancel_call(store, keys, cancels, some)]))
            orders.append([i for members in some for i in members])
    for order, result in zip(orders, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            for i in order:
                answers[i] = result
            continue
        refused = result[0]
        for position, word in zip(refused[::2], refused[1::2], strict=True):
            i = order[position - 1]
            answers[i] = _refused(cancels[i], word)


def _refused(one: Cancel, word: bytes) -> CancelStatus | Address:
    if len(word) == ADDRESS_BYTES:
        return Address.unpack(one.partition, word)
    return cast("CancelStatus", word.decode())


def _cancel_call(store: Store, keys: PartitionKeys, cancels: Sequence[Cancel], slices: list[Members]) -> RedisCommand:
    args: list[Any] = [_time_bytes(store.clock.now_ms()), KEPT, len(slices)]
    names = [keys.n, keys.slices, keys.ids, keys.off]
    for members in slices:
        first = cancels[members[0]]
        place, r = Address.unpack(first.partition, first.at)[1:3]
        s, f, _, x = keys.slice_keys(place.name)
        names += (s, f, x)
        args += (place.name, repr(score_of(place.start_ms, r)), len(members))
        for i in members:
            args += (int.from_bytes(cancels[i].at[_PLACE_BYTES:], "big"), cancels[i].idh)
    return store.scripts.call("cancel", names, args)


# The last cancelled caller-given ids. The index forgets a cancelled id at once because it may be used again.
#
# The scripts that cancel record them in the same step; `note` does it for tasks that were cancelled in a queue. A
# record only answers how a task ended: losing one changes nothing else.

KEPT: Final = 256
"""Records per partition, 22 bytes each."""

_TIME_BYTES: Final = 6


async def note(store: Store, cancelled: Iterable[tuple[int, bytes]]) -> None:
    """Record cancelled (partition, idh) pairs with the time: other records of the id may be older or newer. If a server
    does not answer, nothing is recorded."""
    by_partition: dict[int, list[bytes]] = {}
    for partition, idh in cancelled:
        by_partition.setdefault(partition, []).append(idh)
    if not by_partition:
        return
    time = _time_bytes(await store.fresh_ms())
    groups: list[Group] = []
    for partition, idhs in by_partition.items():
        keys = store.keys.partitions[partition]
        last = [idh + time for idh in idhs[-KEPT:]]
        groups.append((keys.slot, [("RPUSH", keys.off, *last), ("LTRIM", keys.off, -KEPT, -1)]))
    await store.run(groups)


async def last_cancelled(store: Store, partitions: Iterable[int]) -> dict[bytes, int]:
    """Return the hashes of the ids cancelled last in these partitions, and when."""
    groups: list[Group] = []
    for partition in partitions:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("LRANGE", keys.off, 0, -1)]))
    results = await store.run(groups)
    found = [one for result in results if not isinstance(result, StoreError) for one in result[0]]
    return {one[:IDH_BYTES]: _time_ms(one) for one in sorted(found, key=_time_ms)}


def _time_bytes(at_ms: int) -> bytes:
    return at_ms.to_bytes(_TIME_BYTES, "big")


def _time_ms(noted: bytes) -> int:
    return int.from_bytes(noted[IDH_BYTES:], "big")
