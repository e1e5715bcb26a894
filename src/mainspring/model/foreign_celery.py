"""Schedules of Celery beat and RedBeat, read into ours. Python is read and never run."""

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from .errors import InvalidInput
from .foreign_schedules import Imported
from .queues import check_queue
from .schedule import Definition
from .schedule_input import define

_CRONTAB_FIELDS: Final = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_LONG_NAME: Final = re.compile(r"[A-Za-z]{4,}")
_DAYS: Final = re.compile(r"(\*|([0-9]{1,2})(?:-([0-9]{1,2}))?)(?:/([1-9][0-9]?))?")
_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def read_celery(text: str, *, zone: str = "UTC") -> Imported:
    """A beat_schedule: JSON, or a Python file in which it is assigned. A time zone said there goes before `zone`."""
    found = Imported()
    entries, own_zone = _beat_entries(text)
    for name, entry in entries.items():
        try:
            found.definitions.append(_celery_entry(found, str(name), entry, own_zone or zone))
        except InvalidInput as error:
            found.problems.append(f"{name}: {error}")
    return found


def _beat_entries(text: str) -> tuple[Mapping[Any, Any], str | None]:
    try:
        value = json.loads(text)
        zone = value.get("timezone") if isinstance(value, Mapping) and "beat_schedule" in value else None
    except ValueError:
        value, zone = _assigned(text, "beat_schedule"), _assigned(text, "timezone")
    if isinstance(value, Mapping) and "beat_schedule" in value:
        value = value["beat_schedule"]
    if not isinstance(value, Mapping):
        raise InvalidInput("no beat_schedule was found: give JSON, or a Python file with beat_schedule = {…}")
    return value, zone if isinstance(zone, str) else None


def _assigned(text: str, wanted: str) -> Any:
    """The last value that the file gives to a name, or an attribute, that ends so."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InvalidInput(f"neither JSON nor Python: {error}") from None
    found: Any = None
    in_order = sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))
    for node in in_order:
        if isinstance(node, ast.Call) and _name_of(node.func) == "update":
            said = [one.value for one in node.keywords if one.arg is not None and one.arg.lower().endswith(wanted)]
            found = _value(said[-1]) if said else found  # app.conf.update(beat_schedule={…})
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if _name_of(target).lower().endswith(wanted):
                found = _value(node.value)
            elif isinstance(target, ast.Subscript) and _name_of(target.value).lower().endswith(wanted):
                found = {**(found or {}), _value(target.slice): _value(node.value)}  # beat_schedule["one more"] = {…}
    return found


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _value(node: ast.expr) -> Any:
    """Literals, and the calls that beat schedules are made of: crontab(…), timedelta(…), schedule(…)."""
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _value(node.left), _value(node.right)
        if _is_number(left) and _is_number(right) and not (isinstance(node.op, ast.Div) and right == 0):
            return _ARITHMETIC[type(node.op)](left, right)  # 60 * 5
    if isinstance(node, ast.Call):
        name = _name_of(node.func)
        said = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
        return {"__type__": name, "args": [_value(one) for one in node.args], **said}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return {"__type__": ast.unparse(node)}


def _celery_entry(found: Imported, name: str, entry: Any, zone: str) -> Definition:
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
        name.replace("@", "-"),
        **_celery_times(entry.get("schedule"), zone),
        target=f"queue:{queue}/{entry['task']}",
        payload=kwargs or None,
        note="Celery beat",
    )


def _celery_times(schedule: Any, zone: str) -> dict[str, Any]:
    if _is_number(schedule):
        return {"every": f"{round(schedule * 1000)}ms"}
    kind = schedule.get("__type__") if isinstance(schedule, Mapping) else None
    if kind == "timedelta":
        return {"every": f"{round(_timedelta_s(schedule) * 1000)}ms"}
    if kind in ("schedule", "interval"):
        every = schedule.get("run_every", schedule.get("every", (schedule.get("args") or [None])[0]))
        seconds = _timedelta_s(every) if isinstance(every, Mapping) else every
        if not _is_number(seconds):
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
    if not all(map(_is_number, given.values())):
        raise InvalidInput(f"the interval {said!r} is not made of numbers")
    return float(sum(units[unit] * value for unit, value in given.items()))


def _crontab_fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """Celery wants both day fields to fit, a cron line either: the other days of the month are then excluded."""
    given = dict(zip(_CRONTAB_FIELDS, said.get("args") or [], strict=False))
    given |= {field: said[field] for field in _CRONTAB_FIELDS if said.get(field) is not None}
    values = [given.get(field, "*") for field in _CRONTAB_FIELDS]
    fields = [",".join(map(str, one)) if isinstance(one, list) else str(one).replace(" ", "") for one in values]
    minute, hour, day, month, weekday = (_LONG_NAME.sub(lambda name: name[0][:3], field) for field in fields)
    if day == "*" or weekday == "*":
        return {"cron": f"{minute} {hour} {day} {month} {weekday}"}
    others = sorted(set(range(1, 32)) - _days(day))
    line = f"{minute} {hour} * {month} {weekday}"
    return {"cron": line, "exclude": [f"* * {','.join(map(str, others))} * *"]} if others else {"cron": line}


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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
