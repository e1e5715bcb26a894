"""Starts a program, keeps the end of what it writes, and leaves nothing of it behind."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..model.result import Output
from .guard import GUARD

LOOK_S: Final = 0.05
"""How often to look whether it has ended or shall end, while it writes nothing."""

_CHUNK: Final = 65_536
_SETTLE_S: Final = 0.2
"""For output that is still in the pipes when the program has ended."""


class Tail:
    """The last bytes of a stream, and how many there were."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._data = b""
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if self._most:
            self._data = (self._data + data)[-self._most :]

    @property
    def data(self) -> bytes:
        return self._data


class Process:
    """One run of a program, in a session of its own: its whole group can be ended."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None, output_bytes: int) -> None:
        GUARD.start()
        self._popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        GUARD.watch(self._popen.pid)
        self._tails = (Tail(output_bytes), Tail(output_bytes))
        self._selector = selectors.DefaultSelector()
        for stream, tail in zip((self._popen.stdout, self._popen.stderr), self._tails, strict=True):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, tail)

    def run(self, asked_to_end: Callable[[], bool], kill_after_s: float) -> Output:
        """Until it has ended; when asked, it is told to end, and then made to. Blocks: for a thread."""
        _running.add(self)
        try:
            deadline = None
            while not self._has_ended():
                self._read(LOOK_S)
                if deadline is None and asked_to_end():
                    self._signal(signal.SIGTERM)
                    deadline = time.monotonic() + kill_after_s
                elif deadline is not None and time.monotonic() > deadline:
                    self._signal(signal.SIGKILL)
        finally:
            _running.discard(self)
            self._end()
        out, err = self._tails
        return Output(self._popen.returncode, out.data, err.data, out.size, err.size)

    def _has_ended(self) -> bool:
        """Without collecting it: until then its group keeps its number, and nobody else can get it."""
        if not hasattr(os, "waitid"):
            return self._popen.poll() is not None
        return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end(self) -> None:
        """What the program left running in its group goes with it; then the rest of its output is read."""
        self._signal(signal.SIGKILL)
        GUARD.release(self._popen.pid)
        self._popen.wait()
        until = time.monotonic() + _SETTLE_S
        while self._selector.get_map() and time.monotonic() < until:
            if not self._read(until - time.monotonic()):
                break  # somebody outside the group holds the pipes
        self._selector.close()
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()

    def _read(self, wait_s: float) -> bool:
        """What there is to read now, or within that time; False if there was nothing."""
        if not self._selector.get_map():
            time.sleep(LOOK_S)  # it has closed its output and goes on
            return False
        ready = self._selector.select(max(0.0, wait_s))
        for key, _ in ready:
            data = os.read(key.fd, _CHUNK)
            key.data.add(data)
            if not data:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)


_running: Final[set[Process]] = set()
"""Changed by one operation at a time, so threads need no lock."""


def kill_all() -> None:
    """At once, with their groups: this process is about to end, and nobody would look after them."""
    for process in list(_running):
        process.kill()
