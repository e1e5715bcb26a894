"""A namespace under load while its servers change: puts, cancels and an engine, all of it written down."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mainspring.client.client import Client
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.errors import NotConfirmed, Unavailable
from mainspring.model.task import Handle, Task
from mainspring.store.keys import partition_of
from mainspring.store.redis.servers import LinkOptions
from mainspring.store.store import Store
from mainspring.testing.balance import Balance, balance
from mainspring.testing.history import CancelledEvent, History, check
from mainspring.testing.ticker import RecordingSink
from tests.support.recording import record

PARTITIONS = 6
QUICK = LinkOptions(connect_timeout_s=5, timeout_s=10)


class Scene:
    """One namespace: a store, a client that waits for its servers, an engine, and what happened."""

    def __init__(self, store: Store, lease_s: float) -> None:
        self.store = store
        self.client = Client.over(store, wait_s=60)
        self.history = History(store.keys.namespace)
        self.sink = RecordingSink()
        self.engine = Engine(store, {"log": self.sink}, EngineOptions(lease_s=lease_s))
        record(self.engine, self.history.events.append)
        self.handles: list[Handle] = []
        self.unsure: set[str] = set()
        """Payloads of puts whose answer was an error: they may be there."""

    @property
    def delivered(self) -> set[str]:
        """Ids that reached their target."""
        return {one.id for one in self.sink.deliveries}

    @property
    def cancel_less(self) -> list[Handle]:
        """Handles of everything that is to be delivered."""
        events = self.history.events
        cancelled = {one.task for one in events if isinstance(one, CancelledEvent) and one.answer == "cancelled"}
        return [handle for handle in self.handles if handle.id not in cancelled]

    def delivered_from(self, partitions: set[int]) -> int:
        return sum(
            partition_of(one.id, PARTITIONS) in partitions for one in self.sink.deliveries if one.id.startswith("n")
        )

    def fault(self, start_us: int, what: str, *, loses: bool = False) -> None:
        """Something failed from then until now."""
        self.history.fault(start_us, now_us(), what, loses=loses)

    async def all_delivered(self) -> None:
        """Until everything that was accepted, and not cancelled, has reached its target, and the server knows it."""
        wanted = {handle.id.partition("~")[0] for handle in self.cancel_less}
        await until(lambda: wanted <= self.delivered, 60, lambda: f"missing: {sorted(wanted - self.delivered)[:5]}")
        async with asyncio.timeout(60):
            while (books := await balance(self.store)).pending or books.fired:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def violations(self) -> list[object]:
        unsure = {one.id for one in self.sink.deliveries if one.value() in self.unsure}
        known = [event for event in self.history.events if getattr(event, "task", "") not in unsure]
        return list(check(History(self.history.namespace, known)))

    async def books(self) -> Balance:
        return await balance(self.store)


@asynccontextmanager
async def scene(url: str, *, lease_s: float = 6.0, fire: bool = True) -> AsyncIterator[Scene]:
    namespace = f"t{uuid.uuid4().hex[:8]}"
    store = await Store.open(url, namespace=namespace, partitions=PARTITIONS, options=QUICK)
    # Longer than any wait of a test: who holds up others by waiting is found out.
    store._sender._retry_for_s = 120.0
    made = Scene(store, lease_s)
    try:
        if fire:
            await made.engine.start()
        yield made
        assert made.engine.crashed is None
    finally:
        await made.engine.stop()
        await store.aclose()


class Traffic:
    """Puts with and without ids and cancels, round after round, until it is stopped."""

    def __init__(
        self, made: Scene, *, level: str = "server", partitions: set[int] | None = None, cancels: bool = True
    ) -> None:
        self._scene = made
        self._level = level
        self._partitions = partitions
        self._random = random.Random(1)
        self.cancels = cancels
        self.rounds = 0
        self.confirmed = 0
        """Tasks put with an answer."""
        self._stopped = False
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._stopped = True
        await self._task

    async def go_on(self, rounds: int) -> None:
        """Wait until this many more rounds were answered."""
        target = self.rounds + rounds
        await until(lambda: self.rounds >= target or self._task.done(), 60)
        if self._task.done():
            await self._task  # it says why
        assert not self._task.done(), "the traffic has stopped"

    async def _run(self) -> None:
        while not self._stopped:
            await self._put([self._named() for _ in range(6)])
            if self._partitions is None:
                await self._put([self._plain() for _ in range(12)])
            if self.cancels:
                await self._put_and_cancel()
            self.rounds += 1
            await asyncio.sleep(0.005)

    def _named(self, after_ms: int = 0) -> Task:
        while True:
            name = f"n{uuid.uuid4().hex[:12]}"
            if self._partitions is None or partition_of(name, PARTITIONS) in self._partitions:
                return Task("log:", name, at=self._due_ms() + after_ms, id=name)

    def _plain(self) -> Task:
        return Task("log:", f"p{uuid.uuid4().hex[:12]}", at=self._due_ms())

    def _due_ms(self) -> int:
        return now_us() // 1000 + self._random.randrange(30, 900)

    async def _put(self, tasks: list[Task]) -> list[Handle]:
        made = self._scene
        try:
            summary = await made.client.put_many(tasks, durability=self._level, handles=True)
        except (Unavailable, NotConfirmed):
            made.unsure |= {str(task.payload) for task in tasks}
            return []
        assert summary.handles is not None
        self.confirmed += len(summary.handles)
        for handle in summary.handles:
            assert handle.outcome == "created", "a put that is repeated inside must not find itself"
            made.handles.append(handle)
            made.history.accepted(handle.id.partition("~")[0], handle.due_ms, now_us())
        return summary.handles

    async def _put_and_cancel(self) -> None:
        made = self._scene
        handles = await self._put([self._named(after_ms=60_000)])
        for handle in handles:
            answer = await made.client.cancel(handle.id)
            made.history.cancelled(handle.id, handle.due_ms, answer, now_us())
            assert answer == "cancelled"


def now_us() -> int:
    """Servers and tests share one machine, and its clock."""
    return time.time_ns() // 1000


async def until(condition: Callable[[], bool], seconds: float = 60, why: Callable[[], str] = str) -> None:
    """The one place here where time passes."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s; {why()}")
        await asyncio.sleep(0.01)
