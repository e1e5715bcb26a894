"""Group commit: while one write is on its way, the next requests gather and travel together."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from ..model.errors import MainspringError, NotConfirmed, StoreError
from ..model.task import Handle, Task

log = logging.getLogger("mainspring.api")

MOST: Final = 4096
"""Tasks of one write."""

AT_ONCE: Final = 3
CROWD: Final = 24
"""While a write is on its way, so many that wait begin another: their requests are read while the server works. All who
come in one write would also be answered together, and ask again together: callers, this process and the server would
each wait for the other two."""

Write = Callable[[Sequence[Task]], Awaitable[Sequence[Handle]]]


class Waiter(Protocol):
    """Who waits for a handle; a future is one."""

    def done(self) -> bool:
        """It has gone."""
        ...

    def set_result(self, handle: Handle, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


_Waiting = tuple[Task, Waiter]


class Collector:
    """Answers each put once its task is stored. Under load the batches grow by themselves; alone, none waits."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[_Waiting] = []
        self._writers: set[asyncio.Task[None]] = set()
        self._under_way = 0
        """Writers that wait for the server; another may just have begun."""

    def put(self, task: Task) -> "asyncio.Future[Handle]":
        """The task's handle, or the error of the write it travelled with."""
        answer: asyncio.Future[Handle] = asyncio.get_running_loop().create_future()
        self.add(task, answer)
        return answer

    def add(self, task: Task, waiter: Waiter) -> None:
        """The same for who is told without a future."""
        self._waiting.append((task, waiter))
        if not self._writers or len(self._waiting) >= CROWD:
            self._begin_another()

    def _begin_another(self) -> None:
        if len(self._writers) < AT_ONCE:
            writer = asyncio.create_task(self._run(), name="mainspring-collector")
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    async def _run(self) -> None:
        try:
            while waiting := len(self._waiting):
                parts = max(1, min(AT_ONCE - self._under_way, waiting // CROWD))
                size = min(MOST, -(-waiting // parts))
                batch, self._waiting = self._waiting[:size], self._waiting[size:]
                if parts > 1:
                    self._begin_another()
                self._under_way += 1
                try:
                    await self._commit(batch)
                finally:
                    self._under_way -= 1
        finally:
            # In the same step in which it saw that nobody waits: who comes next must begin another.
            self._writers -= {asyncio.current_task()}

    async def _commit(self, batch: list[_Waiting]) -> None:
        try:
            handles = await self._write([task for task, _ in batch])
        except MainspringError as error:
            # The server failed. Any other error is about one task, and only that one may fail.
            if isinstance(error, StoreError) or len(batch) == 1:
                stored = error.handles or [None] * len(batch)
                error.stored = 0  # of other people's tasks
                for one, handle in zip(batch, stored, strict=True):
                    _tell_apart(one, handle, error)
                return
            for one in batch:
                await self._commit([one])
        except Exception as error:
            _fail(batch, error)  # a bug: whoever waits must hear of it too
            log.exception("a write failed in an unexpected way")
        else:
            for one, handle in zip(batch, handles, strict=True):
                _tell(one, handle)


def _tell(one: _Waiting, handle: Handle) -> None:
    if not one[1].done():  # it is, when the caller hung up
        one[1].set_result(handle)


def _tell_apart(one: _Waiting, handle: Handle | None, error: MainspringError) -> None:
    """Of a write that failed: this task may be stored all the same, and even as safely as was asked for."""
    if handle is None:
        _fail([one], error)
    elif isinstance(error, NotConfirmed) and handle.durability == "server":
        _fail([one], error.of(handle))
    else:
        _tell(one, handle)


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)
