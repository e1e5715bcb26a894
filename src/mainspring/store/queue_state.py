"""Tasks in queues: find and cancel one, read which worker runs it, and measure the queues."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from ..model.errors import Conflict, Refused, StoreError
from .keys import ADDRESS_BYTES, Address
from .redis.connection import RedisCommand
from .store import Store
from .tasks.index import fields_of

_TRIES: Final = 8
_AT_ONCE: Final = 512
"""Queues of a partition that are measured together."""


class Queued(NamedTuple):
    """State of a task in a queue, as stored in the hash `queued`."""

    raw: bytes
    address: bytes
    """Packed address of the slice entry it came from."""
    entry: bytes
    """Its entry id in the stream."""
    queue: str
    worker: str | None
    """The worker that runs it; None while it waits."""
    since_ms: int
    """When it was taken, or else handed off, by the server's clock."""
    cancelling: bool

    @classmethod
    def parse(cls, raw: bytes) -> "Queued":
        entry, queue, *claim = raw[ADDRESS_BYTES:].rstrip(b"!").split(b" ")
        handed_ms = int(entry.partition(b"-")[0])
        if not claim:
            return cls(raw, raw[:ADDRESS_BYTES], entry, queue.decode(), None, handed_ms, cancelling=False)
        # A worker's name may contain slashes: only the last two belong to the claim.
        worker, _, since = claim[0].decode().rsplit("/", 2)
        return cls(raw, raw[:ADDRESS_BYTES], entry, queue.decode(), worker, int(since), raw.endswith(b"!"))


async def find_queued(store: Store, wanted: Sequence[tuple[int, bytes]]) -> list[Queued | None]:
    """Return the queued state of each (partition, idh)."""
    raws = await fields_of(store, attrgetter("queued"), wanted)
    return [None if raw is None else Queued.parse(raw) for raw in raws]


async def read_record(store: Store, partition: int, place: Queued) -> bytes | None:
    """Return the slice entry of a task in a queue; None if the task has left the queue."""
    keys = store.keys.partitions[partition]
    [rows] = await store.run_one(keys.slot, [("XRANGE", keys.queue(place.queue), place.entry, place.entry)])
    return rows[0][1][1][ADDRESS_BYTES:] if rows else None


Cancelling = Literal["cancelled", "cancelling", "gone"]


async def cancel_queued(store: Store, partition: int, idh: bytes, place: Queued) -> Cancelling:
    """Cancel a queued task. "cancelling": it is running, and its worker is asked to stop; "gone": it has ended."""
    keys = store.keys.partitions[partition]
    address = place.address
    for _ in range(_TRIES):
        x = keys.slice_keys(Address.unpack(partition, address).slice.name)[3]
        names = [keys.n, keys.slices, keys.ids, keys.queued, keys.acks, keys.queue(place.queue), x]
        call = store.scripts.call("queue_cancel", names, [idh, place.raw])
        # Wake the worker that runs it, and the owner, which continues its lane.
        calls: list[RedisCommand] = [("SPUBLISH", keys.work, "1"), ("SPUBLISH", keys.wake, "1")]
        reply = (await store.run_one(keys.slot, [call, *calls]))[0]
        if reply == b"cancelled":
            return "cancelled"
        if reply == b"cancelling":
            return "cancelling"
        [again] = await find_queued(store, [(partition, idh)])
        if again is None or again.address != address:
            return "gone"
        place = again
    raise Conflict("the task keeps changing; try again")


class Depth(NamedTuple):
    """Size of a queue, over all partitions."""

    ready: int = 0
    running: int = 0
    oldest_ms: int | None = None
    """When its oldest waiting task was handed off."""

    def plus(self, other: "Depth") -> "Depth":
        times = [one for one in (self.oldest_ms, other.oldest_ms) if one is not None]
        return Depth(self.ready + other.ready, self.running + other.running, min(times, default=None))


Asked = tuple[int, list[RedisCommand]]
"""A partition and the commands to send to it."""


async def names_in(store: Store, partitions: Sequence[int]) -> list[tuple[int, str]]:
    """Return the partitions and names of all queues there that have received a task and still exist."""
    listed: list[Asked] = [(p, [("SMEMBERS", store.keys.partitions[p].queues)]) for p in partitions]
    found = await _each(store, listed)
    return [(p, queue.decode()) for p, [queues] in zip(partitions, found, strict=True) for queue in queues]


async def depths(store: Store, partitions: Sequence[int] | None = None) -> dict[str, Depth]:
    """Return all queues that have received a task and still exist, with their size in these partitions (None: all)."""
    return await depths_of(store, await names_in(store, range(len(store.keys)) if partitions is None else partitions))


async def depths_of(store: Store, places: Sequence[tuple[int, str]]) -> dict[str, Depth]:
    """Return the queues among these (partitions and names) that exist, with their size in these partitions."""
    found: dict[str, Depth] = {}
    # In portions: there may be any number of queues, and a step of the event loop must stay short.
    for first in range(0, len(places), _AT_ONCE):
        for queue, depth in await _depths_of_some(store, places[first : first + _AT_ONCE]):
            found[queue] = found.get(queue, Depth()).plus(depth)
    return found


async def _depths_of_some(store: Store, places: Sequence[tuple[int, str]]) -> list[tuple[str, Depth]]:
    keys = [store.keys.partitions[p].queue(queue) for p, queue in places]
    lengths: list[Asked] = [
        (p, [("XLEN", key), ("XINFO", "GROUPS", key)]) for (p, _), key in zip(places, keys, strict=True)
    ]
    found: list[tuple[str, Depth]] = []
    oldest: list[Asked] = []
    waiting: list[str] = []
    for (p, queue), key, answer in zip(places, keys, await _each(store, lengths, skips_missing=True), strict=True):
        if not answer:
            continue  # removed since it was listed
        length, groups = answer
        about = dict(zip(groups[0][::2], groups[0][1::2], strict=True)) if groups else {}
        running = int(about.get(b"pending", 0))
        found.append((queue, Depth(length - running, running)))
        if length > running:
            last = about.get(b"last-delivered-id", b"0-0")
            oldest.append((p, [("XRANGE", key, b"(" + last, "+", "COUNT", 1)]))
            waiting.append(queue)
    for queue, [rows] in zip(waiting, await _each(store, oldest), strict=True):
        if rows:
            found.append((queue, Depth(oldest_ms=int(rows[0][0].partition(b"-")[0]))))
    return found


async def _each(store: Store, asked: Sequence[Asked], *, skips_missing: bool = False) -> list[list[Any]]:
    answers: list[list[Any]] = []
    for result in await store.run([(store.keys.partitions[p].slot, commands) for p, commands in asked]):
        if skips_missing and isinstance(result, Refused) and "no such key" in str(result):
            answers.append([])
        elif isinstance(result, StoreError):
            raise result
        else:
            answers.append(result)
    return answers


async def forget_idle(store: Store, partition: int, cursor: int, *, idle_ms: int) -> int:
    """Remove some queues of a partition that are empty and have received nothing for `idle_ms`; return the next cursor,
    0 at the end."""
    keys = store.keys.partitions[partition]
    [[following, found]] = await store.run_one(keys.slot, [("SSCAN", keys.queues, cursor, "COUNT", 100)])
    names = [name.decode() for name in found]
    if names:
        await store.call(partition, "queue_forget", [keys.queues, *map(keys.queue, names)], [idle_ms, *names])
    return int(following)
