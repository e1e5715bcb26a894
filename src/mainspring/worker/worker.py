"""A worker: takes jobs from queues by their weights, runs them, and reports to the server how they ended."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .. import __version__
from ..model.clock import steady_s
from ..model.delivery import ErrorHandler
from ..model.errors import InvalidInput, StoreError
from ..model.flow import Limit
from ..model.job import Job
from ..model.lane import LanePolicy, Pauses
from ..model.retry import RetryPolicy
from ..model.run import HistoryRules
from ..model.text import describe
from ..model.workers import MOST_TARGETS, WorkerInfo
from ..roles import Failures, Loop
from ..store import job_queue
from ..store.lanes import read_pauses
from ..store.redis.servers import Subscription
from ..store.store import Store
from .executor import Executor, JobRun
from .finisher import Finisher
from .handler import Registry
from .leases import ConcurrencyLeases, Heartbeat, Presence, Reclaimer

log = logging.getLogger("mainspring.worker")


PROBE: Final = 8
"""Divisor of the room: the share that an empty queue is asked for."""

MOST_OWED: Final = 64.0
"""Most jobs that a queue may be owed, or owe, because the partitions asked had none."""

AT_ONCE: Final = 4
"""Partitions asked in one round under load: a few large bites cost the server less than many small ones."""


class ReadyQueues:
    """The partitions worth asking for jobs of each queue, and how queues share the room: by weight.

    Room that a queue does not use goes to the others.
    """

    def __init__(self, weights: Mapping[str, int], partitions: int, *, strict: bool = False) -> None:
        self._weights = dict(weights)
        self._partitions = partitions
        self._strict = strict
        self._where: dict[str, set[int]] = {queue: set() for queue in weights}
        self._full: set[tuple[int, str]] = set()
        """Partitions and queues that returned as many jobs as requested, so there are more."""
        self._again: set[tuple[int, str]] = set()
        """Partitions and queues announced while they were being asked."""
        self._dry: set[str] = set()
        """Queues of which every partition asked had nothing, until a message names them."""
        self._owed = dict.fromkeys(weights, 0.0)
        self._round = 0
        self._last = -1

    @property
    def queues(self) -> list[str]:
        """Queues that may have jobs somewhere."""
        return [queue for queue, where in self._where.items() if where]

    def add(self, partition: int, queues: Iterable[str] = ()) -> None:
        """Note a partition that has jobs of these queues; without their names, that may have some of any."""
        named = set(queues)
        self._dry -= named
        for queue in self._where.keys() & named if named else self._where:
            self._where[queue].add(partition)
            self._again.add((partition, queue))

    def add_all(self) -> None:
        for partition in range(self._partitions):
            self.add(partition)

    def split(self, room: int, queues: Iterable[str]) -> dict[str, int]:
        """Return how many jobs to ask of each of these queues that may have some."""
        names = [name for name in self.queues if name in set(queues)]
        if not names or room < 1:
            return {}
        if self._strict:
            return {names[0]: room}
        full = [name for name in names if name not in self._dry] or names
        asks = self._probes(room, [name for name in names if name not in full])
        left = room - sum(asks.values())
        return asks | (self._by_weight(left, full) if left else {})

    def _probes(self, room: int, dry: list[str]) -> dict[str, int]:
        """Ask an empty queue for a little: enough to notice when it fills, without delaying the others."""
        self._round += 1
        most = room // PROBE or (1 if self._round % PROBE == 0 else 0)
        fit = room // most if most else 0
        first = self._round % len(dry) if dry else 0
        return dict.fromkeys((dry[first:] + dry[:first])[:fit], most)

    def _by_weight(self, room: int, names: list[str]) -> dict[str, int]:
        total = sum(self._weights[name] for name in names)
        due = {name: max(0.0, self._owed[name] + room * self._weights[name] / total) for name in names}
        # Claims of earlier rounds may add up to more than the room.
        scale = room / max(room, sum(due.values()))
        asks = {name: int(share * scale) for name, share in due.items()}
        spare = room - sum(asks.values())
        for name in sorted(names, key=lambda one: asks[one] - due[one] * scale)[:spare]:
            asks[name] += 1
        return {name: most for name, most in asks.items() if most}

    def asks(self, shares: Mapping[str, int]) -> dict[int, dict[str, int]]:
        """Spread the shares over partitions, beginning with the next in turn."""
        self._again.clear()
        found: dict[int, dict[str, int]] = {}
        first = None
        for queue, most in shares.items():
            turn = self._turn(queue, most)
            for i, partition in enumerate(turn):
                found.setdefault(partition, {})[queue] = most // len(turn) + (i < most % len(turn))
            if turn and first is None:
                first = turn[0]
        self._last = self._last if first is None else first
        return found

    def _turn(self, queue: str, most: int) -> list[int]:
        """Return the partitions to ask now: the next in turn and a few full ones, or those that sent a message."""
        turn = sorted(self._where[queue], key=lambda p: (p <= self._last, p))
        full = [partition for partition in turn[1:] if (partition, queue) in self._full]
        if not full:
            return turn[:most]
        return [*turn[:1], *full[: AT_ONCE - 1]][:most]

    def came(self, asks: Mapping[int, Mapping[str, int]], places: Iterable[tuple[int, str]]) -> None:
        """Record the places, partition and queue, of the jobs that a round brought.

        A partition that returned fewer than requested is empty, unless a message came since. A queue that got less than
        its share keeps its claim while it has partitions left to ask. Room that no queue used counts for none.
        """
        counts = Counter(places)
        asked = {(partition, queue): most for partition, shares in asks.items() for queue, most in shares.items()}
        for place, most in asked.items():
            if counts[place] >= most:
                self._full.add(place)
                continue
            self._full.discard(place)
            if place not in self._again:
                self._where[place[1]].discard(place[0])
        got = Counter({queue: 0 for _, queue in asked})
        for (_, queue), count in counts.items():
            got[queue] += count
        self._settle(got)

    def _settle(self, got: Counter[str]) -> None:
        """Note what each queue is owed now: its part of all jobs that came, less those it got."""
        full = [name for name in self.queues if name not in self._dry]
        total, came = sum(self._weights[name] for name in full), sum(got[name] for name in full)
        for name in full:
            owed = self._owed[name] + came * self._weights[name] / total - got[name]
            self._owed[name] = max(-MOST_OWED, min(owed, MOST_OWED))
        for name, count in got.items():
            if count:
                self._dry.discard(name)
            elif not self._where[name]:
                self._dry.add(name)
                self._owed[name] = 0.0


def interleaved(jobs: Sequence[Job]) -> Sequence[Job]:
    """Mix the queues of jobs that were taken together, each in its order: no queue must begin before all others."""
    counts = Counter(job.queue for job in jobs)
    if len(counts) < 2:
        return jobs
    seen: Counter[str] = Counter()

    def place(job: Job) -> float:
        seen[job.queue] += 1
        return (seen[job.queue] - 0.5) / counts[job.queue]

    return sorted(jobs, key=place)


POLL_S: Final = 1.0
"""Seconds between polls of all partitions: a message may be lost."""

FULL_S: Final = 0.25
"""Seconds to wait for room; usually the role is woken earlier."""

MOST_UNSENT: Final = 4_000
"""Ended but unreported jobs from which no more are taken."""

BUSY: Final = 2_000.0
"""Rate of jobs per second from which jobs are taken several at a time."""


TURN_S: Final = 0.002
"""How much earlier a worker answers a message than the next in turn: more than a call to the server takes."""

MOST_TURNS: Final = 2
"""Most turns a worker waits, even if more workers received the message: they may serve other queues."""


class Taker:
    """Takes jobs, round after round, while there are jobs and room."""

    def __init__(self, worker: "Worker") -> None:
        self._worker, self._store = worker, worker.store
        self._executor, self._slots = worker.executor, worker.slots
        self.ready = ReadyQueues(worker.options.queues, len(worker.store.keys), strict=worker.options.strict)
        self._polled_at = 0.0
        self._pauses = Pauses()
        self._took = False
        """True if the last message, or a poll since, brought a job."""
        self._turn = 0
        self.waits_for_room = False
        """True while the role waits to be woken when there is room."""

    @property
    def room(self) -> int:
        # While ends cannot be reported to the server, start no more jobs: they would pile up here.
        return self._executor.room if len(self._worker.finisher.unsent) < MOST_UNSENT else 0

    @property
    def worthwhile(self) -> bool:
        """Return whether there is room enough for a round. Under load a round waits for more room."""
        room = self.room
        return room >= 1 and (self._executor.rate < BUSY or room >= self._executor.concurrency // 2)

    def turn_s(self, listening: int) -> float:
        """Return how long to wait before answering a message that so many workers have received.

        The server notifies them in the same order each time: without turns the first would get nearly every task of a
        trickle. A worker that took a task goes to the end, and moves up with each message that others answered.
        """
        self._turn = listening - 1 if self._took else max(0, min(self._turn, listening) - 1)
        self._took = False
        return min(self._turn, MOST_TURNS) * TURN_S

    async def step(self) -> float:
        self.waits_for_room = not self.worthwhile
        if self.waits_for_room:
            return FULL_S
        now = time.monotonic()
        if now >= self._polled_at + POLL_S:
            self._pauses = Pauses(await read_pauses(self._store), self._store.clock.now_ms())
            self.ready.add_all()
            self._polled_at = now
        having = [queue for queue in self.ready.queues if self._pauses.of_queue(queue) is None]
        wanted = self.ready.split(self.room, [queue for queue in having if not self._slots.full(queue)])
        async with self._slots.within(wanted) as shares:
            if asks := self.ready.asks(shares):
                await self._take(asks)
                return 0.0
        # Slots also become free on other workers, without a message.
        wait_s = max(0.0, self._polled_at + POLL_S - now)
        return min(wait_s, max(0.01, self._slots.wait_s(having))) if having else wait_s

    async def _take(self, asks: job_queue.Asks) -> None:
        asked = steady_s()
        jobs = await job_queue.take(self._store, self._worker.options.name, asks, self._worker.finisher)
        self._executor.add(interleaved(jobs), asked)
        self._took = self._took or bool(jobs)
        self.ready.came(asks, ((job.partition, job.queue) for job in jobs))


LAST_WORD_S: Final = 1.0
"""Seconds for the last call to a server that may be unavailable."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    name: str
    queues: Mapping[str, int]
    """Weights by name; with `strict`, only their order counts."""
    strict: bool = False
    concurrency: int = 64
    lease_s: float = 5.0
    shutdown_timeout_s: float = 25.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    error_handler: ErrorHandler | None = None
    log_redact: bool = False
    slots: Mapping[str, Limit] = field(default_factory=dict)
    """Most jobs of a queue that may run at once, on all workers together."""
    queue_retries: Mapping[str, RetryPolicy] = field(default_factory=dict)
    """By queue; for handlers without a policy of their own."""
    lane_policy: LanePolicy = field(default_factory=LanePolicy)
    """The nodes' lane policy: a task whose failure parks its lane is not over for a worker."""
    queue_lanes: Mapping[str, LanePolicy] = field(default_factory=dict)
    """The nodes' lane policies by queue; they precede `lane_policy`."""
    history: HistoryRules = HistoryRules()  # noqa: RUF009  # frozen
    """Which runs the history keeps."""

    def __post_init__(self) -> None:
        if not self.queues:
            raise InvalidInput("a worker needs queues to serve; name at least one")
        if self.concurrency < 1:
            raise InvalidInput(f"concurrency is {self.concurrency}; it must be at least 1")


class Worker:
    """The roles of a worker over one set of running jobs. Made and used within a running event loop."""

    def __init__(self, store: Store, registry: Registry, options: WorkerOptions) -> None:
        self.store, self.registry, self.options = store, registry, options
        self.failures = Failures(options.error_handler, redacted=options.log_redact)
        self.finisher = Finisher(self)
        self.executor = Executor(self)
        self.slots = ConcurrencyLeases(self)
        self.taker = Taker(self)
        self.heartbeat = Heartbeat(self)
        self.reclaimer = Reclaimer(self)
        self.presence = Presence(self)
        self._started_ms = store.clock.now_ms()
        self._take = Loop("worker: take", self.taker.step, max_backoff_s=0.5)
        self._end = Loop("worker: end", self.finisher.step, max_backoff_s=0.5)
        self._beat = Loop("worker: beat", self.heartbeat.beat, max_backoff_s=options.lease_s / 4)
        self._reclaim = Loop("worker: reclaim", self.reclaimer.step)
        self._watch = Loop("worker: watch", self.executor.watch)
        self._keep = Loop("worker: slots", self.slots.keep, max_backoff_s=options.lease_s / 4)
        self._present = Loop("worker: presence", self.presence.step, max_backoff_s=options.lease_s / 4)
        self._loops = (
            self._take, self._end, self._beat, self._reclaim, self._watch, self._keep, self._present,
        )  # fmt: skip
        self._subscription: Subscription | None = None
        self._answer: asyncio.TimerHandle | None = None
        """The pending answer to a message that other workers have received too."""
        self._idle = asyncio.Event()
        self.stopping = False
        kinds = {work.target.partition(":")[0] for work in registry}
        self.finisher.meters.expect(frozenset(kinds))

    # -- queries -----------------------------------------------------------------------------

    @property
    def crashed(self) -> BaseException | None:
        return next((error for loop in self._loops if (error := loop.crashed) is not None), None)

    @property
    def healthy(self) -> bool:
        roles_well = self.crashed is None and not any(loop.failures for loop in self._loops)
        return roles_well and self.finisher.broken is None

    def describe(self) -> WorkerInfo:
        options = self.options
        targets = sorted(work.target for work in self.registry if work.queue in options.queues)
        return WorkerInfo(
            id=options.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            queues=dict(options.queues),
            strict=options.strict,
            targets=tuple(targets[:MOST_TARGETS]),
            targets_left_out=max(0, len(targets) - MOST_TARGETS),
            concurrency=options.concurrency,
            running=len(self.executor.runs),
            stopping=self.stopping,
            started_ms=self._started_ms,
            lease_ms=int(options.lease_s * 1000),
        )

    # -- start and stop --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        channels = {keys.work: keys.number for keys in self.store.keys.partitions}
        self._subscription = await self.store.servers.all()[0].subscribe(
            list(channels),
            on_message=lambda channel, message: self.heard(channels[channel], message),
            on_connect=self._reconnected,
        )
        with contextlib.suppress(StoreError):  # the loop tries again
            await self.presence.step()  # once started, the worker must be in the list
        for loop in self._loops:
            loop.start()

    async def stop(self) -> bool:
        """Finish running jobs and return the others. Return True if no run was cancelled."""
        self.stopping = True
        self._present.wake()
        # Not in the middle of a call: jobs that the server has just handed out would wait here for a lease.
        await asyncio.gather(self._take.finish(LAST_WORD_S), self._reclaim.finish(LAST_WORD_S))
        self.finisher.put_back(self.executor.take_back())
        await self._hand_back()
        clean = await self._finished_in_time()
        if not clean:
            log.warning("%d runs are cancelled: shutdown_timeout is over; they run again", len(self.executor.runs))
        await self.executor.close()
        for loop in (self._watch, self._beat, self._keep, self._present):
            await loop.stop()
        await self._end.finish(LAST_WORD_S)  # reported twice, an end would look like another worker's
        await self._in_time(self._report_rest(), "ended jobs could not be reported; they run again")
        await self._hand_back()
        await self._in_time(self.slots.release(), "slots could not be given back; they are free when the lease expires")
        await self._in_time(self.presence.leave(), "could not sign off; listed until the lease expires")
        await self.failures.aclose()
        if self._subscription is not None:
            await self._subscription.close()
        return clean

    async def _finished_in_time(self) -> bool:
        try:
            async with asyncio.timeout(self.options.shutdown_timeout_s):
                while self.executor.runs:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _report_rest(self) -> None:
        while self.finisher.unsent:
            await self.finisher.step()

    async def _hand_back(self) -> None:
        failed = "jobs could not be given back; other workers get them when the lease expires"
        await self._in_time(self.finisher.give_back(), failed)

    async def _in_time(self, call: Coroutine[Any, Any, None], failed: str) -> None:
        """Make one of the last calls to a server that may be unavailable."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await call
        except (StoreError, TimeoutError) as error:
            log.warning("%s (%s)", failed, describe(error))

    # -- signals between the roles -----------------------------------------------------------------------

    def heard(self, partition: int, message: bytes) -> None:
        listening, *queues = message.decode(errors="replace").split(" ")
        self.taker.ready.add(partition, queues)
        if queues and self.options.queues.keys().isdisjoint(queues):
            return
        wait_s = self.taker.turn_s(int(listening) if listening.isdigit() else 1)
        if not wait_s:
            self._take.wake()
        elif self._answer is None:
            self._answer = asyncio.get_running_loop().call_later(wait_s, self._answer_call)
        if self.executor.runs and not queues:  # perhaps one of them is to be cancelled
            self.heartbeat.called()
            self._beat.wake()

    def _answer_call(self) -> None:
        self._answer = None
        self._take.wake()

    def _reconnected(self) -> None:
        self.taker.ready.add_all()
        self._take.wake()

    def wake_finisher(self) -> None:
        self._end.wake()

    def ended(self, run: JobRun) -> None:
        self.finisher.add(run)
        self.freed(run)
        if not self.executor.runs:
            self._idle.set()

    def freed(self, run: JobRun) -> None:
        """Look for jobs: a place, and a slot of this run's queue, may be free."""
        if self.taker.waits_for_room and self.taker.worthwhile:
            self._take.wake()
        if run.job.queue in self.slots.kept:
            self._reclaim.wake()


@contextlib.asynccontextmanager
async def working(store: Store, registry: Registry, options: WorkerOptions) -> AsyncIterator[Worker]:
    """Run a worker within the block."""
    worker = Worker(store, registry, options)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
