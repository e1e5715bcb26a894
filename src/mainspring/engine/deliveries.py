"""Deliveries in flight: due tasks go to their sinks, and outcomes are recorded for the next commit."""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from ..model.clock import Clock
from ..model.delivery import DONE, EXPIRED, Dead, DeliveryBatch, Done, Outcome, Retry
from ..model.errors import StoreError
from ..model.job import JobCancelled, Result
from ..model.targets.names import HANDED_OFF
from ..model.text import describe, placed
from ..sinks.base import Sink, most_in_batch
from ..store.records import KeptResult, keep_results
from ..store.store import Store
from .flight import Flight
from .flow import FlowControl, PauseWatch
from .outcomes import Outcomes
from .partition import Partition, Settled
from .slice import LiveSlice

log = logging.getLogger("mainspring.engine")


class Answers:
    """Stores webhook answers before the tasks are marked done, so that a done task always has its answer."""

    def __init__(self, store: Store, node: str) -> None:
        self._store = store
        self._node = node
        self._failing = False

    async def deliver(self, sink: Sink, group: Sequence[Flight], batch: DeliveryBatch) -> Sequence[Outcome]:
        """Return the sink's outcomes, once the responses in them are stored."""
        outcomes = await sink.deliver(batch)
        if len(outcomes) == len(group) and (kept := self._kept(group, outcomes)):
            await self._keep(kept)
        return outcomes

    def _kept(self, group: Sequence[Flight], outcomes: Sequence[Outcome]) -> list[KeptResult]:
        now_ms = self._store.clock.now_ms()
        kept = []
        for flight, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Done) and outcome.keep_ms and outcome.response is not None:
                result = Result(
                    "done",
                    attempt=flight.attempt,
                    worker=self._node,
                    target=flight.target,
                    due_ms=flight.original_due_ms,
                    started_ms=now_ms - outcome.response.duration_ms,
                    ended_ms=now_ms,
                    response=outcome.response,
                )
                kept.append(KeptResult(flight.live.partition, flight.idh, result.encode(), outcome.keep_ms))
        return kept

    async def _keep(self, kept: Sequence[KeptResult]) -> None:
        """Store responses. If the server is full or absent they are lost, but the outcomes remain valid."""
        try:
            await keep_results(self._store, kept)
        except StoreError as error:
            if not self._failing:
                log.warning("webhook responses were not stored: %s", error)
            self._failing = True
        else:
            self._failing = False


_LIVE: Final = attrgetter("live")
_INDEX: Final = attrgetter("index")
_EXPIRES: Final = attrgetter("body.expires_ms")
_TO_WORKERS: Final = tuple(f"{scheme}:" for scheme in sorted(HANDED_OFF))


def _well_formed(outcomes: object, expected: int) -> bool:
    if not isinstance(outcomes, Sequence) or len(outcomes) != expected:
        return False
    return outcomes.count(DONE) == expected or set(map(type, outcomes)) <= {Done, Retry, Dead}


def _is_waited_for(flight: Flight) -> bool:
    return flight.body.lane is not None or flight.body.occurrence is not None


def _may_be_with_workers(flight: Flight) -> bool:
    """Return whether a worker may have the task: a former owner has begun it, and in its lane it stays fired until the
    worker's ack arrives, which may be there by now."""
    to_workers = flight.body.lane is not None and flight.body.target.startswith(_TO_WORKERS)
    return to_workers and flight.live.to_redo(flight.index)


def _tally(outcomes: Sequence[Outcome]) -> tuple[int, int, int]:
    """Count the tasks that were done, failed in a way that says the receiver is unwell, and were refused for good."""
    done = outcomes.count(DONE)
    if done == len(outcomes):
        return done, 0, 0
    failed = sum(1 for one in outcomes if isinstance(one, Retry) and not one.untried)
    return done, failed, sum(1 for one in outcomes if isinstance(one, Dead))


def _error_of(delivery: "asyncio.Task[Sequence[Outcome]]") -> BaseException | None:
    """Return the error of a delivery. A cancellation raised by the sink itself counts as an error."""
    return asyncio.CancelledError("within the sink") if delivery.cancelled() else delivery.exception()


def _by_live(group: list[Flight]) -> Iterator[tuple[LiveSlice, list[Flight]]]:
    """Group neighbouring flights by slice."""
    return ((live, list(run)) for live, run in groupby(group, _LIVE))


def _runs(group: list[Flight]) -> Iterator[tuple[LiveSlice, list[Flight]]]:
    """Like `_by_live` when all flights of a slice are known to be neighbours: find each end by bisection."""
    start = 0
    while start < len(group):
        live = group[start].live
        end = bisect_left(group, True, start, key=lambda one: one.live is not live)
        yield live, group[start:end]
        start = end


def _without_engine() -> None:
    """Do nothing: without an engine, such tasks are retried."""


class Deliveries:
    """Hands flights to the sinks and settles them in their partitions."""

    def __init__(
        self,
        owned: dict[int, Partition],
        sinks: Mapping[str, Sink],
        outcomes: Outcomes,
        clock: Clock,
        wake: Callable[[], None],
        lost: Callable[[Partition, str], None],
        flow_control: FlowControl,
        answers: Answers,
    ) -> None:
        self._owned = owned
        self._sinks = sinks
        self._flow_control = flow_control
        self._answers = answers
        self._outcomes = outcomes
        self._clock = clock
        self._wake = wake
        self._lost = lost
        self.running: set[asyncio.Task[Sequence[Outcome]]] = set()
        self.in_flight = 0
        self.delivered = 0
        self._given_up = False
        self.meters = outcomes.meters
        self.meters.expect(sinks)
        self.hand_off: Callable[[list[Flight]], None] = self._without_hand_off
        """Callback that hands tasks off to workers; set by the engine."""
        self.unknown_scheme: Callable[[], None] = _without_engine
        """Called when no sink serves a task: later ones are held; the engine sets it."""
        self.pauses: PauseWatch | None = None
        """Knows which tasks must not be delivered, and learns which targets want none; set by the engine."""

    def start(self, flights: list[Flight], alike: str | None = None) -> None:
        """Deliver flights.

        `alike` promises that it is the target of all, that none expires, and that flights of a slice are neighbours.
        """
        began_ms = self._clock.now_ms()
        if alike is None and any(map(_EXPIRES, flights)):
            flights = self._without_expired(flights, began_ms)
        if self.pauses is not None and self.pauses.drops:
            flights = self._without_dropped(flights, self.pauses)
        by_target: dict[str, list[Flight]] = {}
        if alike is not None and flights:
            by_target[alike] = flights
        else:
            for flight in flights:
                by_target.setdefault(flight.body.target, []).append(flight)
        for target, group in by_target.items():
            kind = target.partition(":")[0]
            sink = self._sinks.get(kind)
            self.in_flight += len(group)
            self._flow_control.begun(target, len(group))
            self.meters.fired[kind] += len(group)
            if sink is None and target.startswith(_TO_WORKERS):
                self._note_late(kind, group, began_ms)
                self.hand_off(group)
                continue
            if sink is None:
                self.unknown_scheme()
                reason = f"no sink for {kind}: on this node"
                self._settle(group, [Retry(reason, untried=True)] * len(group), began_ms)
                continue
            for batch in self._batches(sink, target, group):
                self._hand_over(sink, batch, began_ms, in_runs=alike is not None)

    def _batches(self, sink: Sink, target: str, group: list[Flight]) -> Iterator[list[Flight]]:
        """Split a group into batches. A batch is settled as a whole, with its slowest delivery if they end one by one,
        so tasks whose end others wait for (a slot, their lane, the next run of a schedule) go alone."""
        most = most_in_batch(sink, target)
        if self._flow_control.has_slots(target):
            most = 1
        elif most is not None and (apart := [flight for flight in group if _is_waited_for(flight)]):
            yield from ([flight] for flight in apart)
            group = [flight for flight in group if not _is_waited_for(flight)]
        size = len(group) if most is None else most
        for first in range(0, len(group), size or 1):
            yield group[first : first + size]

    def _without_hand_off(self, group: list[Flight]) -> None:
        reason = "this node does not hand tasks off"
        self._settle(group, [Retry(reason)] * len(group), self._clock.now_ms())

    def _note_late(self, kind: str, group: list[Flight], began_ms: int) -> None:
        for live, run in _by_live(group):
            self.meters.began_late(kind, live, run, began_ms)

    def _hand_over(self, sink: Sink, group: list[Flight], began_ms: int, *, in_runs: bool) -> None:
        task = asyncio.ensure_future(self._ask(sink, group))
        self.running.add(task)
        self._flow_control.left(group[0].body.target, len(group))
        task.add_done_callback(lambda task: self._delivered(task, group, began_ms, in_runs))

    async def _ask(self, sink: Sink, group: list[Flight]) -> Sequence[Outcome]:
        """Return the outcomes of the sink. An error of the sink fails only this group."""
        kept = getattr(sink, "keeps_answers", False)
        batch = DeliveryBatch(group, lambda at: self._unwanted(group[at]))
        outcomes = await (self._answers.deliver(sink, group, batch) if kept else sink.deliver(batch))
        if _well_formed(outcomes, len(group)):
            return outcomes
        return [Retry("the sink did not give one outcome for each task")] * len(group)

    def _unwanted(self, flight: Flight) -> Outcome | None:
        """Return the outcome of a flight that waits in its sink and must not be sent any more."""
        partition = self._owned.get(flight.live.partition)
        now_ms = self._clock.now_ms()  # before the lease: see `holds_lease`
        if partition is None or flight.live.forgotten or not partition.holds_lease:
            return Retry("another node may own its partition by now", untried=True)
        if flight.body.expires_ms is not None and flight.body.expires_ms < now_ms:
            return Dead(EXPIRED)
        # A task begun by a former owner may have been delivered: it goes out again, paused or not.
        if self.pauses is None or flight.live.to_redo(flight.index):
            return None
        reason = self.pauses.dropped(flight.body.target, flight.body.lane)
        if reason is not None:
            return Dead(reason)
        paused = self.pauses.hold_for(flight.body.target, flight.body.lane, flight.due_ms) is not None
        return Retry("paused while it waited for its host", untried=True) if paused else None

    def _without_expired(self, flights: list[Flight], now_ms: int) -> list[Flight]:
        in_time = []
        for flight in flights:
            expired = flight.body.expires_ms is not None and flight.body.expires_ms < now_ms
            if expired and not _may_be_with_workers(flight):  # otherwise a worker finds the expiry, if none has run it
                self._settle_one(flight, Dead(EXPIRED))
            else:
                in_time.append(flight)
        return in_time

    def _without_dropped(self, flights: list[Flight], pauses: PauseWatch) -> list[Flight]:
        wanted = []
        for flight in flights:
            reason = pauses.dropped(flight.body.target, flight.body.lane)
            # A task begun by a former owner may have been delivered: deliver it again.
            if reason is None or flight.live.to_redo(flight.index):
                wanted.append(flight)
            else:
                self._settle_one(flight, Dead(reason))
        return wanted

    def _delivered(
        self, task: "asyncio.Task[Sequence[Outcome]]", group: list[Flight], began_ms: int, in_runs: bool
    ) -> None:
        self.running.discard(task)
        if task.cancelled() and self._given_up:
            self._flow_control.landed(group[0].body.target, len(group), 0, 0)
            self.in_flight -= len(group)  # stopping: deliveries without an outcome are repeated later
            return
        error = _error_of(task)
        if error is None:
            done, failed, refused = _tally(task.result())
            self._flow_control.landed(group[0].body.target, len(group), done, failed, refused)
            self._settle(group, task.result(), began_ms, done, in_runs=in_runs)
            return
        self._flow_control.landed(group[0].body.target, len(group), 0, len(group))
        self._settle(group, [Retry(describe(error), error=error, brief=placed(error))] * len(group), began_ms)

    def _settle(
        self,
        group: list[Flight],
        outcomes: Sequence[Outcome],
        began_ms: int,
        done: int = 0,
        *,
        in_runs: bool = False,
    ) -> None:
        self.in_flight -= len(group)
        kind = group[0].body.target.partition(":")[0]
        self.meters.settled(kind, (self._clock.now_ms() - began_ms) / 1000, done)
        if done == len(group):
            for live, landed in _runs(group) if in_runs else _by_live(group):
                self.meters.began_late(kind, live, landed, began_ms)
                if live.has_lanes:
                    for flight in landed:
                        self._settle_one(flight, DONE)
                else:
                    live.land(len(landed), map(_INDEX, landed))
                    live.finished += len(landed)
                    self._note_settled(live)
                    if live.has_schedules:
                        self._note_over(landed, "done")
        else:
            self._note_late(kind, group, began_ms)
            for flight, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, Dead) and outcome.disables and self.pauses is not None:
                    self.pauses.disable(flight.body.target, outcome.reason)
                self._settle_one(flight, outcome)
        self.delivered += len(group)

    def _note_over(self, flights: Sequence[Flight], outcome: str) -> None:
        """Record that runs of schedules are over: their next occurrences may be waiting for that."""
        partition = self._owned.get(flights[0].live.partition)
        if partition is not None:
            now_ms = self._clock.now_ms()
            for flight in flights:
                partition.chains.over(flight, outcome, now_ms)

    def _note_settled(self, live: LiveSlice) -> None:
        partition = self._owned.get(live.partition)
        if partition is not None and not live.forgotten:
            if not partition.pending_writes.dirty:
                self._wake()
            partition.pending_writes.settled(live, time.monotonic())

    def _settle_one(self, flight: Flight, outcome: Outcome) -> None:
        partition = self._owned.get(flight.live.partition)
        if partition is None or flight.live.forgotten:
            return  # another owner has it, or its slice is read again
        settled = Settled(flight.live, flight.index, delivered=isinstance(outcome, Done))
        if not isinstance(outcome, Done):
            if not partition.holds_lease:
                # The next owner delivers it again. A retry placed by a clock that has jumped could be an hour away.
                self._lost(partition, "its lease ran out before a failed delivery was settled")
                return
            settled = self._apply(partition, flight, outcome)
        self._land(partition, flight, settled)

    def _apply(self, partition: Partition, flight: Flight, outcome: Retry | Dead) -> Settled:
        try:
            return self._outcomes.apply(partition, flight, outcome)
        except (ValueError, TypeError, OverflowError) as error:
            # The outcome cannot be written. Bury this task, but do not fail the others of its batch.
            log.exception("the outcome of task %s cannot be written", flight.id, extra={"task": flight.id})
            return self._outcomes.apply(partition, flight, Dead(f"its outcome cannot be written: {describe(error)}"))

    def settle_ended(self, flight: Flight, outcome: Outcome | JobCancelled) -> None:
        """Settle a task that a worker has ended; the worker has already applied the retry policy."""
        partition = self._owned.get(flight.live.partition)
        if partition is None or flight.live.forgotten:
            return
        # The mark of a cancelled task is already set, and counted.
        settled = Settled(flight.live, flight.index, delivered=isinstance(outcome, Done))
        if isinstance(outcome, Retry | Dead):
            settled = self._outcomes.carry_out(partition, flight, outcome)
        self._land(partition, flight, settled)

    def _land(self, partition: Partition, flight: Flight, settled: Settled) -> None:
        partition.ended(flight, settled)
        if settled.is_over and flight.body.occurrence is not None:
            self._note_over([flight], "done" if settled.delivered else "dead")
        self._wake()

    def bury_damaged(self, partition: Partition) -> None:
        for damaged in partition.due_selector.row_decoder.damaged:
            damaged.live.held.add(damaged.index)  # another pass over the list must not take it again
            partition.pending_writes.ended(self._outcomes.bury_damaged(damaged), time.monotonic())
        partition.due_selector.row_decoder.damaged = []

    # -- stopping ---------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Give up all deliveries in flight; the next owner repeats them."""
        self._given_up = True
        for task in self.running:
            task.cancel()
