"""How fast an engine empties what is due, from the slices to the done bits."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from ..client import Client
from ..engine.engine import Engine, EngineOptions
from ..model.task import Task
from ..sinks.base import Sink
from ..store.store import Group, Store
from .ground import Where, ground
from .life import Progress
from .load import Shape

SPREAD_S: Final = 3.0
"""Over so long the due times lie scattered."""

STALL_S: Final = 20.0
_POLL_S: Final = 0.02


async def drain(
    where: Where, target: str, payload: Any, count: int, sinks: Mapping[str, Sink], progress: Progress
) -> tuple[float, int]:
    """Put tasks, wait until all are due, then start an engine on them.

    Returns tasks a second until all are marked done, and how many were not in the end.
    """
    async with ground(where) as place:
        store = await Store.open(place.url, namespace=place.namespace)
        try:
            load = Shape(count, spread_s=SPREAD_S).starting(place.time.now_ms())
            await Client.over(store).put_many(Task(target, payload, load.due_ms(number)) for number in range(count))
            await place.time.until(load.last_due_ms)
            await place.time.stop()
            engine = Engine(store, sinks, EngineOptions(node="bench"))
            began = time.perf_counter()
            await engine.start()
            try:
                took_s, done = await until_done(store, count, began, progress)
            finally:
                await engine.stop()
        finally:
            await store.aclose()
    return done / took_s, count - done


async def until_done(
    store: Store, count: int, began: float, progress: Progress, *, what: str = "delivering"
) -> tuple[float, int]:
    """Wait until so many tasks are done, or nothing goes on; the seconds it took, and how many are done."""
    done, seen_at = 0, began
    while done < count and time.perf_counter() < seen_at + STALL_S:
        await asyncio.sleep(_POLL_S)
        if (now_done := await done_count(store)) > done:
            done, seen_at = now_done, time.perf_counter()
            progress(what, done, count)
    return seen_at - began, done


async def done_count(store: Store) -> int:
    """Tasks that are marked done, over all partitions."""
    groups: list[Group] = [(one.slot, [("HGET", one.n, "done")]) for one in store.keys.partitions]
    total = 0
    for result in await store.run(groups):
        if isinstance(result, Exception):
            raise result
        total += int(result[0] or 0)
    return total
