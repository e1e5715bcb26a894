"""`bench http` and `bench e2e`: the throughput of the HTTP API, and of batches over HTTP in, Kafka out.

One by one: `POST /ticks` on keep-alive connections, each answered once the tick is stored. In bulk: `/v1/tasks:batch`.
This process is the client; nothing is due while it measures.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from itertools import chain, count, cycle, product
from pathlib import Path
from typing import Final

import msgspec

from ..config.config import Config
from ..demo.generator import ApiConnections, Request, request
from ..demo.plan import DemoPlan, Ticks, lines_of, text_of
from ..demo.run import DemoServers as DemoWhere
from ..demo.run import Second, schedulers, ticks
from ..model.errors import InvalidInput
from .environment import ServerChoice, counterpart, open_environment
from .lifecycle import BenchProgress

CONNECTIONS: Final = 64
BATCH_CONNECTIONS: Final = 4
BATCH: Final = 5_000
BODIES: Final = 16
"""Number of batches made beforehand and sent repeatedly: tasks without ids are new each time."""

SINGLES: Final = 256
"""Ticks drawn at a time for single requests: the client shares the machine with the server it measures."""

AHEAD_MS: Final = 600_000
"""Ticks are due this long after the start, spread over the same length of time."""


class HttpFigures(msgspec.Struct, frozen=True):
    """Throughput: medians over the rounds."""

    ticks_per_s: float
    bare_per_s: float
    ratio: float
    batch_tasks_per_s: float
    refused: int

    @property
    def sound(self) -> bool:
        return self.refused == 0


class Timed:
    """A source of requests that ends after a number of seconds."""

    def __init__(self, seconds: float, make: Callable[[], Request], size: int) -> None:
        self._seconds = seconds
        self._make = make
        self._size = size
        self._began = time.perf_counter()
        self._ended = self._began
        self.taken = 0
        self.refused = 0

    @property
    def over(self) -> bool:
        return time.perf_counter() > self._began + self._seconds

    def next(self) -> Request | None:
        return None if self.over else self._make()

    def answered(self, sent: Request, status: int, body: bytes) -> None:  # noqa: ARG002
        self._ended = time.perf_counter()
        well = status in (200, 202) and (self._size == 1 or b'"failed":0' in body)
        self.taken += self._size * well
        self.refused += self._size * (not well)

    @property
    def per_s(self) -> float:
        return self.taken / max(1e-9, self._ended - self._began)


async def http(where: ServerChoice, seconds: float, rounds: int, progress: BenchProgress) -> HttpFigures:
    """Measure in turns, so that other load on the machine affects all alike. The first round only warms up.

    Batches come last: they store millions of tasks, and the server then rewrites its file for some seconds on the same
    two cores.
    """
    if seconds <= 0:
        raise InvalidInput("--seconds must be more than 0")
    found: dict[str, list[float]] = {"bare": [], "ticks": [], "batch": []}
    refused = 0
    async with (
        open_environment(where) as place,
        counterpart("mainspring.bench.bare_servers", "echo") as bare_url,
        _api(place.nearest_url, place.namespace) as url,
    ):
        for turns in ((("bare", bare_url), ("ticks", url)), (("batch", url),)):
            for number, (name, one) in product(range(rounds + 1), turns):
                progress(f"http, {name}, round {number}", number, rounds + 1)
                source = await _drive(one, name, seconds if number else min(1.0, seconds))
                found[name].append(source.per_s)
                refused += source.refused
    bare, ticks, batch = (statistics.median(figures[1:]) for figures in found.values())
    return HttpFigures(round(ticks), round(bare), round(ticks / bare, 3), round(batch), refused)


async def _drive(url: str, name: str, seconds: float) -> Timed:
    in_bulk = name == "batch"
    make = _batches() if in_bulk else _single()
    source = Timed(seconds, make, BATCH if in_bulk else 1)
    await ApiConnections([url], BATCH_CONNECTIONS if in_bulk else CONNECTIONS, source).run()
    return source


def _single() -> Callable[[], Request]:
    plan = DemoPlan(within_ms=AHEAD_MS, seconds=1)
    ticks = Ticks(plan)
    some = chain.from_iterable(_later(ticks, plan, SINGLES) for _ in count())
    return lambda: request("/ticks", "application/json", text_of(next(some), plan.ids))


def _later(ticks: Ticks, plan: DemoPlan, count: int) -> list[int]:
    """Take the next ticks, due after the measurement."""
    return [number + AHEAD_MS * plan.ids for number in ticks.take(count)]


def _batches() -> Callable[[], Request]:
    plan = DemoPlan(within_ms=AHEAD_MS, seconds=1, via="batch")
    ticks = Ticks(plan)
    bodies = []
    for _ in range(BODIES):
        body = lines_of(_later(ticks, plan, BATCH), plan.ids, "log:", named=False)
        bodies.append(request("/v1/tasks:batch?answers=errors", "application/x-ndjson", body))
    rest = cycle(bodies)
    return lambda: next(rest)


@contextlib.asynccontextmanager
async def _api(redis_url: str, namespace: str) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="mainspring-bench-") as folder:
        config = Config(redis_url=redis_url, namespace=namespace, log_level="warning")
        async with schedulers(1, config, Path(folder)) as [one]:
            yield one.url


WITHIN_MS = 2_000


class E2eFigures(msgspec.Struct, frozen=True):
    tasks_per_s: float
    """Tasks consumed per second while the load was steady."""
    p50_ms: float | None
    p99_ms: float | None
    missing: int
    early: int
    duplicated: int
    tasks: int
    rate: float
    """The rate that was requested."""

    @property
    def sound(self) -> bool:
        return not (self.missing or self.early or self.duplicated)


async def e2e(
    where: ServerChoice, rate: float, seconds: float, schedulers: int, kafka_url: str | None, progress: BenchProgress
) -> E2eFigures:
    if rate <= 0 or seconds <= 0:
        raise InvalidInput("--rate and --seconds must be more than 0")
    # Tasks posted in the first seconds come due gradually: the load is steady from then on.
    posted_s = seconds + WITHIN_MS / 1000
    plan = DemoPlan(
        within_ms=WITHIN_MS, rate=rate, seconds=posted_s, schedulers=schedulers, via="batch", named=False, lease_s=5.0
    )
    count = 0

    def report(second: Second) -> None:
        nonlocal count
        count += second.consumed
        progress(f"e2e, {second.consumed:,} arrived in the last second", count, round(rate * posted_s))

    progress("e2e, starting the parts", 0, 1)
    async with open_environment(where) as place:
        await place.time.stop()
        found = await ticks(plan, DemoWhere(kafka_url, place.nearest_url, in_bulk=True), report)
    return E2eFigures(
        tasks_per_s=round(found.consumed_per_s),
        p50_ms=found.p50_ms,
        p99_ms=found.p99_ms,
        missing=found.missing,
        early=found.early,
        duplicated=found.duplicated,
        tasks=found.consumed,
        rate=rate,
    )
