"""The watcher: a small process between the owner and the server, so that the server ends with its owner.

The owner holds the write end of a pipe, the watcher the read end. However the owner ends (a clean stop,
an exception, SIGKILL), the kernel closes the pipe, the watcher reads end-of-file and ends the server with
SIGTERM, on which the server flushes its AOF. A clean stop takes the same path, so that path is exercised often.

Why not PR_SET_PDEATHSIG from the owner: it fires when the *thread* that forked ends, not the process, so
a server started from a worker thread would die with that thread; and macOS does not have it. Between
watcher and server it is right (the watcher forks from its main thread) and guards against a killed watcher.

This file is also the watcher's program. It is run by its path without site-packages, to be small and quick
to start, and so imports the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

_GRACE_S = 30.0  # for the last AOF flush; a server that has not ended by then is stuck and is killed
_PR_SET_PDEATHSIG = 1
_MINE: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


class Watcher:
    """The owner's side: starts the watcher and its server, and ends both."""

    def __init__(self, command: list[str], *, lock_fd: int, log: Path, environ: Mapping[str, str]) -> None:
        read_fd, self._pipe_fd = os.pipe()
        self._owner_pid = os.getpid()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(lock_fd), *command],
                    stdin=read_fd,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    pass_fds=(lock_fd,),
                    env=environ,  # the watcher passes it on to the server
                    start_new_session=True,  # Ctrl-C in the owner's terminal must not reach the server
                )
        except BaseException:
            os.close(self._pipe_fd)
            raise
        finally:
            os.close(read_fd)
        _MINE.add(self)

    @property
    def ended(self) -> bool:
        """True once the server is gone (the watcher ends right after it)."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Stop the server and wait for its end. May be called again; does nothing in a forked child."""
        if os.getpid() != self._owner_pid:
            return
        self.let_go()
        try:
            self._process.wait(_GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Close this process's end of the pipe."""
        if self._pipe_fd >= 0:
            pipe_fd, self._pipe_fd = self._pipe_fd, -1
            os.close(pipe_fd)


def _let_go_in_a_forked_child() -> None:
    # A child that kept the pipe open would keep the server alive after the owner's death.
    for watcher in list(_MINE):
        watcher.let_go()


os.register_at_fork(after_in_child=_let_go_in_a_forked_child)


def watch(lock_fd: int, command: list[str]) -> int:
    """Run the server until it ends or standard input closes. This is the watcher's side."""
    # Only the end of the owner or of the server ends the watcher. Not SIG_IGN: the server would inherit it and, until
    # it has set its own handlers, ignore the SIGTERM of an owner that dies at once.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.umask(0o077)  # tasks may be confidential, also in a data folder that others may list
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(lock_fd,),
        preexec_fn=_end_with_parent(),
    )
    # From here the server alone holds the lock: it is free exactly when the server is gone.
    os.close(lock_fd)
    threading.Thread(target=_end_when_owner_is_gone, args=(server,), daemon=True).start()
    return server.wait()


def _end_when_owner_is_gone(server: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    server.terminate()  # Popen first checks that the server still runs: never kill another process with its pid
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_GRACE_S)
    server.kill()


def _end_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return set_death_signal


if __name__ == "__main__":
    code = watch(int(sys.argv[1]), sys.argv[2:])
    os._exit(code if code >= 0 else 128 - code)
