"""One peer, measured: a producer process and a consumer process on a server of their own.

producer  | warm-up | all, due at one moment |      | steady: so many a second, each 3 s ahead
server              ^ memory                 ^ memory
due                                               |
consumer                                          | starts; warm-up; all: drain | steady: lateness
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from ...model.errors import MainspringError
from ..ground import Ground, Where, ground
from ..life import Progress
from .runs import Runs, judge

OTHER_SIDE: Final = Path(__file__).with_name("other_side.py")
WARM_TASKS: Final = 100
PATIENCE_S: Final = 300.0
LEAD_MS: Final = 3_000


class PeerFailed(MainspringError):
    """A peer did not do what was to be measured."""


class Contender(msgspec.Struct, frozen=True):
    """Who is measured: a file with a class `Peer`, the Python that runs it, and its processes."""

    name: str
    file: Path
    python: Path
    roles: tuple[str, ...] = ("consume",)
    """Methods of the peer, each run in a process of its own beside the producer."""


class Demand(msgspec.Struct, frozen=True):
    tasks: int
    rate: int
    seconds: float


class Measured(msgspec.Struct, frozen=True):
    version: str
    tasks: int
    schedule_per_s: float
    bytes_per_pending_task: float
    drain_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    early: int
    duplicated: int
    lost: int


async def measure(one: Contender, demand: Demand, where: Where, progress: Progress) -> Measured:
    with tempfile.TemporaryDirectory(prefix="mainspring-peers-") as folder:
        runs = Runs(Path(folder) / "runs")
        async with ground(where) as place, _side(one, "produce", place.url, runs) as producer:
            return await Stage(one, demand, place, runs, producer, progress).play()


class Stage:
    def __init__(
        self, one: Contender, demand: Demand, place: Ground, runs: Runs, producer: "Side", progress: Progress
    ) -> None:
        self._one = one
        self._demand = demand
        self._place = place
        self._runs = runs
        self._producer = producer
        self._progress = progress

    async def play(self) -> Measured:
        tasks, all_tasks = self._demand.tasks, range(WARM_TASKS, WARM_TASKS + self._demand.tasks)
        self._tell("scheduling")(0)
        warm_s = (await self._producer.ask(first=0, tasks=WARM_TASKS, due_ms=_now_ms()))["seconds"]
        due_ms = _now_ms() + round(1000 * (1 + warm_s * tasks / WARM_TASKS))
        before = await self._place.read()
        took_s = (await self._producer.ask(first=WARM_TASKS, tasks=tasks, due_ms=due_ms))["seconds"]
        used = (await self._place.read()).since(before)
        await asyncio.sleep(max(0, due_ms - _now_ms()) / 1000)
        async with self._consumer():
            await self._ran(range(WARM_TASKS), "starting")
            await self._runs.wait(all_tasks, self._tell("draining"))
            steady_dues = await self._steady(WARM_TASKS + tasks)
        times = self._runs.times()
        drained = judge(times, ((number, due_ms) for number in all_tasks))
        steady = judge(times, steady_dues)
        return Measured(
            version=self._producer.version,
            tasks=tasks,
            schedule_per_s=round(tasks / took_s),
            bytes_per_pending_task=round(used.memory / tasks, 1),
            drain_per_s=round((tasks - drained.lost) / max(drained.seconds, 1e-6)),
            p50_ms=steady.late_by(0.5),
            p99_ms=steady.late_by(0.99),
            early=drained.early + steady.early,
            duplicated=drained.duplicated + steady.duplicated,
            lost=drained.lost + steady.lost,
        )

    @contextlib.asynccontextmanager
    async def _consumer(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for role in self._one.roles:
                await stack.enter_async_context(_side(self._one, role, self._place.url, self._runs))
            yield

    async def _ran(self, numbers: range, what: str) -> None:
        if not await self._runs.wait(numbers, self._tell(what)):
            raise PeerFailed(f"only {self._runs.count} tasks ran of the first {len(numbers)}")

    async def _steady(self, first: int) -> list[tuple[int, int]]:
        """Numbers and due times of the tasks that count: the load goes on until the last of them is due."""
        rate, what = self._demand.rate, f"{self._demand.rate} a second"
        count, more = round(rate * self._demand.seconds), rate * LEAD_MS // 1000
        due_ms = _now_ms() + LEAD_MS + 100
        self._tell(what)(self._runs.count)
        order = {"first": first, "tasks": count + more, "due_ms": due_ms, "lead_ms": LEAD_MS, "rate": rate}
        await self._producer.ask(**order)
        await self._runs.wait(range(first, first + count), self._tell(what))
        return [(first + at, due_ms + at * 1000 // rate) for at in range(count)]

    def _tell(self, what: str) -> Callable[[int], None]:
        total = WARM_TASKS + self._demand.tasks + round(self._demand.rate * self._demand.seconds)
        return lambda done: self._progress(f"{self._one.name}: {what}", done, total)


class Side:
    """The other process: JSON lines there and back."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self.version = ""

    async def start(self, url: str, runs: Runs) -> None:
        # Not in the arguments: the URL may hold a password.
        self.version = (await self.ask(url=url, runs=str(runs.path)))["version"]

    async def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise PeerFailed(f"no answer within {PATIENCE_S:.0f} s") from None
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise PeerFailed(f"its process ended with {await self._process.wait()}: {said[-1][:300]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group: some start processes of their own
        await self._process.wait()


@contextlib.asynccontextmanager
async def _side(one: Contender, role: str, url: str, runs: Runs) -> AsyncIterator[Side]:
    log = runs.path.with_name(f"{role}.log")
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            str(one.python),
            "-P",
            str(OTHER_SIDE),
            str(one.file),
            role,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            start_new_session=True,
        )
    side = Side(process, log)
    try:
        await side.start(url, runs)
        yield side
    finally:
        await side.end()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
