"""What a process costs: CPU time and most memory, as the kernel tells it."""

import os
from pathlib import Path

import msgspec


class Usage(msgspec.Struct, frozen=True):
    name: str
    pid: int
    cpu_s: float
    memory_mb: float
    """The most it had at one time."""


class Usages:
    """Looks at processes from time to time, so that of one that has gone the last figures are known."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._known: dict[str, Usage] = {}

    def watch(self, name: str, pid: int) -> None:
        self._pids[name] = pid

    def look(self) -> None:
        for name, pid in self._pids.items():
            if (usage := usage_of(name, pid)) is not None:
                self._known[name] = usage

    def told(self, name: str, usage: Usage | None) -> None:
        """What a process has told of itself at its end."""
        if usage is not None:
            self._known[name] = Usage(name, usage.pid, usage.cpu_s, usage.memory_mb)

    def all(self) -> list[Usage]:
        return [self._known[name] for name in self._pids if name in self._known]


def usage_of(name: str, pid: int) -> Usage | None:
    """None for a process that is gone, and on systems without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    if not peaks:
        return None  # it has ended, and nobody has collected it yet
    ticks = int(fields[11]) + int(fields[12])  # utime and stime, counted from after the name
    return Usage(name, pid, round(ticks / os.sysconf("SC_CLK_TCK"), 2), round(peaks[0] / 1024, 1))
