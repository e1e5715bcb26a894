"""The fields of a schedule as they are posted."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ..model.errors import InvalidInput
from ..model.times import instant_ms
from ..schedules import OnExisting
from .new_task import Moment

Texts = str | list[str]


class Times(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`cron`, `every` and `after_end` add up: it runs when any of them says so."""

    cron: Texts | UnsetType = UNSET
    every: Texts | UnsetType = UNSET
    after_end: str | UnsetType = UNSET
    timezone: str | UnsetType = UNSET
    exclude: Texts | UnsetType | None = UNSET
    start: Moment | UnsetType | None = UNSET
    end: Moment | UnsetType | None = UNSET
    dst_gap: str | UnsetType = UNSET
    dst_overlap: str | UnsetType = UNSET


class Preview(Times, forbid_unknown_fields=True, kw_only=True):
    """`name` decides where H falls; `after` is where to begin, now when it is left out."""

    name: str = "preview"
    count: int = 10
    after: Moment | None = None


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


def given(body: Times, leave: tuple[str, ...] = ()) -> dict[str, Any]:
    """What was said, for `define` and `edit`; instants in milliseconds."""
    said = {name: getattr(body, name) for name in body.__struct_fields__ if name not in leave}
    fields = {name: value for name, value in said.items() if value is not UNSET}
    for name in ("start", "end"):
        if fields.get(name) is not None:
            fields[name] = instant(fields[name], name)
    return fields


def instant(moment: Moment, field: str) -> int:
    """An instant in milliseconds; InvalidInput for what lies outside of all calendars."""
    try:
        at_ms = instant_ms(moment, field=field)
    except OverflowError:
        raise InvalidInput(f"{field}: {str(moment)[:80]!r} lies outside of the calendar") from None
    if not 0 <= at_ms < 1 << 45:
        raise InvalidInput(f"{field}: {str(moment)[:80]!r} lies outside of the calendar")
    return at_ms
