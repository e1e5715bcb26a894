"""Copies of one program agree on the schedules that it declares.

The code wins: a program that starts writes each declaration that differs from the schedule in the store, once, and logs
how to undo it. Copies of one program therefore write it once. What people set stays if they pin it
(`mainspring schedule edit NAME --pin`); pauses and pins are never touched.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ..client.schedules import Schedules
from ..model.errors import Conflict, NotFound
from ..model.schedule.definition import Definition, digest_of, is_over, same_schedule
from ..model.schedule.view import ScheduleView

log = logging.getLogger("mainspring.scheduler")

_TRIES: Final = 16


async def publish(schedules: Schedules, declared: Iterable[Definition], now_ms: int) -> None:
    """Write new and changed declarations. Wrong definitions raise InvalidInput."""
    todo = {definition.name: definition for definition in declared}
    for _ in range(_TRIES):
        if not todo:
            return
        known = await schedules.get_many(list(todo))
        missing = [definition for name, definition in todo.items() if name not in known]
        left = await _add(schedules, missing, now_ms)
        for name, view in known.items():
            if not await _replaced(schedules, todo[name], view, now_ms):
                left.append(todo[name])
        todo = {definition.name: definition for definition in left}
    raise Conflict(f"schedule {next(iter(todo))!r} keeps changing; try again")


async def _add(schedules: Schedules, missing: Sequence[Definition], now_ms: int) -> list[Definition]:
    """Add schedules; return those that another program added meanwhile."""
    over = [one for one in missing if is_over(one, now_ms)]
    for definition in over:
        log.warning("schedule %r is not added: it has already ended", definition.name)
    new = [one for one in missing if one not in over]
    outcomes = await schedules.add_many([_signed(one) for one in new], on_conflict="keep")
    return [one for one, (_, outcome) in zip(new, outcomes, strict=True) if outcome != "created"]


async def _replaced(schedules: Schedules, declared: Definition, view: ScheduleView, now_ms: int) -> bool:
    """Return True if nothing is left to do; False if another writer interfered."""
    present = view.definition
    wanted = msgspec.structs.replace(declared, paused=present.paused, pinned=present.pinned)
    if same_schedule(present, wanted):
        return True
    if is_over(declared, now_ms):
        log.warning("schedule %r stays as it is in the store: the declared one has already ended", declared.name)
        return True
    if is_over(declared, now_ms, view.runs):
        log.warning(
            "schedule %r stays as it is in the store: it has run %d times, and max_runs of what is declared is %d",
            declared.name, view.runs, declared.max_runs,
        )  # fmt: skip
        return True
    typed = f"{present.name} -n {schedules.namespace}"
    if present.pinned:
        log.warning(
            "schedule %r is pinned at generation %d and stays; 'mainspring schedule edit %s --no-pin' lets this program"
            " change it at its next start", present.name, present.generation, typed,
        )  # fmt: skip
        return True
    try:
        await schedules.rewrite(_signed(wanted), generation=present.generation)
    except (Conflict, NotFound):
        return False
    by_hand = present.declared != digest_of(present)
    log.log(
        logging.WARNING if by_hand else logging.INFO,
        "schedule %r is now as this program declares it (before: generation %d, %s); 'mainspring schedule rollback %s'"
        " brings the former one back, 'mainspring schedule edit %s --pin' keeps it",
        present.name, present.generation, f"by {present.by}" if present.by else "declared by a program",
        typed, typed,
    )  # fmt: skip
    return True


def _signed(declared: Definition) -> Definition:
    """Record in the definition what the code declared: revisions are kept only for a while."""
    return msgspec.structs.replace(declared, declared=digest_of(declared))
