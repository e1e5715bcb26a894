"""Cancelling jobs: before a worker has one it does not run, afterwards its worker is asked to stop."""

from collections.abc import Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.model.delivery import DONE, Dead, Retry
from mainspring.model.job import End, JobCancelled
from mainspring.model.workers import WorkerInfo
from mainspring.store import job_queue
from mainspring.store.members import worker_beat
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import QUEUE, TARGET, HandWorker, values

Tickers = Callable[..., Awaitable[Ticker]]


@pytest.fixture
async def ticker(tickers: Tickers, store: Store) -> Ticker:
    return await tickers(workers=True)


@pytest.fixture
def worker(store: Store) -> HandWorker:
    return HandWorker(store)


WAYS = pytest.mark.parametrize(("task_id", "lane"), [(None, None), ("a", None), (None, "l"), ("a", "l")])


async def handed_off(ticker: Ticker, task_id: str | None, lane: str | None, *, late: bool = False) -> str:
    handle = await ticker.client.put(TARGET, "x", after="1s", id=task_id, lane=lane)
    await ticker.advance(seconds=20 if late else 1)
    return handle.id


@WAYS
@pytest.mark.parametrize("late", [False, True])
async def test_a_queued_task_that_is_cancelled_reaches_no_worker(
    ticker: Ticker, worker: HandWorker, task_id: str | None, lane: str | None, late: bool
) -> None:
    found = await handed_off(ticker, task_id, lane, late=late)
    assert (await ticker.client.get(found, lane=lane)).state == "queued"
    assert await ticker.client.cancel(found, lane=lane) == "cancelled"
    assert await worker.take() == []
    books = await balance(ticker.store)
    assert (books.cancelled, books.queued, books.fired) == (1, 0, 0)
    await ticker.turn()
    assert (await ticker.client.get(found, lane=lane)).state in ("cancelled", "unknown", "finished")
    assert await ticker.client.cancel(found, lane=lane) != "cancelling"
    assert (await balance(ticker.store)).cancelled == 1


@WAYS
async def test_the_worker_of_a_running_task_is_named(
    ticker: Ticker, worker: HandWorker, task_id: str | None, lane: str | None
) -> None:
    found = await handed_off(ticker, task_id, lane)
    job = await worker.take_one()
    info = await ticker.client.get(found, lane=lane)
    assert (info.state, info.worker, info.queue) == ("running", "w1", "mail")
    assert await job_queue.beat(ticker.store, [job]) == job_queue.Beaten([], [])
    assert await ticker.client.cancel(found, lane=lane) == "cancelling"
    assert await ticker.client.cancel(found, lane=lane) == "cancelling"
    assert await job_queue.beat(ticker.store, [job]) == job_queue.Beaten([], [job])
    assert await worker.end(job, outcome=JobCancelled()) == ["ok"]
    await ticker.turn()
    books = await balance(ticker.store)
    assert (books.cancelled, books.done, books.fired, books.queued) == (1, 0, 0, 0)
    assert (await ticker.client.explain(found, lane=lane)).code == "cancelled"


@WAYS
async def test_a_cancelled_run_that_succeeds_all_the_same_is_done(
    ticker: Ticker, worker: HandWorker, task_id: str | None, lane: str | None
) -> None:
    found = await handed_off(ticker, task_id, lane)
    job = await worker.take_one()
    assert await ticker.client.cancel(found, lane=lane) == "cancelling"
    assert await worker.end(job) == ["ok"]
    await ticker.turn()
    books = await balance(ticker.store)
    assert (books.cancelled, books.done) == (0, 1)


@WAYS
async def test_a_cancelled_run_that_fails_is_not_tried_again(
    ticker: Ticker, worker: HandWorker, task_id: str | None, lane: str | None
) -> None:
    found = await handed_off(ticker, task_id, lane)
    job = await worker.take_one()
    await ticker.client.cancel(found, lane=lane)
    assert await worker.end(job, outcome=Retry("no", after_ms=100)) == ["ok"]
    await ticker.advance(seconds=5)
    assert await worker.take() == []
    books = await balance(ticker.store)
    assert (books.cancelled, books.retried, books.pending) == (1, 0, 0)


@pytest.mark.parametrize("lane", [None, "l"])
async def test_a_task_whose_worker_died_while_it_was_being_cancelled_is_not_run_again(
    ticker: Ticker, worker: HandWorker, lane: str | None
) -> None:
    found = await handed_off(ticker, None, lane)
    await worker.take_one()
    assert await ticker.client.cancel(found, lane=lane) == "cancelling"
    assert await HandWorker(ticker.store, "w2").reclaim() == []
    await ticker.turn()
    assert (await balance(ticker.store)).cancelled == 1


async def test_a_job_that_is_given_back_and_was_to_be_cancelled_is_cancelled(
    ticker: Ticker, worker: HandWorker
) -> None:
    found = await handed_off(ticker, "a", None)
    job = await worker.take_one()
    await ticker.client.cancel(found)
    await job_queue.give_back(ticker.store, [job])
    assert await worker.take() == []
    assert (await balance(ticker.store)).cancelled == 1


async def test_a_lane_continues_when_its_head_is_cancelled_in_a_queue(ticker: Ticker, worker: HandWorker) -> None:
    head = await ticker.client.put(TARGET, "1", after="1s", lane="l")
    await ticker.client.put(TARGET, "2", after="2s", lane="l")
    await ticker.advance(seconds=3)
    assert await ticker.client.cancel(head.id) == "cancelled"
    await ticker.turn()
    assert values(await worker.take()) == [b'"2"']


@pytest.mark.parametrize("outcome", [DONE, Dead("never")])
async def test_a_task_that_has_ended_is_too_late_to_cancel(ticker: Ticker, worker: HandWorker, outcome: Dead) -> None:
    found = await handed_off(ticker, "a", None)
    await worker.end(await worker.take_one(), outcome=outcome)
    assert await ticker.client.cancel(found) == "too late"


async def test_a_retry_of_a_run_is_cancelled_like_any_pending_task(ticker: Ticker, worker: HandWorker) -> None:
    found = await handed_off(ticker, "a", None)
    await worker.end(await worker.take_one(), outcome=Retry("no", after_ms=10_000))
    assert await ticker.client.cancel(found) == "cancelled"
    await ticker.advance(seconds=20)
    assert await worker.take() == []


async def test_tasks_in_any_state_are_cancelled_in_one_call(ticker: Ticker, worker: HandWorker) -> None:
    client: Client = ticker.client
    ids = [(await client.put(TARGET, i, after="1s", id=f"n{i}")).id for i in range(6)]
    await client.put(TARGET, "later", after="1h", id="later")
    await ticker.advance(seconds=1)
    jobs = {job.id: job for job in await worker.take(1)}
    some = next(iter(jobs.values()))
    await job_queue.finish(ticker.store, [End(some, DONE)])
    answers = dict(zip([*ids, "later"], await client.cancel_many([*ids, "later"]), strict=True))
    for found, answer in answers.items():
        wanted = "too late" if found == some.id else "cancelling" if found in jobs else "cancelled"
        assert answer == wanted, found


async def test_explain_names_the_queue_and_the_worker(ticker: Ticker, worker: HandWorker) -> None:
    about = WorkerInfo(id="w1", queues={QUEUE: 1}, targets=(TARGET,), lease_ms=60_000)
    await worker_beat(worker.store, "w1/1", about)
    found = await handed_off(ticker, "a", None)
    waiting = await ticker.client.explain(found)
    assert (waiting.code, waiting.queue, waiting.worker) == ("queued", "mail", None)
    assert "no worker has taken it yet" in waiting.text
    job = await worker.take_one()
    running = await ticker.client.explain(found)
    assert (running.code, running.worker) == ("running", "w1")
    await ticker.client.cancel(found)
    assert "asked to stop" in (await ticker.client.explain(found)).text
    await worker.end(job)
    assert (await ticker.client.explain(found)).code == "done"


async def test_a_lane_behind_a_running_head_says_so(ticker: Ticker, worker: HandWorker) -> None:
    await ticker.client.put(TARGET, "1", after="1s", lane="l", id="head")
    await ticker.client.put(TARGET, "2", after="2s", lane="l", id="next")
    await ticker.advance(seconds=3)
    await worker.take_one()
    assert (await ticker.client.explain("head")).code == "running"
    behind = await ticker.client.explain("next")
    assert (behind.code, behind.head_id) == ("behind-head", "head")
