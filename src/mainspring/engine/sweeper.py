"""Removes what is finished: slices whose tasks are all done, ids past the dedupe window, acks of settled tasks."""

from typing import Final

import msgspec

from ..model.errors import StoreError
from ..store.keys import Slice
from ..store.owner import fire, holds
from ..store.store import Store
from ..store.tasks import index
from .partition import Partition

GRACE_MS: Final = 2_000


def _kept_of(partition: Partition, place: Slice, now_ms: int) -> bytes | None:
    """What stays of a slice that is dropped; None when it must not be dropped."""
    if not place.is_hold:
        return b""
    record = partition.hold_policy.may_drop(place)
    return None if record is None else msgspec.structs.replace(record, ended_ms=now_ms).encode()


class Sweeper:
    """Drops slices and forgets ids, a little at a time."""

    def __init__(self, store: Store, owned: dict[int, Partition], *, dedupe_window_ms: int) -> None:
        self._store = store
        self._owned = owned
        self._window_ms = dedupe_window_ms
        self._at = self._cursor = 0
        self.dropped = 0

    async def step(self) -> float:
        busy = await self.drop_finished()
        await self._forget_holds()
        more = await self._forget_ids()
        return 0.0 if more else 0.02 if busy else 0.5

    async def drop_finished(self) -> bool:
        """Drop slices that are done and past their grace. True when there may be more."""
        now_ms = self._store.clock.now_ms()
        finished = [
            fire.FinishedSlice(partition.number, partition.token, place, live.g, record)
            for partition in self._owned.values()
            for place, live in partition.slices.items()
            if place.over_ms + GRACE_MS < now_ms and live.all_done and partition.unanswered is None
            if (record := _kept_of(partition, place, now_ms)) is not None
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
        # Lanes may wait for the hold slices of others to be gone before theirs are read.
        return len(finished) == 256 or any(one.slice.is_hold for one in finished)

    def _dropped(self, finished: fire.FinishedSlice, status: fire.WriteStatus) -> None:
        partition = self._owned.get(finished.partition)
        live = partition.slices.get(finished.slice) if partition is not None else None
        if partition is None or live is None or live.g != finished.g:
            return
        if status == "ok":
            partition.dropped(live)
            if finished.slice.is_hold:
                partition.hold_policy.gone(finished.slice, self._store.clock.now_ms())
            self.dropped += 1
        elif status == "stale" or (status == "refused" and live.all_done):
            # Something was appended since we looked, or the server is behind us: read everything again. Not where the
            # new rows are known by now: some may be under way, and would be delivered twice.
            partition.forget(live)

    async def _forget_holds(self) -> None:
        """The records of holds go when the ids of their tasks may go."""
        before_ms = self._store.clock.now_ms() - self._window_ms
        for partition in list(self._owned.values()):
            ended = partition.hold_policy.holds.ended
            # By our own clock only to ask seldom: the server's decides.
            if old := [one for one in ended.items() if one[1] < before_ms][:1_000]:
                gone = await holds.forget_records(self._store, partition.number, old, window_ms=self._window_ms)
                for name, _ in gone:
                    ended.pop(name, None)

    async def _forget_ids(self) -> bool:
        """Some ids of one partition, and acks that a former owner left; over time all of them. True when there may be
        more to remove right here."""
        numbers = sorted(self._owned)
        if not numbers:
            return False
        number = next((n for n in numbers if n >= self._at), numbers[0])
        self._cursor, removed = await index.sweep(self._store, number, self._cursor, window_ms=self._window_ms)
        self._at = number if self._cursor else number + 1
        if not self._cursor:
            await fire.sweep_acks(self._store, number)
        return removed > 0
