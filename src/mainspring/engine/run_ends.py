"""Waits for the word of workers on tasks of lanes, and for the end of runs whose id another task has as well."""

import time
from collections.abc import Iterable
from typing import Final

from ..model.errors import StoreError
from ..store.acks import forget_acks, read_acks
from ..store.queue_end import decode_ack
from ..store.store import Store
from .deliveries import Deliveries
from .flight import Flight
from .partition import Partition

POLL_S: Final = 0.5
"""How often acks are looked for that no message announced, and tasks tried again whose id is in a queue already."""

IDLE_S: Final = 1.0
FORGOTTEN_AT_ONCE: Final = 1_000


class RunEnds:
    """The partitions in which something ends by the word of others."""

    def __init__(self, store: Store, owned: dict[int, Partition], deliveries: Deliveries) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._watched: dict[Partition, None] = {}
        self._heard: set[int] = set()
        """Partitions of which a message came since they were looked at. Also of those that wait for nothing yet: a
        worker may be done before the owner has the answer to its hand-off."""
        self._poll_at = 0.0

    def watch(self, partition: Partition) -> None:
        if partition not in self._watched:
            if not self._watched:
                self._poll_at = time.monotonic() + POLL_S
            self._watched[partition] = None

    def woken(self, partitions: Iterable[int]) -> bool:
        """Somebody said that something has changed there, or may have said so unheard. True when that matters here."""
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

    def __bool__(self) -> bool:
        return bool(self._watched)

    async def look(self) -> tuple[list[Flight], StoreError | None]:
        """All that is watched from time to time, and at once what called. Returns what may be handed off now."""
        for partition in list(self._watched):
            if not partition.handed.is_watched or self._owned.get(partition.number) is not partition:
                del self._watched[partition]
        if time.monotonic() >= self._poll_at:
            called = list(self._watched)
            self._poll_at = time.monotonic() + POLL_S
        else:
            called = [one for one in self._watched if one.number in self._heard]
        if not called:
            return [], None
        self._heard.difference_update(one.number for one in called)
        again: list[Flight] = []
        for partition in called:
            again += partition.handed.put_off
            partition.handed.put_off = []
        failures = [await self._forget_acks(called), await self._read_acks(called)]
        return again, next((failure for failure in failures if failure is not None), None)

    async def _read_acks(self, called: list[Partition]) -> StoreError | None:
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
                        self.ended(partition, address, ack)
                partition.handed.cursor = answer.cursor
                if answer.cursor:
                    self._heard.add(partition.number)
        return failure

    def ended(self, partition: Partition, address: bytes, ack: bytes) -> None:
        """A worker has ended this task of a lane: settle it, and let the lane go on."""
        flight = partition.handed.awaited.pop(address)
        if flight.live.forgotten:
            return  # it is read anew, handed off again, and answered by the same ack
        self._deliveries.settle_ended(flight, decode_ack(ack))
        partition.handed.answered[address] = flight.live
        self._deliveries.delivered += 1

    async def _forget_acks(self, called: list[Partition]) -> StoreError | None:
        """Acks of tasks whose end the server knows are of no use any more."""
        known: dict[Partition, list[bytes]] = {}
        for partition in called:
            if partition.handed.answered and partition.unanswered is None and not partition.unwritten.must_commit:
                answered = partition.handed.answered.items()
                over = [address for address, live in answered if live not in partition.unwritten.dirty][
                    :FORGOTTEN_AT_ONCE
                ]
                if over:
                    known[partition] = over
        if not known:
            return None
        failure = await forget_acks(self._store, {one.number: over for one, over in known.items()})
        if failure is None:
            for partition, over in known.items():
                for address in over:
                    partition.handed.answered.pop(address, None)
        return failure
