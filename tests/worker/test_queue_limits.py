"""Limits and retries of queues: `[queue.<name>]` counts for all workers together."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from mainspring import Context, Retry
from mainspring.model.errors import InvalidInput
from mainspring.model.flow import Limit, Rate
from mainspring.model.queue_rules import QueueRules
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import Task
from mainspring.store import limits
from mainspring.store.store import Store
from mainspring.worker.handler import Handler
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.job_queues import HandWorker
from tests.support.workers import PATIENCE_S, Place, open_place, until
from tests.worker.test_lifecycle import queued


@pytest.fixture
async def place(fleet: Fleet, namespace: str) -> AsyncIterator[Place]:
    async with open_place(fleet.url, namespace, PARTITIONS) as made:
        yield made


async def test_all_workers_together_keep_the_slots_of_a_queue(place: Place) -> None:
    running = most = others = 0

    async def limited() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1

    async def free() -> None:
        nonlocal others
        others += 1

    slots = {"mail": Limit(concurrency=3)}
    for _ in range(2):
        await place.worker(Handler(limited, queue="mail"), Handler(free, queue="other"), slots=slots)
    await place.client.put_many(Task("queue:mail/limited") for _ in range(60))
    await place.client.put_many(Task("queue:other/free") for _ in range(60))
    await until(lambda: others == 60)
    await place.settled()
    assert most <= 3
    assert others == 60


async def test_workers_of_one_name_share_the_slots_like_any_others(place: Place) -> None:
    running: list[str] = []
    go = asyncio.Event()

    async def limited(ctx: Context) -> None:
        running.append(ctx.id)
        await go.wait()

    slots = {"mail": Limit(concurrency=1)}
    await place.client.put_many(Task("queue:mail/limited") for _ in range(4))
    workers = [await place.worker(Handler(limited, queue="mail"), slots=slots, name="same") for _ in range(2)]
    await until(lambda: running)
    for worker in workers:
        worker.taker.ready.add_all()
        await worker.taker.step()
    assert len(running) == sum(len(worker.executor.runs) for worker in workers) == 1
    go.set()
    await place.settled()
    assert len(set(running)) == len(running) == 4


async def test_a_worker_that_stops_gives_its_slots_back(place: Place) -> None:
    ran: list[str] = []

    async def limited(ctx: Context) -> None:
        ran.append(ctx.id)

    slots = {"mail": Limit(concurrency=1)}
    for _ in range(2):
        await place.client.put("queue:mail/limited")
        worker = await place.worker(Handler(limited, queue="mail"), slots=slots, lease_s=600.0)
        await place.settled()
        await worker.stop()
    assert len(ran) == 2


async def test_a_thread_that_outran_its_timeout_keeps_its_slot_until_it_returns(place: Place) -> None:
    begun: list[str] = []
    go = threading.Event()

    def limited(ctx: Context) -> None:
        begun.append(ctx.id)
        go.wait(60)

    slots = {"mail": Limit(concurrency=1)}
    works = [Handler(limited, queue="mail", timeout="100ms", retry=RetryPolicy(1))]
    workers = [await place.worker(*works, slots=slots) for _ in range(2)]
    await place.client.put("queue:mail/limited", id="first")
    await until(lambda: begun)
    await place.client.put("queue:mail/limited", id="second")
    await queued(place, 1)
    await until(lambda: not any(worker.executor.runs for worker in workers))
    for worker in workers:
        await worker.slots.release()  # of what nothing runs on
    ask = limits.Ask(limits.running("mail"), slots["mail"], 0, 1)
    [third] = await limits.ask(place.store, "third", [ask], 1_000)
    assert (third.slots, begun) == (0, ["first"])
    go.set()
    await place.settled()
    assert begun == ["first", "second"]


async def slot_leased_until_us(store: Store, queue: str) -> int:
    """When the lease of the only holder of slots ends."""
    [flat] = await store.run_one(store.keys.slot, [("HGETALL", store.keys.limit(limits.running(queue)))])
    [lease] = [value for value in flat[1::2] if value.count(b":") == 2]
    return int(lease.rpartition(b":")[2])


async def test_a_job_that_runs_while_its_worker_stops_keeps_its_slot(place: Place) -> None:
    begun: list[str] = []
    go = asyncio.Event()

    async def limited(ctx: Context) -> None:
        begun.append(ctx.id)
        await go.wait()

    slots = {"mail": Limit(concurrency=1)}
    first = await place.worker(Handler(limited, queue="mail"), slots=slots, lease_s=6.0, shutdown_timeout_s=60.0)
    await place.client.put("queue:mail/limited", id="first")
    await until(lambda: begun)
    stop = asyncio.create_task(first.stop())
    await until(lambda: first.stopping)
    leased_until_us = await slot_leased_until_us(place.store, "mail")
    async with asyncio.timeout(PATIENCE_S):
        while await slot_leased_until_us(place.store, "mail") <= leased_until_us:
            assert not stop.done()
            await asyncio.sleep(0.02)
    ask = limits.Ask(limits.running("mail"), slots["mail"], 0, 1)
    [other] = await limits.ask(place.store, "other", [ask], 1_000)
    assert other.slots == 0, "two would run at one time"
    go.set()
    assert await stop
    [other] = await limits.ask(place.store, "other", [ask], 1_000)
    assert other.slots == 1


async def test_a_job_of_a_dead_worker_is_the_next_to_get_a_slot(place: Place) -> None:
    begun: list[str] = []
    running = most = 0
    go = asyncio.Event()

    async def limited(ctx: Context) -> None:
        nonlocal running, most
        begun.append(ctx.id)
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1

    worker = await place.worker(Handler(limited, queue="mail"), slots={"mail": Limit(concurrency=1)}, lease_s=0.3)
    await place.client.put("queue:mail/limited", id="first")
    await until(lambda: running)
    await place.client.put("queue:mail/limited", id="left")
    await queued(place, 2)
    assert (await HandWorker(place.store, "dead").take_one()).id == "left"
    await place.client.put_many(Task("queue:mail/limited", id=f"new-{n}") for n in range(20))
    await until(lambda: worker.slots.kept or running > 1)
    go.set()
    await place.settled()
    assert most == 1
    assert begun[:2] == ["first", "left"]
    assert len(begun) == 22


async def test_jobs_of_dead_workers_are_found_in_every_partition(place: Place) -> None:
    """With one slot only, and more than there is room for."""
    begun: list[str] = []

    async def limited(ctx: Context) -> None:
        begun.append(ctx.id)

    await place.client.put_many(Task("queue:mail/limited", id=f"left-{n}") for n in range(20))
    await queued(place, 20)
    assert len(await HandWorker(place.store, "dead").take()) == 20
    slots = {"mail": Limit(concurrency=1)}
    await place.worker(Handler(limited, queue="mail"), slots=slots, concurrency=2, lease_s=0.3)
    await place.settled()
    assert len(set(begun)) == len(begun) == 20


async def test_a_queue_may_have_a_retry_policy_and_a_handlers_own_goes_before_it(place: Place) -> None:
    attempts = {"queued": 0, "own": 0}

    async def queued() -> None:
        attempts["queued"] += 1
        raise Retry("no", after_ms=1)

    async def own() -> None:
        attempts["own"] += 1
        raise Retry("no", after_ms=1)

    await place.worker(
        Handler(queued, queue="mail"),
        Handler(own, queue="mail", retry=RetryPolicy(4)),
        queue_retries={"mail": RetryPolicy(2)},
        retry=RetryPolicy(9),
    )
    await place.client.put("queue:mail/queued")
    await place.client.put("queue:mail/own")
    await place.settled()
    assert attempts == {"queued": 2, "own": 4}


def test_rules_of_queues_are_read_and_written_the_same() -> None:
    rules = QueueRules.read({"mail": {"rate": "10/s burst 3", "concurrency": 4, "retry": "3 base=1m"}, "other": {}})
    assert QueueRules.read(rules.tables()) == rules
    assert rules.rates() == {"queue:mail": Limit(Rate(10, 3))}
    assert rules.slots() == {"mail": Limit(concurrency=4)}
    assert rules.retries() == {"mail": RetryPolicy(3, base_ms=60_000)}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"mail": {"speed": 3}},
            "mail: speed is not a setting of a queue; use rate, concurrency, retry, lane_policy",
        ),
        ({"mail": {"concurrency": "3"}}, "mail: concurrency: expected a whole number"),
        ({"mail": {"concurrency": 0}}, "mail: concurrency is 0"),
        ({"mail": {"rate": "fast"}}, "mail: rate: 'fast' is not a rate"),
        ({"a b": {}}, "queue 'a b'"),
        ([], "expected a table of tables"),
    ],
)
def test_wrong_rules_of_queues_are_refused(tables: object, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        QueueRules.read(tables)
    assert message in str(caught.value)
