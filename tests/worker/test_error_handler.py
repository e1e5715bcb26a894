"""The error handler of a worker hears of what dies in a queue, without having been run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import steady_s
from mainspring.model.delivery import Failure
from mainspring.store.codec import HEADER_BYTES
from mainspring.store.owner import fire
from mainspring.store.store import Store
from mainspring.testing.ticker import Ticker
from mainspring.worker.handler import Handler, Registry
from mainspring.worker.worker import Worker, WorkerOptions
from tests.support.job_queues import QUEUE, TARGET, HandWorker
from tests.support.owner import HandOwner, address_of, handing_off
from tests.support.workers import until

Tickers = Callable[..., Awaitable[Ticker]]


async def send() -> None:
    raise AssertionError("nobody shall run this")


@pytest.fixture
def told() -> list[Failure]:
    return []


@pytest.fixture
def registry() -> Registry:
    return Registry([Handler(send, queue=QUEUE)])


@pytest.fixture
async def worker(
    request: pytest.FixtureRequest, store: Store, told: list[Failure], registry: Registry
) -> AsyncIterator[Worker]:
    """One whose steps the test calls itself. Its parameter is the lease in seconds."""
    lease_s: float = getattr(request, "param", 60.0)
    options = WorkerOptions("w", {QUEUE: 1}, lease_s=lease_s, error_handler=told.append)
    made = Worker(store, registry, options)
    yield made
    await made.executor.close()
    await made.failures.aclose()


@pytest.mark.parametrize("lane", [None, "a"])
async def test_the_error_handler_gets_a_task_that_expired_in_its_queue(
    tickers: Tickers, worker: Worker, told: list[Failure], lane: str | None
) -> None:
    ticker = await tickers(workers=True)
    handle = await ticker.client.put(TARGET, id="late", lane=lane, after="1s", expires="2s")
    await ticker.advance(seconds=1)
    ticker.clock.advance(seconds=10)
    await worker.taker.step()
    await worker.failures.seen()
    assert [(one.id, one.outcome, one.error, one.lane) for one in told] == [("late", "dead", "expired", lane)]
    assert (worker.finisher.meters.counts["expired"]["queue"], worker.finisher.meters.counts["dead"]["queue"]) == (1, 0)
    name = "late" if lane is None else f"{lane}/late"
    assert told[0].idempotency_key == f"{ticker.store.keys.namespace}/{name}/{handle.due_ms}"
    await ticker.advance(seconds=1)  # the owner of the lane writes the dead letter
    dead_letter = await ticker.client.dead_get("late")
    assert dead_letter is not None
    assert (told[0].attempts, dead_letter.attempts, dead_letter.errors) == (0, 0, ())


@pytest.mark.parametrize("worker", [0.001], indirect=True)
async def test_the_error_handler_gets_a_task_that_expired_with_a_dead_worker(
    tickers: Tickers, worker: Worker, told: list[Failure], store: Store
) -> None:
    ticker = await tickers(workers=True)
    await ticker.client.put(TARGET, id="left", after="1s", expires="2s")
    await ticker.advance(seconds=1)
    await HandWorker(store, "dead").take_one()
    ticker.clock.advance(seconds=10)
    async with asyncio.timeout(60):
        while not told:  # the server's own clock says when the lease of the dead one is over
            await worker.reclaimer.step()
            await worker.failures.seen()
    assert [(one.id, one.outcome, one.error) for one in told] == [("left", "dead", "expired")]
    dead_letter = await ticker.client.dead_get("left")
    assert dead_letter is not None
    assert dead_letter.attempts == 1, "the dead worker may have begun it"


def post() -> None:
    raise AssertionError("nor this")


@pytest.mark.parametrize("handler", [send, post])
async def test_the_error_handler_gets_a_task_that_expired_on_a_worker_before_its_turn(
    tickers: Tickers,
    worker: Worker,
    registry: Registry,
    told: list[Failure],
    store: Store,
    handler: Callable[[], Awaitable[None] | None],
) -> None:
    ticker = await tickers(workers=True)
    work = Handler(handler, queue=QUEUE, name="late")
    registry.add(work)
    await ticker.client.put(work.target, id="late", after="1s", expires="2s")
    await ticker.advance(seconds=1)
    job = await HandWorker(store, "w").take_one()
    ticker.clock.advance(seconds=10)
    worker.executor.add([job], steady_s())
    await until(lambda: not worker.executor.runs)
    await worker.finisher.step()
    await worker.failures.seen()
    assert [(one.id, one.outcome, one.error) for one in told] == [("late", "dead", "expired")]
    assert (await ticker.client.explain("late")).code == "expired"


async def test_the_error_handler_gets_an_unreadable_entry(
    client: Client, store: Store, worker: Worker, told: list[Failure]
) -> None:
    address = address_of((await client.put(TARGET, "x", after="0s")).id)
    owner = await HandOwner.acquire(store, address.partition)
    await owner.begin(address.slice, [address.index])
    [row] = await owner.rows(address.slice)
    damaged = address.pack() + row[:HEADER_BYTES] + b"\xc1"
    touch = await owner.touch(address.slice, done=[0])
    await fire.commit(store, handing_off(owner.partition, owner.token, touch, {QUEUE: [damaged]}))
    await worker.taker.step()
    await worker.failures.seen()
    [failure] = told
    assert (failure.target, failure.outcome) == ("(unreadable)", "dead")
    assert failure.error.startswith("the entry cannot be read: ")
