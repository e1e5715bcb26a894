"""Workers come, go, die and share; queues have weights and an order."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from mainspring import Context, __version__
from mainspring.model.clock import steady_s
from mainspring.model.flow import Limit
from mainspring.model.task import Task
from mainspring.store import job_queue
from mainspring.testing.faults import bad_road, calls
from mainspring.worker.executor import MOST_DELIVERIES
from mainspring.worker.handler import Handler
from mainspring.worker.leases import QUICK_S
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.workers import Place, open_place, until, until_async


@pytest.fixture
async def place(fleet: Fleet, namespace: str) -> AsyncIterator[Place]:
    async with open_place(fleet.url, namespace, PARTITIONS) as made:
        yield made


async def queued(place: Place, count: int) -> None:
    """Wait until this many tasks are in the streams."""

    async def waiting() -> int:
        total = 0
        for keys in place.store.keys.partitions:
            [answer] = await place.store.run_one(keys.slot, [("HGET", keys.n, "queued")])
            total += int(answer or 0)
        return total

    async with asyncio.timeout(60):
        while await waiting() < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 64])
async def test_queues_are_served_by_weight_at_every_concurrency(fleet: Fleet, namespace: str, concurrency: int) -> None:
    order: list[str] = []
    enough = asyncio.Event()

    async def work(queue: str) -> None:
        order.append(queue)
        if len(order) >= 400:
            enough.set()
        await asyncio.sleep(0.02)  # work takes time: handlers that end at once never leave a worker full

    # Tasks of one call share a few of the partitions, so most partitions have tasks of one queue only, or none.
    async with open_place(fleet.url, namespace, 32) as place:
        for name in ("high", "low"):
            await place.client.put_many(Task(f"queue:{name}/work", {"queue": name}) for _ in range(800))
        await queued(place, 1600)
        works = (Handler(work, queue="high"), Handler(work, queue="low"))
        await place.worker(*works, queues="high:3,low:1", concurrency=concurrency)
        async with asyncio.timeout(60):
            await enough.wait()
    runs = Counter(order[:400])
    assert runs["high"] / runs["low"] == pytest.approx(3, rel=0.15), runs


async def test_strict_queues_are_served_in_order(place: Place) -> None:
    order: list[str] = []

    async def urgent() -> None:
        order.append("urgent")

    async def later() -> None:
        order.append("later")

    for name in ("later", "urgent"):
        await place.client.put_many(Task(f"queue:{name}/{name}", None) for _ in range(100))
    await queued(place, 200)
    works = (Handler(urgent, queue="urgent"), Handler(later, queue="later"))
    await place.worker(*works, queues="urgent,later", strict=True, concurrency=1)
    await place.settled()
    assert order == ["urgent"] * 100 + ["later"] * 100


async def test_a_strict_queue_that_has_reached_its_limit_gives_way_to_the_next(place: Place) -> None:
    gate = asyncio.Event()
    ran: list[str] = []

    async def urgent() -> None:
        await gate.wait()
        ran.append("urgent")

    async def later() -> None:
        ran.append("later")

    for name in ("urgent", "later"):
        await place.client.put_many(Task(f"queue:{name}/{name}", None) for _ in range(3))
    await queued(place, 6)
    works = (Handler(urgent, queue="urgent"), Handler(later, queue="later"))
    await place.worker(*works, queues="urgent,later", strict=True, slots={"urgent": Limit(concurrency=1)})
    await until(lambda: ran == ["later"] * 3)
    gate.set()
    await place.settled()
    assert ran == ["later"] * 3 + ["urgent"] * 3


async def test_workers_share_and_no_task_runs_twice(place: Place) -> None:
    ran: Counter[str] = Counter()
    by: Counter[int] = Counter()

    def handler(number: int) -> Handler:
        async def work(n: str) -> None:
            ran[n] += 1
            by[number] += 1
            await asyncio.sleep(0.001)

        return Handler(work, queue="q", name="work")

    for number in range(3):
        await place.worker(handler(number), concurrency=4)
    await place.client.put_many(Task("queue:q/work", {"n": str(n)}) for n in range(600))
    await place.settled()
    assert len(ran) == 600
    assert set(ran.values()) == {1}
    assert min(by.values()) > 60, by


async def test_a_dead_workers_job_runs_elsewhere_with_the_same_key_and_its_own_end_does_not_count(place: Place) -> None:
    keys: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()

    async def work(ctx: Context) -> str:
        keys.append(ctx.idempotency_key)
        if len(keys) == 1:
            begun.set()
            await go.wait()
            return "from the dead"
        return "from the living"

    works = [Handler(work, queue="q", result_ttl="1m")]
    silent = await place.worker(*works, lease_s=1.0)
    handle = await place.client.put("queue:q/work", id="one")
    async with asyncio.timeout(60):
        await begun.wait()
    await silent._beat.stop()  # it runs on, and says nothing any more
    await place.worker(*works, lease_s=1.0)
    assert await handle.result(timeout=60) == "from the living"
    go.set()
    await until(lambda: not silent.executor.runs)
    await until(lambda: not silent.finisher.unsent)
    assert keys[0] == keys[1]
    assert len(keys) == 2
    assert await handle.result() == "from the living"


async def test_a_worker_with_room_for_one_job_takes_over_from_each_of_its_queues(place: Place) -> None:
    ran: list[str] = []

    async def work(ctx: Context) -> None:
        ran.append(ctx.queue)

    names = ("first", "second", "third")
    await place.client.put_many(Task(f"queue:{name}/work", None) for name in names)
    await queued(place, len(names))
    asks = {partition: dict.fromkeys(names, 1) for partition in range(PARTITIONS)}
    assert len(await job_queue.take(place.store, "dead", asks)) == len(names)
    await place.worker(*(Handler(work, queue=name) for name in names), concurrency=1, lease_s=0.5)
    await until(lambda: len(ran) == len(names))
    assert sorted(ran) == sorted(names)


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_a_suspended_worker_begins_no_job_whose_lease_is_over(place: Place, kind: str) -> None:
    ran: list[str] = []

    async def coroutine(ctx: Context) -> None:
        ran.append(ctx.queue)

    def thread(ctx: Context) -> None:
        ran.append(ctx.queue)

    works = [Handler({"coroutine": coroutine, "thread": thread}[kind], queue="q", name="work")]
    stood_still = await place.idle_worker(works, lease_s=1.0)
    await place.client.put("queue:q/work", id="one")
    await queued(place, 1)
    asks = {partition: {"q": 1} for partition in range(PARTITIONS)}
    [job] = await job_queue.take(place.store, "idle", asks)
    stood_still.executor.add([job], steady_s() - 1.1)
    await until(lambda: not stood_still.executor.runs)
    assert ran == []
    await stood_still.finisher.step()
    # The server had heard nothing of it, so it is there for everybody at once, as if it had never been taken.
    [again] = await job_queue.take(place.store, "other", asks)
    assert (again.id, again.deliveries) == (job.id, 1)
    stood_still.executor.add([again], steady_s())
    await until(lambda: not stood_still.executor.runs)
    assert ran == ["q"]
    await stood_still.finisher.step()
    await stood_still.executor.close()
    await stood_still.failures.aclose()


async def test_a_long_job_is_never_taken_away_while_its_worker_beats(place: Place) -> None:
    runs: list[int] = []
    go = asyncio.Event()

    async def long() -> None:
        runs.append(1)
        await go.wait()

    lease_s = 3.2  # that of the other worker: the long run beats 16 times in it, so a stall of 3 s costs nothing
    await place.worker(Handler(long, queue="q"), lease_s=0.6)
    other = await place.idle_worker([Handler(long, queue="q")], lease_s=lease_s)
    await place.client.put("queue:q/long")
    await until(lambda: runs)
    end = time.monotonic() + 1.25 * lease_s
    while time.monotonic() < end:
        asks = {partition: {"q": 1} for partition in range(PARTITIONS)}
        assert await job_queue.reclaim(place.store, other.options.name, asks, lease_ms=int(lease_s * 1000)) == []
        await asyncio.sleep(0.02)
    go.set()
    await place.settled()
    assert runs == [1]


async def test_a_job_that_ends_its_workers_is_buried_in_the_end(place: Place) -> None:
    async def never() -> None:
        raise AssertionError("it must not be run once more")

    await place.client.put("queue:q/never", id="poison")
    await queued(place, 1)
    asks = {partition: {"q": 1} for partition in range(PARTITIONS)}
    [job] = await job_queue.take(place.store, "w0", asks)
    for number in range(MOST_DELIVERIES - 1):
        [job] = await job_queue.reclaim(place.store, f"w{number + 1}", asks, lease_ms=0)
    assert job.deliveries == MOST_DELIVERIES
    await place.worker(Handler(never, queue="q"), lease_s=0.5)
    await place.settled()
    dead_letter = await place.client.dead_get("poison")
    assert dead_letter is not None
    assert dead_letter.reason == f"the workers that ran it died, {MOST_DELIVERIES} times in a row"


async def test_a_clean_stop_finishes_what_runs_and_gives_back_what_does_not(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    running: list[str] = []
    go = asyncio.Event()

    async def work(n: str) -> None:
        running.append(n)
        await go.wait()

    works = [Handler(work, queue="q")]
    first = await place.worker(*works, concurrency=2, shutdown_timeout_s=60)

    def took_ahead() -> bool:
        first.executor.rate = 10_000  # as after many short ones: it takes more than it can begin; it falls with time
        return len(running) == 2 and len(first.executor.runs) > 2

    took_ahead()
    await place.client.put_many(Task("queue:q/work", {"n": str(n)}, id=str(n)) for n in range(6))
    await until(took_ahead)
    stopping = asyncio.create_task(first.stop())
    await until(lambda: len(first.executor.runs) == 2)
    second = await place.worker(*works, concurrency=8)
    await until(lambda: len(running) == 6)
    go.set()
    assert await stopping
    await place.settled()
    assert sorted(running) == [str(n) for n in range(6)]
    assert second.executor.ended == 4
    assert "does not count" not in caplog.text, "an end that is told twice looks like another worker's"


async def test_jobs_received_while_a_worker_stops_do_not_wait_for_its_lease(place: Place) -> None:
    ran: list[int] = []

    async def work(ctx: Context) -> None:
        ran.append(ctx.job.deliveries)

    works = [Handler(work, queue="q")]
    asks = {partition: {"q": 1} for partition in range(PARTITIONS)}
    assert await job_queue.take(place.store, "other", asks) == []  # the server knows the script
    await place.client.put_many(Task("queue:q/work", None) for _ in range(5))
    await queued(place, 5)
    first = await place.idle_worker(works, lease_s=600.0)
    with bad_road(first.store) as road:
        for _ in range(PARTITIONS):
            road.next("late reply", only=calls("queue_take"))
        await first.start()
        await until(lambda: road.late)
        stopping = asyncio.create_task(first.stop())
        await asyncio.sleep(0)  # it has begun to stop
        road.deliver_late()
        assert await stopping
    await place.worker(*works, lease_s=600.0)
    await place.settled()
    assert ran == [1] * 5


async def test_jobs_that_were_taken_ahead_and_cannot_begin_go_to_a_free_worker(place: Place) -> None:
    running: list[str] = []
    go = asyncio.Event()

    async def work(n: str) -> None:
        running.append(n)
        await go.wait()

    works = [Handler(work, queue="q")]
    busy = await place.worker(*works, concurrency=1)

    def took_ahead() -> bool:
        busy.executor.rate = 10_000
        return len(busy.executor.runs) > 1

    took_ahead()
    await place.client.put_many(Task("queue:q/work", {"n": str(n)}) for n in range(6))
    await until(took_ahead)
    await place.worker(*works, concurrency=8)
    await until(lambda: len(running) == 6)
    assert len(busy.executor.runs) == 1
    go.set()
    await place.settled()
    assert sorted(running) == [str(n) for n in range(6)]


async def test_a_job_that_does_not_end_in_time_is_given_back_without_a_failed_attempt(place: Place) -> None:
    attempts: list[tuple[int, tuple[str, ...]]] = []
    go = asyncio.Event()

    async def work(ctx: Context) -> None:
        attempts.append((ctx.attempt, ctx.errors))
        await go.wait()

    works = [Handler(work, queue="q", retries=0)]
    first = await place.worker(*works, shutdown_timeout_s=0.1)
    await place.client.put("queue:q/work")
    await until(lambda: attempts)
    assert not await first.stop()
    await place.worker(*works)
    await until(lambda: len(attempts) == 2)
    go.set()
    await place.settled()
    assert attempts == [(1, ()), (1, ())]
    assert (await place.client.dead_list()).letters == []


async def test_an_end_whose_reply_was_lost_is_reported_again_and_counts_once(place: Place) -> None:
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    worker = await place.worker(Handler(work, queue="q"))
    await place.client.put("queue:q/work")
    await place.settled()  # the script is known to the server now
    with bad_road(worker.store) as road:
        road.next("lose reply", only=calls("queue_finish"))
        await place.client.put("queue:q/work")
        await place.settled()
        await until(lambda: not worker.finisher.unsent)
    assert ran == [1, 1]


async def test_a_job_that_is_cancelled_as_it_begins_is_stopped_soon_with_any_lease(place: Place) -> None:
    async def wait_for_ever() -> None:
        await asyncio.sleep(3_600)

    worker = await place.idle_worker([Handler(wait_for_ever, queue="q", name="wait")], lease_s=3_600.0)
    handle = await place.client.put("queue:q/wait", id="wait")
    await queued(place, 1)
    worker.taker.ready.add_all()
    await worker.taker.step()
    [run] = worker.executor.runs
    assert await place.client.cancel(handle.id) == "cancelling"
    worker.heartbeat.called()
    waits = [await worker.heartbeat.beat()]
    while not run.context.cancelled and waits[-1] <= QUICK_S:
        await asyncio.sleep(waits[-1])
        waits.append(await worker.heartbeat.beat())
    assert run.stopped == "cancelled", waits
    await until(lambda: not worker.executor.runs)
    await worker.finisher.step()
    await worker.executor.close()
    await worker.failures.aclose()


async def test_a_worker_lists_what_it_serves_and_leaves_the_list_when_it_has_stopped(place: Place) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def send() -> None:
        begun.set()
        await go_on.wait()

    async def elsewhere() -> None:
        raise AssertionError("its queue is not served here")

    works = (Handler(send, queue="mail"), Handler(elsewhere, queue="other"))
    worker = await place.worker(*works, queues="mail:3,fax:1", name="w1", concurrency=7)
    await until_async(place.client.workers)
    await place.client.put("queue:mail/send", id="x")
    await begun.wait()

    async def runs() -> bool:
        [one] = await place.client.workers()
        return one.running == 1

    await until_async(runs)
    [one] = await place.client.workers()
    assert (one.id, one.pid, one.version) == ("w1", os.getpid(), __version__)
    assert (one.queues, one.targets, one.concurrency) == ({"mail": 3, "fax": 1}, ("queue:mail/send",), 7)
    assert one.started_ms <= one.seen_ms
    fax, mail = await place.client.queues()
    assert (fax.name, fax.workers, fax.ready) == ("fax", ["w1"], 0), "a queue without tasks is served as well"
    assert (mail.name, mail.workers, mail.running) == ("mail", ["w1"], 1)
    stopping = asyncio.create_task(worker.stop())

    async def unserved() -> bool:
        return [queue.workers for queue in await place.client.queues()] == [[]]

    await until_async(unserved)
    [one] = await place.client.workers()
    assert one.stopping, "it is listed until its jobs are over"
    go_on.set()
    await stopping
    assert await place.client.workers() == []
