"""The same program on three machines: each planned run happens once, although machines are killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mainspring.client.sync import SyncClient
from mainspring.model.ids import occurrence_id
from mainspring.model.schedule.view import ScheduleView
from mainspring.testing.servers import Server, standalone, wait_until
from tests.support.serving import ENVIRON
from tests.support.workers import lines

SCHEDULES = 50
LEASE_S = 2.0
CALM_S = 30.0
"""A lease that no hiccup of a loaded machine uses up: nothing is repeated."""
PATIENCE_S = 90.0
PROGRAM = f"""
import json, os
from mainspring import Config, Context, Scheduler

scheduler = Scheduler(Config(namespace="fleet", partitions=8, lease_s=LEASE_S, shutdown_timeout_s=10))


@scheduler.handler(queue="notes")
async def note(ctx: Context) -> None:
    line = json.dumps({{"pid": os.getpid(), "id": ctx.id, "key": ctx.idempotency_key, "attempt": ctx.attempt}})
    fd = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (line + "\\n").encode())
    os.close(fd)


for number in range({SCHEDULES}):
    scheduler.every("1s", note, name=f"s-{{number}}", overlap="allow", misfire="all(600)", grace="1s")
print("declared", flush=True)
scheduler.configure(Config.load({{}}, os.environ))
scheduler.run()
"""


class Program:
    """One of the machines."""

    def __init__(self, folder: Path, url: str, lease_s: float) -> None:
        script = folder / "program.py"
        if not script.exists():  # written again it would be empty for a moment, and another may be about to read it
            script.write_text(PROGRAM.replace("LEASE_S", str(lease_s)))
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "program.py"],
                cwd=folder,
                env=ENVIRON | {"MAINSPRING_REDIS_URL": url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


class Fleet:
    """The machines, and what they have written down."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server = folder, server
        self.programs: list[Program] = []
        self.killed = 0
        self.lease_s = LEASE_S

    def add(self) -> Program:
        self.programs.append(Program(self.folder, self.server.url, self.lease_s))
        return self.programs[-1]

    def kill(self, program: Program) -> None:
        self.programs.remove(program)
        program.end(signal.SIGKILL)
        self.killed += 1

    def runs(self) -> list[dict[str, Any]]:
        return lines(self.folder / "notes")

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        def condition() -> bool:
            for one in self.programs:
                assert one.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            return reached()

        wait_until(condition, f"{what}; the log is in {self.folder / 'log'}", timeout_s=PATIENCE_S)

    def wait_all_run(self, more: int = 1) -> None:
        """Wait until every schedule has run this many more times."""
        before = Counter(schedule_of(run) for run in self.runs())

        def reached() -> bool:
            now = Counter(schedule_of(run) for run in self.runs())
            return all(now[f"s-{i}"] >= before[f"s-{i}"] + more for i in range(SCHEDULES))

        self.wait(reached, f"{more} more runs of each schedule")

    def views(self) -> dict[str, ScheduleView]:
        with SyncClient(self.server.url, namespace="fleet") as client:
            return client.schedules.get_many([f"s-{i}" for i in range(SCHEDULES)])

    def waits(self, name: str, at_ms: int) -> bool:
        """Handed to workers when the last of them stopped: it is still there, for the next one."""
        with SyncClient(self.server.url, namespace="fleet") as client:
            return client.get(occurrence_id(name, at_ms)).state in ("queued", "fired")

    def wait_settled(self) -> dict[str, ScheduleView]:
        """After the last machine has stopped nothing new begins; what was begun is in the notes."""
        for program in self.programs:
            assert program.end(signal.SIGTERM) == 0, (self.folder / "log").read_text()[-2000:]
        return self.views()


def schedule_of(run: dict[str, Any]) -> str:
    return str(run["id"]).partition("@")[0]


def planned_ms(run: dict[str, Any]) -> int:
    return round(datetime.fromisoformat(str(run["id"]).partition("@")[2]).timestamp() * 1000)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with standalone(aof=True) as server:
        made = Fleet(tmp_path, server)
        try:
            yield made
        finally:
            for program in made.programs:
                with contextlib.suppress(ProcessLookupError):
                    program.process.kill()
                program.process.wait()


def check(fleet: Fleet, views: dict[str, ScheduleView]) -> Counter[str]:
    """Every planned time from the first run to the last one begun has run; returns how often each did."""
    by_schedule: dict[str, set[int]] = {f"s-{i}": set() for i in range(SCHEDULES)}
    times: Counter[str] = Counter()
    keys: dict[str, str] = {}
    for run in fleet.runs():
        assert keys.setdefault(run["id"], run["key"]) == run["key"], "a repeated run has the same key"
        by_schedule[schedule_of(run)].add(planned_ms(run))
        times[run["id"]] += 1
    for name, ran in by_schedule.items():
        view = views[name]
        assert view.generation == 1, f"{name} was written more than once"
        assert view.not_run == {}, f"{name} left planned times out: {view.recent_not_run}"
        anchor_ms = view.definition.anchor_ms
        assert anchor_ms is not None
        first_ms, next_ms = min(ran), view.next_ms[0]
        assert first_ms <= anchor_ms + 2_000
        missing = {ms for ms in set(range(first_ms, next_ms, 1000)) - ran if not fleet.waits(name, ms)}
        assert not missing, f"{name} did not run at {sorted(missing)}"
        assert not ran - set(range(first_ms, next_ms, 1000)), f"{name} ran at a time that was never planned"
    return times


def test_without_a_fault_three_copies_run_every_planned_time_exactly_once(fleet: Fleet) -> None:
    fleet.lease_s = CALM_S
    for _ in range(3):
        fleet.add()
    fleet.wait_all_run(8)
    fleet.add()  # one comes, one goes in good order: still no fault
    fleet.wait_all_run(2)
    assert fleet.programs.pop(0).end(signal.SIGTERM) == 0
    fleet.wait_all_run(4)
    pids = {run["pid"] for run in fleet.runs()}
    times = check(fleet, fleet.wait_settled())
    assert {key: count for key, count in times.items() if count > 1} == {}
    assert len(pids) >= 3, "all of them work"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_any_kill_no_planned_time_is_missing_and_only_runs_in_flight_are_repeated(fleet: Fleet) -> None:
    rng = random.Random(int(os.environ.get("MAINSPRING_TEST_SEED", "5")))
    for _ in range(3):
        fleet.add()
    fleet.wait_all_run(3)
    for _ in range(4):
        time.sleep(rng.uniform(0.0, 1.0))  # at any moment within the second
        fleet.kill(rng.choice(fleet.programs))
        fleet.add()
        fleet.wait_all_run(3)
    while fleet.programs:  # all at once: no machine is up for a while
        fleet.kill(fleet.programs[0])
    for _ in range(2):
        fleet.add()
    fleet.wait_all_run(3)
    fleet.wait(lambda: caught_up(fleet), "what was planned meanwhile has run")
    times = check(fleet, fleet.wait_settled())
    repeated = sum(count - 1 for count in times.values())
    # Runs that a killed machine had in hand run again: at most a second's worth of schedules for each kill.
    assert repeated <= fleet.killed * SCHEDULES, f"{repeated} runs were repeated by {fleet.killed} kills"
    assert fleet.killed >= 7


def caught_up(fleet: Fleet) -> bool:
    ran: dict[str, set[int]] = {}
    for run in fleet.runs():
        ran.setdefault(schedule_of(run), set()).add(planned_ms(run))
    now_ms = time.time() * 1000
    return bool(ran) and all(
        max(one) > now_ms - 3_000 and len(one) == (max(one) - min(one)) // 1000 + 1 for one in ran.values()
    )
