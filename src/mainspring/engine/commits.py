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
        self._last = -1

    async def all(self, seconds: float = inf) -> StoreError | None:
        """First how deliveries ended, then moves into hold slices; what takes longer than this is left for the next
        time. A target that died may leave thousands of both at once, and others are due meanwhile."""
        failure, until_s = None, time.monotonic() + seconds
        for partition in self._in_turn():
            while partition.has_outcomes and partition.unanswered is None:
                self._last = partition.number
                failure = await self.try_one(partition, partition.commit()) or failure
                if time.monotonic() >= until_s:
                    return failure
        return failure

    def _in_turn(self) -> list[Partition]:
        """Those with ends of deliveries before those that only move, and no partition twice before another once."""
        some = [one for one in self._owned.values() if one.has_outcomes]
        return sorted(some, key=lambda one: (not one.unwritten.must_commit, one.number <= self._last, one.number))

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
