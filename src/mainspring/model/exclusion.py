"""Times at which a schedule does not run: a date, a range of dates, or whatever a cron line matches."""

import re
from dataclasses import dataclass
from datetime import date
from typing import Final, NamedTuple

from .cron import DAY_S, Cron
from .errors import InvalidInput

_DATES: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\s*(?:\.\.|/)\s*(\d{4}-\d{2}-\d{2}))?")
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()


class Clock(NamedTuple):
    """Hours, minutes and seconds at which something may be planned, as bits."""

    hours: int = (1 << 24) - 1
    minutes: int = (1 << 60) - 1
    seconds: int = (1 << 60) - 1


@dataclass(frozen=True, slots=True)
class Days:
    """Whole days of the schedule's zone, both included."""

    first: date
    last: date

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise InvalidInput(f"exclude {self.first}..{self.last} runs backwards; give the earlier date first")

    def end_of(self, local_s: int, _planned: Clock) -> int | None:
        """The local second at which the exclusion is over; None when it does not cover this one."""
        day = local_s // DAY_S + _EPOCH_DAY
        if self.first.toordinal() <= day <= self.last.toordinal():
            return (self.last.toordinal() + 1 - _EPOCH_DAY) * DAY_S
        return None


@dataclass(frozen=True, slots=True)
class Line:
    """Whatever matches a cron line: five fields cover whole minutes, six cover seconds."""

    cron: Cron

    def end_of(self, local_s: int, planned: Clock) -> int | None:
        if not self.cron.matches(local_s):
            return None
        width_s = self._width_s(planned)
        return local_s - local_s % width_s + width_s

    def _width_s(self, planned: Clock) -> int:
        """A line that covers all that is planned in an hour or a day is left in one step: one by one may take years."""
        cron = self.cron
        if cron.with_seconds and planned.seconds & ~cron.seconds:
            return 1
        if planned.minutes & ~cron.minutes:
            return 60
        return 3600 if planned.hours & ~cron.hours else DAY_S


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
