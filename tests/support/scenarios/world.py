"""The ground of a scenario: one server, one clock, some nodes, a caller, and the history of it all."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self

from mainspring.client.client import Client
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Delivery, Outcome
from mainspring.model.errors import StoreError
from mainspring.model.retry import RetryPolicy
from mainspring.store.keys import PartitionKeys
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.scripts import text_of
from mainspring.store.store import Store
from mainspring.testing.faults import Match
from mainspring.testing.history import History, Violation, check
from mainspring.testing.ticker import Ticker
from tests.support.recording import Moments, RecordingClient, books, record, runs_amiss

LEASE_S: Final = 60
"""Long by the clock of the machine, which owners go by: no test shall lose a partition because it is slow."""

START_MS: Final = 1_800_000_000_000
RETRY_MS: Final = 5_000
RETRY: Final = RetryPolicy(max_attempts=3, base_ms=RETRY_MS, factor=1.0, jitter="none")


_SCRIPTS: Final = ("tick", "commit", "drop", "put_ids", "replace", "cancel", "acquire", "renew", "release")
_SCRIPTS_OF_SCHEDULES: Final = ("schedule_add", "schedule_put", "schedule_check", "schedule_note")
_SCRIPTS_OF_QUEUES: Final = ("queue_take", "queue_reclaim", "queue_finish")


Work = Callable[[], Awaitable[None]]


class World:
    """One partition as a rule, so that everybody meets. Times are in milliseconds after the start."""

    def __init__(self, url: str, namespace: str, partitions: int = 1) -> None:
        self.url, self.namespace, self.partitions = url, namespace, partitions
        self.clock = ManualClock(START_MS)
        self.history = History(namespace)
        self._moments = Moments(self.clock)
        self._stack = AsyncExitStack()
        self._caller: RecordingClient | None = None

    async def __aenter__(self) -> Self:
        self._caller = RecordingClient(Client.over(await self._open(self.clock)), self.history, self._moments)
        # A call that the server answers with "unknown script" does nothing: losing that reply would be no accident.
        names = (*_SCRIPTS, *_SCRIPTS_OF_QUEUES, *_SCRIPTS_OF_SCHEDULES)
        loads: list[RedisCommand] = [("SCRIPT", "LOAD", text_of(name, True)) for name in names]
        await self.store.run_one(self.keys.slot, loads)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _open(self, clock: ManualClock) -> Store:
        store = await Store.open(self.url, namespace=self.namespace, partitions=self.partitions, clock=clock)
        self._stack.push_async_callback(store.aclose)
        return store

    # -- who is there ----------------------------------------------------------------------------------------

    @property
    def caller(self) -> RecordingClient:
        assert self._caller is not None, "use 'async with World(…)'"
        return self._caller

    @property
    def store(self) -> Store:
        return self.caller.client.store

    @property
    def keys(self) -> PartitionKeys:
        return self.store.keys.partitions[0]

    async def node(self, name: str, *, workers: bool = False) -> "NodeByHand":
        """With workers, tasks for queues go there and not to the target that a scenario answers for."""
        options = EngineOptions(node=name, lease_s=LEASE_S, retry=RETRY)
        ticker = Ticker(
            self.url,
            namespace=self.namespace,
            partitions=self.partitions,
            clock=self.clock,
            options=options,
            workers=workers,
        )
        await self._stack.enter_async_context(ticker)
        record(ticker.engine, self.history.events.append, node=name, moments=self._moments)
        return NodeByHand(ticker)

    async def slow_client(self, behind_ms: int) -> Client:
        """One whose clock is behind: it puts into slices that are long past."""
        return Client.over(await self._open(ManualClock(self.clock.now_ms() - behind_ms)))

    # -- time ----------------------------------------------------------------------------------------------

    def at(self, after_ms: int) -> int:
        return START_MS + after_ms

    def go_to(self, after_ms: int) -> None:
        self.clock.set(START_MS + after_ms)

    def now_us(self) -> int:
        return self._moments.now_us()

    def failed(self, what: str, *, node: str | None = None, since_us: int | None = None, loses: bool = False) -> None:
        """Something went wrong, just now or since a moment."""
        now_us = self.now_us()
        self.history.fault(now_us if since_us is None else since_us, now_us, what, node=node, loses=loses)

    # -- the server by hand -----------------------------------------------------------------------------------

    async def raw(self, *command: Any) -> Any:
        [reply] = await self.store.run_one(self.keys.slot, [command])
        return reply

    async def _names(self) -> list[bytes]:
        return [key for key in await self.raw("KEYS", "*") if self.keys.tag.encode() in key]

    async def keep(self) -> dict[bytes, bytes]:
        """The partition as it is now, as a replica may have it."""
        return {key: await self.raw("DUMP", key) for key in await self._names()}

    async def fall_back(self, kept: dict[bytes, bytes]) -> None:
        """A server that was left behind takes over: what came later is gone."""
        for key in await self._names():
            await self.raw("DEL", key)
        for key, value in kept.items():
            await self.raw("RESTORE", key, 0, value)

    # -- the end ---------------------------------------------------------------------------------------------

    def healed(self) -> None:
        """From here on everything that is due has to go out within two leases."""
        self.history.healed(self.now_us(), 2 * LEASE_S * 1_000_000)

    async def settle(self, node: "NodeByHand") -> None:
        """No more faults; this node has time to finish everything."""
        self.healed()
        for _ in range(4):
            self.clock.advance(seconds=LEASE_S + 1)
            await node.turn()

    async def findings(self) -> list[Violation]:
        await self.caller.look_back()
        return check(self.history) + await books(self.store) + await runs_amiss(self.store, self.history)


class NodeByHand:
    """A node whose roles take their steps on request."""

    def __init__(self, ticker: Ticker) -> None:
        self.ticker = ticker
        self.engine = ticker.engine
        self.store = ticker.store

    def answers(self, *outcomes: Outcome | None) -> None:
        """Answers of the target to the next deliveries, in order; afterwards, and for None, "done"."""
        left = list(outcomes)
        self.ticker.answer("log", lambda _: left.pop(0) if left else None)

    def hold(self, then: Outcome | None = None) -> asyncio.Event:
        """The target keeps the next deliveries waiting until the event is set, and then answers."""
        gate = asyncio.Event()

        async def wait(_: Delivery) -> Outcome | None:
            await gate.wait()
            return then

        self.ticker.answer("log", wait)
        return gate

    async def read(self) -> None:
        """Get the partition if it can be had, and read what is near."""
        await self.engine.keeper.step()
        self.engine.lookahead.reconnected()
        while await self.engine.lookahead.step() == 0.0:
            pass
        while await self.engine.planner.step() == 0.0:
            pass

    async def fire(self) -> None:
        """One step of the dispatcher with what it has in memory; deliveries that are not held end."""
        with suppress(StoreError):
            await self.engine.dispatcher.step()
        await self.breathe()

    async def breathe(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def commit(self) -> None:
        """Tell the server what is finished."""
        with suppress(StoreError):
            await self.engine.dispatcher.flush()
        await self.breathe()

    async def work(self) -> None:
        """Read, fire and commit what is due; nothing is dropped yet."""
        await self.read()
        await self.fire()
        await self.commit()

    async def sweep(self) -> None:
        with suppress(StoreError):
            await self.engine.sweeper.drop_finished()

    async def turn(self) -> None:
        await self.ticker.turn()

    async def until(self, world: World, *moments_ms: int) -> None:
        """Everything that a node does, at each of these moments."""
        for moment_ms in moments_ms:
            world.go_to(moment_ms)
            await self.turn()

    def oversleep(self, seconds: float) -> None:
        """So much time passes on this machine's own clock, by which it knows its lease."""
        for partition in self.engine.owned.values():
            partition.lease_until -= seconds

    async def crash(self) -> None:
        await self.ticker.crash()

    async def stop(self) -> None:
        """A clean end: hand the partitions back."""
        await self.engine.keeper.release()

    def failing(self, gate: asyncio.Event) -> Work:
        """Lets deliveries end that wait for this gate; the node knows of it when this is over."""

        async def open_gate() -> None:
            gate.set()
            await self.breathe()

        return open_gate


@contextmanager
def on_the_way(store: Store, match: Match, *, before: Work | None = None, after: Work | None = None) -> Iterator[None]:
    """Something happens just before the next such call reaches the server, or before its reply comes back."""
    [primary] = store.servers.all()
    own, send, waiting = vars(primary), primary.pipeline, [True]
    former = {name: own[name] for name in ("pipeline",) if name in own}

    async def over(commands: Sequence[RedisCommand], *, timeout_s: float | None = None) -> list[Any]:
        if not waiting or not match(commands):
            return await send(commands, timeout_s=timeout_s)
        waiting.clear()
        if before is not None:
            await before()
        replies = await send(commands, timeout_s=timeout_s)
        if after is not None:
            await after()
        return replies

    own["pipeline"] = over
    try:
        yield
    finally:
        del own["pipeline"]
        own.update(former)
