"""Circuit breakers, limits and shares of all receivers: who may leave now, and who has to wait in a hold slice."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..model.breaker import Breaker, BreakerPolicy
from ..model.clock import Clock
from ..model.explain import moment, span
from ..model.hold import BREAKER, CATCH_UP, HoldRecord
from ..model.rate import Limit, Rate
from ..model.targets import receiver_of
from .holds import Why
from .valve import Valve

log = logging.getLogger("mainspring.targets")

RESERVE: Final = 4
"""One part in so many of what may be in flight is kept free until it is known who is slow; then others get it."""

SHARED_FROM: Final = 64
"""A node with less room than this does not divide it."""

_PREFIX: Final = "valve:"
_FEW: Final = 1_024
"""Receivers that are known before idle ones are forgotten: URLs can name any number of hosts."""


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """What bounds the flow to receivers."""

    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    breakers: Mapping[str, BreakerPolicy] = field(default_factory=dict)
    """Of receivers with one of their own."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """By receiver: `target:<name>`, `queue:<name>`."""
    catch_up: Rate | None = None
    """What is overdue goes out no faster, on all nodes together."""
    catch_up_after_ms: int = 10_000
    """So late a task is overdue."""


class Surroundings(Protocol):
    """What valves ask of the engine they are in, and tell it."""

    @property
    def most(self) -> int:
        """How many may be in flight, in all."""

    @property
    def lag_ms(self) -> int:
        """How long the earliest task that waits is overdue."""

    def permits_wanted(self) -> None: ...

    def flow(self) -> None:
        """Something may leave that could not before."""


class Valves:
    """A gate: every receiver that is in trouble, limited or slow holds up its own tasks, and nobody else's."""

    def __init__(
        self, options: FlowOptions, clock: Clock, around: Surroundings, commands: Mapping[str, str] | None = None
    ) -> None:
        self._options = options
        self._commands = commands or {}
        """Those that have another queue than `commands`."""
        self._clock = clock
        self._around = around
        self._valves: dict[str, Valve] = {}
        self._bounded: dict[str, Valve] = {}
        self._sweep_at = _FEW
        for receiver in options.limits:
            self._look_at(self.of(receiver))
        self.catch_up: Valve | None = None
        if options.catch_up is not None:
            self.catch_up = Valve(CATCH_UP, None, Limit(options.catch_up), CATCH_UP)
        self._overdue = False
        """Tasks wait here that are overdue."""

    def of(self, receiver: str) -> Valve:
        valve = self._valves.get(receiver)
        if valve is None:
            self._sweep()
            policy = self._options.breakers.get(receiver, self._options.breaker)
            # What goes to a queue is handed over, not delivered: whether that works says nothing of its handlers.
            without = policy.off or receiver.startswith("queue:")
            limit = self._options.limits.get(receiver, Limit())
            valve = self._valves[receiver] = Valve(receiver, None if without else Breaker(policy), limit)
        return valve

    def _sweep(self) -> None:
        if len(self._valves) >= self._sweep_at:
            self._valves = {name: one for name, one in self._valves.items() if one.bounded or one.in_flight}
            self._sweep_at = max(_FEW, 2 * len(self._valves))

    def _look_at(self, valve: Valve) -> None:
        if valve.bounded:
            self._bounded[valve.receiver] = valve
        elif self._bounded.pop(valve.receiver, None) is not None:
            self._around.flow()

    @property
    def bounded(self) -> list[Valve]:
        """All that have to be asked."""
        return [*self._bounded.values(), *([] if self.catch_up is None else [self.catch_up])]

    # -- what deliveries tell --------------------------------------------------------------------------------------

    def begun(self, target: str, count: int) -> None:
        """So many of those that were let through are not held up any more."""
        if self._bounded and (valve := self._bounded.get(receiver_of(target, self._commands))) is not None:
            valve.begun(count)

    def has_slots(self, target: str) -> bool:
        """Only so many may be under way to it: each has a slot until it ends."""
        valve = self._bounded.get(receiver_of(target, self._commands)) if self._bounded else None
        return valve is not None and valve.limit.concurrency is not None

    def left(self, target: str, count: int) -> None:
        self.of(receiver_of(target, self._commands)).in_flight += count

    def landed(self, target: str, count: int, done: int, failed: int, refused: int = 0) -> None:
        """So many are over: some well, some not, some refused for good; the others were not even sent."""
        valve = self.of(receiver_of(target, self._commands))
        valve.landed(count)
        breaker = valve.breaker
        if breaker is not None and (done or failed or refused):
            before = breaker.state
            now_ms = self._clock.now_ms()
            if breaker.record(done, failed, now_ms, refused=refused) != before:
                self._tell(valve, before, now_ms)
        if valve.bounded or valve.receiver in self._bounded:
            self._look_at(valve)
            if valve.refused and (valve.limit.concurrency is not None or valve.slow_since_ms or refused):
                self._around.flow()

    def _tell(self, valve: Valve, before: str, now_ms: int) -> None:
        breaker = valve.breaker
        assert breaker is not None
        if breaker.state == "open":
            log.warning(
                "%s fails: its circuit breaker is open, its tasks are held; next probe at %s",
                valve.receiver,
                moment(breaker.next_ms),
            )
        elif before == "half-open":
            took = span(now_ms - breaker.opened_ms)
            log.info("%s answers again after %s; what was held goes out at a growing rate", valve.receiver, took)
            self._around.flow()

    # -- as a gate -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """The dispatcher begins anew: what it let through before is in flight now, or was refused."""
        stayed = [valve for valve in self._bounded.values() if valve.tick()]
        if any(valve.refused for valve in stayed):
            self._around.flow()
        if self.catch_up is not None:
            self.catch_up.tickets = 0
            self._overdue = self._around.lag_ms > self._options.catch_up_after_ms

    def free(self, in_flight: int) -> int:
        """How many may begin now, of all receivers together.

        A receiver is only known to be slow after a while. Until then it must not fill all the room: what is kept free
        is what the others go on with.
        """
        most = self._around.most
        if most < SHARED_FROM:
            return most - in_flight
        slow = sum(valve.in_flight for valve in self._bounded.values() if valve.slow_since_ms)
        return (most - slow) * (RESERVE - 1) // RESERVE - (in_flight - slow)

    @property
    def closed(self) -> bool:
        # Of lanes any may have an overdue one whose turn has come: each is asked then.
        return self.catch_up is not None or bool(self._bounded)

    def governs(self, target: str) -> bool:
        return self._overdue or receiver_of(target, self._commands) in self._bounded

    def hold_for(self, target: str, lane: str | None, due_ms: float) -> str | None:
        """A task that may leave counts as one that has left."""
        del lane
        now_ms = self._clock.now_ms()
        asked = []
        if self.catch_up is not None and due_ms < now_ms - self._options.catch_up_after_ms:
            asked.append(self.catch_up)
        if (valve := self._bounded.get(receiver_of(target, self._commands))) is not None:
            asked.append(valve)
        for one in asked:
            if self._room_of(one, now_ms) < 1:
                return one.key
        for one in asked:
            one.take(now_ms)
        return None

    def _room_of(self, valve: Valve, now_ms: int) -> int:
        room = valve.room(now_ms, self._around.most)
        if room < 1 and valve.thirsty:
            self._around.permits_wanted()
        return room

    def _named(self, key: str) -> Valve | None:
        if key == CATCH_UP:
            return self.catch_up
        return self._bounded.get(key.removeprefix(_PREFIX)) if key.startswith(_PREFIX) else None

    def is_closed(self, key: str) -> bool:
        room = self.room(key)
        return room is not None and room < 1

    def room(self, key: str) -> int | None:
        """How many of those that wait under this key may leave now; None when nothing bounds them (any more)."""
        valve = self._named(key)
        return None if valve is None else self._room_of(valve, self._clock.now_ms())

    def may_open(self, key: str) -> bool:
        """No more lanes at once than there is room: those in vain would be read and held again."""
        valve = self._named(key)
        if valve is None:
            return True
        if self._room_of(valve, self._clock.now_ms()) <= valve.tickets:
            return False
        valve.tickets += 1
        return True

    def inherited(self, record: HoldRecord) -> None:
        """Breakers are each node's own. What was held by one is not let go at once because another knows nothing."""
        if record.code != BREAKER or not record.cause.startswith(_PREFIX):
            return
        valve = self.of(record.cause.removeprefix(_PREFIX))
        if valve.breaker is None or valve.breaker.state != "closed":
            return
        valve.breaker.suspect(record.since_ms, self._clock.now_ms())
        self._look_at(valve)
        log.info("%s failed when its tasks were taken over: they go out with care at first", valve.receiver)

    def why(self, key: str) -> Why:
        valve = self._named(key)
        if valve is None:
            return Why()
        code, reason, until_ms = valve.why()
        return Why(reason, "", until_ms, code=code)

    # -- as time goes by -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Breakers come to their next state with time, the slow become quick, and the quick slow."""
        now_ms, most = self._clock.now_ms(), self._around.most
        busy = [valve for valve in self._valves.values() if valve.in_flight > 0 or valve.slow_since_ms]
        much = max(16, most // (4 * max(1, len(busy))))
        for valve in busy if most >= SHARED_FROM else ():
            if valve.slow_since_ms or valve.in_flight > much:
                valve.measure(now_ms)
                if valve.slow_since_ms and valve.receiver not in self._bounded:
                    log.warning("%s is slow: %d tasks are under way to it; others go first", valve.receiver,
                                valve.in_flight)  # fmt: skip
                self._look_at(valve)
        for valve in self.bounded:
            valve.tickets = 0
            if valve.refused and valve.room(now_ms, most) > 0:
                valve.refused = False
                self._around.flow()
            if valve is not self.catch_up:
                self._look_at(valve)
