"""Makes the plans of occurrences, of what is known of their schedules."""

import logging
from collections.abc import Sequence
from typing import Final

from ..model.chain import Link, State, after_misfire, after_overlap, moved_by_end, moved_by_rules
from ..model.schedule import Definition
from ..store.searches import found_in_time
from .chains import APART, Occurrence, Plan
from .flight import Flight

log = logging.getLogger("mainspring.engine")

PLANNING_S: Final = 0.25
"""For so long plans of a partition are made before the next has its turn: some times are hard to find."""

Known = tuple[Definition | None, Link | None]


def fits(known: "Known | None", occurrence: Occurrence) -> bool:
    return known is not None and known[1] is not None and (known[1].generation, known[1].planned_ms) == occurrence[1:]


def plans_of(work: "Sequence[tuple[Known | None, Occurrence | None]]", now_ms: int) -> list[Plan]:
    """Of the first of these, as far as the time goes; of one at the least."""
    return found_in_time(work, lambda one: _plan_of(*one, now_ms), PLANNING_S)


def ways_on(waiting: "Sequence[tuple[Flight, Plan]]", now_ms: int) -> list[tuple[int | None, State] | None]:
    """Of the first of these likewise: where their chains go on without them; None: it is their time."""
    return found_in_time(waiting, lambda one: _way_on(*one, now_ms), PLANNING_S)


def ways_past(behind: "Sequence[tuple[Flight, Plan]]") -> list[tuple[int | None, State]]:
    """Of the first of these likewise, where the run before is not over: where their chains go on."""
    return found_in_time(behind, lambda one: after_overlap(*one[1].known), PLANNING_S)


def pass_by(plans: Sequence[Plan], now_ms: int) -> None:
    for plan in plans:
        plan.pass_by(now_ms)


def _way_on(flight: Flight, plan: Plan, now_ms: int) -> tuple[int | None, State] | None:
    definition, link = plan.known
    moved_ms = moved_by_end(definition, link)
    if moved_ms is not None:
        return moved_ms, link.state
    late = now_ms - flight.place_ms > definition.grace_ms and not plan.waited
    return after_misfire(definition, link, now_ms) if late else None


def _plan_of(known: "Known | None", occurrence: Occurrence | None, now_ms: int) -> Plan:
    """What its begin does; nothing, where the schedule was edited or removed, or its chain has moved on."""
    definition, link = known or (None, None)
    if definition is None or link is None or occurrence is None or not fits(known, occurrence):
        return APART
    if definition.generation != occurrence[1]:
        return APART
    plan = Plan.of(definition, link, max(now_ms, definition.due_ms(link.planned_ms)))
    if (instead := moved_by_rules(definition, link)) is not None:
        log.info("schedule %s: its next occurrence is moved, for the rules of %s have changed", definition.name,
                 definition.zone, extra={"schedule": definition.name})  # fmt: skip
        plan.skip(*instead)
    return plan
