"""Schedules as people write them: from arguments, tables of a file, or code, and the changes of an edit."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any, Final, TypedDict, cast, get_type_hints

import msgspec

from ..errors import InvalidInput, NotFound
from ..ids import check_schedule_name
from ..limits import LAST_START_MS
from ..retry import RetryPolicy, policy_of, policy_text, retry_line
from ..task import encode_payload
from ..text import did_you_mean, plain
from ..times import Delay, When, delay_ms, instant_ms, read_iso
from .definition import Definition
from .recurrence import AFTER_END, EVERY, TIMES, kind_of, read_spec
from .zone import Gap, Overlap, zone


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule beside its times and its target. docs/schedules.md explains each."""

    timezone: str
    exclude: str | Sequence[str]
    start: When | None
    end: When | None
    max_runs: int | None
    dst_gap: Gap
    dst_overlap: Overlap
    lane: str | None
    retry: RetryPolicy | str | Mapping[str, Any] | None
    retries: int | None
    timeout: Delay | None
    misfire: str
    grace: Delay
    overlap: str
    jitter: Delay | None
    spread: Delay | None
    note: str
    by: str
    source: str


class TimedOptions(ScheduleOptions, total=False):
    """With its times. `cron`, `every` and `after_end` add up: a schedule runs when any of them says so."""

    cron: str | Sequence[str] | None
    every: Delay | Sequence[Delay] | None
    after_end: Delay | None
    payload: Any


class ScheduleFields(TimedOptions, total=False):
    """All fields of a schedule."""

    target: str
    pinned: bool


FIELDS: Final = frozenset(get_type_hints(ScheduleFields))


def edited_by(current: Definition, fields: Mapping[str, Any]) -> Definition:
    """Return the edited schedule. Times without an offset are in its zone, or in the new one if it changes.

    Specs of a kind that is not given stay: a new interval does not change the cron lines.
    """
    waits = {"retry": current.retry} if "retries" in fields else {}
    found = read_fields(current.name, {"timezone": current.zone, **waits, **fields})
    if "specs" in found:
        given = {field for field in TIMES if field in fields} | set(map(kind_of, found["specs"]))
        kept = (text for text in current.specs if kind_of(text) not in given)
        found["specs"] = tuple(sorted((*kept, *found["specs"]), key=lambda text: TIMES.index(kind_of(text))))
    return msgspec.structs.replace(current, **found)


def read_fields(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Definition; errors name the schedule and the field."""
    unknown = set(fields) - FIELDS
    if unknown:
        raise InvalidInput(f"schedule {name!r}: unknown {', '.join(sorted(unknown))}{_near(unknown)}")
    found: dict[str, Any] = {}
    for field, value in fields.items():
        if field in ("start", "end"):
            found[f"{field}_ms"] = None if value is None else _bound_ms(value, fields.get("timezone"), field)
        elif field in _READERS:
            ours, read = _READERS[field]
            found[ours] = read(name, field, value)
    if fields.get("retries") is not None:
        policy = policy_of(cast("int", fields["retries"]), found.get("retry"))
        found["retry"] = None if policy is None else policy_text(policy)
    if any(field in fields for field in TIMES):
        found["specs"] = _specs(name, fields)
    if "payload" in fields:
        found["payload"], found["raw"] = _payload(name, fields["payload"])
    return found


def _plain(name: str, field: str, value: Any) -> Any:
    kind: type = int if field == "max_runs" else str
    may_be_none = field in ("max_runs", "lane")
    if (value is None and may_be_none) or (isinstance(value, kind) and not isinstance(value, bool)):
        return plain(value)
    wanted = "a whole number" if kind is int else "a string"
    raise InvalidInput(f"schedule {name!r}: {field} is of type {type(value).__name__}; give {wanted}")


def _flag(name: str, field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"schedule {name!r}: {field} is of type {type(value).__name__}; give true or false")
    return value


def _timezone(name: str, field: str, value: Any) -> str:
    text: str = _plain(name, field, value)
    try:
        return zone(text).name
    except InvalidInput as error:
        raise InvalidInput(f"schedule {name!r}: {error}") from None


def define(name: str, /, **fields: Any) -> Definition:
    """Make a definition from a caller's fields; `check_definition` is called when it is written.

    Fields come from files, where `name` may be among them: there it is unknown like any other.
    """
    check_schedule_name(name)
    found = read_fields(name, fields)
    if not found.get("specs"):
        raise InvalidInput(f"schedule {name!r} says nothing about its times; give cron, every or after_end")
    if "target" not in found:
        raise InvalidInput(f"schedule {name!r} has no target, such as 'command:backup' or 'https://…'")
    return Definition(name=plain(name), **found)


def _texts(name: str, field: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for text in texts:
        if not isinstance(text, str):
            raise InvalidInput(
                f"schedule {name!r}: {field} is of type {type(text).__name__}; give a string, or several"
            )
    return texts


def _specs(name: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    every = () if fields.get("every") in (None, "") else fields["every"]  # an interval of 0 is a mistake
    spans = [every] if isinstance(every, str) or not isinstance(every, Sequence) else list(every)
    after_end = fields.get("after_end")
    specs = [
        *_texts(name, "cron", fields.get("cron") or ()),
        *(f"{EVERY} {_span(span, 'every')}" for span in spans),
        *([f"{AFTER_END} {_span(after_end, 'after_end')}"] if after_end not in (None, "") else ()),
    ]
    for text in specs:
        read_spec(text, name, 0)
    return tuple(" ".join(text.split()) for text in specs)


def _span(span: Delay, field: str) -> str:
    """Return the span as text; text stays as it was written: `90s` stays `90s`."""
    ms = delay_ms(span, field=field)
    return span.strip() if isinstance(span, str) else f"{ms}ms"


def _retry(_name: str, _field: str, retry: RetryPolicy | str | Mapping[str, Any] | None) -> str | None:
    if retry is None:
        return None
    return retry_line(RetryPolicy.read(retry) if isinstance(retry, Mapping) else retry)


def _span_ms(_name: str, field: str, value: Delay | None) -> int | None:
    return None if value is None else delay_ms(value, field=field)


def _span_or_zero(_name: str, field: str, value: Delay | None) -> int:
    return 0 if value is None else delay_ms(value, field=field)


def local_ms(when: When | date, zone_name: str | None, field: str) -> int:
    """Return an instant. One without an offset is in the schedule's zone, if that is known."""
    if isinstance(when, str):
        with contextlib.suppress(ValueError):
            when = read_iso(when.strip())
    elif isinstance(when, date) and not isinstance(when, datetime):
        when = datetime(when.year, when.month, when.day)  # noqa: DTZ001  # a day in a TOML file
    if isinstance(when, datetime) and when.tzinfo is None and isinstance(zone_name, str):
        when = when.replace(tzinfo=zone(zone_name).info)
    return instant_ms(when, field=field)


def _bound_ms(when: When | date, zone_name: str | None, field: str) -> int:
    """Check a bound of a schedule. A time that no calendar can show would break every list that contains it."""
    at_ms = local_ms(when, zone_name, field)
    if not 0 <= at_ms < LAST_START_MS:
        raise InvalidInput(f"{field} {str(when)[:40]!r} is outside of the years 1970 to 3084; leave it out for none")
    return at_ms


def _exclude(name: str, field: str, value: Any) -> tuple[str, ...]:
    return _texts(name, field, value or ())


def _payload(name: str, payload: Any) -> tuple[bytes, bool]:
    try:
        return encode_payload(payload)
    except InvalidInput as error:
        raise type(error)(f"schedule {name!r}: {error}") from None


def _near(unknown: set[str]) -> str:
    known = sorted(FIELDS)
    return did_you_mean(sorted(unknown), known) or f"; use {', '.join(known)}"


_READERS: Final[dict[str, tuple[str, Callable[[str, str, Any], Any]]]] = {
    **{field: (field, _plain) for field in ("target", "max_runs", "dst_overlap", "lane", "misfire", "overlap")},
    **{field: (field, _plain) for field in ("note", "by", "source")},
    "timezone": ("zone", _timezone),
    "pinned": ("pinned", _flag),
    "dst_gap": ("gap", _plain),
    "timeout": ("timeout_ms", _span_ms),
    "grace": ("grace_ms", _span_or_zero),
    "jitter": ("jitter_ms", _span_or_zero),
    "spread": ("spread_ms", _span_or_zero),
    "exclude": ("exclude", _exclude),
    "retry": ("retry", _retry),
}
"""Input field -> the Definition's name for it, and its reader."""


SOURCE: Final = "code"
"""Source of schedules that are declared in code."""


class Timetable:
    """Declared schedules by name. Threads that share one must lock it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Definition] = {}

    def add(self, definition: Definition) -> None:
        if definition.name in self._by_name:
            raise InvalidInput(f"a schedule {definition.name!r} is declared twice; give one of them another name")
        self._by_name[definition.name] = definition

    def remove(self, name: str) -> Definition:
        if name not in self._by_name:
            raise NotFound(f"there is no schedule {name!r} declared here")
        return self._by_name.pop(name)

    def find(self, name: str) -> Definition | None:
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[Definition]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)
