"""Workers: a node in a process of its own hands off, and one worker here runs a handler that does nothing."""

import asyncio
import statistics
import time
from typing import Final, NamedTuple

import msgspec

from ..client import Client
from ..model.task import Task
from ..store.store import Store
from ..worker.context import current
from ..worker.handler import Handler
from ..worker.registry import Registry
from ..worker.worker import WorkerOptions, working
from .drain import until_done
from .fleet import BenchFailed, fleet
from .ground import Where, ground
from .life import Progress
from .timer import bare_timer, percentile

QUEUE: Final = "bench"
PUT_US: Final = 30
"""Time for the puts, a task: all are due at one moment, and none before the last is put."""

STEADY_RATE: Final = 500
WARM_UP_S: Final = 1.0
STEADY_S: Final = 4.0
"""Lateness is that of tasks due after the warm-up: the first of a new node and a new worker find nothing ready."""
PAYLOAD: Final = {"order": 42}


class QueueFigures(msgspec.Struct, frozen=True):
    """From due to acknowledged: all due at one moment; and how late handlers begin at a steady rate. Medians of the
    rounds."""

    tasks: int
    tasks_per_s: float
    p50_ms: float
    p99_ms: float
    timer_p99_ms: float
    """Of a bare timer in the same seconds: nothing can be less late on this machine."""
    rate: int
    lost: int

    @property
    def sound(self) -> bool:
        return self.lost == 0


class _Round(NamedTuple):
    per_s: float
    p50_ms: float
    p99_ms: float
    timer_p99_ms: float
    lost: int


async def queue(where: Where, tasks: int, rounds: int, progress: Progress) -> QueueFigures:
    found: list[_Round] = []
    for number in range(rounds):
        async with ground(where) as place:
            store = await Store.open(place.url, namespace=place.namespace)
            try:
                found.append(await _round(store, place.url, tasks, progress))
            finally:
                await store.aclose()
        progress(f"queue, round {number + 1}", tasks, tasks)
    per_s, p50_ms, p99_ms, timer_p99_ms, _ = (statistics.median(column) for column in zip(*found, strict=True))
    return QueueFigures(
        tasks,
        round(per_s),
        round(p50_ms, 2),
        round(p99_ms, 2),
        round(timer_p99_ms, 2),
        STEADY_RATE,
        sum(one.lost for one in found),
    )


async def _round(store: Store, url: str, tasks: int, progress: Progress) -> _Round:
    late: list[float] = []
    steady_ms = 0

    async def nothing(order: int) -> int:
        return order

    async def noted(order: int) -> int:
        due_ms = current().job.due_ms
        if due_ms >= steady_ms:
            late.append(store.clock.now_ms() - due_ms)
        return order

    registry = Registry([Handler(nothing, queue=QUEUE), Handler(noted, queue=QUEUE)])
    async with fleet(store, url, 5.0) as nodes:
        await nodes.add()
        await nodes.settled()
        async with working(store, registry, WorkerOptions("bench", {QUEUE: 1})):
            steady = round(STEADY_RATE * (WARM_UP_S + STEADY_S))
            async with bare_timer(STEADY_RATE) as timer:
                first_ms = store.clock.now_ms() + 1000
                steady_ms = first_ms + round(WARM_UP_S * 1000)
                await _put(store, "noted", [first_ms + i * 1000 // STEADY_RATE for i in range(steady)])
                _, noted_count = await until_done(store, steady, time.perf_counter(), progress, what="queue, steady")
            due_ms = store.clock.now_ms() + 2000 + tasks * PUT_US // 1000
            await _put(store, "nothing", [due_ms] * tasks)
            await asyncio.sleep(max(0, due_ms - store.clock.now_ms()) / 1000)
            began = time.perf_counter()
            took_s, done = await until_done(store, steady + tasks, began, progress, what="queue")
    if not late:
        raise BenchFailed("no handler was run at the steady rate")
    return _Round(
        (done - noted_count) / took_s,
        percentile(late, 0.5),
        percentile(late, 0.99),
        percentile(timer.ms, 0.99),
        steady + tasks - done,
    )


async def _put(store: Store, handler: str, due_ms: list[int]) -> None:
    await Client.over(store).put_many(Task(f"queue:{QUEUE}/{handler}", PAYLOAD, at) for at in due_ms)
