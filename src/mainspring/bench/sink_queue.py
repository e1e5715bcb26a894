"""Workers: a node in a process of its own hands off, and one worker here runs a handler that does nothing."""

import asyncio
import statistics
import time
from typing import Final

import msgspec

from ..client import Client
from ..model.task import Task
from ..store.store import Store
from ..worker.context import current
from ..worker.handler import Handler
from ..worker.registry import Registry
from ..worker.worker import WorkerOptions, working
from .drain import until_done
from .fleet import fleet
from .ground import Where, ground
from .life import Progress

QUEUE: Final = "bench"
PUT_US: Final = 30
"""Time for the puts, a task: all are due at one moment, and none before the last is put."""

STEADY_RATE: Final = 500
STEADY_S: Final = 4.0
PAYLOAD: Final = {"order": 42}


class QueueFigures(msgspec.Struct, frozen=True):
    """From due to acknowledged: all due at one moment; then how late handlers begin at a steady rate."""

    tasks: int
    tasks_per_s: float
    p50_ms: float
    p99_ms: float
    rate: int
    lost: int

    @property
    def sound(self) -> bool:
        return self.lost == 0


async def queue(where: Where, tasks: int, rounds: int, progress: Progress) -> QueueFigures:
    rates: list[float] = []
    late: list[float] = []
    lost = 0
    for number in range(rounds):
        async with ground(where) as place:
            store = await Store.open(place.url, namespace=place.namespace)
            try:
                per_s, missing = await _round(store, place.url, tasks, late, progress)
            finally:
                await store.aclose()
        progress(f"queue, round {number + 1}", tasks, tasks)
        rates.append(per_s)
        lost += missing
    late.sort()
    return QueueFigures(
        tasks,
        round(statistics.median(rates)),
        round(late[len(late) // 2], 2),
        round(late[len(late) * 99 // 100], 2),
        STEADY_RATE,
        lost,
    )


async def _round(store: Store, url: str, tasks: int, late: list[float], progress: Progress) -> tuple[float, int]:
    async def nothing(order: int) -> int:
        return order

    async def noted(order: int) -> int:
        late.append(store.clock.now_ms() - current().job.due_ms)
        return order

    registry = Registry([Handler(nothing, queue=QUEUE), Handler(noted, queue=QUEUE)])
    async with fleet(store, url, 5.0) as nodes:
        await nodes.add()
        await nodes.settled()
        async with working(store, registry, WorkerOptions("bench", {QUEUE: 1})):
            steady = round(STEADY_RATE * STEADY_S)
            await _put(store, "noted", [store.clock.now_ms() + 1000 + i * 1000 // STEADY_RATE for i in range(steady)])
            _, noted_count = await until_done(store, steady, time.perf_counter(), progress, what="queue, steady")
            due_ms = store.clock.now_ms() + 2000 + tasks * PUT_US // 1000
            await _put(store, "nothing", [due_ms] * tasks)
            await asyncio.sleep(max(0, due_ms - store.clock.now_ms()) / 1000)
            began = time.perf_counter()
            took_s, done = await until_done(store, steady + tasks, began, progress, what="queue")
    return (done - noted_count) / took_s, steady + tasks - done


async def _put(store: Store, handler: str, due_ms: list[int]) -> None:
    await Client.over(store).put_many(Task(f"queue:{QUEUE}/{handler}", PAYLOAD, at) for at in due_ms)
