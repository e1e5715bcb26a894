"""Runs what blocks: plain functions and commands, each in a thread."""

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context as Variables
from queue import Empty, SimpleQueue

from .context import CURRENT
from .run import Run, end_if_forked


class Threads:
    """At most so many threads, started when needed. They do not keep the process from ending."""

    def __init__(self, most: int, now_ms: Callable[[], int], ended: Callable[[Run], None]) -> None:
        self._most = most
        self._now_ms = now_ms
        self._ended = ended
        self._pid = os.getpid()
        self._jobs: SimpleQueue[Run | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._done: deque[Run] = deque()
        self._lock = threading.Lock()
        self._told = False
        self._free = 0
        self._started = 0

    def add(self, run: Run) -> None:
        with self._lock:
            self._free -= 1
            more = self._free < 0 and self._started < self._most
            if more:
                self._started += 1
                self._free += 1
        self._jobs.put(run)
        if more:
            threading.Thread(target=self._serve, name=f"mainspring-handler-{self._started}", daemon=True).start()

    def take_back(self) -> list[Run]:
        """What no thread has begun."""
        left: list[Run] = []
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
            self._tell(run)

    def _do(self, run: Run) -> None:
        CURRENT.set(run.context)
        try:
            run.answered(run.work.function(**run.start(self._now_ms)))
        except BaseException as error:  # noqa: BLE001  # the task's end, not the thread's
            run.failed(error)
        finally:
            end_if_forked(self._pid)

    def _tell(self, run: Run) -> None:
        with self._lock:
            self._free += 1
            self._done.append(run)
            told, self._told = self._told, True
        if not told:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._lock:
            self._told = False
            done, self._done = self._done, deque()
        for run in done:
            self._ended(run)
