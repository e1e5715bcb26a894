"""Decides for one partition which tasks wait in hold slices, and when they come back."""

from itertools import islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from ..model.hold import CATCH_UP, LANE, PARKED, RETRY, HoldRecord
from ..store.holds import Inherited
from ..store.keys import Slice
from .aside import Aside
from .flight import Flight
from .holds import Gates, Hold, Holds, Taken
from .live import LiveSlice

if TYPE_CHECKING:
    from .lanes import Lanes

FEW_BEHIND: Final = 32
"""So many tasks behind a failed head wait in memory; more are moved into a hold slice."""

MOST_UNDER_WAY: Final = 2_000
"""With so many on their way into hold slices the others wait where they stand: their turn comes."""

SOME_LANES: Final = 128
"""Holds that are looked at with every poll, whether they have ended: thousands would block the loop."""

LONG_WAIT_MS: Final = 10_000
"""Behind a head that is not tried again for longer than this nobody waits in memory: slices could not be dropped."""

_LIVE: Final = attrgetter("live")
_TARGET: Final = attrgetter("body.target")


def _due_ms(flight: Flight) -> float:
    """When it stood in line first, as far as that counts: what was held once is not overdue for that."""
    live = flight.live
    return inf if live.slice.is_hold and live.pace != CATCH_UP else flight.place_ms


class HeldWork:
    """What of one partition may not go out now. Tasks of a lane wait under their lane's hold, whoever holds them up."""

    lanes: "Lanes"

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self.holds = Holds()
        self._to_look_at: list[Hold] = []
        self.aside = Aside(gates)

    @property
    def has_outcomes(self) -> bool:
        return self.holds.has_outcomes

    def take_moves(self, most: int) -> Taken:
        return self.holds.take_moves(most)

    @property
    def to_move(self) -> bool:
        """Some who may not go out now stand in memory and may have to be moved."""
        return bool(self.aside.count or self.lanes.crowded)

    @property
    def standing(self) -> int:
        """How many are in memory only until they are moved. More are not read while these are many."""
        return self.aside.count + self.holds.under_way

    def barrier_ms(self, lane: str) -> float:
        hold = self.holds.of_lane(lane)
        return inf if hold is None else hold.barrier_ms()

    # -- into hold slices ----------------------------------------------------------------------------------

    def sort_out(self, flights: list[Flight], now_ms: int) -> list[Flight]:
        """Of tasks without lanes those that may go out now; the others are held back."""
        paced = any(live.pace is not None for live in set(map(_LIVE, flights)))
        governed = {target for target in set(map(_TARGET, flights)) if paced or self.gates.governs(target)}
        if not governed:
            return flights
        leaving = []
        # Who was refused once is refused for the rest of this call; there may be thousands.
        refused: dict[str, str] = {}
        overdue_ms = -inf
        for flight in flights:
            target, due_ms = flight.body.target, _due_ms(flight)
            if target not in governed or flight.live.to_redo(flight.index):
                leaving.append(flight)
                continue
            key = CATCH_UP if due_ms <= overdue_ms else refused.get(target) or self.gates.hold_for(target, None, due_ms)
            if key is None:
                leaving.append(flight)
                continue
            if key == CATCH_UP:
                overdue_ms = max(overdue_ms, due_ms)
            else:
                refused[target] = key
            self._hold_back(flight, key, now_ms)
        return leaving

    def _hold_back(self, flight: Flight, key: str, now_ms: int) -> None:
        own = self.holds.by_key.get(key)
        if own is None or own.live is not flight.live:
            self.aside.add(key, flight)
        elif own.open and self._hold_of(key, now_ms).open:
            flight.live.put_back([flight.key])
        # Else it was let go when its hold closed, and stays where it is.

    def spill(self, most: int, now_ms: int) -> int:
        """Let some of those that may not go out now be moved with the next commits; returns how many were looked at."""
        if self.holds.under_way >= MOST_UNDER_WAY:
            return 0
        looked_at = self._spill_aside(most, now_ms) if self.aside.count else 0
        return looked_at + self.spill_lanes(now_ms, most - looked_at)

    def _spill_aside(self, most: int, now_ms: int) -> int:
        """Move some of those that stepped aside into hold slices, with the next commit."""

        def move(key: str, flights: list[Flight]) -> None:
            hold = self._hold_of(key, now_ms) if flights else None
            for flight in flights:
                if hold is not None:
                    self.holds.move(flight, hold)

        return self.aside.take(most, move)

    def _hold_of(self, key: str, now_ms: int) -> Hold:
        why = self.gates.why(key)
        record = HoldRecord(key, key, now_ms, why.reason, why.who, why.until_ms, code=why.code)
        own = self.holds.by_key.get(key)
        if own is None or not own.open or own.closing or self.gates.room(key) is None:
            return self.holds.make(record, now_ms)
        # Its tasks go out little by little: it is not closed because others join them.
        self._tell_anew(own)
        return own

    def _tell_anew(self, hold: Hold) -> None:
        """Who asks why its tasks wait hears the present state of a breaker, not that in which they were held."""
        why = self.gates.why(hold.record.cause)
        if hold.closing or (not why.code and not (hold.record.code and hold.open)):
            return  # nothing but a receiver's state changes while its tasks wait
        fresh = msgspec.structs.replace(hold.record, reason=why.reason, until_ms=why.until_ms, code=why.code)
        if fresh != hold.record:
            hold.record = fresh
            self.holds.records[hold.place.name] = fresh.encode()

    def takes(self, lane: str, flight: Flight) -> bool:
        """Its lane stands still and has a hold slice: it goes there straight away."""
        hold = self.holds.of_lane(lane) if self.holds.by_key else None
        if hold is None or hold.open or hold.closing or hold.live is flight.live or not self.lanes.is_closed(lane):
            return False
        head = None if lane in self.lanes.gated else self.lanes.waits_for(lane)
        if flight.is_retry_of(head) or flight.live.to_redo(flight.index):
            return False
        hold.has_head = hold.has_head or flight.is_retry_of(self.lanes.waits_for(lane))
        self.holds.move(flight, hold)
        return True

    def may_leave(self, lane: str, flight: Flight) -> bool:
        """Asked for the one whose turn it is in its lane. If it has to wait, all of its lane wait."""
        hold = self.holds.of_lane(lane)
        # What was held for another reason is not overdue for that.
        behind = not flight.live.slice.is_hold or (hold is not None and hold.record.cause == CATCH_UP)
        key = self.gates.hold_for(flight.body.target, lane, flight.place_ms if behind else inf)
        if key is not None:
            self.lanes.gate(lane, key)
        return key is None

    def spill_lanes(self, now_ms: int, most: int = MOST_UNDER_WAY) -> int:
        """Move those away who wait in lanes that stand still, where they are many or it takes long. Some at a time:
        thousands of lanes may have come to stand still at once."""
        before, looked_at = self.holds.under_way, 0
        while self.lanes.crowded and before < MOST_UNDER_WAY and looked_at < most:
            self._spill_lane(self.lanes.crowded.pop(), now_ms)
            looked_at += 1 + self.holds.under_way - before
            before = self.holds.under_way
        return looked_at

    def _spill_lane(self, lane: str, now_ms: int) -> None:
        hold = self.holds.of_lane(lane)
        if hold is not None and hold.closing:
            hold = None  # all that was in its slice is done
        behind = self.lanes.number_behind(lane, None if hold is None else hold.live)
        if not self.lanes.is_closed(lane):
            if behind > FEW_BEHIND and (hold is not None or self.lanes.is_full):
                # They come faster than those before them leave. There they keep their order.
                self._move_behind(lane, hold or self._open_hold(lane, now_ms))
            return
        long = self.lanes.until.get(lane, 0) - now_ms > LONG_WAIT_MS
        if hold is not None or lane in self.lanes.gated or behind > FEW_BEHIND or (long and behind):
            self._move_behind(lane, self.holds.make(self._record(lane, now_ms), now_ms))

    def _open_hold(self, lane: str, now_ms: int) -> Hold:
        """For those behind a head that is under way: they are read again, a window at a time."""
        hold = self.holds.make(self._record(lane, now_ms), now_ms)
        self.holds.end(hold)
        return hold

    def _move_behind(self, lane: str, hold: Hold) -> None:
        # Also where it is in flight: a failed head that was given another time may be begun at its old place, comes to
        # nothing there, and the lane waits for the one that is moved here.
        head = self.lanes.head_of(lane)
        for flight in self.lanes.take_behind(lane, hold.live):
            hold.has_head = hold.has_head or flight.idh == head
            self.holds.move(flight, hold)

    def _record(self, lane: str, now_ms: int) -> HoldRecord:
        key = self.lanes.gated.get(lane)
        if key is None:
            known = self.holds.of_lane(lane)
            parked = known is not None and known.record.cause == PARKED and known.has_head
            if parked and known is not None:
                return known.record
            return HoldRecord(LANE + lane, RETRY, now_ms)
        why = self.gates.why(key)
        return HoldRecord(LANE + lane, key, now_ms, why.reason, why.who, why.until_ms, code=why.code)

    def park(self, lane: str, reason: str, now_ms: int) -> Hold:
        """The lane stands still until somebody acts."""
        return self.holds.make(HoldRecord(LANE + lane, PARKED, now_ms, reason), now_ms)

    def head_stands(self, lane: str, *, inside: bool) -> None:
        """Where the failed head of a lane waits: among the others in its hold slice, or in time."""
        hold = self.holds.of_lane(lane)
        if hold is not None:
            hold.has_head = inside

    # -- and back ------------------------------------------------------------------------------------------

    def look_again(self, lanes: int) -> bool:
        """Some gates may have opened: what waits behind them comes back, of no more lanes than that. True when there
        are others."""
        more = False
        for cause, some in list(self.holds.waiting.items()):
            own = self.holds.by_key.get(cause)  # of the tasks without lanes: all of them in one hold
            first = [own] if own is not None and own in some else []
            for hold in (*first, *islice(some, max(0, lanes))):
                if self._gate_lasts(hold):
                    break  # and so it does for the others
                lanes -= hold is not own
                self.holds.no_gate(hold)
                self._end_if_over(hold)
            else:
                more = more or bool(some)
        return more

    def look_at_some(self, most: int = SOME_LANES) -> None:
        """The same for every hold, whatever it waits for: some at a time, over time all of them."""
        if not self._to_look_at:
            self._to_look_at = list(self.holds)
        some, self._to_look_at = self._to_look_at[:most], self._to_look_at[most:]
        for hold in some:
            known = self.holds.by_place.get(hold.place) is hold
            if known and not hold.open and not self._gate_lasts(hold):
                self._end_if_over(hold)
            if known:
                self._tell_anew(hold)

    def lane_is_free(self, lane: str) -> None:
        """Its head is settled: what waits behind it comes back."""
        hold = self.holds.of_lane(lane) if self.holds.by_key else None
        if hold is not None and not hold.open and lane not in self.lanes.gated:
            self._end_if_over(hold)

    def _gate_lasts(self, hold: Hold) -> bool:
        if hold.lane is None:
            return self.gates.is_closed(hold.record.key)
        key = self.lanes.gated.get(hold.lane)
        if key is None:
            return False
        if not self.gates.may_open(key):
            return True
        self.lanes.ungate(hold.lane)
        return False

    def _end_if_over(self, hold: Hold) -> None:
        waits = hold.lane is not None and self.lanes.waits_for(hold.lane) is not None
        if not waits or (hold.has_head and hold.record.cause != PARKED):
            self.holds.end(hold)

    def to_find(self, lanes: int) -> list[Hold]:
        """Holds that have ended and whose slices are not in memory, of no more lanes than that."""
        ended = [hold for hold in self.holds.to_find if not hold.pending]
        return [hold for hold in ended if hold.lane is None] + [hold for hold in ended if hold.lane][: max(0, lanes)]

    def found(self, hold: Hold, live: LiveSlice | None) -> None:
        """Its slice; None when there is none: all that was to be moved there had been cancelled."""
        hold.live = live
        self.holds.to_find.pop(hold, None)
        if live is not None and hold.lane is None:
            live.pace = hold.record.key
        if live is None:
            self.holds.records[hold.place.name] = b""
            self.gone(hold.place)

    def forget(self, live: LiveSlice) -> None:
        """The slice is read anew, or gone."""
        hold = self.holds.by_place.get(live.slice)
        if hold is not None and hold.live is live:
            hold.live = None
            if hold.open:
                self.holds.to_find[hold] = None

    def may_drop(self, place: Slice) -> HoldRecord | None:
        """What to keep of the hold when its slice, in which all is done, is dropped; None when it must stay."""
        hold = self.holds.by_place.get(place)
        if hold is None:
            return HoldRecord("")
        if not hold.open or hold.pending:
            return None
        hold.closing = True
        return hold.record

    def gone(self, place: Slice, now_ms: int | None = None) -> None:
        """The slice of a hold is dropped."""
        hold = self.holds.by_place.get(place)
        if hold is not None:
            self.holds.remove(hold)
            if hold.lane is not None:
                self.lanes.stirred.add(hold.lane)
        if now_ms is not None:
            self.holds.ended[place.name] = now_ms

    # -- taking over ---------------------------------------------------------------------------------------

    def inherit(self, inherited: Inherited) -> None:
        """Go on where the former owner was. A slice without a record says by its tasks what they are."""
        self.holds.ended = dict(inherited.ended)
        for place in (*inherited.slices, *map(Slice.parse, inherited.ended)):
            self.holds.known(place)
        for lane, head in inherited.heads.items():
            self.lanes.hold(lane, head.idh, since_ms=head.since_ms)
        for known in filter(None, inherited.slices.values()):
            self.gates.inherited(known)
        for place, record in inherited.slices.items():
            hold = Hold(place, record or HoldRecord(f"lost:{place.name}", since_ms=place.since_ms))
            if hold.record.key in self.holds.by_key:  # an earlier one, in which all is done
                hold.record = HoldRecord(f"lost:{place.name}", since_ms=place.since_ms)
            self.holds.add(hold)
            self.holds.close(hold, hold.record)
            if hold.lane is not None:
                hold.has_head = hold.lane in inherited.heads_inside
                if self.gates.is_closed(hold.record.cause) or self.gates.room(hold.record.cause) is not None:
                    # Where there is some room, as many lanes go on as fit: `may_open` counts them.
                    self.lanes.gate(hold.lane, hold.record.cause)
        self.look_again(SOME_LANES)
        self.look_at_some()
