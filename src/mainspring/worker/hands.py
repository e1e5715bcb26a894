"""The jobs this worker has in hand: starts them, watches their time, stops them."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import inf
from typing import Any, Final

from ..model.clock import Clock
from ..model.job import Job
from ..model.outcome import Dead, Outcome, Retry
from .context import CURRENT
from .crew import Crew
from .memory import Memory
from .process import kill_all
from .registry import Registry
from .run import Run, Stop
from .threads import Threads

log = logging.getLogger("mainspring.worker")

WATCH_S: Final = 0.05
"""How exactly timeouts are kept: one look at all runs, and nothing to set up for each."""

AHEAD_S: Final = 0.1
"""Jobs are taken so long before a place for them is free, by the rate at which they end."""

STALL_S: Final = 1.0
"""A loop that stands still for longer endangers the leases of all jobs here."""

SURPLUS_S: Final = 1.0
"""What was taken and not begun for so long is given back: another worker may be free."""

CLOSE_S: Final = 1.0
"""For what was told to end at a stop."""

MOST_AHEAD: Final = 2_000
MOST_DELIVERIES: Final = 5
"""A job that was taken more often has ended every worker that touched it."""


class Hands:
    """Coroutines go to the crew, everything else to threads; both share one bound."""

    def __init__(
        self,
        registry: Registry,
        namespace: str,
        clock: Clock,
        *,
        concurrency: int,
        lease_s: float,
        memory: Memory | None = None,
        ended: Callable[[Run], None],
        refused: Callable[[Job, Outcome], None],
        returned: Callable[[list[Run]], None],
        freed: Callable[[Run], None],
    ) -> None:
        self._registry = registry
        self._namespace = namespace
        self._clock = clock
        self.concurrency = concurrency
        self._lease_s = lease_s
        self._memory = memory
        self._ended = ended
        self._refused = refused
        self._returned = returned
        self._freed = freed
        self._crew = Crew(concurrency, clock.now_ms, self._over)
        self._threads = Threads(concurrency, clock.now_ms, self._over)
        self.runs: set[Run] = set()
        self._stuck: set[Run] = set()
        """Their time is over, and their threads are not free: nothing can end a thread."""
        self.ended = 0
        self._counted = (0, time.monotonic())
        self.rate = 0.0
        """Jobs that end in a second."""

    @property
    def room(self) -> int:
        """Jobs that may be taken now."""
        ahead = min(MOST_AHEAD, int(self.rate * AHEAD_S))
        return self.concurrency + ahead - len(self.runs) - len(self._stuck)

    @property
    def queues(self) -> Iterator[str]:
        """Of all that runs here, one for each: also of what does not count any more, and goes on."""
        return (run.job.queue for run in chain(self.runs, self._stuck))

    @property
    def inside(self) -> bool:
        """Whether the caller is a run in hand: it cannot wait until there is none. Asked from any thread."""
        context, task = CURRENT.get(None), _task_here()
        # A task that a handler has started has its context too, and may outlive it.
        return any(run.context is context and task in (None, run.task) for run in list(self.runs))

    def add(self, jobs: Iterable[Job], asked: float) -> None:
        """`asked` is when the server was asked for them (`steady_s`): their leases did not begin before."""
        now, begin_by = time.monotonic(), asked + self._lease_s
        for job in jobs:
            work = self._registry.find(job.body.target)
            if job.deliveries > MOST_DELIVERIES:
                self._refused(job, Dead(f"the workers that ran it died, {job.deliveries - 1} times in a row"))
            elif work is None:
                self._refused(job, Retry(f"this worker does not know {job.body.target}"))
            else:
                run = Run(job, work, self._namespace, now, self._memory, begin_by=begin_by)
                self.runs.add(run)
                (self._crew if work.is_async else self._threads).add(run)

    # -- ending ------------------------------------------------------------------------------------------

    def _over(self, run: Run) -> None:
        """The function has returned."""
        if run in self._stuck:
            self._stuck.discard(run)
            self._freed(run)
        if not run.over:
            self._conclude(run)

    def _conclude(self, run: Run) -> None:
        run.over = True
        self.runs.discard(run)
        self.ended += 1
        self._ended(run)

    def stop_run(self, run: Run, why: Stop) -> None:
        """Tell a run to end. What cannot be stopped is left alone, and its answer will not count."""
        if run.over or run.stopped is not None:
            return
        run.stopped = why
        run.context.cancelled = True
        if run.task is not None:
            run.task.cancel()
        elif not run.started or not run.work.obeys:
            if run.started and not run.work.is_async:
                self._stuck.add(run)
                log.warning(
                    "%s: %s, and its thread cannot be ended: it keeps its place, and its slot of the queue, until it"
                    " returns",
                    run.job.id,
                    why,
                )
            run.outcome = run.late()
            self._conclude(run)

    # -- time --------------------------------------------------------------------------------------------

    async def watch(self) -> float:
        """One look at the clock for all runs; a role of its own loop."""
        now = time.monotonic()
        for run in [run for run in self.runs if run.deadline <= now]:
            expires_ms = run.job.body.expires_ms
            past = expires_ms is not None and self._clock.now_ms() >= expires_ms
            self.stop_run(run, "expired" if past else "timeout")
        ended, since = self._counted
        if now > since + STALL_S:
            log.warning(
                "the event loop stood still for %.1f s: a coroutine handler blocks it, or the machine is overloaded. "
                "Make what blocks a plain function: it then runs in a thread",
                now - since,
            )
        self.rate += ((self.ended - ended) / max(now - since, 1e-3) - self.rate) / 2
        self._counted = (self.ended, now)
        if any(not run.started and run.taken < now - SURPLUS_S for run in self.runs):
            # Jobs have become longer than those before: what was taken ahead for them is in the wrong place.
            self._returned(self.take_back())
        return WATCH_S

    def taken_before(self, then: float) -> list[Run]:
        return [run for run in self.runs if run.taken < then]

    # -- stopping ----------------------------------------------------------------------------------------

    def take_back(self) -> list[Run]:
        """What was not begun: others may have it."""
        left = [run for run in (*self._crew.take_back(), *self._threads.take_back()) if not run.over]
        for run in left:
            run.over = True
            self.runs.discard(run)
        return left

    async def close(self) -> None:
        """Let go of everything: coroutines are cancelled, commands ended, threads left to themselves."""
        for run in list(self.runs):
            run.deadline = inf
            self.stop_run(run, "stopping")
        await self._crew.stop(CLOSE_S)
        try:
            async with asyncio.timeout(CLOSE_S):
                while self.runs:  # noqa: ASYNC110  # commands that were asked to end
                    await asyncio.sleep(WATCH_S)
        except TimeoutError:
            kill_all()
        for run in list(self.runs):
            run.outcome = run.late()
            self._conclude(run)
        self._threads.stop()


def _task_here() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None
