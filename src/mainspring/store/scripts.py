"""The Lua scripts: one operation a file, put together from shared pieces, called by their hash."""

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from ..model.clock import Clock
from .wire import Arg, Command

_NEEDS: Final = {
    "tick": ("time", "fence", "entry"),
    "commit": ("time", "fence", "entry", "place"),
    "drop": ("time", "entry"),
    "put_ids": ("place",),
    "replace": ("entry", "copies", "place"),
    "cancel": ("entry", "copies"),
    "acquire": ("time",),
    "renew": ("time",),
    "release": ("time",),
    "join": ("time", "member"),
    "beat": ("time", "member"),
    "leave": ("member",),
    "plan": (),
    "sweep": ("entry",),
    "look": (),
}
# A full server must still be able to fire, finish, cancel and hand over: these free memory or keep order.
# Refusing them at maxmemory would be a deadlock. Puts are refused whole.
_REFUSED_WHEN_FULL: Final = frozenset({"put_ids", "replace"})
_COMMENT: Final = re.compile(r"^\s*--.*\n", re.MULTILINE)


@cache
def text_of(name: str, manual: bool) -> str:
    """The whole text of a script, comments left out: the server keeps every script it has seen."""
    flags = "" if name in _REFUSED_WHEN_FULL else " flags=allow-oom"
    pieces = [f"_{piece}{'_manual' if piece == 'time' and manual else ''}" for piece in _NEEDS[name]]
    folder = files(__package__) / "lua"
    body = "".join((folder / f"{piece}.lua").read_text() for piece in (*pieces, name))
    return f"#!lua{flags}\n" + _COMMENT.sub("", body)


@cache
def _sha(name: str, manual: bool) -> str:
    return hashlib.sha1(text_of(name, manual).encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """Makes script calls; under a manual clock the caller's time travels with each call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def call(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Command:
        manual = self._clock.manual
        if not manual:
            return ("EVALSHA", _sha(name, False), len(keys), *keys, *args)
        return ("EVALSHA", _sha(name, True), len(keys), *keys, *args, self._clock.now_ms() * 1000)

    def in_full(self, call: Command) -> Command:
        """The same call with the script's text, for a server that does not know it (any more)."""
        for name in _NEEDS:
            for manual in (False, True):
                if _sha(name, manual) == call[1]:
                    return ("EVAL", text_of(name, manual), *call[2:])
        raise KeyError(call[1])
