"""Says that this worker lives, for every job it has; and takes over the jobs of those who do not say it."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from ..model.pause import Pauses
from ..store import queue
from ..store.pauses import read_pauses
from ..store.store import Store
from .hands import Hands

log = logging.getLogger("mainspring.worker")

QUICK_S: Final = 0.1
"""Beats that were called for come no closer together."""


class Heart:
    """Two roles: `beat` keeps what is ours, `reclaim` gets what has nobody any more."""

    def __init__(
        self,
        store: Store,
        worker: str,
        hands: Hands,
        queues: Sequence[str],
        lease_s: float,
        room: Callable[[], int],
        died: queue.Died,
    ) -> None:
        self._store = store
        self._worker = worker
        self._hands = hands
        self._queues = tuple(queues)
        self._lease_s = lease_s
        self._room = room
        self._died = died
        self._next = 0
        self._asked = False
        self._beaten_at = 0.0

    def called(self) -> None:
        """Somebody may want to cancel what runs here: the next beat shall come soon."""
        self._asked = True

    async def beat(self) -> float:
        # At a third of the lease: one lost beat must not cost a job.
        every_s, now = self._lease_s / 3, time.monotonic()
        if self._asked and now < self._beaten_at + QUICK_S:
            return self._beaten_at + QUICK_S - now
        age_s = QUICK_S / 2 if self._asked else every_s / 2
        runs = {run.job.key: run for run in self._hands.taken_before(now - age_s)}
        # Of what was just taken most is over soon. What is not is asked for with the next beat, which comes soon too.
        soon = self._asked and len(runs) < len(self._hands.runs)
        self._asked, self._beaten_at = soon, now
        if runs:
            lost, cancelled = await queue.beat(self._store, [run.job for run in runs.values()])
            for job in lost:
                log.warning("%s: another worker has it by now; this run does not count", job.id,
                            extra={"task": job.id})  # fmt: skip
                self._hands.stop_run(runs[job.key], "lost")
            for job in cancelled:
                self._hands.stop_run(runs[job.key], "cancelled")
        return QUICK_S if soon else every_s

    async def reclaim(self) -> float:
        """Jobs whose worker has fallen silent for a lease. In a paused queue they wait with the others."""
        every_s, room = self._lease_s / 2, self._room()
        if room < 1:
            return every_s
        pauses = Pauses(await read_pauses(self._store), self._store.clock.now_ms())
        queues = [queue for queue in self._queues if pauses.of_queue(queue) is None]
        asks, part = self._asks(room, queues)
        if not asks:
            return every_s
        jobs = await queue.reclaim(self._store, self._worker, asks, self._died, lease_ms=int(self._lease_s * 1000))
        for job in jobs:
            log.warning("%s: its worker has fallen silent; it runs here now", job.id, extra={"task": job.id})
        self._hands.add(jobs)
        return 0.0 if jobs else every_s * part

    def _asks(self, room: int, queues: Sequence[str]) -> tuple[dict[int, dict[str, int]], float]:
        """All queues in all partitions where there is room for them, else as many as fit, in turn; and what part of
        all that is. With room for one job only, each queue must come to its turn all the same."""
        places = [(p, one) for p in range(len(self._store.keys)) for one in queues]
        count = min(room, len(places))
        asks: dict[int, dict[str, int]] = {}
        for i in range(self._next, self._next + count):
            partition, one = places[i % len(places)]
            asks.setdefault(partition, {})[one] = room // count
        self._next = (self._next + count) % max(1, len(places))
        return asks, count / max(1, len(places))
