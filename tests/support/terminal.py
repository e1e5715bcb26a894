"""A command whose standard error is a terminal, as for a person who types it."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

from tests.support.serving import ENVIRON


def shown_by(*words: str) -> tuple[int, str, str]:
    """Exit code, what was printed, and what the terminal was sent."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mainspring", *words]
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=ENVIRON
        ) as running,
    ):
        os.close(theirs)
        sent = b"".join(_chunks(screen.fileno()))
        printed, _ = running.communicate(timeout=60)
    return running.returncode, printed.decode(), sent.decode()


def _chunks(screen: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(screen, 4096):
            yield chunk
