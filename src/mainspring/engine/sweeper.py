"""Removes finished data: slices whose tasks are all done, ids past the dedupe window, acks of settled tasks,
the oldest dead letters, and queues that are no longer used."""

import logging
from collections import Counter
from typing import Final

from ..model.clock import steady_s
from ..model.errors import StoreError
from ..store import queue_state
from ..store.owner import fire, holds
from ..store.store import Store
from ..store.tasks import dead_letters, index
from ..store.tasks.dead_letters import DeadLetterLimits
from .partition import Partition

log = logging.getLogger("mainspring.engine")

GRACE_MS: Final = 2_000
EXPIRE_EVERY_S: Final = 10.0
"""Interval between checks of the age and number of dead letters."""
QUEUES_EVERY_S: Final = 60.0
"""Interval between checks for unused queues."""
QUEUE_IDLE_MS: Final = 86_400_000
"""An empty queue that got no task for this long is removed."""


class Sweeper:
    """Drops slices and forgets ids, a little at a time."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        *,
        dead_letter_limits: DeadLetterLimits | None = None,
    ) -> None:
        self._store = store
        self._owned = owned
        self._at = self._cursor = 0
        self.dropped = 0
        self._dead_letter_limits = dead_letter_limits or DeadLetterLimits()
        self._expire_at = self._queues_at = 0.0
        self._queue_cursors: dict[int, int] = {}
        self._expired: Counter[str] = Counter()
        """Dead letters dropped since the last line in the log."""
        self.dead_letters_dropped: Counter[str] = Counter({"age": 0, "number": 0})
        """Dead letters dropped so far, by reason."""

    @property
    def _window_ms(self) -> int:
        """How long ids are known after their tasks have ended."""
        return self._store.shared.dedupe_window_ms

    async def step(self) -> float:
        busy = await self.drop_finished()
        await self._forget_holds()
        more = await self._forget_ids()
        more = await self._expire_dead_letters() or more
        await self._forget_queues()
        return 0.0 if more else 0.02 if busy else 0.5

    async def drop_finished(self) -> bool:
        """Drop slices that are done and past their grace. Return True if there may be more."""
        now_ms = self._store.clock.now_ms()
        finished = [
            fire.FinishedSlice(partition.number, partition.token, live.slice, live.g, record)
            for partition in self._owned.values()
            for live in partition.lives
            if live.slice.over_ms + GRACE_MS < now_ms and (record := partition.may_drop(live, now_ms)) is not None
        ][:256]
        if not finished:
            return False
        failure = None
        for slice_, status in zip(finished, await fire.drop(self._store, finished), strict=True):
            if isinstance(status, StoreError):
                failure = status
            else:
                self._dropped(slice_, status)
        if failure is not None:
            raise failure
        # Lanes may wait until the hold slices of others are gone before theirs are read.
        return len(finished) == 256 or any(one.slice.is_hold for one in finished)

    def _dropped(self, finished: fire.FinishedSlice, status: fire.WriteStatus) -> None:
        partition = self._owned.get(finished.partition)
        live = partition.live_at(finished.slice) if partition is not None else None
        if partition is None or live is None or live.g != finished.g:
            return
        if status == "ok":
            partition.dropped(live, self._store.clock.now_ms())
            self.dropped += 1
        elif status == "stale" or (status == "refused" and live.all_done):
            # Tasks were appended since we looked, or the server lost writes: read everything again. Not if the new rows
            # are already known: some may be in flight, and would be delivered twice.
            partition.forget(live)

    async def _forget_holds(self) -> None:
        """Forget the records of holds once the ids of their tasks may be forgotten."""
        before_ms = self._store.clock.now_ms() - self._window_ms
        for partition in list(self._owned.values()):
            ended = partition.ended_holds
            # Use our own clock only to limit the requests: the server's clock decides.
            if old := [one for one in ended.items() if one[1] < before_ms][:1_000]:
                gone = await holds.forget_records(self._store, partition.number, old, window_ms=self._window_ms)
                for name, _ in gone:
                    ended.pop(name, None)

    async def _forget_ids(self) -> bool:
        """Forget some ids of one partition, and acks that a former owner left; over time all of them. Return True if
        there may be more in the same partition."""
        numbers = sorted(self._owned)
        if not numbers:
            return False
        number = next((n for n in numbers if n >= self._at), numbers[0])
        self._cursor, removed = await index.sweep(self._store, number, self._cursor, window_ms=self._window_ms)
        self._at = number if self._cursor else number + 1
        if not self._cursor:
            await fire.sweep_acks(self._store, number)
        return removed > 0

    async def _forget_queues(self) -> None:
        """Remove some unused queues: each leaves a stream, and series in every scrape."""
        if steady_s() < self._queues_at:
            return
        self._queues_at = steady_s() + QUEUES_EVERY_S
        for number in sorted(self._owned):
            cursor = self._queue_cursors.get(number, 0)
            following = await queue_state.forget_idle(self._store, number, cursor, idle_ms=QUEUE_IDLE_MS)
            self._queue_cursors[number] = following

    async def _expire_dead_letters(self) -> bool:
        """Drop some of the oldest dead letters past their limits. Return True if there may be more."""
        if not any(self._dead_letter_limits) or steady_s() < self._expire_at:
            return False
        more, failure = False, None
        for answer in await dead_letters.expire(self._store, sorted(self._owned), self._dead_letter_limits):
            if isinstance(answer, StoreError):
                failure = answer
                continue
            for count in (self._expired, self.dead_letters_dropped):
                count.update(age=answer.for_age, number=answer.for_number)
            more = more or sum(answer) == dead_letters.AT_ONCE
        if more:
            return True
        self._expire_at = steady_s() + EXPIRE_EVERY_S
        if self._expired.total():
            log.warning(
                "dropped the oldest dead letters: %d older than dead_letters_max_age, %d beyond dead_letters_max",
                self._expired["age"],
                self._expired["number"],
            )
            self._expired.clear()
        if failure is not None:
            raise failure
        return False
