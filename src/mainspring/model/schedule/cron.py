"""Cron expressions on a plain calendar, without zones: which local seconds match, and which one is next."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from ..errors import InvalidCron

_NUMBER: Final = re.compile(r"[0-9]{1,4}")
_SPREAD_ITEM: Final = re.compile(r"(?:^|[\s,])H", re.IGNORECASE)
_SPREAD: Final = re.compile(r"H(?:\((?P<range>[^()]*)\))?")


@dataclass(frozen=True, slots=True)
class FieldKind:
    """The values that a field may have. `spread_high` bounds H: day 31 would leave out most months."""

    name: str
    low: int
    high: int
    names: Mapping[str, int]
    spread_high: int
    also: str = ""

    @property
    def allowed(self) -> str:
        named = f" or {_first_name(self)}-{_last_name(self)}" if self.names else ""
        return f"{self.low}-{self.high}{named}, *, ranges a-b, steps */n or a-b/n, lists a,b{self.also}, H"


def _numbered(words: str, first: int) -> Mapping[str, int]:
    return MappingProxyType({word: number for number, word in enumerate(words.split(), first)})


_MONTHS: Final = _numbered("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1)
_WEEKDAYS: Final = _numbered("SUN MON TUE WED THU FRI SAT", 0)
_NONE: Final = _numbered("", 0)

SECOND: Final = FieldKind("second", 0, 59, _NONE, 59)
MINUTE: Final = FieldKind("minute", 0, 59, _NONE, 59)
HOUR: Final = FieldKind("hour", 0, 23, _NONE, 23)
DAY: Final = FieldKind("day of month", 1, 31, _NONE, 28, ", ?, L, L-n, LW, nW")
MONTH: Final = FieldKind("month", 1, 12, _MONTHS, 12)
WEEKDAY: Final = FieldKind("day of week", 0, 7, _WEEKDAYS, 6, ", ?, d#n, dL")


class Span(NamedTuple):
    """One parsed item of a list: from, to, step."""

    low: int
    high: int
    step: int

    @property
    def bits(self) -> int:
        if self.step == 1:
            return (2 << self.high) - (1 << self.low)
        return sum(1 << number for number in range(self.low, self.high + 1, self.step))


@dataclass(frozen=True, slots=True)
class FieldText:
    """The text of one field and its position, so that an error can point at it."""

    expression: str
    number: int
    kind: FieldKind
    text: str
    position: int
    seed: str = ""

    def items(self) -> "list[FieldText]":
        """Return the members of a list, each with its own position."""
        if "," not in self.text:
            return [self]
        found, at = [], self.position
        for part in self.text.split(","):
            found.append(FieldText(self.expression, self.number, self.kind, part, at, self.seed))
            at += len(part) + 1
        return found

    def refuse(self, reason: str) -> InvalidCron:
        return self.point_at(f"{reason}; allowed: {self.kind.allowed}")

    def point_at(self, reason: str) -> InvalidCron:
        return InvalidCron(
            self.expression, reason, field=self.number, name=self.kind.name, text=self.text, position=self.position
        )

    @property
    def is_open(self) -> bool:
        """Whether it begins with `*` or `?`: for day fields this decides between "and" and "or", as in Vixie cron."""
        return self.text[:1] in ("*", "?")

    @property
    def is_stepped(self) -> bool:
        """Whether it has a wildcard or a step: for hours, that means "on absolute time"."""
        return "*" in self.text or "/" in self.text

    def bits(self) -> int:
        """Return the numbers of a field that has no day rules (L, W, #)."""
        found = 0
        for item in self.items():
            found |= item.span().bits
        return found

    def span(self) -> Span:
        base, slash, step_text = self.text.partition("/")
        if not base:
            raise self.refuse("a value is missing" if self.text else "an empty item: there is a comma too many")
        step = self._step(step_text) if slash else 1
        if base[0] in "Hh":
            return self._spread(base, step if slash else None)
        low, high = self._range(base)
        return Span(low, self.kind.high if slash and base[0] not in "*?" and "-" not in base else high, step)

    def _step(self, text: str) -> int:
        if not _NUMBER.fullmatch(text) or int(text) == 0:
            raise self.refuse(f"the step {text!r} is not a number from 1 up")
        return int(text)

    def _range(self, base: str) -> tuple[int, int]:
        kind = self.kind
        if base == "*" or (base == "?" and "?" in kind.also):
            return kind.low, kind.high
        left, dash, right = base.partition("-")
        low = self.value(left)
        high = self.value(right) if dash else low
        if kind is WEEKDAY and high == 0 < low:
            high = 7  # Sunday closes the week: SAT-SUN is 6-7
        if high < low:
            straight = f"{left}-{_last_name(kind)},{_first_name(kind)}-{right}"
            if kind is WEEKDAY and low == kind.high:
                straight = f"0-{right}"  # 7 is Sunday as well, so no day of the week is left before it
            raise self.refuse(f"the range {base} runs backwards; write {straight}")
        return low, high

    def value(self, text: str) -> int:
        named = self.kind.names.get(text.upper())
        if named is not None:
            return named
        if not _NUMBER.fullmatch(text):
            raise self.refuse(f"{text!r} is not a value of this field" if text else "a value is missing")
        number = int(text)
        if not self.kind.low <= number <= self.kind.high:
            raise self.refuse(f"{number} is out of range")
        return number

    def _spread(self, base: str, step: int | None) -> Span:
        """Return the place of H, which depends only on the schedule's name, so that not all run at once."""
        match = _SPREAD.fullmatch(base.upper())
        if match is None:
            raise self.refuse(f"{base!r} is not a spread; write H, H(0-29), H/15 or H(0-29)/10")
        low, high = self.kind.low, self.kind.spread_high
        if match["range"] is not None:
            low, high = self._range(match["range"]) if "-" in match["range"] else (1, 0)
            if low > high:
                raise self.refuse(f"H({match['range']}) needs a range such as H(0-29)")
        digest = hashlib.blake2b(f"{self.seed}\0{self.kind.name}".encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big")
        if step is None:
            chosen = low + place % (high - low + 1)
            return Span(chosen, chosen, 1)
        return Span(low + place % min(step, high - low + 1), high, step)


def is_spread(expression: str) -> bool:
    """Return whether H occurs, so that the schedule's name matters."""
    return _SPREAD_ITEM.search(expression) is not None


def _first_name(kind: FieldKind) -> str:
    return next(iter(kind.names), str(kind.low))


def _last_name(kind: FieldKind) -> str:
    return list(kind.names)[-1] if kind.names else str(kind.high)


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
        """Return the matching days, as bits, of a month of `length` days that starts on weekday `first` (Sunday: 0)."""
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
        """Return whether any year has such a day in this month: each length begins on each weekday within 400 years."""
        lengths = (28, 29) if month == 2 else (_LENGTHS[month],)
        return any(self.of_length(length, first) for length in lengths for first in range(7))


def _all_days(length: int) -> int:
    return (2 << length) - 2


def _weekly(days: int, first: int) -> int:
    return ((days >> first | days << 7 - first) & 0x7F) * _EVERY_WEEK << 1


def _working_day_near(day: int, length: int, first: int) -> int:
    """Return the working day nearest to a day: Friday for Saturday, Monday for Sunday, but never in another month."""
    weekday = (first + day - 1) % 7
    if weekday == 6:
        return day - 1 if day > 1 else day + 2
    if weekday == 0:
        return day + 1 if day < length else day - 2
    return day


def _members(bits: int) -> list[int]:
    return [number for number in range(bits.bit_length()) if bits >> number & 1]


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
    """A parsed expression. Bit n of a number means that the value n matches."""

    text: str
    seconds: int
    minutes: int
    hours: int
    months: int
    days: MonthDays
    absolute: bool
    """Hours with a wildcard or a step: every real minute counts, whatever the wall clock skips or repeats."""
    with_seconds: bool
    _first_in_hour: int = field(repr=False, compare=False)
    _first_in_day: int = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, name: str = "") -> "Cron":
        """Read an expression; `name`, the schedule's name, decides the place of H."""
        return _parse(text.strip(), name if is_spread(text) else "")

    def matches(self, local_s: int) -> bool:
        """Return whether this local second matches (its minute, for five fields)."""
        if not self.with_seconds:
            local_s -= local_s % 60
        return self.next_local(local_s, local_s + 1) is not None

    def on_day(self, local_s: int) -> bool:
        """Return whether some time on the day of this local second matches."""
        number = local_s // DAY_S + _EPOCH_DAY
        day = date.fromordinal(number)
        return bool(self._days_of(day.year, day.month, number - day.day + 1) >> day.day & 1)

    def next_local(self, from_s: int, end_s: int) -> int | None:
        """Return the first matching local second in [from_s, end_s), by jumping field by field, not by walking."""
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
        """Return how many local seconds in [from_s, end_s) match, by counting months and bits, not by walking."""
        first, from_clock = divmod(from_s, DAY_S)
        last, end_clock = divmod(end_s, DAY_S)
        count = self._matching_days(first, last) * self._before(DAY_S)
        count -= self._matching_days(first, first + 1) * self._before(from_clock)
        return count + self._matching_days(last, last + 1) * self._before(end_clock)

    def _matching_days(self, first: int, end: int) -> int:
        """Return how many of the days in [first, end) match, counted from 1970."""
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
        """Return how many seconds before `clock` match, on a day that matches."""
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
        """Return the first matching second of the day from `clock` on, or -1."""
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
    """Return the six fields in order; missing seconds are 0."""
    if len(text) > _MAX_CHARS:
        raise InvalidCron(text[:40] + "…", f"{len(text)} characters; at most {_MAX_CHARS} are allowed")
    if text.startswith("@"):
        line = ALIASES.get(text.lower())
        if line is None:
            raise InvalidCron(text, f"unknown alias; use {', '.join(ALIASES)}, or @every 30s")
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
