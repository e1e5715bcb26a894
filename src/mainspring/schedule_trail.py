"""The schedules of a node's file as the audit trail tells them: a file that is edited changes as much as a command."""

import logging
import socket
from collections.abc import Iterable
from pathlib import Path

from .model.audit import Change
from .model.audit_views import View, changes, of_schedule
from .model.errors import StoreError
from .model.schedule import Definition
from .model.schedule_view import ScheduleView
from .schedules import AddOutcome, OnExisting, Schedules
from .store import audit
from .store.store import Store

log = logging.getLogger("mainspring.schedules")


class FiledSchedules(Schedules):
    """Schedules as the watch of a file writes them: each change goes into the trail, with the file as who made it."""

    def __init__(self, store: Store, timezone: str, file: Path, *, kept: int) -> None:
        super().__init__(lambda: store, timezone)
        self._told_to = store
        self._who = f"{file.name} (serve --schedules)"
        self._kept = kept

    async def add_many(
        self, definitions: Iterable[Definition], *, on_conflict: OnExisting = "reject"
    ) -> list[tuple[ScheduleView, AddOutcome]]:
        wanted = list(definitions)
        before = await self.get_many([one.name for one in wanted])
        added = await super().add_many(wanted, on_conflict=on_conflict)
        for view, outcome in added:
            if outcome != "kept":  # by another node with the same file, for example
                what = "schedule.add" if outcome == "created" else "schedule.edit"
                await self._tell(what, view.name, of_schedule(before.get(view.name)), of_schedule(view))
        return added

    async def remove(self, name: str) -> bool:
        before = await self.get(name)
        removed = await super().remove(name)
        if removed:
            await self._tell("schedule.remove", name, of_schedule(before), None)
        return removed

    async def _tell(self, what: str, name: str, before: View, after: View) -> None:
        change = Change(self._who, what, name, socket.gethostname(), "", *changes(before, after))
        try:
            await audit.record(self._told_to, change, kept=self._kept)
        except StoreError as error:  # done is done, and the other schedules of the file are still to come
            log.error("%s: %s could not be written into the audit trail: %s", name, what, error)
