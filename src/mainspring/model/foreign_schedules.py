"""Schedules of other programs, read into ours: crontab files, Celery beat dicts, RedBeat keys. Texts are given."""

import ast
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .errors import InvalidInput
from .occurrence import MAX_SCHEDULE_NAME_BYTES
from .queues import check_queue
from .schedule import Definition
from .schedule_input import define

_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_SLUG: Final = re.compile(r"[^A-Za-z0-9._-]+")
_CRONTAB_FIELDS: Final = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_INTERPRETED: Final = re.compile(r"[|&;<>()$`\\\"'*?\[#~%]")


@dataclass(slots=True)
class Imported:
    """What was found, what has to be registered besides, and what could not be read."""

    definitions: list[Definition] = field(default_factory=list)
    commands: dict[str, list[str]] = field(default_factory=dict)
    """Commands that `command:` targets name: name -> argv."""
    problems: list[str] = field(default_factory=list)
    """Lines that were left out, or that a person has to look at."""


def _slug(text: str) -> str:
    return _SLUG.sub("-", text).strip("-.")[: MAX_SCHEDULE_NAME_BYTES // 2] or "job"


def _unused(name: str, taken: Iterable[str]) -> str:
    names = set(taken)
    number, found = 2, name
    while found in names:
        found, number = f"{name}-{number}", number + 1
    return found


# -- crontab ----------------------------------------------------------------------------------------------------------


def read_crontab(text: str, *, zone: str = "UTC", system: bool = False) -> Imported:
    """A crontab file; with `system` each line names a user before its command, as in /etc/crontab."""
    found = Imported()
    env: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        variable = _VARIABLE.fullmatch(line)
        if variable is not None:
            env[variable[1]] = variable[2].strip().strip("\"'")
            continue
        try:
            _take_line(found, line, env.get("CRON_TZ") or env.get("TZ") or zone, system)
        except InvalidInput as error:
            found.problems.append(f"line {number}: {error}")
    return found


def _take_line(found: Imported, line: str, zone: str, system: bool) -> None:
    fields = 1 if line.startswith("@") else 5
    pieces = line.split(None, fields + system)
    if len(pieces) <= fields + system:
        raise InvalidInput(f"{line!r} has no command")
    spec, command = " ".join(pieces[:fields]), pieces[-1]
    if spec.lower() == "@reboot":
        raise InvalidInput("@reboot runs when a machine starts; a schedule has times")
    shell, _, stdin = command.partition("%")
    argv = ["/bin/sh", "-c", shell] if _INTERPRETED.search(shell) else shlex.split(shell)
    name = _unused(_slug(argv[-1] if argv[0] == "/bin/sh" else argv[0].rsplit("/", 1)[-1]), found.commands)
    definition = define(name, cron=spec, timezone=zone, target=f"command:{name}", note=f"crontab: {line}")
    found.definitions.append(definition)
    found.commands[name] = argv
    if stdin:
        found.problems.append(f"{name}: what follows % is the command's input, which a command here does not get")
    if system:
        found.problems.append(f"{name}: ran as {pieces[fields]}; a worker runs commands as its own user")


# -- Celery beat ------------------------------------------------------------------------------------------------------


def read_celery(text: str, *, zone: str = "UTC") -> Imported:
    """A beat_schedule: JSON, or a Python file in which it is assigned. The file is read, not run."""
    found = Imported()
    for name, entry in _beat_entries(text).items():
        try:
            found.definitions.append(_celery_entry(found, name, entry, zone))
        except InvalidInput as error:
            found.problems.append(f"{name}: {error}")
    return found


def _beat_entries(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = _assigned(text)
    if isinstance(value, Mapping) and "beat_schedule" in value:
        value = value["beat_schedule"]
    if not isinstance(value, Mapping):
        raise InvalidInput("no beat_schedule was found: give JSON, or a Python file with beat_schedule = {…}")
    return value


def _assigned(text: str) -> Any:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InvalidInput(f"neither JSON nor Python: {error}") from None
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in targets]
        if any(name.lower().endswith("beat_schedule") for name in names):
            return _value(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value else None
    return None


def _value(node: ast.expr) -> Any:
    """Literals, and the calls that beat schedules are made of: crontab(…), timedelta(…), schedule(…)."""
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        said = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg}
        return {"__type__": name, "args": [_value(one) for one in node.args], **said}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return {"__type__": ast.unparse(node)}


def _celery_entry(found: Imported, name: str, entry: Any, zone: str) -> Definition:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("task"), str):
        raise InvalidInput("an entry needs a task and a schedule")
    options = entry.get("options") or {}
    queue = check_queue(options.get("queue", "celery"))
    args, kwargs = entry.get("args") or [], dict(entry.get("kwargs") or {})
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
    if isinstance(schedule, (int, float)) and not isinstance(schedule, bool):
        return {"every": f"{round(schedule * 1000)}ms"}
    kind = schedule.get("__type__") if isinstance(schedule, Mapping) else None
    if kind == "timedelta":
        return {"every": f"{round(_timedelta_s(schedule) * 1000)}ms"}
    if kind in ("schedule", "interval"):
        every = schedule.get("run_every", schedule.get("every", (schedule.get("args") or [None])[0]))
        seconds = _timedelta_s(every) if isinstance(every, Mapping) else every
        if not isinstance(seconds, (int, float)):
            raise InvalidInput(f"the interval {every!r} is not a number of seconds")
        return {"every": f"{round(seconds * 1000)}ms"}
    if kind == "crontab":
        return {"cron": _crontab_line(schedule), "timezone": schedule.get("timezone") or zone}
    raise InvalidInput(f"the schedule {schedule!r} is of a kind that is not known here (solar times are not)")


def _timedelta_s(said: Mapping[str, Any]) -> float:
    units = {"days": 86_400, "seconds": 1, "microseconds": 1e-6, "milliseconds": 1e-3, "minutes": 60, "hours": 3600}
    units["weeks"] = 604_800
    given = dict(zip(("days", "seconds", "microseconds"), said.get("args") or [], strict=False))
    given |= {unit: said[unit] for unit in units if unit in said}
    return float(sum(units[unit] * value for unit, value in given.items()))


def _crontab_line(said: Mapping[str, Any]) -> str:
    given = dict(zip(_CRONTAB_FIELDS, said.get("args") or [], strict=False))
    given |= {field: said[field] for field in _CRONTAB_FIELDS if said.get(field) is not None}
    values = [given.get(field, "*") for field in _CRONTAB_FIELDS]
    return " ".join(",".join(map(str, one)) if isinstance(one, list) else str(one).replace(" ", "") for one in values)


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


# -- as a file of ours ------------------------------------------------------------------------------------------------


def to_toml(found: Imported) -> str:
    """The same as a file for `mainspring schedule apply`, and the commands for the settings."""
    lines = []
    for name, argv in found.commands.items():
        lines += [f"# settings of the workers: [commands.{_toml(name)}] argv = {_toml(argv)}"]
    for definition in found.definitions:
        lines += ["", f"[schedules.{_toml(definition.name)}]"]
        lines.append(f"cron = {_toml(list(definition.specs))}")
        if definition.zone != "UTC":
            lines.append(f"timezone = {_toml(definition.zone)}")
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
    return json.dumps(value, ensure_ascii=False) if value is not None else '""'
