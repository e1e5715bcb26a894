"""A delivery that failed, as error handlers see it."""

from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec

from .outcome import Response, was_sent

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
