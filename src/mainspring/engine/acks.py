"""Tasks that workers have: settles those of lanes when their workers have answered, and repeats refused hand-offs.

For the timeline, a task without a lane is done once it is handed off: the server sets its done bit and adds it to the
stream in one step. A task of a lane stays fired until its worker's ack arrives; only then may the next task of the lane
begin. A new owner hands such a task off again, and the server adds it only if it is no longer queued or running.
"""

import time
from collections.abc import Iterable
from typing import Final

from ..model.errors import StoreError
from ..store.job_queue import decode_ack
from ..store.owner import fire
from ..store.owner.fire import forget_acks, read_acks
from ..store.store import Store
from .deliveries import Deliveries
from .flight import grouped
from .partition import HandOffCall, Partition

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

    def handed_off(self, partition: Partition, call: HandOffCall, answers: dict[int, bytes]) -> None:
        """Note which tasks workers have now, from the server's answer to a hand-off."""
        if not (call.has_lanes or answers):
            self._deliveries.delivered += len(call.flights)
            return
        queues = [queue for queue, records in call.work.queues.items() for _ in records]
        for position, flight in enumerate(call.flights):
            answer = answers.get(position)
            if answer == fire.BUSY:
                partition.put_off(queues[position], flight)
            elif flight.body.lane is None:
                self._deliveries.delivered += 1
            else:
                address = flight.address
                partition.handed.awaited[address] = flight
                if answer is not None:
                    self._ended(partition, address, answer)
        if partition.handed.is_watched and partition not in self._watched:
            if not self._watched:
                self._poll_at = time.monotonic() + POLL_S
            self._watched[partition] = None

    async def look(self) -> StoreError | None:
        """Read partitions with messages at once and others now and then."""
        for partition in list(self._watched):
            if not partition.handed.is_watched or self._owned.get(partition.number) is not partition:
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
            again, partition.handed.put_off = partition.handed.put_off, []
            for queue, flight in again:
                for group in grouped([flight]):
                    partition.hand_off(queue, group)
        failures = [await self._forget(called), await self._read(called)]
        return next((failure for failure in failures if failure is not None), None)

    async def _read(self, called: list[Partition]) -> StoreError | None:
        failure = None
        waiting = [partition for partition in called if partition.handed.awaited]
        answers = await read_acks(self._store, {one.number: one.handed.cursor for one in waiting})
        for partition, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
            elif self._owned.get(partition.number) is partition:
                for address, (idh, ack) in answer.acks.items():
                    flight = partition.handed.awaited.get(address)
                    if flight is not None and flight.idh == idh:
                        self._ended(partition, address, ack)
                partition.handed.cursor = answer.cursor
                if answer.cursor:
                    self._heard.add(partition.number)
        return failure

    def _ended(self, partition: Partition, address: bytes, ack: bytes) -> None:
        """Settle a lane's task that a worker has ended, and let the lane continue."""
        flight = partition.handed.awaited.pop(address)
        if flight.live.forgotten:
            return  # its slice is read again; it is handed off again and settled by the same ack
        self._deliveries.ended_by_worker(flight, *decode_ack(ack))
        partition.handed.answered[address] = flight.live

    async def _forget(self, called: list[Partition]) -> StoreError | None:
        """Delete the acks of tasks whose end the server knows: they are no longer needed."""
        known = {one: over for one in called if (over := one.known_ends(FORGOTTEN_AT_ONCE))}
        if not known:
            return None
        failure = await forget_acks(self._store, {one.number: over for one, over in known.items()})
        if failure is None:
            for partition, over in known.items():
                for address in over:
                    partition.handed.answered.pop(address, None)
        return failure
