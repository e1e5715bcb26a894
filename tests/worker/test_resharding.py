"""Slots that move while tasks are handed off, run and ended: nothing is lost, and nothing runs twice."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import Engine
from mainspring.model.delivery import DONE, Done, Retry
from mainspring.model.errors import StoreError
from mainspring.model.job import End, Job, JobCancelled
from mainspring.store import job_queue, queue_state
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import Kind, Server, ServerCluster, cluster
from tests.support.job_queues import TARGET, HandWorker
from tests.support.traffic import QUICK

TASKS = 240
PATIENCE_S = 120


@pytest.fixture(scope="module")
def nodes(kind: Kind) -> Iterator[ServerCluster]:
    with cluster(3, 0, kind) as started:
        yield started


def another(nodes: ServerCluster, slot: int) -> Server:
    holder = nodes.owner_of(slot)
    return next(one for one in nodes.masters if one is not holder)


class BusyWorker:
    """Runs everything once: each fourth job fails at first, the others are done."""

    def __init__(self, store: Store) -> None:
        self.hands = HandWorker(store)
        self.runs: Counter[tuple[str, int]] = Counter()
        self.lanes: defaultdict[str, list[bytes]] = defaultdict(list)

    async def run(self) -> None:
        while True:
            try:
                jobs = await self.hands.take(10)
            except StoreError:
                jobs = []
            ends = [End(job, self._outcome(job)) for job in jobs]
            while ends:
                answers = await job_queue.finish(self.hands.store, ends)
                assert "lost" not in answers, "nobody else has these jobs, and no reply was lost"
                ends = [end for end, answer in zip(ends, answers, strict=True) if answer != "ok"]
            await asyncio.sleep(0.005)

    def _outcome(self, job: Job) -> Done | Retry | JobCancelled:
        self.runs[job.id, job.body.attempt] += 1
        number = int(job.body.payload)
        if number % 4 == 0 and job.body.attempt == 1:
            return Retry("at first", after_ms=100)
        if job.body.lane is not None:
            self.lanes[job.body.lane].append(job.body.payload)
        return DONE


async def put_all(client: Client) -> None:
    for i in range(TASKS):
        await client.put(TARGET, i, after="0s", id=f"n{i}", lane=f"lane{i % 5}" if i % 3 == 0 else None)
        if i % 20 == 0:
            await asyncio.sleep(0.05)


async def test_slots_move_there_and_back_under_workers(nodes: ServerCluster) -> None:
    store = await Store.open(nodes.url, namespace="moved", partitions=3, options=QUICK)
    engine = Engine(store, {})
    await engine.start()
    worker = BusyWorker(await Store.open(nodes.url, namespace="moved", options=QUICK))
    working = asyncio.create_task(worker.run())
    putting = asyncio.create_task(put_all(Client.over(store, wait_s=60)))
    try:
        async with asyncio.timeout(PATIENCE_S):
            for keys in (*store.keys.partitions, *store.keys.partitions):
                move = nodes.begin_move(keys.slot, another(nodes, keys.slot))
                while await asyncio.to_thread(move.step, 2):
                    await queue_state.depths(worker.hands.store)  # something between the steps, as others would ask
                await asyncio.to_thread(move.finish)
            await putting
            while (await balance(store)).done < TASKS:
                assert not working.done(), working.exception()
                await asyncio.sleep(0.05)
    finally:
        for task in (working, putting):
            task.cancel()
        await asyncio.gather(working, putting, return_exceptions=True)
        await engine.stop()
    assert set(worker.runs.values()) == {1}
    for lane, ran in worker.lanes.items():
        assert ran == sorted(ran, key=int), lane
    books = await balance(store)
    assert (books.done, books.queued, books.aside) == (TASKS, 0, 0)
    await worker.hands.store.aclose()
    await store.aclose()
    for server in nodes.masters:
        server.call("FLUSHALL")
