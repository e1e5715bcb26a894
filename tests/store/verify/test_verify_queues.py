"""Verify finds what is only in a stream, or only among the queued tasks, and sets it right."""

from collections.abc import Awaitable, Callable

import pytest

from mainspring.model.job import Job
from mainspring.store.keys import PartitionKeys
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import QUEUE, TARGET, HandWorker, values
from tests.support.verifying import found, home, raw, repaired

Tickers = Callable[..., Awaitable[Ticker]]


@pytest.fixture
async def ticker(tickers: Tickers, store: Store) -> Ticker:
    return await tickers(workers=True)


@pytest.fixture
def worker(store: Store) -> HandWorker:
    return HandWorker(store)


async def queued(ticker: Ticker, *, lane: str | None = None, seconds: float = 1) -> PartitionKeys:
    await ticker.client.put(TARGET, "x", after="1s", id="a", lane=lane)
    await ticker.advance(seconds=seconds)
    return home(ticker.store, lane or "a")


async def test_queues_in_order_are_no_finding(ticker: Ticker, worker: HandWorker, store: Store) -> None:
    for i in range(300):
        await ticker.client.put(TARGET, i, after="1s", id=f"n{i}", lane=f"l{i % 7}" if i % 3 == 0 else None)
    await ticker.advance(seconds=1)
    assert await found(store) == {}
    jobs = await worker.take(20)
    assert await found(store) == {}
    await worker.end(*jobs)
    assert await found(store) == {}
    assert (await verify(store)).total.queued == (await balance(store)).queued


async def test_an_entry_without_a_place_gets_one(ticker: Ticker, worker: HandWorker, store: Store) -> None:
    keys = await queued(ticker)
    await raw(store, keys.number, "DEL", keys.queued)
    assert await found(store) == {"queue-entry": 1, "queue-count": 1}
    await repaired(store)
    assert (await ticker.client.get("a")).state == "queued"
    await worker.end(await worker.take_one())


@pytest.mark.parametrize("lane", [None, "l"])
async def test_a_place_without_its_entry_is_handed_off_again_while_its_slice_exists(
    ticker: Ticker, worker: HandWorker, store: Store, lane: str | None
) -> None:
    keys = await queued(ticker, lane=lane)
    [[entry, _]] = await raw(store, keys.number, "XRANGE", keys.queue(QUEUE), "-", "+")
    await raw(store, keys.number, "XDEL", keys.queue(QUEUE), entry)
    assert await found(store) == {"queue-place": 1, "queue-count": 1}
    await repaired(store)
    await ticker.turn()
    await ticker.turn()
    job: Job = await worker.take_one()
    assert values([job]) == [b'"x"']
    await worker.end(job)
    await ticker.turn()
    assert (await balance(store)).done == 1


async def test_a_task_whose_entry_is_lost_is_no_longer_counted(ticker: Ticker, store: Store) -> None:
    keys = await queued(ticker, seconds=10)
    [[entry, _]] = await raw(store, keys.number, "XRANGE", keys.queue(QUEUE), "-", "+")
    await raw(store, keys.number, "XDEL", keys.queue(QUEUE), entry)
    report = await repaired(store)
    assert any(one.repair is not None and "its entry is lost" in one.repair.text for one in report.reported)
    assert (await balance(store)).accepted == 0


@pytest.mark.parametrize("field", ["queued", "aside"])
async def test_counters_of_queued_tasks_are_counted_again(ticker: Ticker, store: Store, field: str) -> None:
    keys = await queued(ticker)
    await raw(store, keys.number, "HINCRBY", keys.n, field, 3)
    assert "queue-count" in await found(store)
    await repaired(store)
    books = await balance(store)
    assert (books.queued, books.aside, books.accepted) == (1, 0, 1)


async def test_a_stream_of_another_type_is_reported(ticker: Ticker, store: Store) -> None:
    keys = home(store, "a")
    await raw(store, keys.number, "SET", keys.queue("other"), "x")
    assert await found(store) == {"wrong-type": 1}
    await raw(store, keys.number, "DEL", keys.queue("other"))


async def test_verify_knows_stored_results(ticker: Ticker, store: Store) -> None:
    keys = home(store, "a")
    await raw(store, keys.number, "SET", keys.result(b"\0" * 16), "x", "PX", 60_000)
    assert await found(store) == {}
