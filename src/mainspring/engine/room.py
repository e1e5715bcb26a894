"""How many tasks may be in memory before they are due: as many as allowed, and fewer where they are large."""

from typing import Final

from .partition import Partition
from .reach import Reach

LEAST: Final = 16
"""So many, however large: else nothing would go on."""


class Room:
    """One for all partitions of a node."""

    def __init__(self, reach: Reach, owned: dict[int, Partition]) -> None:
        self._reach = reach
        self._owned = owned
        self.tasks = reach.tasks
        """The most that may be held, by the size of what is held now."""

    def measure(self) -> None:
        rows, size = 0, 0.0
        for partition in self._owned.values():
            for live in partition.slices.values():
                held = live.waiting + len(live.held)  # some of those in lanes have left: it is their size that counts
                rows += held
                size += held * live.row_bytes
        most = self._reach.tasks
        self.tasks = min(most, max(LEAST, int(self._reach.bytes / size * rows))) if size else most
