"""When a schedule runs: the union of its specs in its zone, within its bounds, without its exclusions."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache, reduce
from math import gcd
from operator import or_
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, get_args

from ..errors import InvalidInput
from ..limits import HORIZON_MS
from ..times import delay_ms
from .cron import DAY_S, Cron
from .zone import Gap, Overlap, Segment, count_in_zone, next_in_zone, planned_in_gap, zone

if TYPE_CHECKING:
    from .definition import Definition


def _check(value_ms: int, field: str) -> None:
    if not 1 <= value_ms <= HORIZON_MS:
        raise InvalidInput(f"{field} is {value_ms} ms; it must lie between 1 ms and ten years")


@dataclass(frozen=True, slots=True)
class Every:
    """Fixed rate: anchor, anchor + interval, … however long the runs take. Without an anchor it counts from the
    schedule's start, or else from 1970, so that every node plans the same times."""

    interval_ms: int
    anchor_ms: int | None = None

    def __post_init__(self) -> None:
        _check(self.interval_ms, "interval")

    @classmethod
    def parse(cls, text: str, *, anchor_ms: int | None = None) -> "Every":
        """Read `@every 30s`, or only the span."""
        span = text.strip()
        if span[:6].lower() == "@every":
            span = span[6:].strip()
        return cls(delay_ms(span, field="@every"), anchor_ms)

    def counts_from_ms(self, start_ms: int | None) -> int:
        return self.anchor_ms if self.anchor_ms is not None else start_ms or 0

    def next_after(self, after_ms: int, start_ms: int | None = None) -> int:
        anchor_ms = self.counts_from_ms(start_ms)
        if after_ms < anchor_ms:
            return anchor_ms
        return after_ms + self.interval_ms - (after_ms - anchor_ms) % self.interval_ms


@dataclass(frozen=True, slots=True)
class AfterEnd:
    """Fixed delay: counted from the end of the last run, so that runs never overlap."""

    delay_ms: int

    def __post_init__(self) -> None:
        _check(self.delay_ms, "delay")

    def next_after(self, after_ms: int, ended_ms: int | None) -> int:
        """Return the next time. Without an end (it never ran, or this is a preview) it counts from `after_ms`."""
        return max(after_ms + 1, (after_ms if ended_ms is None else ended_ms) + self.delay_ms)


Spec = Cron | Every | AfterEnd

_DAY_MS: Final = DAY_S * 1000
_WHOLE: Final = (1 << 60) - 1
_PLANS_KEPT: Final = 64


class DayPlan(NamedTuple):
    minutes: tuple[int, ...]
    """Matching seconds of each minute of the day."""
    seconds: int
    """Matching seconds of all minutes together."""


def day_plan(spec: Spec, start_ms: int | None, offset_s: int) -> DayPlan:
    """Return the plan on the wall clock of this offset; intervals without an anchor count from `start_ms`."""
    if isinstance(spec, Cron):
        return _of_line(spec.hours, spec.minutes, spec.seconds)
    if isinstance(spec, AfterEnd):
        return _of_raster(1, 0)
    # Over all days together, an interval falls on the raster of its greatest common divisor with the day.
    raster_ms = gcd(spec.interval_ms, _DAY_MS)
    return _of_raster(raster_ms, (spec.counts_from_ms(start_ms) + offset_s * 1000) % raster_ms)


@lru_cache(maxsize=_PLANS_KEPT)
def _of_line(hours: int, minutes: int, seconds: int) -> DayPlan:
    every = [(hour, minute) for hour in range(24) for minute in range(60)]
    return DayPlan(tuple(seconds if hours >> h & 1 and minutes >> m & 1 else 0 for h, m in every), seconds)


@lru_cache(maxsize=_PLANS_KEPT)
def _of_raster(raster_ms: int, first_ms: int) -> DayPlan:
    if raster_ms <= 1000:
        return DayPlan((_WHOLE,) * 1440, _WHOLE)
    minutes, together = [0] * 1440, 0
    for at_ms in range(first_ms, _DAY_MS, raster_ms):
        minute, second = divmod(at_ms // 1000, 60)
        minutes[minute] |= 1 << second
        together |= 1 << second
    return DayPlan(tuple(minutes), together)


_DATES: Final = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\s*(?:\.\.|/)\s*(\d{4}-\d{2}-\d{2}))?")
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
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
        """Return the local second at which the exclusion ends; None if it does not cover this one."""
        day = local_s // DAY_S + _EPOCH_DAY
        if self.first.toordinal() <= day <= self.last.toordinal():
            return (self.last.toordinal() + 1 - _EPOCH_DAY) * DAY_S
        return None


@dataclass(frozen=True, slots=True)
class CronExclusion:
    """Everything that matches a cron line: five fields cover whole minutes, six cover seconds."""

    cron: Cron

    @property
    def seconds(self) -> int:
        return self.cron.seconds if self.cron.with_seconds else _WHOLE

    def covers(self, hour: int, minute: int) -> bool:
        """Return whether it covers at least some seconds of this minute, on its days."""
        return bool(self.cron.hours >> hour & 1 and self.cron.minutes >> minute & 1)


Exclusion = Days | CronExclusion


class LeftOut:
    """All exclusions of a schedule, and its planned times. Hours and days that are fully excluded are skipped in one
    step, even if only several lines together cover them: searching single times would never end, and give up."""

    __slots__ = ("_hours", "_lines", "_planned", "_ranges", "_start_ms")

    def __init__(self, every: Sequence[Exclusion], planned: Sequence[Spec], start_ms: int | None = None) -> None:
        """`planned` are the specs of the schedule; intervals count from its start."""
        self._ranges = [one for one in every if isinstance(one, Days)]
        self._lines = [one for one in every if isinstance(one, CronExclusion)]
        self._planned = planned
        self._start_ms = start_ms
        self._hours: dict[tuple[int, int, int], int] = {}
        """Fully excluded hours, by the lines of both kinds that apply on a day, as bits, and the offset."""

    def end_of(self, local_s: int, offset_s: int) -> int | None:
        """Return the local second up to which no planned time is left, while the offset stays the same; None if this
        one is left."""
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
        """Return the excluded hours, cached: most days are like the day before."""
        hours = self._hours.get((lines, planned, offset_s))
        if hours is None:
            if len(self._hours) >= _DAYS_KEPT:
                self._hours.clear()
            plans = self._plans(planned, offset_s)
            there = _chosen(self._lines, lines)
            hours = _bits(all(_is_covered(plan, hour, there) for plan in plans) for hour in range(24))
            self._hours[lines, planned, offset_s] = hours
        return hours


def _is_covered(plan: DayPlan, hour: int, lines: Sequence[CronExclusion]) -> bool:
    """Return whether the lines of the day exclude everything that this plan has in the hour."""
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
        return CronExclusion(Cron.parse(text, name))
    try:
        first, last = (date.fromisoformat(day) for day in (match[1], match[2] or match[1]))
    except ValueError as error:
        raise InvalidInput(f"exclude {text!r}: {error}; write 2026-12-25 or 2026-12-24..2027-01-02") from None
    return Days(first, last)


_MAX_SKIPS: Final = 50_000
"""Excluded stretches to skip, mostly whole days, before the search gives up: about half a second of work. Several
specs, and hundreds of exclusions, make each step more expensive, and get fewer."""
_EXCLUSIONS_LIKE_A_SPEC: Final = 100


def spec(text: str, name: str = "") -> Cron | Every:
    """Read a cron line, an alias, or `@every 30s`."""
    if text.strip()[:6].lower() == "@every":
        return Every.parse(text)
    return Cron.parse(text, name)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Specs with zone, bounds and exclusions. All instants are epoch milliseconds; both bounds are inclusive."""

    specs: tuple[Spec, ...]
    zone: str = "UTC"
    gap: Gap = "shift"
    overlap: Overlap = "first"
    exclude: tuple[Exclusion, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    max_runs: int | None = None
    _left_out: LeftOut = field(default=LeftOut((), ()), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.specs:
            raise InvalidInput("a schedule needs at least one spec, such as '0 9 * * MON-FRI' or '@every 30s'")
        zone(self.zone)
        if self.exclude:
            object.__setattr__(self, "_left_out", LeftOut(self.exclude, self.specs, self.start_ms))
        for name, value, known in (("gap", self.gap, get_args(Gap)), ("overlap", self.overlap, get_args(Overlap))):
            if value not in known:
                raise InvalidInput(f"{name} is {value!r}; use {', '.join(known)}")
        if self.max_runs is not None and self.max_runs < 1:
            raise InvalidInput(f"max_runs is {self.max_runs}; leave it out, or give at least 1")
        if self.start_ms is not None and self.end_ms is not None and self.end_ms < self.start_ms:
            raise InvalidInput(f"the end ({self.end_ms} ms) is before the start ({self.start_ms} ms)")

    @classmethod
    def parse(
        cls, specs: str | Sequence[str | Spec], *, name: str = "", zone: str = "UTC", gap: Gap = "shift",
        overlap: Overlap = "first", exclude: Sequence[str | Exclusion] = (), start_ms: int | None = None,
        end_ms: int | None = None, max_runs: int | None = None,
    ) -> "Recurrence":  # fmt: skip
        """Make a recurrence from texts as people write them; `name` is the schedule's and decides the place of H."""
        given = [specs] if isinstance(specs, str) else specs
        read = tuple(spec(one, name) if isinstance(one, str) else one for one in given)
        left_out = tuple(exclusion(one, name) if isinstance(one, str) else one for one in exclude)
        return cls(read, zone, gap, overlap, left_out, start_ms, end_ms, max_runs)

    @property
    def waits_for_end(self) -> bool:
        """Whether the next time is known only when a run has ended."""
        return any(isinstance(one, AfterEnd) for one in self.specs)

    def next_after(self, after_ms: int, *, runs: int = 0, ended_ms: int | None = None) -> int | None:
        """Return the first run strictly later than `after_ms`; None if there is none.

        `runs` is the number of runs so far, for `max_runs`; `ended_ms` the end of the last, for a fixed delay."""
        if self.max_runs is not None and runs >= self.max_runs:
            return None
        if self.start_ms is not None:
            after_ms = max(after_ms, self.start_ms - 1)
        for _ in range(_MAX_SKIPS // (len(self.specs) + len(self.exclude) // _EXCLUSIONS_LIKE_A_SPEC)):
            next_ms = self._planned_after(after_ms, ended_ms)
            if next_ms is None or (self.end_ms is not None and next_ms > self.end_ms):
                return None
            until_ms = self._excluded_until(next_ms) if self.exclude else None
            if until_ms is None:
                return next_ms
            after_ms = until_ms - 1
        return None

    def between(self, from_ms: int, until_ms: int, limit: int = 1_000, *, runs: int = 0) -> list[int]:
        """Return the first `limit` runs in [from_ms, until_ms)."""
        found: list[int] = []
        next_ms = self.next_after(from_ms - 1, runs=runs)
        while next_ms is not None and next_ms < until_ms and len(found) < limit:
            found.append(next_ms)
            next_ms = self.next_after(next_ms, runs=runs + len(found))
        return found

    def _planned_after(self, after_ms: int, ended_ms: int | None) -> int | None:
        found: int | None = None
        for one in self.specs:
            if isinstance(one, Cron):
                at_s = next_in_zone(one, zone(self.zone), after_ms // 1000, self.gap, self.overlap)
                next_ms = None if at_s is None else at_s * 1000
            elif isinstance(one, Every):
                next_ms = one.next_after(after_ms, self.start_ms)
            else:
                next_ms = one.next_after(after_ms, ended_ms)
            if next_ms is not None and (found is None or next_ms < found):
                found = next_ms
        return found

    def _excluded_until(self, at_ms: int) -> int | None:
        """Return when the exclusion at this instant ends, or the zone's offset changes and it must be checked again."""
        segment = zone(self.zone).segment(at_ms // 1000)
        local_s = at_ms // 1000 + segment.offset_s
        end_s = self._left_out.end_of(local_s, segment.offset_s)
        if at_ms == segment.start_s * 1000 and self._stands_in(segment, excluded=end_s is not None):
            return None if self._keeps_in_gap(segment) else at_ms + 1
        return None if end_s is None else min(end_s - segment.offset_s, segment.end_s) * 1000

    def _stands_in(self, segment: Segment, *, excluded: bool) -> bool:
        """Return whether a run at the start of a segment replaces times that the clock skipped."""
        if self.gap != "shift" or segment.before_s >= segment.offset_s:
            return False
        local_s = segment.start_s + segment.offset_s
        return excluded or not any(
            one.next_local(local_s, local_s + 1) is not None
            if isinstance(one, Cron)
            else isinstance(one, Every)
            and one.next_after(segment.start_s * 1000 - 1, self.start_ms) == segment.start_s * 1000
            for one in self.specs
        )

    def _keeps_in_gap(self, segment: Segment) -> bool:
        """Return whether a skipped time is not excluded: exclusions apply to the planned times, not the actual ones."""
        end_s = segment.start_s + segment.offset_s
        for line in self.specs:
            if isinstance(line, Cron) and not line.absolute:
                at_s = planned_in_gap(line, segment)
                while at_s is not None:
                    over_s = self._left_out.end_of(at_s, segment.before_s)
                    if over_s is None:
                        return True
                    at_s = line.next_local(over_s, end_s) if over_s < end_s else None
        return False


EVERY: Final = "@every"
AFTER_END: Final = "@after-end"
TIMES: Final = ("cron", "every", "after_end")
"""The fields in which the times of a schedule are given."""


def kind_of(text: str) -> str:
    """Return the field that a spec belongs to, whichever it was written in."""
    first = text.split(maxsplit=1)[0].lower()
    return {EVERY: "every", AFTER_END: "after_end"}.get(first, "cron")


COUNTED_AT_MOST: Final = 100_000
_ANSWERS_KEPT: Final = 8
_UNKNOWN: Final = -1
_FIRST_STEP_MS: Final = 60_000
_FURTHEST_MS: Final = 50 * 366 * 86_400_000


def read_spec(text: str, name: str, anchor_ms: int | None) -> Spec:
    """Read a cron line, an alias, `@every 30s` (counted from the anchor) or `@after-end 30s`."""
    if text.strip()[: len(AFTER_END)].lower() == AFTER_END:
        return AfterEnd(delay_ms(text.strip()[len(AFTER_END) :].strip(), field=AFTER_END))
    read = spec(text, name)
    return Every(read.interval_ms, anchor_ms) if isinstance(read, Every) else read


class PlannedTimes:
    """A recurrence with a cache of its last answers."""

    __slots__ = ("_answers", "one_by_one", "recurrence")

    def __init__(self, recurrence: Recurrence) -> None:
        self.recurrence = recurrence
        self.one_by_one = all(isinstance(one, AfterEnd) for one in recurrence.specs)
        """Only fixed delays: one time is planned, and no other before that run is over."""
        self._answers: dict[int, int | None] = {}

    def after(self, after_ms: int) -> int | None:
        """Return the first planned time strictly later."""
        answers = self._answers
        found = answers.get(after_ms, _UNKNOWN)
        if found == _UNKNOWN:
            # Do not read it back from the cache: a preview in another thread may clear the cache meanwhile.
            found = self.recurrence.next_after(after_ms)
            if len(answers) >= _ANSWERS_KEPT:
                answers.clear()
            answers[after_ms] = found
        return found

    def newest(self, from_ms: int, until_ms: int) -> int | None:
        """Return the last planned time in [from_ms, until_ms], searching from the end: there may be very many."""
        step_ms = _FIRST_STEP_MS
        while step_ms < _FURTHEST_MS:
            start_ms = max(from_ms - 1, until_ms - step_ms)
            found = self.recurrence.next_after(start_ms)
            if found is not None and found <= until_ms:
                while (later := self.recurrence.next_after(found)) is not None and later <= until_ms:
                    found = later
                return found
            if start_ms < from_ms:
                return None
            step_ms *= 4
        return None

    def last(self, count: int, from_ms: int, until_ms: int) -> int | None:
        """Return the first of the last `count` planned times in [from_ms, until_ms]."""
        step_ms = _FIRST_STEP_MS
        while True:  # from the end, because there may be a great many
            start_ms = max(from_ms, until_ms - step_ms)
            found = self.recurrence.between(start_ms, until_ms + 1, COUNTED_AT_MOST)
            if len(found) >= count or start_ms <= from_ms:
                return found[-count:][0] if found else None
            step_ms *= 4

    def count(self, from_ms: int, until_ms: int) -> int:
        """Return how many planned times are in [from_ms, until_ms]: by arithmetic for one spec without exclusions.

        Others are counted one by one, up to COUNTED_AT_MOST."""
        recurrence = self.recurrence
        only = recurrence.specs[0] if len(recurrence.specs) == 1 and not recurrence.exclude else None
        last_ms = until_ms if recurrence.end_ms is None else min(until_ms, recurrence.end_ms)
        if isinstance(only, Every):
            first = recurrence.next_after(from_ms - 1)
            return 0 if first is None or first > last_ms else (last_ms - first) // only.interval_ms + 1
        if isinstance(only, Cron):
            first_ms = from_ms if recurrence.start_ms is None else max(from_ms, recurrence.start_ms)
            from_s, end_s = -(-first_ms // 1000), last_ms // 1000 + 1
            return count_in_zone(only, zone(recurrence.zone), from_s, end_s, recurrence.gap, recurrence.overlap)
        counted, most = 0, 1 if self.one_by_one else COUNTED_AT_MOST
        at_ms = recurrence.next_after(from_ms - 1)
        while at_ms is not None and at_ms <= until_ms and counted < most:
            counted += 1
            at_ms = recurrence.next_after(at_ms)
        return counted


def slots_of(definition: "Definition") -> PlannedTimes:
    """Return the planned times; equal schedules share one: at midnight all of them ask for the same next day."""
    named = anchored = False
    for text in definition.specs:
        named = named or "H" in text or "h" in text
        anchored = anchored or "@e" in text or "@E" in text
    for text in definition.exclude:
        named = named or "H" in text or "h" in text
    anchor_ms = definition.anchor_ms if definition.start_ms is None else definition.start_ms
    return _slots(
        definition.name if named else "", definition.specs, definition.zone, definition.gap, definition.dst_overlap,
        definition.exclude, definition.start_ms, definition.end_ms, anchor_ms if anchored else None,
    )  # fmt: skip


@lru_cache(maxsize=20_000)
def _slots(
    name: str, specs: tuple[str, ...], zone: str, gap: str, overlap: str, exclude: tuple[str, ...],
    start_ms: int | None, end_ms: int | None, anchor_ms: int | None,
) -> PlannedTimes:  # fmt: skip
    return PlannedTimes(
        Recurrence.parse(
            [read_spec(text, name, anchor_ms) for text in specs], name=name, zone=zone, exclude=exclude,
            start_ms=start_ms, end_ms=end_ms,
            gap=gap, overlap=overlap,  # type: ignore[arg-type]  # Recurrence checks both
        )
    )  # fmt: skip
