"""A paused queue: what was handed off before stays in its stream, and workers take from the others."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mainspring.model.task import Task
from mainspring.store import job_queue
from mainspring.worker.handler import Handler
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.workers import Place, open_place, until
from tests.worker.test_lifecycle import queued


@pytest.fixture
async def place(fleet: Fleet, namespace: str) -> AsyncIterator[Place]:
    async with open_place(fleet.url, namespace, PARTITIONS) as made:
        yield made


async def test_workers_take_nothing_from_a_paused_queue_until_it_is_resumed(place: Place) -> None:
    ran: list[str] = []

    async def mail() -> None:
        ran.append("mail")

    async def report() -> None:
        ran.append("report")

    for name in ("mail", "report"):
        await place.client.put_many(Task(f"queue:{name}/{name}", None) for _ in range(10))
    await queued(place, 20)
    await place.client.pause(queue="mail", reason="provider is down")
    works = (Handler(mail, queue="mail"), Handler(report, queue="report"))
    await place.worker(*works, queues="mail:3,report:1", concurrency=4)
    await until(lambda: len(ran) == 10)
    assert set(ran) == {"report"}
    assert (await place.client.put("queue:mail/mail", None, id="x")).outcome == "created"
    await place.client.resume(queue="mail")
    await place.settled()
    assert ran.count("mail") == 11


async def test_the_job_of_a_dead_worker_waits_in_a_paused_queue_too(place: Place) -> None:
    """It may be what its workers die of, and the pause what somebody does about it."""
    ran: list[str] = []

    async def work() -> None:
        ran.append("once")

    await place.client.put("queue:mail/work", None, id="poison")
    await queued(place, 1)
    asks = {partition: {"mail": 1} for partition in range(PARTITIONS)}
    assert len(await job_queue.take(place.store, "dead", asks)) == 1
    await place.client.pause(queue="mail", reason="its workers die")
    worker = await place.idle_worker([Handler(work, queue="mail")], lease_s=0.5)
    async with asyncio.timeout(60):
        while not await job_queue.left_behind(place.store, ["mail"], lease_ms=500, most=1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await worker.reclaimer.step() == 0.25
    assert not worker.executor.runs
    await place.client.resume(queue="mail")
    await worker.reclaimer.step()
    await until(lambda: ran)
    await until(lambda: not worker.executor.runs)
    await worker.finisher.step()
    await place.settled()
    assert ran == ["once"]
