"""A thread with an event loop of its own: what runs there is not held up by the rest of the program."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from .model.errors import MainspringError

log = logging.getLogger("mainspring")

T = TypeVar("T")

END_S: Final = 3.0
"""For what was cancelled to end. Not less: a machine that stands still for a second is no coroutine that goes on."""


class Background:
    """Starts at once; coroutines are handed to it from any thread. It does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._loop = _loop_factory()()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def inside(self) -> bool:
        """Whether the caller runs in this very thread, where waiting for it would never end."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Done there, awaited here."""
        return await asyncio.wrap_future(self.submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Done there, waited for here."""
        if self.inside:
            work.close()
            raise MainspringError("this call waits for the thread that it was made in; use the form that is awaited")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: nobody waits for the answer any more
            raise

    def end(self) -> None:
        """What still runs is cancelled. Not from within."""
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
    """Cancel all other tasks of this loop; says how many do not heed that. asyncio itself waits for these for ever."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    stay = (await asyncio.wait(left, timeout=END_S))[1] if left else set()
    if stay:
        log.warning("%d coroutines go on although they were cancelled; they are left behind", len(stay))
    return len(stay)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # no wheel for this system: asyncio's own loop does the same, slower
        return asyncio.new_event_loop
    return uvloop.new_event_loop
