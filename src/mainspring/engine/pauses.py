"""Knows what is paused: reads it when it is told, and every few seconds."""

import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final

from ..model.audit import Change
from ..model.audit_views import of_pause
from ..model.errors import OutOfMemory
from ..model.hold import HoldRecord
from ..model.limits import MAX_ERROR_CHARS
from ..model.named import SCHEME
from ..model.outcome import DROPPED
from ..model.pause import Pause, Pauses, Scope
from ..store import audit
from ..store.pauses import clear_away, read_pauses, write_if_none
from ..store.store import Store
from .holds import Why

log = logging.getLogger("mainspring.targets")

POLL_S: Final = 2.0
_KEY: Final = "pause:"
_NAMED: Final = f"{SCHEME}:"


class PauseWatch:
    """A gate for the engine. What was begun before it heard of a pause may still go out."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[], None],
        commands: Mapping[str, str],
        node: str,
        soon: Callable[[], None],
        audited: int = audit.KEPT,
    ) -> None:
        """`audited` changes stay in the audit trail."""
        self._store = store
        self._commands = commands
        self._changed = changed
        self._node = node
        self._soon = soon
        self._audited = audited
        self._disabled: dict[str, Pause] = {}
        """Of targets that want nothing more: to be written."""
        self.pauses = Pauses()
        """Those that hold tasks back."""
        self.drops = Pauses()
        """Those under which tasks are not delivered at all."""

    async def step(self) -> float:
        await self.flush()
        read = await read_pauses(self._store)
        now_ms = self._store.clock.now_ms()
        before = self.pauses.by_scope, self.drops.by_scope
        self.pauses = Pauses((one for one in read if one.mode != "drop"), now_ms, self._commands)
        # And those that were disabled since this step began.
        drops = (*(one for one in read if one.mode == "drop"), *self._disabled.values())
        self.drops = Pauses(drops, now_ms, self._commands)
        if (self.pauses.by_scope, self.drops.by_scope) != before:
            self._changed()
        for one in read:
            if not one.lasts(now_ms):
                await clear_away(self._store, one)
        lasting = (*self.pauses.by_scope.values(), *self.drops.by_scope.values())
        ends = [one.until_ms for one in lasting if one.until_ms is not None]
        return min(POLL_S, max(0.001, (min(ends) - now_ms) / 1000)) if ends else POLL_S

    # -- targets that want nothing more -----------------------------------------------------------------------

    def disable(self, target: str, reason: str) -> None:
        """A named target said so. Here nothing more is delivered to it from now on, elsewhere once that is written."""
        scope = Scope("target", target)
        known = scope.text in self.drops.by_scope or scope.text in self.pauses.by_scope
        if known or not target.startswith(_NAMED):  # an address may be that of many, and end in a *
            return
        now_ms = self._store.clock.now_ms()
        pause = Pause(scope, "drop", reason[:MAX_ERROR_CHARS], self._node, now_ms)
        self.drops = Pauses((*self.drops.by_scope.values(), pause), now_ms)
        self._disabled[scope.text] = pause
        log.warning(
            "%s is disabled on all nodes: %s. Its tasks go to the dead letters until mainspring resume --target %s",
            target, reason, target,
        )  # fmt: skip
        self._soon()

    async def flush(self) -> None:
        """Write what was disabled. Where somebody has paused it meanwhile, that pause stands."""
        for name, pause in list(self._disabled.items()):
            if await write_if_none(self._store, pause):
                await self._tell(pause)
            self._disabled.pop(name, None)

    async def _tell(self, pause: Pause) -> None:
        """As a pause by a person is told. After a lost reply it is told again: twice is better than never."""
        change = Change(self._node, "pause.add", pause.scope.text, socket.gethostname(), after=of_pause(pause))
        try:
            await audit.record(self._store, change, kept=self._audited)
        except OutOfMemory as error:  # done is done, and a full server must not keep the other pauses from being read
            log.error("the pause of %s could not be written into the audit trail: %s", pause.scope.text, error)

    # -- as a gate -------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return bool(self.pauses.by_scope)

    def governs(self, target: str) -> bool:
        del target  # a lane may be paused, whatever its targets
        return True

    def hold_for(self, target: str, lane: str | None, due_ms: float) -> str | None:
        del due_ms
        pause = self.pauses.of_task(target, lane)
        return None if pause is None else _KEY + pause.scope.text

    def is_closed(self, key: str) -> bool:
        return key.startswith(_KEY) and key[len(_KEY) :] in self.pauses.by_scope

    def room(self, key: str) -> int | None:
        del key  # what is not paused any more goes as fast as it can
        return None

    def may_open(self, key: str) -> bool:
        return not self.is_closed(key)

    def inherited(self, record: HoldRecord) -> None:
        """Pauses are on the server: nothing is to be learnt of them here."""

    def why(self, key: str) -> Why:
        pause = self.pauses.by_scope[key[len(_KEY) :]]
        return Why(pause.reason, pause.who, pause.until_ms)

    # -- what is not delivered -------------------------------------------------------------------------------

    def dropped(self, target: str, lane: str | None) -> str | None:
        """Why a task that has begun is not delivered; None when it is."""
        pause = self.drops.of_task(target, lane)
        if pause is None:
            return None
        said = f"{DROPPED}{f' by {pause.who}' if pause.who else ''}{f': {pause.reason}' if pause.reason else ''}"
        return said[:MAX_ERROR_CHARS]
