"""Lanes: what blocks one, what becomes of one whose head fails, holds and pauses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import msgspec

from .errors import InvalidInput
from .ids import check_name
from .limits import MAX_ERROR_CHARS, MAX_NAME_BYTES
from .targets.names import check_queue, known_scheme, queue_named
from .times import delay_ms

LaneState = Literal["retrying", "parked", "held", "returning", "flowing"]
"""`retrying`: waits for the next attempt of its head. `parked`: stands still until somebody acts. `held`: a pause or a
breaker holds it up. `returning`: it goes on, and what was held comes back. `flowing`: none of these."""


class LaneInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that say nothing about this lane are None."""

    lane: str
    state: LaneState
    partition: int
    since_ms: int | None = None
    """Since when it stands still."""
    behind: int | None = 0
    """Tasks that were moved aside and wait in the lane's hold slice. None where nothing was: behind a head that is
    tried again soon a few may wait where they were put, and these are not counted."""
    head_id: str | None = None
    """The failed task it waits for."""
    head_state: str | None = None
    attempts: int | None = None
    """How often the head was tried."""
    error: str | None = None
    """What it said the last time."""
    next_ms: int | None = None
    """When it is tried again."""
    cause: str | None = None
    """Of a held lane: what holds it up."""
    reason: str | None = None
    who: str | None = None
    until_ms: int | None = None


LaneAnswer = Literal["ok", "too late", "no head", "gone"]
"""`no head`: the lane waits for no failed task. `too late`: it is being delivered now. `gone`: it is over."""


OnFailure = Literal["block", "skip", "park"]
CHOICES: Final = ("block", "skip", "park")
MAX_BLOCK_MS: Final = 3_600_000
_LONGEST_MS: Final = 366 * 86_400_000


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """`block`: the lane waits for the head's retries, up to `max_block_ms`, and is parked then. `skip`: it goes on, and
    the head is tried again among those that follow. `park`: it stands still, head first, until somebody acts."""

    on_failure: OnFailure = "block"
    max_block_ms: int = MAX_BLOCK_MS

    def __post_init__(self) -> None:
        if self.on_failure not in CHOICES:
            raise InvalidInput(f"{self.on_failure!r} is no policy of a lane; use one of {', '.join(CHOICES)}")
        if not 1_000 <= self.max_block_ms <= _LONGEST_MS:
            raise InvalidInput(f"a lane blocks for {self.max_block_ms} ms; it must lie between 1s and 366 days")

    @classmethod
    def parse(cls, text: object) -> "LanePolicy":
        """`block`, `block 10m`, `skip` or `park`."""
        if not isinstance(text, str):
            raise InvalidInput(f"expected a text such as 'block 10m', 'skip' or 'park', not {text!r}")
        word, _, longest = text.strip().partition(" ")
        if longest and word != "block":
            raise InvalidInput(f"{text!r}: only block has a longest time, as in 'block 10m'")
        block_ms = delay_ms(longest, field="the longest time of block") if longest else MAX_BLOCK_MS
        return cls(cast("OnFailure", word), block_ms)

    def __str__(self) -> str:
        return f"block {self.max_block_ms}ms" if self.on_failure == "block" else self.on_failure


def read_lane_policy(table: Mapping[str, Any]) -> LanePolicy | None:
    """The setting `lane_policy` of a named target or a queue; None where it has none."""
    if "lane_policy" not in table:
        return None
    try:
        return LanePolicy.parse(table["lane_policy"])
    except InvalidInput as error:
        raise InvalidInput(f"lane_policy: {error}") from None


class LanePolicies:
    """Which policy applies: that of the head's target, else that of its queue, else the node's."""

    def __init__(
        self,
        default: LanePolicy,
        by_target: Mapping[str, LanePolicy] | None = None,
        by_queue: Mapping[str, LanePolicy] | None = None,
        command_queues: Mapping[str, str] | None = None,
    ) -> None:
        self.default = default
        self._by_target = dict(by_target or {})
        """By targets as tasks name them, `target:<name>`."""
        self._by_queue = {} if by_queue is None else by_queue
        """Not copied: it changes with the settings of the namespace."""
        self._command_queues = dict(command_queues or {})

    def of(self, target: str) -> LanePolicy:
        if target in self._by_target:
            return self._by_target[target]
        queue = queue_named(target, self._command_queues)
        return self.default if queue is None else self.of_queue(queue)

    def of_queue(self, queue: str) -> LanePolicy:
        """For workers: they know the queue that a job came from, and named targets do not lead to them."""
        return self._by_queue.get(queue, self.default)


LANE: Final = "lane:"
"""Before the name of a lane: the key of the hold under which its tasks wait, whatever holds them up."""

CATCH_UP: Final = "catch-up"
"""The key of the hold of what is overdue and has to wait for its turn."""

NO_SINK: Final = "no-sink"
"""The code of a hold whose target no sink of the node can deliver to."""

BREAKER: Final = "breaker"
"""The code of a hold whose receiver fails, or failed until a moment ago."""

RETRY: Final = "retry"
"""A lane waits for the next attempt of its head."""

PARKED: Final = "parked"
"""A lane stands still until somebody acts."""


class HoldRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a partition keeps of one of its holds, under the name of its slice."""

    key: str
    """`lane:<lane>`, or what the gate calls it that holds these tasks up."""
    cause: str = ""
    """`retry`, `parked`, or what the gate calls it."""
    since_ms: int = 0
    reason: str = ""
    who: str = ""
    until_ms: int | None = None
    """When it ends by itself."""
    ended_ms: int = 0
    """Its slice is gone since then; the record is kept as long as the ids of its tasks."""
    code: str = ""
    """What holds these tasks up, in the words of `explain`: `breaker`, `rate-limited` and the like."""

    @property
    def lane(self) -> str | None:
        return self.key.removeprefix(LANE) if self.key.startswith(LANE) else None

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> "HoldRecord | None":
        """None when it cannot be read: the slice's rows say all that is needed to go on."""
        try:
            return _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(HoldRecord).decode


PauseKind = Literal["all", "target", "queue", "lane"]
Mode = Literal["hold", "drop"]
KINDS: Final = ("all", "target", "queue", "lane")
_KNOWN_TARGETS: Final = 4_096


class Scope(msgspec.Struct, frozen=True):
    """What stands still. A target that ends in `*` means all that begin so: `kafka:*`, `https://example.com/*`."""

    kind: PauseKind = "all"
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
        """Read the text of a scope again."""
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
        """The scope as one text, its key on the server."""
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
        """Return the pause, or raise InvalidInput for a wrong mode or time."""
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
        """Whether it is still in force at this time."""
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
