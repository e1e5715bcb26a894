"""Names of targets and queues, and the queue that a target belongs to."""

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from ..errors import InvalidInput
from ..limits import MAX_NAME_BYTES
from ..text import plain
from .url import parse_web_url, shown_address

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


COMMANDS: Final = "commands"
"""The queue of `command:` targets that do not name another one."""

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
    """Like `queue_of`, without checking the name, for comparisons only.

    None for a target that is delivered by a sink.
    """
    scheme, _, rest = target.partition(":")
    if scheme == "command":
        return commands.get(rest, COMMANDS)
    return rest.partition("/")[0] if scheme == "queue" else None


def queue_of(target: str, commands: Mapping[str, str] | None = None) -> str:
    """Return the queue of `queue:<queue>/<handler>` or `command:<name>`; `commands` maps commands to other queues."""
    if commands and target.startswith("command:"):
        return check_queue(commands.get(target.removeprefix("command:"), COMMANDS))
    return _queue_named_by(target)


SCHEMES: Final = frozenset({"kafka", "http", "https", "queue", "command", "log", "null", "target", "notify"})
"""The built-in schemes. Packages may add others."""

_OWN: Final = frozenset({"notify"})
"""Schemes of targets that Mainspring makes itself: no message proposes them."""

BEAT: Final = "beat"
"""Begins the names of beats where they stand beside targets: a key may be limited to `beat:<name>`."""

SINK_GROUP: Final = "mainspring.sinks"
"""The group of entry points by which packages add sinks; an entry point's name is the scheme of its targets."""

NEEDS_KAFKA: Final = "Kafka needs the package confluent-kafka on this node: pip install 'mainspring[kafka]'"

_NEEDS_REST: Final = SCHEMES - {"log", "null"}
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]{0,31}")


def sink_entry_points() -> Sequence["EntryPoint"]:
    """Return the sinks of installed packages, without importing them."""
    from importlib.metadata import entry_points  # here: it takes a while, and most programs never ask

    return sorted(entry_points(group=SINK_GROUP), key=lambda point: (point.name, point.value))


@cache
def _brought() -> frozenset[str]:
    return frozenset(point.name for point in sink_entry_points())


def is_scheme(text: str) -> bool:
    """Return whether the text is a valid scheme, known or not."""
    return _SCHEME.fullmatch(text) is not None


def known_scheme(text: str) -> bool:
    """Return whether a scheme is built in, or added by a package that is installed here."""
    return text in SCHEMES or (is_scheme(text) and text in _brought())


def check_target(target: object) -> str:
    """Return the target's scheme, or refuse it with the reason."""
    if not isinstance(target, str):
        raise InvalidInput(f"target is of type {type(target).__name__}; give a string such as 'kafka:ticks'")
    return _scheme_of(target if type(target) is str else plain(target))


@lru_cache(maxsize=4096)
def _scheme_of(target: str) -> str:
    scheme, colon, rest = target.partition(":")
    if not colon or not known_scheme(scheme):
        raise InvalidInput(_unknown(target, scheme if colon else ""))
    try:
        size = len(target.encode())
    except UnicodeEncodeError:
        raise InvalidInput("target is not valid Unicode (a lone surrogate); give plain text") from None
    if size > MAX_NAME_BYTES and scheme not in ("http", "https"):
        raise InvalidInput(f"target is longer than {MAX_NAME_BYTES} bytes")
    if len(target) > 8192:
        raise InvalidInput("target is longer than 8192 characters")
    if scheme in _NEEDS_REST and not rest.strip("/"):
        raise InvalidInput(f"target {target!r} names nothing after '{scheme}:'")
    if scheme in ("http", "https"):
        parse_web_url(target)
    if scheme == "queue":
        queue_of(target)
    return scheme


def _unknown(target: str, scheme: str) -> str:
    known = ", ".join(sorted(f"{name}:" for name in (SCHEMES | _brought()) - _OWN))
    text = f"target {shown_address(target)!r} has no known scheme; it must start with one of {known}"
    if not is_scheme(scheme):
        return text
    return (
        f"{text}. If a package adds {scheme}: to the nodes, install it here too (entry point {SINK_GROUP!r}), or use a"
        " named target of the nodes, target:<name>"
    )


def receiver_of(target: str, commands: Mapping[str, str] | None = None) -> str:
    """Return the receiver of a task: the host of a webhook, the queue of a handler or a command, otherwise the target.

    `commands` maps commands to their own queues; without it, each command is its own receiver.
    """
    if commands is not None and target.startswith("command:"):
        return f"queue:{queue_named(target, commands)}"
    return _receiver_of(target)


@lru_cache(maxsize=4096)
def _receiver_of(target: str) -> str:
    scheme, _, rest = target.partition(":")
    if scheme in ("http", "https"):
        try:
            url = parse_web_url(target)
        except InvalidInput:
            return shown_address(target)
        return f"{url.scheme}://{url.authority}"
    return f"queue:{rest.partition('/')[0]}" if scheme == "queue" else target


def shown_target(target: str) -> str:
    """Return the target for logs and listings, without the query, which often holds keys."""
    return target.partition("?")[0] + "?…" if target.startswith("http") and "?" in target else target
