"""`/v1/schedules`: recurring work, as it is posted and answered."""

import asyncio
import time
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from ..client.schedules import AddOutcome, OnExisting
from ..config.config import Config
from ..model.audit import changes, of_schedule
from ..model.errors import InvalidInput
from ..model.limits import LAST_SHOWN_MS, SCHEDULES_A_CALL
from ..model.schedule.definition import Definition, PauseMode, check_specs
from ..model.schedule.input import local_ms
from ..model.schedule.view import SAMPLE, Backfilled, Finding, ScheduleView, lint, revision_as_dict
from ..model.schedule.zone import zone
from ..model.targets.names import check_target
from ..model.times import timeout_ms
from ..node.schedule_lint import Terms, runs_ahead, terms_of, with_outlook
from ..store.records import KeptAnswer
from .asgi import Answer, Problem, answer, problem_of
from .auth import check_lane
from .routes import Call, Route, no_such
from .tasks import Moment, Put, once

Texts = str | list[str]


class Times(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`cron`, `every` and `after_end` are combined: it runs when any of them is due."""

    cron: Texts | UnsetType | None = UNSET
    every: Texts | UnsetType | None = UNSET
    after_end: str | UnsetType | None = UNSET
    timezone: str | UnsetType = UNSET
    exclude: Texts | UnsetType | None = UNSET
    start: Moment | UnsetType | None = UNSET
    end: Moment | UnsetType | None = UNSET
    dst_gap: str | UnsetType = UNSET
    dst_overlap: str | UnsetType = UNSET


class Preview(Times, forbid_unknown_fields=True, kw_only=True, rename={"from_": "from"}):
    """`name` decides the value of H; `from` is the start, now if it is left out. `after` is its old name.

    With a `target`, the answer says how long one run may take, and whether that exceeds the interval.
    """

    name: str = "preview"
    count: int = 10
    from_: Moment | None = None
    after: Moment | None = None
    target: str | UnsetType = UNSET
    retry: str | dict[str, Any] | UnsetType | None = UNSET
    retries: int | UnsetType | None = UNSET
    timeout: str | UnsetType | None = UNSET
    overlap: str | UnsetType = UNSET


class Fields(Times, forbid_unknown_fields=True, kw_only=True):
    """All settings of a schedule."""

    target: str | UnsetType = UNSET
    payload: Any = UNSET
    max_runs: int | UnsetType | None = UNSET
    lane: str | UnsetType | None = UNSET
    retry: str | dict[str, Any] | UnsetType | None = UNSET
    retries: int | UnsetType | None = UNSET
    timeout: str | UnsetType | None = UNSET
    misfire: str | UnsetType = UNSET
    grace: str | UnsetType = UNSET
    overlap: str | UnsetType = UNSET
    jitter: str | UnsetType | None = UNSET
    spread: str | UnsetType | None = UNSET
    pinned: bool | UnsetType = UNSET
    note: str | UnsetType = UNSET
    source: str | UnsetType = UNSET


class NewSchedule(Fields, forbid_unknown_fields=True, kw_only=True):
    """If the name is taken: `reject` the request, `keep` the existing schedule, or `replace` it."""

    name: str
    on_conflict: OnExisting = "reject"


class NamedFields(Fields, forbid_unknown_fields=True, kw_only=True):
    """A schedule of a batch."""

    name: str


class NewSchedules(msgspec.Struct, forbid_unknown_fields=True):
    """Up to 100 schedules, each name once; `on_conflict` is that of a single one, for all of them."""

    schedules: list[NamedFields]
    on_conflict: OnExisting = "reject"


class Names(msgspec.Struct, forbid_unknown_fields=True):
    """Up to 100 names of schedules."""

    names: list[str]


class ListSchedules(msgspec.Struct, frozen=True):
    limit: int = 50
    cursor: str | None = None


class Longest(msgspec.Struct):
    """How long one run may take if every attempt times out and every wait is the longest."""

    ms: int
    sum: str


class Schedule(msgspec.Struct):
    """A schedule: its definition, its next three runs, its last ones. Times are ISO 8601 in its own zone.

    `cron`, `every` and `after_end` are there if they were given. `specs` is the old name of all three together.

    `worst_case` and `findings` (likely mistakes) use the settings of the node. Lists and batches leave both out.
    """

    name: str
    state: str
    generation: int
    specs: list[str]
    timezone: str
    target: str
    next: list[str]
    runs: int
    not_run: dict[str, int]
    last_runs: list[dict[str, Any]]
    running_since: str | None
    changed: dict[str, Any]
    cron: list[str] | UnsetType = UNSET
    every: list[str] | UnsetType = UNSET
    after_end: str | UnsetType = UNSET
    payload: Any = None
    worst_case: Longest | UnsetType = UNSET
    findings: list[Finding] | UnsetType = UNSET


class ScheduleList(msgspec.Struct):
    """Unordered; `next` is the cursor of the next page, null at the end."""

    schedules: list[Schedule]
    next: str | None


class AddedSchedule(Schedule, kw_only=True):
    """A schedule of a batch, and whether it was `created`, `kept` or `replaced`."""

    outcome: str


class AddedSchedules(msgspec.Struct):
    """In the order of the request."""

    schedules: list[AddedSchedule]


class FoundSchedules(msgspec.Struct):
    """The schedules that exist, with `worst_case` and `findings`: without those of the last ones if the search for the
    first took longer than two seconds."""

    schedules: list[Schedule]


class Edit(Fields, forbid_unknown_fields=True):
    """Fields that are left out stay; `cron`, `every` and `after_end` each count on their own. null removes a field.

    With `generation` it is a conflict if the schedule was edited since that one.
    """

    generation: int | None = None


class PauseBody(msgspec.Struct, forbid_unknown_fields=True, rename={"for_": "for"}):
    """`drop` leaves out runs that fall into the pause; with `hold` the misfire rule decides at its end."""

    reason: str = ""
    until: Moment | None = None
    for_: str | None = None
    mode: PauseMode = "drop"


class Trigger(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None


class Backfill(msgspec.Struct, forbid_unknown_fields=True):
    """Runs planned in [start, end) that have passed; `rate` is runs per second."""

    start: Moment
    end: Moment
    rate: float | None = None
    dry_run: bool = False


class Rollback(msgspec.Struct, forbid_unknown_fields=True):
    """The former revision to restore; the last one if none is given."""

    generation: int | None = None


class Removed(msgspec.Struct):
    name: str
    outcome: str


class Runs(msgspec.Struct):
    """The next runs in the schedule's zone, and likely mistakes."""

    runs: list[str]
    warnings: list[str]
    worst_case: Longest | UnsetType = UNSET


class History(msgspec.Struct):
    """Revisions, the current one first."""

    revisions: list[dict[str, Any]]


def given(body: Times, zone: str, leave: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the given fields for `define` and `edit`, instants in milliseconds; `zone` is the default zone."""
    values = {name: getattr(body, name) for name in body.__struct_fields__ if name not in leave}
    fields = {name: value for name, value in values.items() if value is not UNSET}
    for name in ("start", "end"):
        if fields.get(name) is not None:
            fields[name] = instant(fields[name], name, fields.get("timezone", zone))
    return fields


def instant(moment: Moment, field: str, zone: str | None = None) -> int:
    """Return an instant in milliseconds; raise InvalidInput if it lies outside all calendars.

    A time without an offset is in the zone; without a zone it is refused.
    """
    try:
        at_ms = local_ms(moment, zone, field)
    except OverflowError:
        raise InvalidInput(f"{field}: {str(moment)[:80]!r} lies outside of the calendar") from None
    if not 0 <= at_ms < 1 << 45:
        raise InvalidInput(f"{field}: {str(moment)[:80]!r} lies outside of the calendar")
    return at_ms


MOST_RUNS: Final = 1_000
LOOK_S: Final = 2.0
"""Seconds that a preview searches for runs."""


# -- reading ---------------------------------------------------------------------------------------------------


async def list_schedules(call: Call) -> Answer:
    query: ListSchedules = call.query
    if not 1 <= query.limit <= 1000:
        raise Problem("invalid", f"limit is {query.limit}; it must lie between 1 and 1000")
    page = await call.client.schedules.list(limit=query.limit, cursor=query.cursor)
    seen = [view.as_dict() for view in page.schedules if call.key.sees(view.definition.target)]
    return answer({"schedules": seen, "next": page.next})


async def get_schedule(call: Call) -> Answer:
    return await _view_answer(call, await _known(call))


async def _view_answer(call: Call, view: ScheduleView, status: int = 200) -> Answer:
    """Answer with one schedule and its worst case by this node's settings; searched in a thread."""
    now_ms = call.client.store.clock.now_ms()
    seen = await asyncio.to_thread(with_outlook, view, now_ms, call.node.config)
    return answer(seen.as_dict(), status)


async def find_schedules(call: Call) -> Answer:
    """Answer with many schedules at once. Those that the key may not see are left out, as unknown ones are."""
    names: list[str] = call.body.names
    _check_count(len(names))
    async with call.app.previewing:  # one at a time: a hundred payloads may take some megabytes
        found = await call.client.schedules.get_many(names)
        seen = [view for view in found.values() if call.key.sees(view.definition.target)]
        shown = await asyncio.to_thread(_with_outlooks, seen, call.client.store.clock.now_ms(), call.node.config)
    return answer({"schedules": [view.as_dict() for view in shown]})


def _with_outlooks(views: list[ScheduleView], now_ms: int, config: Config) -> list[ScheduleView]:
    """Return the views with their outlooks, as many as there is time for: others wait for a preview."""
    until_s = time.monotonic() + LOOK_S
    return [with_outlook(view, now_ms, config) if time.monotonic() < until_s else view for view in views]


def _check_count(count: int) -> None:
    if count > SCHEDULES_A_CALL:
        raise Problem("invalid", f"these are {count} schedules; a request takes at most {SCHEDULES_A_CALL}")


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
    """Preview of a schedule that is not stored."""
    wanted: Preview = call.body
    if not 1 <= wanted.count <= MOST_RUNS:
        raise Problem("invalid", f"count is {wanted.count}; it must lie between 1 and {MOST_RUNS}")
    home = call.client.schedules.timezone
    fields = given(wanted, home, leave=("name", "count", "from_", "after"))
    now_ms = call.client.store.clock.now_ms()
    begin = wanted.after if wanted.from_ is None else wanted.from_
    if begin is not None:
        now_ms = instant(begin, "from", fields.get("timezone", home))
    definition = call.client.schedules.define(wanted.name, **{"target": "null:", **fields})
    terms = None if wanted.target is UNSET else _terms(call, definition)
    definition = msgspec.structs.replace(definition, anchor_ms=now_ms - now_ms % 1000)
    check_specs(definition)
    async with call.app.previewing:
        # Search in a thread: some schedules take long to evaluate, and the node must keep firing meanwhile.
        return answer(await asyncio.to_thread(_look_ahead, definition, now_ms, wanted.count, terms))


def _terms(call: Call, definition: Definition) -> Terms:
    check_target(definition.target)
    call.check_target(definition.target)
    _ = definition.overlap_rule
    return terms_of(definition, call.node.config)


def _look_ahead(definition: Definition, now_ms: int, count: int, terms: Terms | None) -> Runs:
    """Return the requested runs, and further ones for warnings if there is time."""
    found, unfinished = runs_ahead(definition, now_ms, max(count, SAMPLE), LOOK_S)
    times = zone(definition.zone)
    runs = [times.datetime(one).isoformat() for one in found[:count] if one < LAST_SHOWN_MS]
    worst = None if terms is None else terms.worst_case
    held = None if definition.overlap == "allow" else worst
    warnings = [one.message for one in lint(definition.slots.recurrence, now_ms, worst=held, runs=found)]
    if unfinished and len(found) < count:
        warnings.append(f"these times are slow to find: the search stopped after {LOOK_S:g} s")
    return Runs(runs, warnings, UNSET if worst is None else Longest(worst.ms, worst.text))


async def diff_schedule(call: Call) -> Answer:
    before = await _known(call)
    async with call.app.previewing:
        changes = await call.client.schedules.diff(before.name, **given(call.body, before.definition.zone))
    return answer(msgspec.to_builtins(changes))


# -- writing ---------------------------------------------------------------------------------------------------


async def add_schedule(call: Call) -> Answer:
    posted: NewSchedule = call.body

    async def work(_id: str | None, earlier: KeptAnswer | None) -> Answer:
        del _id
        existing: OnExisting = "keep" if earlier is not None and posted.on_conflict == "reject" else posted.on_conflict
        fields = given(posted, call.client.schedules.timezone, leave=("name", "on_conflict"))
        return await _write(call, posted.name, fields, existing)

    return await once(call, work)


async def put_schedule(call: Call) -> Answer:
    """Replace the schedule with the one in the body."""
    return await _write(call, call.params["name"], given(call.body, call.client.schedules.timezone), "replace")


async def add_schedules(call: Call) -> Answer:
    """Add many schedules. All are checked before the first is written."""
    posted: NewSchedules = call.body
    _check_count(len(posted.schedules))
    definitions: dict[str, Definition] = {}
    for one in posted.schedules:
        if one.name in definitions:
            raise Problem("invalid", f"the name {one.name[:200]!r} is there more than once")
        try:
            fields = given(one, call.client.schedules.timezone, leave=("name",))
            definitions[one.name] = _definition(call, one.name, fields)
        except (InvalidInput, Problem) as error:
            problem = error if isinstance(error, Problem) else problem_of(error)
            name = repr(one.name[:200])
            if name not in problem.detail:  # the request has many
                problem.detail = f"schedule {name}: {problem.detail}"
            raise problem from None
    added = await _write_all(call, list(definitions.values()), posted.on_conflict)
    return answer({"schedules": [{**view.as_dict(), "outcome": outcome} for view, outcome in added]})


async def _write(call: Call, name: str, fields: dict[str, Any], on_conflict: OnExisting) -> Answer:
    [(view, outcome)] = await _write_all(call, [_definition(call, name, fields)], on_conflict)
    return await _view_answer(call, view, 201 if outcome == "created" else 200)


def _definition(call: Call, name: str, fields: dict[str, Any]) -> Definition:
    """Return the definition, if this key and this node take it."""
    definition = call.client.schedules.define(name, **{**fields, "by": call.who})
    call.check_target(definition.target)
    check_lane(call.key, definition.lane)
    call.node.config.check_timeout(definition.target, definition.timeout_ms)
    return definition


async def _write_all(
    call: Call, definitions: list[Definition], on_conflict: OnExisting
) -> list[tuple[ScheduleView, AddOutcome]]:
    known = await call.client.schedules.get_many([one.name for one in definitions])
    for name, before in known.items():
        if not call.key.sees(before.definition.target):
            raise Problem("conflict", f"the name {name[:200]!r} is taken")
    added = await call.client.schedules.add_many(definitions, on_conflict=on_conflict)
    for view, outcome in added:
        if outcome != "kept":
            what = "schedule.add" if outcome == "created" else "schedule.edit"
            await _audit(call, what, view.name, known.get(view.name), view)
    return added


async def edit_schedule(call: Call) -> Answer:
    edit: Edit = call.body
    before = await _known(call)
    fields = given(edit, before.definition.zone, leave=("generation",))
    if "target" in fields:
        call.check_target(fields["target"])
    timeout = fields.get("timeout", before.definition.timeout_ms)
    call.node.config.check_timeout(
        fields.get("target", before.definition.target), timeout_ms(timeout) if isinstance(timeout, str) else timeout
    )
    view = await call.client.schedules.edit(before.name, generation=edit.generation, **{**fields, "by": call.who})
    await _audit(call, "schedule.edit", before.name, before, view)
    return await _view_answer(call, view)


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
    return await _view_answer(call, view)


async def resume_schedule(call: Call) -> Answer:
    before = await _known(call)
    view = await call.client.schedules.resume(before.name, by=call.who)
    await _audit(call, "schedule.resume", before.name, before, view)
    return await _view_answer(call, view)


async def trigger_schedule(call: Call) -> Answer:
    wanted: Trigger = call.body
    before = await _known(call)

    async def work(_id: str | None, earlier: KeptAnswer | None) -> Answer:
        del _id
        if earlier is not None:  # a run has no caller's id by which to recognize it
            raise Problem(
                "conflict", "this request was sent before and its response lost: it may have run. Check, then decide"
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
    call.check_target(chosen.target)  # the former revision may have had another target
    before = await call.client.schedules.get(name)  # None: it was removed and is restored
    view = await call.client.schedules.rollback(name, chosen.generation, by=call.who)
    await _audit(call, "schedule.rollback", name, before, view)
    return await _view_answer(call, view)


async def _audit(call: Call, what: str, name: str, before: ScheduleView | None, after: ScheduleView | None) -> None:
    was, now = of_schedule(before), of_schedule(after)
    if was != now:  # an edit that changes nothing is not recorded
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
        "POST", "/v1/schedules:batch", add_schedules, "operate", "Add many schedules.", body=NewSchedules,
        answers={200: AddedSchedules}, problems=_CHANGE,
    ),
    Route(
        "POST", "/v1/schedules:find", find_schedules, "read", "Show many schedules.", body=Names,
        answers={200: FoundSchedules}, problems=_BODY,
    ),
    Route(
        "POST", "/v1/schedules:preview", preview_schedule, "read", "Preview times that are not stored.",
        body=Preview, answers={200: Runs}, problems=_BODY,
    ),
    Route("GET", _NAME, get_schedule, "read", "Show one schedule.", answers={200: Schedule}),
    Route(
        "PUT", _NAME, put_schedule, "operate", "Replace a schedule, or add it.", body=Fields,
        answers={200: Schedule, 201: Schedule}, problems=_CHANGE,
    ),
    Route(
        "PATCH", _NAME, edit_schedule, "operate", "Change a schedule.", body=Edit, answers={200: Schedule},
        problems=_CHANGE,
    ),
    Route(
        "DELETE", _NAME, remove_schedule, "operate", "Remove a schedule and cancel its planned run.",
        answers={200: Removed}, problems=("conflict",),
    ),
    Route("GET", f"{_NAME}/history", schedule_history, "read", "List its revisions.", answers={200: History}),
    Route(
        "POST", f"{_NAME}/diff", diff_schedule, "read", "Show an edit's changes: field -> [before, after].",
        body=Fields, answers={200: dict[str, Any]}, problems=_BODY,
    ),
    Route(
        "POST", f"{_NAME}/pause", pause_schedule, "operate", "Pause runs.", body=PauseBody, answers={200: Schedule},
        problems=_CHANGE,
    ),
    Route(
        "POST", f"{_NAME}/resume", resume_schedule, "operate", "Resume a paused schedule.", answers={200: Schedule},
        problems=_CHANGE,
    ),
    Route(
        "POST", f"{_NAME}/trigger", trigger_schedule, "operate", "Run a schedule now.", body=Trigger,
        answers={201: Put}, problems=(*_CHANGE, "idempotency"),
    ),
    Route(
        "POST", f"{_NAME}/backfill", backfill_schedule, "operate", "Run the planned times of a past range.",
        body=Backfill, answers={200: Backfilled}, problems=_CHANGE,
    ),
    Route(
        "POST", f"{_NAME}/rollback", rollback_schedule, "operate", "Restore a former revision.", body=Rollback,
        answers={200: Schedule}, problems=_CHANGE,
    ),
)  # fmt: skip
