"""A task as callers write it, and as they get it back; its payload, and which tasks a list shows."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, Self, cast

import msgspec

from .errors import InvalidInput, MainspringError, PayloadTooLarge
from .ids import GENERATED, idempotency_key
from .limits import MAX_PAYLOAD_BYTES
from .retry import RetryPolicy
from .times import Delay, When

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # type checkers know it without its being installed

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")

NULL: Final = b"null"
"""The encoder writes this for numbers that JSON cannot express. A payload without it contains none."""

to_json: Final = msgspec.json.Encoder().encode


def encode_payload(payload: Any, limit: int = MAX_PAYLOAD_BYTES) -> tuple[bytes, bool]:
    """The bytes to store and whether they are the caller's own."""
    raw = isinstance(payload, (bytes, bytearray, memoryview))
    try:
        data = bytes(payload) if raw else to_json(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"payload cannot be written as JSON: {error}; give JSON values or bytes") from None
    if len(data) > limit:
        raise PayloadTooLarge(f"payload has {len(data)} bytes; at most {limit} are allowed")
    if not raw and NULL in data:
        _check_numbers(payload)
    return data, raw


def _check_numbers(payload: Any) -> None:
    """Refuse a payload with NaN or an infinity in it: it would arrive as another value than was given."""
    try:
        rest = [msgspec.to_builtins(payload)]
    except TypeError:
        return  # it holds JSON that is written already (msgspec.Raw)
    while rest:
        match rest.pop():
            case float() as number if not isfinite(number):
                raise InvalidInput(f"payload holds {number}, which JSON cannot say; give a number, a text or None")
            case dict() as table:
                rest += table.values()
            case list() | tuple() as row:
                rest += row


OnConflict = Literal["keep", "replace", "earliest", "reject"]
State = Literal[
    "pending", "fired", "queued", "running", "done", "cancelled", "replaced", "dead", "finished", "unknown"
]  # fmt: skip
PutOutcome = Literal["created", "kept", "replaced"]
CancelOutcome = Literal["cancelled", "cancelling", "too late", "unknown"]
"""A task that a worker runs is "cancelling": its worker is told, and stops it if it is not done before."""

BulkCancelOutcome = Literal[CancelOutcome, "ambiguous"]
"""An id without its lane is "ambiguous" if tasks of several lanes have it: none of them is cancelled."""


class Task(msgspec.Struct, frozen=True, kw_only=False):
    """One delivery to one target at one time. `at` or `after` says when; neither means now."""

    target: str
    payload: Any = None
    at: When | None = None
    after: Delay | None = None
    id: str | None = None
    lane: str | None = None
    expires: When | Delay | None = None
    retry: RetryPolicy | str | None = None
    """Its own policy, or the line that says it; None leaves it to the target and the node."""
    timeout: Delay | None = None
    """How long one attempt may take; None leaves it to the handler, the command or the target."""
    retries: int | None = None
    """Further attempts after a failed first one: with `retry` instead of its number, else with the usual waits."""
    by: ClassVar[str | None] = None


class SubmittedTask(Task, frozen=True):
    """A task from a caller of the API that may replace nothing but its own tasks."""

    by: str | None = None  # type: ignore[misc]  # a field here, so that no other task can carry it
    """The caller's API key."""


class Handle(msgspec.Struct, Generic[T_co], frozen=True, dict=True):
    """What a put returns. `id` finds the task again, also one that was put without an id.

    `Handle[int]`: `result()` returns an int. Of an awaited put it is `Handle[Coroutine[Any, Any, int]]`: the result is
    awaited too.
    """

    id: str
    due_ms: int
    outcome: PutOutcome = "created"
    past: bool = False
    """The due time had already passed: the task fires at once."""
    durability: str = "server"

    def _bound(self, ask: Callable[[float | Delay | None], R], namespace: str, lane: str | None) -> "Handle[R]":
        """Tie the handle to the client that it asks for its result, and to the place of its task."""
        self.__dict__.update(ask=ask, namespace=namespace, lane=lane)
        return cast("Handle[R]", self)

    def _first_due(self, original_due_ms: int | None) -> Self:
        """Remember when the first attempt at a kept task was due; None if that is not stored any more."""
        self.__dict__["original_due_ms"] = original_due_ms
        return self

    def _instead_of(self, replaced: "TaskInfo") -> Self:
        """Remember what it took the place of, for the audit trail."""
        self.__dict__["replaced"] = replaced
        return self

    def _of_another(self) -> Self:
        """Remember that the task was kept because another caller put it."""
        self.__dict__["of_another"] = True
        return self

    @property
    def of_another(self) -> bool:
        """True if the task was to be replaced, and was kept because another caller put it."""
        return bool(self.__dict__.get("of_another", False))

    @property
    def replaced(self) -> "TaskInfo | None":
        """The task as it was before, without its payload, where this put replaced one."""
        return self.__dict__.get("replaced")

    @property
    def idempotency_key(self) -> str:
        """The key that every attempt at this task carries, as its handler, command or receiver sees it.

        Raises MainspringError for a handle of a bulk put, which belongs to no client, and for a kept task that is
        over and of which too little is stored.
        """
        namespace = self.__dict__.get("namespace")
        original_due_ms = self.__dict__.get("original_due_ms", self.due_ms)
        if namespace is None:
            raise MainspringError(f"this handle of {self.id!r} belongs to no client; put the task alone, with put()")
        if original_due_ms is None:
            raise MainspringError(f"task {self.id!r} is over; its idempotency key is not known any more")
        generated = GENERATED.fullmatch(self.id)
        return idempotency_key(
            namespace, generated[1] if generated else self.id, original_due_ms, self.__dict__["lane"]
        )

    def result(self, timeout: float | Delay | None = None) -> T_co:
        """Wait until the task is done and return what its handler returned; `await` it if the put was awaited.

        `timeout` is a number of seconds or a text such as "30s"; None waits without an end. Raises TaskFailed if the
        task died or was cancelled, TimeoutError if it is not over in time.
        """
        ask = self.__dict__.get("ask")
        if ask is None:
            raise MainspringError(f"this handle belongs to no client; ask client.result({self.id!r})")
        return cast("T_co", ask(timeout))


class PutSummary(msgspec.Struct, frozen=True):
    """What put_many came to."""

    accepted: int
    created: int
    kept: int
    replaced: int
    durability: str
    handles: list[Handle] | None = None


class TaskInfo(msgspec.Struct, frozen=True):
    """One task as the store knows it."""

    id: str
    state: State
    due_ms: int | None = None
    target: str | None = None
    payload: Any = None
    lane: str | None = None
    attempt: int = 1
    expires_ms: int | None = None
    errors: tuple[str, ...] = ()
    retry: str | None = None
    """Its own retry policy."""
    timeout_ms: int | None = None
    """How long one attempt may take, where the task says so itself."""
    queue: str | None = None
    """In which queue it is, who runs it, and since when it is there or runs."""
    worker: str | None = None
    since_ms: int | None = None

    @property
    def last_error(self) -> str | None:
        """Why the latest attempt failed, also while the task waits for its retry; None if none has failed."""
        return self.errors[-1] if self.errors else None


class Count(msgspec.Struct, frozen=True):
    """How many tasks are pending. `exact` is False when the edges of the range were estimated."""

    pending: int
    exact: bool


class Page(msgspec.Struct, frozen=True):
    """Pending tasks in due order, and where to go on (None at the end)."""

    tasks: list[TaskInfo]
    next: str | None


ListedState = Literal["pending", "fired"]
"""States in which the full task is in its slice."""

QueueState = Literal["queued", "running"]
"""States in which the task is in a queue."""


def pattern_fits(pattern: str, target: str) -> bool:
    """A pattern is a whole target, or the beginning of one and a `*`."""
    return pattern == target or (pattern.endswith("*") and target.startswith(pattern[:-1]))


class TaskFilter(msgspec.Struct, frozen=True):
    """All that every given field fits."""

    state: ListedState = "pending"
    target: str | None = None
    lane: str | None = None
    allowed: Sequence[str] | None = None
    """Patterns of which a target must fit one; None lets all pass."""

    @property
    def by_content(self) -> bool:
        """Entries have to be decoded to know whether they fit."""
        return (self.target, self.lane, self.allowed) != (None, None, None)

    def fits(self, target: str, lane: str | None) -> bool:
        if self.lane is not None and lane != self.lane:
            return False
        if self.target is not None and not pattern_fits(self.target, target):
            return False
        return self.allowed is None or any(pattern_fits(pattern, target) for pattern in self.allowed)


class QueueFilter(msgspec.Struct, frozen=True):
    """The same for tasks in queues, which are in no order: their times are a filter too."""

    state: QueueState
    chosen: TaskFilter
    from_ms: int
    to_ms: int

    def in_state(self, *, running: bool) -> bool:
        return running == (self.state == "running")

    def fits(self, info: TaskInfo) -> bool:
        if info.due_ms is not None and not self.from_ms <= info.due_ms < self.to_ms:
            return False
        return not self.chosen.by_content or (info.target is not None and self.chosen.fits(info.target, info.lane))
