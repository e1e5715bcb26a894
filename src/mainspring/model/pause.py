"""Pauses: everything, a target, a queue or a lane stands still until somebody resumes it, or until a set time."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from .errors import InvalidInput
from .ids import check_name
from .limits import MAX_ERROR_CHARS, MAX_NAME_BYTES
from .queues import check_queue, queue_named
from .targets import known_scheme

Kind = Literal["all", "target", "queue", "lane"]
Mode = Literal["hold", "drop"]
KINDS: Final = ("all", "target", "queue", "lane")
_KNOWN_TARGETS: Final = 4_096


class Scope(msgspec.Struct, frozen=True):
    """What stands still. A target that ends in `*` means all that begin so: `kafka:*`, `https://example.com/*`."""

    kind: Kind = "all"
    name: str = ""

    @classmethod
    def of(cls, target: str | None = None, queue: str | None = None, lane: str | None = None) -> "Scope":
        """From what a caller gave: one of these, or none for everything."""
        given = [
            (kind, name) for kind, name in (("target", target), ("queue", queue), ("lane", lane)) if name is not None
        ]
        if len(given) > 1:
            raise InvalidInput("give one of target, queue and lane; none of them means everything")
        if not given:
            return cls()
        [(kind, name)] = given
        return cls.parse(f"{kind} {check_name(name, kind)}")

    @classmethod
    def parse(cls, text: str) -> "Scope":
        kind, _, name = text.partition(" ")
        if kind not in KINDS or (kind == "all") == bool(name):
            raise InvalidInput(f"{text[:80]!r} says nothing that can be paused; use all, target …, queue … or lane …")
        if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise InvalidInput(f"the name of a {kind} has at most {MAX_NAME_BYTES} bytes")
        if kind == "target" and not known_scheme(name.partition(":")[0]):
            raise InvalidInput(f"target {name[:80]!r} has no known scheme; end it in * to mean all that begin so")
        return cls(kind, name)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


class Pause(msgspec.Struct, frozen=True):
    """Who paused what, since when, why, and until when."""

    scope: Scope
    mode: Mode = "hold"
    reason: str = ""
    who: str = ""
    since_ms: int = 0
    until_ms: int | None = None
    """When it ends by itself; None when somebody has to end it."""

    def check(self) -> "Pause":
        if self.mode not in ("hold", "drop"):
            raise InvalidInput(f"mode is {self.mode!r}; use 'hold' or 'drop'")
        if self.scope.kind == "queue":
            check_queue(self.scope.name)  # else it would be a pause of nothing
        for name in ("reason", "who"):
            if len(getattr(self, name)) > MAX_ERROR_CHARS:
                raise InvalidInput(f"{name} has more than {MAX_ERROR_CHARS} characters")
        if self.until_ms is not None and self.until_ms <= self.since_ms:
            raise InvalidInput("the pause would be over before it begins; give a time that lies ahead")
        return self

    def lasts(self, now_ms: int) -> bool:
        return self.until_ms is None or self.until_ms > now_ms


class Pauses:
    """All pauses that last, ready to be asked what they hold up."""

    def __init__(
        self, pauses: Iterable[Pause] = (), now_ms: int = 0, commands: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`commands` are those that have another queue than `commands`."""
        self.by_scope = {one.scope.text: one for one in pauses if one.lasts(now_ms)}
        self._all = self.by_scope.get("all")
        self._prefixes = [
            (one.scope.name[:-1], one)
            for one in self.by_scope.values()
            if one.scope.kind == "target" and one.scope.name.endswith("*")
        ]
        self._commands = commands
        self._known: dict[str, Pause | None] = {}

    def __bool__(self) -> bool:
        return bool(self.by_scope)

    def of_task(self, target: str, lane: str | None) -> Pause | None:
        """The pause that holds up a task, the widest first."""
        if self._all is not None:
            return self._all
        if target not in self._known:
            if len(self._known) >= _KNOWN_TARGETS:
                self._known.clear()
            self._known[target] = self._of_target(target)
        found = self._known[target]
        return found if found is not None or lane is None else self.by_scope.get(f"lane {lane}")

    def _of_target(self, target: str) -> Pause | None:
        exact = self.by_scope.get(f"target {target}")
        if exact is not None:
            return exact
        queue = queue_named(target, self._commands)
        if queue is not None and (one := self.of_queue(queue)) is not None:
            return one
        return next((one for prefix, one in self._prefixes if target.startswith(prefix)), None)

    def of_queue(self, name: str) -> Pause | None:
        """The pause because of which workers take nothing from a queue."""
        return self._all or self.by_scope.get(f"queue {name}")
