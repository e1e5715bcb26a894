"""One schedule as applications look at it: when it runs next, how its last runs went."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from .model.chain import Run
from .model.retry import RetryPolicy
from .model.schedule import Definition
from .model.schedule_view import ScheduleView
from .model.zone import Zone, zone


@dataclass(frozen=True, slots=True)
class EntryRun:
    """A run that is over."""

    planned: datetime
    began: datetime
    duration: timedelta | None
    """None where nobody saw its end."""
    outcome: str
    """`done`, `dead`, `cancelled`, …"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule at one moment. Times are aware, in the schedule's own zone."""

    name: str
    specs: tuple[str, ...]
    """Cron lines and intervals; it runs when any of them says so."""
    zone: str
    target: str
    next_runs: tuple[datetime, ...]
    """The next three planned times; less when it ends before."""
    last_runs: tuple[EntryRun, ...]
    """The newest last."""
    retries: int
    """Further attempts after a failed one."""
    generation: int
    """Grows with each edit; 0 as long as it is only declared in code."""
    paused: bool
    running_since: datetime | None = None
    runs: int = 0
    not_run: tuple[tuple[str, int], ...] = ()
    """Planned times that did not run, by reason: missed, overlap, paused, cancelled, lost."""

    @property
    def spec(self) -> str:
        """All of its times in one line."""
        return " or ".join(self.specs)


def entry_of(view: ScheduleView, policy: RetryPolicy) -> Entry:
    """What the store knows of a schedule; `policy` is the one by which its runs are retried."""
    definition, home = view.definition, zone(view.definition.zone)
    return Entry(
        name=view.name,
        specs=definition.times,
        zone=definition.zone,
        target=definition.target,
        next_runs=_times(home, view.next_ms),
        last_runs=tuple(_run(home, run) for run in view.last_runs),
        retries=policy.max_attempts - 1,
        generation=view.generation,
        paused=view.state == "paused",
        running_since=None if view.running_since_ms is None else home.datetime(view.running_since_ms),
        runs=view.runs,
        not_run=tuple(sorted(view.not_run.items())),
    )


def declared_entry(definition: Definition, policy: RetryPolicy, now_ms: int) -> Entry:
    """A schedule that is only declared: the scheduler has not started, or its time was over then."""
    home = zone(definition.zone)
    return Entry(
        name=definition.name,
        specs=definition.times,
        zone=definition.zone,
        target=definition.target,
        next_runs=_times(home, definition.next_runs(now_ms)),
        last_runs=(),
        retries=policy.max_attempts - 1,
        generation=0,
        paused=False,
    )


def _times(home: Zone, instants: "tuple[int, ...] | list[int]") -> tuple[datetime, ...]:
    return tuple(home.datetime(ms) for ms in instants)


def _run(home: Zone, run: Run) -> EntryRun:
    span = None if run.ended_ms is None else timedelta(milliseconds=run.ended_ms - run.began_ms)
    return EntryRun(home.datetime(run.planned_ms), home.datetime(run.began_ms), span, run.outcome)
