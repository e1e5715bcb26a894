"""Schedules of other programs converted to ours: crontab, Celery beat and RedBeat. Python is parsed, never run."""

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..errors import InvalidInput
from ..ids import MAX_SCHEDULE_NAME_BYTES
from ..targets.names import check_queue
from .definition import Definition
from .input import define

_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_SHOWN: Final = 80
_TIMES: Final = ("crontab", "timedelta", "schedule", "solar")
_CHANGING: Final = ("setdefault", "pop", "popitem", "clear", "update")


class Unread(NamedTuple):
    """A value that is known only when the file is run. As a key of a table: entries may be missing."""

    text: str

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}…"
        return f"{shown} cannot be read without running the file; write the value out there, or give JSON"


class Made(dict[str, Any]):
    """A time made by a call such as `crontab(minute=0)`: its name as `__type__`, its arguments. Never a payload."""


def unread_in(value: object, *, times: bool = False) -> Unread | None:
    """Return the first unknown part of a value. With `times`, calls may make the value."""
    if isinstance(value, Unread):
        return value
    if isinstance(value, Made) and not times:
        return Unread(f"{value['__type__']}(…)")
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts = [*value, *value.values()]
    elif isinstance(value, list):
        parts = value
    looked_at = (unread_in(part, times=times) for part in parts)
    return next((found for found in looked_at if found is not None), None)


def parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"neither JSON nor Python: {error}") from None


def setting(tree: ast.Module, wanted: str) -> Any:
    """Return the last value that the file gives to a name, or an attribute, with this ending."""
    found: Any = None
    for node in _in_order(tree):
        for value in _given(node, wanted):
            found = _value(value)
    return found


def table(tree: ast.Module, wanted: str) -> Any:
    """Return a table with later additions. Changes that cannot be followed are in it as Unread."""
    found: Any = None
    for node in _in_order(tree):
        for value in _given(node, wanted):
            found = _value(value)
        for key, added in _additions(node, wanted):
            found = {**_as_table(found), key: added}
    return found


def _in_order(tree: ast.Module) -> list[ast.AST]:
    return sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))


def _given(node: ast.AST, wanted: str) -> Iterator[ast.expr]:
    """Yield the values of beat_schedule = {…}, app.conf.update(beat_schedule={…}), update({"beat_schedule": {…}})."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (node.value for target in targets if _is(target, wanted))
    elif isinstance(node, ast.Call) and _name_of(node.func) == "update" and not _is_method(node, wanted):
        yield from (one.value for one in node.keywords if one.arg is not None and one.arg.lower().endswith(wanted))
        for one in node.args:
            if isinstance(one, ast.Dict):
                yield from (
                    value for key, value in zip(one.keys, one.values, strict=True)
                    if isinstance(key, ast.Constant) and str(key.value).lower().endswith(wanted)
                )  # fmt: skip


def _additions(node: ast.AST, wanted: str) -> Iterator[tuple[Any, Any]]:
    """Yield what a statement adds to the table: key, value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                yield from _put(target, node, wanted)
    elif isinstance(node, ast.AugAssign) and _is(node.target, wanted):
        merged = _value(node.value) if isinstance(node.op, ast.BitOr) else _unread(node)
        yield from _as_table(merged).items()
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
        yield from _change(node.target, node, wanted)
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            yield from _change(target, node, wanted)
    elif isinstance(node, ast.Call):
        yield from _calls(node, wanted)


def _put(target: ast.Subscript, node: ast.Assign, wanted: str) -> Iterator[tuple[Any, Any]]:
    if _is(target.value, wanted):
        yield _key(target.slice), _value(node.value)  # beat_schedule["one more"] = {…}
    else:
        yield from _change(target.value, node, wanted)  # beat_schedule["one"]["kwargs"] = {…}


def _calls(node: ast.Call, wanted: str) -> Iterator[tuple[Any, Any]]:
    if _name_of(node.func) == "add_periodic_task":
        yield _unread(node), None
    elif _is_method(node, wanted) and _name_of(node.func) == "update":
        for one in node.args:
            yield from _as_table(_value(one)).items()
        for keyword in node.keywords:
            yield from _entry(keyword)
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        if _is_method(node, wanted):
            yield _unread(node), None
        else:
            yield from _change(node.func.value, node, wanted)


def _entry(keyword: ast.keyword) -> Iterator[tuple[Any, Any]]:
    if keyword.arg is None:
        yield from _as_table(_value(keyword.value)).items()
    else:
        yield keyword.arg, _value(keyword.value)


def _change(place: ast.expr, node: ast.AST, wanted: str) -> Iterator[tuple[Any, Any]]:
    """Yield an entry that is changed or removed in place as unread: its first value no longer holds."""
    while isinstance(place, ast.Subscript):
        if _is(place.value, wanted):
            yield _key(place.slice), _unread(node)
            return
        place = place.value


def _as_table(value: Any) -> Mapping[Any, Any]:
    if value is None:
        return {}
    return value if isinstance(value, Mapping) and not isinstance(value, Made) else {_as_unread(value): None}


def _as_unread(value: Any) -> Unread:
    return value if isinstance(value, Unread) else Unread(repr(value))


def _is(node: ast.expr, wanted: str) -> bool:
    return _name_of(node).lower().endswith(wanted)


def _is_method(node: ast.Call, wanted: str) -> bool:
    return isinstance(node.func, ast.Attribute) and _is(node.func.value, wanted)


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _unread(node: ast.AST) -> Unread:
    return Unread(ast.unparse(node))


# -- values -------------------------------------------------------------------------------------------------------


def _value(node: ast.expr) -> Any:
    """Return literals, and the calls that beat schedules are made of: crontab(…), timedelta(…), schedule(…)."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand) if is_number(number := _value(operand)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.Dict():
            return _dict(node)
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(one) for one in node.elts]
        case ast.BinOp(op=ast.BitOr()):
            return {**_as_table(_value(node.left)), **_as_table(_value(node.right))}
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _sum(node)
        case ast.Call() if _name_of(node.func) in _TIMES and all(one.arg for one in node.keywords):
            said = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
            return Made({"__type__": _name_of(node.func), "args": [_value(one) for one in node.args], **said})
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return dict(pair for keyword in node.keywords for pair in _entry(keyword))
    return _unread(node)


def _dict(node: ast.Dict) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            found.update(_as_table(_value(value)))  # {**base}
        else:
            found[_key(key)] = _value(value)
    return found


def _key(node: ast.expr) -> Any:
    key = _value(node)
    return _unread(node) if isinstance(key, (list, Mapping)) else key


def _sum(node: ast.BinOp) -> Any:
    """Return the value of arithmetic such as 60 * 5."""
    left, right = _value(node.left), _value(node.right)
    if not (is_number(left) and is_number(right)) or (isinstance(node.op, ast.Div) and right == 0):
        return _unread(node)
    return _ARITHMETIC[type(node.op)](left, right)


def is_number(value: object) -> bool:
    """Return whether a value is a number to calculate with: finite, and exact as a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 53


_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_SLUG: Final = re.compile(r"[^A-Za-z0-9._-]+")
_INTERPRETED: Final = re.compile(r"[|&;<>()$`\\\"'*?\[#~%]|^\w+=")
_SHELL_WORDS: Final = frozenset({
    ".", "source", "cd", "eval", "exec", "export", "set", "trap", "umask", "ulimit", "test", "time",
    "if", "for", "while", "case", "{", "!",
})  # fmt: skip
_INPUT: Final = re.compile(r"(?<!\\)%")
_UNDERSTOOD: Final = frozenset({"CRON_TZ", "TZ", "SHELL", "MAILTO"})


@dataclass(slots=True)
class Imported:
    """The imported schedules, commands to register in addition, and problems."""

    definitions: list[Definition] = field(default_factory=list)
    commands: dict[str, list[str]] = field(default_factory=dict)
    """Commands that `command:` targets name: name -> argv."""
    problems: list[str] = field(default_factory=list)
    """Lines that were left out, or that a person has to look at."""


def _slug(text: str) -> str:
    return _SLUG.sub("-", text).strip("-.")[: MAX_SCHEDULE_NAME_BYTES // 2] or "job"


def unused(name: str, taken: Iterable[str]) -> str:
    names = set(taken)
    number, found = 2, name
    while found in names:
        found, number = f"{name}-{number}", number + 1
    return found


# -- crontab ----------------------------------------------------------------------------------------------------------


def read_crontab(text: str, *, zone: str = "UTC", system: bool = False) -> Imported:
    """Read a crontab file; with `system` each line names a user before its command, as in /etc/crontab."""
    found = Imported()
    env: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        variable = _VARIABLE.fullmatch(line)
        if variable is not None:
            env[variable[1]] = variable[2].strip().strip("\"'")
            if variable[1] not in _UNDERSTOOD:
                found.problems.append(
                    f"line {number}: {line} is not imported; give it to the commands that need it, as env"
                )
            continue
        try:
            _take_line(found, line, env.get("CRON_TZ") or env.get("TZ") or zone, env.get("SHELL") or "/bin/sh", system)
        except InvalidInput as error:
            found.problems.append(f"line {number}: {error}")
    return found


def _take_line(found: Imported, line: str, zone: str, shell: str, system: bool) -> None:
    fields = 1 if line.startswith("@") else 5
    pieces = line.split(None, fields + system)
    if len(pieces) <= fields + system:
        raise InvalidInput(f"{line!r} has no command")
    spec, command = " ".join(pieces[:fields]), pieces[-1]
    if spec.lower() == "@reboot":
        raise InvalidInput("@reboot runs when a machine starts, but a schedule runs at times")
    text, *stdin = _INPUT.split(command, maxsplit=1)
    text = text.replace("\\%", "%").strip()
    if not text:
        raise InvalidInput(f"{line!r} has no command")
    interpreted = _INTERPRETED.search(text) is not None or text.split()[0] in _SHELL_WORDS
    argv = [shell, "-c", text] if interpreted else shlex.split(text)
    name = unused(_slug(text if interpreted else argv[0].rsplit("/", 1)[-1]), found.commands)
    definition = define(name, cron=spec, timezone=zone, target=f"command:{name}", note=f"crontab: {line}")
    found.definitions.append(definition)
    found.commands[name] = argv
    if stdin:
        found.problems.append(f"{name}: text after % is the command's input, which commands do not get here")
    if system:
        found.problems.append(f"{name}: ran as {pieces[fields]}; a worker runs commands as its own user")


# -- as a file of ours ------------------------------------------------------------------------------------------------


def to_toml(found: Imported) -> str:
    """Return a file for `mainspring schedule apply`, with the commands for the settings. A schedule that TOML cannot
    express is reported as a problem and left out."""
    for definition in [one for one in found.definitions if _has_null(one)]:
        found.definitions.remove(definition)
        found.problems.append(f"{definition.name}: its payload has a null, which TOML lacks; import it without --out")
    lines = []
    for name, argv in found.commands.items():
        lines += [f"# settings of the workers: [commands.{_toml(name)}] argv = {_toml(argv)}"]
    for definition in found.definitions:
        lines += ["", f"[schedules.{_toml(definition.name)}]"]
        lines.append(f"cron = {_toml(list(definition.specs))}")
        if definition.exclude:
            lines.append(f"exclude = {_toml(list(definition.exclude))}")
        lines.append(f"timezone = {_toml(definition.zone)}")  # always: settings may give another default zone
        lines.append(f"target = {_toml(definition.target)}")
        if definition.payload != b"null":
            lines.append(f"payload = {_toml(json.loads(definition.payload))}")
        lines.append(f"note = {_toml(definition.note)}")
    return "\n".join(lines).strip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(str(key))} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _has_null(definition: Definition) -> bool:
    return definition.payload != b"null" and _is_null_within(json.loads(definition.payload))


def _is_null_within(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return value is None or (isinstance(value, list) and any(map(_is_null_within, value)))


_CRONTAB_FIELDS: Final = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_SETTLED_FIELDS: Final = 2
"""Number of leading fields with a fixed position in every release of Celery: the day of week has moved since."""
_LONG_NAME: Final = re.compile(r"[A-Za-z]{4,}")
_DAYS: Final = re.compile(r"(\*|([0-9]{1,2})(?:-([0-9]{1,2}))?)(?:/([1-9][0-9]?))?")
_RANGE: Final = re.compile(r"(\w+)-(\w+)(?:/([1-9][0-9]?))?")
_BOUNDS: Final = {"minute": (0, 59), "hour": (0, 23), "day_of_month": (1, 31), "month_of_year": (1, 12)}
_WEEK: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_YEAR: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NAMES: Final = {name: number for number, name in (*enumerate(_WEEK), *enumerate(_YEAR, 1))}


def read_celery(text: str, *, zone: str = "UTC") -> Imported:
    """Read a beat_schedule: JSON, or a Python file that assigns it. A time zone in it takes precedence over `zone`."""
    found = Imported()
    entries, own_zone = _beat_entries(text)
    if isinstance(own_zone, Unread):
        found.problems.append(f"timezone: {own_zone}; times are read as {zone}")
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
    """Refuse an entry with unknown parts: guessed, it would run with other arguments."""
    parts = [entry]
    if isinstance(entry, Mapping):
        options = entry.get("options")
        parts = [list(entry), *(entry.get(part) for part in ("task", "args", "kwargs"))]
        # Other options are left out in any case.
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
        raise InvalidInput("options and kwargs must be tables")
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
    raise InvalidInput(f"the schedule {schedule!r} is of an unknown kind (solar times are not supported)")


def _timedelta_s(said: Mapping[str, Any]) -> float:
    units = {"days": 86_400, "seconds": 1, "microseconds": 1e-6, "milliseconds": 1e-3, "minutes": 60, "hours": 3600}
    units["weeks"] = 604_800
    given = dict(zip(("days", "seconds", "microseconds"), said.get("args") or [], strict=False))
    given |= {unit: said[unit] for unit in units if unit in said}
    if not all(map(is_number, given.values())):
        raise InvalidInput(f"the interval {said!r} must consist of numbers")
    return float(sum(units[unit] * value for unit, value in given.items()))


def _crontab_fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cron line of a crontab. Celery needs both day fields to match, a cron line either: so the other days
    of the month are excluded."""
    first = said.get("args") or []
    if any(one != "*" for one in first[_SETTLED_FIELDS:]):
        raise InvalidInput(
            "crontab(…): releases of Celery differ in which fields follow minute and hour; name them: day_of_week=…"
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
    """Straighten Celery's ranges, which may wrap around, `22-2` and `fri-mon`, and count steps across the wrap."""
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
    """Return the days of a month that a field of Celery's names: 1-7, */2, 1-31/5, lists of these."""
    found: set[int] = set()
    for part in text.split(","):
        match = _DAYS.fullmatch(part)
        if match is None:
            raise InvalidInput(f"the day of month {part!r} cannot be read; write 1-7, */2 or 1,15")
        first, last = (1, 31) if match[1] == "*" else (int(match[2]), int(match[3] or match[2]))
        found |= set(range(first, last + 1, int(match[4] or 1)))
    return found


# -- RedBeat ----------------------------------------------------------------------------------------------------------


def read_redbeat(definitions: Mapping[str, str], *, zone: str = "UTC") -> Imported:
    """Read RedBeat's entries: key -> the JSON of its field `definition`."""
    found = Imported()
    for key, text in definitions.items():
        try:
            entry = json.loads(text)
            name = str(entry.get("name") or key.partition(":")[2]).replace("@", "-")
            if entry.get("enabled") is False:
                found.problems.append(f"{name}: is disabled there, and was left out")
                continue
            found.definitions.append(_celery_entry(found, name, entry, zone))
        except (InvalidInput, ValueError, AttributeError) as error:
            found.problems.append(f"{key}: {error}")
    return found
