"""Tasks that workers have: settles those of lanes when their workers have answered, and repeats refused hand-offs.

For the timeline, a task without a lane is done once it is handed off: the server sets its done bit and adds it to the
stream in one step. A task of a lane stays fired until its worker's ack arrives; only then may the next task of the lane
begin. A new owner hands such a task off again, and the server adds it only if it is no longer queued or running.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Final

from ..model.errors import StoreError
from ..store.job_queue import decode_ack
from ..store.owner.fire import forget_acks, read_acks
from ..store.store import Store
from .deliveries import Deliveries
from .partition import CommitCall, Partition

POLL_S: Final = 0.5
"""Seconds between polls for unannounced acks, and between attempts for tasks whose id is already in a queue."""

IDLE_S: Final = 1.0
FORGOTTEN_AT_ONCE: Final = 1_000


class WorkerAcks:
    """Watches partitions for acks of workers."""

    def __init__(self, store: Store, owned: dict[int, Partition], deliveries: Deliveries) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._watched: dict[Partition, None] = {}
        self._heard: set[int] = set()
        """Partitions with a message since they were last read. Includes those that wait for nothing yet: a worker may
        be done before the owner has the reply to its hand-off."""
        self._poll_at = 0.0

    def woken(self, partitions: Iterable[int]) -> bool:
        """Note partitions that may have new acks; return True if one of them is watched."""
        self._heard.update(partitions)
        return self._called

    @property
    def _called(self) -> bool:
        return bool(self._heard) and any(one.number in self._heard for one in self._watched)

    @property
    def wait_s(self) -> float:
        if self._called:
            return 0.0
        return max(0.0, self._poll_at - time.monotonic()) if self._watched else IDLE_S

    def handed_off(self, partition: Partition, call: CommitCall, answers: Mapping[int, bytes]) -> None:
        """Note which tasks workers have now, from the server's answer to a hand-off."""
        delivered, ended = partition.handed_off(call, answers)
        self._deliveries.delivered += delivered
        for address, ack in ended:
            self._ended(partition, address, None, ack)
        if partition.waits_for_workers and partition not in self._watched:
            if not self._watched:
                self._poll_at = time.monotonic() + POLL_S
            self._watched[partition] = None

    async def look(self) -> StoreError | None:
        """Read partitions with messages at once and others now and then."""
        for partition in list(self._watched):
            if not partition.waits_for_workers or self._owned.get(partition.number) is not partition:
                del self._watched[partition]
        if not self._watched:
            return None
        if time.monotonic() >= self._poll_at:
            called = list(self._watched)
            self._poll_at = time.monotonic() + POLL_S
        else:
            called = [one for one in self._watched if one.number in self._heard]
        if not called:
            return None
        self._heard.difference_update(one.number for one in called)
        for partition in called:
            partition.hand_off_again()
        failures = [await self._forget(called), await self._read(called)]
        return next((failure for failure in failures if failure is not None), None)

    async def _read(self, called: list[Partition]) -> StoreError | None:
        failure = None
        waiting = [partition for partition in called if partition.awaits_acks]
        answers = await read_acks(self._store, {one.number: one.ack_cursor for one in waiting})
        for partition, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
            elif self._owned.get(partition.number) is partition:
                for address, (idh, ack) in answer.acks.items():
                    self._ended(partition, address, idh, ack)
                partition.ack_cursor = answer.cursor
                if answer.cursor:
                    self._heard.add(partition.number)
        return failure

    def _ended(self, partition: Partition, address: bytes, idh: bytes | None, ack: bytes) -> None:
        """Settle a lane's task that a worker has ended, and let the lane continue."""
        if (flight := partition.back_from_worker(address, idh)) is not None:
            self._deliveries.ended_by_worker(flight, *decode_ack(ack))

    async def _forget(self, called: list[Partition]) -> StoreError | None:
        """Delete the acks of tasks whose end the server knows: they are no longer needed."""
        known = {one: over for one in called if (over := one.known_ends(FORGOTTEN_AT_ONCE))}
        if not known:
            return None
        failure = await forget_acks(self._store, {one.number: over for one, over in known.items()})
        if failure is None:
            for partition, over in known.items():
                partition.forget_ends(over)
        return failure
