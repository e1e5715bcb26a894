"""Ends commands whose worker is gone: a small process of its own, which the kernel tells when the worker dies.

A killed worker can end nothing any more, and its job runs on another worker one lease later. Without this both runs of
a command would go on side by side.
"""

import atexit
import contextlib
import subprocess
import sys
import threading
from typing import Final

_CODE: Final = """
import os, signal, sys
pids = set()
for line in sys.stdin:
    (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
for pid in pids:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
"""
"""Reads which groups to watch until its input ends: that happens when the worker does, however it does."""


class Guard:
    """Started with the first command."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: set[int] = set()

    def start(self) -> None:
        """Before a command is started, so that nothing has to be waited for after."""
        with self._lock:
            self._tell(b"")

    def watch(self, group: int) -> None:
        with self._lock:
            self._watched.add(group)
            self._tell(b"+%d\n" % group)

    def release(self, group: int) -> None:
        """Before its number can be another's."""
        with self._lock:
            self._watched.discard(group)
            self._tell(b"-%d\n" % group)

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def _tell(self, line: bytes) -> None:
        try:
            self._written(line)
        except OSError:
            # It was killed. A new one hears of everything that runs.
            self._process = None
            with contextlib.suppress(OSError):
                self._written(b"".join(b"+%d\n" % one for one in self._watched))

    def _written(self, lines: bytes) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,
            )
        assert self._process.stdin is not None
        if lines:
            self._process.stdin.write(lines)


GUARD: Final = Guard()
atexit.register(GUARD.close)
