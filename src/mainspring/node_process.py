"""A node as a process: it runs until a signal, and its exit code says why it ended."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from .model.errors import ConfigError
from .signals import STOPPING, stop_in_time, stop_signals

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger("mainspring.node")


class Face(Protocol):
    """What a process shows besides the node: the HTTP API. It stops first, so that nothing new comes in."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def run_until_signal(node: "Node", face: Face | None, started: Callable[[], None]) -> int:
    """Start, run until SIGTERM, SIGINT or SIGHUP, stop; return the exit code. A second signal ends at once."""
    with contextlib.ExitStack() as heard:
        stopping: Sequence[signal.Signals] = STOPPING
        if node.reloads_on_hangup:
            stopping = tuple(number for number in STOPPING if number is not signal.SIGHUP)
            heard.enter_context(_heard(signal.SIGHUP, node.apply_schedules))
        heard.enter_context(stop_signals(node.ended.set, numbers=stopping))
        try:
            if face is not None:
                node.roles = (*node.roles, *(role for role in node.config.roles if role == "api"))
                await face.start()
            if await _started_unless_ended(node):
                started()
                await node.ended.wait()
        finally:
            log.info("stopping")
            with stop_in_time(node.config.shutdown_timeout_s):
                await _one_after_the_other(face.stop if face is not None else None, node.stop)
    if isinstance(node.failure, ConfigError):  # it hung for longer than its lease, and another has its id now
        log.error("the node cannot go on: %s", node.failure)
        return 2
    if node.failure is not None:
        log.error(
            "a part of the node broke down, which is a bug: %r. The tasks are safe on the server", node.failure,
            exc_info=node.failure,
        )  # fmt: skip
        return 1
    return 0


async def _started_unless_ended(node: "Node") -> bool:
    """A signal during a long start (a big AOF is loaded) ends it."""
    start = asyncio.create_task(node.start())
    ended = asyncio.create_task(node.ended.wait())
    await asyncio.wait([start, ended], return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not start.done():
        start.cancel()
        await asyncio.wait([start])
        return False
    await start
    return not node.ended.is_set()


@contextlib.contextmanager
def _heard(number: signal.Signals, call: Callable[[], None]) -> Iterator[None]:
    """Within the block the signal calls this, and does nothing else."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


async def _one_after_the_other(*steps: Callable[[], Awaitable[None]] | None) -> None:
    """Every step runs, also after one that failed."""
    async with contextlib.AsyncExitStack() as stack:
        for step in reversed(steps):
            if step is not None:
                stack.push_async_callback(step)
