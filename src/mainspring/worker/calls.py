"""Where work may be: the partitions that called, and those that came back full."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

AT_ONCE: Final = 4
"""Partitions asked in one round under load: a few large bites cost the server less than many small ones."""


class Calls:
    """For each queue the partitions worth asking. Calls come without the queue's name, so they count for all."""

    def __init__(self, queues: Sequence[str], partitions: int) -> None:
        self._queues = tuple(queues)
        self._partitions = partitions
        self._called: dict[str, set[int]] = {queue: set() for queue in queues}
        self._again: set[int] = set()
        """Called while they were being asked."""
        self._full: set[tuple[int, str]] = set()
        """Gave all they were asked for: there is more."""
        self._last = -1

    def call(self, partition: int) -> None:
        self._again.add(partition)
        for called in self._called.values():
            called.add(partition)

    def call_all(self) -> None:
        for partition in range(self._partitions):
            self.call(partition)

    def having(self) -> list[str]:
        """Queues that may have work somewhere."""
        return [queue for queue, called in self._called.items() if called]

    def asks(self, shares: Mapping[str, int]) -> dict[int, dict[str, int]]:
        """Spread the shares over partitions, beginning with the next in turn."""
        self._again.clear()
        found: dict[int, dict[str, int]] = {}
        first = None
        for queue, most in shares.items():
            turn = self._turn(queue, most)
            for i, partition in enumerate(turn):
                found.setdefault(partition, {})[queue] = most // len(turn) + (i < most % len(turn))
            if turn and first is None:
                first = turn[0]
        self._last = self._last if first is None else first
        return found

    def _turn(self, queue: str, most: int) -> list[int]:
        """The partitions to ask now: whoever is next, and a few that are full; where none is, as many as called."""
        turn = sorted(self._called[queue], key=lambda p: (p <= self._last, p))
        full = [partition for partition in turn[1:] if (partition, queue) in self._full]
        if not full:
            return turn[:most]
        return [*turn[:1], *full[: AT_ONCE - 1]][:most]

    def came(self, asks: Mapping[int, Mapping[str, int]], got: Iterable[tuple[int, str]]) -> None:
        """Forget partitions that gave less than they were asked for: they are empty, unless they called since."""
        counts: dict[tuple[int, str], int] = {}
        for place in got:
            counts[place] = counts.get(place, 0) + 1
        for partition, by_queue in asks.items():
            for queue, most in by_queue.items():
                if counts.get((partition, queue), 0) >= most:
                    self._full.add((partition, queue))
                    continue
                self._full.discard((partition, queue))
                if partition not in self._again:
                    self._called[queue].discard(partition)
