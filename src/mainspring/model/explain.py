"""Why a task has not run: one sentence for people, a code and facts for programs."""

from datetime import UTC, datetime
from typing import Final, Literal

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
"""What holds a task up, or how it ended. Later versions may know more."""

UNKNOWN: Final = (
    "Nobody knows this id: it was never put, it was cancelled, or it has been over for longer than ids are kept."
)


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that say nothing about this task are None."""

    id: str
    code: ReasonCode
    text: str
    """One sentence."""
    state: State
    now_ms: int
    """The server's time to which all this belongs."""
    target: str | None = None
    lane: str | None = None
    due_ms: int | None = None
    """When it is due, or its next attempt."""
    wait_ms: int | None = None
    """Until then; negative when that has passed."""
    attempt: int | None = None
    errors: tuple[str, ...] = ()
    partition: int | None = None
    owner: str | None = None
    """The node that has its partition; None when none has."""
    planned: str | None = None
    """The node that shall have it."""
    nodes: int | None = None
    """Nodes that are running."""
    lag_ms: int | None = None
    """How far the owner says it is behind."""
    head_id: str | None = None
    head_state: State | None = None
    head_due_ms: int | None = None
    """When the head of its lane is due, or its next attempt."""
    queue: str | None = None
    worker: str | None = None
    since_ms: int | None = None
    """Since when it is in its queue, runs, or is paused, parked or held."""
    reason: str | None = None
    """Of its death; or why it is paused, parked or held."""
    who: str | None = None
    """Who paused it."""
    until_ms: int | None = None
    """When that ends by itself; of a circuit breaker, when the next probe goes out."""
    died_ms: int | None = None


def span(ms: float) -> str:
    """A length of time as people say it: the two largest units."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    units = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))
    parts = []
    for name, size in units:
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count:.0f} {name}")
    return " ".join(parts[:2])


def moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
