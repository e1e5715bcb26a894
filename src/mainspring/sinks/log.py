"""`log:`, one line per task on standard output, and `null:`, which discards tasks."""

import asyncio
import base64
import contextlib
import fcntl
import os
import queue
import re
import select
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from ..model.delivery import DONE, Delivery, Outcome, Retry
from ..model.text import CONTROLS


class LogSink:
    """Writes each task's payload as one line of JSON, as given and without an envelope; control characters are escaped.

    A separate thread writes: a reader that does not read (a full pipe, a terminal with Ctrl-S) blocks the deliveries,
    never the event loop, which must keep renewing leases. The thread is a daemon and writes to the descriptor itself,
    so a write that never returns cannot keep the process from ending either.
    """

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mainspring-log", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        job = _Job(b"".join(map(_line, batch)), loop, loop.create_future())
        self._jobs.put(job)
        error = await job.done
        if error is None:
            return [DONE] * len(batch)
        # Not done: lines that could not be written are retried, and finally become dead letters.
        return [Retry(f"standard output cannot be written: {error.strerror}")] * len(batch)

    async def aclose(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = None
            try:
                with _alone(self._fd):
                    _write_all(self._fd, job.data)
            except OSError as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop is closed: no one is waiting
                job.loop.call_soon_threadsafe(_answer, job.done, error)


class _Job(NamedTuple):
    data: bytes
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[OSError | None]"


def _answer(done: "asyncio.Future[OSError | None]", error: OSError | None) -> None:
    if not done.done():  # done if the node gave up on this delivery
        done.set_result(error)


_UNUSUAL: Final = re.compile(rb"[^\t -~]")


def _line(one: Delivery) -> bytes:
    """Return the payload as exactly one line for any reader: nothing in it can pass for a line of the node."""
    payload = _text_of(one.payload) if one.body.raw else one.payload
    if _UNUSUAL.search(payload) is None:
        return payload + b"\n"
    try:
        if b"\n" in payload or b"\r" in payload:
            # JSON has line breaks only between its tokens: removing them changes nothing else.
            payload = msgspec.json.format(payload, indent=-1)
        text = payload.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):  # not JSON after all: another program wrote the entry
        payload = _text_of(payload)
        text = payload.decode()
    # JSON has these characters only in its strings, where an escape means the same.
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"


def _text_of(raw: bytes) -> bytes:
    try:
        return msgspec.json.encode(raw.decode())
    except UnicodeDecodeError:
        return msgspec.json.encode({"base64": base64.b64encode(raw).decode()})


@contextlib.contextmanager
def _alone(fd: int) -> Iterator[None]:
    """Lock a pipe or socket that several processes may share: a long write to it is not atomic, and lines would mix.

    A record lock, because it belongs to the process: the descriptor itself is shared by all of them.
    """
    if not _mixes(fd):
        yield
        return
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def _mixes(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return sys.platform == "linux" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # another program made our standard output non-blocking
            select.select([], [fd], [])


class NullSink:
    """Counts deliveries and discards them."""

    def __init__(self) -> None:
        self.count = 0

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.count += len(batch)
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Do nothing: no resource is held."""
