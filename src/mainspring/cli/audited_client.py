"""Audits what commands change on a server directly, as the API audits what it changes."""

import getpass
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mainspring.model.audit import (
    Change,
    View,
    changes,
    of_dead_letter,
    of_dead_letters,
    of_lane,
    of_pause,
    of_replaced,
    of_schedule,
    of_task,
)
from mainspring.model.errors import Ambiguous, NotConfirmed, StoreError
from mainspring.model.lane import Scope
from mainspring.model.task import Handle

if TYPE_CHECKING:
    from mainspring.store.store import Store

CHANGES: Final = {
    "put": "task.replace",
    "cancel_many": "task.cancel",
    "reschedule": "task.reschedule",
    "lane_retry_head": "lane.retry-head",
    "lane_skip_head": "lane.skip-head",
    "lane_resume": "lane.resume",
    "pause": "pause.add",
    "resume": "pause.remove",
}
"""Call of a client -> its name in the trail. A put that replaces nothing is data, and not recorded."""

DEAD: Final = ("replay", "replay_many", "drop", "drop_many")
SCHEDULES: Final = ("add", "add_many", "edit", "pause", "resume", "remove", "rollback", "trigger", "backfill")
_LEFT: Final = (False, 0, "unknown", "too late", "ambiguous", "no head", "gone", "conflict", "damaged")
"""Answers of calls that changed nothing."""

_RUNS: Final = ("schedule.trigger", "schedule.backfill")
"""These add runs; the schedule stays as it is."""

_FILTERS: Final = ("target", "lane", "reason", "died_after", "died_before")


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user of that number
        return f"uid {os.getuid()}"


class AuditedClient:
    """A client for commands, or its `schedules` or `dead`: records every call that changes something."""

    def __init__(self, client: Any, changes: Mapping[str, str], audit: Callable[..., Awaitable[None]]) -> None:
        self._client = client
        self._changes = changes
        self._audit = audit

    @classmethod
    def of(cls, client: Any, kept: int) -> "AuditedClient":
        async def audit(*change: Any) -> None:
            await record(client.store, kept, *change)

        return cls(client, CHANGES, audit)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name == "schedules":
            return AuditedClient(call, {one: f"schedule.{one}" for one in SCHEDULES}, self._audit)
        if name == "dead":
            return AuditedClient(call, {one: f"dead.{one.removesuffix('_many')}" for one in DEAD}, self._audit)
        if name not in self._changes:
            return call
        if name == "put":
            return partial(self._watch_put, call)
        if name in ("replay_many", "drop_many"):
            return partial(self._audit_dead_letters, name, call)
        return partial(self._watch_added, call) if name == "add_many" else partial(self._watch, name, call)

    async def _watch(self, name: str, call: Callable[..., Awaitable[Any]], *given: Any, **options: Any) -> Any:
        what = self._changes[name]
        objects = _objects(name, given, options)
        before = [await self._look(what, one, options) for one in objects]
        answer = await call(*given, **options)
        if not options.get("dry_run"):
            answers = answer if name == "cancel_many" else [answer] * len(objects)
            audited = set()  # a task that is named twice is cancelled once
            for one, was, result in zip(objects, before, answers, strict=True):
                if one not in audited and getattr(result, "outcome", result) not in _LEFT:
                    audited.add(one)
                    await self._audit_changed(what, one, was, await self._after(what, one, result))
        return answer

    async def _audit_changed(self, what: str, name: str, was: View, after: View) -> None:
        """Record an edit only if it changes something, and an add of an existing schedule as an edit."""
        if was != after:
            replaced = what == "schedule.add" and was is not None
            await self._audit("schedule.edit" if replaced else what, name, was, after)

    async def _watch_added(self, call: Callable[..., Awaitable[Any]], wanted: Any, **options: Any) -> Any:
        """Apply the schedules of a file."""
        definitions = list(wanted)
        before = await self._client.get_many([one.name for one in definitions])
        answer = await call(definitions, **options)
        for view, outcome in answer:
            if outcome != "kept":
                what = "schedule.add" if outcome == "created" else "schedule.edit"
                await self._audit(what, view.name, of_schedule(before.get(view.name)), of_schedule(view))
        return answer

    async def _watch_put(
        self, call: Callable[..., Awaitable[Handle]], target: str, *given: Any, **options: Any
    ) -> Handle:
        try:
            handle = await call(target, *given, **options)
        except NotConfirmed as error:
            for stored in error.handles or ():
                await self._audit_replaced(stored, target, options)
            raise
        await self._audit_replaced(handle, target, options)
        return handle

    async def _audit_replaced(self, handle: Handle | None, target: str, options: Mapping[str, Any]) -> None:
        views = None if handle is None else of_replaced(handle, target, options.get("lane"))
        if handle is not None and views is not None:
            await self._audit(self._changes["put"], handle.id, *views)

    async def _audit_dead_letters(self, name: str, call: Callable[..., Awaitable[Any]], **options: Any) -> Any:
        """Change many dead letters; a call that is interrupted has changed those it had reached."""
        so_far: Any = 0
        progress = options.get("progress")

        def note(seen: Any) -> None:
            nonlocal so_far
            so_far = seen
            if progress is not None:
                progress(seen)

        try:
            so_far = await call(**options | {"progress": note})
        finally:
            count, word = (so_far, "dropped") if isinstance(so_far, int) else (so_far.replayed, "replayed")
            if count and not options.get("dry_run"):
                chosen = of_dead_letters(**{field: options.get(field) for field in _FILTERS})
                await self._audit(self._changes[name], "many", chosen, {word: count})
        return so_far

    async def _look(self, what: str, name: str, options: Mapping[str, Any]) -> View:
        if what in _RUNS:
            return None
        match what.partition(".")[0]:
            case "task":
                try:
                    return of_task(await self._client.get(name, lane=options.get("lane")))
                except Ambiguous:
                    return None  # the call changes none of them
            case "schedule":
                return of_schedule(await self._client.get(name))
            case "dead":
                return of_dead_letter(await self._client.get(name, lane=options.get("lane")))
            case "lane":
                return of_lane(await self._client.lane(name))
        return of_pause(next((one for one in await self._client.pauses() if one.scope.text == name), None))

    async def _after(self, what: str, name: str, result: Any) -> View:
        match what:
            case "schedule.backfill":
                audited: View = msgspec.to_builtins(result)
                return audited
            case "schedule.trigger" | "task.reschedule" if isinstance(result, Handle):
                return {"id": result.id, "due_ms": result.due_ms}
            case "task.cancel":
                return {"state": result}
            case "pause.add":
                return of_pause(result)
            case "pause.remove":
                return {"state": "resumed"}
            case "dead.replay":
                return {"due_ms": result.due_ms}
            case "schedule.remove" | "dead.drop" | "lane.retry-head" | "lane.skip-head" | "lane.resume":
                return None
        return of_schedule(await self._client.get(name))


def _objects(name: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> list[str]:
    if name == "cancel_many":
        return list(given[0])
    if given:
        return [str(given[0])]
    return [Scope.of(options.get("target"), options.get("queue"), options.get("lane")).text]


async def record(store: "Store", kept: int, what: str, name: str, before: View, after: View) -> None:
    """Write one change to the trail."""
    from mainspring.store import access

    change = Change(f"{user()} (command line)", what, name, socket.gethostname(), "", *changes(before, after))
    try:
        await access.record_change(store, change, kept=kept)
    except StoreError as error:
        # The change is made already: a full server, for example, must still let tasks be cancelled.
        print(f"warning: this could not be written into the audit trail: {error}", file=sys.stderr)
