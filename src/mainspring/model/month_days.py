"""Which days of a month a cron expression means: both day fields, with L, W and #."""

import re
from dataclasses import dataclass
from typing import Final

from .cron_fields import FieldText

_LAST: Final = re.compile(r"L(?:-(?P<back>[0-9]{1,2}))?", re.IGNORECASE)
_NEAREST: Final = re.compile(r"(?P<day>[0-9]{1,2})W", re.IGNORECASE)
_NTH: Final = re.compile(r"(?P<day>[0-9A-Z]{1,3})#(?P<nth>[0-9]+)", re.IGNORECASE)
_LAST_OF: Final = re.compile(r"(?P<day>[0-9]|[A-Z]{3})L", re.IGNORECASE)
_EVERY_WEEK: Final = 0x10204081  # seven bits repeated five times: a week's pattern laid over a month
_LENGTHS: Final = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def month_length(year: int, month: int) -> int:
    if month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0):
        return 29
    return _LENGTHS[month]


@dataclass(frozen=True, slots=True)
class Dates:
    """The field "day of month". Bit d of `days`: day d. Bit n of `before_last`: n days before the last day.
    Bit n of `nearest`: the working day nearest to day n, in the same month."""

    days: int = 0
    before_last: int = 0
    nearest: int = 0
    last_working: bool = False

    @classmethod
    def read(cls, field: FieldText) -> "Dates":
        days = before_last = nearest = 0
        last_working = False
        for item in field.items():
            if item.text.upper() in ("LW", "WL"):
                last_working = True
            elif match := _LAST.fullmatch(item.text):
                back = int(match["back"] or 0)
                if back > 30:
                    raise item.refuse(f"no month has a day {back} days before its last")
                before_last |= 1 << back
            elif match := _NEAREST.fullmatch(item.text):
                nearest |= 1 << item.value(match["day"])
            else:
                days |= item.span().bits
        return cls(days, before_last, nearest, last_working)

    def in_month(self, length: int, first: int) -> int:
        """The days of a month with `length` days whose day 1 is weekday `first` (Sunday is 0), as bits."""
        found = self.days
        if self.before_last:
            found |= sum(1 << length - back for back in _members(self.before_last) if back < length)
        if self.nearest:
            found |= sum(
                {1 << _working_day_near(day, length, first) for day in _members(self.nearest) if day <= length}
            )
        if self.last_working:
            found |= 1 << _working_day_near(length, length, first)
        return found & _all_days(length)


@dataclass(frozen=True, slots=True)
class Weekdays:
    """The field "day of week", Sunday is bit 0. `nth` holds (weekday, n); `last` the weekdays meant by dL."""

    days: int = 0
    nth: tuple[tuple[int, int], ...] = ()
    last: int = 0

    @classmethod
    def read(cls, field: FieldText) -> "Weekdays":
        days = last = 0
        nth: set[tuple[int, int]] = set()
        for item in field.items():
            if match := _NTH.fullmatch(item.text):
                if not 1 <= int(match["nth"]) <= 5:
                    raise item.refuse(
                        f"a month has no weekday number {match['nth']}: give #1 to #5, or {match['day']}L"
                    )
                nth.add((item.value(match["day"]) % 7, int(match["nth"])))
            elif match := _LAST_OF.fullmatch(item.text):
                last |= 1 << item.value(match["day"]) % 7
            elif item.text.upper() == "L":
                raise item.refuse(
                    "which last weekday? Write 5L or FRIL; the last day of the month is L in field day of month"
                )
            else:
                days |= item.span().bits
        return cls((days | days >> 7) & 0x7F, tuple(sorted(nth)), last)

    def in_month(self, length: int, first: int) -> int:
        found = _weekly(self.days, first)
        for weekday, nth in self.nth:
            found |= 1 << 1 + (weekday - first) % 7 + 7 * (nth - 1)
        if self.last:
            found |= _weekly(self.last, first) & (0x7F << length - 6)
        return found & _all_days(length)


@dataclass(frozen=True, slots=True)
class MonthDays:
    """Both day fields. As in Vixie cron one of them suffices, unless one begins with `*` or `?`: then both must."""

    dates: Dates
    weekdays: Weekdays
    both: bool

    def in_month(self, year: int, month: int, first: int) -> int:
        length = month_length(year, month)
        return self.of_length(length, first)

    def of_length(self, length: int, first: int) -> int:
        dates, weekdays = self.dates.in_month(length, first), self.weekdays.in_month(length, first)
        return dates & weekdays if self.both else dates | weekdays

    def ever_in(self, month: int) -> bool:
        """Whether any year has such a day in this month: each length begins on each weekday within 400 years."""
        lengths = (28, 29) if month == 2 else (_LENGTHS[month],)
        return any(self.of_length(length, first) for length in lengths for first in range(7))


def _all_days(length: int) -> int:
    return (2 << length) - 2


def _weekly(days: int, first: int) -> int:
    return ((days >> first | days << 7 - first) & 0x7F) * _EVERY_WEEK << 1


def _working_day_near(day: int, length: int, first: int) -> int:
    """Saturday goes to Friday, Sunday to Monday, but never out of the month."""
    weekday = (first + day - 1) % 7
    if weekday == 6:
        return day - 1 if day > 1 else day + 2
    if weekday == 0:
        return day + 1 if day < length else day - 2
    return day


def _members(bits: int) -> list[int]:
    return [number for number in range(bits.bit_length()) if bits >> number & 1]
