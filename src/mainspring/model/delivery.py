"""A task on its way to its target, as sinks see it, and its outcome.

Handlers may return or raise `Retry` and `Dead`, so both are exceptions. Mainspring itself never raises them.
"""

import base64
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec

from .errors import InvalidInput
from .ids import idempotency_key
from .limits import HORIZON_MS
from .text import clean, describe, plain
from .times import Delay, delay_ms


class Body(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Content of a stored entry. Readers accept two fields or more and ignore fields that they do not know."""

    target: str
    payload: bytes
    id: str | None = None
    lane: str | None = None
    due_ms: int | None = None
    """Set only if it differs from the slice's start plus the offset: the due time had passed when the task was put."""
    original_due_ms: int | None = None
    """Set only in retries, where it differs from the due time. Part of the idempotency key."""
    attempt: int = 1
    expires_ms: int | None = None
    raw: bool = False
    """True if the payload is the caller's bytes; otherwise it is JSON."""
    errors: tuple[str, ...] = ()
    retry: str | None = None
    """The task's own retry policy on one line; None means the policy of the target or the node."""
    occurrence: tuple[int, int] | None = None
    """Generation and planned time (ms) of a schedule's run. The id begins with the schedule's name."""
    timeout_ms: int | None = None
    """Time limit of one attempt; None means the limit of the target or the node."""
    lane_in_key: bool = False
    """True if the lane is part of the idempotency key. Entries of old versions lack it and keep their keys."""
    by: str | None = None
    """API key that put the task, if that key may change only its own tasks."""

    @property
    def key_lane(self) -> str | None:
        """The lane if it is part of the idempotency key, otherwise None."""
        return self.lane if self.lane_in_key else None

    @property
    def is_retry(self) -> bool:
        """True if the task left before, whether that counted as an attempt or not."""
        return self.original_due_ms is not None


class DeliveryColumns(NamedTuple):
    """Fields of many deliveries, one column each: reading them one delivery at a time costs several times as much."""

    idhs: bytes
    """The 16-byte id hashes, concatenated."""
    dues_ms: list[int]


class Delivery(msgspec.Struct, gc=False):
    """One attempt at one task, as a sink receives it. The idempotency key is the same for every attempt."""

    body: Body

    @property
    def namespace(self) -> str:
        """The namespace of the task."""
        raise NotImplementedError

    @property
    def idh(self) -> bytes:
        """The 16-byte hash of the id."""
        raise NotImplementedError

    @property
    def due_ms(self) -> int:
        """When this attempt was due, in epoch milliseconds."""
        raise NotImplementedError

    @property
    def id(self) -> str:
        """The task's id: the caller's, or 32 hex digits."""
        return self.body.id or self.idh.hex()

    @property
    def target(self) -> str:
        """The target, such as `https://…`."""
        return self.body.target

    @property
    def payload(self) -> bytes:
        """The bytes to send: JSON, or the caller's own bytes."""
        return self.body.payload

    @property
    def attempt(self) -> int:
        """Number of this attempt; the first is 1."""
        return self.body.attempt

    @property
    def lane(self) -> str | None:
        """The task's lane, or None."""
        return self.body.lane

    @property
    def original_due_ms(self) -> int:
        """When the first attempt was due, in epoch milliseconds."""
        return self.body.original_due_ms if self.body.original_due_ms is not None else self.due_ms

    @property
    def idempotency_key(self) -> str:
        """The key that all attempts at this task share, and no other task has."""
        return idempotency_key(self.namespace, self.id, self.original_due_ms, self.body.key_lane)

    @classmethod
    def columns(cls, batch: Sequence[Self]) -> DeliveryColumns | None:  # noqa: ARG003  # subclasses use it
        """Return columns if every task has only a target and a payload: an id made of its hash, no lane, first attempt.
        Return None if any task has more, or if finding out would take a look at each."""
        return None

    def value(self) -> Any:
        """Return the payload as the caller gave it."""
        return self.body.payload if self.body.raw else msgspec.json.decode(self.body.payload)


class GivenDelivery(Delivery, gc=False):
    """A delivery made by hand to try a sink."""

    namespace: str
    idh: bytes
    due_ms: int


class DeliveryBatch(list[Delivery]):
    """Deliveries that a sink receives together, with a check whether each is still to be sent."""

    __slots__ = ("unwanted",)

    def __init__(self, deliveries: Iterable[Delivery], unwanted: "Callable[[int], Outcome | None]") -> None:
        super().__init__(deliveries)
        self.unwanted = unwanted
        """Return the outcome of the delivery at this index if it must no longer be sent: the task has expired, is
        paused, or now belongs to another node. Return None if it is to be sent."""


def bytes_to_fields(name: str, value: bytes) -> dict[str, str]:
    """Return bytes as a JSON field: as text, or as base64 under `<name>_base64` if they are not UTF-8."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def bytes_from_fields(name: str, fields: Mapping[str, Any]) -> bytes:
    """Return the bytes that were given to `bytes_to_fields`."""
    packed = fields.get(f"{name}_base64")
    return str(fields.get(name, "")).encode() if packed is None else base64.b64decode(packed)


class Response(msgspec.Struct, frozen=True, gc=False):
    """The target's response, cut to a size worth storing."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    """Its first bytes."""
    duration_ms: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields: dict[str, Any] = {"status": self.status, "headers": self.headers, "duration_ms": self.duration_ms}
        return fields | bytes_to_fields("body", self.body)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Response":
        """Return the response that `as_dict` has described."""
        headers = tuple((name, value) for name, value in fields["headers"])
        return cls(fields["status"], headers, bytes_from_fields("body", fields), fields["duration_ms"])


@dataclass(frozen=True, slots=True)
class Done:
    """The target accepted the task."""

    # Left out of comparisons: a delivery with a stored response equals DONE, and code compares outcomes with DONE.
    response: Response | None = field(default=None, compare=False)
    keep_ms: int = field(default=0, compare=False)
    """How long the response is stored with the run, for sinks that have `keeps_answers`."""


def _worded(reason: object) -> str:
    """Return a reason as text: applications pass exceptions, enums and other objects."""
    if isinstance(reason, BaseException):
        return describe(reason)
    return clean(plain(reason) if isinstance(reason, str) else str(reason))


def _whole_ms(after_ms: float) -> int:
    """Return whole milliseconds. Applications compute the delay from headers and clocks; cap it at the horizon."""
    try:
        return max(0, round(min(after_ms, HORIZON_MS)))
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"after_ms is {after_ms!r}; give a number of milliseconds, or after='5m'") from None


# Not frozen: Python sets the traceback of an exception when it is raised.
@dataclass(unsafe_hash=True)
class Retry(Exception):
    """Not delivered; try again after `after_ms` if the target gave a delay, otherwise by the retry policy.

    `Retry("busy", after="5m")` equals `after_ms=300_000`.
    """

    reason: str = "another attempt was asked for"
    after_ms: int | None = None
    untried: bool = False
    """True if the target was never contacted: the attempt does not count, and its reason is not stored as an error."""
    response: Response | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)
    """The exception behind it; rules of a retry policy may match its type."""
    brief: str | None = field(default=None, compare=False)
    """What a redacted log shows instead of a reason that quotes a response or an application."""
    after: InitVar[Delay | None] = field(default=None, kw_only=True)

    def __post_init__(self, after: Delay | None) -> None:
        self.reason = _worded(self.reason)
        if after is not None:
            self.after_ms = delay_ms(after)
        elif self.after_ms is not None:
            self.after_ms = _whole_ms(self.after_ms)

    def __str__(self) -> str:
        return self.reason


@dataclass(unsafe_hash=True)
class Dead(Exception):
    """Not deliverable; store it as a dead letter."""

    reason: str
    response: Response | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)
    brief: str | None = field(default=None, compare=False)
    traceback: str = field(default="", compare=False, kw_only=True)
    """Traceback of `error` as text for the dead letter, set if the exception itself is not passed along."""
    disables: bool = field(default=False, compare=False, kw_only=True)
    """Set by sinks if the target wants no more deliveries: every node pauses it until it is resumed."""

    def __post_init__(self) -> None:
        self.reason = _worded(self.reason)

    def __str__(self) -> str:
        return self.reason


def as_ours(outcome: Retry | Dead) -> Retry | Dead:
    """Return a plain `Retry` or `Dead`: an application's subclass may have been made without a reason or number."""
    reason = getattr(outcome, "reason", None) or describe(outcome)
    if isinstance(outcome, Retry):
        made: Retry | Dead = Retry(reason, outcome.after_ms, bool(outcome.untried))
    else:
        made = Dead(reason)
    made.response, made.error, made.brief = outcome.response, outcome.error, outcome.brief
    return made


Outcome = Done | Retry | Dead

DONE: Final = Done()

EXPIRED: Final = "expired"
"""Reason of a task that expired before it was sent."""

EXPIRED_RUNNING: Final = "its expiry passed while it ran"
"""Reason of a task that expired while a worker was running it."""

DROPPED: Final = "dropped while paused"
"""Beginning of the reason of a task that came due in a pause that keeps no tasks."""


def has_expired(reason: str) -> bool:
    """Return whether the reason is that the task expired."""
    return reason in (EXPIRED, EXPIRED_RUNNING)


def was_sent(reason: str) -> bool:
    """Return whether the due attempt of a task that died for this reason was made.

    Expired and dropped tasks were not sent.
    """
    return reason != EXPIRED and not reason.startswith(DROPPED)


UNREADABLE: Final = "(unreadable)"
"""Target shown for an entry that cannot be read."""

Fate = Literal["retry", "dead", "parked"]
"""What happens to a task that failed: another attempt, none, or its lane is parked until someone acts."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed attempt, and what happens to the task."""

    id: str
    target: str
    attempt: int
    error: str
    """The reason, on one line."""
    brief: str = ""
    """The reason without text from receivers and handlers, which may be a payload or a secret; empty if none."""
    outcome: Fate
    next_at_ms: int | None = None
    """When the next attempt is due; None if none is planned."""
    lane: str | None = None
    original_due_ms: int
    idempotency_key: str
    response: Response | None = None
    """The target's response, if there was one."""
    exception: BaseException | None = None
    """The exception that was raised, if there was one."""

    @property
    def attempts(self) -> int:
        """Attempts that were made. An expired or dropped task was not sent, so its due attempt does not count."""
        return self.attempt if was_sent(self.error) else self.attempt - 1


ErrorHandler = Callable[[Failure], Awaitable[None] | None]
"""Called with every failure. A plain function runs in a thread, a coroutine function on the event loop."""
