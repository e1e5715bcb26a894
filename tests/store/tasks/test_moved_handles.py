"""The handle of a task that has moved since: it leads to where the task is now, and tells what became of it there.

A task without a caller's id is known by its place. Held work, retries and replays give it another one, and the old one
is done: without a mark there a task that is cancelled in its new place would be told as delivered.
"""

from collections.abc import Awaitable, Callable
from typing import Literal
from uuid import uuid4

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.model.delivery import Dead, Retry
from mainspring.model.errors import Unavailable
from mainspring.model.retry import RetryPolicy
from mainspring.store.codec import FORWARD, TOMBSTONE
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import TARGET, HandWorker
from tests.support.owner import address_of

Tickers = Callable[..., Awaitable[Ticker]]
Way = Literal["held", "retried", "replayed"]
WAYS = pytest.mark.parametrize("way", ["held", "retried", "replayed"])
LANES = pytest.mark.parametrize("lane", [None, "a"])
MARK_BYTES = 35


async def row_at(store: Store, handle: str) -> bytes:
    address = address_of(handle)
    keys = store.keys.partitions[address.partition]
    [row] = await store.run_one(keys.slot, [("LINDEX", keys.entries(address.slice.name), address.index)])
    return bytes(row)


async def prepare(ticker: Ticker, way: Way) -> None:
    """Tasks due within the next seconds will not stay in their place."""
    if way == "held":
        await ticker.client.pause()
        await ticker.turn()
    elif way == "retried":
        ticker.answer("log", lambda one: Retry("no", after_ms=30_000) if one.attempt == 1 else None)
    else:
        ticker.answer("log", lambda one: Dead("no") if ticker.deliveries == [one] else None)


async def moved(ticker: Ticker, way: Way, lane: str | None = None, task_id: str | None = None) -> str:
    """A task that has left the place which its handle names, with its slice still there."""
    await prepare(ticker, way)
    handle = await ticker.client.put("log:", "x", after="1s", lane=lane, id=task_id)
    await ticker.advance(seconds=1)
    if way == "replayed":
        assert (await ticker.client.dead_replay(handle.id, after="1m")).outcome == "replayed"
    return handle.id


@LANES
@WAYS
async def test_a_task_that_moved_and_was_cancelled_there_is_not_reported_as_done(
    ticker: Ticker, way: Way, lane: str | None
) -> None:
    handle = await moved(ticker, way, lane)
    assert (await ticker.client.get(handle)).state == "pending"
    assert await ticker.client.cancel(handle) == "cancelled"
    assert (await ticker.client.get(handle)).state == "cancelled"
    assert (await ticker.client.explain(handle)).code == "cancelled"
    assert await ticker.client.cancel(handle) == "cancelled", "and says so again"
    assert (await balance(ticker.store)).cancelled == 1
    assert not (await verify(ticker.store)).reported


@WAYS
async def test_the_new_handle_and_the_old_one_find_the_same_task(ticker: Ticker, way: Way) -> None:
    old = await moved(ticker, way)
    [info] = (await ticker.client.list()).tasks
    assert info.id != old
    assert await ticker.client.cancel(info.id) == "cancelled"
    assert [(await ticker.client.get(one)).state for one in (old, info.id)] == ["cancelled"] * 2


@WAYS
async def test_a_task_that_moved_is_done_when_it_is_done_there(ticker: Ticker, way: Way) -> None:
    handle = await moved(ticker, way)
    await ticker.client.resume()
    later = await ticker.advance(minutes=2)
    assert [one.value() for one in later] == ["x"]
    assert (await ticker.client.get(handle)).state in ("done", "finished")
    assert await ticker.client.cancel(handle) != "cancelled"
    books = await balance(ticker.store)
    assert (books.cancelled, books.done) == (0, 1)


@LANES
@pytest.mark.parametrize("way", ["held", "retried"])
async def test_a_takeover_reads_marks_as_what_is_over(
    tickers: Tickers, store: Store, way: Way, lane: str | None
) -> None:
    first = await tickers()
    handle = await moved(first, way, lane)
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    assert await second.turn() == []
    assert (await second.client.get(handle)).state == "pending"
    assert await second.client.cancel(handle) == "cancelled"
    assert (await second.client.get(handle)).state in ("cancelled", "finished")
    await second.client.resume()
    assert await second.advance(minutes=2) == []
    assert (await balance(store)).cancelled == 1
    assert not (await verify(store)).reported


@pytest.mark.parametrize("way", ["held", "retried"])
async def test_a_commit_that_is_sent_twice_leaves_one_mark(ticker: Ticker, store: Store, way: Way) -> None:
    await prepare(ticker, way)
    handle = await ticker.client.put("log:", "x", after="1s")
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=calls("commit"))
        ticker.clock.advance(seconds=1)
        for _ in range(3):
            try:
                await ticker.turn()
            except Unavailable:
                continue
    row = await row_at(store, handle.id)
    assert (len(row), row[4] & (TOMBSTONE | FORWARD)) == (MARK_BYTES, TOMBSTONE | FORWARD)
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert (await ticker.client.get(handle.id)).state == "cancelled"
    await balance(store)


@WAYS
async def test_a_task_with_an_id_leaves_no_mark(ticker: Ticker, store: Store, way: Way) -> None:
    """Every caller asks the index for it: a mark that is never read would be a waste."""
    await moved(ticker, way, task_id="mine")
    assert await ticker.client.cancel("mine") == "cancelled"
    assert (await ticker.client.get("mine")).state == "cancelled"
    for keys in store.keys.partitions:
        [names] = await store.run_one(keys.slot, [("ZRANGE", keys.slices, 0, -1)])
        for name in names:
            [rows] = await store.run_one(keys.slot, [("LRANGE", keys.entries(name.decode()), 0, -1)])
            assert not [row for row in rows if len(row) == MARK_BYTES]


async def test_a_long_way_from_mark_to_mark_is_gone_to_its_end(tickers: Tickers, store: Store) -> None:
    """Eleven places in one second: while the task lives the index knows the last, after a cancel only the marks do."""
    many = RetryPolicy(max_attempts=50, base_ms=10, factor=1.0, cap_ms=10, jitter="none")
    again = lambda one: Retry("no", after_ms=10 if one.attempt < 12 else 20_000)  # noqa: E731
    ticker = await tickers(options=EngineOptions(retry=many), handlers={"log": again})
    handle = await ticker.client.put("log:", "x", after="1s")
    assert len(await ticker.advance(ms=1_500)) == 12
    info = await ticker.client.get(handle.id)
    assert (info.state, info.attempt) == ("pending", 13)
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert (await ticker.client.get(handle.id)).state == "cancelled"
    assert await ticker.client.cancel(handle.id) == "cancelled"
    await balance(store)


@pytest.mark.parametrize("lane", [None, "a"])
async def test_an_attempt_that_a_worker_asked_for_is_found_too(
    tickers: Tickers, store: Store, lane: str | None
) -> None:
    ticker = await tickers(workers=True)
    worker = HandWorker(store)
    handle = await ticker.client.put(TARGET, "x", after="1s", lane=lane)
    await ticker.advance(seconds=1)
    assert await worker.end(await worker.take_one(), outcome=Retry("no", after_ms=30_000)) == ["ok"]
    await ticker.turn()
    assert (await ticker.client.get(handle.id)).state == "pending"
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert (await ticker.client.get(handle.id)).state == "cancelled"
    assert (await balance(store)).cancelled == 1
    assert not (await verify(store)).reported


async def test_a_failed_head_that_was_given_up_is_dead_by_every_handle(ticker: Ticker) -> None:
    handle = await moved(ticker, "retried", "a")
    [info] = (await ticker.client.list()).tasks
    assert await ticker.client.lane_skip_head("a") == "ok"
    assert [(await ticker.client.get(one)).state for one in (handle, info.id)] == ["dead"] * 2
    assert (await ticker.client.dead_replay(handle, after="1m")).outcome == "replayed"
    assert [(await ticker.client.get(one)).state for one in (handle, info.id)] == ["pending"] * 2
    assert await ticker.client.cancel(handle) == "cancelled"
    assert [(await ticker.client.get(one)).state for one in (handle, info.id)] == ["cancelled"] * 2


# -- puts that were sent again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["held", "retried"])
async def test_a_copy_leads_to_the_mark_of_its_first(ticker: Ticker, store: Store, way: Way) -> None:
    """The handle names the second copy, the task left from the first."""
    await prepare(ticker, way)
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        handle = await ticker.client.put("log:", "x", after="1s")
    await ticker.advance(seconds=1)
    info = await ticker.client.get(handle.id)
    assert (info.state, info.payload) == ("pending", "x")
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert (await ticker.client.get(handle.id)).state == "cancelled"
    assert await ticker.client.cancel(handle.id) == "cancelled"
    await ticker.client.resume()
    assert await ticker.advance(minutes=2) == []
    books = await balance(store)
    assert (books.cancelled, books.replaced) == (1, 1)


@pytest.mark.parametrize("way", ["held", "retried"])
async def test_a_copy_that_comes_after_the_task_has_moved_is_not_cancelled_in_its_place(
    ticker: Ticker, store: Store, way: Way
) -> None:
    """It would be reported as cancelled, and fire from its new place."""
    await prepare(ticker, way)
    with bad_road(ticker.store) as road:
        real_send = road.send
        puts = 0

        async def send(*arguments):  # type: ignore[no-untyped-def]
            nonlocal puts
            if uses("MULTI")(arguments[2]):
                puts += 1
                if puts == 2:  # the copy is on its way when the owner moves the first
                    await ticker.advance(seconds=1)
            return await real_send(*arguments)

        road.next("lose reply", only=uses("MULTI"))
        road.send = send  # type: ignore[method-assign]
        handle = await ticker.client.put("log:", "x", after="1s")
    info = await ticker.client.get(handle.id)
    assert (info.state, info.attempt) == ("pending", 2 if way == "retried" else 1)
    moved_to = await ticker.client.reschedule(handle.id, after="40s")
    assert (await ticker.client.get(handle.id)).due_ms == moved_to.due_ms
    assert await ticker.client.cancel(handle.id) == "cancelled"
    await ticker.client.resume()
    assert await ticker.advance(minutes=2) == []
    assert (await balance(store)).cancelled == 1


async def test_a_failed_head_that_is_cancelled_by_its_new_handle_frees_its_lane(tickers: Tickers, store: Store) -> None:
    """Nobody reads the place of its next attempt for an hour: the owner learns of the cancel from the index."""
    slow = RetryPolicy(max_attempts=9, base_ms=3_600_000, cap_ms=3_600_000, jitter="none")
    again = {"log": lambda one: Retry("no") if one.value() == "head" else None}
    ticker = await tickers(options=EngineOptions(retry=slow), handlers=again)
    for name in ("head", "next"):
        await ticker.client.put("log:", name, after="1s", lane="a")
    assert [one.value() for one in await ticker.advance(seconds=3)] == ["head"]
    [head] = [one.id for one in (await ticker.client.list()).tasks if one.payload == "head"]
    assert await ticker.client.cancel(head) == "cancelled"
    assert [one.value() for one in await ticker.advance(seconds=2)] == ["next"]
    await balance(store)


async def test_32_hex_digits_are_an_id_like_any_other(ticker: Ticker) -> None:
    client, name = ticker.client, uuid4().hex
    await client.put("log:", 1, id=name, after="1h")
    assert (await client.put("log:", 2, id=name, after="2h")).outcome == "kept"
    assert (await client.get(name)).state == "pending"
    assert (await client.explain(name)).code == "not-due"
    await client.reschedule(name, after="3h")
    assert await client.cancel_many([name, uuid4().hex]) == ["cancelled", "unknown"]
    assert await client.cancel(name) == "cancelled"
    await client.put("log:", 3, id=name, lane="l", after="1h")
    ticker.answer("log", lambda _: Dead("no"))
    [died] = await ticker.advance(hours=1)
    assert died.id == name
    assert (await client.dead_replay(name)).outcome == "replayed"
    ticker.answer("log", lambda _: None)
    [again] = await ticker.turn()
    assert (again.id, again.value(), again.idempotency_key) == (name, 3, died.idempotency_key)


async def test_a_task_without_an_id_is_found_by_the_id_it_is_delivered_with(ticker: Ticker) -> None:
    client = ticker.client
    await client.put("log:", "x", after="1s")
    await client.put("log:", "y", after="1s", lane="l")
    ticker.answer("log", lambda _: Dead("no"))
    died = await ticker.advance(seconds=1)
    for one in died:
        assert (await client.get(one.id)).state == "dead"
        assert (await client.explain(one.id)).code == "dead"
        assert await client.dead_get(one.id) is not None
        assert (await client.dead_replay(one.id, after="1h")).outcome == "replayed"
        assert (await client.get(one.id)).state == "pending"
    assert await client.cancel_many([one.id for one in died]) == ["cancelled", "cancelled"]


async def test_a_generated_id_stays_valid_when_its_task_moves(ticker: Ticker) -> None:
    client = ticker.client
    handle = await client.put("log:", after="1s")
    moved = await client.reschedule(handle.id, after="2h")
    assert moved.id == handle.id
    await ticker.advance(minutes=1)  # the slice it was put into is gone
    assert (await client.get(handle.id)).due_ms == moved.due_ms
    again = await client.reschedule(handle.id, after="3h")
    assert (await client.get(handle.id)).due_ms == again.due_ms
    assert [await client.cancel(handle.id) for _ in range(2)] == ["cancelled", "cancelled"]
    assert (await client.get(handle.id)).state == "cancelled"
    assert (await client.explain(handle.id)).code == "cancelled"
    assert await ticker.advance(hours=4) == []
