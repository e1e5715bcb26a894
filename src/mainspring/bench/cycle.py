"""`bench cycle` and `bench compare`: N tasks through the client and the real engine, compared with the baseline."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from statistics import median
from typing import Any, Final

import msgspec

from ..client.client import Client
from ..engine.engine import Engine, EngineOptions
from ..model.run import HistoryRules
from ..model.task import Handle, Task
from ..sinks.base import Sink
from ..store.redis.sender import Group
from ..store.store import Store
from .baseline import baseline
from .environment import BenchEnvironment, ServerChoice, open_environment
from .lifecycle import BenchLoad, BenchProgress, DeliveryTally, Figures, Shape, live

_DROP_S: Final = 10.0


class MainspringDesign:
    """The design under test: Mainspring itself."""

    grace_ms = 3_100
    """A slice may be dropped two seconds after its end, and it ends up to a second after its last task."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client = Client.over(store)
        self._load: BenchLoad | None = None
        self._handles: list[Handle] = []

    async def put(self, load: BenchLoad, progress: Callable[[int], None]) -> None:
        self._load = load
        wanted = load.shape.cancel > 0 and not load.shape.ids
        summary = await self._client.put_many(load.stream(), progress=progress, handles=wanted)
        self._handles = summary.handles or []

    async def cancel(self) -> int:
        load, handles = self._load, self._handles
        assert load is not None
        numbers = (number for number in range(load.tasks) if load.cancelled(number))
        ids = (handles[number].id if handles else load.id(number) for number in numbers)
        outcomes = await self._client.cancel_many(ids)
        self._handles = []
        return outcomes.count("cancelled")

    async def fire(self, tally: DeliveryTally) -> None:
        engine = Engine(self._store, {"null": tally})
        await engine.start()
        try:
            whole = await tally.wait()
            if engine.crashed is not None:
                raise engine.crashed
            if whole:
                await self._until_dropped()
        finally:
            await engine.stop()

    async def _until_dropped(self) -> None:
        """Wait until the slices are dropped: dropping them is part of the cost of a task."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DROP_S):
                while True:
                    if not await self._overdue_slices():
                        break
                    await asyncio.sleep(0.1)

    async def _overdue_slices(self) -> int:
        now_s = self._store.clock.now_ms() // 1000
        groups: list[Group] = [
            (keys.slot, [("ZCOUNT", keys.slices, "-inf", now_s)]) for keys in self._store.keys.partitions
        ]
        return sum(result[0] for result in await self._store.run(groups) if isinstance(result, list))


@contextlib.asynccontextmanager
async def slices(place: BenchEnvironment) -> AsyncIterator[MainspringDesign]:
    store = await Store.open(place.url, namespace=place.namespace)
    try:
        yield MainspringDesign(store)
    finally:
        await store.aclose()


async def cycle(where: ServerChoice, shape: Shape, progress: BenchProgress) -> Figures:
    async with open_environment(where) as place, slices(place) as design:
        return await live(place, design, shape, progress)


SPREAD_S: Final = 3.0
"""Seconds over which due times are spread."""

STALL_S: Final = 20.0
_POLL_S: Final = 0.02


DEFAULT_HISTORY: Final = HistoryRules()


async def drain(
    where: ServerChoice,
    target: str,
    payload: Any,
    count: int,
    sinks: Mapping[str, Sink],
    progress: BenchProgress,
    history: HistoryRules = DEFAULT_HISTORY,
) -> tuple[float, int]:
    """Put tasks, wait until all are due, then start an engine on them.

    Return the tasks per second until all are marked done, and the number that never were.
    """
    async with open_environment(where) as place:
        store = await Store.open(place.url, namespace=place.namespace)
        try:
            load = Shape(count, spread_s=SPREAD_S).starting(place.time.now_ms())
            await Client.over(store).put_many(Task(target, payload, load.due_ms(number)) for number in range(count))
            await place.time.until(load.last_due_ms)
            await place.time.stop()
            engine = Engine(store, sinks, EngineOptions(node="bench", history=history))
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
    store: Store, count: int, began: float, progress: BenchProgress, *, what: str = "delivering"
) -> tuple[float, int]:
    """Wait until `count` tasks are done or progress stops; return the seconds taken and the number done."""
    done, seen_at = 0, began
    while done < count and time.perf_counter() < seen_at + STALL_S:
        await asyncio.sleep(_POLL_S)
        if (now_done := await done_count(store)) > done:
            done, seen_at = now_done, time.perf_counter()
            progress(what, done, count)
    return seen_at - began, done


async def done_count(store: Store) -> int:
    """Return the number of tasks marked done over all partitions."""
    groups: list[Group] = [(one.slot, [("HGET", one.n, "done")]) for one in store.keys.partitions]
    total = 0
    for result in await store.run(groups):
        if isinstance(result, Exception):
            raise result
        total += int(result[0] or 0)
    return total


class DesignComparison(msgspec.Struct, frozen=True):
    """Medians of all rounds; ratios are Mainspring / baseline. Faults are summed, so that no median hides one."""

    cycle: Figures
    baseline: Figures
    server_cpu_ratio: float
    bytes_ratio: float
    put_ratio: float
    fire_ratio: float
    rounds: int

    @property
    def warning(self) -> str | None:
        return self.cycle.warning  # overdue puts make no difference to the baseline

    @property
    def sound(self) -> bool:
        return self.cycle.sound and self.baseline.sound


async def compare(where: ServerChoice, shape: Shape, rounds: int, progress: BenchProgress) -> DesignComparison:
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for number in range(1, rounds + 1):

        def report(what: str, done: int, total: int, number: int = number) -> None:
            progress(f"round {number} of {rounds}: {what}", done, total)

        theirs.append(await baseline(where, shape, report))
        ours.append(await cycle(where, shape, report))
    us, them = middle(ours), middle(theirs)
    return DesignComparison(
        cycle=us,
        baseline=them,
        server_cpu_ratio=round(us.server_cpu_us_per_task / them.server_cpu_us_per_task, 4),
        bytes_ratio=round(us.bytes_per_pending_task / them.bytes_per_pending_task, 4),
        put_ratio=round(us.put_per_s / them.put_per_s, 3),
        fire_ratio=round(us.fire_per_s / them.fire_per_s, 3),
        rounds=rounds,
    )


_FAULTS = ("lost", "duplicated", "early", "fired_after_cancel", "misordered")


def middle(rounds: list[Figures]) -> Figures:
    """Combine rounds: the median of each figure, the sum of each fault count."""
    rows = [msgspec.structs.asdict(one) for one in rounds]
    return Figures(**{name: (sum if name in _FAULTS else median)(row[name] for row in rows) for name in rows[0]})
