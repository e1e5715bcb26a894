"""Which tasks a list shows: by state, target and lane."""

from collections.abc import Sequence
from typing import Literal

import msgspec

ListedState = Literal["pending", "fired"]
"""States in which a task stands in its slice with all it carries."""


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
