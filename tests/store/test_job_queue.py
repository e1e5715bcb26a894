"""Queues: a job is one worker's, only its claim ends it, and a worker that dies loses nothing."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Dead, Retry
from mainspring.model.errors import Unavailable
from mainspring.model.job import End, JobCancelled
from mainspring.store import job_queue, queue_state
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.servers import standalone
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import QUEUE, TARGET, HandWorker, values

Tickers = Callable[..., Awaitable[Ticker]]


@pytest.fixture
async def ticker(tickers: Tickers, store: Store) -> Ticker:
    return await tickers(workers=True)


@pytest.fixture
def worker(store: Store) -> HandWorker:
    return HandWorker(store)


@pytest.fixture
def other(store: Store) -> HandWorker:
    return HandWorker(store, "w2")


async def queued(ticker: Ticker, *payloads: str, **options: Any) -> None:
    for payload in payloads:
        await ticker.client.put(TARGET, payload, **options)
    await ticker.turn()


# -- claims ---------------------------------------------------------------------------------------------------


async def test_a_job_is_given_to_one_worker_only(ticker: Ticker, worker: HandWorker, other: HandWorker) -> None:
    await queued(ticker, *"abcdefgh")
    mine, theirs = await asyncio.gather(worker.take(1), other.take())
    assert sorted(values(mine) + values(theirs)) == [f'"{one}"'.encode() for one in "abcdefgh"]
    assert await worker.end(*theirs) == ["ok"] * len(theirs), "the claim counts, not who shows it"
    assert await worker.end(*mine) == ["ok"] * len(mine)


async def test_claims_of_two_partitions_that_read_the_same_end_their_own_jobs(
    ticker: Ticker, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "getrandbits", lambda _bits: 7)  # all slices of a second are then named alike
    alike = False
    for _ in range(100):  # and so are streams that get something in the same millisecond, which they mostly do
        await queued(ticker, *"abcdefghijklmnop")
        jobs = await worker.take()
        alike = len({job.claim for job in jobs}) < len(jobs)
        assert await worker.end(*jobs) == ["ok"] * 16
        if alike:
            break
    assert alike


async def test_a_worker_takes_only_the_queues_and_the_number_that_it_asks_for(ticker: Ticker, store: Store) -> None:
    for i in range(6):
        await ticker.client.put(f"queue:{'ab'[i % 2]}/x", i, lane=None)
    await ticker.turn()
    jobs = await HandWorker(store, queues=("a", "nobody")).take()
    assert [job.queue for job in jobs] == ["a"] * 3
    assert len(await HandWorker(store, queues=("b",)).take(1)) <= len(store.keys)


async def test_nothing_is_taken_where_nothing_is(store: Store, worker: HandWorker) -> None:
    assert await worker.take() == []
    assert await worker.reclaim() == []
    assert await queue_state.depths(store) == {}


async def test_a_worker_suspended_for_longer_than_its_lease_ends_nothing(
    ticker: Ticker, worker: HandWorker, other: HandWorker
) -> None:
    await queued(ticker, "x")
    job = await worker.take_one()
    [again] = await other.reclaim()
    assert (again.body.payload, again.deliveries) == (b'"x"', 2)
    assert (await job_queue.beat(ticker.store, [job])).lost == [job]
    for outcome in (DONE, Retry("late", after_ms=0), Dead("late"), JobCancelled()):
        assert await worker.end(job, outcome=outcome) == ["lost"]
    assert (await balance(ticker.store)).queued == 1
    assert await other.end(again) == ["ok"]
    assert (await balance(ticker.store)).done == 1


async def test_a_worker_that_lost_a_job_to_itself_ends_it_only_by_the_new_claim(
    ticker: Ticker, worker: HandWorker
) -> None:
    await queued(ticker, "x")
    job = await worker.take_one()
    [again] = await worker.reclaim()
    assert await worker.end(job) == ["lost"]
    assert await worker.end(again) == ["ok"]


async def test_heartbeats_keep_a_job_for_as_long_as_it_runs(
    ticker: Ticker, worker: HandWorker, other: HandWorker
) -> None:
    await queued(ticker, "x", "y")
    kept, left = await worker.take()
    gone: list[bytes] = []
    async with asyncio.timeout(60):
        while not gone:
            assert await job_queue.beat(ticker.store, [kept]) == job_queue.Beaten([], [])
            gone += values(await other.reclaim(lease_ms=3_000))  # longer than a hiccup between the two calls
            await asyncio.sleep(0.02)
    assert gone == values([left]), "the one that nobody kept has gone, and only that"
    assert await worker.end(kept) == ["ok"]


async def test_a_job_counts_how_often_its_worker_died(ticker: Ticker, worker: HandWorker, other: HandWorker) -> None:
    await queued(ticker, "x")
    assert (await worker.take_one()).deliveries == 1
    counts = []
    for one in (other, worker, other):
        [job] = await one.reclaim()
        counts.append(job.deliveries)
    assert counts == [2, 3, 4]


async def test_work_that_is_given_back_is_there_at_once_and_was_not_delivered(
    ticker: Ticker, worker: HandWorker, other: HandWorker
) -> None:
    await queued(ticker, "x", "y")
    jobs = await worker.take()
    await job_queue.give_back(ticker.store, jobs)
    assert await worker.end(*jobs) == ["lost", "lost"]
    again = await other.take()
    assert [job.deliveries for job in again] == [1, 1]
    assert (await balance(ticker.store)).queued == 2
    await job_queue.give_back(ticker.store, jobs)
    assert await other.end(*again) == ["ok", "ok"], "a late word of the former worker changes nothing"


async def test_a_job_that_is_given_back_keeps_counting_the_workers_that_died(
    ticker: Ticker, worker: HandWorker, other: HandWorker
) -> None:
    await queued(ticker, "x", id="x")
    await worker.take_one()
    [job] = await other.reclaim()
    assert job.deliveries == 2
    await job_queue.give_back(ticker.store, [job])
    assert await other.end(job) == ["lost"], "it is nobody's"
    assert await worker.take() == []
    [again] = await worker.reclaim(lease_ms=60_000)
    assert again.deliveries == 2, "this was no delivery, and the one before still counts"
    [next_] = await other.reclaim()
    assert next_.deliveries == 3
    await job_queue.give_back(ticker.store, [next_])
    assert await ticker.client.cancel("x") == "cancelled"
    assert await worker.reclaim() == []
    assert (await balance(ticker.store)).cancelled == 1


async def test_many_partitions_continue_when_one_server_is_unavailable(
    ticker: Ticker, store: Store, worker: HandWorker
) -> None:
    await queued(ticker, "x")
    with bad_road(store) as road:
        road.next("never sent", only=calls("queue_take"))
        if len(store.servers.all()) == 1:
            with pytest.raises(Unavailable):
                await worker.take()
        else:
            await worker.take()
    jobs = [*await worker.take(), *await worker.reclaim()]
    assert b'"x"' in values(jobs)


async def test_jobs_in_a_lost_reply_come_back(
    ticker: Ticker, store: Store, worker: HandWorker, other: HandWorker
) -> None:
    await queued(ticker, "x")
    with bad_road(store) as road:
        for _ in store.servers.all():
            road.next("lose reply", only=calls("queue_take"))
        with pytest.raises(Unavailable):
            await worker.take()
    assert await other.take() == []
    assert values(await other.reclaim()) == [b'"x"']


# -- ends -----------------------------------------------------------------------------------------------------


async def test_every_end_moves_the_counters_by_one(ticker: Ticker, worker: HandWorker) -> None:
    await queued(ticker, *"abcd")
    a, b, c, d = await worker.take()
    ends = [End(a, DONE), End(b, Retry("no", after_ms=5_000)), End(c, Dead("never")), End(d, JobCancelled())]
    assert await job_queue.finish(ticker.store, ends) == ["ok"] * 4
    books = await balance(ticker.store)
    assert books._replace(resent=0) == books._replace(
        accepted=4, pending=1, queued=0, done=1, dead=1, cancelled=1, retried=1
    )
    assert await job_queue.finish(ticker.store, ends) == ["lost"] * 4
    assert await balance(ticker.store) == books
    [dead_letter] = await list_dead(ticker.store)
    assert (dead_letter.reason, dead_letter.payload, dead_letter.attempts) == ("never", b'"c"', 1)


async def test_an_end_that_is_listed_twice_in_one_call_counts_once(ticker: Ticker, worker: HandWorker) -> None:
    await queued(ticker, "x")
    job = await worker.take_one()
    assert await job_queue.finish(ticker.store, [End(job, DONE), End(job, Dead("no"))]) == ["ok", "lost"]
    assert (await balance(ticker.store)).done == 1


async def test_a_retry_keeps_the_first_due_time_and_every_error(ticker: Ticker, worker: HandWorker) -> None:
    handle = await ticker.client.put(TARGET, "x", after="1s")
    await ticker.advance(seconds=1)
    for attempt in (1, 2, 3):
        job = await worker.take_one()
        assert (job.body.attempt, job.original_due_ms, len(job.body.errors)) == (attempt, handle.due_ms, attempt - 1)
        await worker.end(job, outcome=Retry(f"error {attempt}", after_ms=1_000))
        assert (await ticker.client.get(handle.id)).state == "pending"
        await ticker.advance(seconds=1)
    job = await worker.take_one()
    assert job.body.errors == ("error 1", "error 2", "error 3")
    await worker.end(job, outcome=Retry("not asked", after_ms=1_000, untried=True))
    await ticker.advance(seconds=1)
    assert (await worker.take_one()).body.attempt == 4, "an attempt that was none does not count"


async def test_a_retry_whose_id_was_given_to_another_task_gives_way_to_it(ticker: Ticker, worker: HandWorker) -> None:
    await queued(ticker, "old", id="a")
    job = await worker.take_one()
    await ticker.client.put(TARGET, "new", after="5s", id="a", on_conflict="replace")
    assert await worker.end(job, outcome=Retry("no", after_ms=1_000)) == ["ok"]
    await ticker.advance(seconds=6)
    assert values(await worker.take()) == [b'"new"']
    books = await balance(ticker.store)
    assert (books.replaced, books.retried) == (1, 0)


@pytest.mark.parametrize("outcome", [DONE, Retry("no", after_ms=1_000), Dead("never")])
@pytest.mark.parametrize("lane", [None, "a"])
@pytest.mark.parametrize("fault", ["lose reply", "never sent", "hold back"])
async def test_an_end_that_is_sent_again_counts_once(
    ticker: Ticker, worker: HandWorker, fault: Fault, lane: str | None, outcome: Retry
) -> None:
    await ticker.client.put(TARGET, "x", lane=lane)
    await ticker.turn()
    job = await worker.take_one()
    with bad_road(worker.store) as road:
        road.next(fault, only=calls("queue_finish"))
        [failed] = await worker.end(job, outcome=outcome)
        assert isinstance(failed, Unavailable)
        [again] = await worker.end(job, outcome=outcome)
        await road.deliver_held()
    assert again == ("lost" if fault == "lose reply" else "ok")
    await ticker.turn()
    books = await balance(ticker.store)
    assert books.done + books.dead + books.pending == 1
    assert books.done + books.dead + books.retried == 1


async def test_results_are_kept_for_their_time(ticker: Ticker, worker: HandWorker) -> None:
    await queued(ticker, "x")
    job = await worker.take_one()
    keys = ticker.store.keys.partitions[job.partition]
    assert await job_queue.finish(ticker.store, [End(job, DONE, b"42", 60_000)]) == ["ok"]
    kept, left_ms = await ticker.store.run_one(
        keys.slot, [("GET", keys.result(job.idh)), ("PTTL", keys.result(job.idh))]
    )
    assert kept == b"42"
    assert 0 < left_ms <= 60_000
    assert await job_queue.finish(ticker.store, [End(job, DONE, b"43", 60_000)]) == ["lost"]
    assert await ticker.store.run_one(keys.slot, [("GET", keys.result(job.idh))]) == [b"42"]


async def test_an_expired_job_is_not_run(ticker: Ticker, clock: ManualClock, worker: HandWorker) -> None:
    await queued(ticker, "x", expires="10s")
    await queued(ticker, "y", expires="1h")
    clock.advance(seconds=11)
    assert values(await worker.take()) == [b'"y"']
    [dead_letter] = await list_dead(ticker.store)
    assert dead_letter.reason == "expired"
    books = await balance(ticker.store)
    assert (books.dead, books.queued) == (1, 1)


async def test_a_worker_is_called_when_there_is_work(ticker: Ticker, store: Store) -> None:
    called = asyncio.Event()
    channels = [keys.work for keys in store.keys.partitions]
    ready = asyncio.Event()
    subscription = await store.servers.all()[0].subscribe(
        channels, on_message=lambda *_: called.set(), on_connect=ready.set
    )
    try:
        async with asyncio.timeout(60):
            await ready.wait()
            await queued(ticker, "x")
            await called.wait()
    finally:
        await subscription.close()


async def test_queues_say_how_long_they_are(ticker: Ticker, worker: HandWorker) -> None:
    await queued(ticker, *"abc")
    await ticker.client.put("queue:other/x")
    await ticker.turn()
    before = await queue_state.depths(ticker.store)
    assert (before[QUEUE].ready, before[QUEUE].running) == (3, 0)
    assert before[QUEUE].oldest_ms is not None
    assert before["other"].ready == 1
    jobs = await worker.take()
    during = await queue_state.depths(ticker.store)
    assert during[QUEUE] == queue_state.Depth(0, 3, None)
    await worker.end(*jobs)
    assert (await queue_state.depths(ticker.store))[QUEUE] == queue_state.Depth()


# -- the server -------------------------------------------------------------------------------------------------


@pytest.fixture
async def restarting() -> AsyncIterator[tuple[Ticker, Callable[[], None]]]:
    """A ticker on a server of its own, which can be killed and started again with what its disk has."""
    with standalone(aof=True, extra_config={"appendfsync": "always"}) as server:

        def restart() -> None:
            server.kill()
            server.start()

        async with Ticker(server.url, partitions=2, workers=True) as ticker:
            yield ticker, restart


async def test_a_restart_of_the_server_loses_no_work(
    restarting: tuple[Ticker, Callable[[], None]],
) -> None:
    ticker, restart = restarting
    await queued(ticker, "a", "b", "c")
    await ticker.client.put(TARGET, "lane", lane="l")
    await ticker.turn()
    worker = HandWorker(ticker.store)
    jobs = await worker.take(1)
    assert jobs
    restart()
    answers: list[job_queue.FinishAnswer] = []
    async with asyncio.timeout(60):
        while not answers or any(isinstance(answer, Exception) for answer in answers):
            await ticker.store.recover()
            answers = await worker.end(*jobs)
    assert set(answers) == {"ok"}, "claims are kept as well"
    rest = await worker.take()
    assert len(rest) + len(jobs) == 4
    await worker.end(*rest)
    for _ in range(3):
        try:
            await ticker.turn()
        except Unavailable:
            await ticker.store.recover()
    await ticker.turn()
    assert (await balance(ticker.store)).done == 4


async def test_a_full_server_still_hands_off_and_ends(client: Client, ticker: Ticker, worker: HandWorker) -> None:
    await client.put(TARGET, "x", after="1s")
    await ticker.turn()
    for primary in ticker.store.servers.all():
        await primary.pipeline([("CONFIG", "SET", "maxmemory", "1mb")])
    try:
        await ticker.advance(seconds=1)
        job = await worker.take_one()
        assert await worker.end(job) == ["ok"]
    finally:
        for primary in ticker.store.servers.all():
            await primary.pipeline([("CONFIG", "SET", "maxmemory", "0")])


async def test_a_stream_without_its_group_does_not_keep_others_from_being_taken(ticker: Ticker, store: Store) -> None:
    for keys in store.keys.partitions:
        await store.run_one(keys.slot, [("XADD", keys.queue("strange"), "*", "e", "x")])
    await queued(ticker, "x")
    worker = HandWorker(store, queues=("strange", QUEUE))
    assert values(await worker.take()) == [b'"x"']
    for keys in store.keys.partitions:
        await store.run_one(keys.slot, [("DEL", keys.queue("strange"))])


# -- queues that are not used any more ---------------------------------------------------------------------------


EVER = 1 << 43
"""Streams have times of the server's own clock, even if that is far from the manual one."""


async def forget(store: Store, idle_ms: int = -EVER) -> list[str]:
    """Remove idle queues of all partitions; return the names that are left."""
    for partition in range(len(store.keys)):
        assert await queue_state.forget_idle(store, partition, 0, idle_ms=idle_ms) == 0
    return sorted(await queue_state.depths(store))


async def test_a_queue_goes_when_it_is_empty_and_comes_back_with_its_next_task(
    ticker: Ticker, worker: HandWorker, store: Store
) -> None:
    await queued(ticker, "waits")
    assert await forget(store) == [QUEUE], "a task waits in it"
    jobs = await worker.take()
    assert await forget(store) == [QUEUE], "a worker runs a task of it"
    assert await worker.end(*jobs) == ["ok"]
    assert await forget(store, idle_ms=EVER) == [QUEUE], "it was used a moment ago"
    assert await forget(store) == []
    assert await worker.take() == []
    await queued(ticker, "again")
    assert values(await worker.take()) == [b'"again"']


async def test_an_owner_removes_idle_queues_and_no_others(
    ticker: Ticker, worker: HandWorker, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.engine.sweeper.QUEUE_IDLE_MS", -EVER)
    await queued(ticker, "done")
    assert await worker.end(*await worker.take()) == ["ok"]
    await ticker.client.put("queue:other/send", "stays")
    await ticker.turn()
    await ticker.engine.sweeper.step()
    assert sorted(await queue_state.depths(store)) == ["other"]


async def test_queues_that_are_removed_while_they_are_counted_are_left_out(
    ticker: Ticker, worker: HandWorker, store: Store
) -> None:
    await queued(ticker, "done")
    assert await worker.end(*await worker.take()) == ["ok"]
    for keys in store.keys.partitions:
        await store.run_one(keys.slot, [("UNLINK", keys.queue(QUEUE))])
    assert await queue_state.depths(store) == {}
