"""Lanes: tasks that share a lane are delivered one at a time, in order of their due times."""

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from math import inf

from .flight import Flight
from .slice import LiveSlice

_Behind = list[tuple[int, int, int, Flight]]


class Lanes:
    """The head of each lane, and the tasks that wait behind it."""

    def __init__(self, barrier_of: Callable[[str], float] = lambda _: inf) -> None:
        self._barrier_of = barrier_of
        """Time from which no task of a lane may leave, because earlier ones are unread in its hold slice."""
        self._head: dict[str, bytes] = {}
        """The task a lane waits for: in flight, or waiting for its retry."""
        self._out: dict[str, Flight] = {}
        """The heads that are in flight."""
        self._retrying: set[str] = set()
        """Lanes whose head is not in flight but somewhere ahead in time."""
        self._kept: set[str] = set()
        """Lanes whose failed head is also recorded on the server, for a new owner."""
        self.since: dict[str, int] = {}
        """When the head that a lane waits for failed first."""
        self.until: dict[str, int] = {}
        """When the next attempt of the head comes, if known."""
        self.places: dict[str, bytes] = {}
        """Known place of the failed head of a lane. At another place, another task may have its id."""
        self.held_by: dict[str, str] = {}
        """Lanes whose next task may not go out now, and the key of its hold."""
        self.crowded: set[str] = set()
        """Lanes that gained a waiting task although none can leave soon."""
        self._to_ask: list[str] = []
        self._behind: dict[str, _Behind] = {}
        self.behind = 0
        """Number of tasks that wait in memory, in all lanes."""
        self.is_full = False
        """Too many tasks wait in memory on this node: those behind heads in flight have to be moved too."""
        self._count = 0
        self.woken: set[str] = set()
        """Lanes in which a task may leave now."""
        self._barred: set[str] = set()
        """Lanes whose next task lies beyond the barrier."""
        self.early: dict[str, int] = {}
        """Lanes whose next task was taken too early (this node's clock was ahead), and when it is due."""

    def hold(self, lane: str, idh: bytes, *, since_ms: int = 0, until_ms: int = 0) -> None:
        """Note that the lane waits for the retry of this task."""
        self._head[lane] = idh
        self._out.pop(lane, None)
        self._retrying.add(lane)
        self._kept.add(lane)
        self.since[lane], self.until[lane] = since_ms, until_ms
        self.crowded.add(lane)

    def offer(self, lane: str, flight: Flight) -> None:
        """Add a due task; it leaves when its turn comes.

        Tasks are ordered by their place in time: a task that was overdue when it was put counts from then. A task that
        a former owner has fired goes first, because it may have been delivered.
        """
        self._count += 1
        at_ms = -1 if flight.live.to_redo(flight.index) else flight.place_ms
        item = (at_ms, flight.index, self._count, flight)
        heappush(self._behind.setdefault(lane, []), item)
        self.behind += 1
        self.woken.add(lane)
        if self.is_full or lane in self._retrying or lane in self.held_by or self._barrier_of(lane) < inf:
            self.crowded.add(lane)

    def wake_barred(self) -> None:
        """Wake lanes that waited at the barrier: rows were read, and it may have moved."""
        self.woken |= self._barred
        self._barred = set()

    def wake_due(self, now_ms: int) -> None:
        """Wake lanes whose next task was taken too early and is due now."""
        for lane in [lane for lane, at_ms in self.early.items() if at_ms <= now_ms]:
            del self.early[lane]
            self.woken.add(lane)

    def leaving(
        self,
        barrier_ms: float = inf,
        now_ms: float = inf,
        may: Callable[[str, Flight, float], bool] | None = None,
        *,
        most: int | None = None,
        most_slices: float = inf,
    ) -> list[Flight]:
        """Return tasks whose turn it is, that are due, before the barrier, and permitted; from at most `most` lanes and
        `most_slices` slices."""
        leaving = []
        lives: set[LiveSlice] = set()
        woken, self.woken = self.woken, set()
        for lane in list(woken)[:most]:
            woken.discard(lane)
            flight = self._who_may(lane, min(barrier_ms, self._barrier_of(lane)), now_ms, may)
            if flight is not None:
                self._head[lane] = flight.idh
                self._out[lane] = flight
                self._retrying.discard(lane)
                leaving.append(flight)
                lives.add(flight.live)
                if len(lives) >= most_slices:
                    break
        self.woken |= woken
        return leaving

    def _who_may(
        self, lane: str, barrier_ms: float, now_ms: float, may: Callable[[str, Flight, float], bool] | None
    ) -> Flight | None:
        flight = self._next(lane, barrier_ms, now_ms)
        # A task begun by a former owner may have been delivered: it goes out again, first, even if it is held now.
        if flight is None or may is None or flight.live.to_redo(flight.index) or may(lane, flight, now_ms):
            return flight
        self.offer(lane, flight)
        return None

    def _next(self, lane: str, barrier_ms: float, now_ms: float) -> Flight | None:
        if lane in self.held_by:
            return None
        behind = self._behind.get(lane, [])
        head = self._head.get(lane)
        if head is None:
            while behind and behind[0][3].live.forgotten:
                heappop(behind)
                self.behind -= 1
            if not behind:
                self._behind.pop(lane, None)
            elif behind[0][0] > now_ms:
                # One task that is not due would make the server refuse all due tasks sent with it.
                self.early[lane] = behind[0][0]
            elif behind[0][0] < barrier_ms:
                self.behind -= 1
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
            if item[3].is_retry_of(head) and not item[3].live.forgotten:
                if item[0] > now_ms:
                    self.early[lane] = item[0]
                    return None
                del behind[i]
                self.behind -= 1
                behind.sort()  # a sorted list is a heap
                return item[3]
        return None

    def take_back(self, lane: str, flight: Flight) -> None:
        """Return a task to its lane: it did not leave, and an earlier one may have come meanwhile."""
        self._not_out(lane)
        self.offer(lane, flight)

    def give_up(self, lane: str, flight: Flight) -> None:
        """Note that a head did not leave, and its row was released: the lane waits for it only until it is read
        again."""
        if self._out.get(lane) is flight:
            self._not_out(lane)
            self.woken.add(lane)

    def forget(self, live: LiveSlice) -> None:
        """Give up heads of a slice that is read again: they will not be settled, and come again."""
        for lane, flight in [item for item in self._out.items() if item[1].live is live]:
            self.give_up(lane, flight)

    def _not_out(self, lane: str) -> None:
        self._out.pop(lane, None)
        if lane in self._kept:
            self._retrying.add(lane)
        else:
            self._head.pop(lane, None)

    def free(self, lane: str, idh: bytes) -> bool:
        """Note that the head is settled, so that the next task may leave. Return False if this was not the head."""
        if self._head.get(lane) != idh:
            return False
        del self._head[lane]
        self._out.pop(lane, None)
        self._retrying.discard(lane)
        self.since.pop(lane, None)
        self.until.pop(lane, None)
        self.places.pop(lane, None)
        self.woken.add(lane)
        return True

    # -- held lanes --------------------------------------------------------------------------------------

    def heads_to_ask(self, most: int) -> Mapping[str, bytes]:
        """Return some lanes with the failed head they wait for; repeated calls cover all of them."""
        if not self._to_ask:
            self._to_ask = list(self._retrying)
        some, self._to_ask = self._to_ask[:most], self._to_ask[most:]
        return {lane: self._head[lane] for lane in some if lane in self._retrying}

    def stands(self, lane: str, idh: bytes, place: bytes) -> None:
        """Note the place of a failed head: it need not be checked again while it stays there."""
        if self._head.get(lane) == idh:
            self.places[lane] = place

    def waits_for(self, lane: str) -> bytes | None:
        """Return the failed head a lane waits for, unless it is in flight."""
        return self._head[lane] if lane in self._retrying else None

    def head_of(self, lane: str) -> bytes | None:
        """Return the head of a lane, in flight or not."""
        return self._head.get(lane)

    def is_closed(self, lane: str) -> bool:
        """Return True if no task of the lane can leave now, except a failed head it waits for."""
        return lane in self._retrying or lane in self.held_by

    def hold_up(self, lane: str, key: str) -> None:
        self.held_by[lane] = key
        self.crowded.add(lane)

    def release(self, lane: str) -> None:
        if self.held_by.pop(lane, None) is not None:
            self.woken.add(lane)

    def number_behind(self, lane: str, own: LiveSlice | None) -> int:
        """Count the tasks that wait in memory, except those of the hold slice of the lane."""
        return sum(1 for item in self._behind.get(lane, ()) if item[3].live is not own and not item[3].live.forgotten)

    def bytes_behind(self, lane: str) -> int:
        """Return the bytes of the rows that wait in memory."""
        return sum(len(item[3].row) for item in self._behind.get(lane, ()))

    def fill(self, *, full: bool) -> None:
        """Note whether memory is full: a head may run for hours, and slices with waiting tasks cannot be dropped."""
        if full and not self.is_full:
            self.crowded.update(self._behind)
        self.is_full = full

    def places_of(self, lane: str, own: LiveSlice) -> list[int]:
        """Return the places in time of the waiting tasks of this slice."""
        return [item[0] for item in self._behind.get(lane, ()) if item[3].live is own]

    def take_behind(self, lane: str, own: LiveSlice | None) -> list[Flight]:
        """Take the tasks that can wait in the lane's hold slice. Those already in it are released, if it is suspended:
        they are read again.

        Tasks that a former owner has begun stay, and so does the retry the lane waits for, unless it is held too.
        """
        head = None if lane in self.held_by else self.waits_for(lane)
        stay: _Behind = []
        moved = []
        waited = self._behind.pop(lane, [])
        for item in sorted(waited):  # in turn: for equal times the earlier put first
            flight = item[3]
            if flight.live.forgotten:
                continue
            if flight.is_retry_of(head) or flight.live.to_redo(flight.index):
                stay.append(item)
            elif flight.live is own:
                if own.suspended:
                    own.held.discard(flight.index)
                else:
                    stay.append(item)
            else:
                moved.append(flight)
        self.behind -= len(waited) - len(stay)
        if stay:
            heapify(stay)
            self._behind[lane] = stay
        return moved

    def is_kept(self, lane: str) -> bool:
        """Return whether the server has a record that the lane waits for a failed head."""
        return lane in self._kept

    def let_go(self, lane: str) -> bool:
        """Release a lane; return True if the server must be told that it waits no more. Its head need not be a retry:
        the failed task may have been replaced."""
        kept = lane in self._kept
        self._kept.discard(lane)
        return kept

    def ask_first(self, prefix: bytes) -> None:
        """Ask first about lanes whose retry may be an entry that was cancelled before it was read. Only the beginning
        of its id is left, which ids made together share: the index knows."""
        meant = [lane for lane in self._retrying if self._head[lane][: len(prefix)] == prefix]
        self._to_ask = [*meant, *(lane for lane in self._to_ask if lane not in meant)]
