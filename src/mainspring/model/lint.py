"""What is probably not meant by a schedule: findings, not errors. Pure: the instant to look from is given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, Literal

from .cron import ALIASES, Cron
from .cron_fields import is_spread
from .interval import AfterEnd
from .recurrence import Recurrence
from .worst_case import WorstCase
from .zone import Segment, zone
from .zoned_cron import planned_in_gap, planned_in_overlap

Code = Literal["dst-gap", "dst-overlap", "midnight", "too-long", "day-or", "too-often", "wide-step"]

_AHEAD_S: Final = 5 * 365 * 86_400
SAMPLE: Final = 200
"""Runs that are looked at."""
_MIDNIGHT: Final = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` is for programs and stays the same; `message` is for people and says what to do."""

    code: Code
    message: str


def lint(
    recurrence: Recurrence,
    now_ms: int,
    *,
    worst: WorstCase | None = None,
    max_per_second: int = 10,
    runs: Sequence[int] | None = None,
) -> list[Finding]:
    """Everything worth a warning; `worst` is how long one run with all its retries may take.

    `runs` are the next ones, as far as the caller has looked for them."""
    found: list[Finding] = []
    for spec in recurrence.specs:
        if isinstance(spec, Cron):
            found += _midnight(spec)
            found += _day_fields(spec)
            found += _wide_steps(spec)
            if not spec.absolute:
                found += _clock_changes(spec, recurrence, now_ms // 1000)
    if all(isinstance(spec, AfterEnd) for spec in recurrence.specs):
        return found  # the next run waits for the end of this one
    if runs is None:
        runs = _next_runs(recurrence.next_after, now_ms, max(SAMPLE, max_per_second + 1))
    return [*found, *_pace(runs, worst, max_per_second)]


def _midnight(cron: Cron) -> Iterator[Finding]:
    at_midnight = (cron.hours, cron.minutes, cron.seconds) == (_MIDNIGHT, _MIDNIGHT, _MIDNIGHT)
    if at_midnight and not is_spread(cron.text):
        days = " ".join(ALIASES.get(cron.text.lower(), cron.text).split()[-3:])
        yield Finding(
            "midnight",
            f"{cron.text!r} runs at midnight sharp, like everyone's; 'H H(0-5) {days}' spreads schedules by name",
        )


def _day_fields(cron: Cron) -> Iterator[Finding]:
    if not cron.days.both:
        day, weekday = cron.text.split()[-3], cron.text.split()[-1]
        yield Finding(
            "day-or",
            f"{cron.text!r} runs on day of month {day} and also on every day of week {weekday}: with both fields set,"
            " either one suffices; for both at once use #, L or W, or an exclusion",
        )


def _wide_steps(cron: Cron) -> Iterator[Finding]:
    if cron.text.startswith("@"):
        return
    spans = (60, 60, 24, 31, 12, 7)[-len(cron.text.split()) :]
    for text, span in zip(cron.text.split(), spans, strict=True):
        step = text.rpartition("*/")[2] if "*/" in text else ""
        if step.isdigit() and int(step) >= span:
            yield Finding(
                "wide-step",
                f"{cron.text!r}: the step {text} is wider than its field and means its first value only;"
                " for a span across hours or days write @every, such as @every 90m",
            )


def _clock_changes(cron: Cron, recurrence: Recurrence, now_s: int) -> Iterator[Finding]:
    gaps: list[tuple[Segment, int]] = []
    overlaps: list[tuple[Segment, int]] = []
    for change in zone(recurrence.zone).changes(now_s, now_s + _AHEAD_S):
        if (local_s := planned_in_gap(cron, change)) is not None:
            gaps.append((change, local_s))
        if (local_s := planned_in_overlap(cron, change)) is not None:
            overlaps.append((change, local_s))
    if gaps:
        told = {"shift": "it runs {} instead (gap=shift)", "skip": "it does not run then (gap=skip)"}[recurrence.gap]
        yield _told("dst-gap", "does not exist", told, cron, recurrence, gaps)
    if overlaps:
        told = {
            "first": "it runs the first time (overlap=first)",
            "second": "it runs the second time (overlap=second)",
            "both": "it runs both times (overlap=both)",
        }[recurrence.overlap]
        yield _told("dst-overlap", "comes twice", told, cron, recurrence, overlaps)


def _told(
    code: Code, what: str, then: str, cron: Cron, recurrence: Recurrence, changes: list[tuple[Segment, int]]
) -> Finding:
    change, local_s = changes[0]
    local = datetime.fromtimestamp(local_s, UTC).strftime("%Y-%m-%d %H:%M")
    after = zone(recurrence.zone).datetime(change.start_s * 1000).strftime("at %H:%M on %Y-%m-%d")
    more = f", and {len(changes) - 1} more within five years" if len(changes) > 1 else ""
    return Finding(code, f"{cron.text!r}: {local} {what} in {recurrence.zone}{more}; {then.format(after)}")


def _pace(runs: Sequence[int], worst: WorstCase | None, max_per_second: int) -> Iterator[Finding]:
    """Looks at the next runs: what is too close there is too close."""
    shortest_ms = min((later - earlier for earlier, later in pairwise(runs)), default=None)
    if worst is not None and shortest_ms is not None and worst.ms > shortest_ms:
        yield Finding(
            "too-long",
            f"one run may take {worst.text} with its retries, and the next comes after {shortest_ms:,} ms:"
            " it would be skipped or wait; give a shorter timeout, retry less, or run less often",
        )
    if any(later - earlier < 1000 for earlier, later in zip(runs, runs[max_per_second:], strict=False)):
        yield Finding("too-often", f"more than {max_per_second} runs within one second; is the unit right?")


def _next_runs(next_after: Callable[[int], int | None], now_ms: int, count: int) -> list[int]:
    runs: list[int] = []
    at_ms = next_after(now_ms)
    while at_ms is not None and len(runs) < count:
        runs.append(at_ms)
        at_ms = next_after(at_ms)
    return runs
