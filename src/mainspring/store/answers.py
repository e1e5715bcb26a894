"""Answers to requests with an Idempotency-Key, kept for a while: `{t}:idem:<hash>`, a text that expires by itself."""

import hashlib
from typing import NamedTuple

import msgspec

from .keys import partition_of
from .store import Store


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a request. Without an answer it is under way, or whoever worked on it is gone."""

    fingerprint: bytes
    status: int = 0
    body: bytes = b""
    location: bytes = b""

    @property
    def answered(self) -> bool:
        return self.status > 0


class Claim(NamedTuple):
    """The place of one Idempotency-Key."""

    hashed: str
    partition: int

    @classmethod
    def of(cls, store: Store, caller: str, key: str) -> "Claim":
        """Keys of two callers never meet."""
        hashed = hashlib.sha256(f"{caller}\0{key}".encode()).hexdigest()
        return cls(hashed, partition_of(hashed, len(store.keys)))


async def claim(store: Store, place: Claim, fingerprint: bytes, *, window_ms: int) -> Kept | None:
    """Take the key for this request; None when it was free, else what is known of it."""
    keys = store.keys.partitions[place.partition]
    fresh = msgspec.msgpack.encode(Kept(fingerprint))
    [known] = await store.run_one(keys.slot, [("SET", keys.answer(place.hashed), fresh, "NX", "GET", "PX", window_ms)])
    return None if known is None else msgspec.msgpack.decode(known, type=Kept)


async def keep(store: Store, place: Claim, kept: Kept, *, window_ms: int) -> None:
    keys = store.keys.partitions[place.partition]
    await store.run_one(keys.slot, [("SET", keys.answer(place.hashed), msgspec.msgpack.encode(kept), "PX", window_ms)])


async def release(store: Store, place: Claim) -> None:
    """The request was refused and changed nothing: another may use its key."""
    keys = store.keys.partitions[place.partition]
    await store.run_one(keys.slot, [("UNLINK", keys.answer(place.hashed))])
