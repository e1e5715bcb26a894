"""A task on its way to its target, as sinks see it, and its outcome.

Handlers may return or raise `Retry` and `Dead`: that is why the two are exceptions. Nothing of ours raises them.
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
    """What an entry says of its task. Readers accept two fields or more and ignore fields they do not know."""

    target: str
    payload: bytes
    id: str | None = None
    lane: str | None = None
    due_ms: int | None = None
    """Only where it is not the slice's start plus the offset: a due time that had passed at put."""
    original_due_ms: int | None = None
    """Only where it differs from the due time: in retries. Part of the idempotency key."""
    attempt: int = 1
    expires_ms: int | None = None
    raw: bool = False
    """The payload is the caller's bytes; otherwise it is JSON."""
    errors: tuple[str, ...] = ()
    retry: str | None = None
    """The task's own retry policy, in one line; None leaves it to the target and the node."""
    occurrence: tuple[int, int] | None = None
    """Of a run of a schedule: the schedule's generation and the planned time in ms. The id starts with its name."""
    timeout_ms: int | None = None
    """How long one attempt may take; None leaves it to the target and the node."""
    lane_in_key: bool = False
    """The lane is part of the idempotency key. False in entries of versions that left it out: they keep their keys."""
    by: str | None = None
    """The API key that put the task, if it may change nothing but its own tasks."""

    @property
    def key_lane(self) -> str | None:
        """The lane as far as it is part of the idempotency key."""
        return self.lane if self.lane_in_key else None

    @property
    def is_retry(self) -> bool:
        """It was under way before, whether that counted as an attempt or not."""
        return self.original_due_ms is not None


class DeliveryColumns(NamedTuple):
    """Of many deliveries at once, in their order. To ask each of them costs several times as much."""

    idhs: bytes
    """One behind the other."""
    dues_ms: list[int]


class Delivery(msgspec.Struct, gc=False):
    """One attempt at one task, as a sink gets it. The idempotency key is the same for every attempt."""

    body: Body

    @property
    def namespace(self) -> str:
        """The namespace of the task."""
        raise NotImplementedError

    @property
    def idh(self) -> bytes:
        """The 16 bytes that stand for the id."""
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
        """Where it goes, such as `https://…`."""
        return self.body.target

    @property
    def payload(self) -> bytes:
        """The bytes to send: JSON, or the caller's own."""
        return self.body.payload

    @property
    def attempt(self) -> int:
        """1 for the first."""
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
        """The same for every attempt at this task, and for no other task."""
        return idempotency_key(self.namespace, self.id, self.original_due_ms, self.body.key_lane)

    @classmethod
    def columns(cls, batch: Sequence[Self]) -> DeliveryColumns | None:  # noqa: ARG003  # for those that know more
        """Of tasks of which nothing is said but target and payload: their ids are made of their idhs, they have no
        lanes, and this is their first attempt. None where one is otherwise, or where that takes a look at each."""
        return None

    def value(self) -> Any:
        """The payload as the caller gave it."""
        return self.body.payload if self.body.raw else msgspec.json.decode(self.body.payload)


class GivenDelivery(Delivery, gc=False):
    """A delivery made by hand, to try a sink with."""

    namespace: str
    idh: bytes
    due_ms: int


class DeliveryBatch(list[Delivery]):
    """Deliveries that a sink gets together, and whether each is still to be sent."""

    __slots__ = ("unwanted",)

    def __init__(self, deliveries: Iterable[Delivery], unwanted: "Callable[[int], Outcome | None]") -> None:
        super().__init__(deliveries)
        self.unwanted = unwanted
        """Return the outcome of the delivery at this index if it must not be sent any more: the task has expired, is
        paused, or belongs to another node by now. Return None if it is to be sent."""


def bytes_to_fields(name: str, value: bytes) -> dict[str, str]:
    """Return bytes as a JSON field: as text, or as base64 under `<name>_base64` if they are not UTF-8."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def bytes_from_fields(name: str, fields: Mapping[str, Any]) -> bytes:
    """Return the bytes that `bytes_to_fields` was given."""
    packed = fields.get(f"{name}_base64")
    return str(fields.get(name, "")).encode() if packed is None else base64.b64decode(packed)


class Response(msgspec.Struct, frozen=True, gc=False):
    """What the target said, cut to what is worth keeping."""

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
    def from_dict(cls, told: dict[str, Any]) -> "Response":
        headers = tuple((name, value) for name, value in told["headers"])
        return cls(told["status"], headers, bytes_from_fields("body", told), told["duration_ms"])


@dataclass(frozen=True, slots=True)
class Done:
    """The target has the task."""

    # Not compared: a delivery that kept an answer is as done as one without, and who counts DONE counts it too.
    response: Response | None = field(default=None, compare=False)
    keep_ms: int = field(default=0, compare=False)
    """So long the response is kept with the run, by sinks that have `keeps_answers`."""


def _worded(reason: object) -> str:
    """Applications give exceptions, enums and what not for a reason."""
    if isinstance(reason, BaseException):
        return describe(reason)
    return clean(plain(reason) if isinstance(reason, str) else str(reason))


def _whole_ms(after_ms: float) -> int:
    """Applications work it out of headers and clocks. No task is due beyond the horizon, whatever number was named."""
    try:
        return max(0, round(min(after_ms, HORIZON_MS)))
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"after_ms is {after_ms!r}; give a number of milliseconds, or after='5m'") from None


# Not frozen: Python itself sets the traceback of what is raised.
@dataclass(unsafe_hash=True)
class Retry(Exception):
    """Not delivered; try again, after `after_ms` if the target named a time, else by the retry policy.

    `Retry("busy", after="5m")` says the same as `after_ms=300_000`.
    """

    reason: str = "another attempt was asked for"
    after_ms: int | None = None
    untried: bool = False
    """The target was not even asked: this attempt does not count, and its reason is not kept as an error."""
    response: Response | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)
    """The exception behind it: rules of a retry policy may go by its type."""
    brief: str | None = field(default=None, compare=False)
    """What a redacted log says instead of a reason that holds words of others: an answer's, an application's."""
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
    """Not deliverable; keep it with the dead letters."""

    reason: str
    response: Response | None = field(default=None, compare=False)
    error: BaseException | None = field(default=None, compare=False)
    brief: str | None = field(default=None, compare=False)
    traceback: str = field(default="", compare=False, kw_only=True)
    """Of `error`, as text for the dead letter: set where the exception itself does not go along."""
    disables: bool = field(default=False, compare=False, kw_only=True)
    """Said by sinks: the named target wants nothing more, and gets nothing, from any node, until it is resumed."""

    def __post_init__(self) -> None:
        self.reason = _worded(self.reason)

    def __str__(self) -> str:
        return self.reason


def as_ours(outcome: Retry | Dead) -> Retry | Dead:
    """The same, made by us: a subclass of an application may be made in its own way, without a reason or a number."""
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
"""The reason of a death by time: the task was not sent."""

EXPIRED_RUNNING: Final = "its expiry passed while it ran"
"""The same of one that a worker had begun."""

DROPPED: Final = "dropped while paused"
"""How the reason begins with which a task dies that came due in a pause which keeps nothing."""


def has_expired(reason: str) -> bool:
    """Is this the reason of a death by time?"""
    return reason in (EXPIRED, EXPIRED_RUNNING)


def was_sent(reason: str) -> bool:
    """Was the attempt made that a task was due for when it died of this? What expired or was dropped went nowhere."""
    return reason != EXPIRED and not reason.startswith(DROPPED)


UNREADABLE: Final = "(unreadable)"
"""The target of what cannot be read."""

Fate = Literal["retry", "dead", "parked"]
"""What becomes of a task that failed: another attempt, none, or its lane stands still until somebody acts."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed attempt, and what becomes of the task."""

    id: str
    target: str
    attempt: int
    error: str
    """Why, in one line."""
    brief: str = ""
    """The same without what receivers and handlers wrote, which may be a payload or a secret; empty if it has none."""
    outcome: Fate
    next_at_ms: int | None = None
    """When the next attempt is due; None when none is planned."""
    lane: str | None = None
    original_due_ms: int
    idempotency_key: str
    response: Response | None = None
    """What the target answered, where it did."""
    exception: BaseException | None = None
    """What was raised, where something was."""

    @property
    def attempts(self) -> int:
        """Those that were made: the one it was due for is none where it expired, or was dropped by a pause."""
        return self.attempt if was_sent(self.error) else self.attempt - 1


ErrorHandler = Callable[[Failure], Awaitable[None] | None]
"""Called with every failure. A plain function runs in a thread, a coroutine function on the event loop."""
