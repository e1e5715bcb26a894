"""A process of the demo, seen from both ends: an order goes in as a line; totals and a final report come out."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from ..model.errors import MainspringError


class Usage(msgspec.Struct, frozen=True):
    name: str
    pid: int
    cpu_s: float
    memory_mb: float
    """Peak memory."""


class Usages:
    """Samples processes from time to time, so that the last figures of an ended process are known."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._known: dict[str, Usage] = {}

    def watch(self, name: str, pid: int) -> None:
        self._pids[name] = pid

    def look(self) -> None:
        for name, pid in self._pids.items():
            if (usage := usage_of(name, pid)) is not None:
                self._known[name] = usage

    def add_usage(self, name: str, usage: Usage | None) -> None:
        """Record the usage that a process reported when it ended."""
        if usage is not None:
            self._known[name] = Usage(name, usage.pid, usage.cpu_s, usage.memory_mb)

    def all(self) -> list[Usage]:
        return [self._known[name] for name in self._pids if name in self._known]


def usage_of(name: str, pid: int) -> Usage | None:
    """Return the usage of a process, or None if it is gone or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    if not peaks:
        return None  # a zombie: it has ended, but its parent has not collected it yet
    ticks = int(fields[11]) + int(fields[12])  # utime and stime, counted from after the name
    return Usage(name, pid, round(ticks / os.sysconf("SC_CLK_TCK"), 2), round(peaks[0] / 1024, 1))


REPORT_S: Final = 0.2
STOP: Final = b"stop\n"


class SideFailed(MainspringError):
    """A process of the demo ended prematurely."""


class ProcessMessage(msgspec.Struct, omit_defaults=True):
    """One line from the process: it is ready, a running total, or its report."""

    ready: bool = False
    total: int = 0
    report: dict[str, Any] | None = None
    usage: Usage | None = None
    """Sent with the report: an ended process cannot be inspected."""


_decode: Final = msgspec.json.Decoder(ProcessMessage).decode


class DemoProcess:
    """The process, as the demo sees it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.total = 0
        self.report: dict[str, Any] | None = None
        self.usage: Usage | None = None
        self.ended = asyncio.Event()
        self._log = log
        self._ready = asyncio.Event()
        self._listening = asyncio.create_task(self._listen_to_process())

    async def ready(self) -> None:
        await self._ready.wait()
        self.check()

    def stop(self) -> None:
        """Ask the process to end; its report is available when `ended` is set."""
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(STOP)

    async def finished(self) -> dict[str, Any]:
        await self.ended.wait()
        self.check()
        assert self.report is not None
        return self.report

    def check(self) -> None:
        """Raise if the process ended without a report."""
        if self.ended.is_set() and self.report is None:
            raise SideFailed(f"the {self.name} ended prematurely: {last_words(self._log)}")

    async def end(self) -> None:
        self._listening.cancel()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def _listen_to_process(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message = _decode(line)
            self.total = max(self.total, message.total)
            self.report = message.report or self.report
            self.usage = message.usage or self.usage
            self._ready.set()
        self.ended.set()
        self._ready.set()


@contextlib.asynccontextmanager
async def beside(name: str, module: str, order: msgspec.Struct, folder: Path) -> AsyncIterator[DemoProcess]:
    """Start the process; end it when the block ends."""
    log = folder / f"{name}.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            start_new_session=True,  # Ctrl-C reaches only the demo, which ends the other processes in order
        )
    assert process.stdin is not None
    # On stdin and not in the arguments: URLs may hold a password.
    process.stdin.write(msgspec.json.encode(order) + b"\n")
    side = DemoProcess(name, process, log)
    try:
        yield side
    finally:
        await side.end()


def last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:])[-600:] or "no output"


# -- the child process -------------------------------------------------------------------------------------------


class Inside:
    """The demo, as the process sees it. Ends the process when the demo is gone."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether the demo has asked this process to end."""
        self.total: Callable[[], int] = lambda: 0

    def order(self, kind: type[Any]) -> Any:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
        threading.Thread(target=self._listen, daemon=True).start()
        return order

    def ready(self) -> None:
        _send(ProcessMessage(ready=True))
        threading.Thread(target=self._report_total, daemon=True).start()

    def report(self, **figures: Any) -> None:
        _send(ProcessMessage(total=self.total(), report=figures, usage=usage_of("itself", os.getpid())))

    def _listen(self) -> None:
        if sys.stdin.buffer.readline() == STOP:
            self.stopped = True
            sys.stdin.buffer.read()
        os._exit(1)  # the demo is gone

    def _report_total(self) -> None:
        while True:
            time.sleep(REPORT_S)
            _send(ProcessMessage(total=self.total()))


_lock = threading.Lock()


def _send(message: ProcessMessage) -> None:
    with _lock, contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()
