"""One owned partition: its slices, its lanes, its fencing token, and what has to be written for its tasks.

Nothing here does I/O. The dispatcher takes calls from it (`begin`, `commit`), sends them, and returns the answers
(`answered`); deliveries say how tasks ended (`done`, `settle`) or hand them to workers (`hand_off`). README.md follows
a task through all of it.
"""

import logging
from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import chain, islice
from math import inf
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from ..model.clock import steady_s
from ..model.lane import LANE, PARKED, HoldRecord
from ..model.run import Run
from ..model.schedule.chain import NotRun
from ..model.schedule.definition import Definition
from ..store.keys import ADDRESS_BYTES, PartitionKeys, Slice, address_prefix, r_of
from ..store.owner.fire import (
    BUSY,
    MOST_BYTES,
    MOST_TASKS,
    UNREAD,
    ChainClaim,
    Commit,
    Death,
    Known,
    NewPlace,
    Section,
    WriteStatus,
)
from ..store.owner.holds import FailedHead, Inherited
from ..store.owner.read import Stranger
from ..store.records import KeptResult
from .due import MOST_SLICES, Damaged, DueSelector
from .flight import Flight, FlightGroup
from .flow import Flow
from .holds import HoldPolicy, LaneHold, TakenMoves
from .lanes import Lane, Lanes
from .occurrences import Chains
from .slice import LiveSlice, is_set

log = logging.getLogger("mainspring.engine")

MOST_OUTCOMES: Final = 500
"""Most outcomes that one commit writes: the server does nothing else meanwhile."""

MOST_MOVES: Final = 200
"""Most tasks that one commit moves into hold slices: the server does nothing else meanwhile."""


class PartitionLost(Exception):
    """The partition must be given up: another node has it, its server lost data, or its lease is over."""


class Settled(NamedTuple):
    """Outcome of a row, or of several that were delivered together, and what the server needs beside their done bits.

    The done bits enter memory with the call that writes the rest, not before: any call may write any done bits.
    """

    live: LiveSlice | None = None
    """None for a lane that continues although none of its tasks has ended here."""
    rows: Sequence[int] = ()
    fired: bool = True
    """False for rows that were never begun: repeats of one put, and damaged entries."""
    is_over: bool = True
    """True if the tasks have ended: their lanes and their schedules continue."""
    delivered: bool = False
    retry: NewPlace | None = None
    death: Death | None = None
    holds: tuple[LaneHold, ...] = ()
    repeats: bool = False
    """True if the rows repeat a put: they are counted, but not delivered."""
    answers: tuple[KeptResult, ...] = ()
    """The receivers' responses, stored before the tasks count as done."""
    runs: tuple[Run, ...] = ()
    """What happened, for the history."""
    leaving: FlightGroup | None = None
    """Flights that leave once this is written."""
    ack: bytes = b""
    """Address under which a worker has acknowledged the task; its ack is removed."""

    @property
    def is_plain(self) -> bool:
        """True if nothing but done bits has to be written."""
        return self[5:] == _PLAIN

    @property
    def weight(self) -> int:
        """Roughly how much the server has to do for it: 1 for a retry, a death, or the record of a run."""
        return max(1, len(self.runs))

    @property
    def size(self) -> int:
        """Approximate bytes that a commit sends for it."""
        row = 0 if self.retry is None else len(self.retry.row)
        row += sum(len(answer.data) for answer in self.answers)
        row += sum(sum(run.details.sizes) for run in self.runs if run.details is not None)
        return row if self.death is None else row + len(self.death.record)


_PLAIN: Final = Settled()[5:]


class BeginCall(NamedTuple):
    """Tasks that leave, and done bits of plain successes, on their way to the server."""

    partition: "Partition"
    section: Section
    groups: list[FlightGroup]
    touched: list[LiveSlice]

    @property
    def flights(self) -> list[Flight]:
        return list(_flights(self.groups))

    @property
    def tasks(self) -> int:
        return sum(len(group.flights) for group in self.groups)

    def part(self, x: Sequence[bytes]) -> tuple[list[FlightGroup], list[Flight]]:
        """Split into groups that leave and flights cancelled before, whose bits are set in the reply."""
        cancelled: dict[LiveSlice, tuple[int, bytes]] = {}
        for live, touch, bits in zip(self.touched, self.section.touches, x, strict=True):
            if bits.strip(b"\0"):
                cancelled[live] = (max(touch.f_at, 0), bits)
        if not cancelled:
            return self.groups, []
        leaving: list[FlightGroup] = []
        gone: list[Flight] = []
        for group in self.groups:
            first_byte, bits = cancelled.get(group.live, (0, b""))
            left = [flight for flight in group.flights if not is_set(bits, first_byte, flight.index)]
            if len(left) < len(group.flights):
                gone += (flight for flight in group.flights if is_set(bits, first_byte, flight.index))
                group = group.part(left)
            if left:
                leaving.append(group)
        return leaving, gone


class CommitCall(NamedTuple):
    """Outcomes, moves and tasks for workers on their way to the server."""

    partition: "Partition"
    work: Commit
    touched: list[LiveSlice]
    moves: TakenMoves
    size: int
    """Number of outcomes and moved tasks."""
    handed: Mapping[str, list[FlightGroup]]
    """Tasks for workers by queue, in the order of the records."""
    leaving: list[FlightGroup]
    """Flights that leave once this is written."""


OwnerCall = BeginCall | CommitCall


class Partition:
    """All state of one partition that this node owns."""

    def __init__(self, keys: PartitionKeys, token: bytes, lease_until: float, flow: Flow) -> None:
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

        self._slices: dict[Slice, LiveSlice] = {}
        """Slices in order of start."""
        self.soonest_ms: float = inf
        """When the next waiting task is due."""
        self.lanes = Lanes()
        self.hold_policy = HoldPolicy(flow, self.lanes)
        self.chains = Chains()
        """The schedules of this partition."""
        self._due_selector = DueSelector(self.chains, self.lanes, self.hold_policy, flow)

        self.unanswered: OwnerCall | None = None
        """The call under way. If its reply is lost, it is repeated unchanged before anything else is written.

        Set by `begin` and `commit`, cleared by `answered`, and by nothing else."""
        self._dirty: dict[LiveSlice, None] = {}
        """Slices with done bits that are not on their way yet."""
        self.dirty_since = inf
        """Since when plain successes wait to be committed, by the monotonic clock; infinity if none do."""
        self._outcomes: deque[Settled] = deque()
        """Outcomes to be written together with the done bits of their rows."""
        self._weight = 0
        """Sum of their weights."""
        self._ready: deque[tuple[str, FlightGroup]] = deque()
        """Begun tasks with their queues, to be handed off with the next calls."""
        self._put_off: list[tuple[str, Flight]] = []
        """Tasks whose id another task has in a queue: they are handed off again."""
        self._awaited: dict[bytes, Flight] = {}
        """Tasks of lanes that workers have, by address: they stay fired until the workers' acks arrive."""
        self.ack_cursor = 0
        """Cursor of the acks in this round."""

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

    # -- state ------------------------------------------------------------------------------------------

    @property
    def holds_lease(self) -> bool:
        """True while the lease lasts. Asked right after a clock reading, it also vouches for that reading: a server has
        replied since any jump of the clock. Otherwise a wrong clock might place work an hour away, which the next owner
        would do in time."""
        return steady_s() < self.lease_until

    @property
    def closing(self) -> bool:
        return self.closing_since != inf

    @property
    def may_begin(self) -> bool:
        return not (self.closing or self.waits_for_listing)

    def may_begin_now(self, now_ms: int) -> bool:
        return self.may_begin and (self.soonest_ms <= now_ms or self.has_ready)

    @property
    def has_ready(self) -> bool:
        """True if the next task of a lane may be able to begin."""
        return bool(self.lanes.woken)

    @property
    def lives(self) -> Collection[LiveSlice]:
        """Its slices in memory, in order of start."""
        return self._slices.values()

    def live_at(self, place: Slice) -> LiveSlice | None:
        return self._slices.get(place)

    @property
    def rows(self) -> int:
        """Number of tasks that wait in their slices."""
        return sum(live.waiting for live in self._slices.values())

    @property
    def behind(self) -> int:
        """Number of tasks that wait in their lanes."""
        return self.lanes.behind

    @property
    def standing(self) -> int:
        """Number of tasks in memory only until they are moved into hold slices."""
        return self.hold_policy.standing

    @property
    def waiting(self) -> int:
        return self.rows + self.standing

    @property
    def out(self) -> int:
        """Number of tasks fired and not settled."""
        return sum(live.out for live in self._slices.values())

    @property
    def to_spill(self) -> int:
        """Number of due tasks without lanes that were held back and have to be moved."""
        return self.hold_policy.aside

    @property
    def to_move(self) -> bool:
        """True if held tasks are in memory and may have to be moved into hold slices."""
        return self.hold_policy.to_move

    @property
    def has_ended_runs(self) -> bool:
        """True if runs of schedules have ended and the server does not know how."""
        return bool(self.chains.ended)

    @property
    def asks_planner(self) -> bool:
        """True if a schedule waits for the planner."""
        return self.chains.asks

    @property
    def has_outcomes(self) -> bool:
        """True if outcomes are unwritten, including tasks being moved into hold slices."""
        return bool(self._outcomes) or self.hold_policy.has_outcomes

    @property
    def has_writes(self) -> bool:
        """True if something has ended, or waits for a worker, and the server does not know it."""
        return bool(self._dirty) or self.to_commit

    @property
    def to_commit(self) -> bool:
        """True if an outcome, a move, or a task for workers waits for a commit."""
        return bool(self._outcomes or self._ready) or self.hold_policy.has_outcomes

    @property
    def unwritten(self) -> int:
        """Number of tasks whose outcome or hand-off is not on its way yet."""
        # Every round asks every partition, and most have nothing ready.
        return self._weight + (sum(len(group.flights) for _, group in self._ready) if self._ready else 0)

    @property
    def _quiet(self) -> bool:
        """True if the server knows of every retry that was placed."""
        return self.unanswered is None and not self.has_outcomes

    @property
    def drained(self) -> bool:
        """True if all begun tasks are finished or with workers, and the server knows it."""
        if self.has_writes or self.unanswered is not None:
            return False
        # The next owner resumes those that workers have.
        with_workers = (*self._awaited.values(), *(flight for _, flight in self._put_off))
        return self.out == sum(not one.live.forgotten for one in with_workers)

    # -- begin ------------------------------------------------------------------------------------------

    def begin(self, now_ms: int, limit: int, *, commit: bool, whole: bool = False) -> BeginCall | None:
        """Begin everything due by now (up to the limit); with `commit`, also write the done bits of plain successes.

        With `whole`, begin no part of a slice that is overdue as a whole: its turn comes soon. Return None if there is
        nothing to write, or a call is under way.
        """
        if self.unanswered is not None:
            return None
        groups, latest_ms = self._due_selector.take(self._slices, now_ms, limit, whole=whole)
        self.survey()
        begun: dict[LiveSlice, Sequence[int]] = {}
        for group in groups:
            begun[group.live] = [*begun[group.live], *group.indexes] if group.live in begun else group.indexes
        lives = list(begun)
        if commit:
            lives += (live for live in islice(self._dirty, MOST_SLICES) if live not in begun)
        if not lives:
            return None
        touches = [live.touch(begun.get(live, ()), commit=commit) for live in lives]
        section = Section(
            self.number,
            self.token,
            self.seq + 1,
            latest_ms if groups else None,
            self._take_finished(lives) if commit else 0,
            touches,
            self._known(latest_ms) if any(map(_any_in_lane, groups)) else [],
            self.chains.next_occurrences(_flights(group for group in groups if group.live.has_schedules), now_ms),
        )
        self.unanswered = call = BeginCall(self, section, groups, lives)
        return call

    def _known(self, latest_ms: int) -> list[Known]:
        """Return how far each slice is read that starts by then: the server compares it with what there is."""
        limit = _second_end(latest_ms)
        slices = [
            Known(live.name, live.keys[0], live.g_text, live.cursor)
            for live in self._slices.values()
            if live.from_ms < limit and not live.slice.is_hold
        ]
        # The server counts every member of the set, including these, which are not read.
        strangers = [one for one in self.strangers if one.score * 1000 < limit]
        return slices + [Known(name, self.keys.slices, repr(score), UNREAD) for name, score in strangers]

    def _take_finished(self, lives: Iterable[LiveSlice]) -> int:
        """Note that the done bits of these slices are on their way; return how many tasks they finish."""
        finished = 0
        for live in lives:
            finished, live.finished = finished + live.finished, 0
            self._dirty.pop(live, None)
        if not self._dirty:
            self.dirty_since = inf  # otherwise the dispatcher would keep committing nothing
        return finished

    # -- commit -----------------------------------------------------------------------------------------

    def commit(self, room: int = MOST_OUTCOMES) -> CommitCall | None:
        """Return a commit: as many outcomes as one call may write (at most `room`), then moves, and tasks for workers.

        Return None if there is nothing to write, or a call is under way.
        """
        if self.unanswered is not None or not (self._ready or (room > 0 and self.has_outcomes)):
            return None
        weight = self._weight
        settled = self._take_outcomes(min(room, MOST_OUTCOMES))
        weight -= self._weight
        retries = [one.retry for one in settled if one.retry is not None]
        parked = {retry.slice.name for retry in retries if retry.slice.is_hold}
        # Move nothing behind the failed head of a lane before the server knows of the head.
        movable = 0 if self._outcomes else min(room - weight, MOST_MOVES)
        moves = self.hold_policy.take_moves(movable, parked)
        handed = self._take_ready()
        if not (settled or moves.moves or moves.records or handed):
            return None
        ended = (one.live for one in settled if one.live is not None)
        lives = list(dict.fromkeys((*ended, *moves.lives, *(one.live for one in chain.from_iterable(handed.values())))))
        work = Commit(
            self.number,
            self.token,
            self.seq + 1,
            self._take_finished(lives),
            sum(len(one.rows) for one in settled if one.repeats),
            [live.touch((), commit=True) for live in lives],
            retries,
            [one.death for one in settled if one.death is not None],
            [hold for one in settled for hold in one.holds],
            moves.moves,
            moves.records,
            [answer for one in settled for answer in one.answers],
            [run for one in settled for run in one.runs],
            {queue: [*chain.from_iterable(map(_records, groups))] for queue, groups in handed.items()},
            [one.ack for one in settled if one.ack],
        )
        size = weight + sum(moves.holds.values())
        leaving = [one.leaving for one in settled if one.leaving is not None]
        self.unanswered = call = CommitCall(self, work, lives, moves, size, handed, leaving)
        return call

    def _take_outcomes(self, most: int) -> list[Settled]:
        """Take some outcomes, oldest first, at most as many as one commit may write. Mark their rows as done: here and
        not earlier, because this call writes their retries and dead letters too."""
        taken: list[Settled] = []
        size, least = 0, self._weight - most
        while self._outcomes and self._weight > least and size < MOST_BYTES:
            one = self._outcomes.popleft()
            self._weight -= one.weight
            live = one.live
            if one.leaving is not None and one.leaving.live.forgotten:
                continue
            if live is not None and live.forgotten:
                # The row is read again, as fired and not done: it is delivered again, and has another outcome.
                if freed := tuple(hold for hold in one.holds if not hold[1]):
                    taken.append(Settled(holds=freed))  # their lanes continue already
                continue
            taken.append(one)
            size += one.size
            if live is not None:
                if one.fired:
                    live.land(one.rows)
                else:
                    live.settle_many(one.rows)
                    live.held.difference_update(one.rows)
                live.finished += len(one.rows) if one.delivered else 0
        return taken

    def _take_ready(self) -> dict[str, list[FlightGroup]]:
        """Take as many tasks for workers as one call may carry, by queue. Tasks without a lane are done then."""
        by_queue: dict[str, list[FlightGroup]] = {}
        taken = size = 0
        while self._ready and taken < MOST_TASKS and size <= MOST_BYTES:
            queue, group = self._ready.popleft()
            live = group.live
            if live.forgotten:
                continue
            fits = 0
            for flight in group.flights[: MOST_TASKS - taken]:
                if size > MOST_BYTES:
                    break
                size += len(flight.row) + ADDRESS_BYTES
                fits += 1
            if fits < len(group.flights):
                group, rest = group.split(fits)
                self._ready.appendleft((queue, rest))
            by_queue.setdefault(queue, []).append(group)
            taken += fits
            indexes: Sequence[int] = group.indexes
            if live.has_lanes:
                indexes = [flight.index for flight in group.flights if flight.body.lane is None]
            if indexes:
                live.land(indexes)
        return by_queue

    # -- answers ----------------------------------------------------------------------------------------

    def answered(
        self, call: OwnerCall, status: WriteStatus, x: Sequence[bytes] = (), left_alone: Container[ChainClaim] = ()
    ) -> list[FlightGroup]:
        """Apply the server's answer to a call; return the groups that leave now. Raise `PartitionLost` if the partition
        must be given up."""
        self.unanswered = None
        if isinstance(call, CommitCall):
            call.moves.answered()
            self.lanes.wake_barred()
        match status:
            case "ok":
                work = call.section if isinstance(call, BeginCall) else call.work
                self.seq = work.seq
                for live, touch in zip(call.touched, work.touches, strict=True):
                    live.proven = max(live.proven, touch.m)
                if isinstance(call, BeginCall):
                    return self._begun(call, x, left_alone)
                self.needs_listing = self.needs_listing or bool(call.work.retries)
                return [group for group in call.leaving if not group.live.forgotten]
            case "stale":
                groups = (*call.handed.values(), call.leaving) if isinstance(call, CommitCall) else ()
                for live in dict.fromkeys((*call.touched, *(group.live for group in chain.from_iterable(groups)))):
                    self.forget(live)
                log.warning("partition %d: a slice is not the one that was read; reading again", self.number)
            case "early" | "more" if isinstance(call, BeginCall):
                self._take_back(call)
                if status == "more":
                    self.block(call.section.max_due_ms or 0)
            case _:
                raise PartitionLost(status)
        return []

    def _begun(self, begun: BeginCall, x: Sequence[bytes], left_alone: Container[ChainClaim]) -> list[FlightGroup]:
        """Return the groups that leave now, without flights that were cancelled before."""
        self.blocked_ms = -1
        leaving, cancelled = begun.part(x)
        for flight in cancelled:
            flight.live.land([flight.index])
            self._note_dirty(flight.live, 0.0)
            self._lane_may_go_on(flight)
        has_schedules = any(live.has_schedules for live in begun.touched)
        if has_schedules and self.chains.begun(begun.flights, cancelled, left_alone):
            self.needs_listing = True  # some of the next occurrences are near
        if not self.holds_lease:
            # Fired, but the lease ran out while we waited: the next owner delivers these.
            raise PartitionLost("its lease ran out before the send")
        return leaving

    def _take_back(self, begun: BeginCall) -> None:
        """Undo a call that wrote nothing: everything waits again, and done bits still have to be committed."""
        self._due_selector.take_back(begun.groups)
        finished = begun.section.finished
        for live, touch in zip(begun.touched, begun.section.touches, strict=True):
            if touch.d:
                # The count goes with the done bits: both are written or neither is.
                live.finished, finished = live.finished + finished, 0
                live.bits.untake_dirty(touch.d_at, touch.d)
                self._note_dirty(live, 0.0)
        self.survey()

    # -- how tasks end ----------------------------------------------------------------------------------

    def settle(self, settled: Settled, flights: Sequence[Flight] = (), now_ms: int = 0) -> bool:
        """Record an outcome: of flights, or of a row that was never begun. Plain successes are done at once, any other
        outcome when it is written. If the flights' tasks are over, their lanes and schedules continue.

        Return True unless it is written together with what waits already.
        """
        live = settled.live
        if live is not None and settled.is_over:
            if live.has_lanes:
                settled = settled._replace(holds=tuple(self._freed_lanes(flights)))
            if live.has_schedules:
                self.chains.over(flights, "done" if settled.delivered else "dead", now_ms)
        if live is None or not settled.is_plain:
            self._to_write(settled)
            return True
        first = not self._dirty
        live.land(settled.rows)
        live.finished += len(settled.rows) if settled.delivered else 0
        self._note_dirty(live, monotonic())
        return first

    def _to_write(self, settled: Settled) -> None:
        self._outcomes.append(settled)
        self._weight += settled.weight

    def _freed_lanes(self, flights: Iterable[Flight]) -> Iterable[LaneHold]:
        for flight in flights:
            if flight.body.lane is not None:
                hold = self.hold_policy.free_lane(flight.body.lane, flight.idh)
                if hold is not None:
                    yield hold

    def _note_dirty(self, live: LiveSlice, since_s: float) -> None:
        """Note that rows of this slice were settled and have to be committed soon."""
        self._dirty[live] = None
        if self.dirty_since == inf:
            self.dirty_since = since_s

    def take_notes(self) -> tuple[list[Damaged], list[tuple[Definition, NotRun]]]:
        """Return entries that cannot be read, and planned times that did not run, which begins found since the last
        call."""
        notes = self._due_selector.damaged, self.chains.passed
        self._due_selector.damaged, self.chains.passed = [], []
        return notes

    # -- lanes ------------------------------------------------------------------------------------------

    def failing_since_ms(self, lane: str, now_ms: int) -> int:
        """Return when the head of a lane failed first."""
        return self.lanes.of(lane).since_ms or now_ms

    def hold_lane(
        self, lane: str, idh: bytes, until_ms: int, now_ms: int, *, first: bool = False, parked: bool = False
    ) -> LaneHold:
        """Make a lane wait for this task, whose `first` attempt has failed, or a later one. Recorded on the server too,
        for a new owner."""
        since_ms = now_ms if first else self.failing_since_ms(lane, now_ms)
        self.lanes.wait(lane, idh, since_ms=since_ms, until_ms=until_ms, parked=parked)
        self.hold_policy.spill_lanes(now_ms)
        return lane, FailedHead(idh, since_ms).pack()

    def park_lane(self, lane: str, reason: str, now_ms: int) -> Slice:
        """Let a lane wait until it is resumed by hand; return the hold slice in which its head waits first."""
        return self.hold_policy.make(HoldRecord(LANE + lane, PARKED, now_ms, reason), now_ms).place

    def heads_to_ask(self, most: int) -> list[tuple[Lane, bytes]]:
        """Check some holds; return lanes with the failed head they wait for, if the server knows of every retry."""
        self.hold_policy.look_at_some()
        return self.lanes.heads_to_ask(most) if self._quiet else []

    def heads_are_gone(self, heads: Iterable[tuple[str, bytes]]) -> None:
        """Free lanes whose failed head was cancelled, given up or replaced: the next task may leave."""
        for lane, idh in heads if self._quiet else ():
            if self.lanes.of(lane).waits_for == idh and (hold := self.hold_policy.free_lane(lane, idh)) is not None:
                self._to_write(Settled(holds=(hold,)))

    def _lane_may_go_on(self, flight: Flight) -> None:
        """Free a lane whose head was cancelled or moved. A failed head may have been rescheduled: then the lane waits
        until the look-ahead has asked the server about it."""
        lane = flight.body.lane
        if lane is not None and self.lanes.is_kept(lane):
            self.lanes.give_up(lane, flight)
        elif lane is not None:
            self.hold_policy.free_lane(lane, flight.idh)  # the server has no record of it

    def fill_lanes(self, *, full: bool) -> None:
        """Note whether memory is full: then tasks behind heads in flight are moved into hold slices too."""
        self.lanes.fill(full=full)

    def spill(self, most: int, now_ms: int) -> int:
        """Let the next commits move held tasks into hold slices; return how many were examined."""
        examined = self.hold_policy.spill(most, now_ms)
        self.survey()
        return examined

    # -- workers ----------------------------------------------------------------------------------------

    def hand_off(self, queue: str, group: FlightGroup) -> None:
        """Let the next call hand these tasks off to a queue."""
        self._ready.append((queue, group))

    def handed_off(self, call: CommitCall, answers: Mapping[int, bytes]) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Note which tasks workers have. Return how many are done then, and the acks of those that a worker has already
        ended, by address."""
        delivered, ended = 0, []
        handed = ((queue, flight) for queue, groups in call.handed.items() for flight in _flights(groups))
        for position, (queue, flight) in enumerate(handed):
            answer = answers.get(position)
            if answer == BUSY:
                if flight.body.lane is None:
                    flight.live.reopen(flight.index)  # it stays fired, also on the server
                self._put_off.append((queue, flight))
            elif flight.body.lane is None:
                delivered += 1
            else:
                self._awaited[flight.address] = flight
                if answer is not None:
                    ended.append((flight.address, answer))
        return delivered, ended

    def hand_off_again(self) -> None:
        """Try again to hand off tasks whose id another task had in a queue."""
        again, self._put_off = self._put_off, []
        for queue, flight in again:
            self.hand_off(queue, FlightGroup(flight.live, [flight], [flight.index]))

    @property
    def waits_for_workers(self) -> bool:
        """True if something waits for workers or their acks."""
        return bool(self._awaited or self._put_off)

    def back_from_worker(self, address: bytes, idh: bytes | None = None) -> Flight | None:
        """Return the task at this address that a worker has ended; None if it is not awaited, or is another one."""
        flight = self._awaited.get(address)
        if flight is None or idh not in (None, flight.idh):
            return None
        del self._awaited[address]
        # If its slice is read again, the task is handed off again, and settled by the same ack.
        return None if flight.live.forgotten else flight

    # -- slices -----------------------------------------------------------------------------------------

    def add(self, *lives: LiveSlice) -> None:
        last = next(reversed(self._slices.values()), None)
        self._slices.update((live.slice, live) for live in lives)
        if len(lives) > 1 or (last is not None and lives and last.from_ms > lives[0].from_ms):
            self._slices = dict(sorted(self._slices.items(), key=_by_start))

    def release(self, occurrence: Flight) -> None:
        """Let an occurrence of a schedule become due again: the planner has decided about it."""
        if self.chains.undecided.pop(occurrence.row, None) is not None and not occurrence.live.forgotten:
            occurrence.live.step_back([(occurrence.key, occurrence.row)])
            self.soonest_ms = min(self.soonest_ms, occurrence.place_ms)

    def survey(self) -> None:
        """Find out when the next task is due; called after every change of what waits."""
        soonest = inf
        for live in self._slices.values():
            if live.from_ms >= soonest:
                break
            queue = live.queue  # read directly: this runs in every tick, over all slices
            if queue and not live.blocks_its_lane and (live.pace is None or self._due_selector.room_of(live, 1)):
                soonest = min(soonest, live.from_ms + queue.first_offset)
        self.soonest_ms = soonest

    def took(self, live: LiveSlice, now_s: float) -> None:
        """Handle rows just read: record those that need no delivery, and when the next is due."""
        if live.bits.dirty:
            self._note_dirty(live, now_s)
        if live.repeats:
            self._to_write(Settled(live, live.repeats, fired=False, repeats=True))
            live.repeats = []
        if live.occurrences:
            self.chains.read(live.occurrences)
            live.occurrences = []
        self.lanes.wake_barred()
        self.soonest_ms = min(self.soonest_ms, live.next_due_ms() or inf)

    def block(self, max_due_ms: int) -> None:
        """Block lanes until every slice of that second, and all earlier ones, are read to their end."""
        self.blocked_ms = _second_end(max_due_ms) - 1
        self.needs_listing = self.waits_for_listing = True

    def forget(self, live: LiveSlice) -> None:
        """Read a slice again, including its bitmaps: its list on the server is not the one that was read."""
        self._remove(live)
        self.needs_listing = True

    def may_drop(self, live: LiveSlice, now_ms: int) -> bytes | None:
        """Return the record to keep of a slice in which all is done; None if the slice must stay."""
        if self.unanswered is not None or not live.all_done:
            return None
        if not live.slice.is_hold:
            return b""
        record = self.hold_policy.may_drop(live.slice)
        return None if record is None else msgspec.structs.replace(record, ended_ms=now_ms).encode()

    def dropped(self, live: LiveSlice, now_ms: int) -> None:
        """Remove a slice that the server has dropped."""
        self.gone[live.slice] = live.g
        self._remove(live)
        if live.slice.is_hold:
            self.hold_policy.gone(live.slice, now_ms)

    @property
    def ended_holds(self) -> dict[str, int]:
        """Names of dropped hold slices, and when they were dropped, until their records are forgotten."""
        return self.hold_policy.ended

    def inherit(self, inherited: Inherited) -> None:
        """Resume the holds and failed heads that a former owner left."""
        self.hold_policy.inherit(inherited)

    def give_up(self) -> None:
        """Forget all slices: later outcomes belong to another owner."""
        for live in self._slices.values():
            live.forgotten = True

    def _remove(self, live: LiveSlice) -> None:
        """Remove a slice. Outcomes that are not on their way are dropped when a commit comes to them."""
        live.forgotten = True
        if live.has_lanes:
            self.lanes.forget(live)
        if live.slice.is_hold:
            self.hold_policy.forget(live)
        if live.has_schedules:
            self.chains.forget(live)
        if self._slices.get(live.slice) is live:
            del self._slices[live.slice]
        self._take_finished([live])
        self.survey()


def _records(group: FlightGroup) -> list[bytes]:
    """Return what a hand-off sends for each task: its packed address, and its entry."""
    live = group.live
    head = address_prefix(live.slice) + r_of(live.g).to_bytes(3, "big")
    return [b"%b%b%b" % (head, flight.index.to_bytes(4, "big"), flight.row) for flight in group.flights]


def _any_in_lane(group: FlightGroup) -> bool:
    return group.live.has_lanes and any(flight.body.lane is not None for flight in group.flights)


def _flights(groups: Iterable[FlightGroup]) -> Iterable[Flight]:
    return chain.from_iterable(group.flights for group in groups)


def _second_end(ms: int) -> int:
    """Return the end of the second: the server knows slices by the second in which they start."""
    return (ms // 1000 + 1) * 1000


def _by_start(item: tuple[Slice, LiveSlice]) -> int:
    return item[1].from_ms
