"""The tie between a supervisor and one of its processes. The kernel cuts it, however either of them ends.

A pair of connected sockets. The child says one word, that it is ready; the parent says none, and when the child
reads its end of file, the parent is gone. A signal at the parent's death (PR_SET_PDEATHSIG) would do the same on Linux
only, and would not know the time that a clean stop may take.
"""

import logging
import os
import signal
import socket
import threading
import time
from typing import Final

from .signals import GRACE_S

log = logging.getLogger("mainspring.node")

_READY: Final = b"r"


def tie() -> tuple[socket.socket, socket.socket]:
    """The parent's end and the child's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


class Lifeline:
    """The child's end: stops this process when the parent is gone."""

    def __init__(self, fd: int, *, shutdown_timeout_s: float) -> None:
        self._socket = socket.socket(fileno=fd)
        self._patience_s = shutdown_timeout_s + GRACE_S
        # A thread, because the event loop may be the very thing that hangs.
        threading.Thread(target=self._watch, name="mainspring-lifeline", daemon=True).start()

    def ready(self) -> None:
        """Tell the parent that this process works."""
        try:
            self._socket.sendall(_READY)
        except OSError as error:  # the watch has seen it as well
            log.debug("the parent did not hear that this process is ready: %s", error)

    def _watch(self) -> None:
        try:
            self._socket.recv(1)
        except OSError as error:
            log.debug("the tie to the parent broke: %s", error)
        log.warning("the parent process is gone: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._patience_s)
        os._exit(1)
