"""The end of a node: outcomes are written in one step with their consequences, even if something fails meanwhile."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Final

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.model.delivery import Dead, Delivery, Outcome, Retry
from mainspring.model.errors import Unavailable
from mainspring.model.run import HistoryRules
from mainspring.model.task import Task
from mainspring.store.keys import partition_of
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.store import Store
from mainspring.testing.balance import Balance, balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.ticker import Ticker
from tests.support.fleets import PARTITIONS

Tickers = Callable[..., Awaitable[Ticker]]

OPTIONS: Final = EngineOptions(lease_s=300.0)
"""Long by this machine's clock: no test shall lose a partition because it is slow."""

RETRY: Final = Retry("reset", after_ms=60_000)


def ids_of(partition: int, some: int) -> list[str]:
    """Ids of tasks of one partition."""
    names = (name for n in count() if partition_of(name := f"task-{n}", PARTITIONS) == partition)
    return [next(names) for _ in range(some)]


class Held:
    """A node whose deliveries wait, each for its own word."""

    def __init__(self, ticker: Ticker) -> None:
        self.ticker = ticker
        self.engine = ticker.engine
        self._answers: defaultdict[str, asyncio.Future[Outcome | None]] = defaultdict(asyncio.Future)
        ticker.answer("http", self._wait)

    async def _wait(self, delivery: Delivery) -> Outcome | None:
        return await self._answers[delivery.id]

    async def fire(self, *ids: str) -> None:
        """All of these are due in the same second, and with their targets."""
        for name in ids:
            # A target of its own each: what is handed over together ends together.
            await self.ticker.client.put(f"http://{name}", None, id=name, after="1s")
        await self.engine.keeper.step()
        while await self.engine.lookahead.step() == 0.0:
            pass
        self.ticker.clock.advance(seconds=1)
        await until(lambda: len(self.ticker.deliveries) == len(ids), self.engine.dispatcher.step)

    async def end(self, name: str, outcome: Outcome | None = None) -> None:
        """The target has answered, and the node knows it."""
        left = self.engine.deliveries.in_flight - 1
        self._answers[name].set_result(outcome)
        await until(lambda: self.engine.deliveries.in_flight == left)

    @asynccontextmanager
    async def draining(self) -> AsyncIterator[asyncio.Task[None]]:
        """Within the block it stops; at the end of it, as at the end of the shutdown timeout, no more."""
        drain = asyncio.create_task(self.engine.dispatcher.drain())
        try:
            yield drain
        finally:
            drain.cancel()
            with suppress(asyncio.CancelledError):
                await drain


async def until(condition: Callable[[], bool], meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
    async with asyncio.timeout(60):
        while not condition():
            if meanwhile is not None:
                await meanwhile()
            await asyncio.sleep(0)


async def books_become(store: Store, right: Callable[[Balance], bool]) -> Balance:
    async with asyncio.timeout(20):
        while not right(books := await balance(store)):
            pass
    return books


@pytest.mark.parametrize("outcome", [RETRY, Dead("never")], ids=["retry", "dead"])
async def test_a_failure_during_another_commit_of_a_stop_is_not_done_without_its_retry(
    tickers: Tickers, store: Store, outcome: Retry | Dead
) -> None:
    first, *others, hangs = *ids_of(0, 1), *ids_of(1, 4), *ids_of(2, 1)
    node = Held(await tickers(options=OPTIONS))
    await node.fire(first, *others, hangs)
    with bad_road(node.engine.store) as network:
        network.next("late reply", only=calls("commit"))
        async with node.draining():
            await node.end(first, outcome)
            await until(lambda: network.late == 1)
            for name in others:
                await node.end(name, outcome)
            network.deliver_late()
            # Before the last one has ended: it may outlast the shutdown timeout.
            books = await books_become(store, lambda books: books.pending + books.dead == 5)
    assert (books.fired, books.done) == (1, 0)
    await node.ticker.crash()
    node.ticker.clock.advance(seconds=301)
    second = await tickers(options=OPTIONS)
    again = {one.id: one.attempt for one in await second.turn()}
    retried = {} if isinstance(outcome, Dead) else dict.fromkeys([first, *others], 2)
    assert again == {hangs: 1} | retried


async def test_a_failure_during_a_hand_off_of_a_stop_is_not_done_without_its_retry(
    tickers: Tickers, store: Store
) -> None:
    fails, hangs, queued = ids_of(0, 3)
    node = Held(await tickers(options=OPTIONS, workers=True))
    await node.fire(fails, hangs)
    await node.ticker.client.put("queue:work/run", None, id=queued, after="100ms")
    while await node.engine.lookahead.step() == 0.0:
        pass
    node.ticker.clock.advance(seconds=1)
    with bad_road(node.engine.store) as network:
        network.next("never sent", "late reply", only=calls("commit"))
        with pytest.raises(Unavailable):
            await node.engine.dispatcher.step()
        async with node.draining():
            await until(lambda: network.late == 1)
            await node.end(fails, RETRY)
            network.deliver_late()
            books = await books_become(store, lambda books: books.pending == 1)
    assert (books.fired, books.queued, books.done) == (1, 1, 0)


@pytest.mark.parametrize("fault", ["never sent", "lose reply"])
@pytest.mark.parametrize(("script", "outcome"), [("commit", RETRY), ("commit", None), ("tick", None)])
async def test_a_drain_raises_what_it_could_not_write_and_the_next_one_writes_it(
    tickers: Tickers, store: Store, script: str, outcome: Retry | None, fault: Fault
) -> None:
    [name] = ids_of(0, 1)
    # A delivery of which the history keeps nothing needs no more than its done bit.
    history = HistoryRules({"http:": "off" if script == "tick" else "all"})
    node = Held(await tickers(options=replace(OPTIONS, history=history)))
    await node.fire(name)
    await node.end(name, outcome)
    with bad_road(node.engine.store) as network:
        network.next(fault, only=calls(script))
        with pytest.raises(Unavailable, match="a test broke the network path"):
            await node.engine.dispatcher.drain()
    await node.engine.dispatcher.drain()
    books = await balance(store)
    assert (books.fired, books.pending, books.done) == ((0, 1, 0) if outcome else (0, 0, 1))


@pytest.mark.parametrize("fault", ["never sent", "lose reply"])
async def test_a_drain_raises_that_a_hand_off_failed_and_the_next_one_repeats_it(
    tickers: Tickers, store: Store, fault: Fault
) -> None:
    ticker = await tickers(options=OPTIONS, workers=True)
    await ticker.client.put("queue:work/run", None, after="1s")
    await ticker.turn()
    ticker.clock.advance(seconds=1)
    with bad_road(ticker.engine.store) as network:
        network.next("lose reply", only=calls("tick"))  # so that the drain finds it begun, and not handed off
        network.next(fault, only=calls("commit"))
        with pytest.raises(Unavailable):
            await ticker.engine.dispatcher.step()
        with pytest.raises(Unavailable, match="a test broke the network path"):
            await ticker.engine.dispatcher.drain()
    await ticker.engine.dispatcher.drain()
    assert (await balance(store)).queued == 1


async def test_a_stop_that_a_delivery_outlasts_writes_what_ended_before_and_says_that_it_is_not_clean(
    tickers: Tickers, store: Store
) -> None:
    """Without loops, as a test steps an engine: the stop is the same."""
    first, *others, hangs = *ids_of(0, 1), *ids_of(1, 4), *ids_of(2, 1)
    node = Held(await tickers(options=EngineOptions(lease_s=300.0, shutdown_timeout_s=1.0)))
    await node.fire(first, *others, hangs)
    with bad_road(node.engine.store) as network:
        network.next("late reply", only=calls("commit"))
        stop = asyncio.create_task(node.engine.stop())
        await node.end(first, RETRY)
        await until(lambda: network.late == 1)
        for name in others:
            await node.end(name, RETRY)
        network.deliver_late()
        assert not await stop
    books = await balance(store)
    assert (books.pending, books.fired, books.done) == (5, 1, 0)


FAILING: Final = 20_000
MOST_IN_A_CALL: Final = 500
MOST_BYTES: Final = 4 << 20
MANY_LARGE: Final = 150
LARGE: Final = 60_000


@pytest.mark.parametrize("stops", [False, True], ids=["running", "stopping"])
async def test_a_burst_of_failures_is_written_in_calls_of_bounded_number_and_size_and_nothing_is_lost(
    tickers: Tickers, store: Store, stops: bool
) -> None:
    gate = asyncio.Event()

    async def fail(delivery: Delivery) -> Outcome:
        await gate.wait()
        return RETRY if len(delivery.id) % 2 else Dead("never")

    ticker = await tickers(options=OPTIONS, handlers={"http": fail})
    large = [Task("http://down", bytes(LARGE), id=name, after="1s") for name in ids_of(0, MANY_LARGE)]
    small = [Task("http://down", bytes(500), id=f"small-{n}", after="1s") for n in range(FAILING - MANY_LARGE)]
    await ticker.client.put_many([*large, *small])
    engine = ticker.engine
    await engine.keeper.step()
    while await engine.lookahead.step() == 0.0:
        pass
    ticker.clock.advance(seconds=1)
    await until(lambda: engine.deliveries.in_flight == FAILING, engine.dispatcher.step)
    is_commit = calls("commit")
    with bad_road(engine.store) as network:
        gate.set()
        await until(lambda: not engine.deliveries.in_flight)
        assert sum(one.unwritten for one in engine.owned.values()) == FAILING
        if stops:
            assert await engine.stop()
        else:
            await until(lambda: not any(one.has_outcomes for one in engine.owned.values()), engine.dispatcher.step)
        commits = [command for _, commands in network.trips if is_commit(commands) for command in commands]
    sizes = [(_outcomes_of(command), _bytes_of(command)) for command in commits]
    assert sum(number for number, _ in sizes) == FAILING
    assert max(number for number, _ in sizes) <= MOST_IN_A_CALL
    assert max(size for _, size in sizes) < MOST_BYTES + 2 * LARGE + 300 * MOST_IN_A_CALL, "records, addresses, keys"
    books = await balance(store)
    assert (books.pending + books.dead, books.fired, books.done) == (FAILING, 0, 0)
    assert min(books.pending, books.dead) > 0


def _outcomes_of(commit: RedisCommand) -> int:
    """The numbers of retries and of deaths that a call of `commit` says it carries."""
    [_, _, keys, *rest] = commit
    arguments = rest[int(keys) :]
    return int(arguments[6]) + int(arguments[7])


def _bytes_of(command: RedisCommand) -> int:
    return sum(len(part) for part in command if isinstance(part, bytes | str))
