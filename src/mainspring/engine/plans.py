"""Makes the plans of occurrences, of what is known of their schedules."""

import logging
from collections.abc import Sequence
from typing import Final

from ..model.chain import Link, moved_by_rules
from ..model.clock import steady_s
from ..model.schedule import Definition
from .chains import APART, Occurrence, Plan

log = logging.getLogger("mainspring.engine")

PLANNING_S: Final = 0.25
"""For so long plans of a partition are made before the next has its turn: some times are hard to find."""

Known = tuple[Definition | None, Link | None]


def fits(known: "Known | None", occurrence: Occurrence) -> bool:
    return known is not None and known[1] is not None and (known[1].generation, known[1].planned_ms) == occurrence[1:]


def may_take_long(work: "tuple[bytes, Known | None, Occurrence | None]") -> bool:
    definition = None if work[1] is None else work[1][0]
    return definition is not None and bool(definition.exclude)


def plans_of(work: "Sequence[tuple[Known | None, Occurrence | None]]", now_ms: int) -> list[Plan]:
    """Of the first of these, as far as the time goes; of one at the least."""
    plans, until = [], steady_s() + PLANNING_S
    for known, occurrence in work:
        plans.append(_plan_of(known, occurrence, now_ms))
        if steady_s() >= until:
            break
    return plans


def pass_by(plans: Sequence[Plan], now_ms: int) -> None:
    for plan in plans:
        plan.pass_by(now_ms)


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
