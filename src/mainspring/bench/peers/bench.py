"""All peers in one run, one after the other; a peer that fails must not lose the rows of the others.

producer  | warm-up | all, due at one moment, in every way |      | steady: a fixed rate, each 3 s ahead
server              ^ memory                               ^ memory
due                                                             |
consumer                                                        | starts; warm-up; all: drain | steady: lateness
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from ...model.errors import InvalidInput, MainspringError
from ...testing.servers import missing
from ..environment import BenchEnvironment, ServerChoice, open_environment
from ..lifecycle import BenchProgress
from .other_side import RUN

# The Python that has the peers: this one if `mainspring[peers]` is installed, otherwise one in the cache folder. The
# user's own environment is never changed.

DISTRIBUTIONS: Final = ("arq", "celery", "dramatiq", "huey", "redis", "rq")
PINS: Final = Path(__file__).parents[4] / "requirements" / "peers.txt"

FROM_PYPI: Final = "pip install 'mainspring[peers]'"
_STAMP: Final = "complete"


class PeersMissing(MainspringError):
    """The peers are not installed, and could not be, or were not allowed to be."""


def python_at_hand() -> Path | None:
    """Return the interpreter that has the peers, or None if they have to be installed first."""
    if has_peers():
        return Path(sys.executable)
    if not PINS.exists():
        return None
    folder = cache_folder()
    return folder / "bin" / "python" if (folder / _STAMP).exists() else None


async def python_with_peers(*, install: bool) -> Path:
    """Return the interpreter; make the environment in the cache folder if that is needed and allowed."""
    if (python := python_at_hand()) is not None:
        return python
    if not PINS.exists():
        raise PeersMissing(f"the peers are not installed here: {FROM_PYPI}, best in an environment of its own")
    folder = cache_folder()
    if not install:
        raise PeersMissing(f"the peers are not installed here; this installs them: {commands(folder)}")
    with _alone(folder):
        if not (folder / _STAMP).exists():
            await _make(folder)
    return folder / "bin" / "python"


def has_peers() -> bool:
    """Return whether the peers are installed in this environment."""
    for name in DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return False
    return True


def cache_folder() -> Path:
    """Return the folder for this set of pins and this Python: a change of either makes a new one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()
    return cache / "mainspring" / f"peers-{digest[:12]}"


def commands(folder: Path) -> str:
    """Return the commands of `_make`, for people to run."""
    pip = f"{folder}/bin/python -m pip install --require-hashes -r {PINS}"
    return f"{sys.executable} -m venv {folder} && {pip} && touch {folder}/{_STAMP}"


async def _make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was cut short
    await _call(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    await _call(*pip, "--require-hashes", "-r", str(PINS))
    (folder / _STAMP).touch()


async def _call(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        tail = output.decode(errors="replace").strip()[-400:]
        raise PeersMissing(f"the peers could not be installed by `{' '.join(command)}`: {tail}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder: two benches that start together must make one complete environment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


STALL_S: Final = 30.0
"""Seconds without a run after which missing tasks count as lost. Some peers look only every few seconds."""

_POLL_S: Final = 0.25


class RunFile:
    """The file in which the peer notes its runs, as the bench reads it. Its length is the counter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @property
    def count(self) -> int:
        return self.path.stat().st_size // RUN.size

    async def wait(self, numbers: range, report: Callable[[int], None], *, stall_s: float = STALL_S) -> bool:
        """Wait until each of these numbers has run; return False when there has been no run for a long time."""
        seen, seen_at = -1, time.monotonic()
        while True:
            if (now := self.count) != seen:
                seen, seen_at = now, time.monotonic()
                report(now)
                # Reading the whole file is expensive: do it only when enough tasks ran to include all of these.
                if now >= numbers.stop and self.times().keys() >= set(numbers):
                    return True
            elif time.monotonic() - seen_at > stall_s:
                return False
            await asyncio.sleep(_POLL_S)

    def times(self) -> dict[int, list[int]]:
        """Return, for each number, the times in nanoseconds at which it ran."""
        found: dict[int, list[int]] = {}
        text = self.path.read_bytes()
        for number, at_ns in RUN.iter_unpack(text[: len(text) // RUN.size * RUN.size]):
            found.setdefault(number, []).append(at_ns)
        return found


@dataclass(frozen=True, slots=True)
class PeerVerdict:
    """Result for tasks with known due times. The first run of a task counts; further runs are duplicates."""

    lost: int
    duplicated: int
    early: int
    late_ms: list[float]
    """Sorted; negative for early runs."""
    first_ns: int
    last_ns: int

    @property
    def seconds(self) -> float:
        """Seconds from the first run to the last."""
        return (self.last_ns - self.first_ns) / 1e9

    def late_by(self, share: float) -> float | None:
        """Return the lateness that this share of the tasks did not exceed."""
        if not self.late_ms:
            return None
        return round(self.late_ms[min(len(self.late_ms) - 1, int(len(self.late_ms) * share))], 2)


def judge(times: Mapping[int, list[int]], dues_ms: Iterable[tuple[int, int]]) -> PeerVerdict:
    """Judge the runs. `dues_ms` has the number and due time of every task that counts."""
    lost = duplicated = 0
    late_ms: list[float] = []
    began_ns: list[int] = []
    for number, due_ms in dues_ms:
        runs = times.get(number)
        if runs is None:
            lost += 1
            continue
        duplicated += len(runs) - 1
        began_ns.append(min(runs))
        late_ms.append(min(runs) / 1e6 - due_ms)
    late_ms.sort()
    early = sum(late < 0 for late in late_ms)
    return PeerVerdict(lost, duplicated, early, late_ms, min(began_ns, default=0), max(began_ns, default=0))


OTHER_SIDE: Final = Path(__file__).with_name("other_side.py")
WARM_TASKS: Final = 100
GIVE_UP_S: Final = 300.0
LEAD_MS: Final = 3_000
SLOW_SHARE: Final = 4
"""Divisor: this part of the tasks is also scheduled in each way that is not the fastest."""


class PeerFailed(MainspringError):
    """A peer did not do the work that was to be measured."""


class Contender(msgspec.Struct, frozen=True):
    """A measured queue: a file with a class `Peer`, the Python that runs it, and its processes."""

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
    one_by_one_per_s: float | None
    at_once_per_s: float | None
    in_bulk_per_s: float | None
    bytes_per_pending_task: float
    drain_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    early: int
    duplicated: int
    lost: int


async def measure(one: Contender, demand: Demand, where: ServerChoice, progress: BenchProgress) -> Measured:
    with tempfile.TemporaryDirectory(prefix="mainspring-peers-") as folder:
        runs = RunFile(Path(folder) / "runs")
        async with open_environment(where) as place, _side(one, "produce", place.url, runs) as producer:
            return await PeerStage(one, demand, place, runs, producer, progress).play()


class PeerStage:
    def __init__(
        self,
        one: Contender,
        demand: Demand,
        place: BenchEnvironment,
        runs: RunFile,
        producer: "PeerProcess",
        progress: BenchProgress,
    ) -> None:
        self._one = one
        self._demand = demand
        self._place = place
        self._runs = runs
        self._producer = producer
        self._progress = progress

    async def play(self) -> Measured:
        tasks, (*slower, fastest) = self._demand.tasks, self._producer.ways
        orders = [*((way, max(1, tasks // SLOW_SHARE)) for way in slower), (fastest, tasks)]
        self._reporter("scheduling")(0)
        first, need_s = 0, 1.0
        for way, count in orders:
            warm_s = (await self._producer.ask(way=way, first=first, tasks=WARM_TASKS, due_ms=_now_ms()))["seconds"]
            first, need_s = first + WARM_TASKS, need_s + warm_s * count / WARM_TASKS
        warmed, due_ms, per_s = first, _now_ms() + round(1000 * need_s), dict[str, float]()
        before = await self._place.read()
        for way, count in orders:
            answer = await self._producer.ask(way=way, first=first, tasks=count, due_ms=due_ms)
            first, per_s[way] = first + count, round(count / answer["seconds"])
        used = (await self._place.read()).since(before)
        all_tasks = range(warmed, first)
        await asyncio.sleep(max(0, due_ms - _now_ms()) / 1000)
        async with self._consumer():
            await self._ran(range(warmed), "starting")
            await self._runs.wait(all_tasks, self._reporter("draining"))
            steady_dues = await self._steady(first)
        times = self._runs.times()
        drained = judge(times, ((number, due_ms) for number in all_tasks))
        steady = judge(times, steady_dues)
        return Measured(
            version=self._producer.version,
            tasks=tasks,
            one_by_one_per_s=per_s.get("one_by_one"),
            at_once_per_s=per_s.get("at_once"),
            in_bulk_per_s=per_s.get("in_bulk"),
            bytes_per_pending_task=round(used.memory / len(all_tasks), 1),
            drain_per_s=round((len(all_tasks) - drained.lost) / max(drained.seconds, 1e-6)),
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
        if not await self._runs.wait(numbers, self._reporter(what)):
            raise PeerFailed(f"only {self._runs.count} of the first {len(numbers)} tasks ran")

    async def _steady(self, first: int) -> list[tuple[int, int]]:
        """Return numbers and due times of the tasks that count. The load continues until the last of them is due."""
        rate, what = self._demand.rate, f"{self._demand.rate} a second"
        count, more = round(rate * self._demand.seconds), rate * LEAD_MS // 1000
        due_ms = _now_ms() + LEAD_MS + 100
        self._reporter(what)(self._runs.count)
        order = {
            "way": self._producer.ways[-1],
            "first": first,
            "tasks": count + more,
            "due_ms": due_ms,
            "lead_ms": LEAD_MS,
            "rate": rate,
        }
        await self._producer.ask(**order)
        await self._runs.wait(range(first, first + count), self._reporter(what))
        return [(first + at, due_ms + at * 1000 // rate) for at in range(count)]

    def _reporter(self, what: str) -> Callable[[int], None]:
        total = WARM_TASKS + self._demand.tasks + round(self._demand.rate * self._demand.seconds)
        return lambda done: self._progress(f"{self._one.name}: {what}", done, total)


class PeerProcess:
    """A process of the peer; orders and answers are JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self.version = ""
        self.ways: list[str] = []
        """Methods of the peer that schedule, the slowest first."""

    async def start(self, url: str, runs: RunFile) -> None:
        # On stdin and not in the arguments: the URL may hold a password.
        answer = await self.ask(url=url, runs=str(runs.path))
        self.version, self.ways = answer["version"], answer["ways"]

    async def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        try:
            async with asyncio.timeout(GIVE_UP_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise PeerFailed(f"no answer within {GIVE_UP_S:.0f} s") from None
        if not line:
            output = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise PeerFailed(f"its process ended with exit code {await self._process.wait()}: {output[-1][:300]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the whole group: some peers start processes
        await self._process.wait()


@contextlib.asynccontextmanager
async def _side(one: Contender, role: str, url: str, runs: RunFile) -> AsyncIterator[PeerProcess]:
    log = runs.path.with_name(f"{role}.log")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(one.python),
            "-P",
            str(OTHER_SIDE),
            str(one.file),
            role,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
    side = PeerProcess(process, log)
    try:
        await side.start(url, runs)
        yield side
    finally:
        await side.end()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


PEERS: Final = ("celery", "dramatiq", "rq", "arq", "huey")
OURSELVES: Final = "mainspring"

_HERE: Final = Path(__file__).parent
_SHARES: Final = {"rq": 0.25}
"""Share of the tasks that slow peers get, because all of them would take very long."""


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's figures: None where nothing was measured; `error` says why."""

    peer: str
    version: str | None = None
    tasks: int
    one_by_one_per_s: float | None = None
    at_once_per_s: float | None = None
    in_bulk_per_s: float | None = None
    bytes_per_pending_task: float | None = None
    drain_per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    early: int | None = None
    duplicated: int | None = None
    lost: int | None = None
    error: str | None = None

    @property
    def sound(self) -> bool:
        """Whether Mainspring delivered correctly. Other queues are not judged."""
        return self.peer != OURSELVES or not (self.early or self.duplicated or self.lost or self.error)


def server_of_choice() -> ServerChoice:
    """Return Redis where it is installed, because the peers are made for it; otherwise the embedded Valkey."""
    return ServerChoice(server="valkey" if missing("redis") else "redis")


async def peers(
    where: ServerChoice, demand: Demand, only: Sequence[str], progress: BenchProgress, *, install: bool = True
) -> list[PeerRow]:
    if unknown := set(only) - {OURSELVES, *PEERS}:
        raise InvalidInput(f"--only {', '.join(sorted(unknown))}: unknown; give {', '.join((OURSELVES, *PEERS))}")
    if demand.tasks < 1 or demand.rate < 1 or demand.seconds <= 0:
        raise InvalidInput("--tasks, --rate and --seconds must be more than 0")
    if where.url is not None:
        raise InvalidInput("peers are measured on private servers only: their keys could collide with existing ones")
    return [
        await _row(name, where, demand, progress, install=install)
        for name in (OURSELVES, *PEERS)
        if name in (only or (OURSELVES, *PEERS))
    ]


async def _row(name: str, where: ServerChoice, demand: Demand, progress: BenchProgress, *, install: bool) -> PeerRow:
    tasks = max(1, round(demand.tasks * _SHARES.get(name, 1.0)))
    try:
        one = await _contender(name, progress, install=install)
    except PeersMissing as error:
        return PeerRow(peer=name, tasks=tasks, error=str(error))
    return await row_of(one, where, msgspec.structs.replace(demand, tasks=tasks), progress)


async def _contender(name: str, progress: BenchProgress, *, install: bool) -> Contender:
    file = _HERE / f"{name}.py"
    if name == OURSELVES:
        return Contender(name, file, Path(sys.executable), ("node", "consume"))
    progress(f"{name}: looking for its library, installing it if needed", 0, 1)
    return Contender(name, file, await python_with_peers(install=install))


async def row_of(one: Contender, where: ServerChoice, demand: Demand, progress: BenchProgress) -> PeerRow:
    try:
        measured = await measure(one, demand, where, progress)
    except (MainspringError, OSError) as error:
        return PeerRow(peer=one.name, tasks=demand.tasks, error=str(error))
    return PeerRow(peer=one.name, **msgspec.structs.asdict(measured))
