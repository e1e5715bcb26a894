"""A worker: takes jobs from queues, runs them, tells the server how they ended."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ..engine.failures import Failures
from ..engine.loop import Loop
from ..model.errors import InvalidInput, StoreError
from ..model.failure import ErrorHandler
from ..model.lane_policy import LanePolicies, LanePolicy
from ..model.policies import Policies
from ..model.rate import Limit
from ..model.retry import RetryPolicy
from ..store.links import Subscription
from ..store.store import Store
from .ends import Ends
from .hands import Hands
from .heart import Heart
from .heir import Heir
from .memory import Memory
from .registry import Registry
from .run import Run
from .shares import Shares
from .slots import Slots
from .taker import Taker

log = logging.getLogger("mainspring.worker")

LAST_WORD_S: Final = 1.0
"""For the last call to a server that may be away."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    name: str
    queues: Mapping[str, int]
    """Weights by name; with `strict`, their order alone counts."""
    strict: bool = False
    concurrency: int = 64
    lease_s: float = 5.0
    shutdown_timeout_s: float = 25.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    error_handler: ErrorHandler | None = None
    slots: Mapping[str, Limit] = field(default_factory=dict)
    """How many jobs of some queues may run at one time, on all workers together."""
    queue_retries: Mapping[str, RetryPolicy] = field(default_factory=dict)
    """By queue; for handlers without a policy of their own."""
    lane_policy: LanePolicy = field(default_factory=LanePolicy)
    """The nodes', who carry it out: a lane that they park waits for its head, which is not over then."""
    queue_lanes: Mapping[str, LanePolicy] = field(default_factory=dict)
    """The nodes' as well, by queue; they go before `lane_policy`."""

    def __post_init__(self) -> None:
        if not self.queues:
            raise InvalidInput("a worker needs queues to serve; name at least one")
        if self.concurrency < 1:
            raise InvalidInput(f"concurrency is {self.concurrency}; it must be at least 1")


class Worker:
    """Its roles over one set of jobs in hand. Made and used within a running event loop."""

    def __init__(self, store: Store, registry: Registry, options: WorkerOptions) -> None:
        self.options = options
        self._store = store
        self.failures = Failures(options.error_handler)
        self.ends = Ends(store, options.name, _policies(options), self.failures, self._something_ended, _lanes(options))
        self.hands = Hands(
            registry,
            store.keys.namespace,
            store.clock,
            concurrency=options.concurrency,
            lease_s=options.lease_s,
            memory=Memory(store),
            ended=self._ended,
            refused=self.ends.refuse,
            returned=self.ends.put_back,
            freed=self._freed,
        )
        shares = Shares(options.queues, strict=options.strict)
        self.slots = slots = Slots(store, options.name, options.slots, options.lease_s, lambda: self.hands.queues)
        name, died = options.name, self.ends.died
        self.taker = Taker(store, name, shares, self.hands, lambda: len(self.ends.unsent), slots, died)
        self.heart = Heart(store, self.hands, options.lease_s)
        self.heir = Heir(store, name, shares.queues, self.hands, lambda: self.taker.room, slots, died, options.lease_s)
        self._take = Loop("worker: take", self.taker.step, max_backoff_s=0.5)
        self._end = Loop("worker: end", self.ends.step, max_backoff_s=0.5)
        self._beat = Loop("worker: beat", self.heart.beat, max_backoff_s=options.lease_s / 4)
        self._reclaim = Loop("worker: reclaim", self.heir.step)
        self._watch = Loop("worker: watch", self.hands.watch)
        self._keep = Loop("worker: slots", slots.keep, max_backoff_s=options.lease_s / 4)
        self._loops = (self._take, self._end, self._beat, self._reclaim, self._watch, self._keep)
        self._subscription: Subscription | None = None
        self._idle = asyncio.Event()
        self.stopping = False
        kinds = {work.target.partition(":")[0] for work in registry}
        self.ends.meters.expect(frozenset(kinds))

    # -- what others may ask -----------------------------------------------------------------------------

    @property
    def crashed(self) -> BaseException | None:
        return next((error for loop in self._loops if (error := loop.crashed) is not None), None)

    @property
    def healthy(self) -> bool:
        return self.crashed is None and not any(loop.failures for loop in self._loops)

    # -- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        channels = {keys.work: keys.number for keys in self._store.keys.partitions}
        self._subscription = await self._store.links.all()[0].subscribe(
            list(channels),
            on_message=lambda channel: self._called(channels[channel]),
            on_connect=self._reconnected,
        )
        for loop in self._loops:
            loop.start()

    async def stop(self) -> bool:
        """Finish what runs, give back what does not. True when nothing had to be broken off."""
        self.stopping = True
        # Not in the middle of a call: what the server has just given would wait here for a lease.
        await asyncio.gather(self._take.finish(LAST_WORD_S), self._reclaim.finish(LAST_WORD_S))
        self.ends.put_back(self.hands.take_back())
        await self._hand_back()
        clean = await self._finished_in_time()
        if not clean:
            log.warning("%d runs are broken off: shutdown_timeout is over; they run again", len(self.hands.runs))
        await self.hands.close()
        for loop in (self._watch, self._beat, self._keep):
            await loop.stop()
        await self._end.finish(LAST_WORD_S)  # told twice, an end would look like another worker's
        await self._last_word()
        await self._release()
        await self.failures.aclose()
        if self._subscription is not None:
            await self._subscription.close()
        return clean

    async def _finished_in_time(self) -> bool:
        try:
            async with asyncio.timeout(self.options.shutdown_timeout_s):
                while self.hands.runs:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _last_word(self) -> None:
        """Tell the server what it has not heard yet; what it does not hear runs again, later."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                while self.ends.unsent:
                    await self.ends.step()
        except (StoreError, TimeoutError) as error:
            log.warning("the ends of %d jobs could not be told (%s); they run again", len(self.ends.unsent), error)
        await self._hand_back()

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self.slots.release()
        except (StoreError, TimeoutError) as error:
            log.warning("slots could not be given back (%s); others get them when the lease is over", error)

    async def _hand_back(self) -> None:
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self.ends.give_back()
        except (StoreError, TimeoutError) as error:
            log.warning("jobs could not be given back (%s); others get them when the lease is over", error)

    # -- signals between the roles -----------------------------------------------------------------------

    def _called(self, partition: int) -> None:
        self.taker.calls.call(partition)
        self._take.wake()
        if self.hands.runs:
            self.heart.called()
            self._beat.wake()

    def _reconnected(self) -> None:
        self.taker.calls.call_all()
        self._take.wake()

    def _something_ended(self) -> None:
        self._end.wake()

    def _ended(self, run: Run) -> None:
        self.ends.add(run)
        self._freed(run)
        if not self.hands.runs:
            self._idle.set()

    def _freed(self, run: Run) -> None:
        """There may be a place, and a slot of its queue."""
        if self.taker.hungry and self.taker.worthwhile:
            self._take.wake()
        if run.job.queue in self.slots.kept:
            self._reclaim.wake()


def _policies(options: WorkerOptions) -> Policies:
    return Policies(options.retry, by_queue=options.queue_retries)


def _lanes(options: WorkerOptions) -> LanePolicies:
    return LanePolicies(options.lane_policy, by_queue=options.queue_lanes)


@contextlib.asynccontextmanager
async def working(store: Store, registry: Registry, options: WorkerOptions) -> AsyncIterator[Worker]:
    """A worker that runs within the block."""
    worker = Worker(store, registry, options)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
