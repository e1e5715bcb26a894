"""Deliveries in flight: due tasks go to their sinks or to workers, and their outcomes to their partitions."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from ..model.clock import Clock
from ..model.delivery import DONE, EXPIRED, Dead, DeliveryBatch, Done, Outcome, Retry
from ..model.errors import InvalidInput
from ..model.run import Verdict
from ..model.targets.names import queue_of
from ..model.text import describe, placed
from ..roles import Loops
from ..sinks.base import Sink, most_in_batch
from .flight import Flight, FlightGroup
from .flow import Flow, PauseWatch
from .keeper import Keeper
from .outcomes import TO_WORKERS, Outcomes
from .partition import Partition, Settled

log = logging.getLogger("mainspring.engine")

_EXPIRES: Final = attrgetter("body.expires_ms")


def _well_formed(outcomes: object, expected: int) -> bool:
    if not isinstance(outcomes, Sequence) or len(outcomes) != expected:
        return False
    return outcomes.count(DONE) == expected or set(map(type, outcomes)) <= {Done, Retry, Dead}


def _is_waited_for(flight: Flight) -> bool:
    return flight.body.lane is not None or flight.body.occurrence is not None


def _may_be_with_workers(flight: Flight) -> bool:
    """Return whether a worker may have the task: a former owner has begun it, and in its lane it stays fired until the
    worker's ack arrives, which may be there by now."""
    to_workers = flight.body.lane is not None and flight.body.target.startswith(TO_WORKERS)
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


class SinkBatch:
    """Groups of one target that are delivered together."""

    __slots__ = ("began_ms", "flights", "groups", "sent_ms", "target")

    def __init__(self, target: str, groups: list[FlightGroup], began_ms: int) -> None:
        self.target, self.groups, self.began_ms = target, groups, began_ms
        self.flights = groups[0].flights if len(groups) == 1 else [one for group in groups for one in group.flights]
        self.sent_ms = [began_ms] * len(self.flights)
        """When each was sent: later than the batch began if it had to wait for its host."""

    @property
    def kind(self) -> str:
        """The word before the colon of its target."""
        return self.target.partition(":")[0]


class Deliveries:
    """Hands flights to the sinks, and settles them in their partitions."""

    def __init__(
        self,
        owned: dict[int, Partition],
        sinks: Mapping[str, Sink],
        outcomes: Outcomes,
        clock: Clock,
        loops: Loops,
        keeper: Keeper,
        flow: Flow,
        pauses: PauseWatch,
    ) -> None:
        self._owned = owned
        self._sinks = sinks
        self._flow = flow
        self._pauses = pauses
        self._outcomes = outcomes
        self._clock = clock
        self._loops = loops
        self._keeper = keeper
        self.running: set[asyncio.Task[Sequence[Outcome]]] = set()
        self.in_flight = 0
        """Tasks that a sink has."""
        self.begun = 0
        """Tasks that were started so far."""
        self.delivered = 0
        self._given_up = False
        self.meters = outcomes.meters
        self.meters.expect(sinks)

    def inherit(self, groups: list[FlightGroup]) -> list[FlightGroup]:
        """Return the groups that leave at once. Those with flights that a former owner has begun leave when the history
        has its attempts: otherwise this owner's attempts would leave no record if it died too."""
        at_once = []
        for group in groups:
            lost = self._outcomes.lost(group) if group.live.bits.redo else ()
            if lost:
                self._owned[group.live.partition].settle(Settled(runs=lost, leaving=group))
            else:
                at_once.append(group)
        return at_once

    def start(self, groups: list[FlightGroup]) -> None:
        """Deliver the flights of these groups."""
        began_ms = self._clock.now_ms()
        by_target: dict[str, list[FlightGroup]] = {}
        for group in groups:
            self.begun += len(group.flights)
            if group.target is not None and not self._pauses.drops:
                by_target.setdefault(group.target, []).append(group)
                continue
            apart: dict[str, list[Flight]] = {}
            for flight in self._wanted(group.flights, began_ms):
                apart.setdefault(flight.body.target, []).append(flight)
            for target, some in apart.items():
                by_target.setdefault(target, []).append(group.part(some))
        for target, some_groups in by_target.items():
            self._start(target, some_groups, began_ms)

    def _start(self, target: str, groups: list[FlightGroup], began_ms: int) -> None:
        batch = SinkBatch(target, groups, began_ms)
        count = len(batch.flights)
        sink = self._sinks.get(batch.kind)
        self._flow.begun(target, count)
        self.meters.fired[batch.kind] += count
        if sink is None and target.startswith(TO_WORKERS):
            self._hand_off(batch)
            return
        self.in_flight += count
        if sink is None:
            self._flow.lacks_sinks = True
            reason = f"no sink for {batch.kind}: on this node"
            self._settle(batch, [Retry(reason, untried=True)] * count)
            return
        for part in self._batches(sink, batch):
            task = asyncio.ensure_future(self._ask(sink, part))
            self.running.add(task)
            self._flow.left(target, len(part.flights))
            task.add_done_callback(lambda task, part=part: self._delivered(task, part))  # type: ignore[misc]

    def _batches(self, sink: Sink, batch: SinkBatch) -> Iterator[SinkBatch]:
        """Split into batches. A batch is settled as a whole, with its slowest delivery if they end one by one, so tasks
        whose end others wait for (a slot, their lane, the next run of a schedule) go alone."""
        most = most_in_batch(sink, batch.target)
        slots = self._flow.has_slots(batch.target)
        if most is None and not slots:
            yield batch
            return
        for group in batch.groups:
            together: list[Flight] = []
            for flight in group.flights:
                if slots or _is_waited_for(flight):
                    yield SinkBatch(batch.target, [group.part([flight])], batch.began_ms)
                else:
                    together.append(flight)
            for first in range(0, len(together), most or 1):
                yield SinkBatch(batch.target, [group.part(together[first : first + (most or 1)])], batch.began_ms)

    def _hand_off(self, batch: SinkBatch) -> None:
        try:
            queue = queue_of(batch.target, self._flow.commands)
        except InvalidInput as error:
            self.in_flight += len(batch.flights)
            self._settle(batch, [Dead(str(error))] * len(batch.flights))
            return
        for group in batch.groups:
            self.meters.began_late(batch.kind, group.live, group.flights, batch.began_ms)
            if (partition := self._owned.get(group.live.partition)) is not None:
                partition.hand_off(queue, group)

    async def _ask(self, sink: Sink, batch: SinkBatch) -> Sequence[Outcome]:
        """Return the outcomes of the sink. An error of the sink fails only this batch."""
        flights = batch.flights
        outcomes = await sink.deliver(DeliveryBatch(flights, lambda at: self._unwanted(batch, at)))
        if _well_formed(outcomes, len(flights)):
            return outcomes
        return [Retry("the sink did not give one outcome for each task")] * len(flights)

    def _unwanted(self, batch: SinkBatch, at: int) -> Outcome | None:
        """Return the outcome of a flight that waited in its sink and must not be sent any more. The others are sent."""
        flight = batch.flights[at]
        partition = self._owned.get(flight.live.partition)
        batch.sent_ms[at] = now_ms = self._clock.now_ms()  # before the lease: see `holds_lease`
        if partition is None or flight.live.forgotten or not partition.holds_lease:
            return Retry("another node may own its partition by now", untried=True)
        if (dead := self._refused(flight, now_ms)) is not None or flight.live.to_redo(flight.index):
            return dead
        if self._flow.pauses.of_task(flight.body.target, flight.body.lane) is not None:
            return Retry("paused while it waited for its host", untried=True)
        opened = self._flow.is_open(flight.body.target)
        return Retry("the circuit breaker opened while it waited for its host", untried=True) if opened else None

    def _refused(self, flight: Flight, now_ms: int) -> Dead | None:
        """Return the outcome of a task that has expired, or that a pause drops."""
        expired = flight.body.expires_ms is not None and flight.body.expires_ms < now_ms
        if expired and not _may_be_with_workers(flight):  # otherwise a worker finds the expiry, if none has run it
            return Dead(EXPIRED)
        # A task begun by a former owner may have been delivered: it goes out again, paused or not.
        if not self._pauses.drops or flight.live.to_redo(flight.index):
            return None
        reason = self._pauses.dropped(flight.body.target, flight.body.lane)
        return None if reason is None else Dead(reason)

    def _wanted(self, flights: list[Flight], now_ms: int) -> list[Flight]:
        """Settle tasks that have expired, or that a pause drops; return the others."""
        if not self._pauses.drops and not any(map(_EXPIRES, flights)):
            return flights
        wanted = []
        for flight in flights:
            if (dead := self._refused(flight, now_ms)) is None:
                wanted.append(flight)
            else:
                self._settle_one(flight, dead, now_ms)
        return wanted

    # -- outcomes -----------------------------------------------------------------------------------------

    def _delivered(self, task: "asyncio.Task[Sequence[Outcome]]", batch: SinkBatch) -> None:
        self.running.discard(task)
        count = len(batch.flights)
        if task.cancelled() and self._given_up:
            self._flow.landed(batch.target, count, 0, 0)
            self.in_flight -= count  # stopping: deliveries without an outcome are repeated later
            return
        error = _error_of(task)
        if error is None:
            done, failed, refused = _tally(task.result())
            self._flow.landed(batch.target, count, done, failed, refused)
            self._settle(batch, task.result(), done)
            return
        self._flow.landed(batch.target, count, 0, count)
        self._settle(batch, [Retry(describe(error), error=error, brief=placed(error))] * count)

    def _settle(self, batch: SinkBatch, outcomes: Sequence[Outcome], done: int = 0) -> None:
        count = len(batch.flights)
        self.in_flight -= count
        self.meters.settled(batch.kind, (self._clock.now_ms() - batch.began_ms) / 1000, done)
        for group in batch.groups:
            self.meters.began_late(batch.kind, group.live, group.flights, batch.began_ms)
        if done == count:
            answers = getattr(self._sinks.get(batch.kind), "keeps_answers", False)
            first = 0
            for group in batch.groups:
                some = slice(first, first + len(group.flights))
                self._done(group, outcomes[some] if answers else (), batch.sent_ms[some])
                first = some.stop
        else:
            for flight, outcome, sent_ms in zip(batch.flights, outcomes, batch.sent_ms, strict=True):
                if isinstance(outcome, Dead) and outcome.disables:
                    self._pauses.disable(flight.body.target, outcome.reason)
                self._settle_one(flight, outcome, sent_ms)
        self.delivered += count

    def _done(self, group: FlightGroup, said: Sequence[Outcome], sent_ms: Sequence[int]) -> None:
        partition = self._owned.get(group.live.partition)
        if partition is None or group.live.forgotten:
            return  # another owner has it, or its slice is read again
        for settled, flights in self._outcomes.done(group, said, sent_ms):
            self._land(partition, settled, flights)

    def _settle_one(self, flight: Flight, outcome: Outcome, sent_ms: int) -> None:
        if isinstance(outcome, Done):
            self._done(FlightGroup(flight.live, [flight], [flight.index]), [outcome], [sent_ms])
            return
        partition = self._owned.get(flight.live.partition)
        if partition is None or flight.live.forgotten:
            return
        if not partition.holds_lease:
            # The next owner delivers it again. A retry placed by a clock that has jumped could be an hour away.
            self._keeper.lose(partition, "its lease ran out before a failed delivery was settled")
            return
        self._land(partition, self._failed(partition, flight, outcome, sent_ms), [flight])

    def _failed(self, partition: Partition, flight: Flight, outcome: Retry | Dead, sent_ms: int) -> Settled:
        try:
            return self._outcomes.failed(partition, flight, outcome, sent_ms)
        except (ValueError, TypeError, OverflowError) as error:
            # The outcome cannot be written. Bury this task, but do not fail the others of its batch.
            log.exception("the outcome of task %s cannot be written", flight.id, extra={"task": flight.id})
            dead = Dead(f"its outcome cannot be written: {describe(error)}")
            return self._outcomes.failed(partition, flight, dead, sent_ms)

    def ended_by_worker(self, flight: Flight, verdict: Verdict, traceback: str = "") -> None:
        """Settle a task that a worker has ended; the worker has already applied the retry policy."""
        partition = self._owned.get(flight.live.partition)
        if partition is None or flight.live.forgotten:
            return
        settled = self._outcomes.ended_by_worker(partition, flight, verdict, traceback)
        self._land(partition, settled._replace(ack=flight.address), [flight])
        self.delivered += 1

    def _land(self, partition: Partition, settled: Settled, flights: Sequence[Flight]) -> None:
        if partition.settle(settled, flights, self._clock.now_ms()):
            self._loops.fire.wake()

    def note(self, partition: Partition) -> None:
        """Bury entries that a begin could not read, and count and record planned times that did not run."""
        damaged, passed = partition.take_notes()
        for one in damaged:
            partition.settle(self._outcomes.bury_damaged(one))
        for definition, slot in passed:
            self.meters.skipped[slot.reason] += slot.count
            if runs := self._outcomes.passed(definition, slot):
                partition.settle(Settled(runs=runs))

    # -- stopping ---------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Give up all deliveries in flight; the next owner repeats them."""
        self._given_up = True
        for task in self.running:
            task.cancel()
