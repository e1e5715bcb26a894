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


@contextlib.contextmanager
def stop_in_time(shutdown_timeout_s: float) -> Iterator[None]:
    """The block is a stop. One that hangs (a server that does not answer) ends with the process, exit code 1."""

    def give_up() -> None:
        log.error(
            "the stop hangs (shutdown_timeout is %g s): ending now; leases run out by themselves", shutdown_timeout_s
        )
        os._exit(1)

    alarm = asyncio.get_running_loop().call_later(shutdown_timeout_s + GRACE_S, give_up)
    try:
        yield
    finally:
        alarm.cancel()
