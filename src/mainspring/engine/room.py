"""How many tasks may be in memory, those that wait and those under way: as many as allowed, and fewer where they are
large."""

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
        """The most that may be held ahead, by the size of what is held now."""
        self.flights: int | None = None
        """The most that may be under way, by the size of what is; None before anything is."""

    def measure(self) -> None:
        held = out = 0
        held_bytes = out_bytes = 0.0
        for partition in self._owned.values():
            for live in partition.slices.values():
                rows = live.waiting + len(live.held)  # some of those in lanes have left: it is their size that counts
                held += rows
                held_bytes += rows * live.row_bytes
                out += live.out
                out_bytes += live.out * live.row_bytes
        self.tasks = min(self._reach.tasks, self._most(held, held_bytes) or self._reach.tasks)
        self.flights = self._most(out, out_bytes)

    def _most(self, rows: int, size: float) -> int | None:
        return max(LEAST, int(self._reach.bytes / size * rows)) if size else None
