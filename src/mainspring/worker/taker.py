"""Gets work: as much as there is room for, from the queues in their shares, where there is some."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from ..model.clock import steady_s
from ..model.pause import Pauses
from ..store import queue
from ..store.pauses import read_pauses
from ..store.store import Store
from .calls import Calls
from .hands import Hands
from .shares import Shares
from .slots import Slots

POLL_S: Final = 1.0
"""How often all partitions are asked, called or not: a call may be lost."""

FULL_S: Final = 0.25
"""How long to wait for room; usually one is woken before."""

MOST_UNSENT: Final = 4_000
"""Ended jobs that the server has not heard of yet."""

BUSY: Final = 2_000.0
"""From this many jobs a second on, several are taken together or none."""


class Taker:
    """One round after the other while there is work and room."""

    def __init__(
        self,
        store: Store,
        worker: str,
        shares: Shares,
        hands: Hands,
        unsent: Callable[[], int],
        slots: Slots,
        died: queue.Died,
    ) -> None:
        self._store = store
        self._slots = slots
        self._worker = worker
        self._shares = shares
        self._hands = hands
        self._unsent = unsent
        self._died = died
        self.calls = Calls(shares.queues, len(store.keys))
        self._polled_at = 0.0
        self._pauses = Pauses()
        self.hungry = False
        """It waits for room, and wants to know when there is some."""

    @property
    def room(self) -> int:
        # While the server does not hear how jobs end, no more are begun: nothing piles up here.
        return self._hands.room if self._unsent() < MOST_UNSENT else 0

    @property
    def worthwhile(self) -> bool:
        """Enough room for a round. The busier, the more: each round then has more to carry."""
        room = self.room
        return room >= 1 and (self._hands.rate < BUSY or room >= self._hands.concurrency // 2)

    async def step(self) -> float:
        self.hungry = not self.worthwhile
        if self.hungry:
            return FULL_S
        now = time.monotonic()
        if now >= self._polled_at + POLL_S:
            self._pauses = Pauses(await read_pauses(self._store), self._store.clock.now_ms())
            self.calls.call_all()
            self._polled_at = now
        having = [queue for queue in self.calls.having() if self._pauses.of_queue(queue) is None]
        wanted = self._shares.split(self.room, [queue for queue in having if not self._slots.full(queue)])
        async with self._slots.within(wanted) as shares:
            if asks := self.calls.asks(shares):
                await self._take(asks, shares)
                return 0.0
        # Slots come free on other workers too, and nobody says so.
        wait_s = max(0.0, self._polled_at + POLL_S - now)
        return min(wait_s, max(0.01, self._slots.wait_s(having))) if having else wait_s

    async def _take(self, asks: queue.Asks, shares: Mapping[str, int]) -> None:
        asked = steady_s()
        jobs = await queue.take(self._store, self._worker, asks, self._died)
        self._hands.add(jobs, asked)
        self.calls.came(asks, ((job.partition, job.queue) for job in jobs))
        got = dict.fromkeys(shares, 0)
        for job in jobs:
            got[job.queue] += 1
        self._shares.came(shares, got)
