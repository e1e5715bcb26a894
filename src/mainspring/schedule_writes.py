"""How a schedule is written: read what is there, decide, write it if nobody came between, else once more."""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from .model.chain import first_of, link_to
from .model.errors import Conflict, InvalidInput, NotFound, StoreError, Unavailable
from .model.occurrence import check_schedule_name
from .model.schedule import Definition
from .model.schedule_view import ScheduleView, view_of
from .model.zone import tz_version
from .store import schedules as kept
from .store.keys import partition_of
from .store.schedule_care import with_called_off
from .store.schedule_rows import row_of
from .store.schedules import Change, Seen
from .store.store import Store

_TRIES: Final = 16
Make = Callable[[Seen, int], Definition | None]
"""The definition to write, from what is there and the time; None removes it."""


class _Plan(NamedTuple):
    change: Change | None
    view: ScheduleView
    """When it is written; of one that is removed, as it was."""


class Writer:
    """Writes schedules of one namespace."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._open_store = store

    @property
    def _store(self) -> Store:
        return self._open_store()

    async def write(self, makes: dict[str, Make], *, missing_ok: bool = False) -> dict[str, ScheduleView]:
        """Write until nobody came between: each attempt starts from what is there."""
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
                    # Written, and the reply was lost. For one that was removed stands what was seen last.
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
    ) -> list[tuple[Change, ScheduleView]]:
        """What has to be written. In threads: some times are hard to find, and a node that is asked goes on firing."""
        made = await asyncio.to_thread(lambda: {name: makes[name](one, now_ms) for name, one in wanted.items()})
        homes = {name: await self._at_home(name, wanted[name], made[name]) for name in made}
        plans = await asyncio.to_thread(
            lambda: {name: _plan(name, homes[name], made[name], now_ms, skipped.get(name)) for name in made}
        )
        views |= {name: plan.view for name, plan in plans.items() if plan.change is None}
        return [(plan.change, plan.view) for plan in plans.values() if plan.change is not None]

    async def _at_home(self, name: str, seen: Seen, definition: Definition | None) -> Seen:
        """A schedule with a lane lives with the tasks of its lane; the partition of its name says where that is."""
        if definition is None or (seen.definition is None and definition.lane is None and not seen.pointed):
            return seen
        if seen.definition is not None:
            if seen.definition.lane != definition.lane:
                raise InvalidInput(f"schedule {name!r}: its lane cannot be changed; remove it, and add it anew")
            return seen
        home = partition_of(definition.lane or name, len(self._store.keys))
        elsewhere = home != partition_of(name, len(self._store.keys))
        wanted = kept.point_to(definition.lane) if definition.lane is not None and elsewhere else b""
        if wanted != seen.pointed and not await kept.point(self._store, name, seen.pointed, wanted):
            return seen  # somebody else did: the write will find that out
        [there] = await kept.see_at(self._store, [(home, name)])
        return there._replace(pointed=wanted)

    async def _send(
        self,
        pending: list[tuple[Change, ScheduleView]],
        views: dict[str, ScheduleView],
        skipped: dict[str, int],
        unsure: dict[str, Definition | None],
    ) -> list[str]:
        """Names that have to be tried again."""
        again: list[str] = []
        if not pending:
            return again
        failure: StoreError | None = None
        answers = await kept.write(self._store, [change for change, _ in pending])
        for (change, view), written in zip(pending, answers, strict=True):
            if isinstance(written, StoreError):
                # Its reply may be lost: the next look shows whether it was written.
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
    """What is written in the place of a schedule that is removed."""


def _plan(name: str, seen: Seen, definition: Definition | None, now_ms: int, behind_ms: int | None) -> _Plan:
    """The write that makes it so, and what is seen then; no write where there is nothing to do."""
    if definition is not None and definition is seen.definition:
        return _Plan(None, view_of(definition, seen.link, now_ms))
    if definition is None:
        if seen.definition is None:
            raise NotFound(f"there is no schedule {name!r}")
        return _Plan(Change(name, seen, None, None, None), view_of(seen.definition, None, now_ms))
    next_ms, state = first_of(definition, seen.definition, seen.link, now_ms)
    if behind_ms is not None and next_ms is not None and next_ms <= behind_ms:
        next_ms = definition.slots.after(behind_ms)  # that one ran already
    link = link_to(definition, next_ms, state)
    change = Change(name, seen, definition, link, row_of(definition, link, now_ms))
    return _Plan(change, view_of(definition, link, now_ms))
