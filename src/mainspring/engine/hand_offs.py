"""Hands due tasks off to the queues of workers, and settles those of lanes when their workers have answered.

A task without a lane is over for the timeline with its hand-off: its done bit and its place in a stream are one step of
the server. One of a lane stays fired until the worker's word, which stands among the acks of its partition: only then
may the next of its lane begin. A new owner hands it off again; the server knows whether it is still there.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from ..model.errors import InvalidInput, StoreError
from ..model.outcome import Dead
from ..model.queues import queue_of
from ..store import hand_off
from ..store.keys import address_prefix, r_of
from ..store.store import Store
from .commits import Commits
from .deliveries import Deliveries
from .flight import Flight
from .handed import HandingOff
from .live import LiveSlice
from .partition import Partition
from .run_ends import RunEnds

_LIVE: Final = attrgetter("live")


class HandOffs:
    """What goes to workers, for all partitions of a node."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        deliveries: Deliveries,
        commits: Commits,
        *,
        lost: Callable[[Partition, str], None],
        read_again: Callable[[], None],
        commands: Mapping[str, str],
    ) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._commits = commits
        self._lost = lost
        self._read_again = read_again
        self._commands = commands
        self.ready: dict[Partition, None] = {}
        """Partitions with tasks to hand off."""
        self.ends = RunEnds(store, owned, deliveries)

    def add(self, flights: list[Flight]) -> None:
        """These have begun; they go with the next call."""
        for flight in flights:
            partition = self._owned.get(flight.live.partition)
            # Now, not when they are sent: what dies of it has to be committed before the others of its slice go.
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
        return 0.0 if self.ready else self.ends.wait_s

    async def step(self) -> StoreError | None:
        failure = await self.flush() if self.ready else None
        if self.ends:
            again, missed = await self.ends.look()
            self._deliveries.in_flight += len(again)
            self.add(again)
            failure = (await self.flush() if self.ready else None) or missed or failure
        return failure

    # -- handing off -----------------------------------------------------------------------------------------

    async def flush(self) -> StoreError | None:
        """Hand off all that is ready, as far as servers answer."""
        # A slice's done bits go whole: those of rows that are retried must not go before the retries.
        failure = await self._commits.all(0.0) if any(one.unwritten.must_commit for one in self.ready) else None
        while True:
            sent = []
            for partition in list(self.ready):
                if self._owned.get(partition.number) is not partition:
                    self._deliveries.in_flight -= len(partition.handed.ready)
                    del self.ready[partition]
                elif partition.unanswered is None and not partition.unwritten.must_commit:
                    work = self._load(partition)
                    if work.flights:
                        sent.append((partition, work))
            if not sent:
                return failure
            failure = await self.send(sent) or failure

    async def send(self, sent: Sequence[tuple[Partition, HandingOff]]) -> StoreError | None:
        """Also what was sent before and never answered: the server knows by its number if it was done."""
        for partition, work in sent:
            partition.unanswered = work
        failure = None
        results = await hand_off.hand_off(self._store, [work.work for _, work in sent])
        for (partition, work), result in zip(sent, results, strict=True):
            if isinstance(result, StoreError):
                failure = result
            else:
                partition.unanswered = None
                self._take_answer(partition, work, result)
        return failure

    def _load(self, partition: Partition) -> HandingOff:
        """As much as one call takes."""
        queues: dict[str, list[tuple[bytes, Flight]]] = {}
        heads: dict[LiveSlice, bytes] = {}
        size = taken = 0
        for flight in partition.handed.ready:
            if taken == hand_off.MOST_TASKS or size > hand_off.MOST_BYTES:
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

    def _take_answer(self, partition: Partition, work: HandingOff, handed: hand_off.Handed) -> None:
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
                if answer == hand_off.BUSY:
                    _put_off(partition, flight)
                elif flight.body.lane is None:
                    plain += 1
                else:
                    address = flight.address
                    partition.handed.awaited[address] = flight
                    if answer is not None:
                        self.ends.ended(partition, address, answer)
            if partition.handed.is_watched:
                self.ends.watch(partition)
        self._deliveries.delivered += plain


def _head_of(live: LiveSlice) -> bytes:
    """All of an address but the index."""
    return address_prefix(live.slice) + r_of(live.g).to_bytes(3, "big")


def _handing_off(partition: Partition, flights: list[Flight], queues: dict[str, list[bytes]]) -> HandingOff:
    """The call that hands these off, with the done bits of those that are over with it."""
    over = [flight for flight in flights if flight.body.lane is None]
    touched: dict[LiveSlice, None] = {}
    for live, run in groupby(over, _LIVE):
        indexes = [flight.index for flight in run]
        live.land(len(indexes), indexes)
        touched[live] = None
    done = partition.unwritten.take_done(touched)
    work = hand_off.HandOff(partition.number, partition.token, partition.seq + 1, done.finished, done.touches, queues)
    return HandingOff(work, flights, done.lives, len(over) < len(flights))


def _put_off(partition: Partition, flight: Flight) -> None:
    """It has to wait: it stays fired, also on the server, and is not done."""
    if flight.body.lane is None:
        flight.live.reopen(flight.index)
    partition.handed.put_off.append(flight)
