"""Recurrence by a span of time: from an anchor (fixed rate), or from the end of the last run (fixed delay)."""

from dataclasses import dataclass

from .errors import InvalidInput
from .limits import HORIZON_MS
from .times import delay_ms


def _check(value_ms: int, field: str) -> None:
    if not 1 <= value_ms <= HORIZON_MS:
        raise InvalidInput(f"{field} is {value_ms} ms; it must lie between 1 ms and ten years")


@dataclass(frozen=True, slots=True)
class Every:
    """Fixed rate: anchor, anchor + interval, … whatever the runs take. Without an anchor the schedule's start is it,
    or else 1970, so that every node plans the same times."""

    interval_ms: int
    anchor_ms: int | None = None

    def __post_init__(self) -> None:
        _check(self.interval_ms, "interval")

    @classmethod
    def parse(cls, text: str, *, anchor_ms: int | None = None) -> "Every":
        """`@every 30s`, or the span alone."""
        span = text.strip()
        if span[:6].lower() == "@every":
            span = span[6:].strip()
        return cls(delay_ms(span, field="@every"), anchor_ms)

    def counts_from_ms(self, start_ms: int | None) -> int:
        return self.anchor_ms if self.anchor_ms is not None else start_ms or 0

    def next_after(self, after_ms: int, start_ms: int | None = None) -> int:
        anchor_ms = self.counts_from_ms(start_ms)
        if after_ms < anchor_ms:
            return anchor_ms
        return after_ms + self.interval_ms - (after_ms - anchor_ms) % self.interval_ms


@dataclass(frozen=True, slots=True)
class AfterEnd:
    """Fixed delay: counted from the end of the last run, so that runs never touch."""

    delay_ms: int

    def __post_init__(self) -> None:
        _check(self.delay_ms, "delay")

    def next_after(self, after_ms: int, ended_ms: int | None) -> int:
        """Without an end (it never ran, or this is a preview) it counts from `after_ms`."""
        return max(after_ms + 1, (after_ms if ended_ms is None else ended_ms) + self.delay_ms)
