"""The embedded server: a real Valkey (or Redis) for one machine, started and ended with its owner.

    with start() as server:
        ...                      # server.url, server.tcp_url

The first process on a data folder starts the server and owns it; others share it (`owned` is False). There
is never a second server on a folder: the server process itself holds the lock. The server ends with its
owner, also when the owner is killed; sharers then see their connections break (`Unavailable`), and the next
`start` on the folder brings a server up again with every task that the AOF has.

`start` blocks while the server loads its data: from a coroutine call it in a thread. systemd: use
KillMode=mixed, so that the server is not told to stop before its owner has drained.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote

import hiredis

from mainspring.model.errors import EmbeddedError
from mainspring.store.embedded.folder import (
    Folder,
    Info,
    check_binary,
    default_data_dir,
    find_binary,
    memory_environ,
    unusable,
)
from mainspring.store.embedded.watcher import Watcher

_TIMEOUT_S = 2.0  # a server that is busy for longer is asked again by the caller's loop


@dataclass(frozen=True, slots=True)
class Ready:
    """The server answers."""

    pid: int


@dataclass(frozen=True, slots=True)
class Loading:
    """The server is alive and reads its AOF."""


@dataclass(frozen=True, slots=True)
class Silent:
    """No answer, or not the answer of our server."""

    reason: str


def probe(path: Path, password: str) -> Ready | Loading | Silent:
    """Check whether the server behind the socket answers."""
    try:
        _, pong, info = ask(path, ("AUTH", password), ("PING",), ("INFO", "server"))
    except (OSError, EmbeddedError) as error:
        return Silent(str(error))
    if isinstance(pong, hiredis.ReplyError) and str(pong).startswith("LOADING"):
        return Loading()
    # A server that answers PING with an error is ready too: with a full disk it refuses PING, but can still be read.
    if isinstance(info, bytes):
        return Ready(pid=_process_id(info))
    return Silent(f"it answers PING with {pong}")


def listen_on(path: Path, password: str, ports: Iterator[int]) -> int:
    """Let the server listen on the first of `ports` that is free; return that port.

    The port is set at run time, not in the configuration: another program may take a free port between our check
    and the server's start, and then the whole start would fail.
    """
    refusal = None
    for port in ports:
        _, refusal = ask(path, ("AUTH", password), ("CONFIG", "SET", "port", str(port)))
        if refusal == b"OK":
            return port
    raise EmbeddedError(f"the embedded server found no free port on 127.0.0.1: {refusal}")


def ask(path: Path, *commands: tuple[str, ...]) -> list[Any]:
    """Send commands on one short-lived connection; errors of the server are returned as values."""
    reader = hiredis.Reader()
    replies: list[Any] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(b"".join(_packed(command) for command in commands))
        while len(replies) < len(commands):
            data = connection.recv(65536)
            if not data:
                raise EmbeddedError("the server closed the connection")
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
    return replies


def _packed(command: tuple[str, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub knows 1-tuples only
    return packed


def _process_id(info: bytes) -> int:
    fields = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    return int(fields["process_id"])


_LOADING_S = 1800.0  # a server may read its AOF for a long time: this only ends a hang
_POLL_S = 0.01
_PORT_TRIES = 20


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running embedded server. The URLs contain the password, so they are not in the repr."""

    url: str = field(repr=False)
    tcp_url: str = field(repr=False)
    data_dir: Path
    pid: int
    owned: bool
    _watcher: Watcher | None = field(default=None, repr=False, compare=False)

    def stop(self) -> None:
        """Stop the server if this process owns it, and wait for its last flush. May be called again."""
        if self._watcher is not None:
            self._watcher.end()

    def __enter__(self) -> "EmbeddedServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(
    data_dir: Path | str | None = None,
    *,
    binary: str | None = None,
    memory_bytes: int | None = None,
    extra_config: Mapping[str, str] | None = None,
    timeout_s: float = 15.0,
) -> EmbeddedServer:
    """Start the server of a data folder, or share the one that runs there.

    `memory_bytes` (its `maxmemory`; None: half of the machine's memory, 0: no limit) and `extra_config` (server
    directives) count only for the process that starts the server. `timeout_s` is suspended while the server loads its
    data. Raises EmbeddedError if the server cannot start or the folder cannot be used.
    """
    limit = {} if memory_bytes is None else {"maxmemory": str(memory_bytes)}
    chosen = Path(data_dir) if data_dir else default_data_dir()
    try:
        folder = Folder.make(chosen)
        return _own_or_share(folder, binary, {**limit, **(extra_config or {})}, timeout_s)
    except OSError as error:
        raise unusable(chosen, error) from error


def _own_or_share(folder: Folder, binary: str | None, extra: Mapping[str, str], timeout_s: float) -> EmbeddedServer:
    # The process that gets the lock starts the server. Any other waits until that server answers, or until the lock is
    # free because the server was just stopping.
    deadline = _Deadline(timeout_s)
    while True:
        with _lock(folder) as lock_fd:
            if lock_fd is not None:
                return _own(folder, binary, extra, lock_fd, timeout_s)
        match _probe_running(folder):
            case EmbeddedServer() as shared:
                return shared
            case Loading():
                deadline.loading()
            case Silent(reason):
                deadline.check(f"the data folder {folder.path} is in use{_by_whom(folder)}, and {reason}")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _lock(folder: Folder) -> Iterator[int | None]:
    """Yield our copy of the lock, or None if it is taken. Closing our copy leaves the server's copy in force."""
    fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _own(
    folder: Folder, binary: str | None, extra: Mapping[str, str], lock_fd: int, timeout_s: float
) -> EmbeddedServer:
    program = check_binary(binary) if binary else find_binary()
    path = folder.socket_path()
    path.unlink(missing_ok=True)  # left by a killed server; the lock proves that no process listens there
    folder.write_conf(path, extra)
    folder.turn_log()
    watcher = Watcher([program, str(folder.conf)], lock_fd=lock_fd, log=folder.log, environ=memory_environ())
    try:
        pid = _await_ready(folder, path, watcher, timeout_s)
        port = listen_on(path, folder.password(), _ports(folder.info()))
        info = Info(socket=str(path), port=port, pid=pid, owner_pid=os.getpid())
        folder.write_info(info)
    except BaseException:
        watcher.end()
        raise
    return _server(folder, info, watcher)


def _await_ready(folder: Folder, path: Path, watcher: Watcher, timeout_s: float) -> int:
    deadline = _Deadline(timeout_s)
    while True:
        match probe(path, folder.password()):
            case Ready(pid):
                return pid
            case Loading():
                deadline.loading()
            case Silent(reason):
                if watcher.ended:
                    raise EmbeddedError(
                        f"the embedded server in {folder.path} ended during startup.{_remedy(folder.log_tail())}"
                        f" The end of {folder.log}:\n{folder.log_tail()}"
                    )
                deadline.check(
                    f"the embedded server in {folder.path} does not answer ({reason}). The end of its log:\n"
                    f"{folder.log_tail()}"
                )
        time.sleep(_POLL_S)


def _remedy(log: str) -> str:
    """Return what to do, if the log names a known problem."""
    if "Bad file format reading the append only file" not in log:
        return ""
    return (
        " Its append-only file is damaged. Restore it from a copy; or make a copy, and let `valkey-check-aof --fix` (or"
        " `redis-check-aof --fix`) cut off everything from the damage on, which is lost then."
    )


def _probe_running(folder: Folder) -> EmbeddedServer | Loading | Silent:
    info = folder.info()
    if info is None:
        return Silent("its server is not ready")
    match probe(Path(info.socket), folder.password()):
        case Ready(pid) if pid == info.pid:
            return _server(folder, info, None)
        case Ready():
            return Silent("its server is not ready")  # it answers, but its port is not known yet
        case Silent(reason):
            return Silent(f"its server does not answer: {reason}")
        case Loading() as loading:
            return loading


def _server(folder: Folder, info: Info, watcher: Watcher | None) -> EmbeddedServer:
    password = folder.password()
    return EmbeddedServer(
        url=f"unix://{quote(info.socket)}?password={password}",
        tcp_url=f"redis://:{password}@127.0.0.1:{info.port}/0",
        data_dir=folder.path,
        pid=info.pid,
        owned=watcher is not None,
        _watcher=watcher,
    )


def _ports(last: Info | None) -> Iterator[int]:
    """Yield the previous run's port, so that addresses stay valid over a restart; then any free port."""
    if last is not None:
        yield last.port
    for _ in range(_PORT_TRIES):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        yield port


def _by_whom(folder: Folder) -> str:
    info = folder.info()
    return f" by process {info.owner_pid} (server {info.pid})" if info else ""


class _Deadline:
    """Time limit of a start; a server that loads its data extends it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._last = self._end + _LOADING_S

    def loading(self) -> None:
        self._end = min(time.monotonic() + self._timeout_s, self._last)

    def check(self, trouble: str) -> None:
        if time.monotonic() >= self._end:
            raise EmbeddedError(
                f"{trouble}. Waited {self._timeout_s:g} s. Stop the process that uses the folder, or choose "
                "another folder with MAINSPRING_DATA_DIR"
            )


# Several commands on one data folder: the one that started the server stops it after the others have finished.
#
# Each command holds a shared lock while it uses the server. The one that stops the server takes the lock exclusively,
# so that a command that arrives meanwhile waits, finds the folder free and starts its own server. Nodes do not take
# part: they restart their server when it ends.

OTHERS_S: Final = 10.0
"""Seconds that stopping a server waits for the commands that share it."""
_GUEST_POLL_S: Final = 0.01


@contextlib.contextmanager
def guest(data_dir: Path | None = None, *, memory_bytes: int | None = None) -> Iterator[EmbeddedServer]:
    """Provide the server of a folder for as long as a command needs it."""
    lock_fd = _come(data_dir or default_data_dir())
    try:
        server = start(data_dir, memory_bytes=memory_bytes)
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
        time.sleep(_GUEST_POLL_S)
