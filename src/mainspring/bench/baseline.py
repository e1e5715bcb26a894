"""`bench baseline`: the same task lifecycle on a hand-written sorted-set design.

The baseline is meant to be as good as this design can be: our own wire client, variadic commands, EVALSHA, bulk
decoding, the acknowledgement of one claim in the same pipeline as the next claim, and 16 raw bytes as ids where the
caller gives none.
"""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any, Final

import hiredis
import msgspec

from ..model.errors import Refused
from ..store.keys import slot_of
from ..store.redis.connection import Arg, RedisCommand
from ..store.redis.servers import LinkOptions, Servers
from .environment import BenchEnvironment, ServerChoice, open_environment
from .lifecycle import STALL_S, TARGET, BenchLoad, BenchProgress, DeliveryTally, Figures, Shape, live

BATCH: Final = 1_000
LEASE_MS: Final = 30_000
_ID_BYTES: Final = 16


class BaselineEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A task's entry in the hash: the same facts that Mainspring stores."""

    target: str
    payload: bytes
    due_ms: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_many: Final = msgspec.msgpack.Decoder(list[BaselineEntry]).decode


class SortedSetQueue:
    """A queue that schedules with ZADD + HSET, claims with a Lua script, and finishes with ZREM + HDEL."""

    def __init__(self, servers: Servers, namespace: str) -> None:
        # One hash tag: a script needs all of its keys in one slot.
        tag = f"{{{namespace}:base}}"
        self._due, self._leased, self._entries = f"{tag}:due", f"{tag}:leased", f"{tag}:entries"
        self._primary = servers.for_slot(slot_of(f"{namespace}:base"))
        text = (files(__package__) / "claim.lua").read_text()
        self._script = text
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._claim: RedisCommand = (
            "EVALSHA", sha, 3, self._due, self._leased, self._entries, BATCH, LEASE_MS,
        )  # fmt: skip

    async def open(self) -> None:
        await self._run([("SCRIPT", "LOAD", self._script)])

    async def put(self, ids: Sequence[Arg], entries: Sequence[BaselineEntry]) -> None:
        """Store at most one batch, all or nothing."""
        due: list[Arg] = []
        rows: list[Arg] = []
        for id_, entry in zip(ids, entries, strict=True):
            due += (entry.due_ms, id_)
            rows += (id_, _encode(entry))
        await self._run([("MULTI",), ("ZADD", self._due, *due), ("HSET", self._entries, *rows), ("EXEC",)])

    async def cancel(self, ids: Sequence[Arg]) -> int:
        """Cancel at most one batch; return how many tasks were still waiting."""
        replies = await self._run([("MULTI",), ("ZREM", self._due, *ids), ("HDEL", self._entries, *ids), ("EXEC",)])
        return int(replies[-1][0])

    async def claim(self, finished: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Acknowledge finished ids and claim due tasks; return their ids and payloads."""
        [*_, (ids, rows)] = await self._run([*self._ack(finished), self._claim])
        if not ids:
            return [], []
        # Joined, the rows form one msgpack array, which is decoded in a single call.
        block = b"\xdd" + len(rows).to_bytes(4, "big") + b"".join(rows)
        return ids, [entry.payload for entry in _decode_many(block)]

    async def finish(self, finished: Sequence[bytes]) -> None:
        if finished:
            await self._run(self._ack(finished))

    def _ack(self, finished: Sequence[bytes]) -> list[RedisCommand]:
        if not finished:
            return []
        return [("ZREM", self._leased, *finished), ("HDEL", self._entries, *finished)]

    async def _run(self, commands: list[RedisCommand]) -> list[Any]:
        replies = await self._primary.pipeline(commands)
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise Refused(f"the server refused: {reply}")
        return replies


def random_ids(count: int) -> list[bytes]:
    block = os.urandom(_ID_BYTES * count)
    return [block[at : at + _ID_BYTES] for at in range(0, len(block), _ID_BYTES)]


class SortedSet:
    """The sorted-set design: puts, cancels and fires a load in batches of 1,000."""

    grace_ms = 100

    def __init__(self, queue: SortedSetQueue) -> None:
        self._queue = queue
        self._cancelled_ids: list[Arg] = []

    async def put(self, load: BenchLoad, progress: Callable[[int], None]) -> None:
        self._cancelled_ids = []
        writing: asyncio.Task[None] | None = None
        for first in range(0, load.tasks, BATCH):
            last = min(first + BATCH, load.tasks)
            ids, entries = _batch(load, first, last)
            if load.shape.cancel:
                self._cancelled_ids += [id_ for n, id_ in enumerate(ids, first) if load.cancelled(n)]
            # As in Client.put_many, prepare the next batch while the server works on this one.
            if writing is not None:
                await writing
            writing = asyncio.create_task(self._queue.put(ids, entries))
            await asyncio.sleep(0)
            progress(last)
        if writing is not None:
            await writing

    async def cancel(self) -> int:
        ids = self._cancelled_ids
        count = 0
        for first in range(0, len(ids), BATCH):
            count += await self._queue.cancel(ids[first : first + BATCH])
        return count

    async def fire(self, tally: DeliveryTally) -> None:
        await self._claim_all(tally)
        if not tally.complete.is_set():
            tally.completed_at = time.perf_counter()

    async def _claim_all(self, tally: DeliveryTally) -> None:
        """Claim batch after batch, as the engine ticks; each claim acknowledges the previous batch."""
        claimed: list[bytes] = []
        last_at = time.monotonic()
        while not tally.complete.is_set() and time.monotonic() - last_at < STALL_S:
            claimed, payloads = await self._queue.claim(claimed)
            if payloads:
                tally.take(payloads)
                last_at = time.monotonic()
            else:
                await asyncio.sleep(0.01)
        await self._queue.finish(claimed)


def _batch(load: BenchLoad, first: int, last: int) -> tuple[Sequence[Arg], list[BaselineEntry]]:
    named = load.shape.ids
    ids: Sequence[Arg] = list(map(load.id, range(first, last))) if named else random_ids(last - first)
    entries = [
        BaselineEntry(TARGET, b'"%b"' % text.encode(), load.due_ms(number))
        for number, text in enumerate(load.texts(first, last), first)
    ]
    return ids, entries


@contextlib.asynccontextmanager
async def sorted_set_queue(url: str, namespace: str) -> AsyncIterator[SortedSetQueue]:
    servers = await Servers.connect(url, LinkOptions())
    try:
        queue = SortedSetQueue(servers, namespace)
        await queue.open()
        yield queue
    finally:
        await servers.aclose()


@contextlib.asynccontextmanager
async def sorted_set(place: BenchEnvironment) -> AsyncIterator[SortedSet]:
    async with sorted_set_queue(place.url, place.namespace) as queue:
        yield SortedSet(queue)


async def baseline(where: ServerChoice, shape: Shape, progress: BenchProgress) -> Figures:
    async with open_environment(where) as place, sorted_set(place) as design:
        return await live(place, design, shape, progress)
