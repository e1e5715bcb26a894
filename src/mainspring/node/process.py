"""Processes and threads: signals, exit codes, event loops in threads, and metrics of the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from ..model.errors import ConfigError, MainspringError, WrongFormat
from ..model.metrics import Family, histogram, single
from ..worker.command import kill_all

if TYPE_CHECKING:
    from ..store.store import Store
    from .node import Node

log = logging.getLogger("mainspring.node")

package_log = logging.getLogger("mainspring")


ECHO_S: Final = 0.3
"""A signal to a process group arrives twice if a parent (make, a shell) passes it on: that still counts as one."""

GRACE_S: Final = 3.0
"""Time that a stop may take beyond `shutdown_timeout`: ending requests in progress, handing back, closing."""

HELD_UP_S: Final = 0.05
"""An alarm this late shows that the process was suspended and could not use the time it was given."""

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_now(number: int) -> None:
    """End at once: leases expire by themselves, and the embedded server ends with this process."""
    os._exit(128 + number)


@contextlib.contextmanager
def stop_signals(
    ask: Callable[[], None],
    insist: Callable[[int], None] = exit_now,
    numbers: Sequence[signal.Signals] = STOPPING,
) -> Iterator[None]:
    """Within the block, call `ask` at the first of these signals and `insist` at the next."""
    loop = asyncio.get_running_loop()
    first_at = math.inf

    def receive(number: int) -> None:
        nonlocal first_at
        if loop.time() > first_at + ECHO_S:
            insist(number)
        first_at = min(first_at, loop.time())
        ask()

    # Leave ignored signals ignored: nohup relies on it.
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


class Alarm:
    """Calls a function after a time; if the process was suspended meanwhile, `again_s` seconds after it wakes up."""

    def __init__(self, after_s: float, again_s: float, call: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._again_s: float | None = again_s
        self._call = call
        self._set(after_s)

    def cancel(self) -> None:
        self._timer.cancel()

    def _set(self, after_s: float) -> None:
        due_s = self._loop.time() + after_s
        self._timer = self._loop.call_at(due_s, self._ring, due_s)

    def _ring(self, due_s: float) -> None:
        again_s, self._again_s = self._again_s, None
        if again_s is not None and self._loop.time() > due_s + HELD_UP_S:
            self._set(again_s)
        else:
            self._call()


@contextlib.contextmanager
def stop_in_time(shutdown_timeout_s: float) -> Iterator[None]:
    """Guard a stop: if it hangs (a server does not answer), end the process with exit code 1."""

    def give_up() -> None:
        log.error(
            "the stop hangs (shutdown_timeout is %g s): ending now; leases run out by themselves", shutdown_timeout_s
        )
        os._exit(1)

    alarm = Alarm(shutdown_timeout_s + GRACE_S, GRACE_S, give_up)
    try:
        yield
    finally:
        alarm.cancel()


class Frontend(Protocol):
    """The HTTP API, as a process runs it beside the node. It stops first, so that no new requests come in."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def run_until_signal(node: Node, frontend: Frontend | None, started: Callable[[], None]) -> int:
    """Start, run until SIGTERM, SIGINT or SIGHUP, stop; return the exit code. A second signal ends at once."""
    with contextlib.ExitStack() as handled:
        stopping: Sequence[signal.Signals] = STOPPING
        if node.reloads_on_hangup:
            stopping = tuple(number for number in STOPPING if number is not signal.SIGHUP)
            handled.enter_context(_on_signal(signal.SIGHUP, node.apply_schedules))
        handled.enter_context(stop_signals(node.ended.set, numbers=stopping))
        try:
            if frontend is not None:
                node.roles = (*node.roles, *(role for role in node.config.roles if role == "api"))
                await frontend.start()
            if await _started_unless_ended(node):
                started()
                await node.ended.wait()
        finally:
            log.info("stopping")
            with stop_in_time(node.config.shutdown_timeout_s):
                await _one_after_the_other(frontend.stop if frontend is not None else None, node.stop)
    # It hung for longer than its lease, and another node has its id; or the namespace has another partition count.
    if isinstance(node.failure, ConfigError | WrongFormat):
        log.error("the node cannot continue: %s", node.failure)
        return 2
    if node.failure is not None:
        log.error(
            "a part of the node broke down, which is a bug: %r. The tasks are safe on the server", node.failure,
            exc_info=node.failure,
        )  # fmt: skip
        return 1
    return 0


async def _started_unless_ended(node: Node) -> bool:
    """Start; return False if a signal ends a long start (loading a large AOF)."""
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
def _on_signal(number: signal.Signals, call: Callable[[], None]) -> Iterator[None]:
    """Within the block, the signal only calls `call`."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


async def _one_after_the_other(*steps: Callable[[], Awaitable[None]] | None) -> None:
    """Run every step, even after one that failed."""
    async with contextlib.AsyncExitStack() as stack:
        for step in reversed(steps):
            if step is not None:
                stack.push_async_callback(step)


_STARTED_S: Final = time.time()


def store_calls(store: Store) -> Family:
    latencies = {primary.address: primary.latency for primary in store.servers.all()}
    return histogram("mainspring_store_seconds", "From a call of the server to its last reply.", "server", latencies)


def process_figures() -> Iterator[Family]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    text = "User and system CPU time."
    yield single("process_cpu_seconds_total", "counter", text, used.ru_utime + used.ru_stime)
    yield single("process_start_time_seconds", "gauge", "When the process started, in Unix time.", _STARTED_S)
    yield single("process_max_fds", "gauge", "Files it may open.", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with contextlib.suppress(OSError):  # not on every system
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield single("process_resident_memory_bytes", "gauge", "Memory in use.", pages * os.sysconf("SC_PAGE_SIZE"))
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            yield single("process_open_fds", "gauge", "Files that are open.", len(os.listdir(folder)))  # noqa: PTH208
            break


T = TypeVar("T")

END_S: Final = 3.0
"""Seconds for cancelled coroutines to end. Not less: a machine may stall for a second."""


class Background:
    """Starts at once; runs coroutines handed to it from any thread. It does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._loop = _loop_factory()()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def inside(self) -> bool:
        """Whether the caller runs in this very thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread, and await it here."""
        return await asyncio.wrap_future(self.submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread, and wait for it here."""
        if self.inside:
            work.close()
            raise MainspringError("this call waits for the thread that it was made in; use the form that is awaited")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: the answer is no longer wanted
            raise

    def end(self) -> None:
        """End the thread; cancel what still runs. Must not be called from within."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(end_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


async def end_all() -> int:
    """Cancel all other tasks of this loop; return how many ignore it. asyncio itself would wait for these forever."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    stay = (await asyncio.wait(left, timeout=END_S))[1] if left else set()
    if stay:
        package_log.warning("%d coroutines keep running although they were cancelled; they are abandoned", len(stay))
    return len(stay)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # no wheel for this system: asyncio's own loop does the same, slower
        return asyncio.new_event_loop
    return uvloop.new_event_loop


LOOK_S: Final = 0.1


def run_until_asked(
    start: Callable[[], None], over: Callable[[], bool], stop: Callable[[], None], shutdown_timeout_s: float
) -> None:
    """Run until stopped. A second signal, or a stop that hangs, ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        start()
        while not over():  # signals come to the main thread only
            time.sleep(LOOK_S)
        stop()
        return
    asyncio.run(_until_asked(start, over, stop, shutdown_timeout_s))


async def _until_asked(
    start: Callable[[], None], over: Callable[[], bool], stop: Callable[[], None], shutdown_timeout_s: float
) -> None:
    asked = asyncio.Event()
    # A signal during the start counts too: it stops what has just begun, in good order.
    with stop_signals(asked.set, _end_now):
        await asyncio.to_thread(start)
        while not asked.is_set() and not over():
            try:
                await asyncio.wait_for(asked.wait(), LOOK_S)
            except TimeoutError:
                continue
        with stop_in_time(shutdown_timeout_s):
            await asyncio.to_thread(stop)


def _end_now(number: int) -> None:
    kill_all()
    exit_now(number)
