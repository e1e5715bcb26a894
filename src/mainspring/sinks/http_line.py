"""The queue of one target, or of all on a host that have no limits of their own."""

import time
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Final

from ..model.outcome import Retry
from ..model.rate import Rate
from .http_load import Load, Pulse

SOONEST_S: Final = 1.0
LATEST_S: Final = 300.0
"""When a task that was put off comes again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one host, or of one target on it."""

    concurrency: int
    rate: Rate | None = None


class Pace:
    """Not faster than a rate: one after the other, or after a pause as many at once as its burst says."""

    __slots__ = ("_ahead_s", "_interval_s", "next_at")

    def __init__(self, rate: Rate | None) -> None:
        self._interval_s = 0.0 if rate is None else 1 / rate.per_s
        self._ahead_s = 0.0 if rate is None else self._interval_s * (max(1, rate.burst) - 1)
        self.next_at = -inf
        """When all that went is accounted for. A burst goes ahead of that."""

    def wait_s(self) -> float:
        """Until the next may go; 0 or less when it may go now."""
        return self.next_at - self._ahead_s - time.monotonic() if self._interval_s else 0.0

    def took(self) -> None:
        if self._interval_s:
            self.next_at = max(time.monotonic(), self.next_at) + self._interval_s


class Line:
    """What waits, first come first served, and how much of it is under way."""

    def __init__(self, limits: Limits) -> None:
        self.most = limits.concurrency
        self.loads: deque[Load] = deque()
        self.busy = 0
        self.waiting = 0
        self.pace = Pace(limits.rate)
        self.pulse = Pulse(float(limits.concurrency))
        self._booked_until = -inf

    @property
    def idle(self) -> bool:
        # Kept while its rate or its bookings still mean something: forgotten, they would start afresh.
        now = time.monotonic()
        return not self.busy and not self.loads and max(self.pace.next_at, self._booked_until) <= now

    def begin(self) -> tuple[Load, int]:
        load = self.loads[0]
        at = load.next
        load.next += 1
        if load.next == load.end:
            self.loads.popleft()
        self.waiting -= 1
        self.busy += 1
        self.pace.took()
        return load, at

    def put_off(self) -> Retry:
        """Each comes a little after the one before, as fast as they were taken lately."""
        now = time.monotonic()
        self._booked_until = max(self._booked_until, now + SOONEST_S) + 1 / self.pulse.rate()
        self._booked_until = min(self._booked_until, now + LATEST_S)
        after_ms = round((self._booked_until - now) * 1000)
        return Retry("the host is busy; put off without an attempt", after_ms, untried=True)
