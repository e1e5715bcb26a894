"""What the engine counts, for `/metrics`. Filled for each batch, not for each task: nobody may wait for it."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Final

from ..model.metrics import SECONDS, Histogram
from ..model.outcome import DROPPED, has_expired
from .flight import Flight
from .live import LiveSlice

_KEY: Final = attrgetter("key")
_ROW: Final = attrgetter("row")
_BOUNDS_MS: Final = tuple(int(seconds * 1000) for seconds in SECONDS)
"""Lateness is a whole number of milliseconds: a bound of 2.5 ms says the same as one of 2."""


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

    def expect(self, kinds: Collection[str]) -> None:
        """Tell 0 of what rarely happens: a count that first shows up as 1 has risen by nothing, and raises no alert."""
        for counts in (self.dead, self.expired):
            counts.update(dict.fromkeys(kinds, 0))

    def settled(self, kind: str, took_s: float, done: int) -> None:
        """One call of a sink is over."""
        took_s = max(0.0, took_s)
        self.sink[kind].observe(took_s)
        if done:
            self.delivery[kind].observe(took_s, done)
            self.delivered[kind] += done

    def buried(self, kind: str, reason: str) -> None:
        """A task is over without having been delivered."""
        if has_expired(reason):
            self.expired[kind] += 1
        elif reason.startswith(DROPPED):
            self.skipped["paused"] += 1
        else:
            self.dead[kind] += 1

    def began_late(self, kind: str, live: LiveSlice, flights: Sequence[Flight], began_ms: int) -> None:
        """Tasks of one slice, in the order in which they left it."""
        histogram = self.lateness[kind]
        since_ms = began_ms - live.from_ms
        if len(flights) > 1 and live.slice.end_ms <= began_ms:
            # One that was overdue as a whole may have left in any order: its ends are those of its time.
            if bisect_left(_BOUNDS_MS, since_ms) == bisect_left(_BOUNDS_MS, since_ms - live.slice.width_ms):
                _add(histogram, flights[0], flights[-1], len(flights), since_ms)
                return
            _add_unsorted(histogram, flights, since_ms, live.slice.width_ms)
            return
        if live.has_lanes or live.has_schedules:
            flights = sorted(flights, key=_KEY)  # these leave when it is their turn
        _add_run(histogram, flights, since_ms)


def _add_unsorted(histogram: Histogram, flights: Sequence[Flight], since_ms: int, width_ms: int) -> None:
    """Flights in any order: for each bound among them, how many are later than it. Sorting them would cost more.

    An entry begins with its offset, so it is less than the bytes of an offset if its own is.
    """
    rows = list(map(_ROW, flights))
    counted, since_offset = 0, 0
    for bound_ms in reversed(_BOUNDS_MS):
        offset = since_ms - bound_ms
        if 0 < offset < width_ms:
            later = sum(map(offset.to_bytes(4, "big").__gt__, rows))
            _observe(histogram, since_ms - (since_offset + offset - 1) / 2, later - counted)
            counted, since_offset = later, offset
    _observe(histogram, since_ms - (since_offset + width_ms - 1) / 2, len(rows) - counted)


def _add_run(histogram: Histogram, flights: Sequence[Flight], since_ms: int) -> None:
    """Flights with rising offsets, so with falling lateness: for each bound among them, how many are later than it."""
    start = 0
    latest = bisect_left(_BOUNDS_MS, since_ms - _offset(flights[0]))
    soonest = bisect_left(_BOUNDS_MS, since_ms - _offset(flights[-1]))
    for at in range(latest - 1, soonest - 1, -1):
        # Later than the bound: due before (since - bound), which is the offset of none before the first.
        stop = bisect_left(flights, (since_ms - _BOUNDS_MS[at]).to_bytes(4, "big"), start, key=_ROW)
        if stop > start:
            _add(histogram, flights[start], flights[stop - 1], stop - start, since_ms)
        start = stop
    if start < len(flights):
        _add(histogram, flights[start], flights[-1], len(flights) - start, since_ms)


def _add(histogram: Histogram, first: Flight, last: Flight, count: int, since_ms: int) -> None:
    """So many of one bucket; their sum is estimated from the first and the last."""
    _observe(histogram, since_ms - (_offset(first) + _offset(last)) / 2, count)


def _offset(flight: Flight) -> int:
    return int.from_bytes(flight.row[:4], "big")


def _observe(histogram: Histogram, late_ms: float, count: int) -> None:
    if count:
        histogram.observe(max(0.0, late_ms) / 1000, count)
