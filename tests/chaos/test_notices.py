"""Nodes are killed at random moments while jobs fail and recover; each episode causes one notice."""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from mainspring import SyncClient
from mainspring.model.run import FAILED_ENDS, KeptRun
from mainspring.testing.servers import Server, wait_until
from tests.support.serving import Serve
from tests.support.web_receiver import Answer, Receiver, Request, receiving

SEED = int(os.environ.get("CHAOS_SEED", "1"))
KILLS = int(os.environ.get("CHAOS_KILLS", "40"))
"""A few minutes; 200 for the long run."""
JOBS = [f"job{number}" for number in range(6)]
NODES = 3

Told = tuple[str, str, int]
"""Kind, schedule, and when its episode began."""


class Fleet:
    """Nodes of one namespace, each a process."""

    def __init__(self, folder: Path, server: Server, receiver: Receiver) -> None:
        base = receiver.url.removesuffix("/hook")
        lines = ['http_allow = ["127.0.0.0/8"]', 'lease = "2s"', 'breaker = "off"', f'redis_url = "{server.url}"']
        for name in JOBS:
            lines += [f"[notify.{name}]", f'url = "{base}/notices/{name}"', f'schedules = ["{name}"]']
        self.folder, self.settings = folder, "\n".join(lines)
        self.nodes = [self._start(number) for number in range(NODES)]
        for node in self.nodes:
            node.wait_started()

    def _start(self, number: int) -> Serve:
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        (folder / "mainspring.toml").write_text(self.settings)
        return Serve(folder, "--roles", "scheduler")

    def kill(self, number: int) -> None:
        """Kill a node, and start another in its place without waiting for it."""
        self.nodes[number].process.kill()
        self.nodes[number].process.wait()
        self.nodes[number] = self._start(number)

    def stop(self) -> None:
        for node in self.nodes:
            node.process.kill()
            node.process.wait()


def episodes_of(runs: Iterable[KeptRun]) -> tuple[list[Told], bool]:
    """Return the notices due for one schedule by its records alone, and whether its last run succeeded."""
    told: list[Told] = []
    since_ms = 0
    for run in sorted(runs, key=lambda one: (one.at_ms, one.record.ended_ms, not one.record.failed)):
        name = run.record.schedule
        assert name is not None
        if run.record.end in FAILED_ENDS and not since_ms and (run.record.end != "retry" or run.record.began_ms):
            since_ms = run.record.ended_ms
            told.append(("failed", name, since_ms))
        elif run.record.end == "done" and since_ms:
            told.append(("recovered", name, since_ms))
            since_ms = 0
    return told, not since_ms


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_each_episode_causes_one_notice_although_nodes_are_killed(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.call("FLUSHALL")
    chance, failing = random.Random(SEED), set[str]()

    def answer(request: Request) -> Answer:
        return Answer(500 if request.path.rpartition("/")[2] in failing and "/jobs/" in request.path else 200)

    with receiving(answer) as receiver, SyncClient(server.url) as client:
        base = receiver.url.removesuffix("/hook")
        fleet = Fleet(tmp_path, server, receiver)
        began = time.monotonic()
        try:
            for name in JOBS:
                client.schedules.add(name, every="1s", target=f"{base}/jobs/{name}", retries=0, timeout="500ms")
            for _ in range(KILLS):
                time.sleep(chance.uniform(0.2, 2.5))  # the kill comes at a random moment
                victim = chance.randrange(NODES)
                wait_until(fleet.nodes[victim].started, "a node is up again", timeout_s=60)
                fleet.kill(victim)
                for name in JOBS:
                    if chance.random() < 0.12:
                        failing ^= {name}
            failing.clear()
            seconds = time.monotonic() - began
            wait_until(
                lambda: all(episodes_of(runs_of(client, name))[1] for name in JOBS), "all are well", timeout_s=60
            )
            for name in JOBS:
                client.schedules.remove(name)
            expected = [one for name in JOBS for one in episodes_of(runs_of(client, name))[0]]
            wait_until(lambda: len(received(receiver)) >= len(expected), "all is told", timeout_s=150)
            wait_until(lambda: client.count().pending == 0, "nothing more is to be told", timeout_s=90)
        finally:
            fleet.stop()
        messages = [one for one in receiver.requests if "/notices/" in one.path]
        by_key: dict[str, set[bytes]] = {}
        for one in messages:
            by_key.setdefault(one.headers["idempotency-key"], set()).add(one.body)
        told = received(receiver)
        lost = sum(run.record.end == "lost" for name in JOBS for run in runs_of(client, name))
    figures = f"{KILLS} kills in {seconds:.0f} s, {lost} runs lost with their nodes, {len(expected)} notices due"
    repeated = len(messages) - len(by_key)
    with capsys.disabled():  # the figures belong into the log of every run
        print(f"\nseed {SEED}: {figures}, {len(told)} told in {len(by_key)} messages, {repeated} sent twice")  # noqa: T201
    assert len(expected) >= KILLS // 2, "the jobs have failed and recovered"
    assert Counter(told) == Counter(expected)
    assert all(len(bodies) == 1 for bodies in by_key.values()), "a repeated message is the same"


def runs_of(client: SyncClient, name: str) -> list[KeptRun]:
    found: list[KeptRun] = []
    cursor = None
    while True:
        page = client.runs(schedule=name, limit=1000, cursor=cursor)
        found += page.runs
        cursor = page.next
        if cursor is None:
            return found


def received(receiver: Receiver) -> list[Told]:
    """Return every notice of every message, but of repeated messages only those of the first."""
    once = {one.headers["idempotency-key"]: one.body for one in receiver.requests if "/notices/" in one.path}
    return [
        (notice["kind"], notice["subject"].removeprefix("schedule:"), notice["since_ms"])
        for body in once.values()
        for notice in json.loads(body)["notices"]
    ]
