"""One owned partition: its slices, its lanes, its fencing token, and pending writes."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from math import inf
from time import monotonic
from typing import Final, NamedTuple

from ..model.clock import steady_s
from ..model.run import Run
from ..model.schedule.chain import NotRun
from ..model.schedule.definition import Definition
from ..store.keys import ADDRESS_BYTES, PartitionKeys, Slice, address_prefix, r_of
from ..store.owner.fire import (
    BUSY,
    MOST_BYTES,
    MOST_TASKS,
    UNREAD,
    Commit,
    Death,
    Known,
    NewPlace,
    Section,
    Touch,
    WriteStatus,
)
from ..store.owner.read import Stranger
from ..store.records import KeptResult
from .due import MOST_SLICES, BeginCall, Damaged, DueSelector, Leaving
from .flight import Flight, FlightGroup
from .holds import Holders, HoldPolicy, TakenMoves
from .lanes import Lanes
from .occurrences import Chains
from .slice import LiveSlice

log = logging.getLogger("mainspring.engine")

_NOTHING: Final[Mapping[LiveSlice, Sequence[int]]] = {}
_NO_BITS: Final[list[bytes]] = []


class PartitionLost(Exception):
    """The partition must be given up: another node has it, its server lost data, or its lease is over."""


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
    answer: KeptResult | None = None
    """The receiver's response, stored before the task counts as done."""
    runs: tuple[Run, ...] = ()
    """What happened, for the history."""
    leaving: FlightGroup | None = None
    """Flights that leave once this is written."""

    @property
    def is_plain(self) -> bool:
        """True if nothing but a done bit has to be written."""
        return self[5:] == _PLAIN

    @property
    def size(self) -> int:
        """Approximate bytes that a commit sends for it."""
        row = 0 if self.retry is None else len(self.retry.row)
        row += 0 if self.answer is None else len(self.answer.data)
        return row if self.death is None else row + len(self.death.record)


_PLAIN: Final = Settled()[5:]


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

    def take_outcomes(self, most: int) -> list[Settled]:
        """Take some outcomes, oldest first, no more than one commit may write, and mark their rows as done."""
        taken: list[Settled] = []
        by_live: dict[LiveSlice, list[Settled]] = {}
        size = 0
        while self.outcomes and len(taken) < most and size < MOST_BYTES:
            one = self.outcomes.popleft()
            live = one.live if one.leaving is None else one.leaving.live
            if live is not None and live.forgotten:
                # The row is read again, as fired and not done: it is delivered again, and has another outcome.
                if one.hold is not None and not one.hold[1]:
                    taken.append(Settled(hold=one.hold))  # its lane continues already
                continue
            taken.append(one)
            size += one.size
            if one.live is not None:
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


class CommitCall(NamedTuple):
    """Outcomes, moves and tasks for workers on their way to the server."""

    work: Commit
    touched: list[LiveSlice]
    moves: TakenMoves
    size: int
    """Number of outcomes and moved tasks."""
    handed: list[Flight]
    """Tasks for workers, in the order of the records."""
    leaving: list[FlightGroup]
    """Flights that leave once this is written."""


OwnerCall = BeginCall | CommitCall


MOST_MOVES: Final = 200
"""Most tasks that one commit moves into hold slices: the server does nothing else meanwhile."""


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
        self._pending_writes = PendingWrites()
        self.holders = holders or Holders()
        self.hold_policy = HoldPolicy(self.holders)
        self.lanes = Lanes(self.hold_policy.barrier_ms)
        self.hold_policy.lanes = self.lanes
        self.unanswered: OwnerCall | None = None
        """The call under way. If its reply is lost, it is repeated unchanged before anything else is written.

        Set by `begin` and `commit`, cleared by `answered`, and by nothing else."""
        self._ready: deque[tuple[str, FlightGroup]] = deque()
        """Begun tasks with their queues, to be handed off with the next calls."""
        self._put_off: list[tuple[str, Flight]] = []
        """Tasks whose id another task has in a queue: they are handed off again."""
        self._awaited: dict[bytes, Flight] = {}
        """Tasks of lanes that workers have, by address: they stay fired until the workers' acks arrive."""
        self._answered: dict[bytes, LiveSlice] = {}
        """Addresses whose acks can be deleted once the end of the task is committed."""
        self.ack_cursor = 0
        """Cursor of the acks in this round."""
        self.chains = Chains()
        """The schedules of this partition."""
        self._due_selector = DueSelector(self.chains, self.lanes, self.hold_policy, self.holders)
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
            if queue and not live.blocks_its_lane and (live.pace is None or self._due_selector.room_of(live, 1)):
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
        if self.has_writes or self.unanswered is not None:
            return False
        # The next owner resumes those that workers have.
        with_workers = (*self._awaited.values(), *(flight for _, flight in self._put_off))
        return sum(live.out for live in self.slices.values()) == sum(not one.live.forgotten for one in with_workers)

    @property
    def has_outcomes(self) -> bool:
        """True if outcomes are unwritten, including tasks being moved into hold slices."""
        return bool(self._pending_writes.outcomes) or self.hold_policy.has_outcomes

    @property
    def has_writes(self) -> bool:
        """True if something has ended, or waits for a worker, and the server does not know it."""
        return bool(self._pending_writes.dirty or self.has_outcomes or self._ready)

    @property
    def unwritten(self) -> int:
        """Number of tasks whose outcome or hand-off is not on its way yet."""
        return len(self._pending_writes.outcomes) + sum(len(group.flights) for _, group in self._ready)

    @property
    def dirty_since(self) -> float:
        """Since when plain successes wait to be committed, by the monotonic clock; infinity if none do."""
        return self._pending_writes.dirty_since

    @property
    def to_spill(self) -> int:
        """Number of due tasks without lanes that were held back and have to be moved."""
        return self.hold_policy.spill_queue.count

    def may_begin_now(self, now_ms: int) -> bool:
        return self.may_begin and (self.soonest_ms <= now_ms or self.has_ready)

    @property
    def has_ready(self) -> bool:
        """True if a lane's next task, or a planned run that had to wait, may be able to begin."""
        return bool(self.lanes.woken or self.chains.ready)

    # -- begin ---------------------------------------------------------------------------------------

    def begin(self, now_ms: int, limit: int, *, commit: bool, whole: bool = False) -> BeginCall | None:
        """Begin everything due by now (up to the limit); with `commit`, also write what was settled since the last one.

        With `whole`, begin no part of a slice that is overdue as a whole: its turn comes soon. Return None if there is
        nothing to write, or a call is under way.
        """
        if self.unanswered is not None:
            return None
        leaving = self._due_selector.take(self.slices, now_ms, limit, whole=whole)
        self.survey()
        touched = self._touch(leaving.places, commit=commit)
        if not touched.lives:
            return None
        self.unanswered = call = self._begin_call(leaving, touched, now_ms)
        return call

    def is_paced(self, live: LiveSlice) -> bool:
        """Return whether its rows leave gradually: then few are needed in memory."""
        return live.pace is not None and self.holders.room(live.pace) is not None

    def _touch(self, places: Mapping[LiveSlice, Sequence[int]], *, commit: bool) -> Touched:
        if commit:
            dirty = dict.fromkeys(islice(self._pending_writes.dirty, MOST_SLICES), ())
            return self._pending_writes.take_done(
                {**places, **{live: () for live in dirty if live not in places}}, places
            )
        return Touched(list(places), [live.touch(some, commit=False) for live, some in places.items()], 0)

    def _begin_call(self, leaving: Leaving, touched: Touched, now_ms: int) -> BeginCall:
        groups = leaving.groups
        due_ms = leaving.max_due_ms if groups else None
        lanes = any(group.live.has_lanes and _any_in_lane(group) for group in groups)
        known = self._known(leaving.max_due_ms) if lanes else []
        scheduled = [group for group in groups if group.live.has_schedules]
        following = self.chains.next_occurrences(_flights(scheduled), now_ms) if scheduled else ()
        done, touches = touched.finished, touched.touches
        section = Section(self.number, self.token, self.seq + 1, due_ms, done, touches, known, following)
        return BeginCall(section, groups, touched.lives)

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

    def answered(self, call: OwnerCall, status: WriteStatus, x: list[bytes] = _NO_BITS) -> list[FlightGroup]:
        """Apply the server's answer to a call; return the groups that leave now. Raise `PartitionLost` if the partition
        must be given up."""
        self.unanswered = None
        if isinstance(call, CommitCall):
            call.moves.answered()
            self.lanes.wake_barred()
        match status:
            case "ok":
                return self._applied(call, x)
            case "stale":
                lives = list(call.touched)
                if isinstance(call, CommitCall):
                    lives += [flight.live for flight in call.handed]
                    lives += [group.live for group in call.leaving]
                for live in dict.fromkeys(lives):
                    self.forget(live)
                log.warning("partition %d: a slice is not the one that was read; reading again", self.number)
            case "early" | "more" if isinstance(call, BeginCall):
                self.take_back(call)
                if status == "more":
                    self.block(call.section.max_due_ms or 0)
            case _:
                raise PartitionLost(status)
        return []

    def _applied(self, call: OwnerCall, x: list[bytes]) -> list[FlightGroup]:
        work = call.section if isinstance(call, BeginCall) else call.work
        self.seq = work.seq
        for live, touch in zip(call.touched, work.touches, strict=True):
            live.proven = max(live.proven, touch.m)
        if isinstance(call, BeginCall):
            return self._begun(call, x)
        if call.work.retries:
            self.needs_listing = True
        return [group for group in call.leaving if not group.live.forgotten]

    def _begun(self, begun: BeginCall, x: list[bytes]) -> list[FlightGroup]:
        """Return the groups that leave now, without flights that were cancelled before."""
        self.blocked_ms = -1
        leaving, cancelled = begun.part(x)
        for flight in cancelled:
            flight.live.land(1, [flight.index])
            self._pending_writes.settled(flight.live, 0.0)
            self._lane_may_go_on(flight)
        if any(live.has_schedules for live in begun.touched):
            left = list(_flights(leaving))
            if self.chains.begun(left if not cancelled else list(_flights(begun.groups)), left):
                self.needs_listing = True  # some of the next occurrences are near
        if not self.holds_lease:
            # Fired, but the lease ran out while we waited: the next owner delivers these.
            raise PartitionLost("its lease ran out before the send")
        return leaving

    def take_back(self, begun: BeginCall) -> None:
        """Undo a call that wrote nothing: everything waits again, and done bits still have to be committed."""
        self._due_selector.take_back(begun)
        self._pending_writes.take_back(begun)
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
        self._pending_writes.forget([live])
        self.survey()

    # -- outcomes -----------------------------------------------------------------------------------

    def done(self, live: LiveSlice, indexes: Sequence[int]) -> bool:
        """Record plain successes. Return True if nothing else waited to be committed."""
        first = not self._pending_writes.dirty
        live.land(len(indexes), indexes)
        live.finished += len(indexes)
        self._pending_writes.settled(live, monotonic())
        return first

    def write(self, settled: Settled) -> None:
        """Record an outcome of a row that was never begun."""
        self._pending_writes.ended(settled, monotonic())

    def run_over(self, flight: Flight, outcome: str, now_ms: int) -> None:
        """Note that a run of a schedule has ended, with no further attempt."""
        self.chains.over(flight, outcome, now_ms)

    def take_passed(self) -> list[tuple[Definition, NotRun]]:
        """Return the planned times that did not run, noted since the last call."""
        passed, self.chains.passed = self.chains.passed, []
        return passed

    def take_damaged(self) -> list[Damaged]:
        """Return the entries found since the last call that cannot be read."""
        damaged, self._due_selector.row_decoder.damaged = self._due_selector.row_decoder.damaged, []
        for one in damaged:
            one.live.held.add(one.index)  # another pass over the list must not take it again
        return damaged

    def ended(self, flight: Flight, settled: Settled) -> None:
        """Record the end of a flight. If its task is over, the next one of its lane may leave."""
        if settled.is_over and flight.body.lane is not None:
            settled = settled._replace(hold=self._free_lane(flight.body.lane, flight.idh))
        self._pending_writes.ended(settled, monotonic())

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
            self._pending_writes.outcomes.append(Settled(hold=hold))

    def took(self, live: LiveSlice, now_s: float) -> None:
        """Handle rows just read: record those that need no delivery, and when the next is due."""
        if live.bits.dirty:
            self._pending_writes.settled(live, now_s)
        for index in live.row_filter.repeats:
            self._pending_writes.outcomes.append(Settled(live, index, fired=False, repeats=True))
        live.row_filter.repeats = []
        for prefix in live.row_filter.tombstones:
            self.lanes.ask_first(prefix)
        live.row_filter.tombstones = []
        if live.occurrences:
            self.chains.read(live.occurrences)
            live.occurrences = []
        self.lanes.wake_barred()
        self.soonest_ms = min(self.soonest_ms, live.next_due_ms() or inf)

    def commit(self, room: int = MOST_OUTCOMES) -> CommitCall | None:
        """Return a commit: as many outcomes as one call may write (at most `room`), then moves, and tasks for workers.

        Return None if there is nothing to write, or a call is under way.
        """
        if self.unanswered is not None or not (self._ready or (room > 0 and self.has_outcomes)):
            return None
        settled = self._pending_writes.take_outcomes(min(room, MOST_OUTCOMES))
        retries = [one.retry for one in settled if one.retry is not None]
        parked = {retry.slice.name for retry in retries if retry.slice.is_hold}
        # Move nothing behind the failed head of a lane before the server knows of the head.
        movable = 0 if self._pending_writes.outcomes else min(room - len(settled), MOST_MOVES)
        moves = self.hold_policy.take_moves(movable, parked)
        handed = self._take_ready()
        if not (settled or moves.moves or moves.records or handed):
            return None
        ended = (one.live for one in settled if one.live is not None)
        lives = dict.fromkeys((*ended, *moves.lives, *(group.live for groups in handed.values() for group in groups)))
        done = self._pending_writes.take_done(lives)
        work = Commit(
            self.number,
            self.token,
            self.seq + 1,
            done.finished,
            sum(one.repeats for one in settled),
            done.touches,
            retries,
            [one.death for one in settled if one.death is not None],
            [one.hold for one in settled if one.hold is not None],
            moves.moves,
            moves.records,
            [one.answer for one in settled if one.answer is not None],
            [run for one in settled for run in one.runs],
            {queue: [*chain.from_iterable(map(_records, groups))] for queue, groups in handed.items()},
        )
        flights = [flight for groups in handed.values() for flight in _flights(groups)]
        leaving = [one.leaving for one in settled if one.leaving is not None]
        size = len(settled) + sum(moves.holds.values())
        self.unanswered = call = CommitCall(work, done.lives, moves, size, flights, leaving)
        return call

    # -- workers ----------------------------------------------------------------------------------------

    def hand_off(self, queue: str, group: FlightGroup) -> None:
        """Let the next call hand these tasks off to a queue."""
        self._ready.append((queue, group))

    def _take_ready(self) -> dict[str, list[FlightGroup]]:
        """Take as many tasks for workers as one call may carry, by queue. Those of no lane are done with that."""
        by_queue: dict[str, list[FlightGroup]] = {}
        taken = size = 0
        while self._ready and taken < MOST_TASKS and size <= MOST_BYTES:
            queue, group = self._ready.popleft()
            live = group.live
            if live.forgotten:
                continue
            fits = _how_many(group, MOST_TASKS - taken, MOST_BYTES - size)
            if fits < len(group.flights):
                group, rest = group.split(fits)
                self._ready.appendleft((queue, rest))
            by_queue.setdefault(queue, []).append(group)
            taken += len(group.flights)
            size += sum(len(flight.row) + ADDRESS_BYTES for flight in group.flights)
            indexes: Sequence[int] = group.indexes
            if live.has_lanes:
                indexes = [flight.index for flight in group.flights if flight.body.lane is None]
            if indexes:
                live.land(len(indexes), indexes)
        return by_queue

    def handed_off(self, call: CommitCall, answers: Mapping[int, bytes]) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Note which tasks workers have. Return how many are done with that, and the acks of those that a worker has
        ended already, by address."""
        if not answers and all(flight.body.lane is None for flight in call.handed):
            return len(call.handed), []
        queues = [queue for queue, records in call.work.queues.items() for _ in records]
        delivered, ended = 0, []
        for position, flight in enumerate(call.handed):
            answer = answers.get(position)
            if answer == BUSY:
                if flight.body.lane is None:
                    flight.live.reopen(flight.index)  # it stays fired, also on the server
                self._put_off.append((queues[position], flight))
            elif flight.body.lane is None:
                delivered += 1
            else:
                address = flight.address
                self._awaited[address] = flight
                if answer is not None:
                    ended.append((address, answer))
        return delivered, ended

    def hand_off_again(self) -> None:
        """Try again to hand off tasks whose id another task had in a queue."""
        again, self._put_off = self._put_off, []
        for queue, flight in again:
            self.hand_off(queue, FlightGroup(flight.live, [flight], [flight.index]))

    @property
    def waits_for_workers(self) -> bool:
        """True if something waits for workers or their acks, or an ack is still to be deleted."""
        return bool(self._awaited or self._put_off or self._answered)

    @property
    def awaits_acks(self) -> bool:
        return bool(self._awaited)

    def back_from_worker(self, address: bytes, idh: bytes | None = None) -> Flight | None:
        """Return the task at this address that a worker has ended; None if it is not awaited, or is another one."""
        flight = self._awaited.get(address)
        if flight is None or idh not in (None, flight.idh):
            return None
        del self._awaited[address]
        if flight.live.forgotten:
            return None  # its slice is read again; it is handed off again and settled by the same ack
        self._answered[address] = flight.live
        return flight

    def known_ends(self, most: int) -> list[bytes]:
        """Return addresses of tasks whose worker has answered, and whose end the server knows."""
        if self.unanswered is not None or self._pending_writes.outcomes:
            return []
        dirty = self._pending_writes.dirty
        return [address for address, live in self._answered.items() if live not in dirty][:most]

    def forget_ends(self, addresses: Iterable[bytes]) -> None:
        """Forget tasks of which the acks are deleted."""
        for address in addresses:
            self._answered.pop(address, None)


def _records(group: FlightGroup) -> list[bytes]:
    """Return what a hand-off sends for each task: its packed address, and its entry."""
    live = group.live
    head = address_prefix(live.slice) + r_of(live.g).to_bytes(3, "big")
    return [b"%b%b%b" % (head, flight.index.to_bytes(4, "big"), flight.row) for flight in group.flights]


def _how_many(group: FlightGroup, most: int, most_bytes: int) -> int:
    """Return how many flights of the group fit into a call; at least one."""
    size = 0
    for count, flight in enumerate(group.flights[:most]):
        size += len(flight.row) + ADDRESS_BYTES
        if size > most_bytes:
            return count + 1
    return min(most, len(group.flights))


def _any_in_lane(group: FlightGroup) -> bool:
    return any(flight.body.lane is not None for flight in group.flights)


def _flights(groups: Iterable[FlightGroup]) -> Iterable[Flight]:
    return chain.from_iterable(group.flights for group in groups)


def _second_end(ms: int) -> int:
    """Return the end of the second: the server knows slices by the second in which they start."""
    return (ms // 1000 + 1) * 1000


def _by_start(item: tuple[Slice, LiveSlice]) -> int:
    return item[1].from_ms
