"""What a worker counts of its runs, for `/metrics`."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, Literal

from ..model.clock import Clock
from ..model.job import Cancelled, Job
from ..model.metrics import Histogram
from ..model.outcome import Dead, Outcome, Retry, has_expired
from .run import Run

RunFate = Literal["done", "failed", "dead", "expired", "cancelled", "lost"]

FATES: Final[Mapping[RunFate, str]] = {
    "done": "Runs that ended well.",
    "failed": "Runs that failed, and whose tasks are tried again.",
    "dead": "Tasks that this worker gave up: dead letters.",
    "expired": "Tasks that were not run, or not to their end, by the time they expire.",
    "cancelled": "Runs that were cancelled.",
    "lost": "Runs that do not count, because another worker has the task by now.",
}


class RunMeters:
    """By kind of target: the word before the colon."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.counts: dict[RunFate, Counter[str]] = {fate: Counter() for fate in FATES}
        self.lateness: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Due to the begin of the run: also the wait for a worker is in it."""
        self.took: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Begin to done."""

    def expect(self, kinds: frozenset[str]) -> None:
        """Tell 0 of what rarely happens: a count that first shows up as 1 has risen by nothing, and raises no alert."""
        for counts in self.counts.values():
            counts.update(dict.fromkeys(kinds, 0))

    def ended(self, run: Run, fate: RunFate) -> None:
        kind = _kind_of(run.job)
        self.counts[fate][kind] += 1
        if run.started:
            took_s = time.monotonic() - run.started
            since_due_s = (self._clock.now_ms() - run.job.due_ms) / 1000
            self.lateness[kind].observe(max(0.0, since_due_s - took_s))
            if fate == "done":
                self.took[kind].observe(took_s)

    def ended_unbegun(self, job: Job, fate: RunFate) -> None:
        self.counts[fate][_kind_of(job)] += 1


def fate_of(outcome: Outcome | Cancelled) -> RunFate:
    match outcome:
        case Cancelled():
            return "cancelled"
        case Retry():
            return "failed"
        case Dead():
            return "expired" if has_expired(outcome.reason) else "dead"
        case _:
            return "done"


def _kind_of(job: Job) -> str:
    """Of an entry that cannot be read the target is unknown; it came from a queue."""
    return job.body.target.partition(":")[0] or "queue"
