"""`mainspring serve --processes N`: a parent that keeps N node processes and the embedded server running.

The parent owns what they share: the listening socket of the API, so that a child that is started again loses no
connection, and the embedded server. The children are nodes like all others: they divide the partitions among
themselves, and what one drops the others take over. They get their settings by environment, since the URL of
the server may hold a password.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from ..config.config import Config
from ..config.settings import PREFIX
from ..model.errors import EmbeddedError
from ..model.metrics import Family, labelled, merged, single
from ..store import embedded
from ..store.embedded import folder
from ..store.redis.url import safe_url
from .process import GRACE_S, STOPPING, Alarm, exit_now, stop_signals

node_log = logging.getLogger("mainspring.node")

metrics_log = logging.getLogger("mainspring.metrics")

log = logging.getLogger("mainspring.supervisor")


# A pair of connected sockets between the supervisor and each of its processes; the kernel closes it when either ends.
#
# The child sends one byte when it is ready. The parent sends nothing: when the child reads end of file, the parent is
# gone. PR_SET_PDEATHSIG would do the same on Linux only, and would not allow the time that a clean stop may take.

_READY: Final = b"r"


def tie() -> tuple[socket.socket, socket.socket]:
    """Return the parent's end and the child's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


class ParentWatch:
    """The child's end of the socket pair: stops this process when the parent is gone."""

    def __init__(self, fd: int, *, shutdown_timeout_s: float) -> None:
        self._socket = socket.socket(fileno=fd)
        self._stop_within_s = shutdown_timeout_s + GRACE_S
        # A thread, because the event loop may be the very thing that hangs.
        threading.Thread(target=self._watch, name="mainspring-lifeline", daemon=True).start()

    def ready(self) -> None:
        """Tell the parent that this process works."""
        try:
            self._socket.sendall(_READY)
        except OSError as error:  # the watch notices it as well
            node_log.debug("could not tell the parent that this process is ready: %s", error)

    def _watch(self) -> None:
        try:
            self._socket.recv(1)
        except OSError as error:
            node_log.debug("the tie to the parent broke: %s", error)
        node_log.warning("the parent process is gone: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._stop_within_s)
        os._exit(1)


# Metrics of all processes of `serve --processes N`. They share one port, so a scrape reaches any of them.
#
# Each process serves its own metrics on a socket in a folder of the parent. The one that is scraped asks the others,
# and labels each sample with the number of its process.

Collect = Callable[[], Awaitable[list[Family]]]

WAIT_S: Final = 4.0
"""Seconds to wait for another process: one that hangs must not delay the metrics of the others."""
_SUFFIX: Final = ".metrics"


class ProcessMetrics:
    """Metrics of this process and its siblings; `path` is its own socket, `<folder>/<number>.metrics`."""

    def __init__(self, path: Path, collect: Collect) -> None:
        self._socket_path = path
        self._collect = collect
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._socket_path.unlink(missing_ok=True)  # left by a process that was killed
        self._server = await asyncio.start_unix_server(self._send_own, self._socket_path)
        self._socket_path.chmod(0o600)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._socket_path.unlink(missing_ok=True)

    async def _send_own(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(msgspec.msgpack.encode(await self._collect()))
            await writer.drain()
        writer.close()

    async def collect_all(self) -> list[Family]:
        """Return the metrics of all processes that answer, each sample with the number of its process."""
        paths = sorted(self._socket_path.parent.glob(f"*{_SUFFIX}"), key=lambda one: (len(one.name), one.name))
        answers = await asyncio.gather(*(self._ask(path) for path in paths))
        families = [labelled(one, "process", path.stem) for path, one in zip(paths, answers, strict=True) if one]
        return merged([*families, _count(len(families))])

    async def _ask(self, path: Path) -> Sequence[Family]:
        if path == self._socket_path:
            return await self._collect()
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    return msgspec.msgpack.decode(await reader.read(), type=list[Family])
                finally:
                    writer.close()
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            metrics_log.warning(
                "process %s does not report its metrics: %s", path.stem, str(error) or type(error).__name__
            )
            return ()


def _count(processes: int) -> list[Family]:
    return [single("mainspring_processes", "gauge", "Processes whose figures these are.", processes)]


LOOK_AGAIN_S: Final = 5.0


class Embedding:
    """One data folder's server. Its address stays the same over restarts, so connections find it again."""

    def __init__(self, data_dir: Path | None, memory_bytes: int | None = None) -> None:
        self._data_dir = data_dir
        self._memory_bytes = folder.default_memory_bytes() if memory_bytes is None else memory_bytes
        self._server: embedded.EmbeddedServer | None = None
        self._looked_at = 0.0

    @property
    def where(self) -> str:
        return str((self._data_dir or folder.default_data_dir()).expanduser().absolute())

    @property
    def server(self) -> embedded.EmbeddedServer | None:
        return self._server

    async def start(self) -> str:
        """Start the server or share the one that runs; return its URL."""
        self._server = await self._in_thread()
        if not self._server.owned:
            node_log.info("sharing the server that another process runs on %s", self.where)
        elif self._memory_bytes:
            node_log.info(
                "embedded server: maxmemory is %.0f MiB, noeviction: a full server refuses new tasks, keeps those it"
                " has; embedded_memory_bytes sets another limit",
                self._memory_bytes / 1024 / 1024,
            )
        else:
            node_log.warning("embedded server: no maxmemory (embedded_memory_bytes is 0): it may use up the machine's")
        return self._server.url

    async def heal(self, well: bool) -> None:
        """Restart the server if it is gone, even if it belonged to another process; this process owns the new one."""
        server = self._server
        if server is None or not self._suspicious(server, well):
            return
        try:
            found = await self._in_thread()
        except EmbeddedError as error:
            node_log.error("the embedded server cannot be brought back: %s", error)
            return
        if found.pid == server.pid:
            return  # it is alive: the engine has another problem
        node_log.warning("the embedded server was gone (process %d); it runs again (%d)", server.pid, found.pid)
        self._server = found
        await asyncio.to_thread(server.stop)  # collects its watcher

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)

    def _suspicious(self, server: embedded.EmbeddedServer, well: bool) -> bool:
        if not _runs(server.pid):
            return True
        # A process id says little (it may be a zombie, or another process by now): a failing engine is a reason
        # to look closer, though not all the time.
        if well or time.monotonic() < self._looked_at + LOOK_AGAIN_S:
            return False
        self._looked_at = time.monotonic()
        return True

    async def _in_thread(self) -> embedded.EmbeddedServer:
        """Start it in a thread, because it blocks while data is loaded. If this task is cancelled, so is the result."""
        start = asyncio.create_task(asyncio.to_thread(embedded.start, self._data_dir, memory_bytes=self._memory_bytes))
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            with contextlib.suppress(EmbeddedError):
                await asyncio.to_thread((await start).stop)
            raise


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


FIRST_DELAY_S: Final = 0.25
LONGEST_DELAY_S: Final = 30.0
RAN_WELL_S: Final = 10.0
HEAL_S: Final = 0.25
REFUSED: Final = 2
"""Exit code of a process that refuses its settings: it would refuse them the next time, too."""


class Backoff:
    """Wait before a process is started again: ever longer, until one has run well for a while."""

    def __init__(self) -> None:
        self._delay_s = 0.0

    def after(self, ready_s: float) -> float:
        """Return the wait after a life that was ready for so long; a slow start that fails does not count."""
        if ready_s >= max(RAN_WELL_S, self._delay_s):
            self._delay_s = 0.0
        self._delay_s = min(self._delay_s * 2, LONGEST_DELAY_S) or FIRST_DELAY_S
        return self._delay_s


@dataclass(slots=True)
class Child:
    """One of the N places, and the process that fills it now."""

    number: int
    process: asyncio.subprocess.Process | None = None
    sent_away: bool = False
    """True if the process was asked to end, and is to be started again at once."""
    ready_since_s: float | None = None

    @property
    def ready_s(self) -> float:
        return 0.0 if self.ready_since_s is None else time.monotonic() - self.ready_since_s

    def send(self, signal_number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self.process.send_signal(signal_number)

    def __str__(self) -> str:
        return f"process {self.number} ({self.process.pid})" if self.process else f"process {self.number}"


class Supervisor:
    """Starts `command` N times over one listening socket, and again when one ends."""

    def __init__(self, config: Config, command: Sequence[str], listener: socket.socket) -> None:
        self._config = config
        self._command = command
        self._listener = listener
        self._embedding = Embedding(config.data_dir, config.embedded_memory_bytes) if config.redis_url is None else None
        self._children = [Child(number) for number in range(1, config.processes + 1)]
        self._stop_within_s = (
            config.shutdown_timeout_s + GRACE_S + 1.0
        )  # a child ends by itself within the first two parts
        self._stopping = asyncio.Event()
        self._started: Callable[[], None] | None = None
        self._code = 0
        self._folder = Path()
        """Folder of the children's metrics sockets; private to this user."""

    @property
    def where(self) -> str:
        """The place of the data, in words and without secrets."""
        return safe_url(self._config.redis_url or "") if self._embedding is None else self._embedding.where

    async def run(self, started: Callable[[], None]) -> int:
        """Run until a signal, or until a child refuses its settings; return the exit code.

        `started` is called when the first child is ready.
        """
        self._started = started
        with self._signals(), tempfile.TemporaryDirectory(prefix="mainspring-") as folder:
            self._folder = Path(folder)
            try:
                url = await self._server_url()
                if url is not None:
                    # Given only a URL, the children would not know that everything is on one machine.
                    reach = self._config.http_reach
                    await self._supervise(_environ(replace(self._config, redis_url=url, http_allow=reach)))
            finally:
                self._listener.close()
                if self._embedding is not None:
                    await self._embedding.stop()
        return self._code

    async def _server_url(self) -> str | None:
        """Return the server's URL; None if a signal ended a long start (loading a large AOF)."""
        if self._embedding is None:
            return self._config.redis_url
        start = asyncio.create_task(self._embedding.start())
        ended = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([start, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not start.done():
            start.cancel()
            await asyncio.wait([start])
            return None
        return await start

    async def _supervise(self, environ: dict[str, str]) -> None:
        async with asyncio.TaskGroup() as parts:
            healing = parts.create_task(self._heal())
            async with asyncio.TaskGroup() as keepers:
                for child in self._children:
                    keepers.create_task(self._keep(child, environ))
            healing.cancel()  # only now: the children need the server to hand over

    async def _heal(self) -> None:
        while self._embedding is not None:
            # Never "well": without an engine to report problems, check the server itself from time to time.
            await self._embedding.heal(well=False)
            await asyncio.sleep(HEAL_S)

    # -- one child --------------------------------------------------------------------------------------------

    async def _keep(self, child: Child, environ: dict[str, str]) -> None:
        """Keep one place filled until the end."""
        if self._config.node_id is not None:
            environ = environ | {PREFIX + "NODE_ID": f"{self._config.node_id}-{child.number}"}
        backoff = Backoff()
        while not self._stopping.is_set():
            self._judge(child, await self._live(child, environ))
            delay_s = 0.0 if child.sent_away else backoff.after(child.ready_s)
            child.process, child.sent_away, child.ready_since_s = None, False, None
            if not self._stopping.is_set():
                log.info("%s starts again in %.2f s", child, delay_s)
                await self._pause(delay_s)

    async def _live(self, child: Child, environ: dict[str, str]) -> int | OSError:
        """Run one life of a child; return its exit code, or why it could not be started."""
        ours, theirs = tie()
        with ours:
            with theirs:
                fds = (self._listener.fileno(), theirs.fileno())
                try:
                    child.process = await asyncio.create_subprocess_exec(
                        *self._command, "--listen-fd", str(fds[0]), "--parent-fd", str(fds[1]),
                        "--metrics-socket", str(self._folder / f"{child.number}.metrics"),
                        pass_fds=fds,
                        env=environ,
                        stdin=asyncio.subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C reaches the parent, which signals each child once
                    )  # fmt: skip
                except OSError as error:
                    return error
            log.info("%s started", child)
            if self._stopping.is_set():  # the signal came while it was being started
                child.send(signal.SIGTERM)
            async with asyncio.TaskGroup() as listeners:
                listening = listeners.create_task(self._listen(child, ours))
                code = await child.process.wait()
                listening.cancel()
            return code

    async def _listen(self, child: Child, line: socket.socket) -> None:
        """Wait for the byte that says the child is ready."""
        with contextlib.suppress(ConnectionError):
            if await asyncio.get_running_loop().sock_recv(line, 1):
                log.info("%s is ready", child)
                child.ready_since_s = time.monotonic()
                started, self._started = self._started, None
                if started is not None:
                    started()

    def _judge(self, child: Child, code: int | OSError) -> None:
        if isinstance(code, OSError):
            log.error("%s cannot be started: %s", child, code)
        elif self._stopping.is_set():
            log.info("%s ended with %s", child, _spoken(code))
            if not _ended_cleanly(child, code):
                self._code = self._code or 1
        elif code == REFUSED:
            log.error("%s refuses its settings (see its message above): ending all", child)
            self._code = REFUSED
            self._stop()
        else:
            log.log(logging.INFO if child.sent_away else logging.ERROR, "%s ended with %s", child, _spoken(code))

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()

    # -- stopping -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Within the block, SIGTERM and SIGINT stop; SIGHUP restarts the children, unless the terminal was closed."""
        loop = asyncio.get_running_loop()
        renews = not os.isatty(0) and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        with stop_signals(self._stop, self._end_now, STOPPING[:2] if renews else STOPPING):
            if renews:
                loop.add_signal_handler(signal.SIGHUP, self._renew)
            try:
                yield
            finally:
                if renews:
                    loop.remove_signal_handler(signal.SIGHUP)

    def _stop(self) -> None:
        if self._stopping.is_set():
            return
        log.info("stopping")
        self._stopping.set()
        self._listener.close()  # refuse new connections: no process would answer them
        self._send_all(signal.SIGTERM)
        Alarm(self._stop_within_s, GRACE_S + 1.0, self._kill_late)

    def _kill_late(self) -> None:
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                log.error(
                    "%s did not stop within shutdown_timeout (%g s): killed", child, self._config.shutdown_timeout_s
                )
        self._send_all(signal.SIGKILL)

    def _end_now(self, number: int) -> None:
        log.warning("a second signal: ending all processes at once")
        self._send_all(signal.SIGKILL)
        exit_now(number)

    def _renew(self) -> None:
        log.info("SIGHUP: every process stops and starts again")
        for child in self._children:
            child.sent_away = child.process is not None
        self._send_all(signal.SIGHUP)

    def _send_all(self, number: int) -> None:
        for child in self._children:
            child.send(number)


def child_command() -> list[str]:
    """Return `mainspring serve` in this interpreter; -P keeps files in the working folder from acting as modules."""
    return [sys.executable, "-P", "-m", "mainspring", "serve"]


def _environ(config: Config) -> dict[str, str]:
    """Return the environment with the current settings, without the variables they came from."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != "REDIS_URL"}
    return rest | config.to_environ()


def _ended_cleanly(child: Child, code: int) -> bool:
    """True for an end that needs no report during a stop: nothing was cut short."""
    if code == 1 and child.ready_since_s is None:
        return True  # it never came up and has just given up, as it would have without the stop
    return code in (0, -signal.SIGTERM)  # the signal itself ends a child that is not up yet


def _spoken(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
