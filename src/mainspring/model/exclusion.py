"""Times at which a schedule does not run: a date, a range of dates, or whatever a cron line matches."""

import re
from dataclasses import dataclass
from datetime import date
from typing import Final

from .cron import DAY_S, Cron
from .errors import InvalidInput

_DATES: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\s*(?:\.\.|/)\s*(\d{4}-\d{2}-\d{2}))?")
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_FULL: Final = (1 << 60) - 1
_ALL_HOURS: Final = (1 << 24) - 1


@dataclass(frozen=True, slots=True)
class Days:
    """Whole days of the schedule's zone, both included."""

    first: date
    last: date

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise InvalidInput(f"exclude {self.first}..{self.last} runs backwards; give the earlier date first")

    def end_of(self, local_s: int) -> int | None:
        """The local second at which the exclusion is over; None when it does not cover this one."""
        day = local_s // DAY_S + _EPOCH_DAY
        if self.first.toordinal() <= day <= self.last.toordinal():
            return (self.last.toordinal() + 1 - _EPOCH_DAY) * DAY_S
        return None


@dataclass(frozen=True, slots=True)
class Line:
    """Whatever matches a cron line: five fields cover whole minutes, six cover seconds."""

    cron: Cron

    def end_of(self, local_s: int) -> int | None:
        if not self.cron.matches(local_s):
            return None
        width_s = self._width_s()
        return local_s - local_s % width_s + width_s

    def _width_s(self) -> int:
        """A line that covers a whole hour or day is left in one step."""
        cron = self.cron
        if cron.with_seconds and cron.seconds != _FULL:
            return 1
        if cron.minutes != _FULL:
            return 60
        return DAY_S if cron.hours == _ALL_HOURS else 3600


Exclusion = Days | Line


def exclusion(text: str, name: str = "") -> Exclusion:
    """Read `2026-12-25`, `2026-12-24..2027-01-02`, or a cron line."""
    match = _DATES.fullmatch(text.strip())
    if match is None:
        return Line(Cron.parse(text, name))
    try:
        first, last = (date.fromisoformat(day) for day in (match[1], match[2] or match[1]))
    except ValueError as error:
        raise InvalidInput(f"exclude {text!r}: {error}; write 2026-12-25 or 2026-12-24..2027-01-02") from None
    return Days(first, last)
