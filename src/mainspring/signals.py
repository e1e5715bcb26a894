"""How a process is asked to stop: the first signal asks, the second insists, and time runs out in the end."""

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Final

log = logging.getLogger("mainspring.node")

ECHO_S: Final = 0.3
"""A signal to a process group arrives twice where a parent (make, a shell) passes it on: that is still one."""

GRACE_S: Final = 3.0
"""What a whole stop may take beyond `shutdown_timeout`: ending requests under way, handing back, closing."""

HELD_UP_S: Final = 0.05
"""An alarm that comes so late tells that this process stood still, and had no time to do what it was given time for."""

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_now(number: int) -> None:
    """At once: leases run out by themselves and the embedded server ends with this process."""
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

    # What is ignored stays so: nohup asks for that.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


class Alarm:
    """Calls after so many seconds; where the process stood still meanwhile (a paused machine), `again_s` after that."""

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
    """The block is a stop. One that hangs (a server that does not answer) ends with the process, exit code 1."""

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
