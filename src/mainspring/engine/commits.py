"""Outcomes that are more than plain success, on their way to the server."""

import time
from collections.abc import Callable
from math import inf

from ..model.errors import StoreError
from ..store import fire
from ..store.store import Store
from .partition import Partition


class Commits:
    """One call after the other for each partition; what was not answered is kept there and sent again."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        lost: Callable[[Partition, str], None],
        read_again: Callable[[], None],
    ) -> None:
        self._store = store
        self._owned = owned
        self._lost = lost
        self._read_again = read_again
        self.moved = 0
        """Tasks moved into hold slices."""
        self._last_moved = -1

    async def all(self, move_s: float = inf) -> StoreError | None:
        """How deliveries ended, all of it; and into hold slices what can be moved in so many seconds."""
        failure = None
        for partition in list(self._owned.values()):
            while partition.must_commit and partition.unanswered is None:
                failure = await self.try_one(partition, partition.commit()) or failure
        return await self._move(time.monotonic() + move_s) or failure

    async def _move(self, until_s: float) -> StoreError | None:
        """By turns: whoever has much to move must not keep the others waiting, nor those who may go out now."""
        failure = None
        some = [one for one in self._owned.values() if one.has_outcomes]
        for partition in sorted(some, key=lambda one: (one.number <= self._last_moved, one.number)):
            while partition.has_outcomes and partition.unanswered is None:
                self._last_moved = partition.number
                failure = await self.try_one(partition, partition.commit()) or failure
                if time.monotonic() >= until_s:
                    return failure
        return failure

    async def try_one(self, partition: Partition, work: fire.Commit) -> StoreError | None:
        try:
            await self.send(partition, work)
        except StoreError as error:
            return error
        return None

    async def send(self, partition: Partition, work: fire.Commit) -> None:
        partition.unanswered = work
        status = await fire.commit(self._store, work)
        partition.unanswered = None
        if status == "ok":
            partition.committed(work)
            partition.answered()
            self.moved += sum(len(moves.rows) // 3 for moves in work.moves)
            if work.retries:
                partition.needs_listing = True
            if work.retries or work.moves or work.holds:
                self._read_again()
        elif status == "stale":
            partition.answered()
            touched = {touch.name for touch in work.touches}
            for live in [live for live in partition.slices.values() if live.name in touched]:
                partition.forget(live)
            self._read_again()
        else:
            self._lost(partition, status)
