"""A scheduler that is ticked by hand: time is stopped until a test moves it, and nothing sleeps.

async with Ticker(url, namespace="test") as ticker:
    await ticker.client.put("log:", {"order": 42}, after="30m")
    [delivery] = await ticker.advance(minutes=30)
    assert delivery.value() == {"order": 42}
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..client.client import Client
from ..engine.engine import Engine, EngineOptions
from ..model.clock import ManualClock
from ..model.delivery import DONE, Delivery, Outcome
from ..model.targets.names import HANDED_OFF, SCHEMES
from ..scheduler.publishing import publish
from ..sinks.base import Sink
from ..store.store import Store

if TYPE_CHECKING:
    from ..scheduler.scheduler import Scheduler
    from .manual_worker import ManualWorker

TickedHandler = Callable[[Delivery], Outcome | Awaitable[Outcome | None] | None]
"""Returns the outcome of one delivery; None means Done."""


class RecordingSink:
    """Keeps every delivery in the order of arrival, and asks a handler for its outcome."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.handlers: dict[str, TickedHandler] = {}

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [await self._deliver_one(one) for one in batch]

    async def _deliver_one(self, delivery: Delivery) -> Outcome:
        self.deliveries.append(delivery)
        handler = self.handlers.get(delivery.target.partition(":")[0])
        answer = handler(delivery) if handler is not None else None
        outcome = await answer if inspect.isawaitable(answer) else answer
        return DONE if outcome is None else outcome

    async def aclose(self) -> None:
        """Do nothing: no resource is held."""


class Ticker:
    """A client and an engine that share one clock. `advance` fires tasks as they come due, each at its millisecond."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "test",
        partitions: int | None = None,
        clock: ManualClock | None = None,
        handlers: Mapping[str, TickedHandler] | None = None,
        sinks: Mapping[str, Sink] | None = None,
        workers: bool = False,
        options: EngineOptions | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self._url, self._namespace, self._partitions = url, namespace, partitions
        self._options = options
        self._recorder = RecordingSink()
        self._recorder.handlers.update(handlers or {})
        # With workers, their tasks go to the queues, and a test takes them from there.
        recorded = SCHEMES - HANDED_OFF if workers else SCHEMES
        self._sinks: dict[str, Sink] = {**dict.fromkeys(recorded, self._recorder), **(sinks or {})}
        self._open: tuple[Store, Client, Engine] | None = None
        self._scheduler: Scheduler | None = None
        self._worker: ManualWorker | None = None

    def running(self, scheduler: "Scheduler") -> Self:
        """Run handlers and schedules of this scheduler too, each at its time. Call this before opening the ticker."""
        self._scheduler = scheduler
        for scheme in HANDED_OFF:
            self._sinks.pop(scheme, None)
        return self

    async def __aenter__(self) -> Self:
        store = await Store.open(self._url, namespace=self._namespace, partitions=self._partitions, clock=self.clock)
        self._open = (store, Client.over(store), Engine(store, self._sinks, self._options))
        if self._scheduler is not None:
            await self._serve(self._scheduler)
        return self

    async def _serve(self, scheduler: "Scheduler") -> None:
        from .manual_worker import ManualWorker  # here: most tests need no worker

        scheduler._lend(self.client)
        await publish(self.client.schedules, scheduler.declared(), self.clock.now_ms())
        if len(scheduler.registry):
            self._worker = ManualWorker(self.store, scheduler)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.aclose()
        opened, self._open = self._open, None
        if opened is not None:
            store, _, engine = opened
            try:
                await engine.keeper.release()
            finally:
                await store.aclose()

    @property
    def store(self) -> Store:
        return self._parts()[0]

    @property
    def client(self) -> Client:
        return self._parts()[1]

    @property
    def engine(self) -> Engine:
        return self._parts()[2]

    @property
    def deliveries(self) -> list[Delivery]:
        """Everything delivered so far, every attempt."""
        return self._recorder.deliveries

    def answer(self, scheme: str, handler: TickedHandler) -> None:
        """Set the handler that decides how deliveries to a kind of target end from now on."""
        self._recorder.handlers[scheme] = handler

    async def turn(self) -> list[Delivery]:
        """Fire everything that is due by the stopped clock; return the deliveries."""
        before = len(self.deliveries)
        await turn(self.engine)
        while self._worker is not None and await self._worker.turn():
            await turn(self.engine)
        return self.deliveries[before:]

    async def advance(self, *, ms: int = 0, seconds: float = 0, minutes: float = 0, hours: float = 0) -> list[Delivery]:
        """Move the clock from one due time to the next, firing each, up to this much later."""
        until_ms = self.clock.now_ms() + ms + round((seconds + 60 * minutes + 3600 * hours) * 1000)
        before = len(self.deliveries)
        await self._turn_until_quiet()
        while (due_ms := await self._next_due_ms(until_ms)) is not None:
            self.clock.set(due_ms)
            await self._turn_until_quiet()
            await asyncio.sleep(0)
        self.clock.set(until_ms)
        await self._turn_until_quiet()
        return self.deliveries[before:]

    async def _turn_until_quiet(self) -> None:
        """Repeat turns until nothing is delivered: handlers may put tasks that are due at once."""
        came = len(self.deliveries)
        await self.turn()
        while len(self.deliveries) > came:
            if not (await self.client.list(due_before=self.clock.now_ms() + 1, limit=1)).tasks:
                break
            came = len(self.deliveries)
            await self.turn()

    async def crash(self) -> None:
        """End without telling the server, as a killed process does; its leases remain until they expire."""
        opened, self._open = self._open, None
        if opened is not None:
            opened[2].deliveries.cancel()
            await opened[0].aclose()

    async def _next_due_ms(self, until_ms: int) -> int | None:
        now_ms = self.clock.now_ms()
        if until_ms <= now_ms:
            return None
        page = await self.client.list(due_after=now_ms + 1, due_before=until_ms + 1, limit=1)
        return page.tasks[0].due_ms if page.tasks else None

    def _parts(self) -> tuple[Store, Client, Engine]:
        if self._open is None:
            raise RuntimeError("the ticker is not open; use 'async with Ticker(…) as ticker'")
        return self._open


async def turn(engine: Engine) -> int:
    """Run every role of an engine once at the current time; return the deliveries settled so far."""
    await engine.pauses.step()
    await engine.keeper.step()
    engine.lookahead.reconnected()
    await _all_steps(engine.lookahead.step)
    engine.dispatcher.acks.woken(engine.owned)
    await _all_steps(engine.planner.step)
    while True:
        before = _progress(engine)
        if engine.keeper.is_due or not all(one.holds_lease for one in engine.owned.values()):
            await engine.keeper.step()  # a long turn outlasts leases, and nothing begins without one
        await engine.permits.step()
        await engine.dispatcher.step()
        await engine.dispatcher.drain()
        await _all_steps(engine.lookahead.step)
        await _all_steps(engine.planner.step)
        if _progress(engine) == before and not any(one.has_ready for one in engine.owned.values()):
            break
    await engine.planner.flush()
    while await engine.sweeper.drop_finished():
        pass
    return engine.deliveries.delivered


async def _all_steps(step: Callable[[], Awaitable[float]]) -> None:
    while await step() == 0.0:
        pass


def _progress(engine: Engine) -> tuple[int, ...]:
    """Return counters that change with every turn in which something happened."""
    supplied, decisions = engine.permits.supplied, engine.planner.decisions
    return engine.deliveries.delivered, engine.dispatcher.moved, decisions, supplied, engine.lookahead.held
