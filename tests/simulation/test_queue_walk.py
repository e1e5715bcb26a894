"""Queues under random accidents: at every step the books are even, and in the end every task has ended, once."""

import random
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Dead, Done, Retry
from mainspring.model.errors import Conflict, StoreError
from mainspring.model.job import End, Job, JobCancelled
from mainspring.store import job_queue
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.servers import Server, standalone
from mainspring.testing.ticker import Ticker

PARTITIONS = 2
STEPS = 80
LEASE_S = 30
SEEDS = range(30)
QUEUES = ("mail", "work")
FAULTS: tuple[Fault, ...] = ("lose reply", "never sent", "hold back")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with standalone() as started:
        yield started


class Walk:
    """One namespace, its owner, some workers, and a dice."""

    def __init__(self, url: str, seed: int, store: Store, stack: AsyncExitStack) -> None:
        self.dice = random.Random(seed)
        self.url, self.store, self.stack = url, store, stack
        self.clock = store.clock
        self.client = Client.over(store)
        self.jobs: list[Job] = []
        """All that was ever taken: workers that died long ago may still speak."""
        self.ids: list[str] = []
        self.ticker: Ticker | None = None
        self.said: list[str] = []

    async def owner(self) -> Ticker:
        if self.ticker is None:
            assert isinstance(self.clock, ManualClock)
            made = Ticker(
                self.url,
                namespace=self.store.keys.namespace,
                partitions=PARTITIONS,
                clock=self.clock,
                workers=True,
                options=EngineOptions(lease_s=LEASE_S),
            )
            self.ticker = await self.stack.enter_async_context(made)
        return self.ticker

    # -- what may happen -----------------------------------------------------------------------------------

    async def put(self) -> None:
        after = f"{self.dice.choice((0, 0, 1, 3))}s"
        target = f"queue:{self.dice.choice(QUEUES)}/x"
        lane = self.dice.choice((None, None, "a", "b"))
        # Few ids, so that they are used again; none of them in a lane, which would be another partition.
        name = f"n{self.dice.randrange(4)}" if lane is None and self.dice.random() < 0.5 else None
        try:
            handle = await self.client.put(
                target, after=after, lane=lane, id=name, on_conflict=self.dice.choice(("keep", "replace"))
            )
        except Conflict:
            return  # too late to replace it
        self.ids.append(handle.id)

    async def turn(self) -> None:
        await (await self.owner()).turn()

    async def later(self) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds=self.dice.choice((1, 2, 5)))
        await self.turn()

    async def take(self) -> None:
        asks = {p: dict.fromkeys(QUEUES, self.dice.choice((1, 3))) for p in range(PARTITIONS)}
        self.jobs += await job_queue.take(self.store, self._worker(), asks)

    async def reclaim(self) -> None:
        asks = {p: dict.fromkeys(QUEUES, 2) for p in range(PARTITIONS)}
        self.jobs += await job_queue.reclaim(self.store, self._worker(), asks, lease_ms=0)

    async def finish(self) -> None:
        some = self.dice.sample(self.jobs, min(len(self.jobs), self.dice.choice((1, 2, 5))))
        answers = await job_queue.finish(self.store, [End(job, self._outcome(), b"x", 1_000) for job in some])
        over = [job.claim for job, answer in zip(some, answers, strict=True) if answer == "ok"]
        if self.dice.random() < 0.7:
            self.jobs = [job for job in self.jobs if job.claim not in over]

    async def give_back(self) -> None:
        await job_queue.give_back(self.store, self.dice.sample(self.jobs, min(len(self.jobs), 2)))

    async def beat(self) -> None:
        await job_queue.beat(self.store, self.jobs[-5:])

    async def cancel(self) -> None:
        if self.ids:
            await self.client.cancel(self.dice.choice(self.ids))

    async def crash(self) -> None:
        """The owner dies; the next one comes when its lease is over."""
        if self.ticker is not None:
            await self.ticker.crash()
            self.ticker = None
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds=LEASE_S + 1)

    async def lose(self) -> None:
        """The owner's next calls, or the workers', do not get through, or their answers do not."""
        script = self.dice.choice(("commit", "tick", "queue_take", "queue_finish", "queue_reclaim"))
        of_owner = not script.startswith("queue_")
        store = (await self.owner()).store if of_owner else self.store
        with bad_road(store) as road:
            road.next(self.dice.choice(FAULTS), only=calls(script))
            for _ in range(2):
                await self._tried(self.later if of_owner else self.dice.choice((self.take, self.finish, self.reclaim)))
            await road.deliver_held()

    async def _tried(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except StoreError:
            return

    def _worker(self) -> str:
        return f"w{self.dice.randrange(3)}"

    def _outcome(self) -> Done | Retry | Dead | JobCancelled:
        # Times that a task of this walk can see: the end must not wait for a retry of hours.
        retry = Retry("no", after_ms=self.dice.choice((0, 500, 2_000)))
        return self.dice.choice((DONE, DONE, retry, Dead("never"), JobCancelled()))

    async def step(self) -> None:
        steps = (
            (self.put, 6), (self.turn, 2), (self.later, 4), (self.take, 5), (self.finish, 5), (self.reclaim, 2),
            (self.give_back, 1), (self.beat, 1), (self.cancel, 2), (self.crash, 1), (self.lose, 3),
        )  # fmt: skip
        [chosen] = self.dice.choices([step for step, _ in steps], [weight for _, weight in steps])
        self.said.append(chosen.__name__)
        await self._tried(chosen)

    async def end(self) -> None:
        """All is well again: workers run everything there is."""
        for _ in range(200):
            await self.later()
            self.jobs = []
            await self.take()
            await self.reclaim()
            if self.jobs:
                await job_queue.finish(self.store, [End(job, DONE) for job in self.jobs])
            books = await balance(self.store)
            if books.pending == books.fired == books.queued == 0:
                return
        raise AssertionError(f"not over: {await balance(self.store)}")


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_walk_through_accidents_ends_with_balanced_counters(server: Server, seed: int) -> None:
    async with AsyncExitStack() as stack:
        namespace = f"t{uuid.uuid4().hex[:10]}"
        store = await Store.open(server.url, namespace=namespace, partitions=PARTITIONS, clock=ManualClock())
        stack.push_async_callback(store.aclose)
        walk = Walk(server.url, seed, store, stack)
        for _ in range(STEPS):
            await walk.step()
            try:
                await balance(store)
            except AssertionError as error:
                raise AssertionError(f"after {' '.join(walk.said)}: {error}") from None
        await walk.end()
        books = await balance(store)
        assert books.accepted == books.done + books.dead + books.cancelled + books.replaced
        report = await verify(store)
        assert report.left == 0, report.as_dict()
