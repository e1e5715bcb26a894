"""`mainspring serve` as a user runs it: a process of its own, signals, crashes, restarts."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mainspring.testing.servers import standalone, wait_until

MAIN = [sys.executable, "-c", "from mainspring.cli import main; main()"]
ENVIRON = {
    name: value for name, value in os.environ.items() if not name.startswith("MAINSPRING_") and name != "REDIS_URL"
}


class Serve:
    """A running `mainspring serve` on a port of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("ab") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*MAIN, "serve", "--port", "0", *options], cwd=folder, env=ENVIRON, stdout=out, stderr=err
            )
        self.url = ""
        wait_until(self._started, f"serve is ready; it said:\n{self.log}", timeout_s=30)

    def _started(self) -> bool:
        assert self.process.poll() is None, self.log
        found = re.search(r"the API is at (http://[0-9.:]+)", self.log)
        self.url = found[1] if found else ""
        return found is not None

    @property
    def log(self) -> str:
        return self._err.read_text()

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def status(self, path: str, body: Any = None) -> int:
        return self.call(path, body)[0]

    def server_pid(self) -> int:
        info = json.loads((self.folder / "data" / "server.json").read_text())
        return int(info["pid"])

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Starts `mainspring serve` in one folder; called again, it is the next run on the same data."""
    running: list[Serve] = []

    def start(*options: str) -> Serve:
        running.append(Serve(tmp_path, *(options or ("--data-dir", str(tmp_path / "data")))))
        return running[-1]

    yield start
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
    return False


def test_a_tick_is_printed_once_as_it_was_posted_and_not_before_its_time(
    serve: Callable[..., Serve],
) -> None:
    node = serve()
    assert [node.status(path) for path in ("/livez", "/readyz", "/healthy")] == [200, 200, 200]
    tick = {"item": "user1234", "at": in_seconds(1)}
    assert [node.status("/ticks", tick), node.status("/ticks", tick)] == [202, 200]
    wait_until(lambda: len(node.lines) > 0, "the tick is printed")
    assert datetime.now(UTC) >= datetime.fromisoformat(tick["at"])
    server_pid = node.server_pid()
    assert node.end() == 0
    assert node.lines == [json.dumps(tick)]
    assert is_gone(server_pid)


def test_nothing_but_ticks_is_on_standard_output_and_the_log_says_where_things_are(
    serve: Callable[..., Serve],
) -> None:
    node = serve()
    assert node.end(signal.SIGINT) == 0
    assert node.lines == []
    messages = [json.loads(line)["message"] for line in node.log.splitlines()]
    assert any(message.startswith("the data is at ") for message in messages)
    assert any(message.startswith("try: curl ") for message in messages)


def test_a_tick_survives_a_killed_process(serve: Callable[..., Serve]) -> None:
    node = serve()
    tick = {"item": "survivor", "at": in_seconds(3)}
    assert node.status("/ticks", tick) == 202
    node.process.kill()
    node.process.wait()
    assert node.lines == []
    again = serve()
    wait_until(lambda: again.lines == [json.dumps(tick)], "the tick fires in the next run", timeout_s=30)
    assert again.end() == 0


def test_an_embedded_server_that_is_killed_is_brought_back(serve: Callable[..., Serve]) -> None:
    node = serve()
    tick = {"item": "kept", "at": in_seconds(2)}
    assert node.status("/ticks", tick) == 202
    killed = node.server_pid()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: node.server_pid() != killed, "another server runs", timeout_s=30)
    wait_until(lambda: node.lines == [json.dumps(tick)], "the tick fires", timeout_s=30)
    wait_until(lambda: node.status("/healthy") == 200, "the node is well")
    assert "it runs again" in node.log
    assert node.end() == 0


def test_a_server_that_is_away_means_503_until_it_is_back(serve: Callable[..., Serve]) -> None:
    with standalone(aof=True) as server:
        node = serve("--redis-url", server.url, "--lease", "1s")
        kept = {"item": "kept", "at": in_seconds(3)}
        assert node.status("/ticks", kept) == 202
        server.kill()
        status, problem = node.call("/ticks", {"item": "refused", "at": in_seconds(60)})
        assert (status, problem["status"], problem["title"]) == (503, 503, "Service Unavailable")
        assert (node.status("/livez"), node.status("/readyz")) == (200, 503)
        wait_until(lambda: node.status("/healthy") == 503, "the node says that it is not well")
        server.start()
        wait_until(lambda: node.status("/healthy") == 200, "the node is well again", timeout_s=30)
        assert node.status("/readyz") == 200
        assert node.status("/ticks", {"item": "new", "at": in_seconds(60)}) == 202
        wait_until(lambda: node.lines == [json.dumps(kept)], "what was accepted fires", timeout_s=30)
        assert node.end() == 0


def test_a_full_server_refuses_ticks_with_the_reason(serve: Callable[..., Serve]) -> None:
    with standalone() as server:
        node = serve("--redis-url", server.url)
        server.call("CONFIG", "SET", "maxmemory", "1")
        status, problem = node.call("/ticks", {"item": "a", "at": in_seconds(60)})
        assert (status, problem["status"]) == (507, 507)
        assert "maxmemory" in problem["detail"]
        server.call("CONFIG", "SET", "maxmemory", "0")
        assert node.status("/ticks", {"item": "a", "at": in_seconds(60)}) == 202
        assert node.end() == 0


def test_a_second_signal_ends_a_stop_that_hangs(serve: Callable[..., Serve]) -> None:
    with standalone() as server:
        node = serve("--redis-url", server.url)
        server.pause()  # the stop waits for an answer that does not come
        node.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in node.log, "the stop has begun")
        deadline = time.monotonic() + 20
        while node.process.poll() is None and time.monotonic() < deadline:
            node.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(0.1)
        assert node.process.poll() == 143
        server.resume()


def test_output_that_nobody_reads_any_more_does_not_end_the_node(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    with (tmp_path / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [*MAIN, "serve", "--port", "0", "--data-dir", str(tmp_path / "data")],
            cwd=tmp_path, env=ENVIRON, stdout=write_fd, stderr=err,
        )  # fmt: skip
    os.close(write_fd)
    os.close(read_fd)
    try:
        node = Serve.__new__(Serve)
        node.folder, node.process, node._err = tmp_path, process, tmp_path / "stderr"
        wait_until(node._started, "serve is ready")
        assert node.status("/ticks", {"item": "unread", "at": 0}) == 202
        wait_until(lambda: pending(tmp_path, "unread@0")["attempt"] > 1, "it waits for another attempt")
        assert node.status("/healthy") == 200
        assert node.end() == 0
    finally:
        process.kill()
        process.wait()


def pending(folder: Path, id: str) -> Any:
    return json.loads(run("task", "get", id, "--json", "--data-dir", str(folder / "data"), cwd=folder).stdout)


# -- the command line ------------------------------------------------------------------------------------------


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, *arguments], cwd=cwd, env=ENVIRON | environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--host", "0.0.0.0"), "access control comes later"),
        (("serve", "--lease", "5"), "option --lease"),
        (("serve", "--tick-target", "nowhere"), "no known scheme"),
        (("serve", "--colour"), "No such option"),
        (("sevre",), "serve"),
        (("task", "put", "not JSON"), "the payload is not JSON"),
        (("task", "put", "--at", "2030-01-01T00:00:00"), "naive"),
    ],
)
def test_a_wrong_call_is_exit_code_2_and_one_clear_message(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    ended = run(*arguments, cwd=tmp_path, MAINSPRING_DATA_DIR=str(tmp_path / "data"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_taken_is_said_in_plain_words(serve: Callable[..., Serve], tmp_path: Path) -> None:
    port = serve().url.rpartition(":")[2]
    ended = run("serve", "--port", port, "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in ended.stderr


def test_a_server_that_is_not_there_is_exit_code_1(tmp_path: Path) -> None:
    ended = run("serve", "--port", "0", "--redis-url", "redis://127.0.0.1:1", cwd=tmp_path)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


def test_the_version_is_printed_without_loading_what_it_does_not_need(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout.startswith("mainspring 0.")
    listed = "import sys; from mainspring import cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True).stdout
    assert not {"uvicorn", "uvloop", "rich", "mainspring.node"} & set(loaded.split())


def test_tasks_by_command_share_the_server_of_a_running_node(serve: Callable[..., Serve], tmp_path: Path) -> None:
    node = serve()

    def task(*arguments: str) -> Any:
        ended = run("task", *arguments, "--json", "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
        return json.loads(ended.stdout)

    assert task("put", '{"order": 42}', "--in", "1h", "--id", "order-42")["outcome"] == "created"
    assert task("get", "order-42")["payload"] == {"order": 42}
    moved = task("reschedule", "order-42", "--in", "2h")
    assert task("list")["tasks"][0]["due_ms"] == moved["due_ms"]
    assert task("count") == {"pending": 1, "exact": True}
    assert task("cancel", "order-42") == [{"id": "order-42", "outcome": "cancelled"}]
    assert task("put", '"now"', "--in", "0s")["outcome"] == "created"
    wait_until(lambda: node.lines == ['"now"'], "the node fires what the command put")
    assert node.end() == 0


def test_the_doctor_names_what_to_change_and_fails_only_on_what_cannot_work(tmp_path: Path) -> None:
    with standalone() as server:
        ended = run("doctor", "--redis-url", server.url, cwd=tmp_path)
        assert ended.returncode == 0
        assert "warning" in ended.stdout
        assert "appendonly yes" in ended.stdout
        server.call("REPLICAOF", "127.0.0.1", "1")
        assert run("doctor", "--redis-url", server.url, cwd=tmp_path).returncode == 1
    well = run("doctor", "--json", "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    assert {row["status"] for row in json.loads(well.stdout)} == {"ok"}
