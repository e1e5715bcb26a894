"""Says that this worker lives, for every job it has."""

import logging
import time
from typing import Final

from ..store import queue
from ..store.store import Store
from .hands import Hands

log = logging.getLogger("mainspring.worker")

QUICK_S: Final = 0.1
"""Beats that were called for come no closer together."""


class Heart:
    """Keeps what is ours, and stops what is not any more."""

    def __init__(self, store: Store, hands: Hands, lease_s: float) -> None:
        self._store = store
        self._hands = hands
        self._lease_s = lease_s
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
