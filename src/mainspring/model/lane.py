"""Lanes: the causes that block one, the policies for a failing head, holds, and pauses."""

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
"""`retrying`: waits for the next attempt of its head. `parked`: stalled until it is resumed by hand. `held`: stopped
by a pause or a breaker. `returning`: resumed, and its held tasks come back. `flowing`: none of these."""


class LaneInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a lane. Fields that do not apply to it are None."""

    lane: str
    state: LaneState
    partition: int
    since_ms: int | None = None
    """When the lane stalled."""
    behind: int | None = 0
    """Tasks that were moved aside and wait in the lane's hold slice. None if none were: behind a head that is retried
    soon a few may wait in the timeline, and these are not counted."""
    head_id: str | None = None
    """The failed task that the lane waits for."""
    head_state: str | None = None
    attempts: int | None = None
    """Attempts at the head so far."""
    error: str | None = None
    """Error of the last attempt."""
    next_ms: int | None = None
    """When the head is tried again."""
    cause: str | None = None
    """Why a held lane is held."""
    reason: str | None = None
    by: str | None = None
    who: str | None = None
    """Old name of `by`."""
    until_ms: int | None = None


LaneAnswer = Literal["ok", "too late", "no head", "gone"]
"""`no head`: the lane waits for no failed task. `too late`: the head is being delivered now. `gone`: it has ended."""


OnFailure = Literal["block", "skip", "park"]
CHOICES: Final = ("block", "skip", "park")
MAX_BLOCK_MS: Final = 3_600_000
_LONGEST_MS: Final = 366 * 86_400_000


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """`block`: the lane waits for the head's retries, up to `max_block_ms`, and is then parked. `skip`: it continues,
    and the head is retried among the tasks behind it. `park`: it stalls with its head first until it is resumed by
    hand."""

    on_failure: OnFailure = "block"
    max_block_ms: int = MAX_BLOCK_MS

    def __post_init__(self) -> None:
        if self.on_failure not in CHOICES:
            raise InvalidInput(f"{self.on_failure!r} is not a lane policy; use one of {', '.join(CHOICES)}")
        if not 1_000 <= self.max_block_ms <= _LONGEST_MS:
            raise InvalidInput(f"a lane blocks for {self.max_block_ms} ms; it must lie between 1s and 366 days")

    @classmethod
    def parse(cls, text: object) -> "LanePolicy":
        """Read `block`, `block 10m`, `skip` or `park`."""
        if not isinstance(text, str):
            raise InvalidInput(f"expected a string such as 'block 10m', 'skip' or 'park', not {text!r}")
        word, _, longest = text.strip().partition(" ")
        if longest and word != "block":
            raise InvalidInput(f"{text!r}: only block has a longest time, as in 'block 10m'")
        block_ms = delay_ms(longest, field="the longest time of block") if longest else MAX_BLOCK_MS
        return cls(cast("OnFailure", word), block_ms)

    def __str__(self) -> str:
        return f"block {self.max_block_ms}ms" if self.on_failure == "block" else self.on_failure


def read_lane_policy(table: Mapping[str, Any]) -> LanePolicy | None:
    """Return the setting `lane_policy` of a named target or a queue; None if it is not set."""
    if "lane_policy" not in table:
        return None
    try:
        return LanePolicy.parse(table["lane_policy"])
    except InvalidInput as error:
        raise InvalidInput(f"lane_policy: {error}") from None


class LanePolicies:
    """The policy of a head: that of its target, otherwise that of its queue, otherwise the node's."""

    def __init__(
        self,
        default: LanePolicy,
        by_target: Mapping[str, LanePolicy] | None = None,
        by_queue: Mapping[str, LanePolicy] | None = None,
        command_queues: Mapping[str, str] | None = None,
    ) -> None:
        self.default = default
        self._by_target = dict(by_target or {})
        """By target as named in tasks, `target:<name>`."""
        self._by_queue = {} if by_queue is None else by_queue
        """Not copied: it changes with the settings of the namespace."""
        self._command_queues = dict(command_queues or {})

    def of(self, target: str) -> LanePolicy:
        if target in self._by_target:
            return self._by_target[target]
        queue = queue_named(target, self._command_queues)
        return self.default if queue is None else self.of_queue(queue)

    def of_queue(self, queue: str) -> LanePolicy:
        """Return a queue's policy, for workers: they know a job's queue, and named targets never lead to workers."""
        return self._by_queue.get(queue, self.default)


LANE: Final = "lane:"
"""Prefix of a lane's name in the key of the hold under which its tasks wait, for any cause."""

CATCH_UP: Final = "catch-up"
"""The key of the hold of overdue tasks that wait for their turn."""

NO_SINK: Final = "no-sink"
"""The code of a hold whose target no sink of the node can deliver to."""

BREAKER: Final = "breaker"
"""The code of a hold whose receiver is failing, or failed a moment ago."""

RETRY: Final = "retry"
"""Cause: the lane waits for the next attempt of its head."""

PARKED: Final = "parked"
"""Cause: the lane is stalled until it is resumed by hand."""


class HoldRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A partition's record of one of its holds, stored under the name of its slice."""

    key: str
    """`lane:<lane>`, or the key under which these tasks wait for the flow."""
    cause: str = ""
    """`retry`, `parked`, or the key under which they wait for the flow."""
    since_ms: int = 0
    reason: str = ""
    who: str = ""
    until_ms: int | None = None
    """When the hold ends by itself."""
    ended_ms: int = 0
    """When its slice was dropped; the record is kept as long as the ids of its tasks."""
    code: str = ""
    """Why these tasks are held, as a code for `explain`: `breaker`, `rate-limited` and the like."""

    @property
    def lane(self) -> str | None:
        return self.key.removeprefix(LANE) if self.key.startswith(LANE) else None

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> "HoldRecord | None":
        """Decode a record. None if it cannot be read: the slice's rows are enough to continue."""
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
    """The tasks that a pause covers. A target ending in `*` is a prefix: `kafka:*`, `https://example.com/*`."""

    kind: PauseKind = "all"
    name: str = ""

    @classmethod
    def of(cls, target: str | None = None, queue: str | None = None, lane: str | None = None) -> "Scope":
        """Make a scope from a caller's arguments: one of these, or none for everything."""
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
            raise InvalidInput(f"{text[:80]!r} cannot be paused; use all, target …, queue … or lane …")
        if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
            raise InvalidInput(f"the name of a {kind} has at most {MAX_NAME_BYTES} bytes")
        if kind == "target" and not known_scheme(name.partition(":")[0]):
            raise InvalidInput(f"target {name[:80]!r} has no known scheme; end it in * for a prefix")
        return cls(kind, name)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """The scope as one text, its key on the server."""
        return f"{self.kind} {self.name}" if self.name else self.kind


class Pause(msgspec.Struct, frozen=True):
    """A pause: what is paused, by whom, since when, why, and until when."""

    scope: Scope
    mode: Mode = "hold"
    reason: str = ""
    by: str = msgspec.field(default="", name="who")
    """Stored under its old name."""
    since_ms: int = 0
    until_ms: int | None = None
    """When the pause ends by itself; None if it must be ended by hand."""

    def check(self) -> "Pause":
        """Return the pause, or raise InvalidInput for a wrong mode or time."""
        if self.mode not in ("hold", "drop"):
            raise InvalidInput(f"mode is {self.mode!r}; use 'hold' or 'drop'")
        if self.scope.kind == "queue":
            check_queue(self.scope.name)  # otherwise the pause could never apply
        for name in ("reason", "by"):
            if len(getattr(self, name)) > MAX_ERROR_CHARS:
                raise InvalidInput(f"{name} has more than {MAX_ERROR_CHARS} characters")
        if self.until_ms is not None and self.until_ms <= self.since_ms:
            raise InvalidInput("the pause would be over before it begins; give a time in the future")
        return self

    @property
    def who(self) -> str:
        """Old name of `by`."""
        return self.by

    def lasts(self, now_ms: int) -> bool:
        """Whether it is still in force at this time."""
        return self.until_ms is None or self.until_ms > now_ms


class Pauses:
    """All current pauses, indexed to find the one that holds a task."""

    def __init__(
        self, pauses: Iterable[Pause] = (), now_ms: int = 0, commands: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`commands` maps commands to their queues, except those in the queue `commands`."""
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
        """Return the pause that holds a task, the widest first."""
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
        """Return the pause that keeps workers from taking tasks from a queue."""
        return self._all or self.by_scope.get(f"queue {name}")
