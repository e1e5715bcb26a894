"""Commands: programs that workers may start, each under a name that tasks carry. A task can never name a program."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from ..errors import InvalidInput
from ..retry import RetryPolicy
from ..text import Tables, check_known
from ..times import delay_ms
from .names import COMMANDS, check_queue

INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LOGNAME")
"""The environment variables that a command inherits from the worker; all others must be named in `env`."""

MOST_OUTPUT: Final = 64 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Command:
    """A program that `command:<name>` starts: a list of arguments, never a line for a shell."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    """None: the worker's own folder."""
    timeout_ms: int = 3_600_000
    kill_after_ms: int = 5_000
    """Time between the request to end (SIGTERM) and the kill (SIGKILL)."""
    output_bytes: int = 32_768
    """Bytes to keep of standard output and of standard error each: half from the beginning, half from the end."""
    queue: str = COMMANDS
    arguments: bool = False
    """A task may add arguments: payload `{"args": [...]}`."""
    result_ttl_ms: int = 86_400_000
    retry: RetryPolicy | None = None

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0] or any("\0" in one for one in self.argv):
            raise InvalidInput(f"argv is {list(self.argv)!r}; give a list of strings, the program first")
        for name, value in self.env:
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise InvalidInput(f"env: {name!r} = {value!r} is not a variable; names are letters, digits and _")
        check_queue(self.queue)
        if self.timeout_ms < 1:
            raise InvalidInput("timeout is 0; give the longest time the command may take")
        if not 0 <= self.output_bytes <= MOST_OUTPUT:
            raise InvalidInput(f"output_bytes is {self.output_bytes}; it must lie between 0 and {MOST_OUTPUT}")


class Commands(Tables[Command]):
    """Commands by name. Immutable."""

    def __init__(self, commands: Mapping[str, Command] | None = None) -> None:
        super().__init__(commands)
        for name in self:
            if not _NAME.fullmatch(name):
                raise InvalidInput(f"the name of a command is {name!r}; use 1 to 128 of A-Z a-z 0-9 . _ -")


def read_commands(value: object) -> Commands:
    """Read every `[commands.<name>]`, or the same as one JSON text."""
    if isinstance(value, str):
        value = json.loads(value)
    return Commands.read_each("commands", value, lambda _, table: read_command(table))


def read_command(table: Mapping[str, Any]) -> Command:
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
    """Return the JSON text from which `read_commands` makes these commands again."""
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
        raise TypeError(f"expected a list of strings, not {value!r}: a command is never a line for a shell")
    if strange := [one for one in value if not isinstance(one, str)]:
        raise TypeError(f"expected a list of strings, but {strange[0]!r} is not a string")
    return tuple(value)


def _variables(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table of strings, not {value!r}")
    if strange := [name for name, text in value.items() if not isinstance(text, str)]:
        raise TypeError(f"expected strings, but {strange[0]} has {value[strange[0]]!r}")
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
"""The settings of a command by the names people type: the field, and its reader."""
