"""Reschedule: one step, so that there is never a moment with no task or with two."""

import asyncio

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Retry
from mainspring.model.errors import Conflict, InvalidInput, NotFound
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of


@pytest.mark.parametrize("task_id", [None, "mine"])
@pytest.mark.parametrize("delay", ["500ms", "30s", "5h"])
async def test_moving_a_task_fires_it_once_at_the_new_time(
    ticker: Ticker, clock: ManualClock, task_id: str | None, delay: str
) -> None:
    handle = await ticker.client.put("log:", "x", id=task_id, after="10s", lane="a")
    moved = await ticker.client.reschedule(handle.id, after=delay, lane="a" if task_id else None)
    assert (moved.outcome, moved.past) == ("replaced", False)
    assert (await ticker.client.get(handle.id)).due_ms == moved.due_ms
    fired = await ticker.advance(hours=6)
    assert [(one.value(), one.due_ms) for one in fired] == [("x", moved.due_ms)]
    assert fired[0].idempotency_key.endswith(f"/{moved.due_ms}")
    books = await balance(ticker.store)
    assert (books.accepted, books.done, books.replaced) == (2, 1, 1)


async def test_moving_within_the_same_second_fires_once(ticker: Ticker) -> None:
    handle = await ticker.client.put("log:", after="200ms")
    moved = handle
    for delay in ("400ms", "300ms", "300ms", "900ms"):
        moved = await ticker.client.reschedule(handle.id, after=delay)
    assert [one.due_ms for one in await ticker.advance(seconds=2)] == [moved.due_ms]


async def test_moving_a_task_the_owner_holds_in_memory_fires_it_once(ticker: Ticker) -> None:
    handle = await ticker.client.put("log:", after="1s")
    await ticker.turn()
    moved = await ticker.client.reschedule(handle.id, after="2s")
    assert [one.due_ms for one in await ticker.advance(seconds=5)] == [moved.due_ms]


async def test_every_handle_of_a_task_that_moved_often_still_finds_it(client: Client) -> None:
    first = await client.put("log:", after="1h")
    handles = [first, *[await client.reschedule(first.id, after=f"{n}h") for n in range(2, 9)]]
    for handle in handles:
        assert (await client.get(handle.id)).due_ms == handles[-1].due_ms
    assert await client.cancel(first.id) == "cancelled"
    assert (await client.get(handles[-1].id)).state == "cancelled"


async def test_moving_into_the_past_fires_at_once_and_is_marked(ticker: Ticker, clock: ManualClock) -> None:
    handle = await ticker.client.put("log:", after="1h")
    moved = await ticker.client.reschedule(handle.id, at=clock.now_ms() - 5_000)
    assert moved.past
    assert [one.due_ms for one in await ticker.turn()] == [clock.now_ms() - 5_000]


async def test_a_task_that_has_begun_cannot_be_moved(client: Client, store: Store) -> None:
    handle = await client.put("log:", after="0s")
    address = address_of(handle.id)
    owner = await HandOwner.acquire(store, address.partition)
    await owner.begin(address.slice, [address.index])
    with pytest.raises(Conflict, match="fired"):
        await client.reschedule(handle.id, after="1h")
    assert (await balance(store)).accepted == 1


async def test_a_cancelled_or_unknown_task_cannot_be_moved(client: Client, store: Store) -> None:
    handle = await client.put("log:", after="1h")
    await client.cancel(handle.id)
    with pytest.raises(Conflict, match="cancelled"):
        await client.reschedule(handle.id, after="1h")
    with pytest.raises(NotFound, match="no task 'nobody'"):
        await client.reschedule("nobody", after="1h")


async def test_a_begin_between_look_and_move_wins(client: Client, store: Store) -> None:
    """The script decides, not what the client saw before."""
    handle = await client.put("log:", after="0s")
    address = address_of(handle.id)
    owner = await HandOwner.acquire(store, address.partition)
    section = await owner.section(address.slice, begin=[address.index])
    with bad_road(store) as road:
        real_send = road.send
        begun = False

        async def send(*arguments):  # type: ignore[no-untyped-def]
            nonlocal begun
            if not begun and any(command[0] == "EVALSHA" for command in arguments[2]):
                begun = True
                await arguments[1](fire_group(owner, section), timeout_s=None)
            return await real_send(*arguments)

        road.send = send  # type: ignore[method-assign]
        with pytest.raises(Conflict):
            await client.reschedule(handle.id, after="1h")
    assert (await balance(store)).fired == 1


def fire_group(owner: HandOwner, section):  # type: ignore[no-untyped-def]
    return [owner.store.scripts.in_full(owner.command(section))]


async def test_two_moves_at_once_leave_one_task(ticker: Ticker) -> None:
    handle = await ticker.client.put("log:", after="1s")
    moves = [ticker.client.reschedule(handle.id, after=f"{n}s") for n in range(2, 6)]
    await asyncio.gather(*moves, return_exceptions=True)
    assert len(await ticker.advance(seconds=10)) == 1
    await balance(ticker.store)


@pytest.mark.parametrize("task_id", ["order-7", None])
async def test_many_callers_that_move_a_task_at_once_all_succeed(
    client: Client, store: Store, task_id: str | None
) -> None:
    """A caller is not answered "gone" for a task that another caller has just moved."""
    handle = await client.put("log:", after="1h", id=task_id)
    now_ms = store.clock.now_ms()
    moved = await asyncio.gather(*(client.reschedule(handle.id, at=now_ms + n * 60_000) for n in range(1, 41)))
    assert {one.outcome for one in moved} == {"replaced"}
    assert (await client.get(handle.id)).due_ms in {one.due_ms for one in moved}
    assert (await balance(store)).pending == 1


async def test_a_retry_that_is_moved_keeps_its_attempt_and_its_key(ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Retry("no", after_ms=60_000) if ticker.deliveries == [one] else None)
    handle = await ticker.client.put("log:", after="1s", lane="a")
    await ticker.client.put("log:", "next", after="2s", lane="a")
    [first] = await ticker.advance(seconds=1)
    await ticker.client.reschedule(handle.id, after="10s")
    second, following = await ticker.advance(seconds=30)
    assert (second.attempt, second.idempotency_key) == (2, first.idempotency_key)
    assert following.value() == "next"
    for keys in ticker.store.keys.partitions:
        assert await ticker.store.run_one(keys.slot, [("HLEN", keys.held)]) == [0]


async def test_a_task_is_not_moved_beyond_its_expiry(client: Client) -> None:
    handle = await client.put("log:", after="1s", expires="10s")
    with pytest.raises(InvalidInput, match="expires"):
        await client.reschedule(handle.id, after="1h")
    assert (await client.get(handle.id)).state == "pending"
