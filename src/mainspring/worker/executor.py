"""Runs jobs, each from taken to ended: as a coroutine, in a thread, or as a program."""

import asyncio
import contextlib
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context as Variables
from contextvars import copy_context
from itertools import chain
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal

from ..model.clock import Clock, steady_s
from ..model.delivery import DONE, DROPPED, EXPIRED, EXPIRED_RUNNING, Dead, Done, Outcome, Retry, as_ours, has_expired
from ..model.errors import InvalidInput
from ..model.job import Job, Output
from ..model.text import describe, did_you_mean, placed
from .command import kill_all
from .context import CURRENT, Context, Memory
from .handler import Outputs, Registry, Work, WrongArguments

log = logging.getLogger("mainspring.worker")


Stop = Literal["timeout", "expired", "cancelled", "lost", "stale", "stopping"]
"""Why a run is stopped before it is done."""

_REASONS: Final = {"timeout": "timed out after {:g} s", "expired": EXPIRED_RUNNING}


_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple})


def _never_ran(value: Any) -> bool:
    """Work that was only made, and not done: what a function returned that should have been awaited or walked over."""
    if inspect.iscoroutine(value):
        value.close()  # else Python complains at the collection
    return inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value)


def end_if_forked(pid: int) -> None:
    """A handler that forks and lets the child come back would make a second worker on the same connections."""
    if os.getpid() != pid:
        os._exit(1)


class _TooLate(Exception):
    """The run was stopped, or its expiry or lease passed, while it waited for its turn."""


class JobRun:
    """One run of a job: started once, over once. What its handler does after that is ignored."""

    __slots__ = (
        "begin_by",
        "context",
        "deadline",
        "job",
        "outcome",
        "output",
        "over",
        "started",
        "stopped",
        "taken",
        "task",
        "timeout_s",
        "value",
        "work",
    )

    def __init__(
        self, job: Job, work: Work, namespace: str, taken: float, memory: Memory | None = None, *, begin_by: float = inf
    ) -> None:
        self.job = job
        self.taken = taken
        self.begin_by = begin_by
        """Until then (by `steady_s`) no other worker can have the job, even if this process was suspended."""
        self.work = work
        self.context = Context(namespace, job, memory)
        self.started = 0.0
        own_ms = job.body.timeout_ms
        self.timeout_s = work.timeout_s if own_ms is None else own_ms / 1000
        """The task's own goes before its handler's."""
        self.deadline = inf
        self.stopped: Stop | None = None
        self.task: asyncio.Task[None] | None = None
        """Where a coroutine runs now."""
        self.over = False
        self.outcome: Outcome = DONE
        self.value: Any = None
        self.output: Output | None = None

    def start(self, now_ms: Callable[[], int]) -> dict[str, Any]:
        """Arguments for the function; from here on its time counts."""
        self.started = started = time.monotonic()
        if self.stopped is not None:
            # Checked after `started` is set, as `stop_run` checks `started` after setting `stopped`: one of the two
            # sees the other. Otherwise the run would continue after it was recorded as ended, uncounted.
            raise _TooLate
        if steady_s() > self.begin_by:
            # This process, or the machine, was suspended. Another worker may have finished the job by now, and the next
            # job of its lane may be running.
            self.stopped = "stale"
            raise _TooLate
        if self.timeout_s is not None:
            self.deadline = started + self.timeout_s
        if self.job.body.expires_ms is not None:
            left_ms = self.job.body.expires_ms - now_ms()
            if left_ms < 0:
                raise _TooLate
            self.deadline = min(self.deadline, started + left_ms / 1000)
        return self.work.read(self.context)

    def answered(self, value: Any) -> None:
        """The function returned."""
        if isinstance(value, Output):
            self.output = value
            if self.stopped is not None:
                # Told to end, it did: that it said so with 0 does not mean that its work is done.
                self.outcome = self.late()
        elif self.stopped in ("timeout", "expired"):
            self.outcome = self.late()  # it was cancelled, and swallowed that
        elif isinstance(value, Done):
            self.outcome = value
        elif isinstance(value, (Retry, Dead)):
            self._said(value, f"{type(value).__name__}, returned by its handler")
        elif type(value) not in _PLAIN and _never_ran(value):
            kind = type(value).__name__
            self.failed(TypeError(f"the handler returned a {kind}, which nobody runs; declare it with async def"))
        else:
            self.value = value

    def failed(self, error: BaseException) -> None:
        """Record that the function raised, also if the exception itself cannot be read."""
        try:
            self._failed(error)
        except Exception as second:  # noqa: BLE001  # properties of an application's exception run its code
            reason = f"{type(error).__name__}, which cannot be read: {describe(second)}"
            self.outcome = Retry(reason, error=second, brief=placed(error))

    def _failed(self, error: BaseException) -> None:
        """Turn an exception into an outcome. If the run was stopped, only that counts."""
        if isinstance(error, Outputs):
            self.output = error.output
        if self.stopped is not None:
            self.outcome = self.late()
        elif isinstance(error, _TooLate):
            self.outcome = Dead(EXPIRED)
        elif isinstance(error, Outputs):
            self.outcome = Retry(str(error), brief=error.brief)
        elif isinstance(error, (Retry, Dead)):
            self._said(error, placed(error))
        elif isinstance(error, WrongArguments):
            self.outcome = Dead(str(error), brief=f"its payload does not fit {self.job.body.target}")
        else:
            self.outcome = Retry(describe(error), error=error, brief=placed(error))

    def _said(self, outcome: Retry | Dead, brief: str) -> None:
        """Take the outcome that the handler chose."""
        try:
            self.outcome = made = as_ours(outcome)
        except InvalidInput as error:
            self.outcome = Retry(describe(error), error=error, brief=brief)
        else:
            made.brief = brief if made.brief is None else made.brief
            if has_expired(made.reason) or made.reason.startswith(DROPPED):
                made.reason = f"its handler says: {made.reason}"  # the bare words mean that it was not even run

    def late(self) -> Retry | Dead:
        """The outcome of a run that was stopped."""
        why = self.stopped or "timeout"
        reason = _REASONS.get(why, why).format(self.timeout_s or 0)
        if why == "expired":
            return Dead(reason)
        return Retry(reason, error=TimeoutError(reason) if why == "timeout" else None)


SPELL: Final = 256
"""Jobs that a member of the pool runs in a row before it yields to the event loop."""


class CoroutinePool:
    """Runs coroutine handlers in at most `most` asyncio tasks, its members, which are started when needed.

    A task for every job would cost more than a short handler does. So a member goes on with the next job as soon as one
    is done; only when a handler really waits does another member take over the rest.
    """

    def __init__(self, most: int, now_ms: Callable[[], int], ended: Callable[[JobRun], None]) -> None:
        self._most = most
        self._now_ms = now_ms
        self._ended = ended
        self._pid = os.getpid()
        self._waiting: deque[JobRun] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._members: set[asyncio.Task[None]] = set()
        self._called = False
        self._stopping = False

    def add(self, run: JobRun) -> None:
        self._waiting.append(run)
        self._call()

    def take_back(self) -> list[JobRun]:
        """Return runs that no member has begun."""
        left = list(self._waiting)
        self._waiting.clear()
        return left

    async def stop(self, within_s: float) -> None:
        """Cancel what runs. A handler that does not heed that is left behind."""
        self._stopping = True
        for member in self._members:
            member.cancel()
        if self._members:
            await asyncio.wait(set(self._members), timeout=within_s)

    def _call(self) -> None:
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._rouse)

    def _rouse(self) -> None:
        """Wake one member, and look again when it has had its turn: if it waits, the next one takes the rest."""
        self._called = False
        if not self._waiting or self._stopping:
            return
        if self._idle:
            self._idle.pop().set_result(None)
        elif len(self._members) < self._most:
            member = asyncio.create_task(self._serve(), name="mainspring-handlers")
            self._members.add(member)
            member.add_done_callback(self._left)
        else:
            return  # the first free member takes it
        self._call()

    def _left(self, member: "asyncio.Task[None]") -> None:
        self._members.discard(member)
        if not member.cancelled() and (error := member.exception()) is not None:
            raise error
        self._call()

    async def _serve(self) -> None:
        me: asyncio.Task[None] | None = asyncio.current_task()
        assert me is not None
        clean = copy_context()
        while True:
            for _ in range(SPELL):
                if not self._waiting or self._stopping:
                    break
                await self._do(me, self._waiting.popleft())
                if copy_context() != clean:
                    return  # a handler left something in its context: the next job must not find it
            if self._stopping:
                return  # what was cancelled with the job before was meant for this member, too
            if self._waiting:
                await asyncio.sleep(0)
                continue
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            try:
                await idle
            except asyncio.CancelledError:
                if idle in self._idle:
                    self._idle.remove(idle)
                raise

    async def _do(self, me: "asyncio.Task[None]", run: JobRun) -> None:
        if run.over:
            return  # it was stopped before its turn came
        run.task = me
        leaves = False
        token = CURRENT.set(run.context)
        try:
            arguments: dict[str, Any] = run.start(self._now_ms)
            run.answered(await run.work.function(**arguments))
        except asyncio.CancelledError as error:
            # Stopped from here, or by something it waited for: in both cases the run is over, and the member is not.
            # Others who cancel it mean the member: a program that ends waits for all of its tasks.
            leaves = me.cancelling() > 0 and run.stopped is None
            run.failed(error)
        except GeneratorExit as error:
            if not _runs(me):
                raise  # it is this coroutine that is thrown away
            run.failed(error)
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises is how its task ended
            run.failed(error)
        end_if_forked(self._pid)
        run.task = None
        CURRENT.reset(token)
        if me.cancelling():
            await _hear_out(me)
        self._ended(run)
        if leaves:
            raise asyncio.CancelledError


async def _hear_out(me: "asyncio.Task[None]") -> None:
    """Clear a pending cancellation of this task: the next job must not receive it."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while me.cancelling():
        me.uncancel()


def _runs(task: "asyncio.Task[None]") -> bool:
    """Return True if this task is running, and not being destroyed by the garbage collector."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs here
        return False


class ThreadRunner:
    """At most so many threads, started when needed. They do not keep the process from ending."""

    def __init__(self, most: int, now_ms: Callable[[], int], ended: Callable[[JobRun], None]) -> None:
        self._most = most
        self._now_ms = now_ms
        self._ended = ended
        self._pid = os.getpid()
        self._jobs: SimpleQueue[JobRun | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._done: deque[JobRun] = deque()
        self._lock = threading.Lock()
        self._take_scheduled = False
        self._free = 0
        self._started = 0

    def add(self, run: JobRun) -> None:
        with self._lock:
            self._free -= 1
            more = self._free < 0 and self._started < self._most
            if more:
                self._started += 1
                self._free += 1
        self._jobs.put(run)
        if more:
            threading.Thread(target=self._serve, name=f"mainspring-handler-{self._started}", daemon=True).start()

    def take_back(self) -> list[JobRun]:
        """Return runs that no thread has begun."""
        left: list[JobRun] = []
        with contextlib.suppress(Empty):
            # Without waiting: a thread may take the last one at this very moment.
            while (run := self._jobs.get_nowait()) is not None:
                left.append(run)
        with self._lock:
            self._free += len(left)
        return left

    def stop(self) -> None:
        """Threads end when they are free; one that hangs ends with the process."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (run := self._jobs.get()) is not None:
            if not run.over:
                Variables().run(self._do, run)
            self._report_end(run)

    def _do(self, run: JobRun) -> None:
        CURRENT.set(run.context)
        try:
            run.answered(run.work.function(**run.start(self._now_ms)))
        except BaseException as error:  # noqa: BLE001  # the task's end, not the thread's
            run.failed(error)
        finally:
            end_if_forked(self._pid)

    def _report_end(self, run: JobRun) -> None:
        with self._lock:
            self._free += 1
            self._done.append(run)
            scheduled, self._take_scheduled = self._take_scheduled, True
        if not scheduled:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one is waiting
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._lock:
            self._take_scheduled = False
            done, self._done = self._done, deque()
        for run in done:
            self._ended(run)


WATCH_S: Final = 0.05
"""How exactly timeouts are kept: one look at all runs, and nothing to set up for each."""

AHEAD_S: Final = 0.1
"""Jobs are taken so long before a place for them is free, by the rate at which they end."""

STALL_S: Final = 1.0
"""Seconds of a blocked event loop after which the leases of all jobs here are in danger."""

SURPLUS_S: Final = 1.0
"""What was taken and not begun for so long is given back: another worker may be free."""

CLOSE_S: Final = 1.0
"""Seconds for runs to end after they were cancelled at a stop."""

MOST_AHEAD: Final = 2_000
MOST_UNKNOWN: Final = 1_000
MOST_DELIVERIES: Final = 5
"""A job that was taken more often has ended every worker that touched it."""


class Executor:
    """Coroutines go to the pool, everything else to threads; both share one limit."""

    def __init__(
        self,
        registry: Registry,
        namespace: str,
        clock: Clock,
        *,
        concurrency: int,
        lease_s: float,
        memory: Memory | None = None,
        ended: Callable[[JobRun], None],
        refused: Callable[[Job, Outcome], None],
        returned: Callable[[list[JobRun]], None],
        freed: Callable[[JobRun], None],
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
        self._pool = CoroutinePool(concurrency, clock.now_ms, self._over)
        self._threads = ThreadRunner(concurrency, clock.now_ms, self._over)
        self.runs: set[JobRun] = set()
        self._stuck: set[JobRun] = set()
        """Their time is over, and their threads are not free: nothing can end a thread."""
        self._unknown: set[str] = set()
        """Targets without a handler here that were logged."""
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
        """Queue of each run here, including runs that no longer count but still go on."""
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
                self._say_unknown(job)
                # Later, not at once: the same worker would take it again and again, and no other could.
                self._refused(job, Retry(f"this worker does not know {job.body.target}", untried=True))
            else:
                run = JobRun(job, work, self._namespace, now, self._memory, begin_by=begin_by)
                self.runs.add(run)
                (self._pool if work.is_async else self._threads).add(run)

    def _say_unknown(self, job: Job) -> None:
        """Log an unknown target once; the tasks come by again until some worker knows it."""
        target = job.body.target
        if target not in self._unknown and len(self._unknown) < MOST_UNKNOWN:
            self._unknown.add(target)
            meant = did_you_mean([target], [work.target for work in self._registry])
            log.warning("%s: this worker does not know %s; it is left to others, untried%s", job.id, target, meant,
                        extra={"task": job.id, "target": target})  # fmt: skip

    # -- ending ------------------------------------------------------------------------------------------

    def _over(self, run: JobRun) -> None:
        """The function has returned."""
        if run in self._stuck:
            self._stuck.discard(run)
            self._freed(run)
        if not run.over:
            self._conclude(run)

    def _conclude(self, run: JobRun) -> None:
        run.over = True
        self.runs.discard(run)
        self.ended += 1
        self._ended(run)

    def stop_run(self, run: JobRun, why: Stop) -> None:
        """Stop a run. One that cannot be stopped is left alone, and its result does not count."""
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

    def taken_before(self, then: float) -> list[JobRun]:
        return [run for run in self.runs if run.taken < then]

    # -- stopping ----------------------------------------------------------------------------------------

    def take_back(self) -> list[JobRun]:
        """Return runs that were not begun: other workers may have them."""
        left = [run for run in (*self._pool.take_back(), *self._threads.take_back()) if not run.over]
        for run in left:
            run.over = True
            self.runs.discard(run)
        return left

    async def close(self) -> None:
        """Let go of everything: coroutines are cancelled, commands ended, threads left to themselves."""
        for run in list(self.runs):
            run.deadline = inf
            self.stop_run(run, "stopping")
        await self._pool.stop(CLOSE_S)
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
