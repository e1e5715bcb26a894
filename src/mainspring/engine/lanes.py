"""Lanes: of the tasks that share one, one at a time is under way, the earlier due first."""

from heapq import heappop, heappush

from .flight import Flight


class Lanes:
    """Which task of each lane is under way, and who waits behind it."""

    def __init__(self) -> None:
        self._head: dict[str, bytes] = {}
        self._behind: dict[str, list[tuple[int, int, Flight]]] = {}
        self._count = 0
        self.waiting = 0

    def hold(self, lane: str, idh: bytes) -> None:
        """The lane waits for this task, wherever it is: in flight, or in a retry's wait."""
        self._head[lane] = idh

    def admit(self, flight: Flight) -> bool:
        """May this task go now? If not it waits here for its turn."""
        lane = flight.body.lane
        if lane is None:
            return True
        head = self._head.get(lane)
        behind = self._behind.get(lane)
        if head == flight.idh or (head is None and not behind):
            self._head[lane] = flight.idh
            return True
        self._count += 1
        heappush(self._behind.setdefault(lane, []), (flight.original_due_ms, self._count, flight))
        self.waiting += 1
        if head is None:
            self._head[lane] = b""
        return False

    def next_after(self, lane: str, idh: bytes) -> Flight | None:
        """The head is settled: who goes next?"""
        if self._head.get(lane) != idh:
            return None
        behind = self._behind.get(lane)
        while behind:
            flight = heappop(behind)[2]
            self.waiting -= 1
            if not flight.live.forgotten:
                self._head[lane] = flight.idh
                return flight
        self._behind.pop(lane, None)
        del self._head[lane]
        return None
