"""Run commands: a worker starts a program, keeps the end of its output, and leaves no process of it behind."""

import atexit
import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..model.explain import span
from ..model.job import Output
from ..model.targets.command import INHERITED, Command
from .context import Context
from .handler import Outputs, Work, WrongArguments

log = logging.getLogger("mainspring.worker")

_CODE: Final = """
import os, signal, sys
pids = set()
for line in sys.stdin:
    (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
for pid in pids:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
"""
"""Reads process groups to watch from its input, which the kernel closes when the worker dies, however it dies."""


class OrphanReaper:
    """A small process that kills the commands of a worker that died; started with the first command.

    A killed worker cannot stop its commands, and its job runs on another worker one lease later: without the reaper,
    both runs of a command would continue side by side.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: set[int] = set()

    def start(self) -> None:
        """Start the process before a command starts, so that nothing has to wait afterwards."""
        with self._lock:
            self._send(b"")

    def watch(self, group: int) -> None:
        with self._lock:
            self._watched.add(group)
            self._send(b"+%d\n" % group)

    def release(self, group: int) -> None:
        """Stop watching a group, before its id can be reused."""
        with self._lock:
            self._watched.discard(group)
            self._send(b"-%d\n" % group)

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def _send(self, line: bytes) -> None:
        try:
            self._write(line)
        except OSError:
            # The reaper was killed: start a new one with all groups that run.
            self._process = None
            with contextlib.suppress(OSError):
                self._write(b"".join(b"+%d\n" % one for one in self._watched))

    def _write(self, lines: bytes) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,
            )
        assert self._process.stdin is not None
        if lines:
            self._process.stdin.write(lines)


ORPHAN_REAPER: Final = OrphanReaper()
atexit.register(ORPHAN_REAPER.close)


LOOK_S: Final = 0.05
"""Seconds between checks of a silent program for whether it has ended or must end."""

_CHUNK: Final = 65_536
_SETTLE_S: Final = 0.2
"""Seconds to read output that is still in the pipes when the program has ended."""


class Ends:
    """The beginning and the end of a stream, half of `most` bytes each, and how many bytes there were."""

    def __init__(self, most: int) -> None:
        self._head, self._tail = b"", b""
        self._most = most
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self._most // 2 - len(self._head)
        self._head += data[:room]
        if self._most and (rest := data[room:]):
            self._tail = (self._tail + rest)[-(self._most - self._most // 2) :]

    @property
    def data(self) -> bytes:
        left_out = self.size - len(self._head) - len(self._tail)
        if not left_out or not self._most:
            return self._head + self._tail
        return b"%b\n[%d bytes left out]\n%b" % (self._head, left_out, self._tail)


def _ignore(_text: str) -> None: ...


class Process:
    """One run of a program, in a session of its own: its whole group can be ended."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        output_bytes: int,
        show: Callable[[str], None] = _ignore,
    ) -> None:
        self._show = show
        """Called with text as the program writes it."""
        ORPHAN_REAPER.start()
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
        ORPHAN_REAPER.watch(self._popen.pid)
        self._ends = (Ends(output_bytes), Ends(output_bytes))
        self._selector = selectors.DefaultSelector()
        for stream, ends in zip((self._popen.stdout, self._popen.stderr), self._ends, strict=True):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, ends)

    def run(self, asked_to_end: Callable[[], bool], kill_after_s: float) -> Output:
        """Run until the program ends; when asked to end, terminate it, then kill it. Blocks: call it in a thread."""
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
        out, err = self._ends
        return Output(self._popen.returncode, out.data, err.data, out.size, err.size)

    def _has_ended(self) -> bool:
        """Return True if the program has ended, without reaping it: until then its group id cannot be reused."""
        if not hasattr(os, "waitid"):
            return self._popen.poll() is not None
        return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end(self) -> None:
        """Kill what the program left running in its group; then read the rest of its output."""
        self._signal(signal.SIGKILL)
        ORPHAN_REAPER.release(self._popen.pid)
        self._popen.wait()
        until = time.monotonic() + _SETTLE_S
        while self._selector.get_map() and time.monotonic() < until:
            if not self._read(until - time.monotonic()):
                break  # a process outside the group holds the pipes
        self._selector.close()
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()

    def _read(self, wait_s: float) -> bool:
        """Read what is available within `wait_s`; return False if there was nothing."""
        if not self._selector.get_map():
            time.sleep(LOOK_S)  # it has closed its output and keeps running
            return False
        ready = self._selector.select(max(0.0, wait_s))
        for key, _ in ready:
            data = os.read(key.fd, _CHUNK)
            key.data.add(data)
            if data:
                self._show(data.decode(errors="replace"))
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
    """Kill all commands and their groups at once: this process is about to end."""
    for process in list(_running):
        process.kill()


MOST_ARGUMENTS: Final = 100
_REASON_CHARS: Final = 200


class _Payload(msgspec.Struct, forbid_unknown_fields=True):
    args: list[str] = []


_read_payload: Final = msgspec.json.Decoder(_Payload | None).decode


class CommandWork(Work):
    """Starts the program in a thread, and waits for it there."""

    obeys = True

    def __init__(self, name: str, command: Command) -> None:
        super().__init__(
            self.execute,
            name=name,
            queue=command.queue,
            target=f"command:{name}",
            retry=command.retry,
            timeout_ms=command.timeout_ms,
            result_ttl_ms=command.result_ttl_ms,
        )
        self.command = command

    def read(self, context: Context) -> dict[str, Any]:
        return {"context": context, "args": self._arguments(context)}

    def _arguments(self, context: Context) -> list[str]:
        body = context.job.body
        if body.raw:
            raise WrongArguments(f"command {self.name!r}: its payload is bytes; give JSON or nothing")
        try:
            found = _read_payload(body.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WrongArguments(f"command {self.name!r}: its payload is not {{'args': [...]}}: {error}") from None
        args = found.args if found is not None else []
        if args and not self.command.arguments:
            raise WrongArguments(
                f"command {self.name!r} takes no arguments from tasks; arguments = true in its definition allows them"
            )
        if len(args) > MOST_ARGUMENTS or any("\0" in one for one in args):
            raise WrongArguments(f"command {self.name!r}: at most {MOST_ARGUMENTS} arguments, none with a zero byte")
        return args

    def execute(self, context: Context, args: list[str]) -> Output:
        command, began_s = self.command, time.monotonic()
        try:
            argv, environ = [*command.argv, *args], self._environ(context)
            process = Process(argv, environ, command.cwd, command.output_bytes, context.publish)
        except (OSError, ValueError) as error:
            raise Outputs(self._why_not(error), Output()) from None
        output = process.run(lambda: context.cancelled, command.kill_after_ms / 1000)
        if context.memory is not None:
            context.memory.publish_rest(context)
        if output.exit_code != 0:
            how = _ended(output.exit_code or 0)
            raise Outputs(how + _last_words(output), output, how)
        took = span((time.monotonic() - began_s) * 1000)
        log.info("command %s: task %s ended after %s", self.name, context.id, took, extra={"task": context.id})
        return output

    def _environ(self, context: Context) -> dict[str, str]:
        found = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return found | dict(self.command.env) | environ_of(context)

    def _why_not(self, error: Exception) -> str:
        folder = self.command.cwd
        if folder is not None and not os.access(folder, os.X_OK):
            return f"command {self.name!r} cannot be started: its folder {folder!r} is missing or forbidden"
        return f"command {self.name!r} cannot be started: {self.command.argv[0]!r}: {error}"


def environ_of(context: Context) -> dict[str, str]:
    """Environment variables that describe the task to its command."""
    return {
        "MAINSPRING_TASK_ID": context.id,
        "MAINSPRING_TASK_KEY": context.idempotency_key,
        "MAINSPRING_TASK_ATTEMPT": str(context.attempt),
        "MAINSPRING_TASK_DUE": context.due.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }


def _ended(code: int) -> str:
    if code < 0:
        try:
            return f"ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"ended by signal {-code}"
    return f"exit code {code}"


def _last_words(output: Output) -> str:
    lines = output.stderr.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][-_REASON_CHARS:]}" if lines else ""
