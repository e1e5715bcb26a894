"""The engine of one node: its roles, started and stopped together, or stepped by hand."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from ..model.delivery import ErrorHandler
from ..model.errors import StoreError
from ..model.lane import LanePolicies, LanePolicy
from ..model.retry import Policies, RetryPolicy
from ..model.run import HistoryRules
from ..roles import Failures, Loops
from ..sinks.base import Sink
from ..store.access import AUDIT_KEPT
from ..store.redis.servers import Subscription
from ..store.store import Store
from ..store.tasks.dead_letters import DeadLetterLimits
from .deliveries import Deliveries
from .dispatcher import Dispatcher
from .flow import Flow, FlowOptions, PauseWatch, Permits
from .keeper import Keeper
from .lookahead import LookAhead, Reach
from .outcomes import Outcomes
from .partition import Partition
from .planner import Planner
from .sweeper import Sweeper

log = logging.getLogger("mainspring.engine")

DRAIN_PAUSES_S: Final = (0.05, 0.2)
"""Seconds between attempts to finish at a stop: shortest and longest."""


def _without_cluster() -> None:
    """Do nothing: an engine outside a cluster owns every partition it can get."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    node: str = "node"
    lease_s: float = 5.0
    reach: Reach = field(default_factory=Reach)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    shutdown_timeout_s: float = 25.0
    concurrency: int = 100_000
    """Most tasks in flight."""
    target_retries: Mapping[str, RetryPolicy] = field(default_factory=dict)
    """Policies by target as tasks name it; they precede `retry`, and a task's own policy precedes both."""
    lane_policy: LanePolicy = field(default_factory=LanePolicy)
    """What happens to a lane whose head fails."""
    target_lanes: Mapping[str, LanePolicy] = field(default_factory=dict)
    """Policies by target as tasks name it; they precede `lane_policy`."""
    queue_lanes: Mapping[str, LanePolicy] = field(default_factory=dict)
    """Policies by queue, for tasks that workers run; they precede `lane_policy` too."""
    error_handler: ErrorHandler | None = None
    """Receives every failure; None logs them."""
    log_redact: bool = False
    flow: FlowOptions = field(default_factory=FlowOptions)
    """Circuit breakers, limits, and the catch-up rate."""
    command_queues: Mapping[str, str] = field(default_factory=dict)
    """Commands whose tasks go to a queue other than `commands`."""
    dead_letters: DeadLetterLimits = DeadLetterLimits()  # noqa: RUF009  # frozen
    """When the oldest dead letters are dropped; never by default."""
    history: HistoryRules = HistoryRules()  # noqa: RUF009  # frozen
    """Which runs the history keeps."""
    audit_entries: int = AUDIT_KEPT
    """Changes kept in the audit trail, to which a node adds the targets that it pauses."""


class Engine:
    """Keeper, look-ahead, dispatcher and sweeper over one set of owned partitions."""

    def __init__(self, store: Store, sinks: Mapping[str, Sink], options: EngineOptions | None = None) -> None:
        self.options = options = options or EngineOptions()
        # Half a lease: a hanging server must not cost the partitions on other servers.
        self.store = store = store.urgent(timeout_s=max(1.0, options.lease_s / 2))
        self.loops = Loops(options.lease_s)
        self.owned: dict[int, Partition] = {}
        self.ownership_changed: Callable[[], None] = _without_cluster
        """Called when partitions were acquired, lost, or are waited for; set by the cluster's role."""
        self.flow = flow = Flow(
            options.flow,
            store.clock,
            self.loops,
            self.owned,
            concurrency=options.concurrency,
            sinks=sinks,
            commands=options.command_queues,
        )
        self.pauses = PauseWatch(store, flow, self.loops, options.node, options.audit_entries)
        self.keeper = Keeper(
            store,
            self.owned,
            node=options.node,
            lease_s=options.lease_s,
            changed=self._ownership_changed,
            flow=flow,
        )
        self.lookahead = LookAhead(store, self.owned, options.reach, self.keeper, flow, self.loops)
        self.planner = Planner(store, self.owned, self.loops)
        self.failures = Failures(options.error_handler, redacted=options.log_redact)
        lanes = LanePolicies(options.lane_policy, options.target_lanes, options.queue_lanes, options.command_queues)
        outcomes = Outcomes(
            Policies(options.retry, options.target_retries),
            store.clock,
            self.failures,
            lanes,
            options.history,
            options.node,
        )
        self.deliveries = Deliveries(
            self.owned,
            sinks,
            outcomes,
            store.clock,
            self.loops,
            self.keeper,
            flow,
            self.pauses,
        )
        self.permits = Permits(store, flow, node=options.node, lease_s=options.lease_s)
        self.dispatcher = Dispatcher(store, self.owned, self.deliveries, flow, self.keeper, self.lookahead, self.loops)
        self.sweeper = Sweeper(
            store,
            self.owned,
            dead_letter_limits=options.dead_letters,
        )
        self._subscription: Subscription | None = None

    # -- running by itself -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Acquire the partitions and run until stop."""
        await self.pauses.step()  # first: a paused task must not go out because the pauses were not read yet
        await self.keeper.step()
        channels = {keys.wake: keys.number for keys in self.store.keys.partitions}
        self._subscription = await self.store.servers.all()[0].subscribe(
            list(channels),
            on_message=lambda channel, _: self._woken(channels[channel]),
            on_connect=self._reconnected,
        )
        self.loops.keep.start(self.keeper.step)
        self.loops.read.start(self.lookahead.step)
        self.loops.fire.start(self.dispatcher.step)
        self.loops.plan.start(self.planner.step)
        self.loops.sweep.start(self.sweeper.step)
        self.loops.pause.start(self.pauses.step)
        self.loops.permit.start(self.permits.step)

    async def stop(self) -> bool:
        """Finish tasks in flight and hand the partitions back. Return True if no delivery was given up."""
        for loop in self.loops:
            if loop is not self.loops.keep:
                await loop.stop()
        clean = True
        self.keeper.close()
        self.loops.keep.wake()
        try:
            async with asyncio.timeout(self.options.shutdown_timeout_s):
                await self._drain()
                await self.planner.flush()
                await self.pauses.flush()
        except (TimeoutError, StoreError) as error:
            clean = False
            why = error if isinstance(error, StoreError) else "shutdown_timeout is over"
            log.warning("stopping with %d tasks in flight (%s); they go out again", self.deliveries.in_flight, why)
            self.deliveries.cancel()
        await self.loops.keep.stop()
        try:
            await self.keeper.release()
        except StoreError as error:
            log.warning("partitions could not be handed back (%s); they are free when their leases expire", error)
        if self._subscription is not None:
            await self._subscription.close()
        await self.failures.aclose()
        return clean

    async def _drain(self) -> None:
        """Retry after a lost reply instead of giving up deliveries; do not wait for a server that stays unavailable."""
        for pause_s in DRAIN_PAUSES_S:
            try:
                return await self.dispatcher.drain()
            except StoreError as error:
                log.info("stopping continues after %s", error)
                await asyncio.sleep(pause_s)
        return await self.dispatcher.drain()

    @property
    def crashed(self) -> BaseException | None:
        return next((error for loop in self.loops if (error := loop.crashed) is not None), None)

    @property
    def healthy(self) -> bool:
        return self.crashed is None and not any(loop.failures for loop in self.loops)

    def _woken(self, partition: int) -> None:
        self.lookahead.woken(partition)
        self.loops.read.wake()
        self._acks_may_be_there([partition])

    def _reconnected(self) -> None:
        self.lookahead.reconnected()
        self.loops.read.wake()
        self._acks_may_be_there(list(self.owned))

    def _acks_may_be_there(self, partitions: list[int]) -> None:
        if self.dispatcher.acks.woken(partitions):
            self.loops.fire.wake()

    def _ownership_changed(self) -> None:
        self.loops.read.wake()
        self.loops.fire.wake()
        self.loops.keep.wake()
        self.ownership_changed()

    # -- in a cluster ------------------------------------------------------------------------------------

    def follow(self, wanted: set[int], asked: set[int]) -> None:
        """Follow the plan: the partitions this node should own, and those of its own that other nodes wait for."""
        self.keeper.follow(wanted, asked)
        if asked & self.owned.keys() or wanted - self.owned.keys():
            self.loops.keep.wake()

    def called(self) -> None:
        """React to a change on another node: a partition waited for may be free, or a pause was set."""
        self.loops.pause.wake()
        if self.keeper.waiting:
            self.loops.keep.wake()

    @property
    def lag_ms(self) -> int:
        """How long the earliest waiting task is overdue."""
        soonest = min((one.soonest_ms for one in self.owned.values()), default=inf)
        return max(0, self.store.clock.now_ms() - int(soonest)) if soonest < inf else 0
