"""The schedulers: `mainspring serve`, each a process with an API of its own, gone with the demo however that ends."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from ..config import Config
from ..lifeline import tie
from ..sources import PREFIX
from ..supervisor import child_command
from .side import SideFailed, last_words

START_S: Final = 60.0


class SchedulerProcess:
    """One of them."""

    def __init__(self, name: str, url: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.url = url
        self.process = process
        self.log = log

    async def ready(self, line: socket.socket) -> None:
        """Until it says that it works."""
        try:
            async with asyncio.timeout(START_S):
                word = await asyncio.get_running_loop().sock_recv(line, 1)
        except (TimeoutError, ConnectionError):
            word = b""
        if not word:
            raise SideFailed(f"{self.name} did not start: {last_words(self.log)}")

    async def end(self) -> None:
        """The clean way: what is in flight ends, partitions are handed back."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        await self.process.wait()


@contextlib.asynccontextmanager
async def schedulers(count: int, config: Config, folder: Path) -> AsyncIterator[list[SchedulerProcess]]:
    """So many, all of them ready."""
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(_scheduler(number, config, folder)) for number in range(1, count + 1)]
        for one, line in made:
            await one.ready(line)
        yield [one for one, _ in made]


@contextlib.asynccontextmanager
async def _scheduler(
    number: int, config: Config, folder: Path
) -> AsyncIterator[tuple[SchedulerProcess, socket.socket]]:
    name = f"scheduler-{number}"
    log = folder / f"{name}.log"
    ours, theirs = tie()
    with ours:
        # Both are the child's alone from then on: when it dies, connections to it are refused and not left waiting.
        with theirs, socket.create_server(("127.0.0.1", 0), backlog=2048) as listener, log.open("wb") as said:
            port = listener.getsockname()[1]
            fds = (listener.fileno(), theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                *child_command(), "--listen-fd", str(fds[0]), "--parent-fd", str(fds[1]),
                pass_fds=fds,
                env=_environ(config) | {PREFIX + "NODE_ID": name},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )  # fmt: skip
        one = SchedulerProcess(name, f"http://127.0.0.1:{port}", process, log)
        try:
            yield one, ours
        finally:
            await one.end()


def _environ(config: Config) -> dict[str, str]:
    """Settings by environment, since the URL of the server may hold a password; nothing of the user's own mixes in."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != "REDIS_URL"}
    return rest | config.to_environ()
