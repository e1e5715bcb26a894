"""`bench lateness`: a steady load, put two seconds ahead by another process. How late does each task arrive?

start       + lead                    + warm-up                       + seconds
| puts ---------------------------------------------------------------|
            | deliveries ---------------------------------------------------------|
                                      | measured: server CPU ---------|
                                      | measured: lateness of all that is due ----|
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from ..engine.engine import Engine
from ..model.errors import InvalidInput
from ..store.store import Store
from .baseline import BATCH, SortedSetQueue, sorted_set_queue
from .environment import BenchEnvironment, Measurement, ServerChoice, open_environment
from .generator import DesignName, LoadOrder, LoadReport, apart
from .lifecycle import BenchProgress, DeliveryTally, DeliveryVerdict, SteadyLoad, judge

LEAD_MS: Final = 2_000
START_MS: Final = 100

POLL_S: Final = 0.002
"""Interval at which the baseline looks for due tasks."""


class Steady(msgspec.Struct, frozen=True):
    """Parameters of a steady load."""

    rate: int
    seconds: float
    warmup_s: float = 3.0
    payload_bytes: int = 48

    def __post_init__(self) -> None:
        if self.rate < 1 or self.seconds <= 0:
            raise InvalidInput("--rate must be 1 or more, --seconds more than 0")
        if self.warmup_s * 1000 < LEAD_MS:
            raise InvalidInput(f"--warmup must be {LEAD_MS / 1000:g} or more: nothing fires before that")


class Lateness(msgspec.Struct, frozen=True):
    p50_ms: float
    p99_ms: float
    max_ms: float
    early: int
    lost: int
    server_cpu_us_per_task: float
    duplicated: int
    min_ms: float
    rate: int
    tasks: int
    node_cpu_percent: float
    put_lead_min_ms: int
    clock_doubt_ms: float

    @property
    def warning(self) -> str | None:
        if self.put_lead_min_ms >= LEAD_MS // 2:
            return None
        return (
            f"puts fell behind (only {self.put_lead_min_ms} ms ahead at worst, not {LEAD_MS}): this machine"
            f" cannot put {self.rate:,} tasks a second beside the engine now, and not all lateness is the engine's"
        )

    @property
    def sound(self) -> bool:
        return not (self.lost or self.duplicated or self.early)


class LatenessComparison(msgspec.Struct, frozen=True):
    mainspring: Lateness
    baseline: Lateness
    server_cpu_ratio: float

    @property
    def warning(self) -> str | None:
        named = {"baseline": self.baseline.warning, "mainspring": self.mainspring.warning}
        return "; ".join(f"{name}: {text}" for name, text in named.items() if text) or None

    @property
    def sound(self) -> bool:
        return self.mainspring.sound and self.baseline.sound


async def compare_lateness(where: ServerChoice, steady: Steady, progress: BenchProgress) -> LatenessComparison:
    theirs = await lateness(where, steady, "baseline", progress)
    ours = await lateness(where, steady, "mainspring", progress)
    ratio = round(ours.server_cpu_us_per_task / theirs.server_cpu_us_per_task, 4)
    return LatenessComparison(ours, theirs, ratio)


async def lateness(where: ServerChoice, steady: Steady, design: DesignName, progress: BenchProgress) -> Lateness:
    async with open_environment(where) as place:
        tasks = round(steady.rate * (steady.warmup_s + steady.seconds))
        order = LoadOrder(place.url, place.namespace, design, LEAD_MS, tasks, steady.rate, steady.payload_bytes)
        tally = DeliveryTally(tasks, place.time)
        firing = _slices_fire if design == "mainspring" else _sorted_set_fires
        async with firing(place, tally), apart(order) as generator:
            await generator.ready()
            start_ms = place.time.now_ms() + START_MS
            load = SteadyLoad(tasks, steady.rate, start_ms + LEAD_MS, steady.payload_bytes)
            generator.go(load.first_due_ms)
            used, fired = await _steady_stretch(place, tally, steady, start_ms, design, progress)
            report = await generator.report()
            await tally.wait()
        doubt_ms = place.time.doubt_us / 1000
    from_ms = start_ms + round(steady.warmup_s * 1000)
    verdict = judge(load, tally.batches, late_from_ms=from_ms)
    return _figures(steady, load, verdict, used, fired, report, doubt_ms)


async def _steady_stretch(
    place: BenchEnvironment, tally: DeliveryTally, steady: Steady, start_ms: int, design: str, progress: BenchProgress
) -> tuple[Measurement, int]:
    """Measure between warm-up and the last put; return the resources used and the number of tasks fired."""
    from_ms = start_ms + round(steady.warmup_s * 1000)
    until_ms = from_ms + round(steady.seconds * 1000)
    progress(f"{design}: warming up", 0, 1)
    await place.time.until(from_ms)
    before, count = await place.read(), tally.count
    for at_ms in (*range(from_ms + 1000, until_ms, 1000), until_ms):
        await place.time.until(at_ms)
        progress(f"{design}: {steady.rate:,} tasks a second", at_ms - from_ms, until_ms - from_ms)
    return (await place.read()).since(before), tally.count - count


@contextlib.asynccontextmanager
async def _slices_fire(place: BenchEnvironment, tally: DeliveryTally) -> AsyncIterator[None]:
    store = await Store.open(place.url, namespace=place.namespace)
    engine = Engine(store, {"null": tally})
    try:
        await engine.start()
        yield
        if engine.crashed is not None:
            raise engine.crashed
    finally:
        await engine.stop()
        await store.aclose()


@contextlib.asynccontextmanager
async def _sorted_set_fires(place: BenchEnvironment, tally: DeliveryTally) -> AsyncIterator[None]:
    async with sorted_set_queue(place.url, place.namespace) as queue:
        polling = asyncio.create_task(_poll(queue, tally))
        try:
            yield
        finally:
            polling.cancel()
            await asyncio.wait([polling])


async def _poll(queue: SortedSetQueue, tally: DeliveryTally) -> None:
    claimed: list[bytes] = []
    while True:
        claimed, payloads = await queue.claim(claimed)
        if payloads:
            tally.take(payloads)
        if len(payloads) < BATCH:
            await asyncio.sleep(POLL_S)


def _figures(
    steady: Steady,
    load: SteadyLoad,
    verdict: DeliveryVerdict,
    used: Measurement,
    fired: int,
    report: LoadReport,
    doubt_ms: float,
) -> Lateness:
    late = sorted(verdict.lateness_ms) or [0.0]
    return Lateness(
        p50_ms=round(late[len(late) // 2], 3),
        p99_ms=round(late[min(len(late) - 1, len(late) * 99 // 100)], 3),
        max_ms=round(late[-1], 3),
        early=verdict.early,
        lost=verdict.lost,
        server_cpu_us_per_task=round(used.server_us / max(1, fired), 3),
        duplicated=verdict.duplicated,
        min_ms=round(late[0], 3),
        rate=steady.rate,
        tasks=load.tasks,
        node_cpu_percent=round(used.client_us / used.at_s / 10_000, 1),
        put_lead_min_ms=report.min_lead_ms,
        clock_doubt_ms=round(doubt_ms, 3),
    )
