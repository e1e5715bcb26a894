"""What one receiver may get now: as its breaker, its limits and its pace allow."""

from math import inf
from typing import Final

from ..model.breaker import Breaker
from ..model.explain import moment
from ..model.hold import BREAKER, CATCH_UP
from ..model.rate import Limit
from ..store.limits import Granted

SLOW_MS: Final = 5_000
"""A receiver that would need longer than this for what is under way to it is slow."""

QUICK_MS: Final = 1_000
"""One that needs less is slow no longer."""

MEASURE_MS: Final = 1_000
PERMITS_S: Final = 0.1
"""A node asks for so much of a rate at once."""

SLOW_SHARE: Final = 8
"""A slow receiver has at most one part in so many of what a node may have in flight."""


class Valve:
    """One receiver: the host of a webhook, a named target, a topic, a queue."""

    def __init__(self, receiver: str, breaker: Breaker | None, limit: Limit, key: str = "") -> None:
        self.receiver = receiver
        self.key = key or f"valve:{receiver}"
        """Of the hold under which its tasks wait."""
        self.breaker = breaker
        self.limit = limit
        self.in_flight = 0
        self.reserved = 0
        """Let through since the dispatcher began its tick, and not yet begun."""
        self.tickets = 0
        """Lanes that were told to try their luck since then."""
        self.permits = 0
        """Of the rate, in hand."""
        self.slots = 0
        """That may be in flight here, of those that all nodes share."""
        self.thirsty = False
        """Somebody was sent away for want of permits or slots."""
        self.ask_at_ms = 0
        self.renewed_ms = 0
        self.refused = False
        """Somebody was sent away since the engine was told that there is room."""
        self.slow_since_ms = 0
        self._landed = 0
        self._measured_ms = 0
        self._per_s = 0.0

    @property
    def bounded(self) -> bool:
        """Tasks have to ask before they leave; otherwise they just go."""
        troubled = self.breaker is not None and self.breaker.state != "closed"
        return troubled or bool(self.limit) or self.slow_since_ms > 0

    def room(self, now_ms: int, most: int) -> int:
        """How many may leave now. `most` is what the node may have in flight in all."""
        room = inf if self.breaker is None else self.breaker.room(now_ms)
        if room > 0 and self.limit:
            allowed = self._allowed(self.reserved)
            self.thirsty = self.thirsty or allowed <= 0
            room = min(room, allowed)
        if self.slow_since_ms:
            room = min(room, max(1, most // SLOW_SHARE, int(self._per_s)) - self.in_flight - self.reserved)
        self.refused = self.refused or room < 1
        return int(min(max(0, room), 1 << 30))

    def _allowed(self, reserved: int) -> float:
        """By permits and slots in hand, of which so many are for those let through and not yet in flight."""
        by_rate = inf if self.limit.rate is None else self.permits
        by_slots = inf if self.limit.concurrency is None else self.slots - self.in_flight - reserved
        return min(by_rate, by_slots)

    def take(self, now_ms: int) -> None:
        """One leaves."""
        self.reserved += 1
        if self.breaker is not None:
            self.breaker.took(1, now_ms)
        if self.limit.rate is not None:
            self.permits -= 1

    def begun(self, count: int) -> None:
        """So many are on their way, to a sink or to a queue."""
        self.reserved = max(0, self.reserved - count)

    def tick(self) -> bool:
        """Who was let through before and has not begun is over (expired, dropped, cancelled), or was taken back: others
        go instead. True if there was any."""
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
        """Is it slow? Called now and then while it has much of what is in flight."""
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
        """How many to begin at once. The server takes off the permits in hand: those wait for slots only."""
        rate, slots = self.limit.rate, self.limit.concurrency
        by_rate = inf if rate is None else max(1, int(rate.per_s * PERMITS_S))
        by_slots = inf if slots is None else slots - self.in_flight
        return int(max(0, min(by_rate, by_slots))) if self.thirsty else 0

    def granted(self, asked: int, granted: Granted, now_ms: int) -> bool:
        """What the server says. True when somebody may leave now."""
        self.slots = granted.slots if self.limit.concurrency is not None else 0
        if self.limit.rate is not None:
            self.permits += granted.permits
        self.thirsty = self.thirsty and asked > 0 and self._allowed(0) <= 0
        self.ask_at_ms = now_ms + granted.wait_ms
        self.renewed_ms = now_ms
        return self._allowed(self.reserved) > 0

    # -- for people ------------------------------------------------------------------------------------------------

    def why(self) -> tuple[str, str, int | None]:
        """Why its tasks wait, for programs and for people; of an open breaker, when the next probe goes out."""
        breaker, limit = self.breaker, self.limit
        if breaker is not None and breaker.state in ("open", "half-open"):
            since = f"the circuit breaker of {self.receiver} is open since {moment(breaker.opened_ms)}"
            if breaker.state == "half-open":
                return BREAKER, f"{since}, and probes are under way", None
            return BREAKER, f"{since}, and probed until it answers", breaker.next_ms
        if breaker is not None and breaker.state == "ramp":
            return BREAKER, f"the backlog of {self.receiver} goes out at a growing rate after it failed", None
        if self.key == CATCH_UP:
            return "catch-up", f"overdue tasks go out at {limit.rate}", None
        if limit.rate is not None and self.permits <= 0:
            return "rate-limited", f"{self.receiver} is rate-limited to {limit.rate}", None
        if limit.concurrency is not None:
            most = f"{limit.concurrency} on all nodes"
            return "rate-limited", f"{self.receiver} has as many under way as it may ({most})", None
        if self.slow_since_ms:
            return "slow", f"{self.receiver} is slow since {moment(self.slow_since_ms)}: others go first", None
        return "rate-limited", f"{self.receiver} is rate-limited to {limit.rate}", None
