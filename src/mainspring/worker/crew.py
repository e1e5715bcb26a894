"""Runs coroutine handlers: a few asyncio tasks, each one job after the other.

A task for every job would cost more than a short handler does. So a member of the crew goes on with the next job as
soon as one is done, and only where a handler really waits does the next member take over the rest.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final

from .context import CURRENT
from .run import Run, end_if_forked

SPELL: Final = 256
"""Jobs in a row before the loop gets its turn."""


class Crew:
    """At most so many members; hired when needed."""

    def __init__(self, most: int, now_ms: Callable[[], int], ended: Callable[[Run], None]) -> None:
        self._most = most
        self._now_ms = now_ms
        self._ended = ended
        self._pid = os.getpid()
        self._waiting: deque[Run] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._members: set[asyncio.Task[None]] = set()
        self._called = False
        self._stopping = False

    def add(self, run: Run) -> None:
        self._waiting.append(run)
        self._call()

    def take_back(self) -> list[Run]:
        """What nobody has begun."""
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
            return  # whoever is free first goes on
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

    async def _do(self, me: "asyncio.Task[None]", run: Run) -> None:
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
    """It was cancelled, perhaps by its own hand: the next job must not hear of it."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while me.cancelling():
        me.uncancel()


def _runs(task: "asyncio.Task[None]") -> bool:
    """Whether it is this task that is asked, and not a collector that throws it away in the middle of anything."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs here
        return False
