"""Background roles: one loop that owns waiting, errors and stop, and one place that reports failed deliveries."""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from .model.delivery import ErrorHandler, Failure, was_sent
from .model.errors import StoreError, WrongFormat
from .model.explain import moment
from .model.targets.names import receiver_of, shown_target
from .model.text import bounded, escape, placed, raised_at, redact

loop_log = logging.getLogger("mainspring.engine")

log = logging.getLogger("mainspring.failures")


class Loop:
    """Runs `step` again and again. A step returns the seconds until the next; `wake` cuts the wait short."""

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[float]] | None = None,
        *,
        min_backoff_s: float = 0.05,
        max_backoff_s: float = 2.0,
    ) -> None:
        self._name = name
        self._step = step
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self._last = False
        self.failures = 0
        """Failed steps in a row; 0 if the last one succeeded."""

    def wake(self) -> None:
        self._wake.set()

    def start(self, step: Callable[[], Awaitable[float]] | None = None) -> None:
        """Run the step that was given when the loop was made, or this one."""
        self._step = step or self._step
        assert self._step is not None, "a loop needs a step"
        self._task = asyncio.create_task(self._run(self._step), name=f"mainspring-{self._name}")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def finish(self, within_s: float) -> None:
        """Stop after the current step, so that its result is kept; cancel it if it takes longer than `within_s`."""
        self._last = True
        self.wake()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_s)
        await self.stop()

    @property
    def crashed(self) -> BaseException | None:
        """The error that ended the loop; it is a bug, and the node must not report itself healthy."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    async def _run(self, step: Callable[[], Awaitable[float]]) -> None:
        while not self._last:
            self._wake.clear()
            try:
                wait_s = await step()
                if self.failures:
                    loop_log.info("%s: recovered after %d failed attempts", self._name, self.failures)
                self.failures = 0
            except WrongFormat:
                raise  # waiting does not help: a different partition count or a later format is permanent
            except StoreError as error:
                self.failures += 1
                wait_s = min(self._max_backoff_s, self._min_backoff_s * 2 ** min(self.failures, 6))
                if self.failures in (1, 10, 100):
                    loop_log.warning("%s: %s; trying again", self._name, error)
            if wait_s > 0 and not self._last:
                await self._pause(wait_s)
            else:
                await asyncio.sleep(0)

    async def _pause(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return


class Loops:
    """The loops of an engine's roles, made before the roles so that each can wake the others.

    A loop gets its step when it is started; until then `wake` has no effect.
    """

    def __init__(self, lease_s: float = 5.0) -> None:
        # Retry soon after a failure: it may concern one server of many, and the others have work.
        self.keep = Loop("keeper", max_backoff_s=min(2.0, lease_s / 4))
        self.read = Loop("lookahead", max_backoff_s=0.25)
        self.fire = Loop("dispatcher", max_backoff_s=0.05)
        self.plan = Loop("planner", max_backoff_s=0.5)
        self.sweep = Loop("sweeper")
        self.pause = Loop("pauses", max_backoff_s=0.5)
        self.permit = Loop("permits", max_backoff_s=0.5)
        self.forward = Loop("forwarder")

    def __iter__(self) -> Iterator[Loop]:
        loops = (self.keep, self.read, self.fire, self.plan, self.sweep, self.pause, self.permit)
        return iter((*loops, self.forward))


QUIET_S: Final = 10.0
"""Seconds after the first logged failure of a receiver in which further failures are only counted."""

FIRST_DEAD: Final = 5
"""Dead tasks logged one by one before they are summed up: someone may be waiting for each."""

TRACE_EVERY_S: Final = 60.0
"""Seconds between logged tracebacks of the same handler or receiver, exception type and line."""

_RUNS: Final = ("queue:", "command:")
"""Prefixes of targets that workers run."""

_MOST_RECEIVERS: Final = 1_000
_MANY: Final[dict[str, str]] = {"retry": "failed attempts", "dead": "tasks died", "parked": "lanes were parked"}


class FailureLog:
    """Logs failures if there is no error handler: every attempt of a handler or command, the first failure of any
    other receiver, and then a sum every few seconds.

    A failure that is retried is a warning; a dead task, or one that parks its lane, is an error. `redacted` keeps texts
    of receivers and handlers out of the log: they may contain what the receiver was sent.
    """

    def __init__(self, *, redacted: bool = False) -> None:
        self._redacted = redacted
        self._open: dict[tuple[str, str], _Tally] = {}
        self._traced: dict[tuple[str, str], float] = {}
        """When the traceback of each exception was last logged; the latest last."""

    def take(self, failure: Failure) -> None:
        if failure.target.startswith(_RUNS) and was_sent(failure.error):
            self._log(failure, failure.target)
            return
        receiver = receiver_of(failure.target)
        key = (receiver, failure.outcome)
        tally = self._open.get(key)
        if tally is None:
            if len(self._open) >= _MOST_RECEIVERS:
                key = ("other targets", failure.outcome)
            tally = self._open.setdefault(key, _Tally())
            if tally.timer is None:
                tally.timer = asyncio.get_running_loop().call_later(QUIET_S, self._sum_up, key)
        tally.seen += 1
        if tally.seen <= (1 if failure.outcome == "retry" else FIRST_DEAD):
            self._log(failure, receiver)
        else:
            tally.unreported += 1
            tally.last = failure

    def flush(self) -> None:
        """Log the sums of failures that were only counted so far."""
        for key in list(self._open):
            self._sum_up(key, again=False)

    def _sum_up(self, key: tuple[str, str], *, again: bool = True) -> None:
        tally = self._open.pop(key)
        if tally.timer is not None:
            tally.timer.cancel()
        if tally.last is None:
            return
        receiver, outcome = key
        level = logging.WARNING if outcome == "retry" else logging.ERROR
        last = tally.last
        log.log(level, "%s: %d more %s; the last: task %s, %s", escape(receiver), tally.unreported, _MANY[outcome],
                escape(last.id), self._why(last),
                extra={"task": last.id, "target": receiver_of(last.target)})  # fmt: skip
        if again:
            # It kept failing: log the next sum after another pause, without a first line in between.
            fresh = self._open[key] = _Tally()
            fresh.seen = FIRST_DEAD
            fresh.timer = asyncio.get_running_loop().call_later(QUIET_S, self._sum_up, key)

    def _why(self, failure: Failure) -> str:
        return escape((failure.brief if self._redacted else "") or failure.error)

    def _trace(self, failure: Failure, receiver: str) -> BaseException | None:
        """Return the exception whose traceback to print. A sink that knows what went wrong leaves none."""
        error = failure.exception
        if error is None or raised_at(error) is None:
            return None
        key, now_s = (receiver, placed(error)), time.monotonic()
        if now_s < self._traced.get(key, -TRACE_EVERY_S) + TRACE_EVERY_S:
            return None
        self._traced.pop(key, None)
        self._traced[key] = now_s
        if len(self._traced) > _MOST_RECEIVERS:
            del self._traced[next(iter(self._traced))]
        return redact(error) if self._redacted else bounded(error)

    def _log(self, failure: Failure, receiver: str) -> None:
        id, target, why = escape(failure.id), escape(shown_target(failure.target)), self._why(failure)
        trace = self._trace(failure, receiver)
        about = {"task": failure.id, "target": shown_target(failure.target)}
        if failure.lane is not None:
            about["lane"] = failure.lane
            if failure.outcome != "parked":
                id = f"{id} of lane {escape(failure.lane)}"
        if failure.outcome == "dead":
            log.error(
                "task %s to %s is dead after %d attempt%s: %s", id, target, failure.attempts,
                "" if failure.attempts == 1 else "s", why, exc_info=trace, extra=about,
            )  # fmt: skip
        elif failure.outcome == "parked":
            log.error(
                "task %s to %s failed, and its lane %s is parked until someone acts: %s", id, target,
                escape(failure.lane or ""), why, exc_info=trace, extra=about,
            )  # fmt: skip
        else:
            at = "" if failure.next_at_ms is None else f"; again at {moment(failure.next_at_ms)}"
            log.warning(
                "task %s to %s: attempt %d failed: %s%s", id, target, failure.attempt, why, at,
                exc_info=trace, extra=about,
            )  # fmt: skip


class _Tally:
    __slots__ = ("last", "seen", "timer", "unreported")

    def __init__(self) -> None:
        self.seen = 0
        self.unreported = 0
        self.last: Failure | None = None
        self.timer: asyncio.TimerHandle | None = None


ROOM: Final = 10_000
"""Most failures waiting for a slow handler; further ones are counted but not passed to it."""

BITE: Final = 500
"""Failures handed to the thread of a plain function at once."""

SAY_EVERY_S: Final = 10.0


class Failures:
    """Passes failures to the handler one after the other; deliveries never wait for it."""

    def __init__(self, handler: ErrorHandler | None = None, *, room: int = ROOM, redacted: bool = False) -> None:
        self._handler = handler
        self._log = FailureLog(redacted=redacted)
        self._room = room
        self._queue: deque[Failure] = deque()
        self._worker: asyncio.Task[None] | None = None
        self.retries = 0
        self.deaths = 0
        self.dropped = 0
        """Failures that were not passed to the handler because it was too slow."""
        self._said_s = -SAY_EVERY_S

    def report(self, failure: Failure) -> None:
        """Queue a failure; return at once."""
        if failure.outcome == "dead":
            self.deaths += 1
        else:
            self.retries += 1
        if self._handler is None:
            self._log.take(failure)
        elif len(self._queue) >= self._room:
            self._drop()
        else:
            self._queue.append(failure)
            if self._worker is None or self._worker.done():
                self._worker = asyncio.get_running_loop().create_task(self._work(), name="mainspring-failures")

    async def seen(self) -> None:
        """Wait until the handler has seen everything reported so far."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Give the handler a little time for waiting failures; then log how many it did not see."""
        self._log.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.seen()
        if self._worker is not None and not self._worker.done():
            log.warning("stopping: the error handler has not seen %d failures", len(self._queue))
            self._worker.cancel()
            await asyncio.wait([self._worker])

    def _drop(self) -> None:
        self.dropped += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            log.error(
                "the error handler is too slow: %d failures wait, %d were not shown to it", self._room, self.dropped
            )

    async def _work(self) -> None:
        assert self._handler is not None
        on_loop = _is_async(self._handler)
        while self._queue:
            some = [self._queue.popleft() for _ in range(min(BITE, len(self._queue)))]
            if on_loop:
                await _await_all([_called(self._handler, failure) for failure in some])
            else:
                await _await_all(await _in_thread(self._handler, some))


def _is_async(handler: ErrorHandler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _called(handler: ErrorHandler, failure: Failure) -> Awaitable[None] | None:
    try:
        return handler(failure)
    except BaseException:  # including SystemExit: a handler must not end the node
        log.exception("the error handler failed on task %s", failure.id, extra={"task": failure.id})
        return None


async def _await_all(answers: Sequence[Awaitable[None] | None]) -> None:
    for answer in answers:
        if inspect.isawaitable(answer):
            try:
                await answer
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                log.exception("the error handler failed")
            except BaseException:
                log.exception("the error handler failed")


async def _in_thread(handler: ErrorHandler, failures: list[Failure]) -> list[Awaitable[None] | None]:
    """Run the handler in a daemon thread, so that a handler that hangs cannot keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[Awaitable[None] | None]] = loop.create_future()

    def run() -> None:
        answers = [_called(handler, failure) for failure in failures]
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(_answer, done, answers)

    threading.Thread(target=run, name="mainspring-error-handler", daemon=True).start()
    return await done


def _answer(done: "asyncio.Future[list[Awaitable[None] | None]]", answers: list[Awaitable[None] | None]) -> None:
    if not done.done():
        done.set_result(answers)
