"""Run jobs, each from taken to ended: as a coroutine, in a thread, or as a program."""

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
from typing import TYPE_CHECKING, Any, Final, Literal

from ..model.clock import steady_s
from ..model.delivery import DONE, DROPPED, EXPIRED, EXPIRED_RUNNING, Dead, Done, Outcome, Retry, as_ours, has_expired
from ..model.errors import InvalidInput
from ..model.job import Job, Output
from ..model.text import describe, did_you_mean, placed
from .command import kill_all
from .context import CURRENT, Context, Memory
from .handler import Outputs, Work, WrongArguments

if TYPE_CHECKING:
    from .worker import Worker

log = logging.getLogger("mainspring.worker")


Stop = Literal["timeout", "expired", "cancelled", "lost", "stale", "stopping"]
"""Why a run is stopped before it is done."""

_REASONS: Final = {"timeout": "timed out after {:g} s", "expired": EXPIRED_RUNNING}


_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple})


def _never_ran(value: Any) -> bool:
    """Return whether a value is unexecuted work: a coroutine or generator that should have been awaited or iterated."""
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns when it is collected
    return inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value)


def end_if_forked(pid: int) -> None:
    """End a forked child that returns from its handler: it would be a second worker on the same connections."""
    if os.getpid() != pid:
        os._exit(1)


class _TooLate(Exception):
    """The run was stopped, or its expiry or lease passed, before it began."""


class JobRun:
    """One run of a job: started once, ended once. What its handler does afterwards is ignored."""

    __slots__ = (
        "begin_by", "context", "deadline", "job", "outcome", "output", "over", "started", "stopped", "taken", "task",
        "timeout_s", "value", "work",
    )  # fmt: skip

    def __init__(
        self, job: Job, work: Work, namespace: str, taken: float, memory: Memory | None = None, *, begin_by: float = inf
    ) -> None:
        self.job = job
        self.taken = taken
        self.begin_by = begin_by
        """Time (by `steady_s`) until which no other worker can have the job, even if this process was suspended."""
        self.work = work
        self.context = Context(namespace, job, memory)
        self.started = 0.0
        own_ms = job.body.timeout_ms
        self.timeout_s = work.timeout_s if own_ms is None else own_ms / 1000
        """The task's own timeout precedes its handler's."""
        self.deadline = inf
        self.stopped: Stop | None = None
        self.task: asyncio.Task[None] | None = None
        """The asyncio task, if a coroutine runs."""
        self.over = False
        self.outcome: Outcome = DONE
        self.value: Any = None
        self.output: Output | None = None

    def start(self, now_ms: Callable[[], int]) -> dict[str, Any]:
        """Return arguments for the function, and start its time limit."""
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
                # The program ended when asked to; exit code 0 then does not mean that its work is done.
                self.outcome = self.late()
        elif self.stopped in ("timeout", "expired"):
            self.outcome = self.late()  # it was cancelled, and swallowed that
        elif isinstance(value, Done):
            self.outcome = value
        elif isinstance(value, (Retry, Dead)):
            self._said(value, f"{type(value).__name__}, returned by its handler")
        elif type(value) not in _PLAIN and _never_ran(value):
            kind = type(value).__name__
            self.failed(TypeError(f"the handler returned a {kind}, which is never run; declare it with async def"))
        else:
            self.value = value

    def failed(self, error: BaseException) -> None:
        """Record that the function raised, even if the exception itself cannot be read."""
        try:
            self._failed(error)
        except BaseException as second:  # noqa: BLE001  # properties of an application's exception run its code
            reason = f"{type(error).__name__}, which cannot be read: {describe(second)}"
            self.outcome = Retry(reason, error=second, brief=placed(error))

    def _failed(self, error: BaseException) -> None:
        """Turn an exception into an outcome. If the run was stopped, only the reason for that counts."""
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
        """Record the outcome that the handler chose."""
        try:
            self.outcome = made = as_ours(outcome)
        except InvalidInput as error:
            self.outcome = Retry(describe(error), error=error, brief=brief)
        else:
            made.brief = brief if made.brief is None else made.brief
            if has_expired(made.reason) or made.reason.startswith(DROPPED):
                made.reason = f"its handler says: {made.reason}"  # without the prefix: not even run

    def late(self) -> Retry | Dead:
        """Return the outcome of a run that was stopped."""
        why = self.stopped or "timeout"
        reason = _REASONS.get(why, why).format(self.timeout_s or 0)
        if why == "expired":
            return Dead(reason)
        return Retry(reason, error=TimeoutError(reason) if why == "timeout" else None)


SPELL: Final = 256
"""Jobs that a member of the pool runs in a row before it yields to the event loop."""


class CoroutinePool:
    """Runs coroutine handlers in at most `most` asyncio tasks, its members, which are started when needed.

    An asyncio task per job would cost more than a short handler does. So a member continues with the next job as soon
    as one is done; only when a handler really waits does another member take over the rest.
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
        """Cancel running handlers. One that ignores the cancellation is left behind."""
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
        """Wake one member, and check again after its turn: if it waits, the next one takes the rest."""
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
                    return  # a handler changed the context: do not pass it on to the next job
            if self._stopping:
                return  # the cancellation of the previous job was meant for this member, too
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
            # Cancelled here, or by something it waited for: in both cases the run is over, but not the member.
            # Any other cancellation is meant for the member: a program that ends cancels all of its tasks.
            leaves = me.cancelling() > 0 and run.stopped is None
            run.failed(error)
        except GeneratorExit as error:
            if not _runs(me):
                raise  # this coroutine itself is being closed
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
    """A limited number of threads, started when needed. They do not keep the process from ending."""

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
"""How often timeouts are checked: one check of all runs costs less than a timer for each."""

AHEAD_S: Final = 0.1
"""Jobs are taken this long before a place for them is expected to be free, by the rate at which jobs end."""

STALL_S: Final = 1.0
"""Seconds of a blocked event loop after which the leases of all jobs here are in danger."""

SURPLUS_S: Final = 1.0
"""Seconds after which jobs that were taken but not begun are given back: another worker may be free."""

CLOSE_S: Final = 1.0
"""Seconds for runs to end after they were cancelled at a stop."""

MOST_AHEAD: Final = 2_000
MOST_UNKNOWN: Final = 1_000
MOST_DELIVERIES: Final = 5
"""A job that was taken more often has probably killed every worker that ran it."""


class Executor:
    """Runs coroutines in the pool, everything else in threads; both share one limit."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._clock = worker.store.clock
        self._memory = Memory(worker.store)
        self.concurrency = worker.options.concurrency
        self._pool = CoroutinePool(self.concurrency, self._clock.now_ms, self._over)
        self._threads = ThreadRunner(self.concurrency, self._clock.now_ms, self._over)
        self.runs: set[JobRun] = set()
        self._stuck: set[JobRun] = set()
        """Runs that were stopped but whose threads are still busy: a thread cannot be ended."""
        self._unknown: set[str] = set()
        """Targets without a handler here that were logged."""
        self.ended = 0
        self._counted = (0, time.monotonic())
        self.rate = 0.0
        """Rate of ended jobs per second."""

    @property
    def room(self) -> int:
        """Number of jobs that may be taken now."""
        ahead = min(MOST_AHEAD, int(self.rate * AHEAD_S))
        return self.concurrency + ahead - len(self.runs) - len(self._stuck)

    @property
    def queues(self) -> Iterator[str]:
        """Queue of each run here, including stopped runs whose threads are still busy."""
        return (run.job.queue for run in chain(self.runs, self._stuck))

    @property
    def inside(self) -> bool:
        """Return whether the caller is inside a run: it cannot wait until no run is left. Safe in any thread."""
        context, task = CURRENT.get(None), _task_here()
        # An asyncio task started by a handler shares its context, and may outlive it.
        return any(run.context is context and task in (None, run.task) for run in list(self.runs))

    def add(self, jobs: Iterable[Job], asked: float) -> None:
        """Add jobs; `asked` is when they were requested (`steady_s`): their leases did not begin earlier."""
        now, begin_by = time.monotonic(), asked + self._worker.options.lease_s
        namespace, refuse = self._worker.store.keys.namespace, self._worker.finisher.refuse
        for job in jobs:
            work = self._worker.registry.find(job.body.target)
            if job.deliveries > MOST_DELIVERIES:
                refuse(job, Dead(f"the workers that ran it died, {job.deliveries - 1} times in a row"))
            elif work is None:
                self._say_unknown(job)
                # Retry later, not at once: otherwise this worker would take it again and again, and no other could.
                refuse(job, Retry(f"this worker does not know {job.body.target}", untried=True))
            else:
                run = JobRun(job, work, namespace, now, self._memory, begin_by=begin_by)
                self.runs.add(run)
                (self._pool if work.is_async else self._threads).add(run)

    def _say_unknown(self, job: Job) -> None:
        """Log an unknown target once; its tasks return until some worker knows it."""
        target = job.body.target
        if target not in self._unknown and len(self._unknown) < MOST_UNKNOWN:
            self._unknown.add(target)
            meant = did_you_mean([target], [work.target for work in self._worker.registry])
            log.warning("%s: this worker does not know %s; left to other workers, untried%s", job.id, target, meant,
                        extra={"task": job.id, "target": target})  # fmt: skip

    # -- ending ------------------------------------------------------------------------------------------

    def _over(self, run: JobRun) -> None:
        """Handle a function that has returned."""
        if run in self._stuck:
            self._stuck.discard(run)
            self._worker.freed(run)
        if not run.over:
            self._conclude(run)

    def _conclude(self, run: JobRun) -> None:
        run.over = True
        self.runs.discard(run)
        self.ended += 1
        self._worker.ended(run)

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
        """Check the time limits of all runs; a role with its own loop."""
        now = time.monotonic()
        for run in [run for run in self.runs if run.deadline <= now]:
            expires_ms = run.job.body.expires_ms
            past = expires_ms is not None and self._clock.now_ms() >= expires_ms
            self.stop_run(run, "expired" if past else "timeout")
        ended, since = self._counted
        if now > since + STALL_S:
            log.warning(
                "the event loop was blocked for %.1f s: a coroutine handler blocks it, or the machine is overloaded. "
                "Make what blocks a plain function: it then runs in a thread",
                now - since,
            )
        self.rate += ((self.ended - ended) / max(now - since, 1e-3) - self.rate) / 2
        self._counted = (self.ended, now)
        if any(not run.started and run.taken < now - SURPLUS_S for run in self.runs):
            # Jobs take longer than before, so those taken ahead would wait too long here.
            self._worker.finisher.put_back(self.take_back())
        return WATCH_S

    def taken_before(self, then: float) -> list[JobRun]:
        return [run for run in self.runs if run.taken < then]

    # -- stopping ----------------------------------------------------------------------------------------

    def take_back(self) -> list[JobRun]:
        """Return runs that have not begun, so that other workers can have them."""
        left = [run for run in (*self._pool.take_back(), *self._threads.take_back()) if not run.over]
        for run in left:
            run.over = True
            self.runs.discard(run)
        return left

    async def close(self) -> None:
        """Release everything: cancel coroutines, end commands, leave threads alone."""
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
