"""One owned partition: its slices, its lanes, its fencing token, and pending writes."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from time import monotonic
from typing import Final, NamedTuple

from ..model.clock import steady_s
from ..store.keys import PartitionKeys, Slice
from ..store.owner.fire import MOST_BYTES, UNREAD, Commit, Death, HandOff, Known, NewPlace, Section, Touch
from ..store.owner.read import Stranger
from .due import MOST_SLICES, BeginCall, DueSelector, Leaving
from .flight import Flight
from .holds import Holders, HoldPolicy, TakenMoves
from .lanes import Lanes
from .occurrences import Chains
from .slice import LiveSlice

_NOTHING: Final[Mapping[LiveSlice, Sequence[int]]] = {}


class Touched(NamedTuple):
    """Slices that a call writes to, the writes, and how many tasks they finish."""

    lives: list[LiveSlice]
    touches: list[Touch]
    finished: int


MOST_OUTCOMES: Final = 500
"""Most outcomes that one commit writes: the server does nothing else meanwhile."""

LaneHold = tuple[str, bytes]
"""A lane and the failed head it waits for; empty once the lane waits no more."""


class Settled(NamedTuple):
    """Outcome of a row, if the server needs more than its done bit.

    The done bit enters memory with the call that writes the rest, not before: any call may write any done bits.
    """

    live: LiveSlice | None = None
    """None for a lane that continues although none of its tasks has ended here."""
    row_index: int = -1
    fired: bool = True
    """False for rows that were never begun: repeats of one put, and damaged entries."""
    is_over: bool = True
    """True if the task has ended: its lane and its schedule continue."""
    delivered: bool = False
    retry: NewPlace | None = None
    death: Death | None = None
    hold: LaneHold | None = None
    repeats: bool = False
    """True if the row repeats a put: it is counted, but not delivered."""

    @property
    def is_plain(self) -> bool:
        return self.retry is None and self.death is None and self.hold is None and not self.repeats

    @property
    def size(self) -> int:
        """Approximate bytes that a commit sends for it."""
        row = 0 if self.retry is None else len(self.retry.row)
        return row if self.death is None else row + len(self.death.record)


class PendingWrites:
    """Changes to be written by the next calls. Done bits are restored if the server wrote nothing."""

    def __init__(self) -> None:
        self.dirty: dict[LiveSlice, None] = {}
        """Slices with rows that are settled and not yet committed."""
        self.dirty_since = inf
        self.outcomes: deque[Settled] = deque()
        """Outcomes to be written together with the done bits of their rows."""

    def ended(self, settled: Settled, now_s: float) -> None:
        """Record how a task ended. A plain success is done at once; any other outcome when it is written."""
        live = settled.live
        if live is None or not settled.is_plain:
            self.outcomes.append(settled)
            return
        live.land(1, [settled.row_index])
        live.finished += settled.delivered
        self.settled(live, now_s)

    def settled(self, live: LiveSlice, now_s: float) -> None:
        """Record that rows of this slice were settled and have to be committed soon."""
        self.dirty[live] = None
        if self.dirty_since == inf:
            self.dirty_since = now_s

    def forget(self, lives: Iterable[LiveSlice]) -> None:
        """Forget slices that have nothing left to commit."""
        for live in lives:
            self.dirty.pop(live, None)
        if not self.dirty:
            self.dirty_since = inf  # otherwise the dispatcher would keep committing nothing

    def take_done(self, lives: Iterable[LiveSlice], begun: Mapping[LiveSlice, Sequence[int]] = _NOTHING) -> Touched:
        """Return the done bits of these slices, and the fired bits of rows that begin there."""
        some, touches, finished = list(lives), [], 0
        for live in some:
            touches.append(live.touch(begun.get(live, ()), commit=True))
            finished, live.finished = finished + live.finished, 0
        self.forget(some)
        return Touched(some, touches, finished)

    def take_back(self, begun: BeginCall) -> None:
        """Restore the done bits of a call that wrote nothing: they still have to be committed."""
        finished = begun.section.finished
        for live, touch in zip(begun.touched, begun.section.touches, strict=True):
            if touch.d:
                # The count goes with the done bits: both are written or neither is.
                live.finished, finished = live.finished + finished, 0
                live.bits.untake_dirty(touch.d_at, touch.d)
                self.settled(live, 0.0)

    def take_outcomes(self) -> list[Settled]:
        """Take as many outcomes as one commit may write, oldest first, and mark their rows as done."""
        taken: list[Settled] = []
        by_live: dict[LiveSlice, list[Settled]] = {}
        size = 0
        while self.outcomes and len(taken) < MOST_OUTCOMES and size < MOST_BYTES:
            one = self.outcomes.popleft()
            taken.append(one)
            size += one.size
            if one.live is not None and not one.live.forgotten:
                by_live.setdefault(one.live, []).append(one)
        for live, some in by_live.items():
            _land(live, some)
        return taken


def _land(live: LiveSlice, settled: Sequence[Settled]) -> None:
    fired = [one.row_index for one in settled if one.fired]
    others = [one.row_index for one in settled if not one.fired]
    if others:
        live.settle_many(others)
        live.held.difference_update(others)
    if fired:
        live.land(len(fired), fired)
    live.finished += sum(one.delivered for one in settled)


class HandingOff(NamedTuple):
    """Tasks on their way to their queues."""

    work: HandOff
    flights: list[Flight]
    """Tasks, in the order of the records."""
    touched: list[LiveSlice]
    has_lanes: bool


class HandedOff:
    """Tasks of a partition that workers have, as far as the owner has to track them."""

    __slots__ = ("answered", "awaited", "cursor", "put_off", "ready")

    def __init__(self) -> None:
        self.ready: list[Flight] = []
        """Begun tasks, to be handed off with the next call."""
        self.put_off: list[Flight] = []
        """Tasks whose id another task has in a queue: they are retried."""
        self.awaited: dict[bytes, Flight] = {}
        """Tasks of lanes that workers have, by address: they stay fired until the workers' acks arrive."""
        self.answered: dict[bytes, LiveSlice] = {}
        """Addresses whose acks can be deleted once the end of the task is committed."""
        self.cursor = 0
        """Cursor of the acks in this round."""

    @property
    def is_watched(self) -> bool:
        """True if something here waits for acks of workers."""
        return bool(self.awaited or self.put_off or self.answered)

    @property
    def out(self) -> int:
        """Number of fired rows whose end this owner need not wait for: the next owner resumes them."""
        flights = (*self.awaited.values(), *self.put_off)
        return sum(not flight.live.forgotten for flight in flights)


MOST_MOVES: Final = 200
"""Most tasks that one commit moves into hold slices: the server does nothing else meanwhile."""

NOTHING_TAKEN: Final = TakenMoves([], [], {}, [])


class Partition:
    """All state of one partition that this node owns. Nothing here does I/O."""

    def __init__(self, keys: PartitionKeys, token: bytes, lease_until: float, holders: Holders | None = None) -> None:
        self.keys = keys
        self.number = keys.number
        self.token = token
        self.seq = 0
        self.lease_until = lease_until
        """End of the lease on this machine's monotonic clock, counted from when the request for it was sent."""
        self.closing_since = inf
        """Time (same clock) since when nothing new begins here, because another node waits for the partition."""
        self.open_until = 0.0
        """Time until which it stays open because it could not be drained in time."""
        self.closed_in_vain = 0
        self.slices: dict[Slice, LiveSlice] = {}
        """Slices in order of start."""
        self.soonest_ms: float = inf
        """When the next waiting task is due."""
        self.pending_writes = PendingWrites()
        self.holders = holders or Holders()
        self.hold_policy = HoldPolicy(self.holders)
        self.lanes = Lanes(self.hold_policy.barrier_ms)
        self.hold_policy.lanes = self.lanes
        self._taken = NOTHING_TAKEN
        """Moves into hold slices in the current commit."""
        self.unanswered: BeginCall | Commit | HandingOff | None = None
        """Call whose reply was lost: it must be repeated unchanged before anything else."""
        self.handed = HandedOff()
        self.chains = Chains()
        """The schedules of this partition."""
        self.due_selector = DueSelector(self.chains, self.lanes, self.hold_policy, self.holders)
        self.accepted_seen = -1
        self.needs_listing = True
        self.blocked_ms = -1
        """A lane's task waits for slices that start by then and are not read to their end."""
        self.waits_for_listing = False
        """True if some of these slices are still unknown: until a listing, a begin would be refused again."""
        self.gone: dict[Slice, float] = {}
        """Slices (with incarnations) dropped since the last listing was requested, which may still show them."""
        self.next_start_ms: int | None = None
        """Start of the earliest slice beyond the horizon."""
        self.strangers: list[Stranger] = []
        """Members of its sorted set of slices that are not slices."""

    @property
    def holds_lease(self) -> bool:
        """True while the lease lasts. Asked right after a clock reading, it also vouches for that reading: a server has
        replied since any jump of the clock. Otherwise a wrong clock might place work an hour away, which the next owner
        would do in time."""
        return steady_s() < self.lease_until

    @property
    def may_begin(self) -> bool:
        return not (self.closing or self.waits_for_listing)

    # -- waiting tasks ----------------------------------------------------------------------------------

    def survey(self) -> None:
        """Find out when the next task is due; called after every change of what waits."""
        soonest = inf
        for live in self.slices.values():
            if live.from_ms >= soonest:
                break
            queue = live.queue  # read directly: this runs in every tick, over all slices
            if queue and not live.blocks_its_lane and (live.pace is None or self.due_selector.room_of(live, 1)):
                soonest = min(soonest, live.from_ms + queue.first_offset)
        self.soonest_ms = min(soonest, *self.lanes.early.values()) if self.lanes.early else soonest

    def add(self, *lives: LiveSlice) -> None:
        last = next(reversed(self.slices.values()), None)
        self.slices.update((live.slice, live) for live in lives)
        if len(lives) > 1 or (last is not None and lives and last.from_ms > lives[0].from_ms):
            self.slices = dict(sorted(self.slices.items(), key=_by_start))

    @property
    def waiting(self) -> int:
        return sum(live.waiting for live in self.slices.values()) + self.hold_policy.standing

    @property
    def closing(self) -> bool:
        return self.closing_since != inf

    @property
    def drained(self) -> bool:
        """True if all begun tasks are finished or with workers, and the server knows it."""
        if self.pending_writes.dirty or self.has_outcomes or self.unanswered is not None:
            return False
        return sum(live.out for live in self.slices.values()) == self.handed.out

    @property
    def has_outcomes(self) -> bool:
        """True if outcomes are unwritten, including tasks being moved into hold slices."""
        return bool(self.pending_writes.outcomes) or self.hold_policy.has_outcomes

    # -- begin ---------------------------------------------------------------------------------------

    def begin(self, now_ms: int, limit: int, *, commit: bool, whole: bool = False) -> BeginCall | None:
        """Begin everything due by now (up to the limit); with `commit`, also write what was settled since the last one.

        With `whole`, begin no part of a slice that is overdue as a whole: its turn comes soon.
        """
        leaving = self.due_selector.take(self.slices, now_ms, limit, whole=whole)
        self.survey()
        touched = self._touch(leaving, commit=commit)
        return self._section(leaving, touched, now_ms) if touched.lives else None

    def is_paced(self, live: LiveSlice) -> bool:
        """Return whether its rows leave gradually: then few are needed in memory."""
        return live.pace is not None and self.holders.room(live.pace) is not None

    def _touch(self, leaving: Leaving, *, commit: bool) -> Touched:
        places = leaving.places
        if commit:
            dirty = dict.fromkeys(islice(self.pending_writes.dirty, MOST_SLICES), ())
            return self.pending_writes.take_done(places | dirty, places)
        return Touched(list(places), [live.touch(some, commit=False) for live, some in places.items()], 0)

    def _section(self, leaving: Leaving, touched: Touched, now_ms: int) -> BeginCall:
        flights, places = leaving.flights, leaving.places
        due_ms = leaving.max_due_ms if flights else None
        lanes = any(live.has_lanes for live in places) and any(flight.body.lane is not None for flight in flights)
        known = self._known(leaving.max_due_ms) if lanes else []
        following = self.chains.next_occurrences(flights, now_ms) if any(live.has_schedules for live in places) else ()
        done, touches = touched.finished, touched.touches
        section = Section(self.number, self.token, self.seq + 1, due_ms, done, touches, known, following)
        return BeginCall(section, flights, touched.lives, leaving.alike)

    def _known(self, max_due_ms: int) -> list[Known]:
        limit = _second_end(max_due_ms)
        slices = [
            Known(live.name, live.keys[0], live.g_text, live.cursor)
            for live in self.slices.values()
            if live.from_ms < limit and not live.slice.is_hold
        ]
        # The server counts every member of the set, including these, which are not read.
        strangers = [one for one in self.strangers if one.score * 1000 < limit]
        return slices + [Known(name, self.keys.slices, repr(score), UNREAD) for name, score in strangers]

    # -- answers ---------------------------------------------------------------------------------------

    def begun(self, begun: BeginCall, x: list[bytes]) -> list[Flight]:
        """Record that the server has the fired bits; return the flights that leave now, without cancelled ones."""
        self.seq = begun.section.seq
        _prove(begun.touched, begun.section.touches)
        leaving, cancelled = begun.part(x)
        for flight in cancelled:
            flight.live.land(1, [flight.index])
            self.pending_writes.settled(flight.live, 0.0)
            self._lane_may_go_on(flight)
        if any(live.has_schedules for live in begun.touched) and self.chains.begun(begun.flights, leaving):
            self.needs_listing = True  # some of the next occurrences are near
        return leaving

    def take_back(self, begun: BeginCall) -> None:
        """Undo a call that wrote nothing: everything waits again, and done bits still have to be committed."""
        self.due_selector.take_back(begun)
        self.pending_writes.take_back(begun)
        self.survey()

    def forget(self, live: LiveSlice) -> None:
        """Read a slice again, including its bitmaps: its list on the server is not the one that was read."""
        self.remove(live)
        self.needs_listing = True

    def block(self, max_due_ms: int) -> None:
        """Block lanes until every slice of that second, and all earlier ones, are read to their end."""
        self.blocked_ms = _second_end(max_due_ms) - 1
        self.needs_listing = self.waits_for_listing = True

    def dropped(self, live: LiveSlice) -> None:
        """Remove a slice that the server has dropped."""
        self.gone[live.slice] = live.g
        self.remove(live)

    def remove(self, live: LiveSlice) -> None:
        live.forgotten = True
        if live.has_lanes:
            self.lanes.forget(live)
        if live.slice.is_hold:
            self.hold_policy.forget(live)
        if live.has_schedules:
            self.chains.forget(live)
        if self.slices.get(live.slice) is live:
            del self.slices[live.slice]
        self.pending_writes.forget([live])
        self.survey()

    # -- outcomes -----------------------------------------------------------------------------------

    def ended(self, flight: Flight, settled: Settled) -> None:
        """Record the end of a flight. If its task is over, the next one of its lane may leave."""
        if settled.is_over and flight.body.lane is not None:
            settled = settled._replace(hold=self._free_lane(flight.body.lane, flight.idh))
        self.pending_writes.ended(settled, monotonic())

    def _free_lane(self, lane: str, idh: bytes) -> LaneHold | None:
        """Let the next task of a lane leave if this was its head. Return the hold to be cleared on the server."""
        if not self.lanes.free(lane, idh) or not self.lanes.let_go(lane):
            return None
        self.hold_policy.lane_is_free(lane)
        return lane, b""

    def _lane_may_go_on(self, flight: Flight) -> None:
        """Free a lane whose head was cancelled or moved. A failed head may have been rescheduled: then the lane waits
        until `HoldWatch` has asked the server about it."""
        lane = flight.body.lane
        if lane is not None and self.lanes.is_kept(lane):
            self.lanes.give_up(lane, flight)
        elif lane is not None:
            self._free_lane(lane, flight.idh)  # the server has no record of it

    @property
    def quiet(self) -> bool:
        """True if the server knows of every retry that was placed."""
        return self.unanswered is None and not self.has_outcomes

    def head_is_gone(self, lane: str, idh: bytes) -> None:
        """Free a lane whose failed head was cancelled, given up or replaced: the next task may leave."""
        if self.lanes.waits_for(lane) == idh and (hold := self._free_lane(lane, idh)) is not None:
            self.pending_writes.outcomes.append(Settled(hold=hold))

    def took(self, live: LiveSlice, now_s: float) -> None:
        """Handle rows just read: record those that need no delivery, and when the next is due."""
        if live.bits.dirty:
            self.pending_writes.settled(live, now_s)
        for index in live.row_filter.repeats:
            self.pending_writes.outcomes.append(Settled(live, index, fired=False, repeats=True))
        live.row_filter.repeats = []
        for prefix in live.row_filter.tombstones:
            self.lanes.ask_first(prefix)
        live.row_filter.tombstones = []
        if live.occurrences:
            self.chains.read(live.occurrences)
            live.occurrences = []
        self.lanes.wake_barred()
        self.soonest_ms = min(self.soonest_ms, live.next_due_ms() or inf)

    def answered(self) -> None:
        """Forget the current commit: it is written, or will not be."""
        self._taken.answered()
        self._taken = NOTHING_TAKEN
        self.lanes.wake_barred()

    def committed(self, work: Commit) -> None:
        self.seq = work.seq
        by_name = {touch.name: touch for touch in work.touches}
        touched = [live for live in self.slices.values() if live.name in by_name]
        _prove(touched, [by_name[live.name] for live in touched])

    def commit(self) -> Commit:
        """Return a commit: as many outcomes as one call may write, with their done bits, then moves."""
        settled = self.pending_writes.take_outcomes()
        retries = [one.retry for one in settled if one.retry is not None]
        parked = {retry.slice.name for retry in retries if retry.slice.is_hold}
        # Move nothing behind the failed head of a lane before the server knows of the head.
        self._taken = self.hold_policy.take_moves(0 if self.pending_writes.outcomes else MOST_MOVES, parked)
        ended = (one.live for one in settled if one.live is not None and not one.live.forgotten)
        done = self.pending_writes.take_done(dict.fromkeys((*ended, *self._taken.lives)))
        return Commit(
            self.number,
            self.token,
            self.seq + 1,
            done.finished,
            sum(one.repeats for one in settled),
            done.touches,
            retries,
            [one.death for one in settled if one.death is not None],
            [one.hold for one in settled if one.hold is not None],
            self._taken.moves,
            self._taken.records,
        )


def _second_end(ms: int) -> int:
    """Return the end of the second: the server knows slices by the second in which they start."""
    return (ms // 1000 + 1) * 1000


def _by_start(item: tuple[Slice, LiveSlice]) -> int:
    return item[1].from_ms


def _prove(touched: list[LiveSlice], touches: list[Touch]) -> None:
    for live, touch in zip(touched, touches, strict=True):
        live.proven = max(live.proven, touch.m)
