"""Schedules as people write them: from arguments, from tables of a file, and what an edit changes."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, get_type_hints

import msgspec

from .errors import InvalidInput
from .limits import MAX_PAYLOAD_BYTES
from .retry import RetryPolicy
from .retry_text import retry_line
from .schedule import Definition
from .slots import AFTER_END, read_spec
from .times import Delay, When, delay_ms, instant_ms

_to_json: Final = msgspec.json.Encoder().encode


class ScheduleFields(TypedDict, total=False):
    """What can be said of a schedule. `cron`, `every` and `after_end` add up: it runs when any of them says so."""

    cron: str | Sequence[str]
    every: Delay | Sequence[Delay]
    after_end: Delay
    target: str
    payload: Any
    timezone: str
    exclude: str | Sequence[str]
    start: When | None
    end: When | None
    max_runs: int | None
    dst_gap: str
    dst_overlap: str
    lane: str | None
    retry: RetryPolicy | str | Mapping[str, Any] | None
    timeout: Delay | None
    misfire: str
    grace: Delay
    overlap: str
    jitter: Delay | None
    spread: Delay | None
    note: str
    by: str
    source: str


FIELDS: Final = frozenset(get_type_hints(ScheduleFields))
_TIMES: Final = ("cron", "every", "after_end")
_PLAIN: Final = {
    "target": "target", "timezone": "zone", "max_runs": "max_runs", "dst_gap": "gap", "dst_overlap": "dst_overlap",
    "lane": "lane", "misfire": "misfire", "overlap": "overlap", "note": "note", "by": "by", "source": "source",
}  # fmt: skip
_SPANS: Final = {"timeout": "timeout_ms", "grace": "grace_ms", "jitter": "jitter_ms", "spread": "spread_ms"}
_INSTANTS: Final = {"start": "start_ms", "end": "end_ms"}
_ZERO_WHEN_NONE: Final = ("jitter_ms", "spread_ms")


def read_fields(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Definition that these say; errors name the schedule and the field."""
    unknown = set(fields) - FIELDS
    if unknown:
        raise InvalidInput(f"schedule {name!r}: unknown {', '.join(sorted(unknown))}{_near(unknown)}")
    found: dict[str, Any] = {ours: fields[field] for field, ours in _PLAIN.items() if field in fields}
    for field, ours in _SPANS.items():
        if field in fields:
            found[ours] = None if fields[field] is None else delay_ms(fields[field], field=field)
    for ours in _ZERO_WHEN_NONE:
        if found.get(ours, 0) is None:
            found[ours] = 0
    for field, ours in _INSTANTS.items():
        if field in fields:
            found[ours] = None if fields[field] is None else instant_ms(fields[field], field=field)
    if any(field in fields for field in _TIMES):
        found["specs"] = _specs(name, fields)
    if "exclude" in fields:
        found["exclude"] = _texts(fields["exclude"] or ())
    if "retry" in fields:
        found["retry"] = _retry(fields["retry"])
    if "payload" in fields:
        found["payload"], found["raw"] = _payload(name, fields["payload"])
    return found


def define(name: str, **fields: Any) -> Definition:
    """A definition from what callers say; `check_definition` is asked when it is written."""
    found = read_fields(name, fields)
    if "specs" not in found:
        raise InvalidInput(f"schedule {name!r} says nothing about its times; give cron, every or after_end")
    if "target" not in found:
        raise InvalidInput(f"schedule {name!r} has no target, such as 'command:backup' or 'https://…'")
    return Definition(name=name, **found)


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _specs(name: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    every = fields.get("every") or ()
    spans = [every] if isinstance(every, str) or not isinstance(every, Sequence) else list(every)
    after_end = fields.get("after_end")
    specs = [
        *_texts(fields.get("cron") or ()),
        *(f"@every {_span(span, 'every')}" for span in spans),
        *([f"{AFTER_END} {_span(after_end, 'after_end')}"] if after_end is not None else ()),
    ]
    for text in specs:
        if not isinstance(text, str):
            raise InvalidInput(f"schedule {name!r}: cron is a {type(text).__name__}; give a text such as '0 2 * * *'")
        read_spec(text, name, 0)
    return tuple(" ".join(text.split()) for text in specs)


def _span(span: Delay, field: str) -> str:
    """As it was written where it is a text: `90s` stays `90s`."""
    ms = delay_ms(span, field=field)
    return span.strip() if isinstance(span, str) else f"{ms}ms"


def _retry(retry: RetryPolicy | str | Mapping[str, Any] | None) -> str | None:
    if retry is None:
        return None
    return retry_line(RetryPolicy.read(retry) if isinstance(retry, Mapping) else retry)


def _payload(name: str, payload: Any) -> tuple[bytes, bool]:
    raw = isinstance(payload, (bytes, bytearray, memoryview))
    try:
        data = bytes(payload) if raw else _to_json(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"schedule {name!r}: payload cannot be written as JSON: {error}") from None
    if len(data) > MAX_PAYLOAD_BYTES:
        raise InvalidInput(f"schedule {name!r}: payload has {len(data)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
    return data, raw


def _near(unknown: set[str]) -> str:
    from difflib import get_close_matches  # only for an error: it is slow to load

    near = [match for field in sorted(unknown) for match in get_close_matches(field, sorted(FIELDS), n=1)]
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(FIELDS))}"
