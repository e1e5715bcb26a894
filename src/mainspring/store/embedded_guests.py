"""Commands that come and go on one data folder: whoever started the server ends it after the others are done with it.

Each holds a shared lock while it uses the server. Who ends the server takes the lock for itself, so that whoever comes
meanwhile waits, finds the folder free and starts a server of its own. Nodes do not take part: they bring their server
back when it ends.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from . import embedded
from .embedded_folder import Folder, default_data_dir, unusable

OTHERS_S: Final = 10.0
"""So long the end of a server waits for those who share it."""
_POLL_S: Final = 0.01


@contextlib.contextmanager
def guest(data_dir: Path | None = None) -> Iterator[embedded.EmbeddedServer]:
    """The server of a folder, for as long as a command needs it."""
    lock_fd = _come(data_dir or default_data_dir())
    try:
        server = embedded.start(data_dir)
        try:
            yield server
        finally:
            if server.owned:
                _await_others(lock_fd)
                server.stop()
    finally:
        os.close(lock_fd)


def _come(chosen: Path) -> int:
    try:
        fd = os.open(Folder.make(chosen).guests, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(chosen, error) from error
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _await_others(lock_fd: int) -> None:
    end = time.monotonic() + OTHERS_S
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_POLL_S)
