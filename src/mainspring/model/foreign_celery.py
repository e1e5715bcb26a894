"""Schedules of Celery beat and RedBeat, read into ours. Python is read and never run."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from .errors import InvalidInput
from .foreign_python import Unread, is_number, parse, setting, table, unread_in
from .foreign_schedules import Imported, unused
from .queues import check_queue
from .schedule import Definition
from .schedule_input import define

_CRONTAB_FIELDS: Final = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_SETTLED_FIELDS: Final = 2
"""So many fields come first in every release of Celery: the day of week was the third once, and is the last now."""
_LONG_NAME: Final = re.compile(r"[A-Za-z]{4,}")
_DAYS: Final = re.compile(r"(\*|([0-9]{1,2})(?:-([0-9]{1,2}))?)(?:/([1-9][0-9]?))?")
_RANGE: Final = re.compile(r"(\w+)-(\w+)(?:/([1-9][0-9]?))?")
_BOUNDS: Final = {"minute": (0, 59), "hour": (0, 23), "day_of_month": (1, 31), "month_of_year": (1, 12)}
_WEEK: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_YEAR: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NAMES: Final = {name: number for number, name in (*enumerate(_WEEK), *enumerate(_YEAR, 1))}


def read_celery(text: str, *, zone: str = "UTC") -> Imported:
    """A beat_schedule: JSON, or a Python file in which it is assigned. A time zone said there goes before `zone`."""
    found = Imported()
    entries, own_zone = _beat_entries(text)
    if isinstance(own_zone, Unread):
        found.problems.append(f"timezone: {own_zone}; times are taken as of {zone}")
        own_zone = None
    for name, entry in entries.items():
        if isinstance(name, Unread):
            found.problems.append(f"left out: {name}")
            continue
        try:
            found.definitions.append(_celery_entry(found, str(name), entry, own_zone or zone))
        except InvalidInput as error:
            found.problems.append(f"{name}: {error}")
    return found


def _beat_entries(text: str) -> tuple[Mapping[Any, Any], str | Unread | None]:
    try:
        value = json.loads(text)
        zone = value.get("timezone") if isinstance(value, Mapping) and "beat_schedule" in value else None
    except ValueError:
        tree = parse(text)
        value, zone = table(tree, "beat_schedule"), setting(tree, "timezone")
    if isinstance(value, Unread):
        raise InvalidInput(f"beat_schedule: {value}")
    if isinstance(value, Mapping) and "beat_schedule" in value:
        value = value["beat_schedule"]
    if not isinstance(value, Mapping):
        raise InvalidInput("no beat_schedule was found: give JSON, or a Python file with beat_schedule = {…}")
    return value, zone if isinstance(zone, (str, Unread)) else None


def _check_read(entry: Any) -> None:
    """An entry is taken over whole, or not at all: what is guessed would run with other arguments."""
    parts = [entry]
    if isinstance(entry, Mapping):
        options = entry.get("options")
        parts = [list(entry), *(entry.get(part) for part in ("task", "args", "kwargs"))]
        # Other options are left out anyway, whatever they are.
        parts += [list(options), options.get("queue")] if isinstance(options, Mapping) else [options]
        parts.append(unread_in(entry.get("schedule"), times=True))
    unread = unread_in(parts)
    if unread is not None:
        raise InvalidInput(str(unread))


def _celery_entry(found: Imported, name: str, entry: Any, zone: str) -> Definition:
    _check_read(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("task"), str):
        raise InvalidInput("an entry needs a task and a schedule")
    options, args, said = entry.get("options") or {}, entry.get("args") or [], entry.get("kwargs") or {}
    if not isinstance(options, Mapping) or not isinstance(said, Mapping):
        raise InvalidInput("options and kwargs are tables")
    queue, kwargs = check_queue(options.get("queue", "celery")), dict(said)
    if others := sorted(str(one) for one in options if one != "queue"):
        found.problems.append(f"{name}: the options {', '.join(others)} are left out")
    if args:
        found.problems.append(f"{name}: positional arguments {args!r} have no names here; give them as keywords")
        kwargs["args"] = args
    return define(
        unused(name.replace("@", "-"), (one.name for one in found.definitions)),
        **_celery_times(entry.get("schedule"), zone),
        target=f"queue:{queue}/{entry['task']}",
        payload=kwargs or None,
        note="Celery beat",
    )


def _celery_times(schedule: Any, zone: str) -> dict[str, Any]:
    if is_number(schedule):
        return {"every": f"{round(schedule * 1000)}ms"}
    kind = schedule.get("__type__") if isinstance(schedule, Mapping) else None
    if kind == "timedelta":
        return {"every": f"{round(_timedelta_s(schedule) * 1000)}ms"}
    if kind in ("schedule", "interval"):
        every = schedule.get("run_every", schedule.get("every", (schedule.get("args") or [None])[0]))
        seconds = _timedelta_s(every) if isinstance(every, Mapping) else every
        if not is_number(seconds):
            raise InvalidInput(f"the interval {every!r} is not a number of seconds")
        return {"every": f"{round(seconds * 1000)}ms"}
    if kind == "crontab":
        return {**_crontab_fields(schedule), "timezone": schedule.get("timezone") or zone}
    raise InvalidInput(f"the schedule {schedule!r} is of a kind that is not known here (solar times are not)")


def _timedelta_s(said: Mapping[str, Any]) -> float:
    units = {"days": 86_400, "seconds": 1, "microseconds": 1e-6, "milliseconds": 1e-3, "minutes": 60, "hours": 3600}
    units["weeks"] = 604_800
    given = dict(zip(("days", "seconds", "microseconds"), said.get("args") or [], strict=False))
    given |= {unit: said[unit] for unit in units if unit in said}
    if not all(map(is_number, given.values())):
        raise InvalidInput(f"the interval {said!r} is not made of numbers")
    return float(sum(units[unit] * value for unit, value in given.items()))


def _crontab_fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """Celery wants both day fields to fit, a cron line either: the other days of the month are then excluded."""
    first = said.get("args") or []
    if any(one != "*" for one in first[_SETTLED_FIELDS:]):
        raise InvalidInput(
            "crontab(…): releases of Celery differ in which fields come after minute and hour; name them, day_of_week=…"
        )
    given = dict(zip(_CRONTAB_FIELDS, first, strict=False))
    given |= {field: said[field] for field in _CRONTAB_FIELDS if said.get(field) is not None}
    values = [given.get(field, "*") for field in _CRONTAB_FIELDS]
    fields = [",".join(map(str, one)) if isinstance(one, list) else str(one).replace(" ", "") for one in values]
    fields = [_LONG_NAME.sub(lambda name: name[0][:3], field) for field in fields]
    minute, hour, day, month, weekday = map(_unwrapped, _CRONTAB_FIELDS, fields)
    if day == "*" or weekday == "*":
        return {"cron": f"{minute} {hour} {day} {month} {weekday}"}
    others = sorted(set(range(1, 32)) - _days(day))
    line = f"{minute} {hour} * {month} {weekday}"
    return {"cron": line, "exclude": [f"* * {','.join(map(str, others))} * *"]} if others else {"cron": line}


def _unwrapped(field: str, text: str) -> str:
    """Celery's ranges may go over the end, `22-2` and `fri-mon`, and count their steps across it; ours may not."""
    return ",".join(_straight(part, *_BOUNDS.get(field, (0, 6))) for part in text.split(","))


def _straight(part: str, low: int, high: int) -> str:
    match = _RANGE.fullmatch(part)
    ends = [] if match is None else [_NAMES.get(end.lower(), end) for end in match.group(1, 2)]
    if match is None or not all(str(end).isdecimal() for end in ends):
        return part
    first, last = map(int, ends)
    if not low <= last < first <= high:
        return part
    if match[3] is None:
        return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ((first, high), (low, last)))
    return ",".join(map(str, [*range(first, high + 1), *range(low, last + 1)][:: int(match[3])]))


def _days(text: str) -> set[int]:
    """The days of a month that a field of Celery's names: 1-7, */2, 1-31/5, lists of these."""
    found: set[int] = set()
    for part in text.split(","):
        match = _DAYS.fullmatch(part)
        if match is None:
            raise InvalidInput(f"the day of month {part!r} is not understood; write 1-7, */2 or 1,15")
        first, last = (1, 31) if match[1] == "*" else (int(match[2]), int(match[3] or match[2]))
        found |= set(range(first, last + 1, int(match[4] or 1)))
    return found


# -- RedBeat ----------------------------------------------------------------------------------------------------------


def read_redbeat(definitions: Mapping[str, str], *, zone: str = "UTC") -> Imported:
    """RedBeat's entries: key -> the JSON of its field `definition`."""
    found = Imported()
    for key, text in definitions.items():
        try:
            entry = json.loads(text)
            name = str(entry.get("name") or key.partition(":")[2]).replace("@", "-")
            if entry.get("enabled") is False:
                found.problems.append(f"{name}: is switched off there, and was left out")
                continue
            found.definitions.append(_celery_entry(found, name, entry, zone))
        except (InvalidInput, ValueError, AttributeError) as error:
            found.problems.append(f"{key}: {error}")
    return found
