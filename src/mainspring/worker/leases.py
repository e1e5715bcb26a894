"""Leases of a worker: its entry in the list of workers, heartbeats for its jobs, concurrency slots, and jobs reclaimed
from dead workers."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from ..model.clock import steady_s
from ..model.job import Job
from ..model.lane import Pauses
from ..store import job_queue, limits, members
from ..store.lanes import read_pauses

if TYPE_CHECKING:
    from .worker import Worker

log = logging.getLogger("mainspring.worker")


class ConcurrencyLeases:
    """Leased concurrency slots of queues with a limit."""

    def __init__(self, worker: "Worker") -> None:
        self._worker, self._store = worker, worker.store
        # Two workers may share a name but must not share slots: add a nonce.
        self._holder = f"{worker.options.name}/{secrets.token_hex(4)}"
        self._limits = dict(worker.options.slots)
        self._lease_ms = int(worker.options.lease_s * 1000)
        self._slots = dict.fromkeys(self._limits, 0)
        self._ask_at_ms = dict.fromkeys(self._limits, 0)
        self._renew_at_ms = 0
        self._turn = asyncio.Lock()
        self.kept: frozenset[str] = frozenset()
        """Queues whose next slots are reserved for reclaimed jobs: otherwise new jobs would always take them."""

    @contextlib.asynccontextmanager
    async def within(self, shares: Mapping[str, int]) -> AsyncIterator[dict[str, int]]:
        """Yield as much of these shares as there are slots for. Jobs taken for them must be in hand when the block
        ends: until then these slots are neither given to another caller here nor returned."""
        if self._limits.keys().isdisjoint(shares):
            yield dict(shares)
            return
        async with self._turn:
            yield await self._within(shares)

    async def _within(self, shares: Mapping[str, int]) -> dict[str, int]:
        limited = [queue for queue in shares if queue in self._limits]
        running = Counter(self._worker.executor.queues)
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
        """Renew slots in use, return the others.

        A role of its own: a stopping worker takes no more jobs, but its running jobs still need their slots.
        """
        if self._store.clock.now_ms() >= self._renew_at_ms:
            await self.release()
        wait_ms = self._lease_ms // 3
        if any(self._slots.values()):
            wait_ms = min(wait_ms, self._renew_at_ms - self._store.clock.now_ms())
        return max(0.01, wait_ms / 1000)

    async def release(self) -> None:
        """Return unused slots, so that other workers need not wait for the lease."""
        if any(self._slots.values()):
            async with self._turn:
                held = [queue for queue, count in self._slots.items() if count]
                await self._ask(dict.fromkeys(held, 0), Counter(self._worker.executor.queues))

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
        """Return True if no slot is free for new jobs and it is too early to ask again: others get a chance first."""
        if queue in self.kept:
            return True
        if queue not in self._limits or self._store.clock.now_ms() >= self._ask_at_ms[queue]:
            return False
        return self._slots[queue] <= sum(one == queue for one in self._worker.executor.queues)

    def wait_s(self, queues: Iterable[str]) -> float:
        """Return the time until it is worth asking again for one of these queues."""
        now_ms = self._store.clock.now_ms()
        waits = [self._ask_at_ms[queue] - now_ms for queue in queues if queue in self._limits]
        return max(0.0, min(waits, default=0) / 1000)


class Presence:
    """Keeps this worker in the list of live workers, for people and `explain`; no task depends on it."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._key = f"{worker.options.name}/{secrets.token_hex(4)}"

    async def step(self) -> float:
        await members.worker_beat(self._worker.store, self._key, self._worker.describe())
        return self._worker.options.lease_s / 3

    async def leave(self) -> None:
        await members.worker_leave(self._worker.store, self._key)


QUICK_S: Final = 0.1
"""Shortest time in seconds between requested heartbeats."""


class Heartbeat:
    """Renews the leases of running jobs, and stops runs whose jobs were lost or cancelled."""

    def __init__(self, worker: "Worker") -> None:
        self._store, self._executor = worker.store, worker.executor
        self._lease_s = worker.options.lease_s
        self._asked = False
        self._beaten_at = 0.0

    def called(self) -> None:
        """Send a heartbeat soon: a running job may have been cancelled."""
        self._asked = True

    async def beat(self) -> float:
        # Beat at a third of the lease, so that one lost heartbeat does not cost a job.
        every_s, now = self._lease_s / 3, time.monotonic()
        if self._asked and now < self._beaten_at + QUICK_S:
            return self._beaten_at + QUICK_S - now
        age_s = QUICK_S / 2 if self._asked else every_s / 2
        runs = {run.job.key: run for run in self._executor.taken_before(now - age_s)}
        # Most jobs just taken end soon. The next heartbeat, which follows soon, covers the others.
        soon = self._asked and len(runs) < len(self._executor.runs)
        self._asked, self._beaten_at = soon, now
        if runs:
            lost, cancelled = await job_queue.beat(self._store, [run.job for run in runs.values()])
            for job in lost:
                log.warning("%s: another worker has it by now; this run does not count", job.id,
                            extra={"task": job.id})  # fmt: skip
                self._executor.stop_run(runs[job.key], "lost")
            for job in cancelled:
                self._executor.stop_run(runs[job.key], "cancelled")
        return QUICK_S if soon else every_s


SHORT_S: Final = 0.25
"""Seconds between checks for slots given back by other workers; a free slot of this worker wakes the role."""


class Reclaimer:
    """Reclaims jobs of dead workers, as many as there are room and slots for."""

    def __init__(self, worker: "Worker") -> None:
        self._worker, self._store, self._slots = worker, worker.store, worker.slots
        self._lease_ms = int(worker.options.lease_s * 1000)

    async def step(self) -> float:
        """Reclaim jobs whose worker sent no heartbeat for a lease. Jobs of a paused queue wait."""
        every_s, room = self._lease_ms / 2000, self._worker.taker.room
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
        queues = [one for one in self._worker.options.queues if pauses.of_queue(one) is None]
        return await job_queue.left_behind(self._store, queues, lease_ms=self._lease_ms, most=room) if queues else {}

    async def _take(self, asks: job_queue.Asks) -> list[Job]:
        if not asks:
            return []
        asked = steady_s()
        name, endings = self._worker.options.name, self._worker.finisher
        jobs = await job_queue.reclaim(self._store, name, asks, endings, lease_ms=self._lease_ms)
        for job in jobs:
            log.warning("%s: its worker stopped sending heartbeats; it runs here now", job.id, extra={"task": job.id})
        self._worker.executor.add(jobs, asked)
        return jobs


def _fitting(left: job_queue.Asks, shares: Mapping[str, int], room: int) -> dict[int, dict[str, int]]:
    """Return as many of the left jobs as the shares of the queues and the room allow."""
    free = dict(shares)
    asks: dict[int, dict[str, int]] = {}
    for partition, counts in left.items():
        for name, count in counts.items():
            if (most := min(count, free.get(name, 0), room)) > 0:
                asks.setdefault(partition, {})[name] = most
                free[name] -= most
                room -= most
    return asks
