"""Runs of schedules beside their chains: by hand, and for planned times that have passed."""

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from .model.errors import Conflict, InvalidInput, NotFound, StoreError
from .model.limits import HORIZON_MS
from .model.occurrence import check_schedule_name, instant_text, occurrence_id
from .model.schedule import Definition
from .model.schedule_input import local_ms
from .model.schedule_view import Backfilled
from .model.task import Handle
from .model.times import Delay, When, delay_ms
from .store import schedules as kept
from .store.index import IdRow
from .store.put import Widths
from .store.register import put_ids
from .store.schedule_rows import sketch_apart
from .store.schedules import Seen
from .store.store import Store

BACKFILL_AT_MOST: Final = 100_000
BACKFILL_BATCH: Final = 1_000


class RunsBeside:
    """Puts runs that move no chain."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._open_store = store
        self._widths = Widths()

    @property
    def _store(self) -> Store:
        return self._open_store()

    async def trigger(self, name: str, *, after: Delay | None = None) -> Handle:
        """Run it now, whatever its times say and also while it is paused. Its planned runs stay as they are."""
        [seen] = await kept.see(self._store, [check_schedule_name(name)])
        definition = self._current(name, seen)
        now_ms = await self._store.fresh_ms()
        due_ms = now_ms + (0 if after is None else delay_ms(after))
        task_id = f"{name}@{instant_text(due_ms)}!{secrets.token_hex(3)}"
        await self._put_apart(seen.partition, definition, [(task_id, due_ms, due_ms)], now_ms)
        return Handle(task_id, due_ms)

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

        The runs have the ids of those planned times: a second call finds them and puts nothing. `progress` gets how
        many are done, and of how many, after each thousand.
        """
        if rate is not None and not rate > 0:
            raise InvalidInput(f"rate is {rate}; give more than 0 runs a second")
        [seen] = await kept.see(self._store, [check_schedule_name(name)])
        definition = self._current(name, seen)
        start_ms, end_ms = (local_ms(one, definition.zone, field) for one, field in ((start, "start"), (end, "end")))
        if end_ms < start_ms:
            raise InvalidInput("the end of the range lies before its start")
        now_ms = await self._store.fresh_ms()
        # What the chain has before it is its own.
        until_ms = min(end_ms, now_ms + 1)
        if seen.link is not None and seen.link.planned_ms:
            until_ms = min(until_ms, seen.link.planned_ms)
        slots = definition.slots.recurrence.between(start_ms, until_ms, BACKFILL_AT_MOST + 1)
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
        """Put runs that move no chain: (id, planned, due). Returns how many of them were new."""
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
