"""How many jobs of a queue may run at one time, on all workers together: slots that are leased from the server."""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from ..model.rate import Limit
from ..store import limits
from ..store.store import Store


class Slots:
    """What this worker may run of the queues that have a limit."""

    def __init__(
        self,
        store: Store,
        worker: str,
        by_queue: Mapping[str, Limit],
        lease_s: float,
        running: Callable[[], Iterable[str]],
    ) -> None:
        self._store = store
        # Workers may have one name, and must not count as one: each has slots of its own.
        self._holder = f"{worker}/{secrets.token_hex(4)}"
        self._limits = dict(by_queue)
        self._lease_ms = int(lease_s * 1000)
        self._running = running
        """The queues of what runs here, one for each job."""
        self._slots = dict.fromkeys(self._limits, 0)
        self._ask_at_ms = dict.fromkeys(self._limits, 0)
        self._renew_at_ms = 0
        self._turn = asyncio.Lock()
        self.kept: frozenset[str] = frozenset()
        """Queues whose next slots are for what dead workers left: else new work would have them again and again."""

    @contextlib.asynccontextmanager
    async def within(self, shares: Mapping[str, int]) -> AsyncIterator[dict[str, int]]:
        """As much of these shares as there are slots for. What is got for them must be in hand when the block ends:
        until then nobody else here counts them as free, nor gives them back."""
        if self._limits.keys().isdisjoint(shares):
            yield dict(shares)
            return
        async with self._turn:
            yield await self._within(shares)

    async def _within(self, shares: Mapping[str, int]) -> dict[str, int]:
        limited = [queue for queue in shares if queue in self._limits]
        running = Counter(self._running())
        now_ms = self._store.clock.now_ms()
        short = [
            queue
            for queue in limited
            if self._slots[queue] - running[queue] < shares[queue] and now_ms >= self._ask_at_ms[queue]
        ]
        if short:
            await self._ask({queue: shares[queue] for queue in short}, running)
        free = {queue: self._slots[queue] - running[queue] for queue in limited}
        capped = {queue: min(most, free.get(queue, most)) for queue, most in shares.items()}
        return {queue: most for queue, most in capped.items() if most > 0}

    async def keep(self) -> float:
        """Slots in use are leased on, those that nobody needs are given back.

        A role of its own: a worker that stops takes nothing more, and what runs there still needs its slots.
        """
        if self._store.clock.now_ms() >= self._renew_at_ms:
            await self.release()
        wait_ms = self._lease_ms // 3
        if any(self._slots.values()):
            wait_ms = min(wait_ms, self._renew_at_ms - self._store.clock.now_ms())
        return max(0.01, wait_ms / 1000)

    async def release(self) -> None:
        """Give back all that nothing runs on: others need not wait for the lease."""
        if any(self._slots.values()):
            async with self._turn:
                held = [queue for queue, count in self._slots.items() if count]
                await self._ask(dict.fromkeys(held, 0), Counter(self._running()))

    async def _ask(self, wants: Mapping[str, int], running: Counter[str]) -> None:
        asks = [
            limits.Ask(limits.running(queue), self._limits[queue], running[queue], max(0, want))
            for queue, want in wants.items()
        ]
        answers = await limits.ask(self._store, self._holder, asks, self._lease_ms)
        now_ms = self._store.clock.now_ms()
        for queue, answer in zip(wants, answers, strict=True):
            self._slots[queue] = answer.slots
            self._ask_at_ms[queue] = now_ms + answer.wait_ms
        self._renew_at_ms = now_ms + self._lease_ms // 3

    def full(self, queue: str) -> bool:
        """No slot is free for new work, and it is too early to ask for more: others may have their turn."""
        if queue in self.kept:
            return True
        if queue not in self._limits or self._store.clock.now_ms() >= self._ask_at_ms[queue]:
            return False
        return self._slots[queue] <= sum(one == queue for one in self._running())

    def wait_s(self, queues: Iterable[str]) -> float:
        """Until it is worth asking again for one of these."""
        now_ms = self._store.clock.now_ms()
        waits = [self._ask_at_ms[queue] - now_ms for queue in queues if queue in self._limits]
        return max(0.0, min(waits, default=0) / 1000)
