"""Takes over the jobs of workers that have fallen silent."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..model.clock import steady_s
from ..model.job import Job
from ..model.pause import Pauses
from ..store import queue
from ..store.pauses import read_pauses
from ..store.store import Store
from .hands import Hands
from .slots import Slots

log = logging.getLogger("mainspring.worker")

SHORT_S: Final = 0.25
"""How long to wait for a slot that another worker may give back; for those of this one somebody wakes the role."""


class Heir:
    """Looks where such jobs lie, and gets as many as there are room and slots for."""

    def __init__(
        self,
        store: Store,
        worker: str,
        queues: Sequence[str],
        hands: Hands,
        room: Callable[[], int],
        slots: Slots,
        died: queue.Died,
        lease_s: float,
    ) -> None:
        self._store = store
        self._worker = worker
        self._queues = tuple(queues)
        self._hands = hands
        self._room = room
        self._slots = slots
        self._died = died
        self._lease_s = lease_s

    async def step(self) -> float:
        """Jobs whose worker has fallen silent for a lease. In a paused queue they wait with the others."""
        every_s, room = self._lease_s / 2, self._room()
        left = await self._left(room) if room >= 1 else {}
        wants: Counter[str] = Counter()
        for counts in left.values():
            wants.update(counts)
        async with self._slots.within(wants) as shares:
            jobs = await self._take(_fitting(left, shares, room))
        self._slots.kept = frozenset(one for one, want in wants.items() if shares.get(one, 0) < want)
        if jobs:
            return 0.0
        return min(SHORT_S, every_s) if self._slots.kept else every_s

    async def _left(self, room: int) -> dict[int, dict[str, int]]:
        pauses = Pauses(await read_pauses(self._store), self._store.clock.now_ms())
        queues = [one for one in self._queues if pauses.of_queue(one) is None]
        return await queue.left_behind(self._store, queues, lease_ms=self._lease_ms, most=room) if queues else {}

    async def _take(self, asks: queue.Asks) -> list[Job]:
        if not asks:
            return []
        asked = steady_s()
        jobs = await queue.reclaim(self._store, self._worker, asks, self._died, lease_ms=self._lease_ms)
        for job in jobs:
            log.warning("%s: its worker has fallen silent; it runs here now", job.id, extra={"task": job.id})
        self._hands.add(jobs, asked)
        return jobs

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)


def _fitting(left: queue.Asks, shares: Mapping[str, int], room: int) -> dict[int, dict[str, int]]:
    """As much of what lies there as the shares of the queues and the room allow."""
    free = dict(shares)
    asks: dict[int, dict[str, int]] = {}
    for partition, counts in left.items():
        for name, count in counts.items():
            if (most := min(count, free.get(name, 0), room)) > 0:
                asks.setdefault(partition, {})[name] = most
                free[name] -= most
                room -= most
    return asks
