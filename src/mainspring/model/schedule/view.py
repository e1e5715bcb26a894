"""A schedule for people: its definition, next and last runs, and warnings about probable mistakes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal

import msgspec

from ..retry import WorstCase
from ..times import in_seconds
from .chain import ChainMemory, ChainState, NotRun, PastRun
from .cron import ALIASES, Cron, is_spread
from .definition import Definition, changes
from .recurrence import TIMES, AfterEnd, Recurrence, kind_of
from .zone import Segment, planned_in_gap, planned_in_overlap, zone

FindingCode = Literal[
    "dst-gap", "dst-overlap", "midnight", "too-long", "default-retries", "day-or", "too-often", "wide-step"
]

_AHEAD_S: Final = 5 * 365 * 86_400
SAMPLE: Final = 200
"""Number of upcoming runs to check."""
_MIDNIGHT: Final = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """A warning. `code` is stable, for programs; `message` is for people and says what to do."""

    code: FindingCode
    message: str


def lint(
    recurrence: Recurrence,
    now_ms: int,
    *,
    worst: WorstCase | None = None,
    usual_attempt_ms: int | None = None,
    max_per_second: int = 10,
    runs: Sequence[int] | None = None,
) -> list[Finding]:
    """Return all warnings; `worst` is how long one run may take with all its retries. `usual_attempt_ms` is the time
    limit of one attempt if the retries are the default ones.

    `runs` are the next runs, if the caller has computed them."""
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
    return [*found, *_pace(runs, worst, usual_attempt_ms, max_per_second)]


def _midnight(cron: Cron) -> Iterator[Finding]:
    at_midnight = (cron.hours, cron.minutes, cron.seconds) == (_MIDNIGHT, _MIDNIGHT, _MIDNIGHT)
    if at_midnight and not is_spread(cron.text):
        days = " ".join(ALIASES.get(cron.text.lower(), cron.text).split()[-3:])
        yield Finding(
            "midnight",
            f"{cron.text!r} runs exactly at midnight, like many others; 'H H(0-5) {days}' spreads schedules by name",
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
        effect = {"shift": "it runs {} instead (dst_gap=shift)", "skip": "it does not run then (dst_gap=skip)"}[
            recurrence.gap
        ]
        yield _clock_change_finding("dst-gap", "does not exist", effect, cron, recurrence, gaps)
    if overlaps:
        effect = {
            "first": "it runs the first time (dst_overlap=first)",
            "second": "it runs the second time (dst_overlap=second)",
            "both": "it runs both times (dst_overlap=both)",
        }[recurrence.overlap]
        yield _clock_change_finding("dst-overlap", "comes twice", effect, cron, recurrence, overlaps)


def _clock_change_finding(
    code: FindingCode, what: str, then: str, cron: Cron, recurrence: Recurrence, changes: list[tuple[Segment, int]]
) -> Finding:
    change, local_s = changes[0]
    local = datetime.fromtimestamp(local_s, UTC).strftime("%Y-%m-%d %H:%M")
    after = zone(recurrence.zone).datetime(change.start_s * 1000).strftime("at %H:%M on %Y-%m-%d")
    more = f", and {len(changes) - 1} more within five years" if len(changes) > 1 else ""
    return Finding(code, f"{cron.text!r}: {local} {what} in {recurrence.zone}{more}; {then.format(after)}")


def _pace(
    runs: Sequence[int], worst: WorstCase | None, usual_attempt_ms: int | None, max_per_second: int
) -> Iterator[Finding]:
    """Yield warnings about the spacing of the next runs."""
    shortest_ms = min((later - earlier for earlier, later in pairwise(runs)), default=None)
    if worst is not None and shortest_ms is not None and worst.ms > shortest_ms:
        yield Finding(
            "too-long" if usual_attempt_ms is None or usual_attempt_ms > shortest_ms else "default-retries",
            f"one run may take {worst.text} with its retries, and the next comes after {in_seconds(shortest_ms)}:"
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


class ScheduleView(msgspec.Struct, frozen=True):
    """Everything known about a schedule. Instants are epoch milliseconds."""

    name: str
    state: str
    """`active`, `paused` or `finished` (no run is left)."""
    definition: Definition
    generation: int
    next_ms: tuple[int, ...] = ()
    """The next three planned times; the first is the one in the timeline."""
    due_ms: int | None = None
    """When the first of them starts: later than planned if starts are spread."""
    runs: int = 0
    not_run: dict[str, int] = {}
    """Planned times that did not run, by reason: missed, overlap, paused, cancelled, lost."""
    recent_not_run: tuple[NotRun, ...] = ()
    last_runs: tuple[PastRun, ...] = ()
    """The last finished runs, the newest last."""
    running_since_ms: int | None = None
    """When the last run began, while its end is not known."""
    worst_case: WorstCase | None = None
    """How long one run may take with all its retries; None if computed without settings."""
    findings: tuple[Finding, ...] = ()
    """Warnings, by the same settings."""

    @property
    def payload(self) -> Any:
        """The payload as JSON values, or the bytes if it was given as bytes."""
        definition = self.definition
        return definition.payload if definition.raw else msgspec.json.decode(definition.payload)

    def as_dict(self) -> dict[str, Any]:
        """Return the view for programs: times as ISO 8601 in the schedule's zone."""
        at = partial(_iso, self.definition.zone)
        shown: dict[str, Any] = {
            "name": self.name,
            "state": self.state,
            "generation": self.generation,
            **written(self.definition),
            "specs": list(self.definition.specs),
            "next": [at(ms) for ms in self.next_ms],
            "runs": self.runs,
            "not_run": self.not_run,
            "recent_not_run": [
                {"from": at(one.from_ms), "to": at(one.to_ms), "count": one.count, "reason": one.reason}
                for one in self.recent_not_run
            ],
            "last_runs": [_run_as_dict(run, at) for run in self.last_runs],
            "running_since": None if self.running_since_ms is None else at(self.running_since_ms),
            "changed": {"at": at(self.definition.at_ms), "by": self.definition.by, "note": self.definition.note},
            "tz_version": self.definition.tz_version,
        }
        if self.due_ms is not None and self.next_ms and self.due_ms != self.next_ms[0]:
            shown["starts"] = at(self.due_ms)
        if self.state == "paused":
            shown["paused"] = _rest(self.definition)
        if self.worst_case is not None:
            shown["worst_case"] = {"ms": self.worst_case.ms, "sum": self.worst_case.text}
            shown["findings"] = msgspec.to_builtins(self.findings)
        return shown


def _iso(zone_name: str, at_ms: int) -> str:
    return zone(zone_name).datetime(at_ms).isoformat()


def _run_as_dict(run: PastRun, at: Callable[[int], str]) -> dict[str, Any]:
    ended = run.ended_ms
    return {
        "planned": at(run.planned_ms),
        "began": at(run.began_ms),
        "ended": None if ended is None else at(ended),
        "ms": None if ended is None else ended - run.began_ms,
        "outcome": run.outcome,
    }


def written(definition: Definition) -> dict[str, Any]:
    """Return a definition as people write it, without fields that have their default."""
    said = _in_words(definition, definition.zone)
    return {word: said[word] for word in said if word in _ALWAYS or said[word] != _DEFAULTS[word]}


def revision_as_dict(definition: Definition) -> dict[str, Any]:
    """Return one revision, for programs: author, time, note, and definition."""
    about = {field: getattr(definition, field) for field in ("generation", "at_ms", "by", "note", "tz_version")}
    rest = _rest(definition)
    return {
        **about,
        **written(definition),
        "specs": list(definition.specs),
        **({} if rest is None else {"paused": rest}),
    }


def describe_changes(old: Definition, new: Definition) -> dict[str, tuple[Any, Any]]:
    """Return the changes of an edit in input form: field -> (before, after)."""
    was = {**_in_words(old, new.zone), "timezone": old.zone, "paused": _rest(old)}
    now = {**_in_words(new, new.zone), "paused": _rest(new)}
    found: dict[str, tuple[Any, Any]] = {}
    for field in changes(old, new):
        if field == "specs":
            found |= {word: (was[word], now[word]) for word in TIMES if was[word] != now[word]}
        else:
            word = _WORDS.get(field, field)
            found[word] = (was[word], now[word])
    return found


def _rest(definition: Definition) -> dict[str, Any] | None:
    pause, at = definition.paused, partial(_iso, definition.zone)
    if pause is None:
        return None
    until = None if pause.until_ms is None else at(pause.until_ms)
    return {"since": at(pause.at_ms), "until": until, "mode": pause.mode, "reason": pause.reason, "by": pause.by}


def _in_words(definition: Definition, zone_name: str) -> dict[str, Any]:
    """Return all fields in input form, with instants as times of this zone."""

    def at(ms: int | None) -> str | None:
        return None if ms is None else _iso(zone_name, ms)

    timeout_ms = definition.timeout_ms
    return {
        **_times(definition.specs),
        "timezone": zone_name,
        "target": definition.target,
        "payload": repr(definition.payload) if definition.raw else msgspec.json.decode(definition.payload),
        "start": at(definition.start_ms),
        "end": at(definition.end_ms),
        "timeout": None if timeout_ms is None else span_text(timeout_ms),
        "grace": span_text(definition.grace_ms),
        "jitter": span_text(definition.jitter_ms),
        "spread": span_text(definition.spread_ms),
        "exclude": list(definition.exclude),
        "max_runs": definition.max_runs,
        "dst_gap": definition.gap,
        "dst_overlap": definition.dst_overlap,
        "lane": definition.lane,
        "retry": definition.retry,
        "misfire": definition.misfire,
        "overlap": definition.overlap,
        "pinned": definition.pinned,
        "source": definition.source,
    }


def _times(specs: Sequence[str]) -> dict[str, Any]:
    """Return specs in the fields that they were given in."""
    cron: list[str] = []
    every: list[str] = []
    after_end: str | None = None
    for text in specs:
        kind, span = kind_of(text), text.partition(" ")[2]
        if kind == "every":
            every.append(span)
        elif kind == "after_end" and after_end is None:
            after_end = span
        else:
            cron.append(text)
    return {"cron": cron, "every": every, "after_end": after_end}


def span_text(ms: int) -> str:
    """Return `90s` or `5m`: the span in the largest unit that gives a whole number."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


_WORDS: Final = {
    "zone": "timezone", "gap": "dst_gap", "raw": "payload", "start_ms": "start", "end_ms": "end",
    "timeout_ms": "timeout", "grace_ms": "grace", "jitter_ms": "jitter", "spread_ms": "spread",
}  # fmt: skip
_ALWAYS: Final = ("timezone", "target", "payload")
_DEFAULTS: Final = _in_words(Definition(name="", specs=(), target=""), "UTC")


def view_of(definition: Definition, link: ChainState | None, now_ms: int) -> ScheduleView:
    state = ChainMemory() if link is None else link.state
    planned_ms = 0 if link is None else link.planned_ms
    runs = (planned_ms, *definition.next_runs(planned_ms, 2, runs=state.runs + 1)) if planned_ms else ()
    paused = definition.paused_at(now_ms)
    return ScheduleView(
        name=definition.name,
        state="paused" if paused else "active" if planned_ms else "finished",
        definition=definition,
        generation=definition.generation,
        next_ms=runs,
        due_ms=definition.due_ms(planned_ms) if planned_ms else None,
        runs=state.runs,
        not_run=state.not_run,
        recent_not_run=state.recent,
        last_runs=state.history,
        running_since_ms=None if state.last_is_over else state.began_ms,
    )


class Backfilled(msgspec.Struct, frozen=True):
    """Result, or preview, of a backfill."""

    planned: int
    """Past planned times in the range."""
    created: int
    kept: int
    """Times whose ids are known: they ran, or wait to run."""
    first_ms: int | None = None
    last_ms: int | None = None


class SchedulePage(msgspec.Struct, frozen=True):
    """Some schedules, and the cursor of the next page (None at the end)."""

    schedules: list[ScheduleView]
    next: str | None
    """Cursor of the next page; None on the last."""
