"""Lanes: of the tasks that share one, one at a time is under way, the earlier due first."""

from heapq import heappop, heappush
from math import inf

from .flight import Flight
from .live import LiveSlice


class Lanes:
    """Which task of each lane is under way, and who waits behind it."""

    def __init__(self) -> None:
        self._head: dict[str, bytes] = {}
        """The task a lane waits for: in flight, or waiting for its retry."""
        self._out: dict[str, Flight] = {}
        """The heads that are in flight."""
        self._retrying: set[str] = set()
        """Lanes whose head is not in flight but somewhere ahead in time."""
        self._kept: set[str] = set()
        """Lanes that wait by the server's word too: a new owner would learn of it."""
        self._behind: dict[str, list[tuple[int, int, int, Flight]]] = {}
        self._count = 0
        self.stirred: set[str] = set()
        """Lanes in which somebody may leave now."""
        self._barred: set[str] = set()
        """Lanes whose next one stands beyond the barrier."""
        self.early: dict[str, int] = {}
        """Lanes whose next one was taken before its time (this node's clock had run ahead), and when that is."""

    def hold(self, lane: str, idh: bytes) -> None:
        """The lane waits for the retry of this task."""
        self._head[lane] = idh
        self._out.pop(lane, None)
        self._retrying.add(lane)
        self._kept.add(lane)

    def offer(self, lane: str, flight: Flight) -> None:
        """A due task; it leaves when its turn comes.

        The turn goes by the place in time: a task that was overdue when it was put counts from then. One that a
        former owner has fired goes first, because it may have been delivered.
        """
        self._count += 1
        at_ms = -1 if flight.live.to_redo(flight.index) else flight.place_ms
        item = (at_ms, flight.index, self._count, flight)
        heappush(self._behind.setdefault(lane, []), item)
        self.stirred.add(lane)

    def stir(self) -> None:
        """Rows were read: the barrier may have moved."""
        self.stirred |= self._barred
        self._barred = set()

    def stir_due(self, now_ms: int) -> None:
        """Time has passed: some that were taken before their time are due now."""
        for lane in [lane for lane, at_ms in self.early.items() if at_ms <= now_ms]:
            del self.early[lane]
            self.stirred.add(lane)

    def leaving(self, barrier_ms: float = inf, now_ms: float = inf) -> list[Flight]:
        """Those whose turn it is, who are due and who stand before the barrier."""
        leaving = []
        for lane in self.stirred:
            flight = self._next(lane, barrier_ms, now_ms)
            if flight is not None:
                self._head[lane] = flight.idh
                self._out[lane] = flight
                self._retrying.discard(lane)
                leaving.append(flight)
        self.stirred = set()
        return leaving

    def _next(self, lane: str, barrier_ms: float, now_ms: float) -> Flight | None:
        behind = self._behind.get(lane, [])
        head = self._head.get(lane)
        if head is None:
            while behind and behind[0][3].live.forgotten:
                heappop(behind)
            if not behind:
                self._behind.pop(lane, None)
            elif behind[0][0] > now_ms:
                # One task that is not due would make the server refuse all that is due with it.
                self.early[lane] = behind[0][0]
            elif behind[0][0] < barrier_ms:
                return heappop(behind)[3]
            else:
                self._barred.add(lane)
        elif lane in self._retrying:
            return self._retry_of(lane, head, behind, now_ms)
        return None

    def _retry_of(
        self, lane: str, head: bytes, behind: list[tuple[int, int, int, Flight]], now_ms: float
    ) -> Flight | None:
        for i, item in enumerate(behind):
            if item[3].idh == head and not item[3].live.forgotten:
                if item[0] > now_ms:
                    self.early[lane] = item[0]
                    return None
                del behind[i]
                behind.sort()  # a sorted list is a heap
                return item[3]
        return None

    def take_back(self, lane: str, flight: Flight) -> None:
        """It did not leave after all; an earlier one may have come in the meantime."""
        self._not_out(lane)
        self.offer(lane, flight)

    def give_up(self, lane: str, flight: Flight) -> None:
        """It did not leave, and its row was let go: the lane waits for it no longer than until it is read again."""
        if self._out.get(lane) is flight:
            self._not_out(lane)
            self.stirred.add(lane)

    def forget(self, live: LiveSlice) -> None:
        """The slice is read anew. A head of its that is in flight will not be settled: it comes again."""
        for lane, flight in [item for item in self._out.items() if item[1].live is live]:
            self.give_up(lane, flight)

    def _not_out(self, lane: str) -> None:
        self._out.pop(lane, None)
        if lane in self._kept:
            self._retrying.add(lane)
        else:
            self._head.pop(lane, None)

    def free(self, lane: str, idh: bytes) -> bool:
        """The head is settled, the next one may leave. False when this was not the head."""
        if self._head.get(lane) != idh:
            return False
        del self._head[lane]
        self._out.pop(lane, None)
        self._retrying.discard(lane)
        self.stirred.add(lane)
        return True

    def let_go(self, lane: str) -> bool:
        """True when the server has to be told that the lane waits no more. Its head need not be a retry: the failed
        task may have been replaced."""
        kept = lane in self._kept
        self._kept.discard(lane)
        return kept

    def free_cancelled(self, prefix: bytes) -> list[str]:
        """An entry was cancelled before it was read: free the lanes that wait for its retry."""
        lanes = [lane for lane in self._retrying if self._head[lane][: len(prefix)] == prefix]
        for lane in lanes:
            self.free(lane, self._head[lane])
            self.let_go(lane)
        return lanes
