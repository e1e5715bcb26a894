"""The nodes or workers under test: real processes that join, leave, die and hang."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Final, Literal

from .network import Cable, Road
from .recorder import Recorder
from .servers import Stage

_EXIT_S: Final = 40.0
_PAUSE_S: Final = 0.2
_FEW: Final = 10
_ROOT: Final = Path(__file__).parents[3]  # of the repository: `tests` can be imported from there


class Member:
    """One process and its road to the servers, which runs through a cable of its own where there can be one."""

    def __init__(self, name: str, road: Road, cable: Cable | None, process: Process, log: Path) -> None:
        self.name, self.road, self.cable, self.process, self.log = name, road, cable, process, log
        self.started = asyncio.Event()
        self.doomed = False
        """We ended it, or are about to."""
        self.stopped = False

    @property
    def running(self) -> bool:
        return self.process.returncode is None and not self.doomed

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    async def clear(self) -> None:
        """Clean up after a node that has ended: its proxies and its cable are no longer needed."""
        await self.road.aclose()
        if self.cable is not None:
            await asyncio.to_thread(self.cable.remove)

    def order(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")


class Fleet:
    """Starts nodes and knows which of them live. A node that ends unasked is started again."""

    def __init__(
        self,
        stage: Stage,
        recorder: Recorder,
        folder: Path,
        *,
        lease_s: float,
        bugs: tuple[str, ...],
        cabled: bool = False,
        kind: Literal["node", "worker"] = "node",
    ) -> None:
        self._kind = kind
        self._stage, self._recorder, self._folder = stage, recorder, folder
        self._lease_s, self._bugs, self._cabled = lease_s, bugs, cabled
        self._count = 0
        self._watchers: set[asyncio.Task[None]] = set()
        self._closing = False
        self.members: list[Member] = []
        self.crashes: list[str] = []
        """Nodes that ended by themselves after they had started, or did not end in order when asked to."""
        self.failed_starts = 0

    @property
    def live(self) -> list[Member]:
        return [member for member in self.members if member.running]

    def pick(self, share: float) -> Member | None:
        """A victim among those that have started and are not held already."""
        ready = [member for member in self.live if member.started.is_set() and not member.stopped]
        return ready[int(share * len(ready))] if ready else None

    async def join(self) -> Member:
        """Start one more node; it is a member at once and works when its `started` is set."""
        self._count += 1
        name = f"{self._kind[0]}{self._count}"
        async with contextlib.AsyncExitStack() as undo:
            cable = await asyncio.to_thread(Cable) if self._cabled else None
            if cable is not None:
                undo.callback(cable.remove)
            road = await self._stage.road(name, cable)
            undo.push_async_callback(road.aclose)
            member = await self._start(name, road, cable)
            undo.pop_all()  # from here on its watcher clears up behind it
        self.members.append(member)
        watcher = asyncio.create_task(self._watch(member))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return member

    async def _start(self, name: str, road: Road, cable: Cable | None) -> Member:
        environ = os.environ | {
            "MAINSPRING_REDIS_URL": self._stage.url(road),
            "MAINSPRING_NAMESPACE": self._stage.namespace,
            "MAINSPRING_NODE_ID": name,
            "MAINSPRING_LEASE": f"{int(self._lease_s * 1000)}ms",
            "MAINSPRING_RETRY_MAX_ATTEMPTS": "20",
            "MAINSPRING_SHUTDOWN_TIMEOUT": "25s",
            "MAINSPRING_HISTORY": "log:=all",
        }
        # The recorder's socket is a file: it is reached from every network namespace, and by no cable.
        command = [
            sys.executable,
            "-m",
            f"{__package__}.{self._kind}",
            str(self._recorder.path),
            *self._bugs,
        ]
        log = self._folder / f"{name}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(cable.inside if cable is not None else ()), *command,
                stdin=PIPE, stdout=PIPE, stderr=file, env=environ, cwd=_ROOT, start_new_session=True,
            )  # fmt: skip
        return Member(name, road, cable, process, log)

    async def ready(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Wait until this many nodes work; start more if some are missing."""
        before = self.failed_starts
        async with asyncio.timeout(timeout_s):
            while sum(member.started.is_set() for member in self.live) < count:
                if self.failed_starts > before + _FEW:
                    raise RuntimeError(f"nodes do not start: {_tail(self.members[-_FEW].log)}")
                if len(self.live) < count:
                    await self.join()
                await asyncio.sleep(0.05)

    async def kill(self, member: Member) -> None:
        """SIGKILL: it dies with everything it knows."""
        member.doomed = True
        member.signal(signal.SIGKILL)
        await member.process.wait()

    async def leave(self, member: Member) -> None:
        """SIGTERM: it finishes what it has begun, hands over, and ends with 0."""
        member.doomed = True
        member.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_EXIT_S):
                code = await member.process.wait()
        except TimeoutError:
            self.crashes.append(f"{member.name} did not end within {_EXIT_S:g} s of SIGTERM")
            await self.kill(member)
            return
        if code != 0 and member.started.is_set():
            self.crashes.append(f"{member.name} ended with {code} after SIGTERM: {_tail(member.log)}")

    async def aclose(self) -> None:
        self._closing = True
        for member in self.live:
            await self.kill(member)
        await asyncio.gather(*self._watchers, return_exceptions=True)

    async def _watch(self, member: Member) -> None:
        assert member.process.stdout is not None
        if await member.process.stdout.readline() == b"started\n":
            member.started.set()
        await member.process.stdout.read()
        code = await member.process.wait()
        await member.clear()
        self.crashes += member.road.errors[:_FEW]
        if member.doomed or self._closing:
            return
        member.doomed = True
        if member.started.is_set():
            self.crashes.append(f"{member.name} ended with {code} by itself: {_tail(member.log)}")
        else:
            self.failed_starts += 1  # the server was away: whoever runs it starts it again
        await asyncio.sleep(_PAUSE_S)
        if not self._closing:
            await self.join()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]
