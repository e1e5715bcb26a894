"""A schedule as people look at it: its definition, its next three runs, its last ones."""

from typing import Any

import msgspec

from .chain import Link, NotRun, Run, State
from .schedule import Definition


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
