"""Cron expressions on a plain calendar, without zones: which local seconds match, and which one is next.

A local second is the wall clock counted as if it were UTC. The zone comes in with `zoned_cron.py`."""

import re
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from typing import Final

from .cron_fields import DAY, HOUR, MINUTE, MONTH, SECOND, WEEKDAY, FieldText, is_spread
from .errors import InvalidCron
from .month_days import Dates, MonthDays, Weekdays, month_length

ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
DAY_S: Final = 86_400
_KINDS: Final = (SECOND, MINUTE, HOUR, DAY, MONTH, WEEKDAY)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_LAST_DAY: Final = date.max.toordinal() - 31
_ALL_HOURS: Final = (1 << 24) - 1
_MAX_CHARS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression that was read. Bit n of a number stands for n."""

    text: str
    seconds: int
    minutes: int
    hours: int
    months: int
    days: MonthDays
    absolute: bool
    """Hours with a wildcard or a step: every real minute counts, whatever the wall clock jumps over or repeats."""
    with_seconds: bool
    _first_in_hour: int = field(repr=False, compare=False)
    _first_in_day: int = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, name: str = "") -> "Cron":
        """Read an expression; `name`, the schedule's, decides where H falls."""
        return _parse(text.strip(), name if is_spread(text) else "")

    def matches(self, local_s: int) -> bool:
        """Whether this local second is meant (its minute, for five fields)."""
        if not self.with_seconds:
            local_s -= local_s % 60
        return self.next_local(local_s, local_s + 1) is not None

    def on_day(self, local_s: int) -> bool:
        """Whether the day of this local second is meant, at some time of it."""
        number = local_s // DAY_S + _EPOCH_DAY
        day = date.fromordinal(number)
        return bool(self._days_of(day.year, day.month, number - day.day + 1) >> day.day & 1)

    def next_local(self, from_s: int, end_s: int) -> int | None:
        """The first matching local second in [from_s, end_s); it jumps by fields and never walks."""
        number, clock = divmod(from_s, DAY_S)
        day = date.fromordinal(number + _EPOCH_DAY)
        month_start = number + _EPOCH_DAY - day.day + 1
        left = self._days_of(day.year, day.month, month_start) >> day.day
        if left & 1 and (at := self._next_clock(clock)) >= 0:
            found = number * DAY_S + at
            return found if found < end_s else None
        days_from = day.day + 1
        left >>= 1
        year, month = day.year, day.month
        end_day = min((end_s - 1) // DAY_S + _EPOCH_DAY, _LAST_DAY)
        while not left:
            month_start += month_length(year, month)
            if month_start > end_day:
                return None
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
            days_from, left = 1, self._days_of(year, month, month_start) >> 1
        found = (month_start + days_from + _lowest(left) - 1 - _EPOCH_DAY) * DAY_S + self._first_in_day
        return found if found < end_s else None

    def count_local(self, from_s: int, end_s: int) -> int:
        """How many local seconds in [from_s, end_s) match: months and bits are counted, nothing is walked."""
        first, from_clock = divmod(from_s, DAY_S)
        last, end_clock = divmod(end_s, DAY_S)
        count = self._matching_days(first, last) * self._before(DAY_S)
        count -= self._matching_days(first, first + 1) * self._before(from_clock)
        return count + self._matching_days(last, last + 1) * self._before(end_clock)

    def _matching_days(self, first: int, end: int) -> int:
        """How many of the days in [first, end) match, counted from 1970."""
        day = date.fromordinal(first + _EPOCH_DAY)
        year, month, month_start = day.year, day.month, first + _EPOCH_DAY - day.day + 1
        skipped, count = day.day, 0
        while month_start < end + _EPOCH_DAY:
            bits = self._days_of(year, month, month_start) >> skipped << skipped
            count += (bits & (2 << max(0, end + _EPOCH_DAY - month_start)) - 1).bit_count()
            month_start += month_length(year, month)
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
            skipped = 0
        return count

    def _before(self, clock: int) -> int:
        """Matching seconds of a day that matches, up to `clock`."""
        hour, rest = divmod(clock, 3600)
        minute, second = divmod(rest, 60)
        in_minute = self.seconds.bit_count()
        count = _below(self.hours, hour) * self.minutes.bit_count() * in_minute
        if self.hours >> hour & 1:
            count += _below(self.minutes, minute) * in_minute
            if self.minutes >> minute & 1:
                count += _below(self.seconds, second)
        return count

    def _days_of(self, year: int, month: int, month_start: int) -> int:
        # Ordinals count from a Monday: the remainder by seven is the weekday, Sunday 0.
        return self.days.in_month(year, month, month_start % 7) if self.months >> month & 1 else 0

    def _next_clock(self, clock: int) -> int:
        """The first matching second of the day from `clock` on, or -1."""
        hour, rest = divmod(clock, 3600)
        if self.hours >> hour & 1:
            minute, second = divmod(rest, 60)
            if self.minutes >> minute & 1 and (left := self.seconds >> second):
                return clock + _lowest(left)
            if left := self.minutes >> minute + 1:
                return hour * 3600 + (minute + 1 + _lowest(left)) * 60 + _lowest(self.seconds)
        if left := self.hours >> hour + 1:
            return (hour + 1 + _lowest(left)) * 3600 + self._first_in_hour
        return -1


@lru_cache(maxsize=4096)
def _parse(text: str, name: str) -> Cron:
    fields = _split(text, name)
    second, minute, hour, day, month, weekday = fields
    days = MonthDays(Dates.read(day), Weekdays.read(weekday), both=day.is_open or weekday.is_open)
    seconds, minutes, hours, months = second.bits(), minute.bits(), hour.bits(), month.bits()
    first_in_hour = _lowest(minutes) * 60 + _lowest(seconds)
    if not any(days.ever_in(number) for number in range(1, 13) if months >> number & 1):
        raise day.point_at(_never(month, day, weekday))
    return Cron(
        text, seconds, minutes, hours, months, days,
        absolute=hour.is_stepped or hours == _ALL_HOURS,
        with_seconds=second.number > 0,
        _first_in_hour=first_in_hour,
        _first_in_day=_lowest(hours) * 3600 + first_in_hour,
    )  # fmt: skip


def _split(text: str, name: str) -> list[FieldText]:
    """The six fields in order; where seconds are left out, they are 0."""
    if len(text) > _MAX_CHARS:
        raise InvalidCron(text[:40] + "…", f"{len(text)} characters; at most {_MAX_CHARS} are allowed")
    if text.startswith("@"):
        line = ALIASES.get(text.lower())
        if line is None:
            raise InvalidCron(text, f"unknown alias; there are {', '.join(ALIASES)}, and @every 30s")
    else:
        line = text
    pieces = list(re.finditer(r"\S+", line))
    if len(pieces) not in (5, 6):
        raise InvalidCron(
            text,
            f"{len(pieces)} fields; give 5 (minute, hour, day of month, month, day of week) or 6 (second first)",
        )
    kinds = _KINDS[-len(pieces) :]
    found = [
        FieldText(text, number, kind, piece[0], piece.start() + 1, name)
        for number, (kind, piece) in enumerate(zip(kinds, pieces, strict=True), 1)
    ]
    return found if len(found) == 6 else [FieldText(text, 0, SECOND, "0", 1), *found]


def _never(month: FieldText, day: FieldText, weekday: FieldText) -> str:
    months = f"month {month.text}" if month.text != "*" else "any month"
    if weekday.text in ("*", "?"):
        longest = max(29 if n == 2 else month_length(2001, n) for n in range(1, 13) if month.bits() >> n & 1)
        return (
            f"it would never run: there is no day {day.text} in {months} (at most {longest} days);"
            " change the day of month or the month"
        )
    return f"it would never run: no day of {months} is both day of month {day.text} and day of week {weekday.text}"


def _below(bits: int, number: int) -> int:
    return (bits & ((1 << number) - 1)).bit_count()


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
