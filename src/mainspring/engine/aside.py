"""Tasks that may not go out now and still stand in memory.

To move one into a hold slice costs the server far more than to deliver it. So those that are held back step aside
first, which costs nothing, and are moved a few at a time: nobody else waits for that. If their hold ends before their
turn comes, they just step back.
"""

from collections import deque
from collections.abc import Callable
from itertools import groupby

from .flight import Flight
from .holds import Gates


class Aside:
    """By the keys of their holds, first come, first moved."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._waiting: dict[str, deque[Flight]] = {}
        self.count = 0

    def add(self, key: str, flight: Flight) -> None:
        flight.live.held.add(flight.index)  # another pass over its list must not take it again
        self._waiting.setdefault(key, deque()).append(flight)
        self.count += 1

    def take(self, most: int, move: Callable[[str, list[Flight]], None]) -> int:
        """Move some of them; returns how many there were to look at."""
        looked_at = 0
        for key in list(self._waiting):
            waiting = self._waiting[key]
            if self._gates.room(key) is None and not self._gates.is_closed(key):
                looked_at += len(waiting)
                self._step_back(waiting)
                waiting.clear()
            else:
                some = [waiting.popleft() for _ in range(min(len(waiting), most - looked_at))]
                looked_at += len(some)
                move(key, [flight for flight in some if not flight.live.forgotten])
            if not waiting:
                del self._waiting[key]
            if looked_at >= most:
                break
        self.count -= looked_at
        return looked_at

    def _step_back(self, flights: "deque[Flight]") -> None:
        """Nothing holds them up any more: they are due again, where they stood."""
        for live, run in groupby(flights, key=lambda flight: flight.live):
            if not live.forgotten:
                live.step_back((flight.key, flight.row) for flight in run)
