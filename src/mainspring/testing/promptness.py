"""The rule of promptness: when nothing is broken any more, all that is due is delivered within a given time."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from .events import Accepted, Event, Healed, Left, Stall
from .fault_windows import Faults, Stalls
from .lives import Life, Lives

_OPEN: Final = frozenset({"pending", "fired"})


class Wait(NamedTuple):
    """How long one task took to be delivered once nothing hindered it."""

    accepted: Accepted
    since_us: int
    """When it was due, known, its last failure told, and all was healed."""
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
    left = {event.task: event for event in events if isinstance(event, Left)}
    for life in lives.values():
        accepted = life.accepted
        if _awaited(life) and not faults.forgave(accepted):
            since_us = max(healed.at_us, accepted.at_us, accepted.due_ms * 1000, life.failed_us)
            wait = _wait(life, since_us, healed.within_us, stalls)
            last = left.get(accepted.task)
            if last is None or (last.state in _OPEN and last.at_us > wait.since_us + wait.allowed_us):
                yield wait


def _awaited(life: Life) -> bool:
    ended = life.doubted or life.cancelled is not None or life.superseded is not None
    return life.accepted.sure and not ended


def _wait(life: Life, since_us: int, within_us: int, stalls: Stalls) -> Wait:
    """Only what stood still while it had to be delivered counts."""
    last_us = since_us + within_us if life.done_us is None else max(since_us, life.done_us)
    spent_us = None if life.done_us is None else last_us - since_us
    return Wait(life.accepted, since_us, spent_us, stalls.between(since_us, last_us), within_us)
