"""Records that expire: results of runs, answers to idempotent requests, marks of handlers that run once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ..model.errors import Ambiguous
from ..model.job import Job, Result, decode_result
from .keys import partition_of

if TYPE_CHECKING:
    from .redis.sender import Group
    from .store import Store
    from .tasks.find import Reference


class KeptResult(NamedTuple):
    """An encoded result, and how long to store it."""

    partition: int
    idh: bytes
    data: bytes
    ttl_ms: int


async def keep_results(store: Store, results: Sequence[KeptResult]) -> None:
    """Write results; raise the first refusal after all were sent."""
    by_partition: dict[int, list[KeptResult]] = {}
    for one in results:
        by_partition.setdefault(one.partition, []).append(one)
    groups: list[Group] = []
    for partition, some in by_partition.items():
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("SET", keys.result(one.idh), one.data, "PX", one.ttl_ms) for one in some]))
    for answer in await store.run(groups):
        if isinstance(answer, Exception):
            raise answer


async def read_result(store: Store, reference: Reference) -> Result | None:
    """Return the stored result of a task. An id alone is looked up everywhere; Ambiguous if several tasks have one."""
    spots = reference.spots_of_records(len(store.keys))
    groups: list[Group] = []
    for partition, idh, _ in spots:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("GET", keys.result(idh))]))
    found: list[bytes] = []
    lanes: list[str] = []
    for spot, answer in zip(spots, await store.run(groups), strict=True):
        if isinstance(answer, Exception):
            raise answer
        if answer[0] is not None:
            found.append(answer[0])
            lanes += [] if spot.lane is None else [spot.lane]
    if len(found) > 1 and reference.lane is None:
        raise Ambiguous(reference.task_id or reference.idh.hex(), sorted(lanes))
    return decode_result(found[0]) if found else None


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """State of a request. Without an answer it is in progress, or the process that handled it has died."""

    fingerprint: bytes
    status: int = 0
    body: bytes = b""
    location: bytes = b""
    claimed_ms: int = 0

    @property
    def answered(self) -> bool:
        return self.status > 0


class Claim(NamedTuple):
    """Place of one Idempotency-Key."""

    hashed: str
    partition: int

    @classmethod
    def of(cls, store: Store, caller: str, key: str) -> Claim:
        """Return the place of a caller's key; the same key of another caller has another place."""
        hashed = hashlib.sha256(f"{caller}\0{key}".encode()).hexdigest()
        return cls(hashed, partition_of(hashed, len(store.keys)))


async def claim_request(store: Store, place: Claim, fingerprint: bytes, *, window_ms: int) -> KeptAnswer | None:
    """Claim the key for this request. Return None if it was free, otherwise the state of the earlier request."""
    keys = store.keys.partitions[place.partition]
    fresh = msgspec.msgpack.encode(KeptAnswer(fingerprint, claimed_ms=store.clock.now_ms()))
    [known] = await store.run_one(keys.slot, [("SET", keys.answer(place.hashed), fresh, "NX", "GET", "PX", window_ms)])
    return None if known is None else msgspec.msgpack.decode(known, type=KeptAnswer)


def ids_may_be_forgotten(store: Store, since_ms: int) -> bool:
    """Return whether a task that was put at this time may be over for longer than ids are known."""
    return since_ms + store.shared.dedupe_window_ms < store.clock.now_ms()


async def keep_answer(store: Store, place: Claim, kept: KeptAnswer, *, window_ms: int) -> None:
    keys = store.keys.partitions[place.partition]
    await store.run_one(keys.slot, [("SET", keys.answer(place.hashed), msgspec.msgpack.encode(kept), "PX", window_ms)])


class BatchMarks:
    """Lines of a batch with an Idempotency-Key that are stored: four bytes of each line's hash, in order.

    They are kept as long as the answer to a single request; the ids of the tasks may be forgotten earlier. So a line
    is marked as begun, by the complement of its mark, before it is written: a crash may come before the second mark.
    """

    def __init__(self, store: Store, place: Claim, window_ms: int) -> None:
        self._store, self._place, self._window_ms = store, place, window_ms
        self._known = bytearray()

    async def open(self) -> int:
        """Read the stored marks; return the time of the first request, from which delays in its lines count."""
        keys = self._store.keys.partitions[self._place.partition]
        name = keys.answer(self._place.hashed)
        began = (await self._store.fresh_ms()).to_bytes(_BEGAN_BYTES, "big")
        [known] = await self._store.run_one(keys.slot, [("SET", name, began, "NX", "GET", "PX", self._window_ms)])
        self._known = bytearray(known or began)
        return int.from_bytes(self._known[:_BEGAN_BYTES], "big")

    def holds(self, number: int, mark: bytes) -> bool:
        """Return whether an earlier request stored this line (counted from 1)."""
        return self._known[_mark_at(number) : _mark_at(number + 1)] == mark

    def in_doubt(self, number: int, mark: bytes) -> bool:
        """Return whether an earlier request began to write this line so long ago that its id may be forgotten."""
        began_ms = int.from_bytes(self._known[:_BEGAN_BYTES], "big")
        return self.holds(number, _begun(mark)) and ids_may_be_forgotten(self._store, began_ms)

    async def begin(self, marks: dict[int, bytes]) -> None:
        """Mark lines that are about to be written."""
        await self.keep({number: _begun(mark) for number, mark in marks.items()})

    async def keep(self, marks: dict[int, bytes]) -> None:
        """Store the marks of lines that lie close together."""
        if not marks:
            return
        first, end = _mark_at(min(marks)), _mark_at(max(marks) + 1)
        self._known.extend(bytes(max(0, end - len(self._known))))
        for number, mark in marks.items():
            self._known[_mark_at(number) : _mark_at(number + 1)] = mark
        keys = self._store.keys.partitions[self._place.partition]
        name = keys.answer(self._place.hashed)
        written_at = ("SETRANGE", name, first, bytes(self._known[first:end]))
        await self._store.run_one(keys.slot, [written_at, ("PEXPIRE", name, self._window_ms)])


MARK_BYTES: Final = 4
NO_MARK: Final = bytes(MARK_BYTES)
_BEGAN_BYTES: Final = 6


def _mark_at(number: int) -> int:
    return _BEGAN_BYTES + (number - 1) * MARK_BYTES


def _begun(mark: bytes) -> bytes:
    return bytes(255 - byte for byte in mark)


async def release_request(store: Store, place: Claim) -> None:
    """Release the key after a request that was refused and changed nothing."""
    keys = store.keys.partitions[place.partition]
    await store.run_one(keys.slot, [("UNLINK", keys.answer(place.hashed))])


async def begin_once(store: Store, job: Job, mark: bytes, keep_ms: int) -> bytes | None:
    """Leave a mark, unless a record exists: return that record."""
    keys = store.keys.partitions[job.partition]
    command = ("SET", keys.once(job.idh, job.original_due_ms), mark, "NX", "GET", "PX", keep_ms)
    [found] = await store.run_one(keys.slot, [command])
    return found if found is None else bytes(found)


async def end_once(store: Store, job: Job, record: bytes, keep_ms: int) -> None:
    keys = store.keys.partitions[job.partition]
    await store.run_one(keys.slot, [("SET", keys.once(job.idh, job.original_due_ms), record, "PX", keep_ms)])


async def forget_once(store: Store, job: Job, mark: bytes) -> None:
    """Remove the mark of this run; a mark that another run has left since then stays."""
    keys = store.keys.partitions[job.partition]
    await store.call(job.partition, "once_forget", [keys.once(job.idh, job.original_due_ms)], [mark])
