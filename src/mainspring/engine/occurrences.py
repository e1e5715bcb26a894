"""The schedules of one owned partition: which occurrence may begin, and what is written when it does.

Nothing here does I/O. The planner fetches missing data and decides cases that memory cannot."""

from collections.abc import Container, Iterable
from typing import Final

import msgspec

from ..model.ids import schedule_of
from ..model.schedule.chain import NOBODY, ChainMemory, ChainState, NotRun, PastRun, after_begin, overlapped_until
from ..model.schedule.definition import Definition
from ..store.codec import SCHEDULED, decode
from ..store.keys import HOUR_MS
from ..store.owner.fire import ChainClaim, NextOccurrence
from ..store.schedules import Sketch, sketch
from .flight import Flight
from .slice import LiveSlice

NEAR_MS: Final = 10_000
SHORT_MS: Final = 120_000
"""The definition of a schedule that comes again within this time is kept in memory."""


_FORGET_MS: Final = 600_000


class OccurrencePlan(msgspec.Struct, gc=False):
    """The effect of beginning an occurrence that is part of a chain.

    Made in advance and as complete as possible: a hundred thousand may be due in the same second. Untracked by the
    garbage collector for the same reason, because it is never part of a reference cycle.
    """

    definition: Definition
    link: ChainState
    following: ChainState
    """The chain after this occurrence has begun."""
    waits_for_end: bool = False
    settled: bool = False
    """The occurrence may begin, even if it is late."""
    skips: bool = False
    waited: bool = False
    """The occurrence waited until the previous run was over."""
    sketch: Sketch | None = None
    next: NextOccurrence | None = None
    put_ms: int = 0
    good_ms: int = 0
    """`next` can be written unchanged from `put_ms` until this time. If it is earlier, the clock was set back."""

    @classmethod
    def of(cls, definition: Definition, link: ChainState, began_ms: int) -> "OccurrencePlan":
        """Make the plan of an occurrence that advances its chain."""
        plan = cls(definition, link, link, definition.slots.recurrence.waits_for_end)
        plan.foresee(began_ms)
        return plan

    def foresee(self, began_ms: int) -> None:
        """Compute the following occurrence in advance."""
        self._lead_to(*after_begin(self.definition, self.link, began_ms, waited=self.waited))
        self.next = self._next_at(began_ms, None)

    @property
    def may_be_put(self) -> bool:
        """True if a pause held the following occurrence back: a backfill may have put it meanwhile."""
        return not self.skips and 0 < self.following.planned_ms <= self.definition.at_ms

    def pass_by(self, began_ms: int) -> None:
        """Skip a following occurrence that is already stored: the chain continues after it."""
        state = self.link.state.passing_by(self.link.planned_ms, self.following.planned_ms)
        self.link = msgspec.structs.replace(self.link, state=state)
        self.foresee(began_ms)

    def _lead_to(self, next_ms: int | None, state: ChainMemory) -> None:
        if next_ms is None:
            self.sketch = None
        elif self.sketch is None or next_ms != self.following.planned_ms:
            self.sketch = sketch(self.definition, next_ms)
        idh = NOBODY if self.sketch is None else self.sketch.idh
        self.following = ChainState(self.definition.generation, next_ms or 0, idh, state)

    def skip(self, next_ms: int | None, state: ChainMemory) -> None:
        self.settled = self.skips = True
        self._lead_to(next_ms, state)

    def relink(self, state: ChainMemory) -> None:
        """Update the plan with newer knowledge of the last run."""
        if state is not self.link.state:
            self.link, self.good_ms = msgspec.structs.replace(self.link, state=state), 0

    def to_write(self, flight: Flight, now_ms: int) -> NextOccurrence:
        """Return the changes that the server makes in the step in which this occurrence begins."""
        if self.skips:
            return self._next_at(now_ms, (flight.live.keys[3], flight.index, flight.row[5:21]))
        if self.next is not None and self.put_ms <= now_ms < self.good_ms:
            self.put_ms = now_ms
            return self.next
        self._lead_to(*after_begin(self.definition, self.link, now_ms, waited=self.waited))
        return self._next_at(now_ms, None)

    def _next_at(self, now_ms: int, skipped: tuple[str, int, bytes] | None) -> NextOccurrence:
        place, row = (None, b"") if self.sketch is None else self.sketch.put(now_ms)
        self.put_ms, self.good_ms = now_ms, 1 << 62
        if place is not None and self.sketch is not None:
            # If it were written later it would already be overdue, or land in an hour slice that is being read.
            self.good_ms = place.start_ms if place.width_ms >= HOUR_MS else self.sketch.due_ms
        return NextOccurrence(self.definition.name, self.link.claim, self.following.pack(), place, row, skipped)


class Ongoing(msgspec.Struct, gc=False):
    """The last run of a schedule as this owner has seen it."""

    name: str
    planned_ms: int
    began_ms: int
    link: ChainState
    over: PastRun | None = None


class Chains:
    """Plans of the occurrences that were read, and occurrences that cannot begin yet."""

    def __init__(self) -> None:
        self.wanted: dict[bytes, None] = {}
        """Entries of occurrences that were read and have no plan."""
        self.plans: dict[bytes, OccurrencePlan | None] = {}
        """By entry, not by id: after an edit that keeps the planned time there are two entries with one id. None for an
        occurrence that advances no chain."""
        self.undecided: dict[bytes, Flight] = {}
        """Due occurrences that wait for a decision of the planner."""
        self.known: dict[str, tuple[Definition, ChainState]] = {}
        self.runs: dict[bytes, Ongoing] = {}
        """Last runs of schedules, by the hashes of their ids."""
        self.ended: dict[str, Ongoing] = {}
        """Runs whose end the server does not know yet."""
        self.asks = False
        """There is work for the planner."""
        self.passed: list[tuple[Definition, NotRun]] = []
        """Planned times that did not run (missed, overlapping, in a pause that is over, beyond the buffer, cancelled),
        until the partition takes them."""

    def read(self, rows: Iterable[bytes]) -> None:
        """Request plans for occurrences that come near, before they are due."""
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
                flight.plan = plan = self.plans.get(row)
                known = plan is not None or row in self.plans
                if not known or (plan is not None and not self._may_begin(plan, now_ms - flight.place_ms)):
                    if not known:
                        self.wanted[row] = None
                    flight.live.held.add(flight.index)
                    self.undecided[row] = flight
                    self.asks = True
                    continue
            leaving.append(flight)
        return leaving

    def _may_begin(self, plan: OccurrencePlan, late_ms: int) -> bool:
        if plan.settled:
            return True
        if late_ms > plan.definition.grace_ms or plan.waits_for_end:
            return False
        return self.is_free(plan) and overlapped_until(plan.definition, plan.link) is None

    def is_free(self, plan: OccurrencePlan) -> bool:
        """Return True if, by what is in memory, the last run is over or may overlap with this one."""
        state = plan.link.state
        if not state.last or state.last_is_over:
            return True
        ongoing = self.runs.get(state.last)
        if ongoing is not None and ongoing.over is not None:
            plan.relink(state.with_run(ongoing.over))
            return True
        return plan.definition.overlap == "allow"

    def next_occurrences(self, flights: Iterable[Flight], now_ms: int) -> list[NextOccurrence]:
        """Return the changes that the server makes in the step in which these begin."""
        planned = ((flight, flight.plan) for flight in flights)
        return [plan.to_write(flight, now_ms) for flight, plan in planned if isinstance(plan, OccurrencePlan)]

    def begun(
        self, flights: Iterable[Flight], cancelled: Iterable[Flight], left_alone: Container[ChainClaim] = ()
    ) -> bool:
        """Note that the server advanced their chains, except those left alone: another call has recorded what did
        not run there. Return True if some of the following occurrences are near."""
        did_not_run = {flight.row for flight in cancelled}
        near = False
        for flight in flights:
            if not flight.row[4] & SCHEDULED:
                continue
            self.plans.pop(flight.row, None)
            plan, idh = flight.plan, flight.idh
            if isinstance(plan, OccurrencePlan):
                known = len(self.passed)
                near = self._moved_on(plan, idh, ran=not plan.skips and flight.row not in did_not_run) or near
                if (plan.definition.name, plan.link.claim) in left_alone:
                    del self.passed[known:]
        return near

    def _moved_on(self, plan: OccurrencePlan, idh: bytes, *, ran: bool) -> bool:
        """Advance the chain in memory; return True if the following occurrence is near."""
        definition, old, link = plan.definition, plan.link, plan.following
        if plan.sketch is not None:
            if link.planned_ms - old.planned_ms < SHORT_MS:
                self.known[definition.name] = (definition, link)
            else:
                self.known.pop(definition.name, None)
        self.passed += ((definition, slot) for slot in link.state.not_run_since(old.state))
        if not (ran or plan.skips):
            link = self._cancelled(definition, old, link)
        last = old.state.last
        before = self.runs.pop(last, None) if last else None
        if ran:
            self.runs[idh] = Ongoing(definition.name, old.planned_ms, plan.put_ms, link)
        elif before is not None:
            before.link = link
            self.runs[last] = before
        return plan.sketch is not None and plan.sketch.due_ms < plan.put_ms + NEAR_MS

    def _cancelled(self, definition: Definition, old: ChainState, link: ChainState) -> ChainState:
        """Note that the occurrence was cancelled before its begin: the chain has advanced, but there was no run."""
        state = old.state.called_off(old.planned_ms, "cancelled")  # the canceller noted the same, if it was in time
        link = msgspec.structs.replace(link, state=state)
        if definition.name in self.known:
            self.known[definition.name] = (definition, link)
        self.ended[definition.name] = Ongoing(definition.name, old.planned_ms, 0, link)
        self.asks = True
        self.passed += ((definition, slot) for slot in state.not_run_since(old.state))
        return link

    # -- ends ------------------------------------------------------------------------------------------

    def over(self, flights: Iterable[Flight], outcome: str, now_ms: int) -> None:
        """Note that runs of schedules have ended, with no further attempt."""
        for flight in flights:
            ongoing = self.runs.get(flight.row[5:21])
            if ongoing is not None:
                ongoing.over = PastRun(ongoing.planned_ms, ongoing.began_ms, now_ms, outcome)
                self.ended[ongoing.name] = ongoing
                self.asks = True

    def forget(self, live: LiveSlice) -> None:
        """Forget occurrences of a slice that is read again or belongs to another owner."""
        self.undecided = {row: flight for row, flight in self.undecided.items() if flight.live is not live}

    def tidy(self, now_ms: int) -> None:
        """Forget plans of occurrences that never came: cancelled, or owned by another node."""
        for row, plan in list(self.plans.items()):
            if row not in self.undecided and (plan is None or plan.link.planned_ms < now_ms - _FORGET_MS):
                del self.plans[row]


Occurrence = tuple[str, int, int]
"""Schedule, generation and planned time."""


def occurrence_of(row: bytes) -> Occurrence | None:
    """Return the occurrence that an entry names; None if it names none, or is a retry."""
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if body.occurrence is None or body.id is None or body.attempt > 1:
        return None
    return schedule_of(body.id), *body.occurrence
