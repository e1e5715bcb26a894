"""A scheduler as the whole of a program: it blocks until a signal, then stops in time."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from .signals import exit_now, stop_in_time, stop_signals
from .worker.process import kill_all

LOOK_S: Final = 0.1


def run_until_asked(
    start: Callable[[], None], over: Callable[[], bool], stop: Callable[[], None], shutdown_timeout_s: float
) -> None:
    """Returns when it has stopped. A second signal ends the process at once, and so does a stop that hangs."""
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
    # A signal that comes during the start counts too: it stops what has just begun, in good order.
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
