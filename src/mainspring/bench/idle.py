"""`bench idle`, `bench growth` and `bench sparse`: the cost of an idle node and of pending tasks.

Each number of pending tasks has its own private server, and the servers take turns: other load on the machine affects
all numbers alike. A server given by URL holds one number after the other.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from ..client.client import Client
from ..engine.engine import Engine
from ..model.task import Task
from ..sinks.log import NullSink
from ..store.store import Store
from .cycle import MainspringDesign
from .environment import BenchEnvironment, Measurement, ServerChoice, open_environment
from .lifecycle import TARGET, BenchProgress, Figures, Shape, live, payload_texts

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
YEAR_MS: Final = 365 * DAY_MS

_STRIDE: Final = 2_654_435_761
"""Odd and large, so that consecutive numbers scatter over the whole range."""


def over_a_year(now_ms: int, number: int) -> int:
    return now_ms + 2 * HOUR_MS + number * _STRIDE % YEAR_MS


_RANGES: Final = ((10 * MINUTE_MS, HOUR_MS), (HOUR_MS, DAY_MS), (DAY_MS, 30 * DAY_MS), (DAY_MS, YEAR_MS))


def mixed(now_ms: int, number: int) -> int:
    """Return a due time: a quarter of the numbers each within the hour, the day, the month and the year."""
    low, high = _RANGES[number % 4]
    return now_ms + low + number * _STRIDE % (high - low)


async def add(
    client: Client,
    numbers: range,
    due_ms: Callable[[int, int], int],
    *,
    payload_bytes: int = 48,
    progress: Callable[[int], None],
) -> None:
    now_ms = client.store.clock.now_ms()

    def tasks() -> Iterator[Task]:
        texts = payload_texts(numbers.start, numbers.stop, payload_bytes)
        for number, text in zip(numbers, texts, strict=True):
            yield Task(TARGET, text, due_ms(now_ms, number))

    await client.put_many(tasks(), progress=progress)


SETTLE_S: Final = 2.0
"""Seconds to wait before measuring: taking over the partitions is work, and idle begins after it."""


class Idle(msgspec.Struct, frozen=True):
    node_cpu_percent: float
    server_commands_per_s: float
    server_cpu_percent: float
    seconds: float

    @property
    def sound(self) -> bool:
        return True


async def idle(where: ServerChoice, seconds: float, progress: BenchProgress) -> Idle:
    async with open_environment(where) as place:
        await place.time.stop()  # its TIME calls would be counted, and nothing here needs the server's clock
        store = await Store.open(place.url, namespace=place.namespace)
        engine = Engine(store, {"null": NullSink()})
        try:
            await engine.start()
            progress("settling", 0, 1)
            await asyncio.sleep(SETTLE_S)
            progress("idle", 0, 1)
            before = await place.read()
            await asyncio.sleep(seconds)
            used = (await place.read()).since(before)
            # The second reading counts the INFO of the first, on every server.
            commands = used.commands - len(place.servers.all())
            if engine.crashed is not None:
                raise engine.crashed
        finally:
            await engine.stop()
            await store.aclose()
    return _figures(used, commands)


def _figures(used: Measurement, commands: int) -> Idle:
    return Idle(
        node_cpu_percent=round(used.client_us / used.at_s / 10_000, 2),
        server_commands_per_s=round(commands / used.at_s, 1),
        server_cpu_percent=round(used.server_us / used.at_s / 10_000, 2),
        seconds=round(used.at_s, 2),
    )


STEPS: Final = (50_000, 500_000, 5_000_000)


class GrowthRow(msgspec.Struct, frozen=True):
    """Cost of putting and firing a task while `pending` others wait in the same namespace."""

    pending: int
    server_cpu_us_per_task: float
    put_server_us: float
    fire_server_us: float
    lost: int
    duplicated: int
    early: int

    @property
    def sound(self) -> bool:
        return not (self.lost or self.duplicated or self.early)


@dataclass(slots=True)
class _Level:
    """A number of pending tasks, and the measurements taken with it."""

    pending: int
    place: BenchEnvironment
    store: Store
    lives: list[Figures] = field(default_factory=list)

    async def fill(self, progress: BenchProgress) -> None:
        def report(done: int) -> None:
            progress(f"adding {self.pending:,} pending tasks", done, self.pending)

        await add(Client.over(self.store), range(self.pending), mixed, progress=report)

    async def measure(self, shape: Shape, progress: BenchProgress) -> None:
        def report(what: str, done: int, total: int) -> None:
            progress(f"{self.pending:,} pending: {what}", done, total)

        self.lives.append(await live(self.place, MainspringDesign(self.store), shape, report))

    def row(self) -> GrowthRow:
        lives = self.lives
        return GrowthRow(
            self.pending,
            median(one.server_cpu_us_per_task for one in lives),
            median(one.put_server_us for one in lives),
            median(one.fire_server_us for one in lives),
            sum(one.lost for one in lives),
            sum(one.duplicated for one in lives),
            sum(one.early for one in lives),
        )


async def growth(where: ServerChoice, most: int, tasks: int, rounds: int, progress: BenchProgress) -> list[GrowthRow]:
    shape = Shape(tasks, spread_s=2.0)
    steps = [step for step in STEPS if step <= most] or [most]
    if where.url is None:
        return await _side_by_side(where, steps, shape, rounds, progress)
    return [row for step in steps for row in await _side_by_side(where, [step], shape, rounds, progress)]


async def _side_by_side(
    where: ServerChoice, steps: Sequence[int], shape: Shape, rounds: int, progress: BenchProgress
) -> list[GrowthRow]:
    async with contextlib.AsyncExitStack() as stack:
        levels = []
        for step in steps:
            place = await stack.enter_async_context(open_environment(where))
            store = await Store.open(place.url, namespace=place.namespace)
            stack.push_async_callback(store.aclose)
            levels.append(_Level(step, place, store))
            await levels[-1].fill(progress)
        for _ in range(rounds):
            for level in levels:
                await level.measure(shape, progress)
        return [level.row() for level in levels]


class Sparse(msgspec.Struct, frozen=True):
    tasks: int
    bytes_per_pending_task: float
    put_per_s: float
    put_server_us: float
    pending: int
    """Pending tasks as the server counts them."""

    @property
    def sound(self) -> bool:
        return self.pending == self.tasks


async def sparse(where: ServerChoice, tasks: int, payload_bytes: int, progress: BenchProgress) -> Sparse:
    async with open_environment(where) as place, Client(place.url, namespace=place.namespace) as client:
        before = await place.read()
        await add(
            client,
            range(tasks),
            over_a_year,
            payload_bytes=payload_bytes,
            progress=lambda done: progress("putting", done, tasks),
        )
        used = (await place.read()).since(before)
        pending = (await client.count()).pending
    return Sparse(
        tasks=tasks,
        bytes_per_pending_task=round(used.memory / tasks, 1),
        put_per_s=round(tasks / used.at_s),
        put_server_us=round(used.server_us / tasks, 3),
        pending=pending,
    )
