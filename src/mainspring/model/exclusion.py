"""Times at which a schedule does not run: a date, a range of dates, or whatever a cron line matches."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import reduce
from operator import or_
from typing import Final, TypeVar

from .cron import DAY_S, Cron
from .day_plan import DayPlan, Spec, day_plan
from .errors import InvalidInput

_DATES: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\s*(?:\.\.|/)\s*(\d{4}-\d{2}-\d{2}))?")
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_WHOLE: Final = (1 << 60) - 1
_ALL_DAY: Final = (1 << 24) - 1
_DAYS_KEPT: Final = 32
T = TypeVar("T")


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

    @property
    def seconds(self) -> int:
        return self.cron.seconds if self.cron.with_seconds else _WHOLE

    def covers(self, hour: int, minute: int) -> bool:
        """On its days, and at some seconds at least."""
        return bool(self.cron.hours >> hour & 1 and self.cron.minutes >> minute & 1)


Exclusion = Days | Line


class LeftOut:
    """All exclusions of a schedule, and what it plans. Hours and days of which nothing is left are passed in one step,
    also where several lines cover them only together: by single times the search would take years, and give up."""

    __slots__ = ("_hours", "_lines", "_planned", "_ranges", "_start_ms")

    def __init__(self, every: Sequence[Exclusion], planned: Sequence[Spec], start_ms: int | None = None) -> None:
        """`planned` are the specs of the schedule; its start is what intervals count from."""
        self._ranges = [one for one in every if isinstance(one, Days)]
        self._lines = [one for one in every if isinstance(one, Line)]
        self._planned = planned
        self._start_ms = start_ms
        self._hours: dict[tuple[int, int, int], int] = {}
        """By the lines of both that hold on a day, as bits, and the offset: the hours of which nothing is left."""

    def end_of(self, local_s: int, offset_s: int) -> int | None:
        """The local second up to which nothing that is planned is left, while the offset stays; None when this one
        is."""
        if ends := [end_s for one in self._ranges if (end_s := one.end_of(local_s)) is not None]:
            return max(ends)
        lines = _bits(line.cron.on_day(local_s) for line in self._lines)
        hour, minute, second = local_s // 3600 % 24, local_s // 60 % 60, local_s % 60
        seconds = _together(line.seconds for line in _chosen(self._lines, lines) if line.covers(hour, minute))
        if not seconds >> second & 1:
            return None
        planned = _bits(not isinstance(one, Cron) or one.on_day(local_s) for one in self._planned)
        hours = self._hours_of(lines, planned, offset_s)
        if hours == _ALL_DAY:
            width_s = DAY_S
        elif hours >> hour & 1:
            width_s = 3600
        else:
            wanted = _together(plan.minutes[hour * 60 + minute] for plan in self._plans(planned, offset_s))
            width_s = 1 if wanted & ~seconds else 60
        return local_s - local_s % width_s + width_s

    def _plans(self, planned: int, offset_s: int) -> list[DayPlan]:
        return [day_plan(one, self._start_ms, offset_s) for one in _chosen(self._planned, planned)]

    def _hours_of(self, lines: int, planned: int, offset_s: int) -> int:
        """Most days are like the day before, so a few answers are enough."""
        hours = self._hours.get((lines, planned, offset_s))
        if hours is None:
            if len(self._hours) >= _DAYS_KEPT:
                self._hours.clear()
            plans = self._plans(planned, offset_s)
            there = _chosen(self._lines, lines)
            hours = _bits(all(_is_covered(plan, hour, there) for plan in plans) for hour in range(24))
            self._hours[lines, planned, offset_s] = hours
        return hours


def _is_covered(plan: DayPlan, hour: int, lines: Sequence[Line]) -> bool:
    """Nothing that this plans in the hour is left by the lines of the day."""
    there = [line for line in lines if line.cron.hours >> hour & 1]
    whole = _together(line.cron.minutes for line in there if not plan.seconds & ~line.seconds)
    return all(
        not seconds & ~_together(line.seconds for line in there if line.cron.minutes >> minute & 1)
        for minute, seconds in enumerate(plan.minutes[hour * 60 : hour * 60 + 60])
        if seconds and not whole >> minute & 1
    )


def _chosen(every: Sequence[T], bits: int) -> list[T]:
    return [one for n, one in enumerate(every) if bits >> n & 1]


def _bits(every: Iterable[bool]) -> int:
    return sum(1 << n for n, one in enumerate(every) if one)


def _together(bits: Iterable[int]) -> int:
    return reduce(or_, bits, 0)


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
