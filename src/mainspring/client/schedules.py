"""The calls of a client for schedules: `client.schedules.add(…)` and the others."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Unpack, cast

import msgspec

from ..model.errors import Conflict, InvalidInput, NotFound, StoreError, Unavailable
from ..model.ids import check_schedule_name, instant_text, occurrence_id
from ..model.limits import HORIZON_MS
from ..model.schedule.chain import first_of, link_to
from ..model.schedule.definition import (
    PEOPLES,
    Definition,
    PauseMode,
    SchedulePause,
    changes,
    check_definition,
    check_runs_left,
    same_schedule,
)
from ..model.schedule.input import ScheduleFields, define, edited_by, local_ms
from ..model.schedule.view import Backfilled, SchedulePage, ScheduleView, describe_changes, view_of
from ..model.schedule.zone import tz_version
from ..model.task import Handle
from ..model.times import Delay, When, check_horizon, delay_ms, instant_ms, is_delay
from ..store import schedules as kept
from ..store.job_queue import with_ends
from ..store.keys import partition_of
from ..store.schedules import ScheduleWrite, Seen, row_of, sketch_apart, with_called_off
from ..store.store import Store
from ..store.tasks.index import IdRow
from ..store.tasks.pages import PAGE_BYTES
from ..store.tasks.put import Widths
from ..store.tasks.put_ids import put_ids
from .client import check_reach

_TRIES: Final = 16
Make = Callable[[Seen, int], Definition | None]
"""Returns the definition to write, given the stored state and the time; None removes the schedule."""


class _Plan(NamedTuple):
    change: ScheduleWrite | None
    view: ScheduleView
    """State after the write; for a removed schedule, its last state."""


class Writer:
    """Writes schedules of one namespace."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._open_store = store

    @property
    def _store(self) -> Store:
        return self._open_store()

    async def write(self, makes: dict[str, Make], *, missing_ok: bool = False) -> dict[str, ScheduleView]:
        """Retry until no other writer interferes: each attempt starts from the stored state."""
        for name in makes:
            check_schedule_name(name)
        views: dict[str, ScheduleView] = {}
        skipped: dict[str, int] = {}
        unsure: dict[str, Definition | None] = {}
        todo = list(makes)
        for attempt in range(_TRIES):
            seen = await with_called_off(self._store, await kept.see(self._store, todo))
            now_ms = await self._store.fresh_ms()
            wanted: dict[str, Seen] = {}
            for name, one in zip(todo, seen, strict=True):
                if name in unsure and one.definition == unsure[name]:
                    # Written, and the reply was lost. For a removed schedule, return its last state.
                    if one.definition is not None:
                        views[name] = view_of(one.definition, one.link, now_ms)
                elif one.definition is not None or not missing_ok:
                    wanted[name] = one
            pending = await self._decide(makes, wanted, views, skipped, now_ms)
            todo = await self._send(pending, views, skipped, unsure)
            if not todo:
                return views
            await asyncio.sleep(0 if attempt < 2 else 0.01 * attempt)
        raise Conflict(f"schedule {todo[0]!r} keeps changing; try again")

    async def _decide(
        self,
        makes: dict[str, Make],
        wanted: dict[str, Seen],
        views: dict[str, ScheduleView],
        skipped: dict[str, int],
        now_ms: int,
    ) -> list[tuple[ScheduleWrite, ScheduleView]]:
        """Plan the writes, in threads: some schedules take long to evaluate, and the node must keep firing."""
        made = await asyncio.to_thread(lambda: {name: makes[name](one, now_ms) for name, one in wanted.items()})
        homes = {name: await self._at_home(name, wanted[name], made[name]) for name in made}
        plans = await asyncio.to_thread(
            lambda: {name: _plan(name, homes[name], made[name], now_ms, skipped.get(name)) for name in made}
        )
        views |= {name: plan.view for name, plan in plans.items() if plan.change is None}
        return [(plan.change, plan.view) for plan in plans.values() if plan.change is not None]

    async def _at_home(self, name: str, seen: Seen, definition: Definition | None) -> Seen:
        """Point from the partition of its name to a schedule with a lane, which is stored in the lane's partition."""
        if definition is None or (seen.definition is None and definition.lane is None and not seen.pointed):
            return seen
        if seen.definition is not None:
            if seen.definition.lane != definition.lane:
                raise InvalidInput(f"schedule {name!r}: its lane cannot be changed; remove it, and add it again")
            return seen
        home = partition_of(definition.lane or name, len(self._store.keys))
        elsewhere = home != partition_of(name, len(self._store.keys))
        wanted = kept.point_to(definition.lane) if definition.lane is not None and elsewhere else b""
        if wanted != seen.pointed and not await kept.point(self._store, name, seen.pointed, wanted):
            return seen  # another caller did: the write will find out
        [there] = await kept.see_at(self._store, [(home, name)])
        return there._replace(pointed=wanted)

    async def _send(
        self,
        pending: list[tuple[ScheduleWrite, ScheduleView]],
        views: dict[str, ScheduleView],
        skipped: dict[str, int],
        unsure: dict[str, Definition | None],
    ) -> list[str]:
        """Return the names that have to be retried."""
        again: list[str] = []
        if not pending:
            return again
        failure: StoreError | None = None
        answers = await kept.write(self._store, [change for change, _ in pending])
        for (change, view), written in zip(pending, answers, strict=True):
            if isinstance(written, StoreError):
                # Its reply may be lost: the next read shows whether it was written.
                failure = written if not (isinstance(written, Unavailable) and written.sent) else failure
                unsure[change.name] = change.definition
                if change.definition is None:
                    views[change.name] = view
                again.append(change.name)
            elif written == "ok":
                views[change.name] = view
                if change.definition is None and change.seen.pointed:
                    await kept.point(self._store, change.name, change.seen.pointed, b"")
            else:
                if written == "taken" and change.link is not None:
                    skipped[change.name] = change.link.planned_ms
                again.append(change.name)
        if failure is not None:
            raise failure
        return again


def stamped(definition: Definition, seen: Seen, now_ms: int) -> Definition:
    anchor_ms = definition.anchor_ms
    if seen.definition is not None and seen.definition.specs == definition.specs:
        anchor_ms = seen.definition.anchor_ms
    return msgspec.structs.replace(
        definition,
        generation=seen.generation + 1,
        at_ms=now_ms,
        tz_version=tz_version(),
        anchor_ms=now_ms - now_ms % 1000 if anchor_ms is None else anchor_ms,
    )


def nothing(_seen: Seen, _now_ms: int) -> None:
    """Return None, the definition that removes a schedule."""


def _plan(name: str, seen: Seen, definition: Definition | None, now_ms: int, behind_ms: int | None) -> _Plan:
    """Return the write that leads to the definition and the state after it; no write if nothing changes."""
    if definition is not None and definition is seen.definition:
        return _Plan(None, view_of(definition, seen.link, now_ms))
    if definition is None:
        if seen.definition is None:
            raise NotFound(f"there is no schedule {name!r}")
        return _Plan(ScheduleWrite(name, seen, None, None, None), view_of(seen.definition, None, now_ms))
    next_ms, state = first_of(definition, seen.definition, seen.link, now_ms)
    if behind_ms is not None and next_ms is not None and next_ms <= behind_ms:
        next_ms = definition.slots.after(behind_ms)  # that one ran already
    link = link_to(definition, next_ms, state)
    change = ScheduleWrite(name, seen, definition, link, row_of(definition, link, now_ms))
    return _Plan(change, view_of(definition, link, now_ms))


BACKFILL_AT_MOST: Final = 100_000
BACKFILL_BATCH: Final = 1_000


class RunsBeside:
    """Puts runs without advancing their chains."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._open_store = store
        self._asked_by: Callable[[Handle, str | None], Handle[Coroutine[Any, Any, Any]]] | None = None
        """`Client._asked_by`: lets handles of triggered runs ask the client."""
        self._widths = Widths()

    @property
    def _store(self) -> Store:
        return self._open_store()

    @property
    def namespace(self) -> str:
        """The namespace of the schedules."""
        return self._store.keys.namespace

    async def trigger(self, name: str, *, after: Delay | None = None) -> Handle[Coroutine[Any, Any, Any]]:
        """Run a schedule now, or `after` a delay, whatever its times say and also while it is paused.

        Its planned runs stay as they are. Returns a handle, as `put` does. Raises NotFound.
        """
        [seen] = await kept.see(self._store, [check_schedule_name(name)])
        definition = self._current(name, seen)
        now_ms = await self._store.fresh_ms()
        due_ms = now_ms + (0 if after is None else delay_ms(after))
        task_id = f"{name}@{instant_text(due_ms)}.{secrets.token_hex(3)}"
        await self._put_apart(seen.partition, definition, [(task_id, due_ms, due_ms)], now_ms)
        handle = Handle[Coroutine[Any, Any, Any]](task_id, due_ms)
        # Not the lane "": without a lane the run is in the partition of its schedule, not of its own id.
        return handle if self._asked_by is None else self._asked_by(handle, definition.lane)

    async def backfill(
        self,
        name: str,
        *,
        start: When,
        end: When,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Backfilled:
        """Run what was planned in [start, end) and has passed, as if it had run then, at most `rate` a second.

        The runs have the ids of those planned times: a second call finds them and puts nothing. Times without an offset
        are of the schedule's zone. `dry_run` only counts. `progress` gets how many are done, and of how many, after
        each thousand. Returns how many were planned, put and known. Raises NotFound and InvalidInput.
        """
        if rate is not None and not rate > 0:
            raise InvalidInput(f"rate is {rate}; give more than 0 runs a second")
        [seen] = await kept.see(self._store, [check_schedule_name(name)])
        definition = self._current(name, seen)
        start_ms, end_ms = (local_ms(one, definition.zone, field) for one, field in ((start, "start"), (end, "end")))
        if end_ms < start_ms:
            raise InvalidInput("the end of the range lies before its start")
        now_ms = await self._store.fresh_ms()
        # Occurrences still ahead belong to the chain.
        until_ms = min(end_ms, now_ms + 1)
        if seen.link is not None and seen.link.planned_ms:
            until_ms = min(until_ms, seen.link.planned_ms)
        # Search in a thread: some schedules take long to evaluate, and a node must keep firing meanwhile.
        between = definition.slots.recurrence.between
        slots = await asyncio.to_thread(between, start_ms, until_ms, BACKFILL_AT_MOST + 1)
        if len(slots) > BACKFILL_AT_MOST:
            raise InvalidInput(f"more than {BACKFILL_AT_MOST} runs lie in this range; give a shorter one")
        edges = (slots[0], slots[-1]) if slots else (None, None)
        if dry_run or not slots:
            return Backfilled(len(slots), 0, 0, *edges)
        step_ms = 0.0 if rate is None else 1000 / rate
        if step_ms * len(slots) > HORIZON_MS:
            raise InvalidInput(f"rate is {rate:g}: {len(slots)} runs would take more than ten years; give a higher one")
        rows = [(occurrence_id(name, slot), slot, now_ms + round(i * step_ms)) for i, slot in enumerate(slots)]
        created = 0
        for first in range(0, len(rows), BACKFILL_BATCH):
            some = rows[first : first + BACKFILL_BATCH]
            created += await self._put_apart(seen.partition, definition, some, now_ms)
            if progress is not None:
                progress(first + len(some), len(rows))
        return Backfilled(len(slots), created, len(slots) - created, *edges)

    async def _put_apart(
        self, number: int, definition: Definition, runs: Sequence[tuple[str, int, int]], now_ms: int
    ) -> int:
        """Put runs (id, planned, due) without advancing the chain; return how many were new."""
        rows = []
        for task_id, planned_ms, due_ms in runs:
            made = sketch_apart(definition, task_id, planned_ms, due_ms)
            rows.append(IdRow(made.idh, *made.put(now_ms), due_ms))
        answer = (await put_ids(self._store, {number: rows}, self._widths, now_ms=now_ms))[number]
        if isinstance(answer, StoreError):
            raise answer
        return len(rows) - len(answer)

    @staticmethod
    def _current(name: str, seen: Seen, generation: int | None = None) -> Definition:
        if seen.definition is None:
            raise NotFound(f"there is no schedule {name!r}")
        if generation is not None and seen.generation != generation:
            raise Conflict(f"schedule {name!r} has generation {seen.generation} by now, not {generation}; look again")
        return seen.definition


OnExisting = Literal["reject", "keep", "replace"]
AddOutcome = Literal["created", "kept", "replaced"]

AT_ONCE: Final = 256
"""Schedules written in one round trip."""

_PLACE: Final = re.compile(r"(\d{1,4})\.(\d{1,20})")
"""A partition, and the cursor of the scan of its hash."""


class Schedules(RunsBeside):
    """All calls on schedules of one namespace."""

    def __init__(self, store: Callable[[], Store], timezone: str = "UTC") -> None:
        super().__init__(store)
        self.timezone = timezone
        """Default time zone of schedules."""
        self._writer = Writer(store)

    # -- writing ---------------------------------------------------------------------------------------

    async def add(
        self, name: str, *, on_conflict: OnExisting = "reject", **fields: Unpack[ScheduleFields]
    ) -> ScheduleView:
        """Add a schedule: `add("nightly", cron="0 2 * * *", target="command:backup", timezone="Europe/Paris")`.

        - `cron` (a line or several), `every` and `after_end` (texts such as "30s", or timedeltas) add up; `target` is
          needed.
        - Further fields: payload, timezone, exclude, start, end, max_runs, overlap, misfire, grace, jitter, spread,
          lane, retry, retries, timeout, dst_gap, dst_overlap, pinned, note, by. docs/schedules.md explains each.
        - `on_conflict`: if the name is taken, "reject" raises Conflict, "keep" changes nothing, "replace" edits. A
          pause and a pin outlive a replacement.

        Returns the schedule as stored. Raises InvalidInput for a wrong field, or if it would never run.
        """
        [(view, _)] = await self.add_many([self.define(name, **fields)], on_conflict=on_conflict)
        return view

    def define(self, name: str, **fields: Any) -> Definition:
        """Return a definition for `add_many`; the default time zone is this client's."""
        return define(name, **{"timezone": self.timezone, **fields})

    async def add_many(
        self, definitions: Iterable[Definition], *, on_conflict: OnExisting = "reject"
    ) -> list[tuple[ScheduleView, AddOutcome]]:
        """Add any number of schedules in batches. An invalid one stops the call; batches before it are stored."""
        if on_conflict not in ("reject", "keep", "replace"):
            raise InvalidInput(f"on_conflict {on_conflict!r}: use reject, keep or replace")
        added: list[tuple[ScheduleView, AddOutcome]] = []
        some: list[Definition] = []
        names: set[str] = set()
        for definition in definitions:
            if definition.name in names or len(some) == AT_ONCE:
                added += await self._add_some(some, on_conflict)
                some, names = [], set()
            some.append(definition)
            names.add(definition.name)
        return added + (await self._add_some(some, on_conflict) if some else [])

    async def _add_some(
        self, definitions: Sequence[Definition], on_conflict: OnExisting
    ) -> list[tuple[ScheduleView, AddOutcome]]:
        outcomes: dict[str, AddOutcome] = {}
        wanted = {definition.name: definition for definition in definitions}
        now_ms = await self._store.fresh_ms()  # one time for all, so that equal schedules share the result
        # Search in a thread: some schedules take long to evaluate, and the node must keep firing meanwhile.
        await asyncio.to_thread(lambda: [check_definition(one, now_ms) for one in definitions])
        await check_reach(self._store, {one.target for one in definitions})

        def make(definition: Definition, seen: Seen, now_ms: int) -> Definition | None:
            if seen.definition is None:
                outcomes[definition.name] = "created"
                return stamped(definition, seen, now_ms)
            if on_conflict == "reject":
                raise Conflict(f"a schedule {definition.name!r} exists (generation {seen.generation}); edit it instead")
            if definition.paused is None:  # only resume ends a pause
                definition = msgspec.structs.replace(definition, paused=seen.definition.paused)
            definition = msgspec.structs.replace(definition, pinned=definition.pinned or seen.definition.pinned)
            same = same_schedule(seen.definition, definition) and seen.definition.source == definition.source
            if on_conflict == "keep" or same:
                outcomes[definition.name] = "kept"
                return seen.definition
            outcomes[definition.name] = "replaced"
            return stamped(check_runs_left(definition, _runs(seen)), seen, now_ms)

        views = await self._writer.write({name: partial(make, one) for name, one in wanted.items()})
        return [(views[definition.name], outcomes[definition.name]) for definition in definitions]

    async def edit(self, name: str, *, generation: int | None = None, **fields: Unpack[ScheduleFields]) -> ScheduleView:
        """Change some fields of a schedule, at once: the planned run of the old generation is cancelled in the same
        step.

        Takes the fields of `add`. What is not given stays, each of `cron`, `every` and `after_end` for itself; None
        takes one away. With `generation` it is a Conflict if another caller has edited the schedule since that one.
        `pinned=True` keeps programs that declare the schedule from changing it. Returns the schedule as stored. Raises
        NotFound, Conflict and InvalidInput.
        """

        def make(seen: Seen, now_ms: int) -> Definition:
            current = self._current(name, seen, generation)
            edited = edited_by(current, {"by": "", "note": "", **fields})
            if same_schedule(current, edited):
                return current
            return _checked(edited, seen, now_ms)

        return (await self._writer.write({name: make}))[name]

    async def rewrite(self, definition: Definition, *, generation: int) -> ScheduleView:
        """Replace this generation by a whole definition; raise Conflict if there is another generation by now."""

        def make(seen: Seen, now_ms: int) -> Definition:
            self._current(definition.name, seen, generation)
            return _checked(definition, seen, now_ms)

        return (await self._writer.write({definition.name: make}))[definition.name]

    async def pause(
        self, name: str, *, reason: str = "", by: str = "", until: When | Delay | None = None, mode: PauseMode = "drop"
    ) -> ScheduleView:
        """Pause a schedule until `resume`, or `until` an instant or the end of a delay.

        `mode` says what becomes of runs that fall into the pause: "drop" leaves them out, "hold" applies the misfire
        rule at its end. Returns the schedule as stored. Raises NotFound and InvalidInput.
        """
        if mode not in ("drop", "hold"):
            raise InvalidInput(f"mode {mode!r}: use drop or hold")

        def make(seen: Seen, now_ms: int) -> Definition:
            current = self._current(name, seen)
            until_ms = _until_ms(until, now_ms)
            before = current.paused if current.paused_at(now_ms) else None
            planned_ms = 0 if seen.link is None else seen.link.planned_ms
            # An occurrence that is due but waits for the run before it also falls into the pause.
            due_ms = planned_ms if 0 < planned_ms <= now_ms else None
            paused = SchedulePause(now_ms, mode, until_ms, reason, by, due_ms)
            if before is not None:
                paused = msgspec.structs.replace(paused, at_ms=before.at_ms, due_ms=before.due_ms)
            return stamped(msgspec.structs.replace(current, paused=paused, by=by, note=reason), seen, now_ms)

        return (await self._writer.write({name: make}))[name]

    async def resume(self, name: str, *, by: str = "") -> ScheduleView:
        """End a pause; return the schedule as stored. Raises NotFound."""

        def make(seen: Seen, now_ms: int) -> Definition:
            current = self._current(name, seen)
            if current.paused is None:
                return current
            return stamped(msgspec.structs.replace(current, paused=None, by=by, note="resumed"), seen, now_ms)

        return (await self._writer.write({name: make}))[name]

    async def remove(self, name: str) -> bool:
        """Remove a schedule and cancel its planned run. Returns False if there is none of that name."""
        check_schedule_name(name)
        return name in await self._writer.write({name: nothing}, missing_ok=True)

    async def rollback(self, name: str, generation: int | None = None, *, by: str = "") -> ScheduleView:
        """Make a former revision the present one again: the last different one, or the one with this generation.

        A pause and a pin stay as they are. A removed schedule comes back as it was. Returns the schedule as stored.
        Raises NotFound if there is no such revision.
        """
        chosen = await self.former(name, generation)
        note = f"back to generation {chosen.generation}"

        def make(seen: Seen, now_ms: int) -> Definition:
            present = seen.definition or chosen
            revived = msgspec.structs.replace(chosen, by=by, note=note, paused=present.paused, pinned=present.pinned)
            return _checked(revived, seen, now_ms)

        return (await self._writer.write({name: make}))[name]

    # -- reading ---------------------------------------------------------------------------------------

    async def get(self, name: str) -> ScheduleView | None:
        """Return the view of a schedule, or None if there is no schedule of that name."""
        return (await self.get_many([name])).get(name)

    async def get_many(self, names: Sequence[str]) -> dict[str, ScheduleView]:
        """Return those of these schedules that exist, by name."""
        found: dict[str, ScheduleView] = {}
        for first in range(0, len(names), AT_ONCE):
            some = names[first : first + AT_ONCE]
            now_ms = await self._store.fresh_ms()
            there = await kept.see(self._store, [check_schedule_name(name) for name in some])
            views = await _views(await with_ends(self._store, there), now_ms)
            found |= {view.name: view for view in views}
        return found

    async def history(self, name: str) -> list[Definition]:
        """Return the revisions of a schedule, the present one first; of a removed one the last that it had. Raises
        NotFound.
        """
        present, former = await self._revisions(name)
        return former if present is None else [present, *former]

    async def former(self, name: str, generation: int | None = None) -> Definition:
        """Return what `rollback` would bring back. Raises NotFound."""
        present, former = await self._revisions(name)
        if generation is None:
            chosen = next((one for one in former if present is None or not _says_the_same(one, present)), None)
        else:
            chosen = next((one for one in former if one.generation == generation), None)
        if chosen is None:
            raise NotFound(
                f"schedule {name!r} has no former revision {'' if generation is None else generation}".rstrip()
            )
        return chosen

    async def _revisions(self, name: str) -> tuple[Definition | None, "list[Definition]"]:
        [seen] = await kept.see(self._store, [check_schedule_name(name)])
        # A removed schedule with a lane was in the lane's partition, and no pointer to it is left.
        where = range(len(self._store.keys)) if seen.definition is None else [seen.partition]
        former = await kept.revisions(self._store, where, name)
        if seen.definition is None and not former:
            raise NotFound(f"there is no schedule {name!r}")
        return seen.definition, former

    async def diff(self, name: str, **fields: Unpack[ScheduleFields]) -> dict[str, tuple[Any, Any]]:
        """Return what an `edit` with these fields would change: field -> (before, after). Nothing is written."""
        [seen] = await kept.see(self._store, [check_schedule_name(name)])
        current = self._current(name, seen)
        edited = check_runs_left(edited_by(current, fields), _runs(seen))
        await asyncio.to_thread(check_definition, edited, await self._store.fresh_ms())  # as in `_add_some`
        return describe_changes(current, edited)

    # -- many (last: from here on `list` is a method) ------------------------------------------------------

    async def list(self, *, limit: int = 100, cursor: str | None = None) -> SchedulePage:
        """Return some schedules, unordered; pass `page.next` as cursor for the next page.

        A page may hold a few more than `limit`, and fewer if their payloads are large.
        """
        partition, place = _read_cursor(cursor, len(self._store.keys))
        found: list[ScheduleView] = []
        size = 0
        while partition < len(self._store.keys) and len(found) < limit and size < PAGE_BYTES:
            place, page = await kept.page(self._store, partition, place, limit - len(found))
            views = await _views(await with_ends(self._store, page), await self._store.fresh_ms())
            for one in (view.definition for view in views):
                size += len(one.payload) + sum(map(len, (*one.specs, *one.exclude)))
            found += views
            partition += not place
        return SchedulePage(found, f"{partition}.{place}" if partition < len(self._store.keys) else None)

    async def all(self) -> AsyncIterator[ScheduleView]:
        """Yield every schedule, unordered."""
        cursor: str | None = None
        while True:
            page = await self.list(limit=500, cursor=cursor)
            for view in page.schedules:
                yield view
            cursor = page.next
            if cursor is None:
                return


async def _views(every: Iterable[Seen], now_ms: int) -> list[ScheduleView]:
    """Return views, in a thread, like every search for next runs."""
    there = [(seen.definition, seen.link) for seen in every if seen.definition is not None]
    return await asyncio.to_thread(lambda: [view_of(definition, link, now_ms) for definition, link in there])


def _checked(definition: Definition, seen: Seen, now_ms: int) -> Definition:
    """Return the definition that replaces the stored one, if it has a run left."""
    check_runs_left(check_definition(definition, now_ms), _runs(seen))
    return stamped(definition, seen, now_ms)


def _runs(seen: Seen) -> int:
    return 0 if seen.link is None else seen.link.state.runs


def _until_ms(until: When | Delay | None, now_ms: int) -> int | None:
    if until is None:
        return None
    if is_delay(until):
        until_ms = now_ms + delay_ms(until, field="until")
    else:
        until_ms = instant_ms(cast("When", until), field="until")
    if until_ms <= now_ms:
        raise InvalidInput("until lies in the past; the pause would be over before it begins")
    check_horizon(until_ms, now_ms, field="until")
    return until_ms


def _read_cursor(cursor: str | None, partitions: int) -> tuple[int, int]:
    if cursor is None:
        return 0, 0
    match = _PLACE.fullmatch(cursor)
    if match is None or int(match[1]) >= partitions or int(match[2]) >= 1 << 64:
        raise InvalidInput(f"cursor {cursor[:80]!r} is not one that list returned")
    return int(match[1]), int(match[2])


def _says_the_same(one: Definition, other: Definition) -> bool:
    return changes(one, other).keys() <= PEOPLES
