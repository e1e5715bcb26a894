"""A task as callers write it, and as they get it back."""

from typing import Any, Literal

import msgspec

from .times import Delay, When

OnConflict = Literal["keep", "replace", "earliest", "reject"]
State = Literal["pending", "fired", "done", "cancelled", "replaced", "dead", "finished", "unknown"]
PutOutcome = Literal["created", "kept", "replaced"]
CancelOutcome = Literal["cancelled", "too late", "unknown"]


class Task(msgspec.Struct, frozen=True, kw_only=False):
    """One delivery to one target at one time. `at` or `after` says when; neither means now."""

    target: str
    payload: Any = None
    at: When | None = None
    after: Delay | None = None
    id: str | None = None
    lane: str | None = None
    expires: When | Delay | None = None


class Handle(msgspec.Struct, frozen=True):
    """What a put returns. `id` finds the task again, also one that was put without an id."""

    id: str
    due_ms: int
    outcome: PutOutcome = "created"
    past: bool = False
    """The due time had already passed: the task fires at once."""
    durability: str = "server"


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


class Count(msgspec.Struct, frozen=True):
    """How many tasks are pending. `exact` is False when the edges of the range were estimated."""

    pending: int
    exact: bool


class Page(msgspec.Struct, frozen=True):
    """Pending tasks in due order, and where to go on (None at the end)."""

    tasks: list[TaskInfo]
    next: str | None
