"""Shared by tests of queues: a worker by hand, and a look at all partitions."""

from collections.abc import Sequence

from mainspring.model.delivery import DONE, Dead, Done, Retry
from mainspring.model.job import End, Job, JobCancelled
from mainspring.store import job_queue
from mainspring.store.store import Store

QUEUE = "mail"
TARGET = f"queue:{QUEUE}/send"


class HandWorker:
    """Takes, ends and keeps jobs on request."""

    def __init__(self, store: Store, name: str = "w1", *, queues: Sequence[str] = (QUEUE,)) -> None:
        self.store = store
        self.name = name
        self.queues = tuple(queues)

    def asks(self, most: int) -> dict[int, dict[str, int]]:
        return {p: dict.fromkeys(self.queues, most) for p in range(len(self.store.keys))}

    async def take(self, most: int = 100) -> list[Job]:
        jobs = await job_queue.take(self.store, self.name, self.asks(most))
        return sorted(jobs, key=lambda job: (job.due_ms, job.body.payload))

    async def take_one(self) -> Job:
        [job] = await self.take()
        return job

    async def reclaim(self, *, lease_ms: int = 0, most: int = 100) -> list[Job]:
        """With no lease: everything that others have taken."""
        return await job_queue.reclaim(self.store, self.name, self.asks(most), lease_ms=lease_ms)

    async def end(self, *jobs: Job, outcome: Done | Retry | Dead | JobCancelled = DONE) -> list[job_queue.FinishAnswer]:
        return await job_queue.finish(self.store, [End(job, outcome) for job in jobs])


def values(jobs: Sequence[Job]) -> list[bytes]:
    return [job.body.payload for job in jobs]
