"""How many copies of a program agree on the schedules that it declares.

A declaration is written when it is new: when neither the schedule in the store nor a former revision of it says the
same. So copies of one program write it once. While an old and a new version run side by side the new one wins, once,
and an old one that is started again leaves it alone. What people edited stays until the code says something new.
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
    """Write what is new. Wrong definitions raise InvalidInput."""
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
    """Returns those that somebody else added meanwhile."""
    over = [one for one in missing if is_over(one, now_ms)]
    for definition in over:
        log.warning("schedule %r is not added: its time is over", definition.name)
    new = [one for one in missing if one not in over]
    outcomes = await schedules.add_many([_signed(one) for one in new], on_conflict="keep")
    return [one for one, (_, outcome) in zip(new, outcomes, strict=True) if outcome != "created"]


async def _replaced(schedules: Schedules, declared: Definition, view: ScheduleView, now_ms: int) -> bool:
    """True when nothing is left to do; False when somebody came between."""
    wanted = msgspec.structs.replace(declared, paused=view.definition.paused)  # a pause is people's business
    if same_schedule(view.definition, wanted):
        return True
    if is_over(declared, now_ms):
        log.warning("schedule %r stays as it is in the store: the time of what is declared is over", declared.name)
        return True
    if is_over(declared, now_ms, view.runs):
        log.warning(
            "schedule %r stays as it is in the store: it has run %d times, and max_runs of what is declared is %d",
            declared.name, view.runs, declared.max_runs,
        )  # fmt: skip
        return True
    if view.definition.declared == digest_of(declared):
        _say_edited(view.definition)
        return True
    try:
        present, *former = await schedules.history(declared.name)
        if any(_same(one, declared) for one in former):
            _say_edited(present)
            return True
        if present.generation != view.generation:
            return False
        await schedules.rewrite(_signed(wanted), generation=present.generation)
    except (Conflict, NotFound):
        return False
    log.info("schedule %r: the declaration is new and replaces generation %d", declared.name, view.generation)
    return True


def _signed(declared: Definition) -> Definition:
    """Remembers what the code said: revisions are kept for a while only."""
    return msgspec.structs.replace(declared, declared=digest_of(declared))


def _say_edited(present: Definition) -> None:
    log.warning(
        "schedule %r in the store was changed since this program declared it, and stays (generation %d);"
        " 'mainspring schedule history %s' shows by whom",
        present.name, present.generation, present.name,
    )  # fmt: skip


def _same(former: Definition, declared: Definition) -> bool:
    return same_schedule(msgspec.structs.replace(former, paused=None), declared)
