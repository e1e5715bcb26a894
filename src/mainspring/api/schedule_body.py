"""Schedules as they are posted and answered."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ..model.errors import InvalidInput
from ..model.lint import Finding
from ..model.schedule import PauseMode
from ..model.schedule_input import local_ms
from ..schedules import OnExisting
from .new_task import Moment

Texts = str | list[str]


class Times(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`cron`, `every` and `after_end` add up: it runs when any of them says so."""

    cron: Texts | UnsetType | None = UNSET
    every: Texts | UnsetType | None = UNSET
    after_end: str | UnsetType | None = UNSET
    timezone: str | UnsetType = UNSET
    exclude: Texts | UnsetType | None = UNSET
    start: Moment | UnsetType | None = UNSET
    end: Moment | UnsetType | None = UNSET
    dst_gap: str | UnsetType = UNSET
    dst_overlap: str | UnsetType = UNSET


class Preview(Times, forbid_unknown_fields=True, kw_only=True):
    """`name` decides where H falls; `after` is where to begin, now when it is left out.

    With a `target` it is also told how long one run may take, and whether that is longer than until the next.
    """

    name: str = "preview"
    count: int = 10
    after: Moment | None = None
    target: str | UnsetType = UNSET
    retry: str | dict[str, Any] | UnsetType | None = UNSET
    timeout: str | UnsetType | None = UNSET
    overlap: str | UnsetType = UNSET


class Fields(Times, forbid_unknown_fields=True, kw_only=True):
    """Everything that can be said of a schedule."""

    target: str | UnsetType = UNSET
    payload: Any = UNSET
    max_runs: int | UnsetType | None = UNSET
    lane: str | UnsetType | None = UNSET
    retry: str | dict[str, Any] | UnsetType | None = UNSET
    timeout: str | UnsetType | None = UNSET
    misfire: str | UnsetType = UNSET
    grace: str | UnsetType = UNSET
    overlap: str | UnsetType = UNSET
    jitter: str | UnsetType | None = UNSET
    spread: str | UnsetType | None = UNSET
    note: str | UnsetType = UNSET
    source: str | UnsetType = UNSET


class NewSchedule(Fields, forbid_unknown_fields=True, kw_only=True):
    """A name is taken: `reject` it, `keep` what is there, or `replace` that."""

    name: str
    on_conflict: OnExisting = "reject"


class ListSchedules(msgspec.Struct, frozen=True):
    limit: int = 50
    cursor: str | None = None


class Longest(msgspec.Struct):
    """How long one run may take when every attempt runs into its timeout and every wait is the longest."""

    ms: int
    sum: str


class Schedule(msgspec.Struct):
    """A schedule: its definition, its next three runs, its last ones. Times are ISO 8601 in its own zone.

    `worst_case` and `findings`, what is probably not meant, go by the settings of the node. Lists leave both out.
    """

    name: str
    state: str
    generation: int
    specs: list[str]
    timezone: str
    target: str
    next: list[str]
    runs: int
    not_run: dict[str, int]
    last_runs: list[dict[str, Any]]
    running_since: str | None
    changed: dict[str, Any]
    payload: Any = None
    worst_case: Longest | UnsetType = UNSET
    findings: list[Finding] | UnsetType = UNSET


class ScheduleList(msgspec.Struct):
    """In no order; `next` is the cursor of the next page, null at the end."""

    schedules: list[Schedule]
    next: str | None


class Edit(Fields, forbid_unknown_fields=True):
    """What is left out stays, each of `cron`, `every` and `after_end` for itself; null takes one away.

    With `generation` it is a conflict if somebody else has edited it since that one.
    """

    generation: int | None = None


class PauseBody(msgspec.Struct, forbid_unknown_fields=True, rename={"for_": "for"}):
    """`drop` leaves out what falls into the pause; with `hold` the misfire rule decides at its end."""

    reason: str = ""
    until: Moment | None = None
    for_: str | None = None
    mode: PauseMode = "drop"


class Trigger(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None


class Backfill(msgspec.Struct, forbid_unknown_fields=True):
    """What was planned in [start, end) and has passed; `rate` is runs a second."""

    start: Moment
    end: Moment
    rate: float | None = None
    dry_run: bool = False


class Rollback(msgspec.Struct, forbid_unknown_fields=True):
    """To this former revision; the last one when none is given."""

    generation: int | None = None


class Removed(msgspec.Struct):
    name: str
    outcome: str


class Runs(msgspec.Struct):
    """The next runs in the schedule's zone, and what is probably not meant."""

    runs: list[str]
    warnings: list[str]
    worst_case: Longest | UnsetType = UNSET


class History(msgspec.Struct):
    """The present revision first."""

    revisions: list[dict[str, Any]]


def given(body: Times, zone: str, leave: tuple[str, ...] = ()) -> dict[str, Any]:
    """What was said, for `define` and `edit`; instants in milliseconds. `zone` is the schedule's, if it says none."""
    said = {name: getattr(body, name) for name in body.__struct_fields__ if name not in leave}
    fields = {name: value for name, value in said.items() if value is not UNSET}
    for name in ("start", "end"):
        if fields.get(name) is not None:
            fields[name] = instant(fields[name], name, fields.get("timezone", zone))
    return fields


def instant(moment: Moment, field: str, zone: str | None = None) -> int:
    """An instant in milliseconds; InvalidInput for what lies outside of all calendars.

    Without an offset it is a time of the zone; where there is none, that is refused.
    """
    try:
        at_ms = local_ms(moment, zone, field)
    except OverflowError:
        raise InvalidInput(f"{field}: {str(moment)[:80]!r} lies outside of the calendar") from None
    if not 0 <= at_ms < 1 << 45:
        raise InvalidInput(f"{field}: {str(moment)[:80]!r} lies outside of the calendar")
    return at_ms
