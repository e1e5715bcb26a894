"""One owned partition: its slices, its lanes, its fencing token, and what has to be written next."""

from collections.abc import Sequence
from itertools import islice, repeat
from math import inf
from typing import Final, cast

import msgspec

from ..model.clock import steady_s
from ..store.codec import HEADER_BYTES, SCHEDULED, TOMB, decode, decode_many, target_of_all, without_headers
from ..store.fire import MOST_TOUCHES, UNREAD, Commit, Death, Known, NewPlace, Section, Touch
from ..store.keys import PartitionKeys, Slice
from ..store.listing import Stranger
from .bitmaps import is_set
from .chains import Chains
from .flight import Flight
from .handed import Handed, HandingOff
from .held_work import HeldWork
from .holds import Gates, Taken
from .lanes import Lanes
from .live import LiveSlice
from .waiting import INDEX_MASK, Due

MOST_SLICES: Final = 200
"""Slices that one tick touches at most in a partition."""

MOST_MOVES: Final = 200
"""Tasks that one commit moves into hold slices at most: the server does nothing else meanwhile."""


MOST_LANES: Final = 4_096
"""Lanes that are asked in one tick who may leave: as many may go on at once as there are."""

LANE_SLICES: Final = MOST_TOUCHES - 2 * MOST_SLICES
"""Slices out of which tasks of lanes leave in one tick at most: with those that are due and those that are committed no
more than a call may carry."""

NOTHING_TAKEN: Final = Taken([], [], {}, [])
NOTHING_DUE: Final = Due([], [], 0)


class Damaged:
    """An entry whose body cannot be read."""

    __slots__ = ("index", "live", "reason", "row")

    def __init__(self, live: LiveSlice, index: int, row: bytes, reason: str) -> None:
        self.live, self.index, self.row, self.reason = live, index, row, reason


class Begun:
    """A section on its way to the server and the flights that leave when it is answered."""

    __slots__ = ("alike", "flights", "passes", "section", "touched")

    def __init__(
        self, section: Section, flights: list[Flight], touched: list[LiveSlice], alike: str | None = None
    ) -> None:
        self.section, self.flights, self.touched = section, flights, touched
        self.alike = alike
        """Where it is known that all have the same target and none expires: that target."""
        self.passes = [live.passes for live in touched]


class Partition:
    """All state of one partition that this node owns. Nothing here does I/O."""

    def __init__(self, keys: PartitionKeys, token: bytes, lease_until: float, gates: Gates | None = None) -> None:
        self.keys = keys
        self.number = keys.number
        self.token = token
        self.seq = 0
        self.lease_until = lease_until
        """On this machine's monotonic clock, counted from when the request for the lease was sent."""
        self.closing_since = inf
        """On the same clock: since then nothing new begins here, for another node waits for the partition."""
        self.open_until = 0.0
        """Until then it does not close: it could not be drained in time."""
        self.closed_in_vain = 0
        self.slices: dict[Slice, LiveSlice] = {}
        """In the order of their starts."""
        self.soonest_ms: float = inf
        """When the next waiting task is due."""
        self.dirty: dict[LiveSlice, None] = {}
        """Slices with rows that are settled and not yet committed."""
        self.dirty_since = inf
        self.gates = gates or Gates()
        self.held_work = HeldWork(self.gates)
        self.lanes = Lanes(self.held_work.barrier_ms)
        self.held_work.lanes = self.lanes
        self._taken = NOTHING_TAKEN
        """Of the commit that is on its way: what it moves into hold slices."""
        self.unanswered: Begun | Commit | HandingOff | None = None
        """Sent, but the reply was lost: it must be sent again, unchanged, before anything else."""
        self.retries: list[NewPlace] = []
        self.deaths: list[Death] = []
        self.holds: list[tuple[str, bytes]] = []
        self.handed = Handed()
        self.chains = Chains()
        """The schedules that live here."""
        self.accepted_seen = -1
        self.needs_listing = True
        self.blocked_ms = -1
        """A lane's task waits for slices that start by then and are not read to their end."""
        self.waits_for_listing = False
        """Some of these are not even known: until they are, whatever begins would be refused again."""
        self.gone: dict[Slice, float] = {}
        """Slices dropped since the last listing was asked for, which may still show them; with their incarnations."""
        self.next_start_ms: int | None = None
        """Start of the earliest slice that lies beyond the horizon."""
        self.strangers: list[Stranger] = []
        """Members of its sorted set of slices that are no slices."""
        self.damaged: list[Damaged] = []
        self.lost = 0
        """Repeats of one put that were dropped since the last commit."""

    @property
    def holds_lease(self) -> bool:
        """Asked right after the clock was read it also says whether that can be trusted: a server has spoken since any
        jump. What is placed by a clock that has jumped may stand an hour away; whoever owns the partition next does it
        in time."""
        return steady_s() < self.lease_until

    @property
    def may_begin(self) -> bool:
        return not (self.closing or self.waits_for_listing)

    # -- what waits ----------------------------------------------------------------------------------

    def survey(self) -> None:
        """Find out when the next task is due; called after every change of what waits."""
        soonest = inf
        for live in self.slices.values():
            if live.from_ms >= soonest:
                break
            if live.waiting and not live.blocks_its_lane and (live.pace is None or self._room_of(live, 1)):
                soonest = min(soonest, live.next_due_ms() or inf)
        self.soonest_ms = min(soonest, *self.lanes.early.values()) if self.lanes.early else soonest

    def add(self, *lives: LiveSlice) -> None:
        last = next(reversed(self.slices.values()), None)
        self.slices.update((live.slice, live) for live in lives)
        if len(lives) > 1 or (last is not None and lives and last.from_ms > lives[0].from_ms):
            self.slices = dict(sorted(self.slices.items(), key=_by_start))

    @property
    def waiting(self) -> int:
        return sum(live.waiting for live in self.slices.values()) + self.held_work.standing

    @property
    def closing(self) -> bool:
        return self.closing_since != inf

    @property
    def drained(self) -> bool:
        """Everything that was begun is finished, or with workers, and the server knows it."""
        if self.dirty or self.has_outcomes or self.unanswered is not None:
            return False
        return sum(live.out for live in self.slices.values()) == self.handed.out

    @property
    def must_commit(self) -> bool:
        """There is something without which the done bits of its rows must not be written."""
        return bool(self.retries or self.deaths or self.holds or self.lost)

    @property
    def has_outcomes(self) -> bool:
        """Also tasks on their way into hold slices: these are not done before they are taken along."""
        return self.must_commit or self.held_work.has_outcomes

    def settled(self, live: LiveSlice, now_s: float) -> None:
        """Rows of this slice were settled: they have to be committed soon."""
        self.dirty[live] = None
        if self.dirty_since == inf:
            self.dirty_since = now_s

    # -- begin ---------------------------------------------------------------------------------------

    def begin(self, now_ms: int, limit: int, *, commit: bool, whole: bool = False) -> Begun | None:
        """Everything due by now (up to the limit) and, with `commit`, everything settled since the last one.

        With `whole` it begins no part of a slice that is overdue as a whole: it has its turn soon.
        """
        flights, by_live, max_due, limit, alike = self._take_due(now_ms, limit, whole=whole)
        if self.lanes.early:
            self.lanes.stir_due(now_ms)
        # With no room left nobody leaves, lanes included: what is not delivered must not be marked as fired.
        if (self.chains.ready or self.lanes.stirred) and (limit > 0 or flights):
            apart = [*self._occurrences_leaving(now_ms), *self._lanes_leaving(now_ms)]
            max_due = max([max_due, *(flight.place_ms for flight in apart)])
            flights += apart
            alike = None if apart else alike
            for live, places in _places(apart).items():
                by_live[live] = [*by_live.get(live, ()), *places]
        self.survey()
        return self._section(flights, by_live, max_due, commit, now_ms, alike)

    def _take_due(
        self, now_ms: int, limit: int, *, whole: bool
    ) -> tuple[list[Flight], dict[LiveSlice, Sequence[int]], int, int, str | None]:
        """Flights, their places by slice, the latest due time among them, how much room is left, and the target if
        all have the same and none expires."""
        flights: list[Flight] = []
        by_live: dict[LiveSlice, Sequence[int]] = {}
        max_due = -1
        targets: set[str | None] = set()
        for live in self.slices.values():
            if live.from_ms > now_ms or limit <= 0 or len(by_live) >= MOST_SLICES:
                break
            if not live.waiting or live.blocks_its_lane:
                continue
            if live.waiting > limit and (flights or (whole and live.slice.end_ms <= now_ms)):
                break  # a slice that leaves whole costs less than one that leaves in two parts
            most = limit if live.pace is None else self._room_of(live, limit)
            due = live.take_due(now_ms, most) if most else NOTHING_DUE
            if due.rows:
                limit -= len(due.rows)
                leaving, target = self._flights(live, due, now_ms)
                targets.add(target)
                if leaving and (live.pace is not None or self.gates.closed):
                    leaving = self.held_work.sort_out(leaving, now_ms)
                if leaving:
                    max_due = max(max_due, live.from_ms + due.latest)
                    flights += leaving
                    all_leave = len(leaving) == len(due.rows)
                    by_live[live] = due.indexes if all_leave else [flight.index for flight in leaving]
        return flights, by_live, max_due, limit, targets.pop() if len(targets) == 1 else None

    def _room_of(self, live: LiveSlice, most: int) -> int:
        """How many of a hold slice may leave now: its hold may let them out little by little."""
        room = None if live.pace is None else self.gates.room(live.pace)
        return most if room is None else min(most, room)

    def is_paced(self, live: LiveSlice) -> bool:
        """Its rows leave little by little: few of them are needed in memory."""
        return live.pace is not None and self.gates.room(live.pace) is not None

    def _occurrences_leaving(self, now_ms: int) -> list[Flight]:
        """Occurrences of schedules that the planner had to be asked for, or that could not begin the last time."""
        leaving = []
        for flight in self.chains.take_ready():
            flight.live.held.discard(flight.index)
            if not self._waits_for_turn(flight):
                leaving.append(flight)
        return self.held_work.sort_out(leaving, now_ms) if leaving and self.gates.closed else leaving

    def _lanes_leaving(self, now_ms: int) -> list[Flight]:
        may = self.held_work.may_leave if self.gates.closed else None
        return self.lanes.leaving(self._barrier_ms(), now_ms, may, most=MOST_LANES, most_slices=LANE_SLICES)

    def _barrier_ms(self) -> float:
        """No lane's task from here on may leave: earlier ones were let go for want of room, and are not held.

        Hold slices are not meant: each holds tasks of one lane, which knows it, or tasks without lanes.
        """
        ends = (
            live.from_ms + (live.high >> 32)
            for live in self.slices.values()
            if live.deferred and not live.slice.is_hold
        )
        return min(ends, default=inf)

    def _section(
        self,
        flights: list[Flight],
        by_live: dict[LiveSlice, Sequence[int]],
        max_due_ms: int,
        commit: bool,
        now_ms: int,
        alike: str | None,
    ) -> Begun | None:
        dirty = dict.fromkeys(islice(self.dirty, MOST_SLICES)) if commit else {}
        touched = by_live | dirty
        if not touched:
            return None
        due_ms = max_due_ms if flights else None
        lanes = any(live.has_lanes for live in by_live) and any(flight.body.lane is not None for flight in flights)
        known = self._known(max_due_ms) if lanes else []
        finished = 0
        touches = []
        for live in touched:
            touches.append(live.touch(by_live.get(live, []), commit=commit))
            if commit:
                finished, live.finished = finished + live.finished, 0
                self.dirty.pop(live, None)
        if not self.dirty:
            self.dirty_since = inf
        plants = self.chains.plants(flights, now_ms) if any(live.has_schedules for live in by_live) else ()
        section = Section(self.number, self.token, self.seq + 1, due_ms, finished, touches, known, plants)
        return Begun(section, flights, list(touched), alike)

    def _known(self, max_due_ms: int) -> list[Known]:
        limit = _second_end(max_due_ms)
        slices = [
            Known(live.name, live.keys[0], live.g_text, live.cursor)
            for live in self.slices.values()
            if live.from_ms < limit and not live.slice.is_hold
        ]
        # The server counts whatever stands there; of these nothing is read.
        strangers = [one for one in self.strangers if one.score * 1000 < limit]
        return slices + [Known(name, self.keys.slices, repr(score), UNREAD) for name, score in strangers]

    def _flights(self, live: LiveSlice, due: Due, now_ms: int) -> tuple[list[Flight], str | None]:
        """And their target, if all have the same and none expires."""
        rows = cast("list[bytes]", due.rows)
        try:
            if live.sieve.damaged:
                return self._flights_one_by_one(live, due.indexes, now_ms), None
            written = without_headers(rows)
            bodies, target = decode_many(written), target_of_all(written)
        except (TypeError, msgspec.DecodeError, UnicodeDecodeError):  # a row is gone, or a body damaged
            return self._flights_one_by_one(live, due.indexes, now_ms), None
        flights = list(map(Flight, bodies, rows, due.indexes, repeat(live)))
        if live.has_schedules:
            flights = self.chains.cleared(flights, now_ms)
        if live.has_lanes:
            flights = [flight for flight in flights if not self._waits_for_turn(flight)]
        return flights, target

    def _waits_for_turn(self, flight: Flight) -> bool:
        lane = flight.body.lane
        if lane is None:
            return False
        if not self.held_work.takes(lane, flight):
            flight.live.held.add(flight.index)
            self.lanes.offer(lane, flight)
        return True

    def _flights_one_by_one(self, live: LiveSlice, indexes: Sequence[int], now_ms: int) -> list[Flight]:
        """Slowly, because one of these entries is damaged: that one must not hold up the others."""
        flights = []
        for index in indexes:
            row = live.queue.rows[index] or b""
            try:
                if len(row) < HEADER_BYTES or row[4] & TOMB or int.from_bytes(row[:4], "big") >= live.slice.width_ms:
                    raise msgspec.DecodeError("the header is damaged")
                body = decode(row)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.damaged.append(Damaged(live, index, row, str(error)))
                continue
            flights.append(Flight(body, row, index, live))
        if live.has_schedules:
            flights = self.chains.cleared(flights, now_ms)
        return [flight for flight in flights if not self._waits_for_turn(flight)]

    # -- answers ---------------------------------------------------------------------------------------

    def begun(self, begun: Begun, x: list[bytes]) -> list[Flight]:
        """The server has the fired bits: these flights leave now, less those that were cancelled before."""
        self.seq = begun.section.seq
        _prove(begun.touched, begun.section.touches)
        cancelled: dict[LiveSlice, tuple[int, bytes]] = {}
        for live, touch, bits in zip(begun.touched, begun.section.touches, x, strict=True):
            if bits.strip(b"\0"):
                cancelled[live] = (max(touch.f_at, 0), bits)
        leaving = self._not_cancelled(begun.flights, cancelled) if cancelled else begun.flights
        if any(live.has_schedules for live in begun.touched) and self.chains.begun(begun.flights, leaving):
            self.needs_listing = True  # some of the following occurrences are near
        return leaving

    def _not_cancelled(self, flights: list[Flight], cancelled: dict[LiveSlice, tuple[int, bytes]]) -> list[Flight]:
        leaving = []
        for flight in flights:
            first_byte, bits = cancelled.get(flight.live, (0, b""))
            if is_set(bits, first_byte, flight.index):
                flight.live.land(1, [flight.index])
                self.settled(flight.live, 0.0)
                self.lane_goes_on(flight)
            else:
                leaving.append(flight)
        return leaving

    def take_back(self, begun: Begun) -> None:
        """The server wrote nothing: everything waits again, and what was done has still to be committed."""
        keys: dict[LiveSlice, list[int]] = {}
        for flight in begun.flights:
            keys.setdefault(flight.live, []).append(flight.key)
        for live, passes in zip(begun.touched, begun.passes, strict=True):
            some = keys.get(live, [])
            live.unmark_fired([key & INDEX_MASK for key in some])
            if live.passes != passes and some:
                live.restart()  # its rows were let go while the call was under way
            else:
                # What lanes and schedules hold does not come out of the slice again: its row may be gone.
                apart = {flight.index for flight in begun.flights if flight.live is live and _is_apart(flight)}
                live.held |= apart
                live.put_back([key for key in some if key & INDEX_MASK not in apart])
        for flight in begun.flights:
            waits = flight.index in flight.live.held  # else its row is read again, and offered then
            if flight.body.lane is not None:
                (self.lanes.take_back if waits else self.lanes.give_up)(flight.body.lane, flight)
            elif waits and flight.row[4] & SCHEDULED:
                self.chains.ready.append(flight)
        finished = begun.section.finished
        for live, touch in zip(begun.touched, begun.section.touches, strict=True):
            if touch.d:
                # With the done bits goes their count: either both are written or none.
                live.finished, finished = live.finished + finished, 0
                live.bits.untake_dirty(touch.d_at, touch.d)
                self.settled(live, 0.0)
        self.survey()

    def forget(self, live: LiveSlice) -> None:
        """The list on the server is not the one that was read: read it anew, bitmaps included."""
        self.remove(live)
        self.needs_listing = True

    def block(self, max_due_ms: int) -> None:
        """A lane's task cannot leave before every slice of its second, and all earlier ones, are read to their end."""
        self.blocked_ms = _second_end(max_due_ms) - 1
        self.needs_listing = self.waits_for_listing = True

    def dropped(self, live: LiveSlice) -> None:
        """The server has forgotten it."""
        self.gone[live.slice] = live.g
        self.remove(live)

    def remove(self, live: LiveSlice) -> None:
        live.forgotten = True
        if live.has_lanes:
            self.lanes.forget(live)
        if live.slice.is_hold:
            self.held_work.forget(live)
        if live.has_schedules:
            self.chains.forget(live)
        if self.slices.get(live.slice) is live:
            del self.slices[live.slice]
        self.dirty.pop(live, None)
        if not self.dirty:
            self.dirty_since = inf  # else the dispatcher would come again and again for a commit of nothing
        self.survey()

    # -- outcomes -----------------------------------------------------------------------------------

    def lane_goes_on(self, flight: Flight) -> None:
        """The head of a lane is settled: the next one may leave."""
        lane = flight.body.lane
        if lane is not None and self.lanes.free(lane, flight.idh) and self.lanes.let_go(lane):
            self.holds.append((lane, b""))
            self.held_work.lane_is_free(lane)

    @property
    def quiet(self) -> bool:
        """The server knows of every retry that was placed."""
        return self.unanswered is None and not self.has_outcomes

    def head_is_gone(self, lane: str, idh: bytes) -> None:
        """The failed head of a lane was cancelled, or given up: the next one may leave."""
        if self.lanes.waits_for(lane) == idh and self.lanes.free(lane, idh) and self.lanes.let_go(lane):
            self.holds.append((lane, b""))
            self.held_work.lane_is_free(lane)

    def took(self, live: LiveSlice, now_s: float) -> None:
        """Rows were read: note what needs no delivery, and when the next is due."""
        if live.bits.dirty:
            self.settled(live, now_s)
        self.lost, live.sieve.lost = self.lost + live.sieve.lost, 0
        for prefix in live.sieve.tombs:
            for lane in self.lanes.free_cancelled(prefix):
                self.holds.append((lane, b""))
                self.held_work.lane_is_free(lane)
        live.sieve.tombs = []
        if live.occurrences:
            self.chains.read(live.occurrences)
            live.occurrences = []
        self.lanes.stir()
        self.soonest_ms = min(self.soonest_ms, live.next_due_ms() or inf)

    def answered(self) -> None:
        """A commit is written, or will not be."""
        self._taken.answered()
        self._taken = NOTHING_TAKEN
        self.lanes.stir()

    def committed(self, work: Commit) -> None:
        self.seq = work.seq
        by_name = {touch.name: touch for touch in work.touches}
        touched = [live for live in self.slices.values() if live.name in by_name]
        _prove(touched, [by_name[live.name] for live in touched])

    def commit(self) -> Commit:
        """All outcomes so far in one call, with the done bits they belong to."""
        self._taken = self.held_work.take_moves(MOST_MOVES)
        touched = list(self.dirty | dict.fromkeys(self._taken.lives))
        finished, lost = sum(live.finished for live in touched), self.lost
        touches = [live.touch([], commit=True) for live in touched]
        for live in touched:
            live.finished = 0
        self.lost, self.dirty, self.dirty_since = 0, {}, inf
        work = Commit(
            self.number,
            self.token,
            self.seq + 1,
            finished,
            lost,
            touches,
            self.retries,
            self.deaths,
            self.holds,
            self._taken.moves,
            self._taken.records,
        )
        self.retries, self.deaths, self.holds = [], [], []
        return work


def _is_apart(flight: Flight) -> bool:
    return flight.body.lane is not None or flight.row[4] & SCHEDULED != 0


def _places(flights: list[Flight]) -> dict[LiveSlice, list[int]]:
    places: dict[LiveSlice, list[int]] = {}
    for flight in flights:
        places.setdefault(flight.live, []).append(flight.index)
    return places


def _second_end(ms: int) -> int:
    """Slices are known to the server by the second in which they start."""
    return (ms // 1000 + 1) * 1000


def _by_start(item: tuple[Slice, LiveSlice]) -> int:
    return item[1].from_ms


def _prove(touched: list[LiveSlice], touches: list[Touch]) -> None:
    for live, touch in zip(touched, touches, strict=True):
        live.proven = max(live.proven, touch.m)
