"""The rule of promptness: when nothing is broken any more, all that is due is delivered within a given time."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple

from .events import Accepted, Event, Finished, Healed, Left, Stall
from .fault_windows import Faults, Stalls
from .lives import Life, Lives

_OPEN: Final = frozenset({"pending", "fired", "queued", "running"})


class Wait(NamedTuple):
    """How long one task took to be delivered once nothing hindered it."""

    accepted: Accepted
    since_us: int
    """When it was due and known, all was healed, and neither it nor one before it in its lane had to try again."""
    spent_us: int | None
    """Until its target had it; None: it never had."""
    stalled_us: int
    """So much of that the machine gave to nobody, by measurement."""
    within_us: int

    @property
    def allowed_us(self) -> int:
        return self.within_us + self.stalled_us

    @property
    def rank(self) -> float:
        return float("inf") if self.spent_us is None else float(self.spent_us - self.stalled_us)


def waits(events: list[Event], lives: Lives, faults: Faults) -> Iterator[Wait]:
    """Of every task that had to be delivered, by the last `Healed`; events in order of time."""
    healed = next((event for event in reversed(events) if isinstance(event, Healed)), None)
    if healed is None:
        return
    stalls = Stalls(event for event in events if isinstance(event, Stall) and event.until_us > healed.at_us)
    failed = _failed_in_lanes(events, lives)
    left = {event.task: event for event in events if isinstance(event, Left)}
    for life in lives.values():
        accepted = life.accepted
        if _awaited(life) and not faults.forgave(accepted):
            since_us = max(healed.at_us, accepted.at_us, accepted.due_ms * 1000, _failed_us(life, failed))
            wait = _wait(life, since_us, healed.within_us, stalls)
            last = left.get(accepted.task)
            if last is None or (last.state in _OPEN and last.at_us > wait.since_us + wait.allowed_us):
                yield wait


def _failed_in_lanes(events: list[Event], lives: Lives) -> dict[str, list[int]]:
    """By lane, when attempts failed: a failing head holds its lane until it is tried again."""
    failed: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, Finished) and event.ending == "retry" and event.key in lives:
            lane = lives[event.key].accepted.lane
            if lane is not None:
                failed[lane].append(event.at_us)
    return failed


def _failed_us(life: Life, failed: dict[str, list[int]]) -> int:
    """The last failure that it had to wait for: its own, or in its lane."""
    lane = life.accepted.lane
    if lane is None or life.done_us is None:
        return life.failed_us
    before = bisect_right(failed.get(lane, []), life.done_us)
    return failed[lane][before - 1] if before else 0


def _awaited(life: Life) -> bool:
    ended = life.doubted or life.cancelled is not None or life.superseded is not None
    return life.accepted.sure and not ended


def _wait(life: Life, since_us: int, within_us: int, stalls: Stalls) -> Wait:
    """Only what stood still while it had to be delivered counts."""
    last_us = since_us + within_us if life.done_us is None else max(since_us, life.done_us)
    spent_us = None if life.done_us is None else last_us - since_us
    return Wait(life.accepted, since_us, spent_us, stalls.between(since_us, last_us), within_us)
