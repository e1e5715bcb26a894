"""Flow control: circuit breakers, rates, concurrency limits and pauses decide which targets may receive tasks now."""

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from ..model.audit import Change, of_pause
from ..model.clock import Clock
from ..model.delivery import DROPPED
from ..model.errors import OutOfMemory
from ..model.explain import moment, span
from ..model.flow import Breaker, BreakerPolicy, Limit, Rate
from ..model.lane import BREAKER, CATCH_UP, NO_SINK, HoldRecord, Pause, Pauses, Scope
from ..model.limits import MAX_ERROR_CHARS
from ..model.targets.named import SCHEME
from ..model.targets.names import receiver_of
from ..roles import Loops
from ..sinks.base import Sink, missing
from ..store import access, limits
from ..store.lanes import clear_away, read_pauses, write_if_none
from ..store.limits import Granted
from ..store.store import Store

if TYPE_CHECKING:
    from .partition import Partition

log = logging.getLogger("mainspring.targets")

SLOW_MS: Final = 5_000
"""A receiver that would need longer than this for its tasks in flight is slow."""

QUICK_MS: Final = 1_000
"""A slow receiver that needs less than this is no longer slow."""

MEASURE_MS: Final = 1_000
PERMITS_S: Final = 0.1
"""Seconds' worth of a rate that a node asks for at once."""

SLOW_SHARE: Final = 8
"""Divisor of the node's in-flight limit: the largest share of a slow receiver."""

_PROBED: Final = ("open", "half-open")

_LIMIT: Final = "valve:"
_PAUSE: Final = "pause:"
_SINK: Final = "sink:"
"""Prefixes of the keys under which tasks wait: for a receiver, a pause, or a target that this node cannot deliver
to."""


class Why(NamedTuple):
    """Why tasks are held, for people."""

    reason: str = ""
    who: str = ""
    until_ms: int | None = None
    code: str = ""
    """The code that `explain` reports to programs."""


def is_gradual(key: str) -> bool:
    """Return True if tasks that wait under this key are released gradually, by a limit, and not all at once."""
    return key == CATCH_UP or key.startswith(_LIMIT)


class FlowLimit:
    """One receiver: the host of a webhook, a named target, a topic, a queue."""

    def __init__(self, receiver: str, breaker: Breaker | None, limit: Limit, key: str = "") -> None:
        self.receiver = receiver
        self.key = key or _LIMIT + receiver
        """Key of the hold under which its tasks wait."""
        self.breaker = breaker
        self.limit = limit
        self.in_flight = 0
        self.reserved = 0
        """Tasks let through in this tick that have not begun yet."""
        self.tickets = 0
        """Lanes reopened in this tick."""
        self.permits = 0
        """Unused permits of the rate."""
        self.slots = 0
        """Tasks that may be in flight on this node, of those shared by all nodes."""
        self.starved = False
        """True if a task was refused for lack of permits or slots."""
        self.ask_at_ms = 0
        self.renewed_ms = 0
        self.refused = False
        """True if a task was refused since the engine last learned of room."""
        self.slow_since_ms = 0
        self._landed = 0
        self._measured_ms = 0
        self._per_s = 0.0

    @property
    def bounded(self) -> bool:
        """True if tasks have to ask before they leave."""
        troubled = self.breaker is not None and self.breaker.state != "closed"
        return troubled or bool(self.limit) or self.slow_since_ms > 0

    def room(self, now_ms: int, most: int) -> int:
        """Return how many tasks may leave now. `most` is the node's in-flight limit."""
        room = inf if self.breaker is None else self.breaker.room(now_ms)
        if room > 0 and self.limit:
            allowed = self._allowed(self.reserved)
            self.starved = self.starved or allowed <= 0
            room = min(room, allowed)
        if self.slow_since_ms:
            room = min(room, max(1, most // SLOW_SHARE, int(self._per_s)) - self.in_flight - self.reserved)
        self.refused = self.refused or room < 1
        return int(min(max(0, room), 1 << 30))

    def _allowed(self, reserved: int) -> float:
        """Return how many may leave by permits and slots, less `reserved` slots for tasks not yet in flight."""
        by_rate = inf if self.limit.rate is None else self.permits
        by_slots = inf if self.limit.concurrency is None else self.slots - self.in_flight - reserved
        return min(by_rate, by_slots)

    def take(self, count: int, now_ms: int) -> None:
        """Count tasks that leave."""
        if self.key != CATCH_UP:  # nobody says which of the tasks that began were overdue
            self.reserved += count
        if self.breaker is not None:
            self.breaker.took(count, now_ms)
        if self.limit.rate is not None:
            self.permits -= count

    def tick(self) -> bool:
        """Release reservations of tasks that were let through and never began (expired, dropped, cancelled).

        Return True if there were any.
        """
        stayed, self.reserved, self.tickets = self.reserved, 0, 0
        if stayed and self.breaker is not None:
            self.breaker.stayed(stayed)
        if stayed and self.limit.rate is not None:
            self.permits += stayed
        return stayed > 0

    # -- what the node's deliveries say --------------------------------------------------------------------------

    def landed(self, count: int) -> None:
        self.in_flight -= count
        self._landed += count

    def measure(self, now_ms: int) -> None:
        """Decide whether the receiver is slow; called from time to time while it has many tasks in flight."""
        passed_ms = now_ms - self._measured_ms
        if passed_ms < MEASURE_MS:
            return
        self._per_s = self._landed * 1000 / passed_ms
        first, self._landed, self._measured_ms = self._measured_ms == 0, 0, now_ms
        if first:
            return
        takes_ms = self.in_flight * 1000 / max(self._per_s, 0.001)
        if self.slow_since_ms and takes_ms < QUICK_MS:
            self.slow_since_ms = 0
        elif not self.slow_since_ms and takes_ms > SLOW_MS:
            self.slow_since_ms = now_ms

    # -- what all nodes share --------------------------------------------------------------------------------------

    def want(self) -> int:
        """Return how many tasks to ask for. The server subtracts the unused permits, which only wait for slots."""
        rate, slots = self.limit.rate, self.limit.concurrency
        by_rate = inf if rate is None else max(1, int(rate.per_s * PERMITS_S))
        by_slots = inf if slots is None else slots - self.in_flight
        return int(max(0, min(by_rate, by_slots))) if self.starved else 0

    def granted(self, asked: int, granted: Granted, now_ms: int) -> bool:
        """Apply the server's grant; return True if a task may leave now."""
        self.slots = granted.slots if self.limit.concurrency is not None else 0
        if self.limit.rate is not None:
            self.permits += granted.permits
        self.starved = self.starved and asked > 0 and self._allowed(0) <= 0
        self.ask_at_ms = now_ms + granted.wait_ms
        self.renewed_ms = now_ms
        return self._allowed(self.reserved) > 0

    # -- explanations ------------------------------------------------------------------------------------------------

    def why(self) -> Why:
        """Return why its tasks wait; for an open breaker also when the next probe is sent."""
        breaker, limit = self.breaker, self.limit
        if breaker is not None and breaker.state in _PROBED:
            since = f"the circuit breaker of {self.receiver} has been open since {moment(breaker.opened_ms)}"
            if breaker.state == "half-open":
                return Why(f"{since}, and probes are in flight", code=BREAKER)
            return Why(f"{since}, and it is probed until it responds", "", breaker.next_ms, BREAKER)
        if breaker is not None and breaker.state == "ramp":
            return Why(f"the backlog of {self.receiver} is delivered at a growing rate after it failed", code=BREAKER)
        if self.key == CATCH_UP:
            return Why(f"overdue tasks are released at {limit.rate}", code="catch-up")
        if limit.concurrency is not None and (limit.rate is None or self.permits > 0):
            most = f"{limit.concurrency} on all nodes"
            return Why(f"{self.receiver} has reached its concurrency limit ({most})", code="rate-limited")
        if self.slow_since_ms and (limit.rate is None or self.permits > 0):
            reason = f"{self.receiver} has been slow since {moment(self.slow_since_ms)}: others go first"
            return Why(reason, code="slow")
        return Why(f"{self.receiver} is rate-limited to {limit.rate}", code="rate-limited")


RESERVE: Final = 4
"""Divisor of the in-flight limit: the share that stays free until slow receivers are known."""

SHARED_FROM: Final = 64
"""A node with less room than this does not divide it."""

_FEW: Final = 1_024
"""Number of receivers from which idle ones are forgotten: URLs can name any number of hosts."""


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """Options that bound the flow to receivers."""

    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    breakers: Mapping[str, BreakerPolicy] = field(default_factory=dict)
    """Policies of receivers that have their own."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Limits by receiver: `target:<name>`, `queue:<name>`."""
    catch_up: Rate | None = None
    """Rate limit of overdue tasks, shared by all nodes."""
    catch_up_after_ms: int = 10_000
    """Milliseconds after which a late task counts as overdue."""


class Flow:
    """Decides which tasks may leave now: holds up those that are paused, that this node cannot deliver, or whose
    receiver is failing, limited or slow, and no other tasks."""

    def __init__(
        self,
        options: FlowOptions,
        clock: Clock,
        loops: Loops,
        owned: Mapping[int, "Partition"],
        *,
        concurrency: int,
        sinks: Mapping[str, Sink] = MappingProxyType({}),
        commands: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`commands` maps commands to their queues, except those in the queue `commands`."""
        self._options = options
        self._clock = clock
        self._loops = loops
        self._owned = owned
        self._sinks = sinks
        self.commands = commands
        self.concurrency = concurrency
        self.most = concurrency
        """Most tasks in flight, in total; fewer than `concurrency` if they are large."""
        self.pauses = Pauses()
        """Pauses that hold tasks back."""
        self.lacks_sinks = any(missing(sinks, f"{scheme}:") is not None for scheme in sinks)
        """True if there may be tasks that this node cannot deliver: they wait until some node can."""
        self._reported: set[str] = set()
        self._flow_limits: dict[str, FlowLimit] = {}
        self._bounded: dict[str, FlowLimit] = {}
        self._sweep_at = _FEW
        for receiver in options.limits:
            self._look_at(self.of(receiver))
        self.catch_up: FlowLimit | None = None
        """Limit under which overdue tasks wait, whatever their receivers: every head of a lane has to ask."""
        if options.catch_up is not None:
            self.catch_up = FlowLimit(CATCH_UP, None, Limit(options.catch_up), CATCH_UP)
            self._look_at(self.catch_up)

    def of(self, receiver: str) -> FlowLimit:
        flow_limit = self._flow_limits.get(receiver)
        if flow_limit is None:
            self._sweep()
            policy = self._options.breakers.get(receiver, self._options.breaker)
            # A task for a queue is handed over, not delivered: success there says nothing about its handlers.
            without = policy.off or receiver.startswith("queue:")
            limit = self._options.limits.get(receiver, Limit())
            flow_limit = self._flow_limits[receiver] = FlowLimit(receiver, None if without else Breaker(policy), limit)
        return flow_limit

    def _sweep(self) -> None:
        if len(self._flow_limits) >= self._sweep_at:
            self._flow_limits = {name: one for name, one in self._flow_limits.items() if one.bounded or one.in_flight}
            self._sweep_at = max(_FEW, 2 * len(self._flow_limits))

    def _look_at(self, flow_limit: FlowLimit) -> None:
        if flow_limit.bounded:
            self._bounded[flow_limit.receiver] = flow_limit
        elif self._bounded.pop(flow_limit.receiver, None) is not None:
            self.wake()

    def wake(self) -> None:
        """Wake the roles: held tasks may leave."""
        for partition in self._owned.values():
            partition.survey()
        self._loops.read.wake()
        self._loops.fire.wake()

    @property
    def unavailable(self) -> list[str]:
        """Receivers whose circuit breakers are open on this node."""
        found = self._bounded.values()
        return [one.receiver for one in found if one.breaker is not None and one.breaker.state in _PROBED]

    def is_open(self, target: str) -> bool:
        """Return whether the circuit breaker of a target's receiver is open; half-open, it lets its probes through."""
        flow_limit = self._bounded_of(target)
        return flow_limit is not None and flow_limit.breaker is not None and flow_limit.breaker.state == "open"

    @property
    def bounded(self) -> list[FlowLimit]:
        """The limits that tasks must ask before they leave."""
        return list(self._bounded.values())

    def _bounded_of(self, target: str) -> FlowLimit | None:
        return self._bounded.get(receiver_of(target, self.commands)) if self._bounded else None

    # -- which tasks may leave ---------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if any task is held. Checked for every batch; the questions below only if this is true."""
        return bool(self.pauses or self._bounded or self.lacks_sinks)

    @property
    def overdue_after_ms(self) -> float:
        """Milliseconds after which tasks are overdue and leave gradually; infinity if they all leave at once."""
        return inf if self.catch_up is None else self._options.catch_up_after_ms

    def admit(self, target: str, lane: str | None, wanted: int = 1, *, overdue: bool = False) -> tuple[int, str]:
        """Let as many of `wanted` tasks leave as may leave now; return their number, and the key under which the others
        wait."""
        if self.pauses and (pause := self.pauses.of_task(target, lane)) is not None:
            return 0, _PAUSE + pause.scope.text
        if self.lacks_sinks and (reason := missing(self._sinks, target)) is not None:
            if reason not in self._reported:
                self._reported.add(reason)
                log.error("%s. Its tasks are held until a node that has it owns their partition", reason)
            # Each target has its own hold: a node that can deliver to it derives the key from the target alone.
            return 0, _SINK + target
        now_ms = self._clock.now_ms()
        limits = [one for one in (self.catch_up if overdue else None, self._bounded_of(target)) if one is not None]
        admitted = min([wanted, *(self._room_of(one, now_ms) for one in limits)])
        for one in limits:
            one.take(admitted, now_ms)
        if admitted == wanted:
            return admitted, ""
        # Ask again: a limit notes that it has refused tasks.
        return admitted, next(one.key for one in limits if self._room_of(one, now_ms) < 1)

    def room(self, key: str) -> float:
        """Return how many tasks that wait under this key may leave now: 0 if none, infinity if nothing holds them."""
        if key.startswith(_PAUSE):
            return 0 if key.removeprefix(_PAUSE) in self.pauses.by_scope else inf
        if key.startswith(_SINK):
            return 0 if self._missing(key) else inf
        flow_limit = self._limit_of(key)
        return inf if flow_limit is None else self._room_of(flow_limit, self._clock.now_ms())

    def why(self, key: str) -> Why:
        """Return the reason of a hold, even if it lets some tasks through: the others wait for that reason."""
        if key.startswith(_PAUSE):
            pause = self.pauses.by_scope.get(key.removeprefix(_PAUSE))
            return Why() if pause is None else Why(pause.reason, pause.who, pause.until_ms)
        if key.startswith(_SINK):
            reason = self._missing(key)
            return Why(reason, code=NO_SINK) if reason else Why()
        flow_limit = self._limit_of(key)
        return Why() if flow_limit is None else flow_limit.why()

    def may_open(self, key: str) -> bool:
        """Return True if one more lane that waits under this key may be reopened. Only as many are as there is room
        for: others would be read and held again."""
        flow_limit = self._limit_of(key)
        if flow_limit is None:
            return self.room(key) > 0
        if self._room_of(flow_limit, self._clock.now_ms()) <= flow_limit.tickets:
            return False
        flow_limit.tickets += 1
        return True

    def _missing(self, key: str) -> str:
        return missing(self._sinks, key.removeprefix(_SINK)) or ""

    def _limit_of(self, key: str) -> FlowLimit | None:
        return self._bounded.get(key.removeprefix(_LIMIT)) if is_gradual(key) else None

    def _room_of(self, flow_limit: FlowLimit, now_ms: int) -> int:
        room = flow_limit.room(now_ms, self.most)
        if room < 1 and flow_limit.starved:
            self._loops.permit.wake()
        return room

    def inherited(self, record: HoldRecord) -> None:
        """Suspect a receiver whose breaker was open on the former owner: this node has seen no failures itself.

        Called before any question about the tasks of the hold.
        """
        if record.code != BREAKER or not record.cause.startswith(_LIMIT):
            return
        flow_limit = self.of(record.cause.removeprefix(_LIMIT))
        if flow_limit.breaker is None or flow_limit.breaker.state != "closed":
            return
        flow_limit.breaker.suspect(record.since_ms, self._clock.now_ms())
        self._look_at(flow_limit)
        log.info("%s was failing when its tasks were taken over; they leave cautiously at first", flow_limit.receiver)

    # -- ticks and deliveries ----------------------------------------------------------------------------

    def tick(self) -> None:
        """Begin a tick: tasks let through before are in flight now, or were refused."""
        stayed = [flow_limit for flow_limit in self._bounded.values() if flow_limit.tick()]
        if any(flow_limit.refused for flow_limit in stayed):
            self.wake()

    def free(self, in_flight: int) -> int:
        """Return how many tasks may begin now, for all receivers together.

        It takes a while until a receiver is known to be slow. Until then it must not fill all the room: the reserve
        keeps the other receivers going.
        """
        if self.most < SHARED_FROM:
            return self.most - in_flight
        slow = sum(flow_limit.in_flight for flow_limit in self._bounded.values() if flow_limit.slow_since_ms)
        return (self.most - slow) * (RESERVE - 1) // RESERVE - (in_flight - slow)

    def begun(self, target: str, count: int) -> None:
        """Count tasks that were let through and have begun, to a sink or to a queue."""
        if (flow_limit := self._bounded_of(target)) is not None:
            flow_limit.reserved = max(0, flow_limit.reserved - count)

    def has_slots(self, target: str) -> bool:
        """Return True if the target has a concurrency limit: each task keeps a slot until it ends."""
        flow_limit = self._bounded_of(target)
        return flow_limit is not None and flow_limit.limit.concurrency is not None

    def left(self, target: str, count: int) -> None:
        self.of(receiver_of(target, self.commands)).in_flight += count

    def landed(self, target: str, count: int, done: int, failed: int, refused: int = 0) -> None:
        """Count finished deliveries: done, failed, refused for good; the remaining ones were never sent."""
        flow_limit = self.of(receiver_of(target, self.commands))
        flow_limit.landed(count)
        breaker = flow_limit.breaker
        if breaker is not None and (done or failed or refused):
            before, now_ms = breaker.state, self._clock.now_ms()
            state = breaker.record(done, failed, now_ms, refused=refused)
            if state == "open" and before != "open":
                log.warning("%s fails: its circuit breaker is open, its tasks are held; next probe at %s",
                            flow_limit.receiver, moment(breaker.next_ms))  # fmt: skip
            elif before == "half-open" and state != "half-open":
                took = span(now_ms - breaker.opened_ms)
                log.info("%s responds again after %s; its backlog leaves at a growing rate", flow_limit.receiver, took)
                self.wake()
        if flow_limit.bounded or flow_limit.receiver in self._bounded:
            self._look_at(flow_limit)
            if flow_limit.refused and (flow_limit.limit.concurrency is not None or flow_limit.slow_since_ms or refused):
                self.wake()

    # -- time -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Advance breakers with time, and measure which receivers are slow."""
        now_ms = self._clock.now_ms()
        busy = [one for one in self._flow_limits.values() if one.in_flight > 0 or one.slow_since_ms]
        much = max(16, self.most // (4 * max(1, len(busy))))
        for flow_limit in busy if self.most >= SHARED_FROM else ():
            if flow_limit.slow_since_ms or flow_limit.in_flight > much:
                flow_limit.measure(now_ms)
                if flow_limit.slow_since_ms and flow_limit.receiver not in self._bounded:
                    log.warning("%s is slow: %d tasks are in flight to it; others go first", flow_limit.receiver,
                                flow_limit.in_flight)  # fmt: skip
                self._look_at(flow_limit)
        for flow_limit in self.bounded:
            flow_limit.tickets = 0
            breaker = flow_limit.breaker
            if breaker is not None and not flow_limit.in_flight:
                was = breaker.state
                if breaker.rest(now_ms) and was != "ramp":
                    log.info("%s: idle for a long time; its circuit breaker closes", flow_limit.receiver)
            if flow_limit.refused and flow_limit.room(now_ms, self.most) > 0:
                flow_limit.refused = False
                self.wake()
            self._look_at(flow_limit)


IDLE_S: Final = 1.0
SOON_S: Final = 0.02
"""Seconds between looks at the limits while something waits."""


class Permits:
    """The role that gets permits and slots from the server for every limited receiver."""

    def __init__(self, store: Store, flow: Flow, *, node: str, lease_s: float) -> None:
        self._store = store
        self._flow = flow
        self._node = node
        self._lease_ms = int(lease_s * 1000)
        self.supplied = 0
        """Rounds in which something was granted."""

    async def step(self) -> float:
        """Run one round; return the seconds until the next is needed."""
        self._flow.look()
        now_ms = self._store.clock.now_ms()
        wanting = [one for one in self._flow.bounded if one.limit and self._is_due(one, now_ms)]
        if wanting:
            asks = [limits.Ask(one.receiver, one.limit, one.in_flight, one.want(), one.permits) for one in wanting]
            answers = await limits.ask(self._store, self._node, asks, self._lease_ms)
            now_ms = self._store.clock.now_ms()
            supplied = [
                one.granted(ask.want, answer, now_ms) for one, ask, answer in zip(wanting, asks, answers, strict=True)
            ]
            if any(supplied):
                self.supplied += 1
                self._flow.wake()
        return self._wait_s(now_ms)

    def _is_due(self, flow_limit: FlowLimit, now_ms: int) -> bool:
        if flow_limit.starved:
            return now_ms >= flow_limit.ask_at_ms or flow_limit.ask_at_ms > now_ms + self._lease_ms
        # Slots are leased: renew those in use, give back the rest.
        renew = flow_limit.limit.concurrency is not None and (flow_limit.slots > 0 or flow_limit.in_flight > 0)
        return renew and now_ms >= flow_limit.renewed_ms + self._lease_ms // 3

    def _wait_s(self, now_ms: int) -> float:
        waits = [IDLE_S]
        for flow_limit in self._flow.bounded:
            if flow_limit.starved:
                waits.append((flow_limit.ask_at_ms - now_ms) / 1000)
            elif (breaker := flow_limit.breaker) is not None and breaker.next_ms > now_ms and breaker.state in _PROBED:
                waits.append((breaker.next_ms - now_ms) / 1000)  # once the time has passed, the breaker waits for tasks
            elif flow_limit.refused or flow_limit.slow_since_ms:
                waits.append(SOON_S)
        return max(SOON_S / 4, min(waits))


POLL_S: Final = 2.0


class PauseWatch:
    """The role that reads pauses: tasks of paused targets, queues and lanes are held or dropped. A request that was
    sent is not recalled."""

    def __init__(
        self,
        store: Store,
        flow: Flow,
        loops: Loops,
        node: str,
        audited: int = access.AUDIT_KEPT,
    ) -> None:
        """`audited` changes are kept in the audit trail."""
        self._store = store
        self._flow = flow
        self._loops = loops
        self._node = node
        self._audited = audited
        self._disabled: dict[str, Pause] = {}
        """Pauses of disabled targets that are still to be written."""
        self.drops = Pauses()
        """Pauses under which tasks are dropped."""

    async def step(self) -> float:
        await self.flush()
        read = await read_pauses(self._store)
        now_ms = self._store.clock.now_ms()
        before = self._flow.pauses.by_scope, self.drops.by_scope
        holds = self._flow.pauses = Pauses((one for one in read if one.mode != "drop"), now_ms, self._flow.commands)
        # Include targets disabled since this step began.
        drops = (*(one for one in read if one.mode == "drop"), *self._disabled.values())
        self.drops = Pauses(drops, now_ms, self._flow.commands)
        if (holds.by_scope, self.drops.by_scope) != before:
            # Held tasks may leave now, or others must wait.
            self._loops.read.wake()
            self._loops.fire.wake()
        for one in read:
            if not one.lasts(now_ms):
                await clear_away(self._store, one)
        lasting = (*holds.by_scope.values(), *self.drops.by_scope.values())
        ends = [one.until_ms for one in lasting if one.until_ms is not None]
        return min(POLL_S, max(0.001, (min(ends) - now_ms) / 1000)) if ends else POLL_S

    def disable(self, target: str, reason: str) -> None:
        """Disable a named target at its own request: on this node at once, on others once the pause is written."""
        scope = Scope("target", target)
        known = scope.text in self.drops.by_scope or scope.text in self._flow.pauses.by_scope
        # An address may serve many tasks, and may end in a *.
        if known or not target.startswith(f"{SCHEME}:"):
            return
        now_ms = self._store.clock.now_ms()
        pause = self._disabled[scope.text] = Pause(scope, "drop", reason[:MAX_ERROR_CHARS], self._node, now_ms)
        self.drops = Pauses((*self.drops.by_scope.values(), pause), now_ms, self._flow.commands)
        log.warning(
            "%s is disabled on all nodes: %s. Its tasks go to the dead letters until mainspring resume --target %s",
            target, reason, target,
        )  # fmt: skip
        self._loops.pause.wake()

    async def flush(self) -> None:
        """Write the pauses of disabled targets, but keep a pause that someone has set meanwhile."""
        for name, pause in list(self._disabled.items()):
            if await write_if_none(self._store, pause):
                await self._audit(pause)
            self._disabled.pop(name, None)

    async def _audit(self, pause: Pause) -> None:
        """Record the pause in the audit trail. After a lost reply it is recorded again: twice is better than never."""
        change = Change(self._node, "pause.add", pause.scope.text, socket.gethostname(), after=of_pause(pause))
        try:
            await access.record_change(self._store, change, kept=self._audited)
        except OutOfMemory as error:  # the pause is written, and a full server must not keep the others from being read
            log.error("the pause of %s could not be recorded in the audit trail: %s", pause.scope.text, error)

    def dropped(self, target: str, lane: str | None) -> str | None:
        """Return why a task that has begun is not delivered; None if it is."""
        pause = self.drops.of_task(target, lane)
        if pause is None:
            return None
        said = f"{DROPPED}{f' by {pause.who}' if pause.who else ''}{f': {pause.reason}' if pause.reason else ''}"
        return said[:MAX_ERROR_CHARS]
