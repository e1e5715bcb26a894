"""`/v1/schedules`: recurring work."""

import asyncio
from typing import Any, Final

import msgspec
from msgspec import UNSET

from ..model.audit_views import changes, of_schedule
from ..model.limits import LAST_SHOWN_MS
from ..model.lint import SAMPLE, lint
from ..model.schedule import Definition, check_specs
from ..model.schedule_view import Backfilled, ScheduleView, revision_as_dict
from ..model.targets import check_target
from ..model.zone import zone
from ..schedule_outlook import Terms, runs_ahead, terms_of, with_outlook
from ..schedules import OnExisting
from .asgi import Answer, answer
from .call import Call, no_such
from .idempotency import once
from .new_task import Put
from .problems import Problem
from .routes import Route
from .schedule_body import (
    Backfill,
    Edit,
    Fields,
    History,
    ListSchedules,
    Longest,
    NewSchedule,
    PauseBody,
    Preview,
    Removed,
    Rollback,
    Runs,
    Schedule,
    ScheduleList,
    Trigger,
    given,
    instant,
)

MOST_RUNS: Final = 1_000
LOOK_S: Final = 2.0
"""How long a preview looks for runs."""


# -- reading ---------------------------------------------------------------------------------------------------


async def list_schedules(call: Call) -> Answer:
    query: ListSchedules = call.query
    if not 1 <= query.limit <= 1000:
        raise Problem("invalid", f"limit is {query.limit}; it must lie between 1 and 1000")
    page = await call.client.schedules.list(limit=query.limit, cursor=query.cursor)
    seen = [view.as_dict() for view in page.schedules if call.key.sees(view.definition.target)]
    return answer({"schedules": seen, "next": page.next})


async def get_schedule(call: Call) -> Answer:
    return await _told(call, await _known(call))


async def _told(call: Call, view: ScheduleView, status: int = 200) -> Answer:
    """One schedule, and how it will fare by the settings of this node; in a thread, as all that looks for runs."""
    now_ms = call.client.store.clock.now_ms()
    seen = await asyncio.to_thread(with_outlook, view, now_ms, call.node.config)
    return answer(seen.as_dict(), status)


async def _known(call: Call) -> ScheduleView:
    name = call.params["name"]
    view = await call.client.schedules.get(name)
    if view is None:
        raise no_such("schedule", name)
    call.check_seen(view.definition.target, "schedule", name)
    return view


async def schedule_history(call: Call) -> Answer:
    name = call.params["name"]
    revisions = await call.client.schedules.history(name)
    call.check_seen(revisions[0].target, "schedule", name)
    return answer(History([revision_as_dict(one) for one in revisions if call.key.sees(one.target)]))


async def preview_schedule(call: Call) -> Answer:
    """Of fields that are not stored anywhere."""
    wanted: Preview = call.body
    if not 1 <= wanted.count <= MOST_RUNS:
        raise Problem("invalid", f"count is {wanted.count}; it must lie between 1 and {MOST_RUNS}")
    home = call.client.schedules.timezone
    fields = given(wanted, home, leave=("name", "count", "after"))
    now_ms = call.client.store.clock.now_ms()
    if wanted.after is not None:
        now_ms = instant(wanted.after, "after", fields.get("timezone", home))
    definition = call.client.schedules.define(wanted.name, **{"target": "null:", **fields})
    terms = None if wanted.target is UNSET else _terms(call, definition)
    definition = msgspec.structs.replace(definition, anchor_ms=now_ms - now_ms % 1000)
    check_specs(definition)
    async with call.app.previewing:
        # In a thread: some times are hard to find, and a node that looks for them must go on firing.
        return answer(await asyncio.to_thread(_look_ahead, definition, now_ms, wanted.count, terms))


def _terms(call: Call, definition: Definition) -> Terms:
    check_target(definition.target)
    call.check_target(definition.target)
    _ = definition.overlap_rule
    return terms_of(definition, call.node.config)


def _look_ahead(definition: Definition, now_ms: int, count: int, terms: Terms | None) -> Runs:
    """The runs that are asked for, and as many as warnings are made of, if there is time for them."""
    found, unfinished = runs_ahead(definition, now_ms, max(count, SAMPLE), LOOK_S)
    times = zone(definition.zone)
    runs = [times.datetime(one).isoformat() for one in found[:count] if one < LAST_SHOWN_MS]
    worst = None if terms is None else terms.worst_case
    held = None if definition.overlap == "allow" else worst
    warnings = [one.message for one in lint(definition.slots.recurrence, now_ms, worst=held, runs=found)]
    if unfinished and len(found) < count:
        warnings.append(f"these times are hard to find: after {LOOK_S:g} s the search was ended")
    return Runs(runs, warnings, UNSET if worst is None else Longest(worst.ms, worst.text))


async def diff_schedule(call: Call) -> Answer:
    before = await _known(call)
    async with call.app.previewing:
        changes = await call.client.schedules.diff(before.name, **given(call.body, before.definition.zone))
    return answer(msgspec.to_builtins(changes))


# -- writing ---------------------------------------------------------------------------------------------------


async def add_schedule(call: Call) -> Answer:
    posted: NewSchedule = call.body

    async def work(_id: str | None, repeated: bool) -> Answer:
        del _id
        existing: OnExisting = "keep" if repeated and posted.on_conflict == "reject" else posted.on_conflict
        fields = given(posted, call.client.schedules.timezone, leave=("name", "on_conflict"))
        return await _write(call, posted.name, fields, existing)

    return await once(call, work)


async def put_schedule(call: Call) -> Answer:
    """As it stands in the body, whatever was there before."""
    return await _write(call, call.params["name"], given(call.body, call.client.schedules.timezone), "replace")


async def _write(call: Call, name: str, fields: dict[str, Any], on_conflict: OnExisting) -> Answer:
    definition = call.client.schedules.define(name, **{**fields, "by": call.who})
    call.check_target(definition.target)
    before = await call.client.schedules.get(name)
    if before is not None and not call.key.sees(before.definition.target):
        raise Problem("conflict", f"the name {name[:200]!r} is taken")
    [(view, outcome)] = await call.client.schedules.add_many([definition], on_conflict=on_conflict)
    if outcome != "kept":
        await _audit(call, "schedule.add" if outcome == "created" else "schedule.edit", name, before, view)
    return await _told(call, view, 201 if outcome == "created" else 200)


async def edit_schedule(call: Call) -> Answer:
    edit: Edit = call.body
    before = await _known(call)
    fields = given(edit, before.definition.zone, leave=("generation",))
    if "target" in fields:
        call.check_target(fields["target"])
    view = await call.client.schedules.edit(before.name, generation=edit.generation, **{**fields, "by": call.who})
    await _audit(call, "schedule.edit", before.name, before, view)
    return await _told(call, view)


async def remove_schedule(call: Call) -> Answer:
    before = await _known(call)
    if not await call.client.schedules.remove(before.name):
        raise no_such("schedule", before.name)
    await _audit(call, "schedule.remove", before.name, before, None)
    return answer(Removed(before.name, "removed"))


async def pause_schedule(call: Call) -> Answer:
    wanted: PauseBody = call.body
    before = await _known(call)
    if wanted.until is not None and wanted.for_ is not None:
        raise Problem("invalid", "give either until or for")
    until = wanted.for_ if wanted.until is None else instant(wanted.until, "until")
    view = await call.client.schedules.pause(
        before.name, reason=wanted.reason, by=call.who, until=until, mode=wanted.mode
    )
    await _audit(call, "schedule.pause", before.name, before, view)
    return await _told(call, view)


async def resume_schedule(call: Call) -> Answer:
    before = await _known(call)
    view = await call.client.schedules.resume(before.name, by=call.who)
    await _audit(call, "schedule.resume", before.name, before, view)
    return await _told(call, view)


async def trigger_schedule(call: Call) -> Answer:
    wanted: Trigger = call.body
    before = await _known(call)

    async def work(_id: str | None, repeated: bool) -> Answer:
        del _id
        if repeated:  # a run has no id of the caller's by which it would be known again
            raise Problem(
                "conflict", "this request was sent before and its answer lost: it may have run. Look, then decide"
            )
        handle = await call.client.schedules.trigger(before.name, after=wanted.after)
        await call.audit("schedule.trigger", before.name, None, {"id": handle.id, "due_ms": handle.due_ms})
        return answer(Put.of(handle), 201)

    return await once(call, work)


async def backfill_schedule(call: Call) -> Answer:
    wanted: Backfill = call.body
    before = await _known(call)
    done = await call.client.schedules.backfill(
        before.name,
        start=instant(wanted.start, "start", before.definition.zone),
        end=instant(wanted.end, "end", before.definition.zone),
        rate=wanted.rate,
        dry_run=wanted.dry_run,
    )
    if not wanted.dry_run:
        await call.audit("schedule.backfill", before.name, None, msgspec.to_builtins(done))
    return answer(done)


async def rollback_schedule(call: Call) -> Answer:
    wanted: Rollback = call.body
    name = call.params["name"]
    revisions = await call.client.schedules.history(name)
    call.check_seen(revisions[0].target, "schedule", name)
    chosen = await call.client.schedules.former(name, wanted.generation)
    call.check_target(chosen.target)  # it may have gone elsewhere
    before = await call.client.schedules.get(name)  # None: it was removed, and comes back
    view = await call.client.schedules.rollback(name, chosen.generation, by=call.who)
    await _audit(call, "schedule.rollback", name, before, view)
    return await _told(call, view)


async def _audit(call: Call, what: str, name: str, before: ScheduleView | None, after: ScheduleView | None) -> None:
    was, now = of_schedule(before), of_schedule(after)
    if was != now:  # an edit that finds everything as it should be is none
        await call.audit(what, name, *changes(was, now))


_NAME: Final = "/v1/schedules/{name}"
_BODY: Final = ("too-large", "content-type")
_CHANGE: Final = (*_BODY, "not-found", "conflict", "out-of-memory")
ROUTES: Final = (
    Route(
        "GET", "/v1/schedules", list_schedules, "read", "List schedules.", query=ListSchedules,
        answers={200: ScheduleList},
    ),
    Route(
        "POST", "/v1/schedules", add_schedule, "operate", "Add a schedule.", body=NewSchedule,
        answers={200: Schedule, 201: Schedule}, problems=(*_CHANGE, "idempotency"),
    ),
    Route(
        "POST", "/v1/schedules:preview", preview_schedule, "read", "The next runs of times that are not stored.",
        body=Preview, answers={200: Runs}, problems=_BODY,
    ),
    Route("GET", _NAME, get_schedule, "read", "Look at one schedule.", answers={200: Schedule}),
    Route(
        "PUT", _NAME, put_schedule, "operate", "Write a schedule, whatever was there before.", body=Fields,
        answers={200: Schedule, 201: Schedule}, problems=_CHANGE,
    ),
    Route(
        "PATCH", _NAME, edit_schedule, "operate", "Change some fields.", body=Edit, answers={200: Schedule},
        problems=_CHANGE,
    ),
    Route(
        "DELETE", _NAME, remove_schedule, "operate", "Remove a schedule and cancel its planned run.",
        answers={200: Removed}, problems=("conflict",),
    ),
    Route("GET", f"{_NAME}/history", schedule_history, "read", "Its revisions.", answers={200: History}),
    Route(
        "POST", f"{_NAME}/diff", diff_schedule, "read", "What an edit would change: field -> [before, after].",
        body=Fields, answers={200: dict[str, Any]}, problems=_BODY,
    ),
    Route(
        "POST", f"{_NAME}/pause", pause_schedule, "operate", "Let it rest.", body=PauseBody, answers={200: Schedule},
        problems=_CHANGE,
    ),
    Route(
        "POST", f"{_NAME}/resume", resume_schedule, "operate", "Go on after a pause.", answers={200: Schedule},
        problems=_CHANGE,
    ),
    Route(
        "POST", f"{_NAME}/trigger", trigger_schedule, "operate", "Run it now, whatever its times say.", body=Trigger,
        answers={201: Put}, problems=(*_CHANGE, "idempotency"),
    ),
    Route(
        "POST", f"{_NAME}/backfill", backfill_schedule, "operate", "Run what was planned in a past range.",
        body=Backfill, answers={200: Backfilled}, problems=_CHANGE,
    ),
    Route(
        "POST", f"{_NAME}/rollback", rollback_schedule, "operate", "Back to a former revision.", body=Rollback,
        answers={200: Schedule}, problems=_CHANGE,
    ),
)  # fmt: skip
