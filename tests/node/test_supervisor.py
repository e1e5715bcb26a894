"""`mainspring serve --processes N`: a parent and its children as real processes; signals, crashes, restarts."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError

import pytest

from mainspring.config.config import Config
from mainspring.node.supervisor import Supervisor
from mainspring.store import members
from mainspring.store.store import Store
from mainspring.testing.servers import Server, standalone, wait_until
from tests.support.serving import Serve, in_seconds, is_gone, serving
from tests.support.workers import until

Tick = dict[str, str | int]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    with serving(tmp_path) as start:
        yield start


@pytest.fixture
def supervise(serve: Callable[..., Serve]) -> Callable[..., Serve]:
    """Starts processes and waits until all are ready."""

    def start(processes: int, *options: str, stdout: int | None = None) -> Serve:
        node = serve("--processes", str(processes), *options, stdout=stdout)
        wait_until(lambda: ready(node) == processes, "all processes are ready", timeout_s=60)
        return node

    return start


def ready(node: Serve) -> int:
    """How many children became ready so far."""
    return sum(bool(re.fullmatch(r"process \d+ \(\d+\) is ready", message)) for message in node.messages)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One for all: each test has its own namespace, for a killed node is a member until its lease is over."""
    with standalone() as started:
        yield started


def starts(node: Serve) -> list[tuple[int, int]]:
    """Number and process id of every child so far."""
    found = (re.fullmatch(r"process (\d+) \((\d+)\) started", message) for message in node.messages)
    return [(int(one[1]), int(one[2])) for one in found if one]


def children(node: Serve) -> dict[int, int]:
    """Process ids by number, of the last start of each."""
    return dict(starts(node))


def delays(node: Serve) -> list[float]:
    found = (re.fullmatch(r"process 1 starts again in ([0-9.]+) s", message) for message in node.messages)
    return [float(one[1]) for one in found if one]


def wait_gone(*pids: int) -> None:
    wait_until(lambda: all(map(is_gone, pids)), f"processes {pids} are gone", timeout_s=60)


def owners(server: Server, namespace: str) -> Counter[str]:
    """How many partitions each node holds."""

    async def look() -> Counter[str]:
        store = await Store.open(server.url, namespace=namespace)
        async with contextlib.aclosing(store):
            _, holdings = await members.look(store)
        return Counter(one.owner.partition("/")[0] for one in holdings if one.owner)

    return asyncio.run(look())


def wait_even(server: Server, namespace: str, nodes: Set[str]) -> None:
    """A node that comes later gets its share in several steps: only the end of them is asked for."""

    def even() -> bool:
        held = owners(server, namespace)
        return set(held) == nodes and sum(held.values()) == 32 and max(held.values()) - min(held.values()) <= 1

    wait_until(even, f"{sorted(nodes)} share the partitions evenly", timeout_s=60)


def patiently(node: Serve, tick: object) -> None:
    """Post as a caller does who repeats what was not answered: the id is the same, so it is one tick."""

    def accepted() -> bool:
        try:
            return node.status("/ticks", tick) in (200, 202)
        except (URLError, ConnectionError, json.JSONDecodeError):
            return False  # it was with the process that was killed

    wait_until(accepted, "the tick is accepted", timeout_s=60)


def done(server: Server, namespace: str) -> int:
    keys = server.call("KEYS", f"{{{namespace}:*}}:n")
    return sum(int(server.call("HGET", key, "done") or 0) for key in keys)


# -- together --------------------------------------------------------------------------------------------------


def test_all_processes_answer_on_one_port_and_share_the_partitions(
    supervise: Callable[..., Serve], server: Server
) -> None:
    node = supervise(3, "--node-id", "shop", "--redis-url", server.url, "--namespace", "share")
    wait_even(server, "share", {"shop-1", "shop-2", "shop-3"})
    pids = set(children(node).values())
    assert len(pids) == 3
    for alone in pids:
        for other in pids - {alone}:
            os.kill(other, signal.SIGSTOP)
        try:
            assert node.status("/livez") == 200
        finally:
            for other in pids - {alone}:
                os.kill(other, signal.SIGCONT)
    assert node.end() == 0


def test_the_rate_of_a_client_is_shared_by_the_processes(
    supervise: Callable[..., Serve], server: Server, tmp_path: Path
) -> None:
    (tmp_path / "mainspring.toml").write_text("api_rate = 20\n")
    node = supervise(2, "--redis-url", server.url, "--namespace", "rate")
    stopped = children(node)[2]
    os.kill(stopped, signal.SIGSTOP)  # all connections are the other's
    try:
        began, accepted, answers = time.monotonic(), 0, [200]
        with ThreadPoolExecutor(20) as callers:  # one after the other would be too slow for the limit on a busy machine
            while set(answers) == {200}:
                answers = list(callers.map(node.status, ["/v1/pauses"] * 40))
                accepted += answers.count(200)
        assert set(answers) <= {200, 429}
        assert accepted <= 10 + 10 * (time.monotonic() - began)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert node.end() == 0


def test_the_password_of_the_embedded_server_is_on_no_command_line(
    supervise: Callable[..., Serve], tmp_path: Path
) -> None:
    node = supervise(2)
    password = (tmp_path / "data" / "password").read_text().strip()
    for pid in (node.process.pid, *children(node).values()):
        told = subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=True
        ).stdout
        assert "serve" in told
        assert password not in told
    assert password not in node.log
    assert node.end() == 0


# -- children that die -----------------------------------------------------------------------------------------


def test_a_killed_child_starts_again_and_no_tick_is_lost(supervise: Callable[..., Serve], server: Server) -> None:
    # A lease that a hiccup of the machine does not use up: only what was under way at the kill may be printed twice.
    where = ("--redis-url", server.url, "--namespace", "kill", "--lease", "6s", "--node-id", "till")
    node = supervise(3, *where)
    wait_even(server, "kill", {"till-1", "till-2", "till-3"})
    before: list[Tick] = [{"item": f"before-{i}", "at": 1700000000000} for i in range(30)]
    at_the_kill: list[Tick] = [{"item": f"kill-{i}", "at": in_seconds(0.5 + i / 20)} for i in range(60)]
    after: list[Tick] = [{"item": f"after-{i}", "at": 1700000000000} for i in range(30)]
    for tick in before:
        assert node.status("/ticks", tick) == 202
    wait_until(lambda: done(server, "kill") == 30, "what was due is delivered and finished")
    for tick in at_the_kill[:30]:
        assert node.status("/ticks", tick) == 202
    killed = children(node)[1]
    os.kill(killed, signal.SIGKILL)
    for tick in at_the_kill[30:]:
        patiently(node, tick)
    wait_until(lambda: children(node)[1] != killed, "the child is started again")
    assert f"process 1 ({killed}) ended with SIGKILL" in node.messages
    wait_even(server, "kill", {"till-1", "till-2", "till-3"})
    wait_until(lambda: done(server, "kill") == 90, "all others are finished", timeout_s=60)
    for tick in after:
        patiently(node, tick)
    wait_until(lambda: done(server, "kill") == 120, "the new child works with the others", timeout_s=60)
    assert node.end() == 0
    printed = Counter(json.loads(line)["item"] for line in node.lines)
    assert set(printed) == {tick["item"] for tick in before + at_the_kill + after}
    assert {item for item, times in printed.items() if times > 1} <= {tick["item"] for tick in at_the_kill}


def test_a_child_that_dies_again_and_again_is_started_ever_later(serve: Callable[..., Serve]) -> None:
    node = serve("--processes", "2", "--redis-url", "redis://127.0.0.1:1", wait=False)
    wait_until(lambda: len(delays(node)) >= 3, "the child was started three times", timeout_s=60)
    assert delays(node)[:3] == [0.25, 0.5, 1.0]
    assert sum("ended with exit code 1" in message for message in node.messages) >= 3
    pids = [pid for _, pid in starts(node)]
    assert node.end() == 0
    wait_gone(*pids)


FAILING_AT_THE_STOP = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
if sys.argv[1] == "ready":
    os.write(int(sys.argv[sys.argv.index("--parent-fd") + 1]), b"1")
pathlib.Path("is there").touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("state", "code"), [("starting", 0), ("ready", 1)])
async def test_only_a_child_that_was_ready_can_spoil_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", FAILING_AT_THE_STOP, state]
    up = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor(Config(redis_url="redis://127.0.0.1:1", processes=1), command, listener)
        running = asyncio.create_task(supervisor.run(up.set))
        await until(Path("is there").exists)
        if state == "ready":
            await up.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == code


def test_a_child_that_refuses_its_settings_ends_all_with_its_message(serve: Callable[..., Serve]) -> None:
    with standalone() as replica:
        replica.call("REPLICAOF", "127.0.0.1", "1")
        node = serve("--processes", "2", "--redis-url", replica.url, wait=False)
        assert node.process.wait(60) == 2
        assert "name the primary in the URL" in node.log
        assert "refuses its settings" in node.log
        assert "starts again" not in node.log
        wait_gone(*children(node).values())


def test_a_wrong_number_of_processes_is_refused_before_anything_starts(serve: Callable[..., Serve]) -> None:
    node = serve("--processes", "257", wait=False)
    assert node.process.wait(60) == 2
    assert "processes is 257; it must lie between 1 and 256" in node.log


def test_the_embedded_server_is_brought_back_by_the_parent(supervise: Callable[..., Serve]) -> None:
    node = supervise(2)
    tick = {"item": "kept", "at": in_seconds(2)}
    patiently(node, tick)
    wait_until(lambda: node.written("kept"), "it is on disk")
    killed = node.server_pid()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: node.server_pid() != killed, "another server runs", timeout_s=60)
    wait_until(lambda: json.dumps(tick) in node.lines, "the tick fires", timeout_s=60)
    wait_until(lambda: "it runs again" in node.log, "the log says so", timeout_s=60)
    assert len(starts(node)) == 2
    server_pid = node.server_pid()
    assert node.end() == 0
    assert is_gone(server_pid)


# -- signals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_of_them_cleanly(supervise: Callable[..., Serve], number: signal.Signals) -> None:
    node = supervise(2)
    pids = children(node)
    server_pid = node.server_pid()
    assert node.end(number) == 0
    assert all(map(is_gone, (*pids.values(), server_pid)))
    assert [node.messages.count(f"process {n} ({pids[n]}) ended with exit code 0") for n in (1, 2)] == [1, 1]
    assert "starts again" not in node.log


def test_children_and_server_end_when_the_parent_is_killed(supervise: Callable[..., Serve]) -> None:
    node = supervise(2)
    pids = (*children(node).values(), node.server_pid())
    assert node.end(signal.SIGKILL) == -signal.SIGKILL
    wait_gone(*pids)
    with pytest.raises(URLError, match="refused"):  # the port is free too
        node.status("/livez")


def test_a_second_signal_ends_a_stop_that_hangs(supervise: Callable[..., Serve]) -> None:
    with standalone() as server:
        node = supervise(2, "--redis-url", server.url)
        pids = children(node).values()
        server.pause()  # the children wait for an answer that does not come
        node.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in node.messages, "the stop has begun")

        def ended() -> bool:
            node.process.send_signal(signal.SIGTERM)
            return node.process.poll() is not None

        wait_until(ended, "a signal that is no echo of the first ends it")
        assert node.process.poll() == 143
        wait_gone(*pids)
        server.resume()


def test_a_child_that_does_not_stop_is_killed_in_the_end(supervise: Callable[..., Serve], server: Server) -> None:
    where = ("--redis-url", server.url, "--namespace", "stuck", "--node-id", "shop")
    node = supervise(2, "--shutdown-timeout", "0s", *where)
    wait_even(server, "stuck", {"shop-1", "shop-2"})
    stuck = children(node)[1]
    os.kill(stuck, signal.SIGSTOP)
    assert node.end() == 1
    assert f"process 1 ({stuck}) ended with SIGKILL" in node.messages
    assert is_gone(stuck)


def test_a_hangup_renews_the_children_on_the_same_port(supervise: Callable[..., Serve], server: Server) -> None:
    node = supervise(2, "--redis-url", server.url, "--namespace", "renew", "--node-id", "shop")
    wait_even(server, "renew", {"shop-1", "shop-2"})
    old = children(node)
    node.process.send_signal(signal.SIGHUP)
    wait_until(lambda: ready(node) == 4, "both are started again", timeout_s=60)
    new = children(node)
    assert not set(old.values()) & set(new.values())
    assert [node.messages.count(f"process {n} ({old[n]}) ended with exit code 0") for n in (1, 2)] == [1, 1]
    assert delays(node) == [0.0]
    node.wait_well("/readyz")
    assert node.end() == 0


def test_the_port_is_closed_while_the_children_drain(supervise: Callable[..., Serve], server: Server) -> None:
    read_fd, write_fd = os.pipe()
    where = ("--redis-url", server.url, "--namespace", "drain", "--shutdown-timeout", "60s")
    node = supervise(2, *where, stdout=write_fd)
    os.close(write_fd)
    blanks = b" " * 60_000
    ticks = [b'{"item": "%d", %b"at": 1700000000000}' % (i, blanks) for i in range(8)]
    for tick in ticks:
        assert node.status("/ticks", tick) == 202
    assert os.read(read_fd, 1)  # the first is being printed; no more than one fits into the pipe
    node.process.send_signal(signal.SIGTERM)

    def refused() -> bool:
        try:
            node.status("/livez")
        except URLError as error:
            return isinstance(error.reason, ConnectionRefusedError)
        return False

    wait_until(refused, "the port is closed", timeout_s=60)
    assert node.process.poll() is None
    with os.fdopen(read_fd, "rb") as out:
        printed = b"{" + out.read()
    assert sorted(printed.splitlines()) == ticks  # each of them, whole, once
    assert node.process.wait(60) == 0
