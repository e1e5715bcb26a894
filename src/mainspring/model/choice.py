"""Which tasks a list shows: by state, target and lane."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from .task import TaskInfo

ListedState = Literal["pending", "fired"]
"""States in which a task stands in its slice with all it carries."""

QueueState = Literal["queued", "running"]
"""States in which it stands in a queue."""


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
