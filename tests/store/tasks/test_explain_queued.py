"""`explain` of what is in a queue: what keeps workers from it, and what does not."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mainspring.model.delivery import EXPIRED_RUNNING, Dead
from mainspring.model.flow import Limit
from mainspring.model.workers import WorkerInfo
from mainspring.store import members
from mainspring.store.limits import Ask, ask, running
from mainspring.store.store import Store
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import QUEUE, TARGET, HandWorker

Tickers = Callable[..., Awaitable[Ticker]]
LEASE_MS = 5_000


@pytest.fixture
async def ticker(tickers: Tickers, store: Store) -> Ticker:
    made = await tickers(workers=True)
    await serve(store, targets=(TARGET,))
    return made


async def serve(store: Store, *queues: str, targets: tuple[str, ...], **options: Any) -> None:
    """Let a worker be there that takes nothing."""
    weights = dict.fromkeys(queues or (QUEUE,), 1)
    about = WorkerInfo(id="idle", queues=weights, targets=targets, lease_ms=60_000, **options)
    await members.worker_beat(store, "idle/1", about)


async def queued(ticker: Ticker, **options: Any) -> None:
    await ticker.client.put(TARGET, id="x", after="1s", **options)
    await ticker.advance(seconds=1)


async def lease(store: Store, worker: str, used: int, want: int) -> None:
    await ask(store, worker, [Ask(running(QUEUE), Limit(concurrency=3), used, want)], LEASE_MS)


async def test_a_queue_that_runs_as_many_jobs_as_it_may_is_rate_limited(ticker: Ticker, store: Store) -> None:
    await queued(ticker)
    await lease(store, "w1", 0, 2)
    assert (await ticker.client.explain("x")).code == "queued", "a slot is free"
    await lease(store, "w2", 0, 1)
    found = await ticker.client.explain("x")
    assert (found.code, found.state, found.queue) == ("rate-limited", "queued", QUEUE)
    assert found.text.startswith("It has been in queue mail for ")
    assert found.text.endswith(": its concurrency limit of 3 on all workers is reached.")
    await lease(store, "w2", 0, 0)
    assert (await ticker.client.explain("x")).code == "queued"


async def test_slots_of_dead_workers_become_free(ticker: Ticker, store: Store) -> None:
    await queued(ticker)
    await lease(store, "w1", 0, 3)
    ticker.clock.advance(ms=LEASE_MS)
    assert (await ticker.client.explain("x")).code == "queued"


@pytest.mark.parametrize(
    ("scope", "code"),
    [
        ({"queue": QUEUE}, "paused"),
        ({}, "paused"),
        ({"queue": "other"}, "queued"),
        ({"lane": "a"}, "queued"),
        ({"target": TARGET}, "queued"),
    ],
)
async def test_only_a_pause_of_its_queue_keeps_workers_from_it(
    ticker: Ticker, scope: dict[str, Any], code: str
) -> None:
    await queued(ticker, lane="a")
    await ticker.client.pause(**scope, by="ops")
    found = await ticker.client.explain("x", lane="a")
    assert (found.code, found.by) == (code, "ops" if code == "paused" else None)
    assert ("which is paused" in found.text) is (code == "paused")


async def test_a_task_that_expires_in_its_queue_is_reported_before_a_worker_takes_it(ticker: Ticker) -> None:
    await queued(ticker, expires="2s")
    await ticker.client.pause(queue=QUEUE)
    ticker.clock.advance(seconds=10)
    found = await ticker.client.explain("x")
    assert (found.code, found.state) == ("expired", "queued")
    assert "the next worker that takes it moves it to the dead letters" in found.text


async def test_a_job_that_expired_while_it_ran_has_expired(ticker: Ticker, store: Store) -> None:
    worker = HandWorker(store)
    await queued(ticker, expires="2s")
    await worker.end(await worker.take_one(), outcome=Dead(EXPIRED_RUNNING))
    found = await ticker.client.explain("x")
    assert (found.code, found.state, found.reason) == ("expired", "dead", EXPIRED_RUNNING)
    assert found.text.startswith("A worker was running it when it expired, ")


async def test_explain_names_the_nearest_queue_if_no_worker_serves_the_tasks_own(ticker: Ticker) -> None:
    await ticker.client.put("queue:mial/send", id="typo", after="1s")
    early = await ticker.client.explain("typo")
    assert early.code == "not-due", "its time counts first"
    assert early.text.endswith("; no worker serves queue mial, only mail; did you mean mail?")
    await ticker.advance(seconds=1)
    found = await ticker.client.explain("typo")
    assert (found.code, found.state, found.queue) == ("no-worker", "queued", "mial")
    assert found.text.endswith(": no worker serves queue mial, only mail; did you mean mail?")
    await ticker.client.pause(queue="mial")
    assert (await ticker.client.explain("typo")).code == "paused"


async def test_explain_names_a_handler_that_no_worker_of_its_queue_knows(ticker: Ticker, store: Store) -> None:
    await serve(store, "mail", "other", targets=(TARGET, "queue:other/snd"))
    await ticker.client.put("queue:mail/snd", id="typo", after="1s")
    assert (
        "no worker of queue mail knows queue:mail/snd; did you mean queue:mail/send?"
        in (await ticker.client.explain("typo")).text
    )
    await ticker.advance(seconds=1)
    assert (await ticker.client.explain("typo")).code == "no-worker"
    await serve(store, targets=(), targets_left_out=1)
    assert (await ticker.client.explain("typo")).code == "queued", "it may be among those that are not listed"


async def test_a_command_is_looked_for_on_every_worker_until_its_queue_is_known(ticker: Ticker, store: Store) -> None:
    await serve(store, "jobs", targets=("command:backup",))
    for name in ("backup", "bakcup"):
        await ticker.client.put(f"command:{name}", id=name, after="1h")
    assert "worker" not in (await ticker.client.explain("backup")).text
    text = (await ticker.client.explain("bakcup")).text
    assert text.endswith("; no worker knows command:bakcup; did you mean command:backup?")


async def test_a_worker_that_stops_or_whose_lease_is_over_serves_nothing(ticker: Ticker, store: Store) -> None:
    await queued(ticker)
    assert (await ticker.client.explain("x")).code == "queued"
    await serve(store, targets=(TARGET,), stopping=True)
    assert (await ticker.client.explain("x")).text.endswith(": no worker is running; start one: mainspring worker.")
    await serve(store, targets=(TARGET,))
    ticker.clock.advance(seconds=60)
    assert (await ticker.client.explain("x")).code == "no-worker"
