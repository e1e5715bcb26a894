"""What the engine counts, for `/metrics`. Filled for each batch, not for each task: nobody may wait for it."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from ..model.metrics import SECONDS, Histogram
from ..model.outcome import DROPPED, EXPIRED
from .flight import Flight
from .live import LiveSlice

_KEY: Final = attrgetter("key")
_BOUNDS_MS: Final = tuple(int(seconds * 1000) for seconds in SECONDS)
"""Lateness is a whole number of milliseconds: a bound of 2.5 ms says the same as one of 2."""
_FEW: Final = 24
"""Up to so many tasks of one slice are looked at one by one; of more, only where the bounds lie among them."""


class Meters:
    """By kind of target: the word before the colon."""

    def __init__(self) -> None:
        self.fired: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self.dead: Counter[str] = Counter()
        self.expired: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        """By reason: what was not delivered because it was not wanted any more."""
        self.lateness: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Due to begin."""
        self.delivery: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Begin to done, of each task."""
        self.sink: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Of each call of a sink, which may be for thousands of tasks."""

    def settled(self, kind: str, took_s: float, done: int) -> None:
        """One call of a sink is over."""
        took_s = max(0.0, took_s)
        self.sink[kind].observe(took_s)
        if done:
            self.delivery[kind].observe(took_s, done)
            self.delivered[kind] += done

    def buried(self, kind: str, reason: str) -> None:
        """A task is over without having been delivered."""
        if reason == EXPIRED:
            self.expired[kind] += 1
        elif reason.startswith(DROPPED):
            self.skipped["paused"] += 1
        else:
            self.dead[kind] += 1

    def began_late(self, kind: str, live: LiveSlice, flights: Sequence[Flight], began_ms: int) -> None:
        """Tasks of one slice, in the order in which they left it."""
        histogram = self.lateness[kind]
        since_ms = began_ms - live.from_ms
        if len(flights) <= _FEW:
            for flight in flights:
                histogram.observe(max(0, since_ms - (flight.key >> 32)) / 1000)
            return
        first_ms, last_ms = since_ms - (flights[0].key >> 32), since_ms - (flights[-1].key >> 32)
        if live.slice.end_ms <= began_ms:
            # One that was overdue as a whole may have left in any order: its ends are those of its time.
            if _bucket(since_ms) == _bucket(since_ms - live.slice.width_ms):
                histogram.observe((first_ms + last_ms) / 2000, len(flights))
                return
            flights = sorted(flights, key=_KEY)
        _observe_run(histogram, flights, since_ms)


def _bucket(late_ms: int) -> int:
    return bisect_left(_BOUNDS_MS, late_ms)


def _observe_run(histogram: Histogram, flights: Sequence[Flight], since_ms: int) -> None:
    """Flights with rising keys, so with falling lateness: for each bound, how many are later than it."""
    end = len(flights)
    start = 0
    for at in range(len(_BOUNDS_MS) - 1, -2, -1):
        if start >= end:
            return
        # Later than the bound: due before (since - bound).
        stop = _later_than(flights, since_ms - _BOUNDS_MS[at], start) if at >= 0 else end
        if stop > start:
            ends_ms = 2 * since_ms - (flights[start].key >> 32) - (flights[stop - 1].key >> 32)
            histogram.counts[at + 1] += stop - start
            histogram.total_s += max(0, ends_ms) / 2000 * (stop - start)
        start = stop


def _later_than(flights: Sequence[Flight], offset_ms: int, start: int) -> int:
    low, high = start, len(flights)
    while low < high:
        middle = (low + high) // 2
        if flights[middle].key >> 32 < offset_ms:
            low = middle + 1
        else:
            high = middle
    return low
