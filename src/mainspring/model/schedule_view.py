"""A schedule as people look at it: its definition, its next three runs, its last ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from .chain import Link, NotRun, Run, State
from .schedule import Definition
from .zone import zone


class ScheduleView(msgspec.Struct, frozen=True):
    """What is known of a schedule. Instants are epoch milliseconds."""

    name: str
    state: str
    """`active`, `paused` or `finished` (no run is left)."""
    definition: Definition
    generation: int
    next_ms: tuple[int, ...] = ()
    """The next three planned times; the first is the one that waits in the timeline."""
    due_ms: int | None = None
    """When the first of them starts: later than planned where starts are spread."""
    runs: int = 0
    not_run: dict[str, int] = {}
    """Planned times that did not run, by reason: missed, overlap, paused, cancelled, lost."""
    recent_not_run: tuple[NotRun, ...] = ()
    last_runs: tuple[Run, ...] = ()
    """The last that are over, the newest last."""
    running_since_ms: int | None = None
    """When the last run began, as long as its end was not seen."""

    @property
    def payload(self) -> Any:
        definition = self.definition
        return definition.payload if definition.raw else msgspec.json.decode(definition.payload)

    def as_dict(self) -> dict[str, Any]:
        """For programs: times as ISO 8601 in the schedule's zone."""
        at = partial(_iso, self.definition.zone)
        pause = self.definition.paused
        shown: dict[str, Any] = {
            "name": self.name,
            "state": self.state,
            "generation": self.generation,
            **written(self.definition),
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
        if self.state == "paused" and pause is not None:
            until = None if pause.until_ms is None else at(pause.until_ms)
            shown["paused"] = {
                "since": at(pause.at_ms), "until": until, "mode": pause.mode, "reason": pause.reason, "by": pause.by,
            }  # fmt: skip
        return shown


def _iso(zone_name: str, at_ms: int) -> str:
    return zone(zone_name).datetime(at_ms).isoformat()


def _run_as_dict(run: Run, at: Callable[[int], str]) -> dict[str, Any]:
    ended = run.ended_ms
    return {
        "planned": at(run.planned_ms),
        "began": at(run.began_ms),
        "ended": None if ended is None else at(ended),
        "ms": None if ended is None else ended - run.began_ms,
        "outcome": run.outcome,
    }


def written(definition: Definition) -> dict[str, Any]:
    """A definition as people write it; what has its default is left out."""
    at = partial(_iso, definition.zone)
    plain = Definition(name=definition.name, specs=(), target="")
    said: dict[str, Any] = {"specs": list(definition.specs), "timezone": definition.zone, "target": definition.target}
    said["payload"] = repr(definition.payload) if definition.raw else msgspec.json.decode(definition.payload)
    for field, ours in (("start", "start_ms"), ("end", "end_ms")):
        if (value := getattr(definition, ours)) is not None:
            said[field] = at(value)
    for field, ours in (
        ("timeout", "timeout_ms"),
        ("grace", "grace_ms"),
        ("jitter", "jitter_ms"),
        ("spread", "spread_ms"),
    ):
        if (value := getattr(definition, ours)) != getattr(plain, ours):
            said[field] = span_text(value)
    if definition.exclude:
        said["exclude"] = list(definition.exclude)
    names = {"gap": "dst_gap"}
    for field in ("max_runs", "gap", "dst_overlap", "lane", "retry", "misfire", "overlap", "source"):
        if (value := getattr(definition, field)) != getattr(plain, field):
            said[names.get(field, field)] = value
    return said


def span_text(ms: int) -> str:
    """`90s`, `5m`: the largest unit that says it in whole numbers."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def view_of(definition: Definition, link: Link | None, now_ms: int) -> ScheduleView:
    state = State() if link is None else link.state
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
    """What a backfill came to, or would come to."""

    planned: int
    """Planned times in the range that have passed."""
    created: int
    kept: int
    """Their ids are known: they ran, or wait to run."""
    first_ms: int | None = None
    last_ms: int | None = None


class SchedulePage(msgspec.Struct, frozen=True):
    schedules: list[ScheduleView]
    next: str | None
    """Where to go on; None at the end."""
