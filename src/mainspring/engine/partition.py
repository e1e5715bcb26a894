"""One owned partition: its slices, its lanes, its fencing token, and what has to be written next."""

import msgspec

from ..store.codec import HEADER_BYTES, decode, decode_many
from ..store.fire import Commit, Death, Known, NewPlace, Section
from ..store.keys import Slice
from .flight import Flight
from .lanes import Lanes
from .live import LiveSlice, is_set


class Damaged:
    """An entry whose body cannot be read."""

    __slots__ = ("index", "live", "reason", "row")

    def __init__(self, live: LiveSlice, index: int, row: bytes, reason: str) -> None:
        self.live, self.index, self.row, self.reason = live, index, row, reason


class Begun:
    """A section on its way to the server and the flights that leave when it is answered."""

    __slots__ = ("flights", "section", "touched")

    def __init__(self, section: Section, flights: list[Flight], touched: list[LiveSlice]) -> None:
        self.section, self.flights, self.touched = section, flights, touched


class Partition:
    """All state of one partition that this node owns. Nothing here does I/O."""

    def __init__(self, number: int, namespace: str, token: bytes, lease_until: float) -> None:
        self.number = number
        self.namespace = namespace
        self.token = token
        self.seq = 0
        self.lease_until = lease_until
        """On this machine's monotonic clock, counted from when the request for the lease was sent."""
        self.slices: dict[Slice, LiveSlice] = {}
        self.lanes = Lanes()
        self.ready: list[Flight] = []
        """Lane tasks whose turn has come."""
        self.unanswered: Begun | Commit | None = None
        """Sent, but the reply was lost: it must be sent again, unchanged, before anything else."""
        self.retries: list[NewPlace] = []
        self.deaths: list[Death] = []
        self.holds: list[tuple[str, bytes]] = []
        self.accepted_seen = -1
        self.needs_listing = True
        self.recovering = True
        """The next listing is the first: bitmaps of a former owner are read along."""
        self.blocked_ms = -1
        """A lane's task due by then waits for unread slices that started before it."""
        self.next_start_ms: int | None = None
        """Start of the earliest slice that lies beyond the horizon."""
        self.damaged: list[Damaged] = []

    # -- what waits ----------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        due = [ms for live in self.slices.values() if (ms := live.next_due_ms()) is not None]
        return min(due, default=None)

    @property
    def waiting(self) -> int:
        return sum(live.waiting for live in self.slices.values())

    @property
    def dirty(self) -> bool:
        return any(live.dirty for live in self.slices.values())

    @property
    def has_outcomes(self) -> bool:
        return bool(self.retries or self.deaths or self.holds or any(live.lost for live in self.slices.values()))

    # -- begin ---------------------------------------------------------------------------------------

    def begin(self, now_ms: int, limit: int) -> Begun | None:
        """Everything due by now (up to the limit) and everything done since the last call."""
        flights, self.ready = self.ready, []
        max_due = max((flight.live.slice.start_ms + _offset(flight) for flight in flights), default=-1)
        by_live: dict[LiveSlice, list[int]] = {}
        for flight in flights:
            by_live.setdefault(flight.live, []).append(flight.index)
        for live in sorted(self.slices.values(), key=_start_ms):
            if limit <= 0 or live.at >= len(live.due):
                continue
            keys = live.take_due(now_ms, limit)
            if keys:
                limit -= len(keys)
                max_due = max(max_due, live.slice.start_ms + (keys[-1] >> 32))
                leaving = self._flights(live, keys)
                if leaving:
                    flights += leaving
                    by_live[live] = by_live.get(live, []) + [flight.index for flight in leaving]
        return self._section(flights, by_live, max_due)

    def _section(self, flights: list[Flight], by_live: dict[LiveSlice, list[int]], max_due_ms: int) -> Begun | None:
        touched = [live for live in self.slices.values() if live in by_live or live.dirty]
        if not touched:
            return None
        due_ms = max_due_ms if flights else None
        lanes = due_ms is not None and any(live.has_lanes for live in by_live)
        known = self._known(max_due_ms) if lanes else []
        finished = sum(live.finished for live in touched)
        touches = [live.touch(by_live.get(live, [])) for live in touched]
        for live in touched:
            live.finished = 0
        section = Section(self.number, self.token, self.seq + 1, due_ms, finished, touches, known)
        return Begun(section, flights, touched)

    def _known(self, max_due_ms: int) -> list[Known]:
        limit = (max_due_ms // 1000 + 1) * 1000
        return [Known(live.slice, live.g, live.cursor) for live in self.slices.values() if live.slice.start_ms < limit]

    def _flights(self, live: LiveSlice, keys: list[int]) -> list[Flight]:
        indexes = [key & 0xFFFFFFFF for key in keys]
        rows = [live.rows[i] or b"" for i in indexes]
        try:
            bodies = decode_many(rows)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._flights_one_by_one(live, keys)
        if len(bodies) != len(rows):
            return self._flights_one_by_one(live, keys)
        start, namespace = live.slice.start_ms, self.namespace
        flights = [
            Flight(
                namespace,
                row[5:HEADER_BYTES],
                body,
                start + (key >> 32) if body.due_ms is None else body.due_ms,
                live,
                i,
            )
            for key, i, row, body in zip(keys, indexes, rows, bodies, strict=True)
        ]
        if not live.has_lanes:
            return flights
        return [flight for flight in flights if self._admit(flight)]

    def _admit(self, flight: Flight) -> bool:
        if flight.body.lane is not None:
            flight.live.held.add(flight.index)
        return self.lanes.admit(flight)

    def _flights_one_by_one(self, live: LiveSlice, keys: list[int]) -> list[Flight]:
        """Slowly, because one of these entries is damaged: that one must not hold up the others."""
        flights = []
        for key in keys:
            index = key & 0xFFFFFFFF
            row = live.rows[index] or b""
            try:
                if len(row) < HEADER_BYTES or int.from_bytes(row[:4], "big") >= live.slice.width_ms:
                    raise msgspec.DecodeError("the header is damaged")
                body = decode(row)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.damaged.append(Damaged(live, index, row, str(error)))
                continue
            due_ms = live.slice.start_ms + (key >> 32) if body.due_ms is None else body.due_ms
            flight = Flight(self.namespace, row[5:HEADER_BYTES], body, due_ms, live, index)
            if self._admit(flight):
                flights.append(flight)
        return flights

    # -- answers ---------------------------------------------------------------------------------------

    def begun(self, begun: Begun, x: list[bytes]) -> list[Flight]:
        """The server has the fired bits: these flights leave now, less those that were cancelled before."""
        self.seq = begun.section.seq
        cancelled: dict[LiveSlice, tuple[int, bytes]] = {}
        for live, touch, bits in zip(begun.touched, begun.section.touches, x, strict=True):
            if bits.strip(b"\0"):
                cancelled[live] = (touch.f_at, bits)
        if not cancelled:
            return begun.flights
        leaving = []
        for flight in begun.flights:
            first_byte, bits = cancelled.get(flight.live, (0, b""))
            if is_set(bits, first_byte, flight.index):
                flight.live.settle(flight.index)
                self.lane_goes_on(flight)
            else:
                leaving.append(flight)
        return leaving

    def take_back(self, begun: Begun) -> None:
        """The server wrote nothing: everything waits again, and what was done has still to be committed."""
        keys: dict[LiveSlice, list[int]] = {}
        for flight in begun.flights:
            if flight.body.lane is not None:
                self.ready.append(flight)
                flight.live.unmark_fired([flight.index])
            else:
                keys.setdefault(flight.live, []).append((_offset(flight) << 32) | flight.index)
        for live, some in keys.items():
            live.unmark_fired([key & 0xFFFFFFFF for key in some])
            live.put_back(some)
        finished = begun.section.finished
        for live, touch in zip(begun.touched, begun.section.touches, strict=True):
            live.finished, finished = live.finished + finished, 0
            live.untake_dirty(touch.d_at, touch.d)

    def forget(self, live: LiveSlice) -> None:
        """The list on the server is not the one that was read: read it anew, bitmaps included."""
        live.forgotten = True
        if self.slices.get(live.slice) is live:
            del self.slices[live.slice]
        self.ready = [flight for flight in self.ready if flight.live is not live]
        self.needs_listing = self.recovering = True

    # -- outcomes -----------------------------------------------------------------------------------

    def lane_goes_on(self, flight: Flight) -> None:
        """The head of a lane is settled: the next one may leave."""
        lane = flight.body.lane
        if lane is None:
            return
        if flight.body.attempt > 1:
            self.holds.append((lane, b""))
        following = self.lanes.next_after(lane, flight.idh)
        if following is not None:
            self.ready.append(following)

    def commit(self) -> Commit:
        """All outcomes so far in one call, with the done bits they belong to."""
        touched = [live for live in self.slices.values() if live.dirty]
        finished, lost = sum(live.finished for live in touched), sum(live.lost for live in touched)
        touches = [live.touch([]) for live in touched]
        for live in touched:
            live.finished = live.lost = 0
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
        )
        self.retries, self.deaths, self.holds = [], [], []
        return work


def _start_ms(live: LiveSlice) -> int:
    return live.slice.start_ms


def _offset(flight: Flight) -> int:
    """The millisecond within its slice at which the entry stands."""
    return max(0, flight.due_ms - flight.live.slice.start_ms)
