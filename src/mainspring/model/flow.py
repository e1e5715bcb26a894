"""Flow control: rates as people write them, and circuit breakers. Pure: the caller passes the time.

closed --too many failures--> open --its time is over--> half-open --probes succeed--> ramp --all is well--> closed
                               ^                            |                           |
                               +--------- a probe fails ----+---- too many failures ----+
"""

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, log2
from typing import Any, Final, Literal

from .errors import InvalidInput
from .text import check_known
from .times import delay_ms, delay_text

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(s|m|h|d)(?:\s+burst[ =](\d+))?")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SMOOTH_S: Final = 0.1
"""Default burst: this many seconds' worth of the rate."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `per_s` per second on average, and `burst` at once after a pause."""

    per_s: float
    burst: int = 0
    """0 means a tenth of a second's worth, at least 1."""

    def __post_init__(self) -> None:
        if not 1 / 86_400 <= self.per_s <= 100_000_000:
            raise InvalidInput(f"rate: {self.per_s:g} a second; it must lie between one a day and 100,000,000 a second")
        if not 0 <= self.burst <= 100_000_000:
            raise InvalidInput(f"rate: the burst is {self.burst}; it must lie between 1 and 100,000,000")

    @classmethod
    def read(cls, value: object) -> "Rate":
        """Read a setting; a bare number is per second."""
        if isinstance(value, cls):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return cls(float(value))
        if isinstance(value, str):
            if found := _RATE.fullmatch(value.strip()):
                return cls(float(found[1]) / _SECONDS[found[2]], int(found[3] or 0))
            try:
                return cls(float(value))
            except ValueError:
                pass
        raise InvalidInput(f"rate: {value!r} is not a rate; write '100/s', '30/m' or '1000/h burst 50'")

    @property
    def at_once(self) -> int:
        return self.burst or max(1, math.floor(self.per_s * _SMOOTH_S))

    @property
    def interval_us(self) -> float:
        """Microseconds between two permits."""
        return 1e6 / self.per_s

    def __str__(self) -> str:
        unit = next(unit for unit in ("s", "m", "h", "d") if self.per_s * _SECONDS[unit] >= 1 or unit == "d")
        burst = f" burst {self.burst}" if self.burst else ""
        return f"{self.per_s * _SECONDS[unit]:.12g}/{unit}{burst}"


@dataclass(frozen=True, slots=True)
class Limit:
    """What all nodes together may send to a target, or hand to a queue."""

    rate: Rate | None = None
    concurrency: int | None = None
    """Tasks in flight at the same time."""

    def __post_init__(self) -> None:
        if self.concurrency is not None and not 1 <= self.concurrency <= 1_000_000:
            raise InvalidInput(f"concurrency is {self.concurrency}; it must lie between 1 and 1,000,000")

    def __bool__(self) -> bool:
        return self.rate is not None or self.concurrency is not None


BreakerState = Literal["closed", "open", "half-open", "ramp"]

_BUCKETS: Final = 10
"""Steps in which the window slides."""

RAMP_FIRST: Final = 10.0
"""Tasks per second at the start of a ramp; the rate doubles ten times until its end, and is unlimited then."""

_DOUBLINGS: Final = 10


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a breaker opens, and how it closes again."""

    failure_rate: float = 0.5
    """Share of failed calls in the window at which it opens."""
    min_calls: int = 20
    """Fewer calls than this in the window never open it."""
    window_ms: int = 30_000
    open_ms: int = 5_000
    """How long it stays open the first time; twice as long each time a probe fails."""
    max_open_ms: int = 300_000
    probes: int = 3
    """Deliveries that must all succeed before it closes."""
    ramp_ms: int = 30_000
    """How long the backlog is sent at a growing rate before the limit ends; 0 sends it at once."""
    off: bool = False

    def __post_init__(self) -> None:
        if not 0.01 <= self.failure_rate <= 1:
            raise InvalidInput(f"failure_rate is {self.failure_rate}; it must lie between 0.01 and 1")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidInput(f"{name.removesuffix('_ms')} is {value}; it must lie between {low} and {high}")
        if self.max_open_ms < self.open_ms:
            raise InvalidInput("max_open is less than open")

    @classmethod
    def read(cls, value: object) -> "BreakerPolicy":
        """Read a table, `off`, or a line: `failure_rate=0.3 open=10s`."""
        if value is False or value == "off":
            return cls(off=True)
        if isinstance(value, str):
            value = dict(_pair(part) for part in value.replace(",", " ").split())
        if not isinstance(value, Mapping):
            raise InvalidInput(f"expected a table of settings, or 'off', not {value!r}")
        known = {field.name.removesuffix("_ms"): field.name for field in fields(cls) if field.name != "off"}
        check_known(value, known, "a breaker", ", or 'off' as a whole")
        return cls(**{known[name]: _read(known[name], one) for name, one in value.items()})

    def __str__(self) -> str:
        """Return the line from which `read` makes this policy again."""
        if self.off:
            return "off"
        shown = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "off")
        return " ".join(
            f"{name.removesuffix('_ms')}={delay_text(value) if name.endswith('_ms') else value}"
            for name, value in shown
        )


_RANGES: Final = (
    ("min_calls", 1, 1_000_000),
    ("window_ms", 100, 86_400_000),
    ("open_ms", 10, 86_400_000),
    ("max_open_ms", 10, 86_400_000),
    ("probes", 1, 1_000),
    ("ramp_ms", 0, 86_400_000),
)


def _pair(part: str) -> tuple[str, str]:
    name, given, value = part.partition("=")
    if not given:
        raise InvalidInput(f"{part!r} is not name=value")
    return name, value


def _read(field: str, value: Any) -> Any:
    if field.endswith("_ms"):
        return delay_ms(value, field=field.removesuffix("_ms"))
    try:
        return float(value) if field == "failure_rate" else int(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{field}: expected a number, not {value!r}") from None


IDLE_MS: Final = 600_000
"""A breaker closes after this long without a task for its receiver, counted from when a probe could have been sent."""


class Breaker:
    """The breaker of one receiver on one node."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self.state: BreakerState = "closed"
        self.since_ms = 0
        """When the breaker entered its state."""
        self.opened_ms = 0
        """When the breaker last left the closed state."""
        self.next_ms = 0
        """When an open breaker probes again."""
        self._open_ms = policy.open_ms
        self._calls: deque[list[int]] = deque()
        """[start of the bucket, successes, failures]"""
        self._probes_out = 0
        self._probes_done = 0
        self._allowance = 0.0
        self._allowed_at_ms = 0

    # -- results -----------------------------------------------------------------------------------------------

    def record(self, done: int, failed: int, now_ms: int, *, refused: int = 0) -> BreakerState:
        """Record deliveries that succeeded, failed, or were refused for good; return the new state.

        Refused deliveries say nothing about the health of the receiver. If they were probes, others take their place: a
        healthy receiver may refuse many tasks before it accepts one.
        """
        match self.state:
            case "half-open" if failed:
                self._open(now_ms, self._open_ms * 2)
            case "half-open":
                self._probes_done += done
                self.stayed(refused)
                if self._probes_done >= self._policy.probes:
                    self._enter("ramp" if self._policy.ramp_ms else "closed", now_ms)
            case "closed" | "ramp":
                self._count(done, failed, now_ms)
                if failed and self._fails_too_often:
                    longer = self.state == "ramp"
                    self.opened_ms = self.opened_ms if longer else now_ms
                    self._open(now_ms, self._open_ms * 2 if longer else self._policy.open_ms)
            case "open":
                pass  # begun before it opened: says nothing new about the receiver
        return self.state

    def _count(self, done: int, failed: int, now_ms: int) -> None:
        step = max(1, self._policy.window_ms // _BUCKETS)
        bucket = now_ms - now_ms % step
        while self._calls and self._calls[0][0] <= bucket - self._policy.window_ms:
            self._calls.popleft()
        if not self._calls or self._calls[-1][0] < bucket:
            self._calls.append([bucket, 0, 0])
        self._calls[-1][1] += done
        self._calls[-1][2] += failed

    @property
    def _fails_too_often(self) -> bool:
        failed = sum(bucket[2] for bucket in self._calls)
        calls = failed + sum(bucket[1] for bucket in self._calls)
        return calls >= self._policy.min_calls and failed >= calls * self._policy.failure_rate

    def _open(self, now_ms: int, open_ms: int) -> None:
        self._open_ms = min(open_ms, self._policy.max_open_ms)
        self._enter("open", now_ms)
        self.next_ms = now_ms + self._open_ms

    def _enter(self, state: BreakerState, now_ms: int) -> None:
        self.state, self.since_ms = state, now_ms
        self._calls.clear()
        self._probes_out = self._probes_done = 0
        self._allowance, self._allowed_at_ms = 0.0, now_ms
        if state == "closed":
            self._open_ms = self._policy.open_ms

    def suspect(self, since_ms: int, now_ms: int) -> None:
        """Be careful with a receiver that a former owner found failing: its backlog must not be sent at once.

        If it answered here lately, the ramp begins at the rate it took then, so that a healthy receiver is not slowed
        down. Otherwise it is probed first.
        """
        if self.state != "closed":
            return
        self.opened_ms = since_ms
        self.next_ms = now_ms
        proven = self._answered_per_s(now_ms)
        if not proven:
            self._enter("half-open", now_ms)
        elif self._policy.ramp_ms:
            self._enter("ramp", now_ms)
            doublings = min(_DOUBLINGS, log2(max(1.0, proven / RAMP_FIRST)))
            self.since_ms -= round(self._policy.ramp_ms * doublings / _DOUBLINGS)

    def _answered_per_s(self, now_ms: int) -> float:
        """Return the successes per second in the window; 0 if they are fewer than the required probes."""
        lately = [bucket for bucket in self._calls if bucket[0] > now_ms - self._policy.window_ms]
        done = sum(bucket[1] for bucket in lately)
        if done < self._policy.probes:
            return 0.0
        return done * 1000 / max(1_000, now_ms - lately[0][0])

    # -- permits -------------------------------------------------------------------------------------------------

    def room(self, now_ms: int) -> float:
        """Return how many more tasks may leave now; infinite while the breaker is closed."""
        if self.state == "open" and now_ms >= self.next_ms:
            self._enter("half-open", now_ms)
        if self.state == "half-open" and self._probes_out and now_ms >= self.next_ms:
            self._probes_out = self._probes_done  # the outcome of some probes was never reported
        if self.state == "ramp" and now_ms >= self.since_ms + self._policy.ramp_ms:
            self._enter("closed", now_ms)
        match self.state:
            case "closed":
                return inf
            case "open":
                return 0
            case "half-open":
                return max(0, self._policy.probes - self._probes_out)
            case "ramp":
                return int(self._refill(now_ms))

    def took(self, count: int, now_ms: int) -> None:
        """Count tasks that left."""
        if self.state == "half-open" and count:
            self._probes_out += count
            self.next_ms = now_ms + self._open_ms
        elif self.state == "ramp":
            self._allowance -= count

    def stayed(self, count: int) -> None:
        """Free the places of tasks that did not leave, or were no probes."""
        if self.state == "half-open":
            self._probes_out = max(self._probes_done, self._probes_out - count)
        elif self.state == "ramp":
            self._allowance += count

    def rest(self, now_ms: int) -> bool:
        """Close if nothing was sent for long, or a ramp is over; return True if it closed.

        Otherwise the breaker of a receiver without further tasks would stay open for ever.
        """
        if self.state == "ramp":
            rests = now_ms >= self.since_ms + self._policy.ramp_ms
        else:
            rests = self.state != "closed" and now_ms >= max(self.since_ms, self.next_ms) + IDLE_MS
        if rests:
            self._enter("closed", now_ms)
        return rests

    def _refill(self, now_ms: int) -> float:
        rate = self.ramp_rate(now_ms)
        passed_s = max(0, now_ms - self._allowed_at_ms) / 1000
        self._allowed_at_ms = now_ms
        # Never more at once than a tenth of a second's worth, so that the rate grows smoothly.
        self._allowance = min(self._allowance + passed_s * rate, max(1.0, rate / 10))
        return self._allowance

    def ramp_rate(self, now_ms: int) -> float:
        """Return the tasks per second at this moment of a ramp."""
        part = min(1.0, (now_ms - self.since_ms) / max(1, self._policy.ramp_ms))
        return float(RAMP_FIRST * 2 ** (_DOUBLINGS * part))
