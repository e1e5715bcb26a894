"""Dead letters as people and programs see them: what is kept, how to choose among them, what became of a replay."""

import base64
from typing import Any, Final, Literal

import msgspec

from .delivery import Body, Response
from .ids import idempotency_key
from .limits import MAX_ERRORS_KEPT

ReplayOutcome = Literal["replayed", "conflict", "damaged", "gone", "unknown"]
DropOutcome = Literal["dropped", "unknown"]

PROBLEMS_KEPT: Final = 100
"""Letters that could not be replayed which a summary names; the others it only counts."""


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a task died, every error on the way, and the task itself (or its raw entry if it was unreadable)."""

    id: str
    reason: str
    died_ms: int
    due_ms: int
    """The original due time: part of the idempotency key."""
    target: str = ""
    payload: bytes = b""
    raw: bool = False
    lane: str | None = None
    attempts: int = 1
    """Those that were made: none where it expired, or was dropped by a pause, before the first."""
    errors: tuple[str, ...] = ()
    entry: bytes = b""
    """The bytes nobody could read."""
    retry: str | None = None
    """The task's own retry policy: a replay follows it too."""
    place: bytes = b""
    """Where its last attempt stood (a packed address): tells it from another task of the same id."""
    response: Response | None = None
    """What a webhook answered to the last attempt."""
    timeout_ms: int | None = None
    """How long one attempt may take, where the task said so itself: in a replay too."""
    lane_in_key: bool = False
    """The lane is part of the idempotency key: in a replay too."""
    traceback: str = ""
    """Of the exception that the last attempt raised; its beginning and end if it is long."""

    @classmethod
    def of(
        cls,
        body: Body,
        task_id: str,
        reason: str,
        died_ms: int,
        due_ms: int,
        place: bytes,
        *,
        sent: bool,
        traceback: str = "",
    ) -> "DeadLetter":
        """Of a task that died of the attempt it was due for, or without one: then the reason is no error of it."""
        return cls(
            id=task_id,
            reason=reason,
            died_ms=died_ms,
            due_ms=due_ms,
            target=body.target,
            payload=body.payload,
            raw=body.raw,
            lane=body.lane,
            attempts=body.attempt if sent else body.attempt - 1,
            errors=(*body.errors, reason)[-MAX_ERRORS_KEPT:] if sent else body.errors,
            retry=body.retry,
            place=place,
            timeout_ms=body.timeout_ms,
            lane_in_key=body.lane_in_key,
            traceback=traceback,
        )

    def answered(self, response: Response | None) -> "DeadLetter":
        """Return the letter with the receiver's response."""
        return self if response is None else msgspec.structs.replace(self, response=response)

    def encode(self) -> bytes:
        """The bytes to store."""
        return _encode(self)

    @property
    def damaged(self) -> bool:
        """Nobody can say what the task was: every task has a target."""
        return not self.target

    def value(self) -> Any:
        """The payload as the caller gave it."""
        return self.payload if self.raw else msgspec.json.decode(self.payload)

    def as_dict(self, namespace: str) -> dict[str, Any]:
        """For JSON: bytes are told as they are where they are JSON, else in base64."""
        fields: dict[str, Any] = {
            "id": self.id,
            "reason": self.reason,
            "died_ms": self.died_ms,
            "due_ms": self.due_ms,
            "damaged": self.damaged,
        }
        if self.damaged:
            return fields | {"entry_base64": base64.b64encode(self.entry).decode()}
        key_lane = self.lane if self.lane_in_key else None
        fields |= {
            "target": self.target,
            "lane": self.lane,
            "attempts": self.attempts,
            "errors": self.errors,
            "traceback": self.traceback or None,
            "retry": self.retry,
            "timeout_ms": self.timeout_ms,
            "idempotency_key": idempotency_key(namespace, self.id, self.due_ms, key_lane),
        }
        if self.response is not None:
            fields["response"] = self.response.as_dict()
        if self.raw:
            return fields | {"payload_base64": base64.b64encode(self.payload).decode()}
        return fields | {"payload": msgspec.Raw(self.payload)}


_encode: Final = msgspec.msgpack.Encoder().encode


class _Place(msgspec.Struct, frozen=True):
    place: bytes = b""


_decode_place: Final = msgspec.msgpack.Decoder(_Place).decode


def dead_place(record: bytes) -> bytes:
    """Where the task of an encoded letter stood; nothing when the letter does not say, or cannot be read."""
    try:
        return _decode_place(record).place
    except (msgspec.DecodeError, UnicodeDecodeError):
        return b""


class DeadFilter(msgspec.Struct, frozen=True):
    """Which dead letters: all that every given field fits."""

    target: str | None = None
    """The whole target, or its beginning and a `*`."""
    lane: str | None = None
    reason: str | None = None
    """Part of the reason, in any case."""
    from_ms: int = 0
    to_ms: int = 1 << 45
    """They died from the first time on and before the second."""

    @property
    def by_content(self) -> bool:
        """Letters have to be read to know whether they fit."""
        return (self.target, self.lane, self.reason) != (None, None, None)

    def fits(self, letter: DeadLetter) -> bool:
        """The time is not looked at here: it is what letters are ordered by."""
        if self.lane is not None and letter.lane != self.lane:
            return False
        if self.reason is not None and self.reason.casefold() not in letter.reason.casefold():
            return False
        if self.target is None or self.target == letter.target:
            return True
        return self.target.endswith("*") and letter.target.startswith(self.target[:-1])


class DeadPage(msgspec.Struct, frozen=True):
    """Dead letters, the newest first, and where to go on (None at the end)."""

    letters: list[DeadLetter]
    next: str | None


class Replayed(msgspec.Struct, frozen=True):
    """What became of the replay of one letter."""

    id: str
    outcome: ReplayOutcome
    due_ms: int | None = None
    note: str = ""
    """Why not, and what to do."""


class ReplaySummary(msgspec.Struct):
    """What the replay of many letters has come to so far."""

    dry_run: bool = False
    """Nothing was changed: `replayed` is what would have been."""
    replayed: int = 0
    conflict: int = 0
    damaged: int = 0
    gone: int = 0
    problems: list[Replayed] = msgspec.field(default_factory=list)
    """The first that could not be replayed."""

    @property
    def seen(self) -> int:
        """How many letters were looked at."""
        return self.replayed + self.conflict + self.damaged + self.gone

    def add(self, one: Replayed) -> None:
        """Count one more answer."""
        match one.outcome:
            case "replayed":
                self.replayed += 1
            case "conflict":
                self.conflict += 1
            case "damaged":
                self.damaged += 1
            case _:
                self.gone += 1
        if one.outcome != "replayed" and len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(one)
