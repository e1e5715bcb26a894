"""`bench schedules`: the rate of adding schedules, the time to fire all in one second, and the cost of each."""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import product
from typing import Final

import msgspec

from ..client.client import Client
from ..engine.engine import Engine
from ..model.delivery import DONE, Delivery, Outcome
from ..model.errors import InvalidInput
from ..model.schedule.definition import Definition
from ..model.schedule.input import define
from ..model.schedule.recurrence import Recurrence
from ..store.store import Store
from .environment import BenchEnvironment, ServerChoice, open_environment
from .lifecycle import BenchProgress

EXPRESSIONS: Final = (
    "* * * * *", "*/5 * * * *", "0 * * * *", "15 6,18 * * *", "30 2 * * *", "0 9 * * MON-FRI", "0 0 1 * *",
    "0 12 L * *", "0 8 LW * *", "0 7 15W * *", "0 17 * * 5#2", "0 3 29 2 *", "10 4 1 JAN,JUL *", "*/10 * * * * *",
    "0 0 22 * * 1-5", "H H * * *", "H(0-29) 2 * * *", "@hourly", "@weekly", "@yearly", "@every 90s",
)  # fmt: skip
ZONES: Final = ("UTC", "Europe/Paris", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "America/Sao_Paulo")
WHOLE_HOURS: Final = ("UTC", "Europe/Paris", "America/New_York", "Asia/Tokyo")
GIVE_UP_S: Final = 120.0
IDLE_S: Final = 5.0
SETTLE_S: Final = 2.0
"""Seconds to wait before measuring: taking over the partitions is work, and idle begins after it."""
ADDS_A_SECOND: Final = 2_000
"""Assumed rate of adding schedules, to choose the moment at which all are due."""


class ScheduleFigures(msgspec.Struct, frozen=True):
    schedules: int
    add_per_s: float
    burst_s: float
    """From the second in which all are due until the last one reached its target."""
    burst_done_s: float
    """Until all are also marked done, and the next run of each is scheduled."""
    next_us: float
    bytes_per_schedule: float
    idle_node_cpu_percent: float
    idle_server_cpu_percent: float
    delivered: int
    doubled: int
    unplanned: int
    """Schedules whose next occurrence, an hour later, is missing."""

    @property
    def sound(self) -> bool:
        return self.delivered == self.schedules and not self.doubled and not self.unplanned


class _Counter:
    """A target that counts the schedules it receives."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.ids: set[str] = set()
        self.doubled = 0
        self.last_s = 0.0
        self.all_in = asyncio.Event()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        before = len(self.ids)
        self.ids.update(one.id for one in batch)
        self.doubled += before + len(batch) - len(self.ids)
        self.last_s = time.time()
        if len(self.ids) >= self._expected:
            self.all_in.set()
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Do nothing: no resource is held."""


def next_us(rounds: int = 60) -> float:
    """Return the mean time to compute the next run, over many expressions, zones and instants."""
    recurrences = [Recurrence.parse(text, name="job", zone=zone) for text, zone in product(EXPRESSIONS, ZONES)]
    dice = random.Random(1)
    instants = [1_790_000_000_000 + dice.randrange(3 * 365 * 86_400_000) for _ in range(rounds)]
    for one in recurrences:
        one.next_after(instants[0])
    began = time.perf_counter()
    for at_ms in instants:
        for one in recurrences:
            one.next_after(at_ms)
    return (time.perf_counter() - began) / rounds / len(recurrences) * 1e6


def _definitions(count: int, due_s: int) -> list[Definition]:
    clock = time.gmtime(due_s)
    line = f"{clock.tm_sec} {clock.tm_min} * * * *"
    return [
        define(f"bench-{n:06}", cron=line, timezone=WHOLE_HOURS[n % len(WHOLE_HOURS)], target="null:", payload={"n": n})
        for n in range(count)
    ]


async def schedules(
    where: ServerChoice, count: int, progress: BenchProgress, *, idle_s: float = IDLE_S
) -> ScheduleFigures:
    mean_us = next_us()
    async with open_environment(where) as place:
        store = await Store.open(place.url, namespace=place.namespace)
        counter = _Counter(count)
        engine = Engine(store, {"null": counter})
        try:
            return await _measure(place, store, engine, counter, count, mean_us, progress, idle_s)
        finally:
            await engine.stop()
            await store.aclose()


async def _measure(
    place: BenchEnvironment,
    store: Store,
    engine: Engine,
    counter: _Counter,
    count: int,
    mean_us: float,
    progress: BenchProgress,
    idle_s: float,
) -> ScheduleFigures:
    client = Client.over(store)
    now_s = store.clock.now_ms() / 1000
    due_s = int(now_s + 6 + SETTLE_S + idle_s + count / ADDS_A_SECOND)
    wanted = _definitions(count, due_s)
    before = await place.read()
    for first in range(0, count, 5_000):
        progress("adding", first, count)
        await client.schedules.add_many(wanted[first : first + 5_000])
    added = (await place.read()).since(before)
    if time.time() >= due_s:
        raise InvalidInput(f"adding {count} schedules took longer than {count / ADDS_A_SECOND + 6:.0f} s; try fewer")
    await engine.start()
    await asyncio.sleep(SETTLE_S)
    idle_before = await place.read()
    await asyncio.sleep(idle_s)
    idle = (await place.read()).since(idle_before)
    progress("waiting", 0, 1)
    async with asyncio.timeout(max(0.0, due_s - time.time()) + GIVE_UP_S):
        await counter.all_in.wait()
    delivered_s = counter.last_s
    while engine.deliveries.in_flight or any(one.has_writes for one in engine.owned.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # the engine has no event for this
    done_s = time.time()
    if engine.crashed is not None:
        raise engine.crashed
    planned = 0
    async for view in client.schedules.all():
        planned += view.next_ms[:1] == ((due_s + 3600) * 1000,)
    return ScheduleFigures(
        schedules=count,
        add_per_s=round(count / added.at_s),
        burst_s=round(delivered_s - due_s, 3),
        burst_done_s=round(done_s - due_s, 3),
        next_us=round(mean_us, 1),
        bytes_per_schedule=round(added.memory / count, 1),
        idle_node_cpu_percent=round(idle.client_us / idle.at_s / 10_000, 2),
        idle_server_cpu_percent=round(idle.server_us / idle.at_s / 10_000, 2),
        delivered=len(counter.ids),
        doubled=counter.doubled,
        unplanned=count - planned,
    )
