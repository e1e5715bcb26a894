"""A task as callers write it and get it back, its payload, and filters for lists of tasks."""

import re
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
    from typing_extensions import TypeVar  # for type checkers, which need no installed package

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")

NULL: Final = b"null"
"""The encoder writes this for numbers that JSON cannot express. A payload without it contains none."""

to_json: Final = msgspec.json.Encoder().encode


def encode_payload(payload: Any, limit: int = MAX_PAYLOAD_BYTES) -> tuple[bytes, bool]:
    """Return the bytes to store, and whether they are the caller's own."""
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
    """Refuse a payload that contains NaN or infinity: it would arrive as a different value."""
    try:
        rest = [msgspec.to_builtins(payload)]
    except TypeError:
        return  # it contains JSON that is already encoded (msgspec.Raw)
    while rest:
        match rest.pop():
            case float() as number if not isfinite(number):
                raise InvalidInput(f"payload holds {number}, which JSON cannot express; give a number, a text or None")
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
"""A task that a worker is running is "cancelling": the worker has been asked to stop it."""

BulkCancelOutcome = Literal[CancelOutcome, "ambiguous"]
"""An id without a lane is "ambiguous" if tasks in several lanes have it: none of them is cancelled."""


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
    """The task's own policy, or its text form; None means the policy of the target and the node."""
    timeout: Delay | None = None
    """Time limit of one attempt; None means the limit of the handler, the command or the target."""
    retries: int | None = None
    """Further attempts after the first; replaces the number in `retry`, or is used with the default waits."""
    by: ClassVar[str | None] = None


class SubmittedTask(Task, frozen=True):
    """A task from a caller of the API that may replace nothing but its own tasks."""

    by: str | None = None  # type: ignore[misc]  # a field of this class only, so that no other task can carry it
    """The caller's API key."""


class Handle(msgspec.Struct, Generic[T_co], frozen=True, dict=True):
    """What a put returns. `id` finds the task again, even if it was put without an id.

    `Handle[int]`: `result()` returns an int. For an awaited put it is `Handle[Coroutine[Any, Any, int]]`: await
    `result()` and `cancel()` too.
    """

    id: str
    due_ms: int
    outcome: PutOutcome = "created"
    past: bool = False
    """True if the due time had already passed: the task fires at once."""
    durability: str = "server"

    def _asking(self, ask: Callable[[float | Delay | None], R], cancel: Callable[[], Any]) -> "Handle[R]":
        """Tie the handle to the client that `result()` and `cancel()` ask."""
        self.__dict__.update(ask=ask, cancel=cancel)
        return cast("Handle[R]", self)

    def _of_task(self, namespace: str, lane: str | None) -> None:
        """Remember the task's namespace and lane, of which its key is made."""
        self.__dict__.update(namespace=namespace, lane=lane)

    def _first_due(self, original_due_ms: int | None) -> Self:
        """Remember when the first attempt at a kept task was due; None if it is no longer stored."""
        self.__dict__["original_due_ms"] = original_due_ms
        return self

    def _instead_of(self, replaced: "TaskInfo") -> Self:
        """Remember the task that was replaced, for the audit trail."""
        self.__dict__["replaced"] = replaced
        return self

    def _of_another(self) -> Self:
        """Remember that the task was kept because another caller put it."""
        self.__dict__["of_another"] = True
        return self

    @property
    def of_another(self) -> bool:
        """True if the task was kept instead of replaced because another caller put it."""
        return bool(self.__dict__.get("of_another", False))

    @property
    def replaced(self) -> "TaskInfo | None":
        """The task that this put replaced, without its payload; None if it replaced none."""
        return self.__dict__.get("replaced")

    @property
    def idempotency_key(self) -> str:
        """The key that every attempt at this task carries, as its handler, command or receiver sees it.

        Raises MainspringError for a handle of a bulk put, which has no client, and for a kept task that is over and of
        which too little is stored.
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

        `timeout` is a number of seconds or a text such as "30s"; None waits without limit. Raises TaskFailed if the
        task died or was cancelled, TimeoutError if it is not over in time.
        """
        ask = self.__dict__.get("ask")
        if ask is None:
            raise MainspringError(f"this handle belongs to no client; ask client.result({self.id!r})")
        return cast("T_co", ask(timeout))

    def cancel(self) -> Any:
        """Cancel the task before it fires; `await` it if the put was awaited. Returns what `Client.cancel` returns.

        The type is Any because a `Handle` without a parameter does not say whether the put was awaited.
        """
        cancel = self.__dict__.get("cancel")
        if cancel is None:
            raise MainspringError(f"this handle belongs to no client; ask client.cancel({self.id!r})")
        return cancel()


class PutSummary(msgspec.Struct, frozen=True):
    """Totals of a put_many."""

    accepted: int
    created: int
    kept: int
    replaced: int
    durability: str
    handles: list[Handle] | None = None


class TaskInfo(msgspec.Struct, frozen=True):
    """One task as it is stored."""

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
    """The task's own retry policy."""
    timeout_ms: int | None = None
    """Time limit of one attempt, if the task set one."""
    queue: str | None = None
    """The queue it is in; `worker` runs it, and `since_ms` is when it was queued, started, cancelled or ended."""
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
    """Pending tasks in due order, and the cursor of the next page (None on the last)."""

    tasks: list[TaskInfo]
    next: str | None


ListedState = Literal["pending", "fired"]
"""States in which the full task is in its slice."""

QueueState = Literal["queued", "running"]
"""States in which the task is in a queue."""


def pattern_fits(pattern: str, target: str) -> bool:
    """Return whether the target is the pattern, or begins with a pattern that ends in `*`."""
    return pattern == target or (pattern.endswith("*") and target.startswith(pattern[:-1]))


def fits_one(patterns: Sequence[str], target: str) -> bool:
    """Return whether the target fits one of the patterns that a key is bound to, and does not climb out of it."""
    return any(pattern_fits(one, target) for one in patterns) and not _climbs(target)


def _climbs(target: str) -> bool:
    """Return whether a URL climbs out of its prefix, as `https://a.example/mine/../yours` does."""
    path = target.lower().replace("%2e", ".").replace("%2f", "/").replace("\\", "/").partition("?")[0]
    return target.startswith("http") and re.search(r"/\.\.?(?:/|#|$)", path) is not None


class TaskFilter(msgspec.Struct, frozen=True):
    """Selects tasks that match every given field."""

    state: ListedState = "pending"
    target: str | None = None
    lane: str | None = None
    allowed: Sequence[str] | None = None
    """Patterns, at least one of which the target must match; None allows every target."""

    @property
    def by_content(self) -> bool:
        """True if entries have to be decoded to know whether they match."""
        return (self.target, self.lane, self.allowed) != (None, None, None)

    def fits(self, target: str, lane: str | None) -> bool:
        if self.lane is not None and lane != self.lane:
            return False
        if self.target is not None and not pattern_fits(self.target, target):
            return False
        return self.allowed is None or fits_one(self.allowed, target)


class QueueFilter(msgspec.Struct, frozen=True):
    """The same for tasks in queues. Queues are not in due order, so the time range is part of the filter."""

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
