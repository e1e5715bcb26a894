"""Queues: their names, and which one a target belongs to."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from .errors import InvalidInput

COMMANDS: Final = "commands"
"""The queue of `command:` targets, unless a node is told another for one of them."""

HANDED_OFF: Final = frozenset({"queue", "command"})
"""Schemes of targets whose tasks workers run."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_queue(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(f"queue {name!r}: use 1 to 64 of A-Z a-z 0-9 . _ -")
    return name


@lru_cache(maxsize=4096)
def _queue_named_by(target: str) -> str:
    scheme, _, rest = target.partition(":")
    return COMMANDS if scheme == "command" else check_queue(rest.partition("/")[0])


def queue_named(target: str, commands: Mapping[str, str]) -> str | None:
    """The same as `queue_of`, for whoever only compares: a name that no queue can have is told too, unchecked.

    None for what is delivered by a sink.
    """
    scheme, _, rest = target.partition(":")
    if scheme == "command":
        return commands.get(rest, COMMANDS)
    return rest.partition("/")[0] if scheme == "queue" else None


def queue_of(target: str, commands: Mapping[str, str] | None = None) -> str:
    """The queue of `queue:<queue>/<handler>` or `command:<name>`; `commands` maps names of commands to other queues."""
    if commands and target.startswith("command:"):
        return check_queue(commands.get(target.removeprefix("command:"), COMMANDS))
    return _queue_named_by(target)
