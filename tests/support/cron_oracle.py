"""What cron should answer, found by walking: slow, plain, and written without a look at the implementation.

It shares nothing with `mainspring.model` but the rules in docs/cron.md. Fields become Python sets, days are asked one
by one, and every minute of a day that is meant is walked (every second of a minute that is meant, with six fields)."""

import calendar
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

MONTHS = {calendar.month_abbr[number].upper(): number for number in range(1, 13)}
WEEKDAYS = {calendar.day_abbr[(number - 1) % 7].upper(): number for number in range(7)}
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def values(text: str, low: int, high: int, names: dict[str, int] | None = None) -> frozenset[int]:
    """The numbers of a list of `*`, n, a-b, each with or without a step."""
    return _values(text, low, high, "month" if names is MONTHS else "weekday" if names is WEEKDAYS else "number")


@cache  # a walk asks for the same again on every day
def _values(text: str, low: int, high: int, of: str) -> frozenset[int]:
    known = {"month": MONTHS, "weekday": WEEKDAYS}.get(of, {})

    def number(word: str) -> int:
        return known[word] if word in known else int(word)

    found: set[int] = set()
    for item in text.split(","):
        body, _, step = item.partition("/")
        if body in ("*", "?"):
            first, last = low, high
        elif "-" in body:
            left, right = body.split("-")
            first, last = number(left), number(right)
            if of == "weekday" and last < first:
                last += 7
        else:
            first = number(body)
            last = high if step else first
        found.update(range(first, last + 1, int(step or 1)))
    return frozenset(found)


def length_of(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def working_days(day: date) -> list[int]:
    return _working_days(day.replace(day=1))


@cache
def _working_days(first: date) -> list[int]:
    return [number for number in range(1, length_of(first) + 1) if first.replace(day=number).weekday() < 5]


def is_date(item: str, day: date) -> bool:
    """Whether one item of the day-of-month field means this day."""
    last = length_of(day)
    if item in ("LW", "WL"):
        return day.day == working_days(day)[-1]
    if item.startswith("L"):
        return day.day == last - int(item[2:] or 0)
    if item.endswith("W"):
        wanted = int(item[:-1])
        return wanted <= last and day.day == min(working_days(day), key=lambda number: abs(number - wanted))
    return day.day in values(item, 1, 31)


def is_weekday(item: str, day: date) -> bool:
    """Whether one item of the day-of-week field means this day."""
    sunday_first = day.isoweekday() % 7
    if "#" in item:
        name, _, nth = item.partition("#")
        return sunday_first in {n % 7 for n in values(name, 0, 7, WEEKDAYS)} and (day.day - 1) // 7 + 1 == int(nth)
    if item.endswith("L"):
        meant = {n % 7 for n in values(item[:-1], 0, 7, WEEKDAYS)}
        return sunday_first in meant and (day + 7 * DAY).month != day.month
    return sunday_first in {n % 7 for n in values(item, 0, 7, WEEKDAYS)}


class Oracle:
    """One expression in one zone."""

    def __init__(self, text: str, info: ZoneInfo, gap: str = "shift", overlap: str = "first") -> None:
        fields = text.upper().split()
        self.seconds = values(fields.pop(0), 0, 59) if len(fields) == 6 else frozenset({0})
        minute, hour, self.dom, month, self.dow = fields
        self.minutes, self.hours = values(minute, 0, 59), values(hour, 0, 23)
        self.months = values(month, 1, 12, MONTHS)
        self.on_absolute_time = "*" in hour or "/" in hour or len(self.hours) == 24
        self.info, self.gap, self.overlap = info, gap, overlap
        self._known: dict[date, bool] = {}

    def next(self, after: datetime, horizon: timedelta) -> datetime | None:
        """The first run strictly after, in UTC; None when there is none within the horizon."""
        after = after.astimezone(UTC)
        walk = self._absolute if self.on_absolute_time else self._fixed
        found = walk(after, after + horizon)
        return found if found is not None and found <= after + horizon else None

    def is_meant(self, day: date) -> bool:
        if day not in self._known:
            self._known[day] = self._ask(day)
        return self._known[day]

    def _ask(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_date = any(is_date(item, day) for item in self.dom.split(","))
        by_weekday = any(is_weekday(item, day) for item in self.dow.split(","))
        if self.dom[0] in "*?" or self.dow[0] in "*?":
            return by_date and by_weekday
        return by_date or by_weekday

    # -- absolute time: every real minute is looked at on the wall clock ------------------------------------------

    def _absolute(self, after: datetime, until: datetime) -> datetime | None:
        at = after.replace(second=0, microsecond=0)
        while at <= until:
            local = at.astimezone(self.info)
            if self.is_meant(local.date()):
                if local.hour in self.hours and local.minute in self.minutes:
                    for second in sorted(self.seconds):
                        run = at + timedelta(seconds=second)
                        if run > after:
                            return run
                at += MINUTE
            else:
                at += self._step_over(local)
        return None

    def _step_over(self, local: datetime) -> timedelta:
        """How far the walk may go on a day that is not meant: a day, if its neighbours are not meant either; an hour,
        if it ends on the same day and no clock has changed."""
        if not any(self.is_meant(local.date() + days * DAY) for days in (-1, 1, 2)):
            return DAY
        later = (local.astimezone(UTC) + HOUR).astimezone(self.info)
        return HOUR if (later.date(), later.utcoffset()) == (local.date(), local.utcoffset()) else MINUTE

    # -- fixed hours: every minute on the calendar is looked for in real time ------------------------------------

    def _fixed(self, after: datetime, until: datetime) -> datetime | None:
        day = after.astimezone(self.info).date() - 2 * DAY
        found: list[datetime] = []
        left = 2  # the day of the first find, and one more: where clocks go back over midnight it can be earlier
        while day <= until.date() + 2 * DAY and left:
            if self.is_meant(day):
                for naive in self._minutes_of(day):
                    found += [run for run in self._real(naive) if run > after]
            left -= bool(found)
            day += DAY
        return min(found, default=None)

    def _minutes_of(self, day: date) -> Iterator[datetime]:
        for minute_of_day in range(24 * 60):
            hour, minute = divmod(minute_of_day, 60)
            if hour in self.hours and minute in self.minutes:
                for second in self.seconds:
                    yield datetime(day.year, day.month, day.day, hour, minute, second)  # noqa: DTZ001

    def _real(self, naive: datetime) -> list[datetime]:
        """When the wall clock shows this: once, never, or twice."""
        tries = sorted({naive.replace(tzinfo=self.info, fold=fold).astimezone(UTC) for fold in (0, 1)})
        # Only what shows this time again is real. zoneinfo itself errs where a zone's last listed change meets its rule
        # for the future: it takes America/Nuuk 2023-10-28 23:37 for a time that comes twice.
        real = [at for at in tries if at.astimezone(self.info).replace(tzinfo=None, fold=0) == naive]
        if len(real) == 2:
            return {"first": real[:1], "second": real[1:], "both": real}[self.overlap]
        if real:
            return real
        return [self._after_gap(*tries)] if self.gap == "shift" else []

    def _after_gap(self, before: datetime, later: datetime) -> datetime:
        """`before` lies before the jump and `later` after it: the first minute of the new time."""
        old = before.astimezone(self.info).utcoffset()
        at = before.replace(second=0)
        while at.astimezone(self.info).utcoffset() == old:
            at += MINUTE
        assert at <= later
        return at
