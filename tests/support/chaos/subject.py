"""Shared by all processes under test: planted bugs, the report that they have started, the end with their input."""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable

from mainspring.config.config import Config

from ..planted_bugs import plant
from .recorder import Teller, watch_stalls

Subject = Callable[[Config, Teller, Callable[[], None]], Awaitable[int]]
"""The node or the worker itself: runs until a signal, calls the function once it has started, gives the exit code."""


def _ignored(order: str) -> None:
    del order


def main(subject: Subject, obey: Callable[[str], None] = _ignored) -> int:
    """Arguments are the socket of the recorder and the bugs to plant. `obey` gets every line of standard input."""
    for bug in sys.argv[2:]:
        plant(bug)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(subject, obey))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(subject, obey))


async def _run(subject: Subject, obey: Callable[[str], None]) -> int:
    config = Config.load({}, os.environ)
    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s", datefmt="%H:%M:%S", level="INFO")
    assert config.node_id is not None
    teller = Teller(sys.argv[1])
    await teller.open()
    watchers = [
        asyncio.create_task(_orders(obey)),
        asyncio.create_task(watch_stalls(teller, config.node_id, config.lease_s / 3)),
    ]
    try:
        return await subject(config, teller, _say_started)
    finally:
        for watcher in watchers:
            watcher.cancel()


async def _orders(obey: Callable[[str], None]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        obey(line.decode())
    os._exit(70)  # the parent is gone


def _say_started() -> None:
    sys.stdout.write("started\n")
    sys.stdout.flush()
