"""The demo itself: starts the parts, tells the rates every second, and adds everything up at the end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import msgspec

from ..bench.ground import clear_namespace
from ..config import Config
from ..model.errors import MainspringError
from ..signals import stop_signals
from ..store.store import Group, Store
from .consumer_order import Order as ConsumerOrder
from .generator import Order as GeneratorOrder
from .journal import compare
from .plan import TOPIC, Plan
from .scheduler import SchedulerProcess, schedulers
from .side import Side, beside
from .stage import Stage, Where, stage
from .usage import Usage, Usages

SECOND_S: Final = 1.0
PATIENCE_S: Final = 60.0
"""Beyond the last due time, without anything going on: what has not come by then is missing."""

SETTLE_S: Final = 10.0


class Second(msgspec.Struct, frozen=True):
    """What happened in one second."""

    generated: int
    scheduled: int
    consumed: int
    pending: int


class Reconciliation(msgspec.Struct, frozen=True):
    sent: int
    accepted: int
    replaced: int
    fired: int
    consumed: int
    missing: int
    duplicated: int
    early: int
    p50_ms: float | None
    p99_ms: float | None
    pending: int
    """Not due yet: the demo was ended before."""
    refused: int
    seconds: float
    """How long ticks were posted."""
    consumed_per_s: float
    """While the rate was steady: ticks are due after they are posted, so it rises at first and falls in the end."""
    processes: list[Usage]

    @property
    def sound(self) -> bool:
        return not (self.missing or self.early or self.refused)


class Parts(msgspec.Struct):
    """The running demo, for whoever watches it."""

    schedulers: list[SchedulerProcess]
    generator: Side
    consumer: Side


class Demo:
    def __init__(self, plan: Plan, place: Stage, store: Store, parts: Parts, tell: Callable[[Second], None]) -> None:
        self._plan = plan
        self._place = place
        self._store = store
        self._parts = parts
        self._tell = tell
        self._stopping = asyncio.Event()
        self.usages = Usages()
        self._before = Second(0, 0, 0, 0)

    def stop(self) -> None:
        """No more ticks, and no waiting for those that are not due yet."""
        self._stopping.set()
        self._parts.generator.stop()

    async def play(self) -> Reconciliation:
        generator, consumer = self._parts.generator, self._parts.consumer
        while not generator.ended.is_set():
            await self._second()
        made = await generator.finished()
        self.usages.told("generator", generator.usage)
        if made["refused"]:
            raise MainspringError(f"{made['refused']} ticks were refused, the first with: {made['first_refusal']}")
        await self._until_drained()
        books = await self._until_consumed()
        self.usages.look()
        consumer.stop()
        return self._added_up(made, await consumer.finished(), books)

    async def _second(self) -> int:
        """Wait for the rest of a second and tell what happened in it; returns how many are pending."""
        await self._wait()
        self._parts.consumer.check()
        self.usages.look()
        books = await self._books()
        now = Second(self._parts.generator.total, books["accepted"], self._parts.consumer.total, _pending(books))
        past, self._before = self._before, now
        told = (now.generated - past.generated, now.scheduled - past.scheduled, now.consumed - past.consumed)
        self._tell(Second(*told, now.pending))
        return now.pending

    async def _wait(self) -> None:
        """A second, which a stop cuts short; those after it are whole again."""
        ended, stopping = self._parts.generator.ended, self._stopping
        if ended.is_set() and stopping.is_set():
            await asyncio.sleep(SECOND_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECOND_S):
                await ended.wait()
                await stopping.wait()

    async def _until_drained(self) -> None:
        deadline = time.monotonic() + self._plan.within_ms / 1000 + PATIENCE_S
        while not self._stopping.is_set() and time.monotonic() < deadline:
            if not await self._second():
                return

    async def _until_consumed(self) -> dict[str, int]:
        """What is marked done has reached the topic; the consumer may be a moment behind. Returns the books as they
        stood before: after a stop more is fired all the time, and the consumer is not waited for again."""
        books = await self._books()
        seen_at = time.monotonic()
        while self._parts.consumer.total < books["done"] and time.monotonic() < seen_at + SETTLE_S:
            before = self._before.consumed
            await self._second()
            if self._before.consumed > before:
                seen_at = time.monotonic()
        return books

    async def _books(self) -> dict[str, int]:
        """The server's own counters, over all partitions."""
        names = ("accepted", "done", "cancelled", "replaced", "dead")
        groups: list[Group] = [(one.slot, [("HMGET", one.n, *names)]) for one in self._store.keys.partitions]
        total = dict.fromkeys(names, 0)
        for result in await self._store.run(groups):
            if isinstance(result, Exception):
                raise result
            for name, value in zip(names, result[0], strict=True):
                total[name] += int(value or 0)
        return total

    def _added_up(self, made: dict[str, Any], came: dict[str, Any], books: dict[str, int]) -> Reconciliation:
        folder, pending = self._place.folder, _pending(books)
        found = compare(folder / "sent", folder / "came", self._plan.ids)
        missing = found.missing
        if self._plan.replace or pending:
            # Which of several ticks of an item was the last, and which are not due yet, only the server knows.
            consumed = came["consumed"] - found.duplicated - found.unexpected
            missing = max(0, books["accepted"] - books["replaced"] - pending - consumed)
        return Reconciliation(
            sent=made["sent"],
            accepted=books["accepted"],
            replaced=books["replaced"],
            fired=books["done"],
            consumed=came["consumed"],
            missing=missing,
            duplicated=found.duplicated,
            early=came["early"],
            p50_ms=came["p50_ms"],
            p99_ms=came["p99_ms"],
            pending=pending,
            refused=made["refused"],
            seconds=round(made["seconds"], 2),
            consumed_per_s=came["per_s"],
            processes=self.usages.all(),
        )


def _pending(books: dict[str, int]) -> int:
    return books["accepted"] - books["done"] - books["cancelled"] - books["replaced"] - books["dead"]


async def ticks(
    plan: Plan,
    where: Where,
    tell: Callable[[Second], None],
    *,
    started: Callable[[Parts], None] | None = None,
) -> Reconciliation:
    """Run the whole demo. `started` gets its parts once ticks are being posted."""
    async with stage(where) as place, _store(place) as store, _parts(plan, place) as parts:
        demo = Demo(plan, place, store, parts, tell)
        _watch(demo.usages, place, parts)
        if started is not None:
            started(parts)
        with stop_signals(demo.stop):
            return await demo.play()


@contextlib.asynccontextmanager
async def _store(place: Stage) -> AsyncIterator[Store]:
    store = await Store.open(place.redis_url, namespace=place.namespace)
    try:
        yield store
    finally:
        if "server" not in place.pids:  # it is the user's, and not gone with the demo
            await clear_namespace(store.links, place.namespace)
        await store.aclose()


@contextlib.asynccontextmanager
async def _parts(plan: Plan, place: Stage) -> AsyncIterator[Parts]:
    config = Config(
        redis_url=place.redis_url,
        namespace=place.namespace,
        kafka_url=place.kafka.url,
        kafka=place.kafka.properties,
        tick_target=plan.target,
        lease_s=plan.lease_s,
        log_level="warning",
    )
    folder = place.folder
    async with contextlib.AsyncExitStack() as stack:
        reading = ConsumerOrder(
            place.kafka.for_admin(), place.fetch_bytes, TOPIC, plan.ids, plan.within_ms, str(folder / "came")
        )
        consumer = await stack.enter_async_context(beside("consumer", "mainspring.demo.consumer", reading, folder))
        running = await stack.enter_async_context(schedulers(plan.schedulers, config, folder))
        await consumer.ready()
        urls = [one.url for one in running]
        posting = GeneratorOrder(plan, urls, place.redis_url, place.namespace, str(folder / "sent"))
        generator = await stack.enter_async_context(beside("generator", "mainspring.demo.generator", posting, folder))
        await generator.ready()
        yield Parts(running, generator, consumer)


def _watch(usages: Usages, place: Stage, parts: Parts) -> None:
    for name, pid in _processes(place, parts):
        usages.watch(name, pid)


def _processes(place: Stage, parts: Parts) -> Iterator[tuple[str, int]]:
    yield "generator", parts.generator.process.pid
    for one in parts.schedulers:
        yield one.name, one.process.pid
    yield "consumer", parts.consumer.process.pid
    yield from place.pids.items()
