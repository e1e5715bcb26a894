"""Every failed delivery passes here, on its way to the error handler or to the log."""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Final

from ..model.failure import ErrorHandler, Failure
from .failure_log import FailureLog

log = logging.getLogger("mainspring.failures")

ROOM: Final = 10_000
"""Failures that wait for a slow handler at most; further ones are counted and not shown to it."""

BITE: Final = 500
"""Failures handed to the thread of a plain function at once."""

SAY_EVERY_S: Final = 10.0


class Failures:
    """Shows failures to the handler one after the other; deliveries never wait for it."""

    def __init__(self, handler: ErrorHandler | None = None, *, room: int = ROOM) -> None:
        self._handler = handler
        self._log = FailureLog()
        self._room = room
        self._queue: deque[Failure] = deque()
        self._worker: asyncio.Task[None] | None = None
        self.retries = 0
        self.deaths = 0
        self.dropped = 0
        """Failures that the handler was too slow to see."""
        self._said_s = -SAY_EVERY_S

    def report(self, failure: Failure) -> None:
        """Note a failure; returns at once."""
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
        """Give the handler a little time for what waits; then say how much it did not see."""
        self._log.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.seen()
        if self._worker is not None and not self._worker.done():
            log.warning("the error handler did not see %d failures before the stop", len(self._queue))
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
    except BaseException:  # also one that wants to end the program: the node has other work
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
    """A thread of its own, which does not keep the process from ending: a handler may hang for good."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[Awaitable[None] | None]] = loop.create_future()

    def run() -> None:
        answers = [_called(handler, failure) for failure in failures]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_answer, done, answers)

    threading.Thread(target=run, name="mainspring-error-handler", daemon=True).start()
    return await done


def _answer(done: "asyncio.Future[list[Awaitable[None] | None]]", answers: list[Awaitable[None] | None]) -> None:
    if not done.done():
        done.set_result(answers)
