"""Commands: programs that workers may start, each under a name that tasks carry. A task can never name a program."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from .errors import InvalidInput
from .queues import COMMANDS, check_queue
from .retry import RetryPolicy

INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LOGNAME")
"""All that a command gets of the worker's environment; everything else must be named in `env`."""

MOST_OUTPUT: Final = 64 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Command:
    """What `command:<name>` starts: a list of arguments, never a line for a shell."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    """None: the worker's own folder."""
    timeout_ms: int = 3_600_000
    kill_after_ms: int = 5_000
    """Between the request to end (SIGTERM) and the end (SIGKILL)."""
    output_bytes: int = 4_096
    """Kept of standard output and of standard error, each: the end of it."""
    queue: str = COMMANDS
    arguments: bool = False
    """A task may add arguments: payload `{"args": [...]}`."""
    result_ttl_ms: int = 86_400_000
    retry: RetryPolicy | None = None

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0] or any("\0" in one for one in self.argv):
            raise InvalidInput(f"argv is {list(self.argv)!r}; give a list of texts, the program first")
        for name, value in self.env:
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise InvalidInput(f"env: {name!r} = {value!r} is no variable; names are letters, digits and _")
        check_queue(self.queue)
        if self.timeout_ms < 1:
            raise InvalidInput("timeout is 0; give the longest time the command may take")
        if not 0 <= self.output_bytes <= MOST_OUTPUT:
            raise InvalidInput(f"output_bytes is {self.output_bytes}; it must lie between 0 and {MOST_OUTPUT}")


class Commands(Mapping[str, Command]):
    """What each name stands for. Never changes once made."""

    def __init__(self, commands: Mapping[str, Command] | None = None) -> None:
        self._commands = dict(commands or {})
        for name in self._commands:
            if not _NAME.fullmatch(name):
                raise InvalidInput(f"the name of a command is {name!r}; use 1 to 128 of A-Z a-z 0-9 . _ -")

    def __getitem__(self, name: str) -> Command:
        return self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)

    def __hash__(self) -> int:
        return hash(frozenset(self._commands.items()))

    def __repr__(self) -> str:
        return f"Commands({', '.join(self._commands)})"
