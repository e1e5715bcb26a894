"""`mainspring serve` as a user runs it: a process of its own, signals, crashes, restarts."""

import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mainspring import SyncClient
from mainspring.testing.servers import standalone, wait_until
from tests.support.serving import Serve, in_seconds, is_gone, run, serving
from tests.support.web_receiver import Answer, Request, receiving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    with serving(tmp_path) as start:
        yield start


def test_a_tick_is_printed_once_as_it_was_posted_and_not_before_its_time(
    serve: Callable[..., Serve],
) -> None:
    node = serve()
    node.wait_well("/livez", "/readyz", "/healthy")
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
    tick = {"item": "survivor", "at": in_seconds(8)}  # not before the kill, even on a slow machine
    assert node.status("/ticks", tick) == 202
    node.process.kill()
    node.process.wait()
    assert node.lines == []
    again = serve()
    wait_until(lambda: again.lines == [json.dumps(tick)], "the tick fires in the next run", timeout_s=60)
    assert again.end() == 0


def test_an_embedded_server_that_is_killed_is_brought_back(serve: Callable[..., Serve]) -> None:
    node = serve()
    tick = {"item": "kept", "at": in_seconds(4)}  # not before the kill, also if the machine stalls
    assert node.status("/ticks", tick) == 202
    wait_until(lambda: node.written("kept"), "it is on disk")
    killed = node.server_pid()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: node.server_pid() != killed, "another server runs", timeout_s=60)
    wait_until(lambda: node.lines == [json.dumps(tick)], "the tick fires", timeout_s=60)
    wait_until(lambda: node.status("/healthy") == 200, "the node is well")
    wait_until(lambda: "it runs again" in node.log, "the log says so", timeout_s=60)
    assert node.end() == 0


def test_an_unavailable_server_means_503_until_it_is_back(serve: Callable[..., Serve]) -> None:
    # Written before it is answered: else a killed server may have what is accepted only in its memory.
    with standalone(aof=True, extra_config={"appendfsync": "always"}) as server:
        node = serve("--redis-url", server.url, "--lease", "1s")
        kept = {"item": "kept", "at": in_seconds(4)}  # not before the kill, also if the machine stalls
        assert node.status("/ticks", kept) == 202
        server.kill()
        status, problem = node.call("/ticks", {"item": "refused", "at": in_seconds(60)})
        assert (status, problem["status"], problem["title"]) == (503, 503, "Service Unavailable")
        assert (node.status("/livez"), node.status("/readyz")) == (200, 503)
        wait_until(lambda: node.status("/healthy") == 503, "the node says that it is not well")
        server.start()
        node.wait_well("/healthy", "/readyz")
        assert node.status("/ticks", {"item": "new", "at": in_seconds(60)}) == 202
        wait_until(lambda: node.lines == [json.dumps(kept)], "what was accepted fires", timeout_s=60)
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
        deadline = time.monotonic() + 60
        while node.process.poll() is None and time.monotonic() < deadline:
            node.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(0.1)
        assert node.process.poll() == 143
        server.resume()


def test_a_stop_that_hangs_ends_by_itself_and_says_so(serve: Callable[..., Serve]) -> None:
    with standalone() as server:
        node = serve("--redis-url", server.url, "--shutdown-timeout", "0s")
        server.pause()
        assert node.end() == 1
        assert any(message.startswith("the stop hangs") for message in node.messages)
        server.resume()


def wide(item: str) -> bytes:
    """A tick with blanks between its fields: two of them are more than a pipe holds."""
    return b'{"item": "%b", %b"at": 1700000000000}' % (item.encode(), b" " * 60_000)


def waiting_in(pipe: int) -> int:
    """Bytes that were written and not read."""
    [count] = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):  # the test closed it
            os.close(fd)


def test_a_stop_waits_for_what_is_in_flight_and_nothing_is_repeated(
    serve: Callable[..., Serve], pipe: tuple[int, int]
) -> None:
    node = serve("--shutdown-timeout", "60s", stdout=pipe[1])
    os.close(pipe[1])
    ticks = [wide(item) for item in ("a", "b", "c")]
    assert [node.status("/ticks", tick) for tick in ticks] == [202] * 3
    assert os.read(pipe[0], 1)  # the sink is at work, and hangs: its output is not read
    node.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in node.messages, "the stop has begun")
    with os.fdopen(pipe[0], "rb") as out:
        printed = b"{" + out.read()
    assert sorted(printed.splitlines()) == ticks
    assert node.process.wait(60) == 0
    again = serve()
    assert again.status("/ticks", {"item": "next", "at": 1700000000000}) == 202
    wait_until(lambda: again.lines != [], "the next run prints")
    assert [json.loads(line)["item"] for line in again.lines] == ["next"]


def test_a_sink_that_hangs_is_given_up_after_the_shutdown_timeout_and_its_task_goes_out_again(
    serve: Callable[..., Serve], pipe: tuple[int, int]
) -> None:
    node = serve("--shutdown-timeout", "1s", stdout=pipe[1])
    first, *ticks = [wide(item) for item in ("a", "b", "c")]
    assert node.status("/ticks", first) == 202
    assert os.read(pipe[0], 1)  # it finds room in the pipe; of the others one at most begins to go in
    assert [node.status("/ticks", tick) for tick in ticks] == [202] * 2
    wait_until(lambda: waiting_in(pipe[0]) > len(first), "the next one is on its way")
    assert node.end() == 0  # by itself, though the pipe stays full
    [told] = [message for message in node.messages if "in flight" in message]
    assert "they go out again" in told
    again = serve()
    given_up = {tick.decode() for tick in ticks}
    wait_until(lambda: given_up <= set(again.lines), "the next run delivers what was given up", timeout_s=60)


@pytest.mark.parametrize(("retry", "dead"), [(None, 0), ("1", 60)], ids=["retries", "dead letters"])
def test_webhooks_that_all_fail_during_a_stop_that_one_outlasts_are_kept(
    serve: Callable[..., Serve], tmp_path: Path, retry: str | None, dead: int
) -> None:
    cut, over = threading.Event(), threading.Event()

    def answer(request: Request) -> Answer:
        if request.path.endswith("/hangs"):
            over.wait()
        cut.wait()
        raise ConnectionResetError  # no answer: the connection is closed

    with standalone() as server, receiving(answer) as receiver:
        there = ("--redis-url", server.url)
        node = serve(*there, "--partitions", "128", "--http-allow", "127.0.0.0/8", "--shutdown-timeout", "5s")
        wait_until(lambda: len(server.call("KEYS", "*:fence")) == 128, "the node owns all partitions")
        with SyncClient(server.url) as client:
            for n in range(60):  # one by one: those of one call would share a partition
                client.put(f"{receiver.url}/{n}", retry=retry)
            client.put(f"{receiver.url}/hangs")
            wait_until(lambda: receiver.at_once == 61, "all are under way", timeout_s=60)
            node.process.send_signal(signal.SIGTERM)
            wait_until(lambda: len(server.call("KEYS", "*:fence")) < 128, "it hands over what has nothing under way")
            cut.set()
            assert node.process.wait(60) == 0
            over.set()
            checked = run("verify", *there, cwd=tmp_path)
            assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
            # The one that hangs goes out again.
            assert (client.count().pending, len(client.dead_list(limit=100).letters)) == (61 - dead, dead)


def test_a_hangup_stops_the_node_cleanly(serve: Callable[..., Serve]) -> None:
    node = serve()
    server_pid = node.server_pid()
    assert node.end(signal.SIGHUP) == 0
    assert is_gone(server_pid)


def test_a_closed_output_does_not_end_the_node(serve: Callable[..., Serve], tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    node = serve(stdout=write_fd)
    os.close(write_fd)
    os.close(read_fd)
    assert node.status("/ticks", {"item": "unread", "at": 1700000000000}) == 202
    unread = "unread@1700000000000"
    wait_until(lambda: pending(tmp_path, unread)["attempt"] > 1, "it waits for another attempt", timeout_s=60)
    assert node.status("/healthy") == 200
    assert node.end() == 0


def pending(folder: Path, id: str) -> Any:
    return json.loads(run("task", "get", id, "--json", "--data-dir", str(folder / "data"), cwd=folder).stdout)


# -- the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--host", "0.0.0.0", "--port", "0"), "callers need an API key"),
        (("serve", "--lease", "5"), "option --lease"),
        (("serve", "--tick-target", "nowhere"), "no known scheme"),
        (("serve", "--colour"), "No such option"),
        (("sevre",), "serve"),
        (("task", "put", "not JSON"), "the payload is not JSON"),
        (("task", "put", '"\udcff"'), "the payload is not JSON"),
        (("task", "put", "[" * 50_000 + "]" * 50_000), "the payload is not JSON"),
        (("schedule", "add", "a", "--cron", "@daily", "--payload", '"\udcff"'), "--payload is not JSON"),
        (("task", "put", "--at", "2030-01-01T00:00:00"), "naive"),
        (("task", "put", "--at", "1893488400"), "looks like seconds; give milliseconds, or a datetime"),
    ],
)
def test_a_wrong_call_is_exit_code_2_and_one_clear_message(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    ended = run(*arguments, cwd=tmp_path, MAINSPRING_DATA_DIR=str(tmp_path / "data"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_commands_without_a_node_do_not_take_the_server_from_each_other(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path / "data"))

    def put(n: int) -> int:
        return run("task", "put", "--id", str(n), "--in", "1h", *data, cwd=tmp_path).returncode

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(put, range(16))) == [0] * 16
    counted = run("task", "count", *data, cwd=tmp_path)
    assert counted.stdout == "16\n"


def test_a_taken_port_is_reported_in_plain_words(serve: Callable[..., Serve], tmp_path: Path) -> None:
    port = serve().url.rpartition(":")[2]
    ended = run("serve", "--port", port, "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use. Choose another" in ended.stderr


def test_a_server_that_is_not_there_is_exit_code_1(tmp_path: Path) -> None:
    ended = run("serve", "--port", "0", "--redis-url", "redis://127.0.0.1:1", cwd=tmp_path)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


def test_the_version_is_printed_without_loading_what_it_does_not_need(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout.startswith("mainspring 0.")
    listed = "import sys; from mainspring import cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True).stdout
    assert not {"uvicorn", "uvloop", "rich", "mainspring.node.node"} & set(loaded.split())


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
    found: set[str] = set()
    for _ in range(10):  # a loaded machine may need 5 ms for a round trip, and a warning is right then
        well = run("doctor", "--json", "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
        found = {row["status"] for row in json.loads(well.stdout)}
        if found == {"ok"}:
            break
    assert found == {"ok"}
