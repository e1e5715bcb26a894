"""Keeps the schedules on the server like those in a file: applies it at the start, when it changes, and on SIGHUP."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Final

from .config import Config
from .model.errors import Conflict, InvalidInput
from .model.schedule import Definition
from .schedule_file import carry_out, plan, read_file
from .schedule_outlook import findings_of
from .schedules import Schedules

log = logging.getLogger("mainspring.schedules")

LOOK_S: Final = 2.0
REST_S: Final = 0.2
"""A file that has changed is read when it has been at rest for so long."""
_MOST_RESTS: Final = 50

Stamp = tuple[int, int, int]
"""What is another one when the file has changed."""


class ScheduleWatch:
    """One role of a node; several nodes may watch the same file."""

    def __init__(self, schedules: Schedules, path: Path, config: Config) -> None:
        self._schedules = schedules
        self._path = path
        self._config = config
        self._seen: Stamp | None = None

    def again(self) -> None:
        """Apply it with the next step, whether or not it has changed."""
        self._seen = None

    async def step(self) -> float:
        seen = self._stamp()
        if seen != self._seen:
            if self._seen is not None:
                seen = await self._at_rest(seen)
            if await self._apply():
                self._seen = seen  # only now: a server that was away is asked again
        return LOOK_S

    async def _at_rest(self, seen: Stamp) -> Stamp:
        """Who writes it may be in the middle: the half that is there would remove the schedules of the other."""
        for _ in range(_MOST_RESTS):
            await asyncio.sleep(REST_S)
            now = self._stamp()
            if now == seen:
                break
            seen = now
        return seen

    def _stamp(self) -> Stamp:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        # Of a link that leads elsewhere now time and size may be the same: some systems give all files one time.
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    async def _apply(self) -> bool:
        """False: it has to be tried again."""
        try:
            source, wanted = read_file(self._path, timezone=self._schedules.timezone)
            steps = await plan(self._schedules, wanted, source, prune=True)
            await carry_out(self._schedules, steps)
        except InvalidInput as error:
            # What runs goes on as it is: a typing error in the file must not stop it.
            log.error("schedules are not applied: %s", error)
            return True
        except Conflict as error:  # somebody else writes the same schedules, again and again
            log.warning("schedules are not applied yet: %s", error)
            return False
        changed = [step for step in steps if step.action not in ("same", "over")]
        for step in steps:
            if step.action == "over":
                log.warning("%s: %s", self._path, step.lines()[0].removeprefix("! "))
        log.info("%s: %d schedules, %d changed", self._path, len(wanted), len(changed))
        for step in changed:
            log.info("%s", "; ".join(line.strip() for line in step.lines(public=True)))
            if step.definition is not None:
                await self._warn(step.definition)
        return True

    async def _warn(self, definition: Definition) -> None:
        """In a thread: some times are hard to find, and the node must go on firing."""
        now_ms = time.time_ns() // 1_000_000
        for finding in await asyncio.to_thread(findings_of, definition, now_ms, self._config):
            log.warning("schedule %r: %s [%s]", definition.name, finding.message, finding.code)
