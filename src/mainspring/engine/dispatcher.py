"""Fires what is due: begin at the server, hand to the sinks, commit what they answer."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Final

from ..model.clock import steady_s
from ..model.errors import StoreError
from ..model.outcome import DONE, Dead, Done, Outcome, Retry
from ..model.retry import RetryPolicy
from ..sinks.base import Sink
from ..store import fire
from ..store.store import Store
from .flight import Flight
from .live import INDEX_MASK, LiveSlice
from .outcomes import Outcomes
from .partition import Begun, Partition

log = logging.getLogger("mainspring.engine")

_LIVE: Final = attrgetter("live")
_TARGET: Final = attrgetter("body.target")
_EXPIRES: Final = attrgetter("body.expires_ms")
TICK_TASKS: Final = 8_192
"""Tasks a tick begins at most, over all partitions: their handling blocks the loop for some milliseconds."""

BITE_TASKS: Final = 4_096
"""Tasks a partition begins at most in one tick."""

COMMIT_WAIT_S: Final = 0.05
"""Commits ride with a begin after this long, or go alone when nothing is due: few calls, few repeats at a crash."""


def _well_formed(outcomes: Sequence[Outcome], expected: int) -> bool:
    return len(outcomes) == expected and set(map(type, outcomes)) <= {Done, Retry, Dead}


def _raise_first(failures: Sequence[StoreError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure


class Pace:
    """How long to wait between ticks: the busier, the longer, so that each call has more to carry."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._began = 0.0

    def ticked(self, tasks: int, began: float) -> None:
        elapsed = max(began - self._began, 1e-4)
        self._began = began
        # Over half a second: a single full tick is not yet a load.
        self._rate += (tasks / elapsed - self._rate) * min(1.0, elapsed / 0.5)

    def wait_s(self) -> float:
        """Until the next tick, counted from the start of the last."""
        gap = next(gap for limit, gap in _GAPS_S if self._rate < limit)
        return max(0.0, self._began + gap - time.monotonic())


_GAPS_S: Final = ((2_000.0, 0.001), (30_000.0, 0.002), (150_000.0, 0.005), (inf, 0.010))
"""Up to so many tasks a second, a tick at most every so many seconds."""


class Dispatcher:
    """One tick after the other; deliveries run beside them."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        sinks: Mapping[str, Sink],
        *,
        retry: RetryPolicy,
        lost: Callable[[Partition, str], None],
        wake: Callable[[], None],
        read_again: Callable[[], None],
        room_made: Callable[[], None],
        max_in_flight: int,
    ) -> None:
        self._store = store
        self._owned = owned
        self._sinks = sinks
        self._lost = lost
        self._wake = wake
        self._read_again = read_again
        self._room_made = room_made
        self._outcomes = Outcomes(retry, store.clock)
        self._running: set[asyncio.Task[Sequence[Outcome]]] = set()
        self._max_in_flight = max_in_flight
        self._last_served = -1
        self.in_flight = 0
        self.delivered = 0
        self.pace = Pace()

    # -- one tick ----------------------------------------------------------------------------------

    async def step(self) -> float:
        failures = [await self._resend(), await self._commit_outcomes()]
        fired = await self._tick()
        _raise_first(failures)  # only now: one server that is away must not keep the partitions of the others waiting
        return self._next_wait(fired)

    def _next_wait(self, fired: int) -> float:
        """Seconds until something is due, or a commit has waited long enough."""
        if fired >= TICK_TASKS // 2:
            return 0.0
        wait_s, soonest_ms, dirty_since = 1.0, inf, inf
        for one in self._owned.values():
            if one.has_outcomes:
                wait_s = 0.0
            if not one.closing:
                if one.lanes.stirred:
                    wait_s = 0.0
                soonest_ms = min(soonest_ms, one.soonest_ms)
            dirty_since = min(dirty_since, one.dirty_since)
        if self.in_flight < self._max_in_flight:
            wait_s = min(wait_s, (soonest_ms - self._store.clock.now_ms()) / 1000)
        wait_s = min(wait_s, dirty_since + COMMIT_WAIT_S - time.monotonic())
        return max(wait_s, self.pace.wait_s())

    async def _tick(self) -> int:
        now_ms, now_s = self._store.clock.now_ms(), time.monotonic()
        room = min(TICK_TASKS, self._max_in_flight - self.in_flight)
        all_begun: list[tuple[Partition, Begun]] = []
        for partition in self._in_turn(now_ms, now_s):
            limit = 0 if partition.closing else min(room, BITE_TASKS)
            # A partition with outcomes commits them in one step with their done bits, not here.
            commit = now_s >= partition.dirty_since + COMMIT_WAIT_S and not partition.has_outcomes
            if limit <= 0 and not commit:
                continue
            begun = partition.begin(now_ms, limit, commit=commit)
            self._bury_damaged(partition)
            if begun is not None:
                partition.unanswered = begun
                all_begun.append((partition, begun))
                if begun.flights:
                    room -= len(begun.flights)
                    self._last_served = partition.number
        if not all_begun:
            return 0
        answers = await fire.tick(self._store, [begun.section for _, begun in all_begun])
        flights = self._take_answers(all_begun, answers)
        self.pace.ticked(len(flights), now_s)
        self._deliver(flights)
        self._room_made()
        return len(flights)

    def _in_turn(self, now_ms: int, now_s: float) -> list[Partition]:
        """Partitions with something to do, going on after the one served last.

        In a backlog the first few take all the room, a large bite each: a whole slice at once costs far less per
        task than a little from everybody, and the next tick serves the next ones.
        """
        turn = [
            one
            for one in self._owned.values()
            if one.unanswered is None
            and (
                (not one.closing and (one.soonest_ms <= now_ms or one.lanes.stirred))
                or now_s >= one.dirty_since + COMMIT_WAIT_S
            )
        ]
        first = next((i for i, one in enumerate(turn) if one.number > self._last_served), 0)
        return turn[first:] + turn[:first]

    def _take_answers(
        self, all_begun: list[tuple[Partition, Begun]], answers: Sequence[fire.Answer | StoreError]
    ) -> list[Flight]:
        flights: list[Flight] = []
        failure: StoreError | None = None
        for (partition, begun), answer in zip(all_begun, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
            else:
                partition.unanswered = None
                flights += self._take_answer(partition, begun, answer)
        if failure is not None:
            self._deliver(flights)
            raise failure
        return flights

    def _take_answer(self, partition: Partition, begun: Begun, answer: fire.Answer) -> Sequence[Flight]:
        match answer.status:
            case "ok":
                partition.blocked_ms = -1
                leaving = partition.begun(begun, answer.x)
                if steady_s() >= partition.lease_until:
                    # Fired, but the lease ran out while we waited: the next owner delivers these.
                    self._lost(partition, "its lease ran out before the send")
                    return ()
                return leaving
            case "early":
                partition.take_back(begun)
            case "more":
                partition.take_back(begun)
                partition.block(begun.section.max_due_ms or 0)
                self._read_again()
            case "stale":
                for live in begun.touched:
                    partition.forget(live)
                self._read_again()
                log.warning("partition %d: a slice is not the one that was read; reading again", partition.number)
            case status:
                self._lost(partition, status)
        return ()

    async def _resend(self) -> StoreError | None:
        """Repeat, unchanged, what was sent and never answered: the server knows by its number if it was done."""
        failure = None
        sent = [(one, one.unanswered) for one in self._owned.values() if one.unanswered is not None]
        begun = [(partition, work) for partition, work in sent if isinstance(work, Begun)]
        try:
            if begun:
                answers = await fire.tick(self._store, [work.section for _, work in begun])
                self._deliver(self._take_answers(begun, answers))
        except StoreError as error:
            failure = error
        for partition, work in sent:
            if not isinstance(work, Begun):
                failure = await self._try_commit(partition, work) or failure
        return failure

    # -- deliveries ---------------------------------------------------------------------------------

    def _deliver(self, flights: list[Flight]) -> None:
        if any(map(_EXPIRES, flights)):
            flights = self._without_expired(flights)
        by_target: dict[str, list[Flight]] = {}
        if len(set(map(_TARGET, flights))) == 1:
            by_target[flights[0].body.target] = flights
        else:
            for flight in flights:
                by_target.setdefault(flight.body.target, []).append(flight)
        for target, group in by_target.items():
            sink = self._sinks.get(target.partition(":")[0])
            self.in_flight += len(group)
            if sink is None:
                self._settle(group, [Retry(f"no sink for {target.partition(':')[0]}: on this node")] * len(group))
                continue
            most = getattr(sink, "batch_tasks", len(group))
            for first in range(0, len(group), most):
                self._hand_over(sink, group[first : first + most])

    def _hand_over(self, sink: Sink, group: list[Flight]) -> None:
        task: asyncio.Task[Sequence[Outcome]] = asyncio.ensure_future(sink.deliver(group))
        self._running.add(task)
        task.add_done_callback(lambda task: self._delivered(task, group))

    def _without_expired(self, flights: list[Flight]) -> list[Flight]:
        now_ms = self._store.clock.now_ms()
        in_time = []
        for flight in flights:
            if flight.body.expires_ms is not None and flight.body.expires_ms < now_ms:
                self._settle_one(flight, Dead("expired"))
            else:
                in_time.append(flight)
        return in_time

    def _delivered(self, task: "asyncio.Task[Sequence[Outcome]]", group: list[Flight]) -> None:
        self._running.discard(task)
        if task.cancelled():
            self.in_flight -= len(group)  # stopping: what was not answered is delivered again later
            return
        error = task.exception()
        if error is None and _well_formed(task.result(), len(group)):
            self._settle(group, task.result())
            return
        reason = f"{type(error).__name__}: {error}" if error else "the sink did not give one outcome for each task"
        log.error("delivery to %s failed: %s", group[0].body.target, reason, exc_info=error)
        self._settle(group, [Retry(reason)] * len(group))

    def _settle(self, group: list[Flight], outcomes: Sequence[Outcome]) -> None:
        self.in_flight -= len(group)
        if outcomes.count(DONE) == len(outcomes):
            for live, run in groupby(group, _LIVE):
                if live.has_lanes:
                    for flight in run:
                        self._settle_one(flight, DONE)
                else:
                    landed = list(run)
                    live.land(len(landed), (flight.key & INDEX_MASK for flight in landed))
                    live.finished += len(landed)
                    self._note_settled(live)
        else:
            for flight, outcome in zip(group, outcomes, strict=True):
                self._settle_one(flight, outcome)
        self.delivered += len(group)

    def _note_settled(self, live: LiveSlice) -> None:
        partition = self._owned.get(live.partition)
        if partition is not None and not live.forgotten:
            if not partition.dirty:
                self._wake()
            partition.settled(live, time.monotonic())

    def _settle_one(self, flight: Flight, outcome: Outcome) -> None:
        partition = self._owned.get(flight.live.partition)
        if partition is None or flight.live.forgotten:
            return  # another owner has it, or it is read anew: not ours to finish
        goes_on = True
        match outcome:
            case Done():
                flight.live.finished += 1
            case Retry() | Dead():
                goes_on = self._outcomes.apply(partition, flight, outcome)
        flight.live.land(1, [flight.index])
        partition.settled(flight.live, time.monotonic())
        if goes_on:
            partition.lane_goes_on(flight)
        self._wake()

    def _bury_damaged(self, partition: Partition) -> None:
        for damaged in partition.damaged:
            self._outcomes.bury_damaged(partition, damaged)
            damaged.live.settle_many([damaged.index])
            partition.settled(damaged.live, time.monotonic())
            log.error(
                "partition %d: an entry cannot be read (%s); see the dead letters",
                partition.number,
                damaged.reason,
            )
        partition.damaged = []

    # -- commits -------------------------------------------------------------------------------------

    async def _commit_outcomes(self) -> StoreError | None:
        failure = None
        for partition in list(self._owned.values()):
            while partition.has_outcomes and partition.unanswered is None:
                failure = await self._try_commit(partition, partition.commit()) or failure
        return failure

    async def _try_commit(self, partition: Partition, work: fire.Commit) -> StoreError | None:
        try:
            await self._send_commit(partition, work)
        except StoreError as error:
            return error
        return None

    async def _send_commit(self, partition: Partition, work: fire.Commit) -> None:
        partition.unanswered = work
        status = await fire.commit(self._store, work)
        partition.unanswered = None
        if status == "ok":
            partition.committed(work)
            if work.retries:
                partition.needs_listing = True
                self._read_again()
        elif status == "stale":
            touched = {touch.name for touch in work.touches}
            for live in [live for live in partition.slices.values() if live.name in touched]:
                partition.forget(live)
            self._read_again()
        else:
            self._lost(partition, status)

    # -- stopping ---------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait for what is in flight and commit it. Nothing new begins: the caller stopped the loop before."""
        # What was begun and not answered when the loop stopped may be fired on the server: it goes out as well.
        _raise_first([await self._resend()])
        while self._running or any(one.dirty or one.has_outcomes for one in self._owned.values()):
            if self._running:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            await self.flush()

    async def flush(self) -> None:
        """Commit everything that is finished."""
        _raise_first([await self._resend(), await self._commit_outcomes()])
        sections = []
        for partition in self._owned.values():
            begun = partition.begin(-1, 0, commit=True) if partition.dirty and partition.unanswered is None else None
            if begun is not None:
                partition.unanswered = begun
                sections.append((partition, begun))
        if sections:
            answers = await fire.tick(self._store, [begun.section for _, begun in sections])
            self._take_answers(sections, answers)

    def cancel(self) -> None:
        """Give up what is in flight; the next owner delivers it again."""
        for task in self._running:
            task.cancel()
