"""Decides for one partition which tasks wait in hold slices, and when they come back."""

from math import inf
from typing import TYPE_CHECKING, Final

from ..model.dead import DeadLetter
from ..model.hold import LANE, PARKED, RETRY, HoldRecord
from ..model.limits import MAX_ERROR_CHARS
from ..store.holds import Inherited
from ..store.keys import Slice
from .flight import Flight
from .holds import Gates, Hold, Holds, Taken
from .live import LiveSlice

if TYPE_CHECKING:
    from .lanes import Lanes, May

FEW_BEHIND: Final = 32
"""So many tasks behind a failed head wait in memory; more are moved into a hold slice."""

LONG_WAIT_MS: Final = 10_000
"""Behind a head that is not tried again for longer than this nobody waits in memory: slices could not be dropped."""

DROPPED: Final = "dropped while paused"


class HeldWork:
    """What of one partition may not go out now. Tasks of a lane wait under their lane's hold, whatever holds them up."""

    lanes: "Lanes"

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self.holds = Holds()

    @property
    def has_outcomes(self) -> bool:
        return self.holds.has_outcomes

    def take_moves(self, most: int) -> Taken:
        return self.holds.take_moves(most)

    def barrier_ms(self, lane: str) -> float:
        hold = self.holds.of_lane(lane)
        return inf if hold is None else hold.barrier_ms()

    # -- into hold slices ----------------------------------------------------------------------------------

    def sort_out(self, flights: list[Flight], now_ms: int) -> list[Flight]:
        """Of tasks without lanes those that may go out now; the others are held back."""
        leaving = []
        for flight in flights:
            key = self.gates.hold_for(flight.body.target, None)
            if key is None or flight.live.to_redo(flight.index):
                leaving.append(flight)
            else:
                self._hold_back(flight, key, now_ms)
        return leaving

    def _hold_back(self, flight: Flight, key: str, now_ms: int) -> None:
        why = self.gates.why(key)
        if why.drop:
            self._bury(flight, key, now_ms)
            return
        own = self.holds.by_key.get(key)
        if own is not None and own.live is flight.live and not own.open:
            return  # it was let go when its hold closed, and stays where it is
        hold = self.holds.make(HoldRecord(key, key, now_ms, why.reason, why.who, why.until_ms), now_ms)
        if hold.live is not flight.live:
            self.holds.move(flight, hold)

    def may_leave(self, lane: str, flight: Flight, now_ms: int) -> "May":
        """Asked for the one whose turn it is in its lane. If it has to wait, all of its lane wait."""
        key = self.gates.hold_for(flight.body.target, lane)
        if key is None:
            return "leave"
        if self.gates.why(key).drop:
            self._bury(flight, key, now_ms)
            return "die"
        self.lanes.gate(lane, key)
        return "wait"

    def _bury(self, flight: Flight, key: str, now_ms: int) -> None:
        why = self.gates.why(key)
        said = f"{DROPPED}{f' by {why.who}' if why.who else ''}{f': {why.reason}' if why.reason else ''}"
        letter = DeadLetter(
            id=flight.id,
            reason=said[:MAX_ERROR_CHARS],
            died_ms=now_ms,
            due_ms=flight.original_due_ms,
            target=flight.body.target,
            payload=flight.body.payload,
            raw=flight.body.raw,
            lane=flight.body.lane,
            attempts=flight.body.attempt,
            errors=flight.body.errors,
            retry=flight.body.retry,
        )
        self.holds.bury(flight, letter.encode())

    def spill_lanes(self, now_ms: int) -> None:
        """Move those away who wait in lanes that stand still, where they are many or it takes long."""
        crowded, self.lanes.crowded = self.lanes.crowded, set()
        for lane in crowded:
            self.spill_lane(lane, now_ms)

    def spill_lane(self, lane: str, now_ms: int) -> None:
        hold = self.holds.of_lane(lane)
        own = None if hold is None else hold.live
        behind = self.lanes.number_behind(lane, own)
        if not self.lanes.is_closed(lane):
            if hold is not None and not hold.closing and behind > FEW_BEHIND:
                # They come faster than those before them leave. There they keep their order.
                self._move_behind(lane, hold, now_ms)
            return
        long = self.lanes.until.get(lane, 0) - now_ms > LONG_WAIT_MS
        if hold is not None or lane in self.lanes.gated or behind > FEW_BEHIND or (long and behind):
            self._move_behind(lane, self.holds.make(self._record(lane, now_ms), now_ms), now_ms)

    def _move_behind(self, lane: str, hold: Hold, now_ms: int) -> None:
        head = self.lanes.waits_for(lane)
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
        return HoldRecord(LANE + lane, key, now_ms, why.reason, why.who, why.until_ms)

    # -- and back ------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Some holds may have ended: what waits there comes back."""
        for hold in self.holds:
            if not hold.open and not hold.closing and self._is_over(hold):
                hold.end()

    def _is_over(self, hold: Hold) -> bool:
        lane = hold.lane
        if lane is None:
            return not self.gates.is_closed(hold.record.key)
        key = self.lanes.gated.get(lane)
        if key is not None:
            if self.gates.is_closed(key):
                return False
            self.lanes.ungate(lane)
        if self.lanes.waits_for(lane) is None:
            return True
        return hold.has_head and hold.record.cause != PARKED

    def to_find(self) -> list[Hold]:
        """Holds that have ended and whose slices are not in memory."""
        return [hold for hold in self.holds if hold.open and hold.live is None and not hold.pending]

    def found(self, hold: Hold, live: LiveSlice | None) -> None:
        """Its slice; None when there is none: all that was to be moved there had been cancelled."""
        hold.live = live
        if live is None:
            hold.closing = True
            self.holds.records[hold.place.name] = b""
            self.gone(hold.place)

    def forget(self, live: LiveSlice) -> None:
        """The slice is read anew, or gone."""
        for hold in self.holds:
            if hold.live is live:
                hold.live = None

    def may_drop(self, place: Slice) -> HoldRecord | None:
        """What to keep of the hold when its slice, in which all is done, is dropped; None when it must stay."""
        hold = next((one for one in self.holds if one.place == place), None)
        if hold is None:
            return HoldRecord("")
        if not hold.open or hold.pending:
            return None
        hold.closing = True
        return hold.record

    def gone(self, place: Slice, now_ms: int | None = None) -> None:
        """The slice of a hold is dropped."""
        for hold in self.holds:
            if hold.place == place:
                del self.holds.by_key[hold.record.key]
                if hold.lane is not None:
                    self.lanes.stirred.add(hold.lane)
        if now_ms is not None:
            self.holds.ended[place.name] = now_ms

    # -- taking over ---------------------------------------------------------------------------------------

    def inherit(self, inherited: Inherited) -> None:
        """Go on where the former owner was. A slice without a record says by its tasks what they are."""
        self.holds.ended = dict(inherited.ended)
        for lane, head in inherited.heads.items():
            self.lanes.hold(lane, head.idh, since_ms=head.since_ms)
        for place, record in inherited.slices.items():
            hold = Hold(place, record or HoldRecord(f"lost:{place.name}", since_ms=place.since_ms))
            if hold.record.key in self.holds.by_key:  # an earlier one, in which all is done
                hold.record = HoldRecord(f"lost:{place.name}", since_ms=place.since_ms)
            self.holds.by_key[hold.record.key] = hold
            if hold.lane is not None:
                hold.has_head = hold.lane in inherited.heads_inside
                if self.gates.is_closed(hold.record.cause):
                    self.lanes.gate(hold.lane, hold.record.cause)
