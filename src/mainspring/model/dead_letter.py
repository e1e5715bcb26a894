"""Dead letters: what is stored, how they are selected, and the result of a replay."""

import base64
from typing import Any, Final, Literal

import msgspec

from .delivery import Body, Response
from .ids import idempotency_key
from .limits import MAX_ERRORS_KEPT

ReplayOutcome = Literal["replayed", "conflict", "damaged", "gone", "unknown"]
DropOutcome = Literal["dropped", "unknown"]

PROBLEMS_KEPT: Final = 100
"""Dead letters named in a summary because they could not be replayed; further ones are only counted."""


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
    """Attempts that were made; 0 if the task expired, or was dropped by a pause, before its first."""
    errors: tuple[str, ...] = ()
    entry: bytes = b""
    """The raw bytes of an entry that could not be read."""
    retry: str | None = None
    """The task's own retry policy; a replay follows it too."""
    place: bytes = b""
    """Packed address of the last attempt: tells the task from another one with the same id."""
    response: Response | None = None
    """Response of the webhook to the last attempt."""
    timeout_ms: int | None = None
    """Time limit of one attempt if the task set one; it holds in a replay too."""
    lane_in_key: bool = False
    """True if the lane is part of the idempotency key, in a replay too."""
    traceback: str = ""
    """Traceback of the exception that the last attempt raised; only its beginning and end if it is long."""

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
        """Make one for a task whose due attempt failed (`sent`) or was never made: then `reason` is no error of it."""
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
        """Return this dead letter with the receiver's response."""
        return self if response is None else msgspec.structs.replace(self, response=response)

    def encode(self) -> bytes:
        """Return the bytes to store."""
        return _encode(self)

    @property
    def damaged(self) -> bool:
        """True if the task could not be decoded: every readable task has a target."""
        return not self.target

    def value(self) -> Any:
        """Return the payload as the caller gave it."""
        return self.payload if self.raw else msgspec.json.decode(self.payload)

    def as_dict(self, namespace: str) -> dict[str, Any]:
        """Return the fields for JSON. Payloads and entries that are not JSON are in base64, in fields of their own."""
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
    """Return the packed address of an encoded dead letter's task; empty if the letter has none or is unreadable."""
    try:
        return _decode_place(record).place
    except (msgspec.DecodeError, UnicodeDecodeError):
        return b""


class DeadFilter(msgspec.Struct, frozen=True):
    """Selects dead letters that match every given field."""

    target: str | None = None
    """A whole target, or a prefix followed by `*`."""
    lane: str | None = None
    reason: str | None = None
    """Part of the reason, ignoring case."""
    from_ms: int = 0
    to_ms: int = 1 << 45
    """End of the time range, exclusive: a selected task died at or after `from_ms` and before `to_ms`."""

    @property
    def by_content(self) -> bool:
        """True if dead letters have to be decoded to know whether they match."""
        return (self.target, self.lane, self.reason) != (None, None, None)

    def fits(self, dead_letter: DeadLetter) -> bool:
        """Return whether a dead letter matches. The time range is not checked: the index is ordered by time."""
        if self.lane is not None and dead_letter.lane != self.lane:
            return False
        if self.reason is not None and self.reason.casefold() not in dead_letter.reason.casefold():
            return False
        if self.target is None or self.target == dead_letter.target:
            return True
        return self.target.endswith("*") and dead_letter.target.startswith(self.target[:-1])


class DeadPage(msgspec.Struct, frozen=True):
    """Dead letters, newest first, and the cursor of the next page (None on the last)."""

    letters: list[DeadLetter]
    next: str | None


class Replayed(msgspec.Struct, frozen=True):
    """Result of replaying one dead letter."""

    id: str
    outcome: ReplayOutcome
    due_ms: int | None = None
    note: str = ""
    """Why it was not replayed, and what to do."""


class ReplaySummary(msgspec.Struct):
    """Running totals of a bulk replay."""

    dry_run: bool = False
    """True if nothing was changed: `replayed` then counts what would be replayed."""
    replayed: int = 0
    conflict: int = 0
    damaged: int = 0
    gone: int = 0
    problems: list[Replayed] = msgspec.field(default_factory=list)
    """The first dead letters that could not be replayed."""

    @property
    def seen(self) -> int:
        """Number of dead letters looked at."""
        return self.replayed + self.conflict + self.damaged + self.gone

    def add(self, one: Replayed) -> None:
        """Count one more result."""
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
