"""What the log says of failed deliveries when nobody else looks after them.

A failure that is tried again is a warning; a dead task, and one that parks its lane, an error. A target that fails over
and over gets a line at first and then one that sums up every few seconds, however many tasks it fails. What receivers
and handlers wrote stays with the task: it may hold what they were sent.
"""

import asyncio
import logging
from typing import Final

from ..model.explain import moment
from ..model.failure import Failure
from ..model.targets import receiver_of, shown_target
from ..model.wordless import wordless

log = logging.getLogger("mainspring.failures")

QUIET_S: Final = 10.0
"""So long a receiver's further failures are only counted."""

FIRST_DEAD: Final = 5
"""Dead tasks that are told one by one before they are summed up: each is one that somebody waits for."""

_MOST_RECEIVERS: Final = 1_000
_MANY: Final[dict[str, str]] = {"retry": "failed attempts", "dead": "tasks died", "parked": "lanes were parked"}


class FailureLog:
    """One line for the first, one for the sum of the others."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _Tally] = {}

    def take(self, failure: Failure) -> None:
        key = (receiver_of(failure.target), failure.outcome)
        tally = self._open.get(key)
        if tally is None:
            if len(self._open) >= _MOST_RECEIVERS:
                key = ("other targets", failure.outcome)
            tally = self._open.setdefault(key, _Tally())
            if tally.timer is None:
                tally.timer = asyncio.get_running_loop().call_later(QUIET_S, self._sum_up, key)
        tally.seen += 1
        if tally.seen <= (1 if failure.outcome == "retry" else FIRST_DEAD):
            _tell(failure)
        else:
            tally.untold += 1
            tally.last = failure

    def flush(self) -> None:
        """Tell what was only counted so far."""
        for key in list(self._open):
            self._sum_up(key, again=False)

    def _sum_up(self, key: tuple[str, str], *, again: bool = True) -> None:
        tally = self._open.pop(key)
        if tally.timer is not None:
            tally.timer.cancel()
        if tally.last is None:
            return
        receiver, outcome = key
        level = logging.WARNING if outcome == "retry" else logging.ERROR
        log.log(level, "%s: %d more %s; the last: task %s, %s", receiver, tally.untold, _MANY[outcome], tally.last.id,
                _why(tally.last), extra={"task": tally.last.id, "target": receiver})  # fmt: skip
        if again:
            # It went on failing: the next sum comes after another pause, without a first line in between.
            fresh = self._open[key] = _Tally()
            fresh.seen = FIRST_DEAD
            fresh.timer = asyncio.get_running_loop().call_later(QUIET_S, self._sum_up, key)


class _Tally:
    __slots__ = ("last", "seen", "timer", "untold")

    def __init__(self) -> None:
        self.seen = 0
        self.untold = 0
        self.last: Failure | None = None
        self.timer: asyncio.TimerHandle | None = None


def _why(failure: Failure) -> str:
    return failure.brief or failure.error


def _tell(failure: Failure) -> None:
    target = shown_target(failure.target)
    about = {"task": failure.id, "target": target}
    # A sink that knows what went wrong leaves no trace; of a bug it is worth the lines.
    error = failure.exception
    trace = wordless(error) if error is not None and error.__traceback__ is not None else None
    if failure.outcome == "dead":
        log.error(
            "task %s to %s is dead after %d attempts: %s", failure.id, target, failure.attempts, _why(failure),
            exc_info=trace, extra=about,
        )  # fmt: skip
    elif failure.outcome == "parked":
        log.error(
            "task %s to %s failed, and its lane %s is parked until somebody acts: %s", failure.id, target, failure.lane,
            _why(failure), exc_info=trace, extra=about,
        )  # fmt: skip
    else:
        at = "" if failure.next_at_ms is None else f"; again at {moment(failure.next_at_ms)}"
        log.warning(
            "task %s to %s: attempt %d failed: %s%s", failure.id, target, failure.attempt, _why(failure), at,
            exc_info=trace, extra=about,
        )  # fmt: skip
