"""Lanes: tasks that share a lane are delivered one at a time, in order of their due times."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from .flight import Flight
from .slice import LiveSlice

if TYPE_CHECKING:
    from .holds import Hold

_Waiting = tuple[int, int, int, Flight]
"""A task behind the head: its place in time, the index of its row, and a number that breaks ties."""


class Lane:
    """The head of one lane, and the tasks that wait behind it."""

    __slots__ = ("behind", "gate", "head", "hold", "name", "out", "place", "since_ms", "until_ms")

    def __init__(self, name: str) -> None:
        self.name = name
        self.head: bytes | None = None
        """The task the lane waits for: in flight, or somewhere ahead in time to be retried."""
        self.out: Flight | None = None
        """The head while it is in flight."""
        self.since_ms = 0
        """When the head that the lane waits for failed first."""
        self.until_ms = 0
        """When the next attempt of the head comes, if known."""
        self.place = b""
        """Known place of the failed head. At another place, another task may have its id."""
        self.gate: str | None = None
        """The key under which the next task has to wait; None if it may leave when its turn comes."""
        self.hold: Hold | None = None
        """The slice of tasks that were moved out of the way."""
        self.behind: list[_Waiting] = []

    @property
    def waits_for(self) -> bytes | None:
        """The failed head that the lane waits for, unless it is in flight."""
        return self.head if self.out is None else None

    @property
    def is_closed(self) -> bool:
        """True if no task of the lane can leave now, except a failed head it waits for."""
        return self.gate is not None or self.waits_for is not None

    @property
    def barrier_ms(self) -> float:
        """Time from which no task may leave, because earlier ones are unread in the hold slice."""
        return inf if self.hold is None else self.hold.barrier_ms()

    @property
    def number_behind(self) -> int:
        """Number of tasks that wait in memory, except those of the lane's own hold slice."""
        own = None if self.hold is None else self.hold.live
        return sum(1 for item in self.behind if item[3].live is not own and not item[3].live.forgotten)

    @property
    def bytes_behind(self) -> int:
        """Bytes of the rows that wait in memory."""
        return sum(len(item[3].row) for item in self.behind)


class Lanes:
    """The lanes of a partition about which something is known; all others are free."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._kept: set[Lane] = set()
        """Lanes whose failed head is also recorded on the server, for a new owner."""
        self.woken: set[Lane] = set()
        """Lanes in which a task may leave now."""
        self.crowded: set[Lane] = set()
        """Lanes that gained a waiting task although none can leave soon."""
        self._barred: set[Lane] = set()
        """Lanes whose next task lies beyond the barrier."""
        self._to_ask: list[Lane] = []
        self.behind = 0
        """Number of tasks that wait in memory, in all lanes."""
        self.is_full = False
        """Too many tasks wait in memory on this node: those behind heads in flight have to be moved too."""
        self._count = 0

    def get(self, name: str) -> Lane | None:
        return self._lanes.get(name)

    def of(self, name: str) -> Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
        return lane

    # -- turns -------------------------------------------------------------------------------------------

    def offer(self, name: str, flight: Flight) -> None:
        """Add a due task; it leaves when its turn comes.

        Tasks are ordered by their place in time: a task that was overdue when it was put counts from then. A task that
        a former owner has fired goes first, because it may have been delivered.
        """
        lane = self.of(name)
        self._count += 1
        at_ms = -1 if flight.live.to_redo(flight.index) else flight.place_ms
        heappush(lane.behind, (at_ms, flight.index, self._count, flight))
        self.behind += 1
        self.woken.add(lane)
        if self.is_full or lane.is_closed or lane.barrier_ms < inf:
            self.crowded.add(lane)

    def leaving(
        self,
        barrier_ms: float = inf,
        now_ms: float = inf,
        may: Callable[[Lane, Flight, float], bool] | None = None,
        *,
        most: int | None = None,
        most_slices: float = inf,
    ) -> list[Flight]:
        """Return tasks whose turn it is, that are due, before the barrier, and permitted; from at most `most` lanes and
        `most_slices` slices."""
        leaving = []
        lives: set[LiveSlice] = set()
        for lane in list(islice(self.woken, most)):
            if len(lives) >= most_slices:
                break
            self.woken.discard(lane)
            item = self._next(lane, barrier_ms, now_ms)
            if item is None:
                continue
            flight = item[3]
            # A task begun by a former owner may have been delivered: it goes out again, first, even if it is held now.
            if may is None or flight.live.to_redo(flight.index) or may(lane, flight, now_ms):
                self._take(lane, item)
                lane.head, lane.out = flight.idh, flight
                leaving.append(flight)
                lives.add(flight.live)
        return leaving

    def _next(self, lane: Lane, barrier_ms: float, now_ms: float) -> _Waiting | None:
        """Return the task of a lane whose turn has come, if it is due."""
        behind = lane.behind
        while behind and behind[0][3].live.forgotten:
            self._take(lane, behind[0])
        if lane.gate is not None or lane.out is not None:
            return None
        while (item := _first(lane)) is not None and item[0] > now_ms:
            # It was taken too early: this node's clock was ahead. The server would refuse all due tasks sent with it,
            # so it waits in its slice again.
            self._take(lane, item)
            item[3].live.step_back([(item[3].key, item[3].row)])
        if item is None:
            if not behind and lane.head is None and lane.hold is None and self._lanes.get(lane.name) is lane:
                del self._lanes[lane.name]  # there may be any number of lanes, and most are used once
            return None
        if lane.head is None and item[0] >= min(barrier_ms, lane.barrier_ms):
            self._barred.add(lane)
            return None
        return item

    def _take(self, lane: Lane, item: _Waiting) -> None:
        self.behind -= 1
        if item is lane.behind[0]:
            heappop(lane.behind)
        else:
            lane.behind.remove(item)
            heapify(lane.behind)

    def wake_barred(self) -> None:
        """Wake lanes that waited at the barrier: rows were read, and it may have moved."""
        self.woken |= self._barred
        self._barred = set()

    # -- heads -------------------------------------------------------------------------------------------

    def take_back(self, name: str, flight: Flight) -> None:
        """Return a task to its lane: it did not leave, and an earlier one may have come meanwhile."""
        self._not_out(self.of(name))
        self.offer(name, flight)

    def give_up(self, name: str, flight: Flight) -> None:
        """Note that a head did not leave, and its row was released: the lane waits for it only until it is read
        again."""
        lane = self.get(name)
        if lane is not None and lane.out is flight:
            self._not_out(lane)
            self.woken.add(lane)

    def forget(self, live: LiveSlice) -> None:
        """Give up heads of a slice that is read again: they will not be settled, and come again."""
        for lane in self._lanes.values():
            if lane.out is not None and lane.out.live is live:
                self.give_up(lane.name, lane.out)

    def _not_out(self, lane: Lane) -> None:
        lane.out = None
        if lane not in self._kept:
            lane.head = None

    def wait(self, name: str, idh: bytes, *, since_ms: int = 0, until_ms: int = 0, parked: bool = False) -> None:
        """Let the lane wait for the retry of this task: in its hold slice if it is parked, else in the timeline."""
        lane = self.of(name)
        if lane.hold is not None:
            lane.hold.has_head = parked
        lane.head, lane.out = idh, None
        lane.since_ms, lane.until_ms = since_ms, until_ms
        self._kept.add(lane)
        self.crowded.add(lane)

    def free(self, name: str, idh: bytes) -> bool:
        """Note that the head is settled, so that the next task may leave. Return True if this was the head, and the
        server has to be told that the lane no longer waits. The head need not be a retry: the failed task may have been
        replaced."""
        lane = self.get(name)
        if lane is None or lane.head != idh:
            return False
        lane.head = lane.out = None
        lane.since_ms = lane.until_ms = 0
        lane.place = b""
        self.woken.add(lane)
        kept = lane in self._kept
        self._kept.discard(lane)
        return kept

    def is_kept(self, name: str) -> bool:
        """Return whether the server has a record that the lane waits for a failed head."""
        return self.get(name) in self._kept

    def heads_to_ask(self, most: int) -> list[tuple[Lane, bytes]]:
        """Return some lanes with the failed head they wait for; repeated calls cover all of them."""
        if not self._to_ask:
            self._to_ask = list(self._kept)
        some, self._to_ask = self._to_ask[:most], self._to_ask[most:]
        return [(lane, lane.waits_for) for lane in some if lane.waits_for is not None]

    # -- held lanes --------------------------------------------------------------------------------------

    def hold_up(self, lane: Lane, key: str) -> None:
        """Let the next task wait under this key."""
        lane.gate = key
        self.crowded.add(lane)

    def release(self, lane: Lane) -> None:
        lane.gate = None
        self.woken.add(lane)

    def fill(self, *, full: bool) -> None:
        """Note whether memory is full: a head may run for hours, and slices with waiting tasks cannot be dropped."""
        if full and not self.is_full:
            self.crowded.update(lane for lane in self._lanes.values() if lane.behind)
        self.is_full = full

    def take_behind(self, lane: Lane) -> list[Flight]:
        """Take the tasks that can wait in the lane's hold slice. Those already in it are released, if it is suspended:
        they are read again.

        Tasks that a former owner has begun stay, and so does the retry the lane waits for, unless it is held too.
        """
        own = None if lane.hold is None else lane.hold.live
        head = None if lane.gate is not None else lane.waits_for
        stay: list[_Waiting] = []
        moved = []
        for item in sorted(lane.behind):  # in turn: for equal times the earlier put first
            flight = item[3]
            if flight.live.forgotten:
                continue
            if flight.is_retry_of(head) or flight.live.to_redo(flight.index):
                stay.append(item)
            elif flight.live is not own:
                moved.append(flight)
            elif flight.live.suspended:
                flight.live.held.discard(flight.index)
            else:
                stay.append(item)
        self.behind -= len(lane.behind) - len(stay)
        lane.behind = stay  # a sorted list is a heap
        return moved


def _first(lane: Lane) -> _Waiting | None:
    """Return the task of a lane that leaves next: the retry that it waits for, or the earliest."""
    if lane.head is None:
        return lane.behind[0] if lane.behind else None
    retries = (one for one in lane.behind if one[3].is_retry_of(lane.head) and not one[3].live.forgotten)
    return next(retries, None)
