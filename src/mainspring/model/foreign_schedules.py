"""Schedules of other programs, read into ours: crontab files here, Celery's in `foreign_celery.py`. Texts are given."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .errors import InvalidInput
from .occurrence import MAX_SCHEDULE_NAME_BYTES
from .schedule import Definition
from .schedule_input import define

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
    """What was found, what has to be registered besides, and what could not be read."""

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
            if variable[1] not in _UNDERSTOOD:
                found.problems.append(
                    f"line {number}: {line} is not taken over; give it to the commands that need it, as env"
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
        raise InvalidInput("@reboot runs when a machine starts; a schedule has times")
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
        found.problems.append(f"{name}: what follows % is the command's input, which a command here does not get")
    if system:
        found.problems.append(f"{name}: ran as {pieces[fields]}; a worker runs commands as its own user")


# -- as a file of ours ------------------------------------------------------------------------------------------------


def to_toml(found: Imported) -> str:
    """The same as a file for `mainspring schedule apply`, and the commands for the settings. What it cannot hold is a
    problem, and left out."""
    for definition in [one for one in found.definitions if _has_null(one)]:
        found.definitions.remove(definition)
        found.problems.append(f"{definition.name}: TOML has no null, which its payload has; import it without --out")
    lines = []
    for name, argv in found.commands.items():
        lines += [f"# settings of the workers: [commands.{_toml(name)}] argv = {_toml(argv)}"]
    for definition in found.definitions:
        lines += ["", f"[schedules.{_toml(definition.name)}]"]
        lines.append(f"cron = {_toml(list(definition.specs))}")
        if definition.exclude:
            lines.append(f"exclude = {_toml(list(definition.exclude))}")
        lines.append(f"timezone = {_toml(definition.zone)}")  # always: settings may name another where it is missing
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
