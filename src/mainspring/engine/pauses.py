"""Knows what is paused: reads it when it is told, and every few seconds."""

from collections.abc import Callable
from typing import Final

from ..model.limits import MAX_ERROR_CHARS
from ..model.outcome import DROPPED
from ..model.pause import Pauses
from ..store.pauses import clear_away, read_pauses
from ..store.store import Store
from .holds import Why

POLL_S: Final = 2.0
_KEY: Final = "pause:"


class PauseWatch:
    """A gate for the engine. What was begun before it heard of a pause may still go out."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        self._store = store
        self._changed = changed
        self.pauses = Pauses()
        """Those that hold tasks back."""
        self.drops = Pauses()
        """Those under which tasks are not delivered at all."""

    async def step(self) -> float:
        read = await read_pauses(self._store)
        now_ms = self._store.clock.now_ms()
        before = self.pauses.by_scope, self.drops.by_scope
        self.pauses = Pauses((one for one in read if one.mode != "drop"), now_ms)
        self.drops = Pauses((one for one in read if one.mode == "drop"), now_ms)
        if (self.pauses.by_scope, self.drops.by_scope) != before:
            self._changed()
        for one in read:
            if not one.lasts(now_ms):
                await clear_away(self._store, one)
        lasting = (*self.pauses.by_scope.values(), *self.drops.by_scope.values())
        ends = [one.until_ms for one in lasting if one.until_ms is not None]
        return min(POLL_S, max(0.001, (min(ends) - now_ms) / 1000)) if ends else POLL_S

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
