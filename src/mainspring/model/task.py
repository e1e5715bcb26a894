"""A task as callers write it, and as they get it back."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from .errors import MainspringError
from .retry import RetryPolicy
from .times import Delay, When

OnConflict = Literal["keep", "replace", "earliest", "reject"]
State = Literal[
    "pending", "fired", "queued", "running", "done", "cancelled", "replaced", "dead", "finished", "unknown"
]  # fmt: skip
PutOutcome = Literal["created", "kept", "replaced"]
CancelOutcome = Literal["cancelled", "cancelling", "too late", "unknown"]
"""A task that a worker runs is "cancelling": its worker is told, and stops it if it is not done before."""


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


class Handle(msgspec.Struct, frozen=True, dict=True):
    """What a put returns. `id` finds the task again, also one that was put without an id."""

    id: str
    due_ms: int
    outcome: PutOutcome = "created"
    past: bool = False
    """The due time had already passed: the task fires at once."""
    durability: str = "server"

    def bound(self, ask: Callable[[float | Delay | None], Any]) -> "Handle":
        """Tie the handle to whom its result is asked of."""
        self.__dict__["ask"] = ask
        return self

    def instead_of(self, replaced: "TaskInfo") -> "Handle":
        """Remember what it took the place of, for the audit trail."""
        self.__dict__["replaced"] = replaced
        return self

    @property
    def replaced(self) -> "TaskInfo | None":
        """The task as it was before, without its payload, where this put replaced one."""
        return self.__dict__.get("replaced")

    def result(self, timeout: float | Delay | None = None) -> Any:
        """What the handler returned, when it is done: to be awaited with `Client`, at once with `SyncClient`.

        TaskFailed if the task died or was cancelled, TimeoutError if it is not over in time.
        """
        ask = self.__dict__.get("ask")
        if ask is None:
            raise MainspringError(f"this handle belongs to no client; ask client.result({self.id!r})")
        return ask(timeout)


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


class Count(msgspec.Struct, frozen=True):
    """How many tasks are pending. `exact` is False when the edges of the range were estimated."""

    pending: int
    exact: bool


class Page(msgspec.Struct, frozen=True):
    """Pending tasks in due order, and where to go on (None at the end)."""

    tasks: list[TaskInfo]
    next: str | None
