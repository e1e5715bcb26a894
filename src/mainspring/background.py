"""A thread with an event loop of its own: what runs there is not held up by the rest of the program."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from .model.errors import MainspringError

T = TypeVar("T")


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
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # no wheel for this system: asyncio's own loop does the same, slower
        return asyncio.new_event_loop
    return uvloop.new_event_loop
