"""The hand-written design that a careful team builds: a sorted set of due times, a hash, claims with a lease.

It is meant to be as good as this design can be: our own wire client, variadic commands, EVALSHA, decoding
in bulk, the acknowledgement of one claim in the same pipeline as the next claim, and 16 raw bytes as ids where
the caller gives none.
"""

import hashlib
import os
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final

import hiredis
import msgspec

from ..model.errors import Refused
from ..store.keys import slot_of
from ..store.links import Links
from ..store.wire import Arg, Command

BATCH: Final = 1_000
LEASE_MS: Final = 30_000
_ID_BYTES: Final = 16


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the hash keeps of a task: the same as an entry of ours says."""

    target: str
    payload: bytes
    due_ms: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_many: Final = msgspec.msgpack.Decoder(list[Entry]).decode


class SortedSetQueue:
    """ZADD + HSET; a Lua claim; ZREM + HDEL."""

    def __init__(self, links: Links, namespace: str) -> None:
        # One tag: a script needs all of its keys in one slot.
        tag = f"{{{namespace}:base}}"
        self._due, self._leased, self._entries = f"{tag}:due", f"{tag}:leased", f"{tag}:entries"
        self._link = links.for_slot(slot_of(f"{namespace}:base"))
        text = (files(__package__) / "claim.lua").read_text()
        self._script = text
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._claim: Command = (
            "EVALSHA", sha, 3, self._due, self._leased, self._entries, BATCH, LEASE_MS,
        )  # fmt: skip

    async def open(self) -> None:
        await self._run([("SCRIPT", "LOAD", self._script)])

    async def put(self, ids: Sequence[Arg], entries: Sequence[Entry]) -> None:
        """At most a batch, all or nothing."""
        due: list[Arg] = []
        rows: list[Arg] = []
        for id_, entry in zip(ids, entries, strict=True):
            due += (entry.due_ms, id_)
            rows += (id_, _encode(entry))
        await self._run([("MULTI",), ("ZADD", self._due, *due), ("HSET", self._entries, *rows), ("EXEC",)])

    async def cancel(self, ids: Sequence[Arg]) -> int:
        """At most a batch; how many were still waiting."""
        replies = await self._run([("MULTI",), ("ZREM", self._due, *ids), ("HDEL", self._entries, *ids), ("EXEC",)])
        return int(replies[-1][0])

    async def claim(self, finished: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Acknowledge the ids that are finished and take what is due; return ids and payloads."""
        [*_, (ids, rows)] = await self._run([*self._ack(finished), self._claim])
        if not ids:
            return [], []
        # Joined, the rows are one msgpack array: decoded without a call each.
        block = b"\xdd" + len(rows).to_bytes(4, "big") + b"".join(rows)
        return ids, [entry.payload for entry in _decode_many(block)]

    async def finish(self, finished: Sequence[bytes]) -> None:
        if finished:
            await self._run(self._ack(finished))

    def _ack(self, finished: Sequence[bytes]) -> list[Command]:
        if not finished:
            return []
        return [("ZREM", self._leased, *finished), ("HDEL", self._entries, *finished)]

    async def _run(self, commands: list[Command]) -> list[Any]:
        replies = await self._link.pipeline(commands)
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise Refused(f"the server refused: {reply}")
        return replies


def random_ids(count: int) -> list[bytes]:
    block = os.urandom(_ID_BYTES * count)
    return [block[at : at + _ID_BYTES] for at in range(0, len(block), _ID_BYTES)]
