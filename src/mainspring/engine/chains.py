"""The schedules of one owned partition: which occurrence may begin, and what is put in the step in which it does.

Nothing here does I/O. The planner fetches what is missing and answers what cannot be known from memory."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ..model.chain import Link, Run, State, after_begin, link_to
from ..model.occurrence import schedule_of
from ..model.schedule import Definition
from ..store.codec import SCHEDULED, decode
from ..store.fire import Plant
from ..store.schedule_rows import Sketch, sketch
from .flight import Flight
from .live import LiveSlice

NEAR_MS: Final = 10_000
SHORT_MS: Final = 120_000
"""The definition of a schedule that comes again within this time is kept in memory."""


_FORGET_MS: Final = 600_000


class Plan:
    """What happens when an occurrence begins. Of one that moves no chain, nothing."""

    __slots__ = ("definition", "link", "next_ms", "put_ms", "settled", "sketch", "skips", "state", "waited")

    def __init__(self, definition: Definition | None = None, link: Link | None = None) -> None:
        self.definition = definition
        self.link = link
        self.settled = definition is None
        """Nothing stands against its begin, whatever the time is by then."""
        self.skips = False
        self.waited = False
        """It was kept back until the run before it was over."""
        self.next_ms: int | None = None
        self.put_ms = 0
        self.sketch: Sketch | None = None
        self.state: State | None = None
        """What the chain remembers if it is skipped; for one that runs this is made at its begin."""

    def foresee(self, now_ms: int) -> None:
        """Work out the following occurrence, ahead of time."""
        if self.definition is not None and self.link is not None:
            self.lead_to(after_begin(self.definition, self.link, now_ms, waited=self.waited)[0])

    def lead_to(self, next_ms: int | None) -> None:
        if self.definition is not None and (self.sketch is None or next_ms != self.next_ms):
            self.sketch = sketch(self.definition, next_ms) if next_ms is not None else None
        self.next_ms = next_ms

    def run(self) -> None:
        self.settled, self.skips = True, False

    def skip(self, next_ms: int | None, state: State) -> None:
        self.settled, self.skips, self.state = True, True, state
        self.lead_to(next_ms)


class Ongoing:
    """The last run of a schedule as this owner has seen it."""

    __slots__ = ("began_ms", "idh", "link", "over", "planned_ms")

    def __init__(self, idh: bytes, planned_ms: int, began_ms: int, link: Link) -> None:
        self.idh, self.planned_ms, self.began_ms, self.link = idh, planned_ms, began_ms, link
        self.over: Run | None = None


class Chains:
    """Plans of the occurrences that were read, and those that cannot begin yet."""

    def __init__(self) -> None:
        self.wanted: dict[bytes, bytes] = {}
        """Entries of occurrences that were read and have no plan: idh -> entry."""
        self.plans: dict[bytes, Plan] = {}
        self.aside: dict[bytes, Flight] = {}
        """Due, but first the planner has to say something."""
        self.ready: list[Flight] = []
        """It has."""
        self.known: dict[str, tuple[Definition, Link]] = {}
        self.runs: dict[str, Ongoing] = {}
        self.ended: dict[str, Ongoing] = {}
        """Runs whose end the server does not know yet."""
        self.asks = False
        """There is something for the planner to do."""

    def read(self, rows: Iterable[bytes]) -> None:
        """Occurrences have come near: their plans are made before they are due."""
        for row in rows:
            idh = row[5:21]
            if idh not in self.plans:
                self.wanted[idh] = row
                self.asks = True

    # -- begin -----------------------------------------------------------------------------------------

    def cleared(self, flights: list[Flight], now_ms: int) -> list[Flight]:
        """Those that may begin; the others wait aside for the planner."""
        leaving = []
        for flight in flights:
            if flight.row[4] & SCHEDULED and not self._is_clear(flight, now_ms):
                flight.live.held.add(flight.index)
                self.aside[flight.idh] = flight
                self.asks = True
            else:
                leaving.append(flight)
        return leaving

    def _is_clear(self, flight: Flight, now_ms: int) -> bool:
        plan = self.plans.get(flight.idh)
        if plan is None:
            self.wanted[flight.idh] = flight.row
            return False
        if plan.settled:
            return True
        definition, link = plan.definition, plan.link
        assert definition is not None and link is not None
        on_time = now_ms - flight.place_ms <= definition.grace_ms
        return on_time and not definition.slots.recurrence.waits_for_end and self.is_free(definition, link)

    def is_free(self, definition: Definition, link: Link) -> bool:
        """Nothing that is known from memory says that the last run may go on."""
        if definition.overlap == "allow" or link.state.last_is_over:
            return True
        ongoing = self.runs.get(definition.name)
        return ongoing is not None and ongoing.idh == link.state.last and ongoing.over is not None

    def take_ready(self) -> list[Flight]:
        ready, self.ready = self.ready, []
        return [flight for flight in ready if not flight.live.forgotten]

    def plants(self, flights: Iterable[Flight], now_ms: int) -> list[Plant]:
        """What the server puts in the step in which these begin."""
        found = []
        for flight in flights:
            if flight.row[4] & SCHEDULED:
                plan = self.plans.get(flight.idh)
                if plan is not None and plan.definition is not None and plan.link is not None:
                    found.append(self._plant(flight, plan, plan.definition, plan.link, now_ms))
        return found

    def _plant(self, flight: Flight, plan: Plan, definition: Definition, link: Link, now_ms: int) -> Plant:
        state, skipped = plan.state, None
        if plan.skips:
            skipped = (flight.live.keys[3], flight.index)
        else:
            link = link._replace(state=self.remembered(definition.name, link.state))
            next_ms, state = after_begin(definition, link, now_ms, waited=plan.waited)
            plan.state = state
            plan.lead_to(next_ms)
        assert state is not None
        plan.put_ms = now_ms
        value = link_to(definition, plan.next_ms, state) if plan.sketch is None else Link(
            definition.generation, plan.next_ms or 0, plan.sketch.idh, state
        )  # fmt: skip
        if plan.sketch is None:
            return Plant(definition.name, link.claim, value.pack(), None, b"", b"", skipped)
        place, row = plan.sketch.put(now_ms)
        return Plant(definition.name, link.claim, value.pack(), place, plan.sketch.idh, row, skipped)

    def remembered(self, name: str, state: State) -> State:
        """With the end of the last run, as far as this owner knows it."""
        ongoing = self.runs.get(name)
        if ongoing is not None and ongoing.over is not None and ongoing.planned_ms == state.last_ms:
            return state.with_run(ongoing.over)
        return state

    def begun(self, flights: Iterable[Flight], left: Sequence[Flight]) -> bool:
        """The server has moved their chains on. True when some of the following occurrences are near."""
        leaving = {flight.idh for flight in left}
        near = False
        for flight in flights:
            plan = self.plans.pop(flight.idh, None) if flight.row[4] & SCHEDULED else None
            if plan is None or plan.definition is None or plan.link is None or plan.state is None:
                continue
            definition, planned_ms = plan.definition, plan.link.planned_ms
            idh = plan.sketch.idh if plan.sketch is not None else b""
            link = Link(definition.generation, plan.next_ms or 0, idh, plan.state)
            if plan.sketch is not None:
                near = near or plan.sketch.due_ms < plan.put_ms + NEAR_MS
                if (plan.next_ms or 0) - planned_ms < SHORT_MS:
                    self.known[definition.name] = (definition, link)
                else:
                    self.known.pop(definition.name, None)
            if flight.idh in leaving and not plan.skips:
                self.runs[definition.name] = Ongoing(flight.idh, planned_ms, plan.state.began_ms, link)
            elif definition.name in self.runs:
                self.runs[definition.name].link = link
        return near

    # -- ends ------------------------------------------------------------------------------------------

    def over(self, flight: Flight, outcome: str, now_ms: int) -> None:
        """A run of a schedule is over for good."""
        body = flight.body
        if body.occurrence is None or body.id is None:
            return
        name = schedule_of(body.id)
        ongoing = self.runs.get(name)
        if ongoing is None or ongoing.idh != flight.idh:
            return
        ongoing.over = Run(ongoing.planned_ms, ongoing.began_ms, now_ms, outcome)
        self.ended[name] = ongoing
        self.asks = True

    def forget(self, live: LiveSlice) -> None:
        """Its rows are read anew, or belong to somebody else."""
        self.aside = {idh: flight for idh, flight in self.aside.items() if flight.live is not live}
        self.ready = [flight for flight in self.ready if flight.live is not live]

    def tidy(self, now_ms: int) -> None:
        """Forget plans of occurrences that never came: cancelled, or with another owner."""
        late = [
            idh
            for idh, plan in self.plans.items()
            if idh not in self.aside and (plan.link is None or plan.link.planned_ms < now_ms - _FORGET_MS)
        ]
        for idh in late:
            del self.plans[idh]

    def release(self, idh: bytes) -> None:
        flight = self.aside.pop(idh, None)
        if flight is not None and not flight.live.forgotten:
            self.ready.append(flight)


def occurrence_of(row: bytes) -> tuple[str, int, int] | None:
    """Schedule, generation and planned time of an entry; None where it says nothing of the kind."""
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if body.occurrence is None or body.id is None or body.attempt > 1:
        return None
    return schedule_of(body.id), *body.occurrence
