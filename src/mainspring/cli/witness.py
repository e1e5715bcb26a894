"""What commands change on a server directly goes into the audit trail, as what goes through the API does."""

import getpass
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from mainspring.model.audit import Change
from mainspring.model.audit_views import View, bare, changes, of_pause, of_schedule, of_task
from mainspring.model.errors import StoreError
from mainspring.model.pause import Scope
from mainspring.model.task import Handle

CHANGES: Final = {
    "cancel_many": "task.cancel",
    "reschedule": "task.reschedule",
    "dead_replay": "dead.replay",
    "dead_replay_many": "dead.replay",
    "dead_drop": "dead.drop",
    "dead_drop_many": "dead.drop",
    "lane_retry_head": "lane.retry-head",
    "lane_skip_head": "lane.skip-head",
    "lane_resume": "lane.resume",
    "pause": "pause.add",
    "resume": "pause.remove",
}
"""Call of a client -> how the trail names it. Puts are data, and not in it."""

SCHEDULES: Final = ("add", "edit", "pause", "resume", "remove", "rollback", "trigger", "backfill")
_LEFT: Final = (False, 0, "unknown", "too late", "no head", "gone")
"""Answers after which everything is as it was."""


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user of that number
        return f"uid {os.getuid()}"


class Witness:
    """A client (or its schedules) as commands hold it: every call that changes something is written down."""

    def __init__(self, client: Any, changes: Mapping[str, str], tell: Callable[..., Awaitable[None]]) -> None:
        self._client = client
        self._changes = changes
        self._tell = tell

    @classmethod
    def of(cls, client: Any, kept: int) -> "Witness":
        return cls(client, CHANGES, partial(_record, client, kept))

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name == "schedules":
            return Witness(call, {one: f"schedule.{one}" for one in SCHEDULES}, self._tell)
        return call if name not in self._changes else partial(self._watch, name, call)

    async def _watch(self, name: str, call: Callable[..., Awaitable[Any]], *given: Any, **options: Any) -> Any:
        what = self._changes[name]
        objects = _objects(name, given, options)
        before = [await self._look(what, one, options) for one in objects]
        answer = await call(*given, **options)
        if not options.get("dry_run"):
            answers = answer if name == "cancel_many" else [answer] * len(objects)
            for one, was, said in zip(objects, before, answers, strict=True):
                if said not in _LEFT:
                    now = await self._after(what, one, said, options)
                    await self._tell(what, one, was, now)
        return answer

    async def _look(self, what: str, name: str, options: Mapping[str, Any]) -> View:
        if what.startswith("task."):
            return of_task(await self._client.get(name, lane=options.get("lane")))
        if what.startswith("schedule."):
            return of_schedule(await self._client.get(name))
        if what.startswith("pause."):
            return of_pause(next((one for one in await self._client.pauses() if one.scope.text == name), None))
        return None

    async def _after(self, what: str, name: str, said: Any, options: Mapping[str, Any]) -> View:
        if what.startswith("schedule.") and what not in ("schedule.trigger", "schedule.backfill"):
            return None if what == "schedule.remove" else of_schedule(await self._client.get(name))
        if what.startswith("pause."):
            return {"state": "resumed"} if what == "pause.remove" else of_pause(said)
        if isinstance(said, Handle):
            return {"id": said.id, "due_ms": said.due_ms}
        if isinstance(said, str):
            return {"outcome": said}
        chosen = {field: str(value) for field, value in options.items() if value is not None and field != "progress"}
        return {field: bare(value) for field, value in chosen.items()}


def _objects(name: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> list[str]:
    if name == "cancel_many":
        return list(given[0])
    if given:
        return [str(given[0])]
    if name.endswith("_many"):
        return ["many"]
    return [Scope.of(options.get("target"), options.get("queue"), options.get("lane")).text]


async def _record(client: Any, kept: int, what: str, name: str, before: View, after: View) -> None:
    from mainspring.store import audit

    change = Change(f"{user()} (command line)", what, name, socket.gethostname(), "", *changes(before, after))
    try:
        await audit.record(client.store, change, kept=kept)
    except StoreError as error:
        # Done is done: a full server, for example, must still let tasks be cancelled.
        print(f"warning: this could not be written into the audit trail: {error}", file=sys.stderr)
