"""Why a task has not run: one sentence for people, a code and facts for programs."""

from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from .task import State

ReasonCode = Literal[
    "not-due",
    "retry",
    "behind-head",
    "parked",
    "paused",
    "held",
    "breaker",
    "rate-limited",
    "catch-up",
    "slow",
    "no-sink",
    "due",
    "owner-behind",
    "run-before",
    "no-owner",
    "no-node",
    "fired",
    "queued",
    "no-worker",
    "running",
    "done",
    "finished",
    "cancelled",
    "replaced",
    "expired",
    "dead",
    "unreadable",
    "unknown",
]
"""What delays a task, or how it ended. Later versions may add codes."""

UNKNOWN: Final = "Unknown id: the task was never put, was cancelled, or has been over for longer than ids are kept."


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a task has not run. Fields that do not apply to it are None."""

    id: str
    code: ReasonCode
    text: str
    """One sentence."""
    state: State
    now_ms: int
    """The server's time of this explanation."""
    target: str | None = None
    lane: str | None = None
    due_ms: int | None = None
    """When the task, or its next attempt, is due."""
    wait_ms: int | None = None
    """Time until `due_ms`; negative if it has passed."""
    attempt: int | None = None
    errors: tuple[str, ...] = ()
    partition: int | None = None
    owner: str | None = None
    """The node that owns its partition; None if no node does."""
    planned: str | None = None
    """The node that the partition is planned for."""
    nodes: int | None = None
    """Number of running nodes."""
    lag_ms: int | None = None
    """How far behind the owner reports to be."""
    head_id: str | None = None
    head_state: State | None = None
    head_due_ms: int | None = None
    """When the head of its lane, or the head's next attempt, is due."""
    queue: str | None = None
    worker: str | None = None
    since_ms: int | None = None
    """Since when the task is in its queue, running, paused, parked or held."""
    reason: str | None = None
    """Why it died, or is paused, parked or held."""
    by: str | None = None
    """The caller that paused it."""
    who: str | None = None
    """Old name of `by`."""
    until_ms: int | None = None
    """When the pause or hold ends by itself; for a circuit breaker, when the next probe is sent."""
    died_ms: int | None = None


def span(ms: float) -> str:
    """Return a duration in its two largest units."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    units = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))
    parts = []
    for name, size in units:
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count:.0f} {name}")
    return " ".join(parts[:2])


def moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


INSTANTS: Final = frozenset(
    f"{name}_ms"
    for name in (
        "at", "created", "deadline", "died", "due", "ended", "expires", "first", "head_due", "last", "next", "now",
        "oldest", "seen", "since", "started", "until",
    )
)  # fmt: skip
"""Fields of answers that are instants, not spans."""

_VIEWS: Final = frozenset({
    "beats", "changes", "keys", "lanes", "last_failures", "letters", "next_due", "nodes", "pauses", "problems",
    "queues", "revisions", "runs", "stats", "tasks", "workers",
})  # fmt: skip
"""Lists of views in answers. Values from callers, such as payloads, are left as they are."""


def with_times(value: Any) -> Any:
    """Return a view with each of its instants as RFC 3339 too: `due` beside `due_ms`."""
    fields = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    if not isinstance(fields, dict):
        return value
    shown: dict[str, Any] = {}
    for name, one in fields.items():
        shown[name] = [with_times(view) for view in one] if name in _VIEWS and isinstance(one, list) else one
        if name in INSTANTS and (one is None or type(one) is int):
            shown.setdefault(name.removesuffix("_ms"), None if one is None else moment(one))
    return shown
