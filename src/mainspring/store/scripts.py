"""The Lua scripts: one operation per file, assembled from shared pieces, called by their hash."""

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from ..model.clock import Clock
from .redis.connection import Arg, RedisCommand

_NEEDS: Final = {
    "tick": ("time", "fence", "entry", "place", "occurrence"),
    "commit": ("time", "fence", "entry", "place", "record", "runs"),
    "drop": ("time", "entry"),
    "put_ids": ("place",),
    "register": ("place",),
    "replace": ("entry", "copies", "place"),
    "cancel": ("entry", "copies", "cancelled"),
    "compact": ("entry", "cancelled"),
    "acquire": ("time",),
    "renew": ("time",),
    "release": ("time",),
    "join": ("time", "member"),
    "beat": ("time", "member"),
    "allow": ("time",),
    "leave": ("member",),
    "plan": (),
    "worker_beat": ("time",),
    "worker_leave": (),
    "sweep": ("time", "entry"),
    "forget_holds": ("time",),
    "note_lanes": (),
    "look": ("copies",),
    "heads": (),
    "dead_page": (),
    "dead_drop": (),
    "dead_expire": ("time",),
    "dead_replay": ("entry", "copies", "place", "record"),
    "queue_take": ("time", "record"),
    "queue_left": (),
    "queue_forget": ("time",),
    "queue_reclaim": ("time", "record"),
    "queue_beat": (),
    "queue_back": ("record",),
    "queue_finish": ("time", "entry", "copies", "place", "record", "call_off", "runs"),
    "queue_cancel": ("entry", "record", "call_off"),
    "schedule_put": ("time", "entry", "place", "runs"),
    "schedule_add": ("time", "entry", "place", "runs"),
    "schedule_point": (),
    "schedule_check": ("time",),
    "schedule_note": (),
    "notice_add": ("time",),
    "notice_take": ("time",),
    "note": (),
    "verify_count": (),
    "verify_keys": (),
    "verify_ids": ("time", "verify_id"),
    "verify_dead": (),
    "verify_queues": (),
    "count_queues": ("record",),
    "repair_queue": ("entry", "record", "unseat"),
    "repair_place": (),
    "repair_remains": (),
    "repair_bits": ("entry", "unseat"),
    "repair_id": ("time", "verify_id"),
    "repair_lane": ("unseat",),
    "repair_dead": (),
    "repair_counters": (),
    "unpause": (),
    "once_forget": (),
    "lane_skip": ("entry",),
    "repair_schedule": (),
}
# A full server must still be able to fire, finish, cancel and hand over: these free memory or keep order.
# Refusing them at maxmemory would be a deadlock. Puts are refused whole.
_REFUSED_WHEN_FULL: Final = frozenset({"put_ids", "register", "replace", "note_lanes", "schedule_add"})
# A server that refuses writes (its disk is full, its replicas are gone) still answers reads.
_READS: Final = frozenset(
    {
        "look",
        "heads",
        "dead_page",
        "queue_left",
        "schedule_check",
        "verify_count",
        "verify_keys",
        "verify_ids",
        "verify_dead",
        "verify_queues",
    }
)
_SAME_TEXT: Final = {"schedule_add": "schedule_put"}
"""A full server must refuse a new schedule, but not a pause or a removal, which use the same text."""
_COMMENT: Final = re.compile(r"^\s*--.*\n", re.MULTILINE)
_REWRITTEN: Final[dict[str, str]] = {}


@cache
def _files() -> dict[str, Traversable]:
    """Return the files in all folders of `lua` by stem; no two share one."""
    folders = (files(__package__) / "lua").iterdir()
    return {file.name.removesuffix(".lua"): file for folder in folders for file in folder.iterdir()}


def source_of(file: str) -> str:
    """Return the text of a file below the folder `lua`, by its stem."""
    return _REWRITTEN.get(file) or _files()[file].read_text()


def rewrite(file: str, text: str | None) -> None:
    """Replace the text of a file, for tests that plant bugs; None restores it."""
    if text is None:
        _REWRITTEN.pop(file, None)
    else:
        _REWRITTEN[file] = text
    text_of.cache_clear()
    _sha.cache_clear()


@cache
def text_of(name: str, manual: bool) -> str:
    """Return the full text of a script without comments: the server keeps every script it has seen."""
    flags = "" if name in _REFUSED_WHEN_FULL else " flags=allow-oom,no-writes" if name in _READS else " flags=allow-oom"
    pieces = [f"_{piece}{'_manual' if piece == 'time' and manual else ''}" for piece in _NEEDS[name]]
    body = "".join(source_of(piece) for piece in (*pieces, _SAME_TEXT.get(name, name)))
    return f"#!lua{flags}\n" + _COMMENT.sub("", body)


@cache
def _sha(name: str, manual: bool) -> str:
    return hashlib.sha1(text_of(name, manual).encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """Makes script calls; under a manual clock each call carries the caller's time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def call(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> RedisCommand:
        manual = self._clock.manual
        if not manual:
            return ("EVALSHA", _sha(name, False), len(keys), *keys, *args)
        return ("EVALSHA", _sha(name, True), len(keys), *keys, *args, self._clock.now_ms() * 1000)

    def whole(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> RedisCommand:
        """Return a call with the script's text: in a transaction, an unknown script would fail alone."""
        return self.in_full(self.call(name, keys, args))

    def in_full(self, call: RedisCommand) -> RedisCommand:
        """Return the same call with the script's text, for a server that does not (or no longer) know it."""
        for name in _NEEDS:
            for manual in (False, True):
                if _sha(name, manual) == call[1]:
                    return ("EVAL", text_of(name, manual), *call[2:])
        raise KeyError(call[1])
