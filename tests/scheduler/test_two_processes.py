"""The same program twice, one of them killed: every planned time of every schedule runs, once but for the fault."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from mainspring.client.sync import SyncClient
from mainspring.testing.servers import Server
from tests.support.web_receiver import Answer, Request, receiving

PATIENCE_S = 90
SCHEDULES = 20
PREFIX = "every-second-"


@contextmanager
def node(server: Server) -> Iterator["subprocess.Popen[bytes]"]:
    words = ["serve", "--redis-url", server.url, "--port", "0", "--lease", "6s", "--http-allow", "127.0.0.0/8"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-m", "mainspring", *words], stdin=quiet, stdout=quiet, stderr=quiet, env=dict(os.environ)
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


class Log:
    """The runs as their target has seen them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()

    def take(self, request: Request) -> Answer:
        with self._lock:
            self._seen[request.headers["mainspring-id"]] += 1
        return Answer()

    def seen(self) -> Counter[str]:
        with self._lock:
            return Counter(self._seen)

    def wait_for(self, runs: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.seen()) < runs:
            assert time.monotonic() < deadline, f"only {len(self.seen())} of {runs} runs came"
            time.sleep(0.02)


def test_a_killed_node_loses_no_planned_time_and_doubles_none_without_a_fault(server: Server) -> None:
    log = Log()
    names = [f"{PREFIX}{n}" for n in range(SCHEDULES)]
    with receiving(log.take) as receiver, SyncClient(server.url, partitions=8) as client:
        for name in names:
            client.schedules.add(name, every="1s", target=receiver.url, overlap="allow", misfire="all", grace="10m")
        with node(server):
            log.wait_for(3 * SCHEDULES)
            calm = log.seen()
            assert set(calm.values()) == {1}, "nothing failed yet, and something was doubled"
            with node(server) as other:
                log.wait_for(len(log.seen()) + 4 * SCHEDULES)
                other.kill()
            log.wait_for(len(log.seen()) + 5 * SCHEDULES)
            for name in names:
                client.schedules.pause(name)
        views = client.schedules.get_many(names)
    seen = log.seen()
    for name in names:
        view = views[name]
        first_ms = (view.definition.anchor_ms or 0) + 1_000
        planned = [run.planned_ms for run in view.last_runs]
        assert planned, f"{name} never ran"
        slots = range(first_ms, planned[-1] + 1, 1_000)
        missing = [ms for ms in slots if not seen[_id(name, ms)]]
        assert not missing, f"{name}: {len(missing)} of {len(slots)} planned runs are missing"
        assert view.not_run == {}


def _id(name: str, planned_ms: int) -> str:
    """As the header has it, percent-encoded."""
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(planned_ms / 1000))
    return f"{name}@{text}".replace("@", "%40").replace(":", "%3A")
