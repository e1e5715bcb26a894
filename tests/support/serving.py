"""`mainspring serve` as a user runs it: a process of its own, its output in files, its API over HTTP."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mainspring.testing.servers import wait_until

MAIN = [sys.executable, "-c", "from mainspring.cli import main; main()"]
ENVIRON = {
    name: value for name, value in os.environ.items() if not name.startswith("MAINSPRING_") and name != "REDIS_URL"
}


class Serve:
    """A running `mainspring serve` on a port of its own."""

    def __init__(
        self, folder: Path, *options: str, stdout: int | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("ab") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*MAIN, "serve", "--port", "0", *options],
                cwd=folder,
                env=ENVIRON | dict(environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )
        self.url = ""

    def started(self) -> bool:
        assert self.process.poll() is None, self.log
        found = re.search(r"(?:the API is|probes and metrics are) at (http://[0-9.:]+)", self.log)
        self.url = found[1] if found else ""
        return found is not None

    def wait_started(self) -> "Serve":
        wait_until(self.started, f"serve is ready; its log is in {self._err}", timeout_s=60)
        return self

    @property
    def log(self) -> str:
        return self._err.read_text()

    @property
    def messages(self) -> list[str]:
        """The log without what is not of ours to write; a line may be half written."""
        return [json.loads(line)["message"] for line in self.log.splitlines(keepends=True) if line.endswith("}\n")]

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def status(self, path: str, body: Any = None) -> int:
        return self.call(path, body)[0]

    def wait_well(self, *probes: str) -> None:
        """Wait until all probes answer 200. A machine that stalls for two seconds may make one of them say 503."""
        wait_until(lambda: all(self.status(one) == 200 for one in probes), f"{probes} say 200", timeout_s=60)

    def server_pid(self) -> int:
        info = json.loads((self.folder / "data" / "server.json").read_text())
        return int(info["pid"])

    def written(self, item: str) -> bool:
        """True once the embedded server's file has it: on a slow disk the server holds writes back for up to 2 s."""
        files = (self.folder / "data" / "appendonlydir").glob("*.incr.aof")
        return any(item.encode() in file.read_bytes() for file in files)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Callable[..., Serve]]:
    """Starts `mainspring serve` in one folder; called again, it is the next run on the same data."""
    running: list[Serve] = []

    def start(*options: str, stdout: int | None = None, wait: bool = True) -> Serve:
        options = options if "--redis-url" in options else ("--data-dir", str(folder / "data"), *options)
        running.append(Serve(folder, *options, stdout=stdout))
        return running[-1].wait_started() if wait else running[-1]

    try:
        yield start
    finally:
        for one in running:
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait()


def in_seconds(seconds: float) -> str:
    due = datetime.now(UTC) + timedelta(seconds=seconds)
    return due.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # An orphan that ended stays in the list until the init process collects it, which may take its time.
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return False


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, *arguments], cwd=cwd, env=ENVIRON | environ, capture_output=True, text=True, check=False, timeout=100
    )
