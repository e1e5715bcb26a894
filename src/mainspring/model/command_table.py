"""Commands as settings have them: tables in TOML, JSON in the environment."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from .command import Command, Commands
from .errors import InvalidInput
from .known_names import check_known
from .retry import RetryPolicy
from .times import delay_ms


def read_commands(value: object) -> Commands:
    """Read every `[commands.<name>]`, or the same as one JSON text."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise InvalidInput("expected a table of tables; write [commands.<name>] and its settings below")
    found = {}
    for name, table in value.items():
        try:
            found[name] = read_command(table)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from None
    return Commands(found)


def read_command(table: object) -> Command:
    if not isinstance(table, Mapping):
        raise InvalidInput("expected a table; write [commands.<name>] and its settings below")
    check_known(table, _READERS, "a command")
    if "argv" not in table:
        raise InvalidInput('argv is missing; write argv = ["/usr/bin/program", "argument"]')
    found: dict[str, Any] = {}
    for name, value in table.items():
        field, read = _READERS[name]
        try:
            found[field] = read(value)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{name}: {error}") from None
    return Command(**found)


def write_commands(commands: Commands) -> str:
    """The JSON text from which `read_commands` makes these again."""
    return json.dumps({name: _table(command) for name, command in commands.items()}) if commands else ""


def _table(command: Command) -> dict[str, Any]:
    spoken = {field: name for name, (field, _) in _READERS.items()}
    table: dict[str, Any] = {}
    for field in fields(Command):
        value = getattr(command, field.name)
        if value == field.default:
            continue
        if field.name == "env":
            value = dict(value)
        elif field.name == "retry":
            value = str(value)
        elif field.name.endswith("_ms"):
            value = f"{value}ms"
        table[spoken[field.name]] = value
    return table


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list of texts, not {value!r}: a command is never a line for a shell")
    if strange := [one for one in value if not isinstance(one, str)]:
        raise TypeError(f"expected a list of texts, and {strange[0]!r} is none")
    return tuple(value)


def _variables(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table of texts, not {value!r}")
    if strange := [name for name, text in value.items() if not isinstance(text, str)]:
        raise TypeError(f"expected texts, and {strange[0]} has {value[strange[0]]!r}")
    return tuple(sorted(value.items()))


def _span(value: object) -> int:
    if not isinstance(value, str):
        raise TypeError(f"expected a duration with its unit such as '5m', not {value!r}")
    return delay_ms(value, field="duration")


def _plain(kind: type) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        if type(value) is not kind:
            raise TypeError(f"expected a {kind.__name__}, not {value!r}")
        return value

    return read


def _policy(value: object) -> RetryPolicy:
    return RetryPolicy.parse(value) if isinstance(value, str) else RetryPolicy.read(dict(_table_of(value)))


def _table_of(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table or a line such as '5 base=1s', not {value!r}")
    return value


_READERS: Final[Mapping[str, tuple[str, Callable[[object], Any]]]] = {
    "argv": ("argv", _texts),
    "env": ("env", _variables),
    "cwd": ("cwd", _plain(str)),
    "timeout": ("timeout_ms", _span),
    "kill_after": ("kill_after_ms", _span),
    "output_bytes": ("output_bytes", _plain(int)),
    "queue": ("queue", _plain(str)),
    "arguments": ("arguments", _plain(bool)),
    "result_ttl": ("result_ttl_ms", _span),
    "retry": ("retry", _policy),
}
"""The settings of a command by the names people type: the field, and how it is read."""
