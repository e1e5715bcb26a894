"""A worker driven by hand: it takes the waiting tasks, runs them to completion, and reports to the server."""

import asyncio
from typing import Final

from ..scheduler.scheduler import Scheduler
from ..store.store import Store
from ..worker.worker import Worker, WorkerOptions

GIVE_UP_S: Final = 60.0


class ManualWorker:
    """Runs the handlers of a scheduler on the store of a test."""

    def __init__(self, store: Store, scheduler: Scheduler) -> None:
        config = scheduler.config
        options = WorkerOptions(
            "by-hand",
            dict.fromkeys(scheduler.registry.queues, 1),
            retry=config.retry,
            error_handler=config.error_handler,
            log_redact=config.log_redact,
            queue_retries=config.queue.retries(),
            lane_policy=config.lane_policy,
            queue_lanes=config.queue.lane_policies(),
        )
        self._worker = Worker(store, scheduler.registry, options)

    async def turn(self) -> bool:
        """Run everything that waits in the queues; return whether there was anything."""
        worker, worked = self._worker, False
        while True:
            worker.taker.ready.add_all()
            await worker.taker.step()
            if not worker.executor.runs and not worker.finisher.unsent:
                return worked
            worked = True
            async with asyncio.timeout(GIVE_UP_S):
                while worker.executor.runs:  # noqa: ASYNC110  # the executor signals only the worker's own roles
                    await asyncio.sleep(0.001)
            await worker.finisher.step()

    async def aclose(self) -> None:
        await self._worker.executor.close()
        await self._worker.failures.aclose()
