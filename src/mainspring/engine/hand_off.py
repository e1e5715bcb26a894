"""Hands due tasks off to the queues of workers, and settles those of lanes when their workers have answered.

For the timeline, a task without a lane is done once it is handed off: the server sets its done bit and adds it to the
stream in one step. A task of a lane stays fired until its worker's ack arrives; only then may the next task of the lane
begin. A new owner hands such a task off again, and the server adds it only if it is no longer queued or running.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from ..model.delivery import Dead
from ..model.errors import InvalidInput, StoreError
from ..model.targets.names import queue_of
from ..store.job_queue import decode_ack
from ..store.keys import address_prefix, r_of
from ..store.owner import fire
from ..store.owner.fire import forget_acks, read_acks
from ..store.store import Store
from .deliveries import Deliveries
from .flight import Flight
from .partition import HandingOff, Partition
from .slice import LiveSlice

POLL_S: Final = 0.5
"""Seconds between polls for unannounced acks, and between attempts for tasks whose id is already in a queue."""

IDLE_S: Final = 1.0
FORGOTTEN_AT_ONCE: Final = 1_000


class RunEnds:
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

    def watch(self, partition: Partition) -> None:
        if partition not in self._watched:
            if not self._watched:
                self._poll_at = time.monotonic() + POLL_S
            self._watched[partition] = None

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

    def __bool__(self) -> bool:
        return bool(self._watched)

    async def look(self) -> tuple[list[Flight], StoreError | None]:
        """Read partitions with messages at once and others now and then. Return flights that may be handed off now."""
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
        """Settle a lane's task that a worker has ended, and let the lane continue."""
        flight = partition.handed.awaited.pop(address)
        if flight.live.forgotten:
            return  # its slice is read again; it is handed off again and settled by the same ack
        self._deliveries.settle_ended(flight, decode_ack(ack))
        partition.handed.answered[address] = flight.live
        self._deliveries.delivered += 1

    async def _forget_acks(self, called: list[Partition]) -> StoreError | None:
        """Delete the acks of tasks whose end the server knows: they are no longer needed."""
        known: dict[Partition, list[bytes]] = {}
        for partition in called:
            if partition.handed.answered and partition.unanswered is None and not partition.pending_writes.outcomes:
                answered = partition.handed.answered.items()
                over = [address for address, live in answered if live not in partition.pending_writes.dirty][
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


_LIVE: Final = attrgetter("live")


class HandOffs:
    """Hands tasks off to workers, for all partitions of a node."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        deliveries: Deliveries,
        *,
        lost: Callable[[Partition, str], None],
        read_again: Callable[[], None],
        commands: Mapping[str, str],
    ) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._lost = lost
        self._read_again = read_again
        self._commands = commands
        self.ready: dict[Partition, None] = {}
        """Partitions with tasks to hand off."""
        self._listening = 1
        """Workers that received the last hand-off's message."""
        self.run_ends = RunEnds(store, owned, deliveries)

    def add(self, flights: list[Flight]) -> None:
        """Queue flights that have begun for the next call."""
        for flight in flights:
            partition = self._owned.get(flight.live.partition)
            if partition is None or not self._has_queue(flight):
                self._deliveries.in_flight -= 1
                continue
            partition.handed.ready.append(flight)
            self.ready[partition] = None

    def _has_queue(self, flight: Flight) -> bool:
        try:
            queue_of(flight.body.target, self._commands)
        except InvalidInput as error:
            self._deliveries.settle_ended(flight, Dead(str(error)))
            return False
        return True

    @property
    def wait_s(self) -> float:
        return 0.0 if self.ready else self.run_ends.wait_s

    async def step(self) -> StoreError | None:
        failure = await self.flush() if self.ready else None
        if self.run_ends:
            again, missed = await self.run_ends.look()
            self._deliveries.in_flight += len(again)
            self.add(again)
            failure = (await self.flush() if self.ready else None) or missed or failure
        return failure

    # -- handing off -----------------------------------------------------------------------------------------

    async def flush(self) -> StoreError | None:
        """Hand off everything that is ready, as far as servers answer."""
        failure = None
        while True:
            sent = []
            for partition in list(self.ready):
                if self._owned.get(partition.number) is not partition:
                    self._deliveries.in_flight -= len(partition.handed.ready)
                    del self.ready[partition]
                elif partition.unanswered is None:
                    work = self._load(partition)
                    if work.flights:
                        sent.append((partition, work))
            if not sent:
                return failure
            failure = await self.send(sent) or failure

    async def send(self, sent: Sequence[tuple[Partition, HandingOff]]) -> StoreError | None:
        """Send hand-offs, also earlier ones without a reply: the server knows by number whether they were applied."""
        for partition, work in sent:
            partition.unanswered = work
        failure = None
        results = await fire.hand_off(self._store, [work.work for _, work in sent], self._listening)
        for (partition, work), result in zip(sent, results, strict=True):
            if isinstance(result, StoreError):
                failure = result
            else:
                partition.unanswered = None
                self._listening = result.listening
                self._take_answer(partition, work, result)
        return failure

    def _load(self, partition: Partition) -> HandingOff:
        """Fill one call."""
        queues: dict[str, list[tuple[bytes, Flight]]] = {}
        heads: dict[LiveSlice, bytes] = {}
        size = taken = 0
        for flight in partition.handed.ready:
            if taken == fire.MOST_TASKS or size > fire.MOST_BYTES:
                break
            taken += 1
            live = flight.live
            if live.forgotten:
                continue
            queue = queue_of(flight.body.target, self._commands)
            head = heads.get(live) or heads.setdefault(live, _head_of(live))
            record = b"%b%b%b" % (head, flight.index.to_bytes(4, "big"), flight.row)
            size += len(record)
            queues.setdefault(queue, []).append((record, flight))
        del partition.handed.ready[:taken]
        self._deliveries.in_flight -= taken
        if not partition.handed.ready:
            del self.ready[partition]
        flights = [flight for rows in queues.values() for _, flight in rows]
        records = {queue: [record for record, _ in rows] for queue, rows in queues.items()}
        return _handing_off(partition, flights, records)

    def _take_answer(self, partition: Partition, work: HandingOff, handed: fire.HandOffReply) -> None:
        match handed.status:
            case "ok":
                partition.seq = work.work.seq
                for live, touch in zip(work.touched, work.work.touches, strict=True):
                    live.proven = max(live.proven, touch.m)
                self._settle(partition, work, handed.answers)
            case "stale":
                for live in {flight.live for flight in work.flights}:
                    partition.forget(live)
                self._read_again()
            case status:
                self._lost(partition, status)

    def _settle(self, partition: Partition, work: HandingOff, answers: dict[int, bytes]) -> None:
        plain = len(work.flights)
        if work.has_lanes or answers:
            plain = 0
            for position, flight in enumerate(work.flights):
                answer = answers.get(position)
                if answer == fire.BUSY:
                    _put_off(partition, flight)
                elif flight.body.lane is None:
                    plain += 1
                else:
                    address = flight.address
                    partition.handed.awaited[address] = flight
                    if answer is not None:
                        self.run_ends.ended(partition, address, answer)
            if partition.handed.is_watched:
                self.run_ends.watch(partition)
        self._deliveries.delivered += plain


def _head_of(live: LiveSlice) -> bytes:
    """Return the packed address without the index."""
    return address_prefix(live.slice) + r_of(live.g).to_bytes(3, "big")


def _handing_off(partition: Partition, flights: list[Flight], queues: dict[str, list[bytes]]) -> HandingOff:
    """Return the call that hands these off, with the done bits of those that end with it."""
    over = [flight for flight in flights if flight.body.lane is None]
    touched: dict[LiveSlice, None] = {}
    for live, run in groupby(over, _LIVE):
        indexes = [flight.index for flight in run]
        live.land(len(indexes), indexes)
        touched[live] = None
    done = partition.pending_writes.take_done(touched)
    work = fire.HandOff(partition.number, partition.token, partition.seq + 1, done.finished, done.touches, queues)
    return HandingOff(work, flights, done.lives, len(over) < len(flights))


def _put_off(partition: Partition, flight: Flight) -> None:
    """Make a task wait: it stays fired, also on the server, and is not done."""
    if flight.body.lane is None:
        flight.live.reopen(flight.index)
    partition.handed.put_off.append(flight)
