"""The schedules of one owned partition: which occurrence may begin, and what is written when it does.

Nothing here does I/O. The planner fetches what is missing and answers what cannot be known from memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ..model.ids import schedule_of
from ..model.schedule.chain import NOBODY, ChainMemory, ChainState, PastRun, after_begin, overlapped_until
from ..model.schedule.definition import Definition
from ..store.codec import SCHEDULED, decode
from ..store.keys import HOUR_MS
from ..store.owner.fire import NextOccurrence
from ..store.schedules import Sketch, sketch
from .flight import Flight
from .slice import LiveSlice

NEAR_MS: Final = 10_000
SHORT_MS: Final = 120_000
"""The definition of a schedule that comes again within this time is kept in memory."""


_FORGET_MS: Final = 600_000


class OccurrencePlan(msgspec.Struct, gc=False):
    """What happens when an occurrence begins. Of one that moves no chain, nothing.

    Made ahead and as complete as can be: a hundred thousand may be due in the same second. Hidden from the garbage
    collector for the same reason; nothing it refers to refers back.
    """

    definition: Definition | None = None
    link: ChainState | None = None
    settled: bool = False
    """It may begin, however late it is by then."""
    skips: bool = False
    waited: bool = False
    """It waited until the previous run was over."""
    waits_for_end: bool = False
    following: ChainState | None = None
    """The chain once this one has begun."""
    sketch: Sketch | None = None
    plant: NextOccurrence | None = None
    put_ms: int = 0
    good_ms: int = 0
    """From the one until the other `plant` can be written as it is. Before: the clock had jumped when it was made."""

    @classmethod
    def of(cls, definition: Definition, link: ChainState, began_ms: int) -> "OccurrencePlan":
        """That of an occurrence which moves its chain on."""
        plan = cls(definition, link, waits_for_end=definition.slots.recurrence.waits_for_end)
        plan.foresee(began_ms)
        return plan

    def foresee(self, began_ms: int) -> None:
        """Work out the following occurrence, ahead of time."""
        if self.definition is not None and self.link is not None:
            self._lead_to(*after_begin(self.definition, self.link, began_ms, waited=self.waited))
            self.plant = self._planted(began_ms, None)

    @property
    def known(self) -> tuple[Definition, ChainState]:
        """The schedule, and where its chain stands: of a plan that is one."""
        assert self.definition is not None
        assert self.link is not None
        return self.definition, self.link

    @property
    def may_be_put(self) -> bool:
        """The following occurrence was held back by a pause: a backfill may have put it meanwhile."""
        if self.definition is None or self.following is None or self.skips:
            return False
        return 0 < self.following.planned_ms <= self.definition.at_ms

    def pass_by(self, began_ms: int) -> None:
        """Skip a following occurrence that is already stored: the chain continues after it."""
        if self.link is not None and self.following is not None:
            state = self.link.state.passing_by(self.link.planned_ms, self.following.planned_ms)
            self.link = msgspec.structs.replace(self.link, state=state)
            self.foresee(began_ms)

    def _lead_to(self, next_ms: int | None, state: ChainMemory) -> None:
        definition = self.definition
        assert definition is not None
        if next_ms is None:
            self.sketch = None
        elif self.sketch is None or self.following is None or next_ms != self.following.planned_ms:
            self.sketch = sketch(definition, next_ms)
        idh = NOBODY if self.sketch is None else self.sketch.idh
        self.following = ChainState(definition.generation, next_ms or 0, idh, state)

    def run(self) -> None:
        self.settled, self.skips = True, False

    def skip(self, next_ms: int | None, state: ChainMemory) -> None:
        self.settled, self.skips = True, True
        self._lead_to(next_ms, state)

    def relink(self, state: ChainMemory) -> None:
        """More is known of the last run than when this was planned."""
        if self.link is not None and state is not self.link.state:
            self.link, self.good_ms = msgspec.structs.replace(self.link, state=state), 0

    def planting(self, flight: Flight, now_ms: int) -> NextOccurrence:
        """What the server puts in the step in which this begins."""
        if self.plant is not None and self.put_ms <= now_ms < self.good_ms and not self.skips:
            self.put_ms = now_ms
            return self.plant
        assert self.definition is not None
        assert self.link is not None
        if self.skips:
            return self._planted(now_ms, (flight.live.keys[3], flight.index, flight.row[5:21]))
        self._lead_to(*after_begin(self.definition, self.link, now_ms, waited=self.waited))
        return self._planted(now_ms, None)

    def _planted(self, now_ms: int, skipped: tuple[str, int, bytes] | None) -> NextOccurrence:
        assert self.link is not None
        assert self.following is not None
        assert self.definition is not None
        place, row = (None, b"") if self.sketch is None else self.sketch.put(now_ms)
        self.put_ms = now_ms
        if place is not None and self.sketch is not None:
            # If it were written later it would already be overdue, or land in an hour slice that is being read.
            self.good_ms = place.start_ms if place.width_ms >= HOUR_MS else self.sketch.due_ms
        else:
            self.good_ms = 1 << 62
        return NextOccurrence(self.definition.name, self.link.claim, self.following.pack(), place, row, skipped)


class Ongoing(msgspec.Struct, gc=False):
    """The last run of a schedule as this owner has seen it."""

    name: str
    planned_ms: int
    began_ms: int
    link: ChainState
    over: PastRun | None = None


APART: Final = OccurrencePlan(settled=True)
"""The plan of an occurrence that moves no chain."""


class Chains:
    """Plans of the occurrences that were read, and those that cannot begin yet."""

    def __init__(self) -> None:
        self.wanted: dict[bytes, None] = {}
        """Entries of occurrences that were read and have no plan."""
        self.plans: dict[bytes, OccurrencePlan] = {}
        """By entry, not by id: after an edit that keeps the planned time there are two entries of one id."""
        self.undecided: dict[bytes, Flight] = {}
        """Due occurrences that wait for a decision of the planner."""
        self.ready: list[Flight] = []
        """Due occurrences that the planner has decided to run."""
        self.known: dict[str, tuple[Definition, ChainState]] = {}
        self.runs: dict[bytes, Ongoing] = {}
        """Last runs of schedules, by the hashes of their ids."""
        self.ended: dict[str, Ongoing] = {}
        """Runs whose end the server does not know yet."""
        self.asks = False
        """There is something for the planner to do."""
        self.not_run: Counter[str] = Counter()
        """Planned times that a begin left out, by reason; the planner adds them up."""

    def read(self, rows: Iterable[bytes]) -> None:
        """Occurrences have come near: their plans are made before they are due."""
        for row in rows:
            if row not in self.plans:
                self.wanted[row] = None
                self.asks = True

    # -- begin -----------------------------------------------------------------------------------------

    def cleared(self, flights: list[Flight], now_ms: int) -> list[Flight]:
        """Return the flights that may begin, each with its plan; the others wait for the planner."""
        leaving = []
        for flight in flights:
            row = flight.row
            if row[4] & SCHEDULED:
                plan = self.plans.get(row)
                if plan is None or not (plan.settled or self._is_clear(plan, now_ms - flight.place_ms)):
                    self._leave_undecided(flight, plan)
                    continue
                flight.plan = plan
            leaving.append(flight)
        return leaving

    def _leave_undecided(self, flight: Flight, plan: OccurrencePlan | None) -> None:
        if plan is None:
            self.wanted[flight.row] = None
        flight.live.held.add(flight.index)
        self.undecided[flight.row] = flight
        self.asks = True

    def _is_clear(self, plan: OccurrencePlan, late_ms: int) -> bool:
        definition = plan.definition
        if definition is None or late_ms > definition.grace_ms or plan.waits_for_end:
            return False
        return self.is_free(plan) and overlapped_until(*plan.known) is None

    def is_free(self, plan: OccurrencePlan) -> bool:
        """Return True if, by what is in memory, the last run is over or may overlap with this one."""
        definition, link = plan.definition, plan.link
        assert definition is not None
        assert link is not None
        state = link.state
        if not state.last or state.last_is_over:
            return True
        ongoing = self.runs.get(state.last)
        if ongoing is not None and ongoing.over is not None:
            plan.relink(state.with_run(ongoing.over))
            return True
        return definition.overlap == "allow"

    def take_ready(self) -> list[Flight]:
        ready, self.ready = self.ready, []
        leaving = []
        for flight in ready:
            if not flight.live.forgotten:
                flight.plan = self.plans.get(flight.row)
                leaving.append(flight)
        return leaving

    def plants(self, flights: Iterable[Flight], now_ms: int) -> list[NextOccurrence]:
        """What the server puts in the step in which these begin."""
        found = []
        for flight in flights:
            plan = flight.plan
            if isinstance(plan, OccurrencePlan) and plan.link is not None:
                found.append(plan.planting(flight, now_ms))
        return found

    def begun(self, flights: Iterable[Flight], left: Sequence[Flight]) -> bool:
        """The server has moved their chains on. True when some of the following occurrences are near."""
        all_left = flights is left
        leaving = set() if all_left else {flight.idh for flight in left}
        near = False
        for flight in flights:
            plan = flight.plan
            if isinstance(plan, OccurrencePlan):
                self.plans.pop(flight.row, None)
                idh = flight.row[5:21]
                near = self._moved_on(plan, idh, ran=not plan.skips and (all_left or idh in leaving)) or near
        return near

    def _moved_on(self, plan: OccurrencePlan, idh: bytes, *, ran: bool) -> bool:
        """True when the following occurrence is near."""
        definition, old, link = plan.definition, plan.link, plan.following
        if definition is None or old is None or link is None:
            return False
        if plan.sketch is not None:
            if link.planned_ms - old.planned_ms < SHORT_MS:
                self.known[definition.name] = (definition, link)
            elif self.known:
                self.known.pop(definition.name, None)
        last = old.state.last
        before = self.runs.pop(last, None) if last else None
        if ran:
            self.runs[idh] = Ongoing(definition.name, old.planned_ms, plan.put_ms, link)
            if link.state.not_run is not old.state.not_run:
                self._count(old.state, link.state)
        else:
            if not plan.skips:
                link = self._cancelled(definition, old, link)
            if before is not None:
                before.link = link
                self.runs[last] = before
        return plan.sketch is not None and plan.sketch.due_ms < plan.put_ms + NEAR_MS

    def _cancelled(self, definition: Definition, old: ChainState, link: ChainState) -> ChainState:
        """Somebody has cancelled it before its begin: the chain has moved on, but this one is no run."""
        state = old.state.called_off(old.planned_ms, "cancelled")  # as whoever cancelled it has noted it, if in time
        link = msgspec.structs.replace(link, state=state)
        if definition.name in self.known:
            self.known[definition.name] = (definition, link)
        self.ended[definition.name] = Ongoing(definition.name, old.planned_ms, 0, link)
        self.asks = True
        self._count(old.state, state)
        return link

    def _count(self, before: ChainMemory, after: ChainMemory) -> None:
        """What a begin left out: times in a pause that is over, times that found the buffer full."""
        self.not_run.update(after.not_run)
        self.not_run.subtract(before.not_run)

    # -- ends ------------------------------------------------------------------------------------------

    def over(self, flight: Flight, outcome: str, now_ms: int) -> None:
        """A run of a schedule is over for good."""
        ongoing = self.runs.get(flight.row[5:21])
        if ongoing is not None:
            ongoing.over = PastRun(ongoing.planned_ms, ongoing.began_ms, now_ms, outcome)
            self.ended[ongoing.name] = ongoing
            self.asks = True

    def forget(self, live: LiveSlice) -> None:
        """Forget occurrences of a slice that is read again or belongs to another owner."""
        self.undecided = {row: flight for row, flight in self.undecided.items() if flight.live is not live}
        self.ready = [flight for flight in self.ready if flight.live is not live]

    def tidy(self, now_ms: int) -> None:
        """Forget plans of occurrences that never came: cancelled, or with another owner."""
        late = [
            row
            for row, plan in self.plans.items()
            if row not in self.undecided and (plan.link is None or plan.link.planned_ms < now_ms - _FORGET_MS)
        ]
        for row in late:
            del self.plans[row]

    def release(self, row: bytes) -> None:
        flight = self.undecided.pop(row, None)
        if flight is not None and not flight.live.forgotten:
            self.ready.append(flight)


Occurrence = tuple[str, int, int]
"""Schedule, generation and planned time."""


def occurrence_of(row: bytes) -> Occurrence | None:
    """What an entry says of itself; None where it says nothing of the kind, or is a retry."""
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if body.occurrence is None or body.id is None or body.attempt > 1:
        return None
    return schedule_of(body.id), *body.occurrence
