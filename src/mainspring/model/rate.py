"""Rates as people write them: `100/s`, `30/m`, `1000/h burst 50`."""

import math
import re
from dataclasses import dataclass
from typing import Final

from .errors import InvalidInput

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(s|m|h|d)(?:\s+burst[ =](\d+))?")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SMOOTH_S: Final = 0.1
"""Without a burst given, so much of a rate may come at once."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At most so many a second on average, and `burst` at once after a pause."""

    per_s: float
    burst: int = 0
    """0 takes a tenth of a second's worth, one at least."""

    def __post_init__(self) -> None:
        if not 1 / 86_400 <= self.per_s <= 100_000_000:
            raise InvalidInput(f"rate: {self.per_s:g} a second; it must lie between one a day and 100,000,000 a second")
        if not 0 <= self.burst <= 100_000_000:
            raise InvalidInput(f"rate: the burst is {self.burst}; it must lie between 1 and 100,000,000")

    @classmethod
    def read(cls, value: object) -> "Rate":
        """From a setting; a bare number is a second's."""
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
        raise InvalidInput(f"rate: {value!r} is none; write '100/s', '30/m' or '1000/h burst 50'")

    @property
    def at_once(self) -> int:
        return self.burst or max(1, math.floor(self.per_s * _SMOOTH_S))

    @property
    def interval_us(self) -> float:
        """Between two of them."""
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
    """At one time."""

    def __post_init__(self) -> None:
        if self.concurrency is not None and not 1 <= self.concurrency <= 1_000_000:
            raise InvalidInput(f"concurrency is {self.concurrency}; it must lie between 1 and 1,000,000")

    def __bool__(self) -> bool:
        return self.rate is not None or self.concurrency is not None
