"""Cancel: after "cancelled" a task never fires; after its begin the answer is "too late"."""

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Dead, Retry
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, uses
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of


@pytest.mark.parametrize("task_id", [None, "mine"])
async def test_a_cancelled_task_never_fires(ticker: Ticker, task_id: str | None) -> None:
    handle = await ticker.client.put("log:", "never", id=task_id, after="1s")
    await ticker.client.put("log:", "other", after="1s")
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert [one.value() for one in await ticker.advance(seconds=2)] == ["other"]
    books = await balance(ticker.store)
    assert (books.done, books.cancelled) == (1, 1)


async def test_a_task_cancelled_after_it_was_read_never_fires(ticker: Ticker) -> None:
    handle = await ticker.client.put("log:", "never", after="1s")
    await ticker.turn()
    assert any(one.waiting for one in ticker.engine.owned.values()), "the owner holds it in memory"
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert await ticker.advance(seconds=5) == []
    assert (await balance(ticker.store)).cancelled == 1


async def test_cancel_after_begin_is_too_late(client: Client, store: Store, clock: ManualClock) -> None:
    handle = await client.put("log:", after="0s")
    address = address_of(handle.id)
    owner = await HandOwner.acquire(store, address.partition)
    assert (await owner.begin(address.slice, [address.index])).status == "ok"
    assert await client.cancel(handle.id) == "too late"
    await owner.finish(address.slice, [address.index])
    assert await client.cancel(handle.id) == "too late"


async def test_a_repeated_cancel_is_still_cancelled_and_counts_once(client: Client, store: Store) -> None:
    handle = await client.put("log:", after="1s")
    assert await client.cancel_many([handle.id, handle.id]) == ["cancelled", "cancelled"]
    assert await client.cancel(handle.id) == "cancelled"
    assert (await balance(store)).cancelled == 1


async def test_a_cancel_whose_reply_was_lost_can_be_repeated(client: Client, store: Store) -> None:
    handle = await client.put("log:", id="id", after="1s")
    with bad_road(store) as road:
        road.next("lose reply", only=uses("EVALSHA"))
        with pytest.raises(Exception, match="broke the network path"):
            await client.cancel(handle.id)
    # The index has forgotten the id together with the task, which noted it in the same step.
    assert await client.cancel(handle.id) == "cancelled"
    assert (await balance(store)).cancelled == 1


async def test_a_repeated_cancel_of_a_callers_id_is_cancelled_until_the_id_is_used_again(ticker: Ticker) -> None:
    client = ticker.client
    await client.put("log:", id="a", after="1s")
    await client.put("log:", id="b", lane="l", after="1s")
    assert await client.cancel_many(["a", "a", "nobody"]) == ["cancelled", "cancelled", "unknown"]
    assert await client.cancel("a") == "cancelled"
    assert [await client.cancel("b", lane="l") for _ in range(2)] == ["cancelled", "cancelled"]
    assert await client.cancel("b") == "cancelled"
    await client.put("log:", id="a", after="1s")
    assert len(await ticker.advance(seconds=2)) == 1
    assert await client.cancel("a") == "too late"


async def test_a_repeated_cancel_is_unknown_when_a_later_task_of_the_id_has_died(ticker: Ticker) -> None:
    client = ticker.client
    await client.put("log:", id="a", after="1s")
    assert await client.cancel("a") == "cancelled"
    ticker.answer("log", lambda _: Dead("no"))
    await client.put("log:", id="a", after="1s")
    await ticker.advance(hours=3)  # past the dedupe window
    assert (await client.get("a")).state == "dead"
    assert await client.cancel("a") in ("too late", "unknown")


async def test_an_unknown_id_is_unknown(client: Client) -> None:
    assert await client.cancel("nobody") == "unknown"
    assert (await client.get("nobody")).state == "unknown"


async def test_a_handle_to_a_slice_that_is_gone_cancels_nothing(ticker: Ticker, clock: ManualClock) -> None:
    handle = await ticker.client.put("log:", "old", after="500ms", lane="a")
    place = address_of(handle.id).slice
    await ticker.advance(seconds=10)
    now_ms = clock.now_ms()
    clock.set(place.start_ms)
    again = await ticker.client.put("log:", "new", at=place.start_ms + 500, lane="a")
    clock.set(now_ms)
    assert address_of(again.id).slice == place
    assert await ticker.client.cancel(handle.id) == "unknown"
    assert (await ticker.client.get(handle.id)).state == "finished"
    assert [one.value() for one in await ticker.turn()] == ["new"]


async def test_the_retry_of_a_task_can_be_cancelled_by_the_first_handle(ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Retry("no", after_ms=60_000))
    handle = await ticker.client.put("log:", after="1s")
    await ticker.advance(seconds=1)
    info = await ticker.client.get(handle.id)
    assert (info.state, info.attempt, info.errors) == ("pending", 2, ("no",))
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert await ticker.advance(minutes=5) == []
    assert (await balance(ticker.store)).cancelled == 1


async def test_cancelled_tasks_give_their_memory_back_at_once(client: Client, store: Store) -> None:
    tasks = [Task("log:", "x" * 1000, after="2h", lane="a") for _ in range(100)]
    summary = await client.put_many(tasks, handles=True)
    ids = [handle.id for handle in summary.handles or ()]
    address = address_of(ids[0])
    owner = HandOwner(store, address.partition, b"")
    before = await owner.raw("MEMORY", "USAGE", owner.keys.entries(address.slice.name), "SAMPLES", 0)
    assert set(await client.cancel_many(ids)) == {"cancelled"}
    after = await owner.raw("MEMORY", "USAGE", owner.keys.entries(address.slice.name), "SAMPLES", 0)
    assert after < before / 50


@pytest.mark.parametrize("step", [1, 7])
async def test_bulk_cancels_hit_exactly_the_tasks_named(ticker: Ticker, step: int) -> None:
    tasks = [Task("log:", n, after="1s", id=f"id-{n}" if n % 3 == 0 else None) for n in range(1000)]
    summary = await ticker.client.put_many(tasks, handles=True)
    ids = [handle.id for handle in summary.handles or ()]
    gone = set(range(0, 1000, step * 2))
    assert set(await ticker.client.cancel_many(ids[n] for n in sorted(gone))) == {"cancelled"}
    fired = {one.value() for one in await ticker.advance(seconds=1)}
    assert fired == set(range(1000)) - gone
    books = await balance(ticker.store)
    assert (books.done, books.cancelled) == (1000 - len(gone), len(gone))


async def test_many_cancels_at_once_are_too_late_for_tasks_in_flight(
    client: Client, store: Store, clock: ManualClock
) -> None:
    """Many tasks are cancelled by another path than one: answered "cancelled", these would be delivered all the
    same."""
    summary = await client.put_many([Task("log:", n, after="1s", lane="one") for n in range(40)], handles=True)
    ids = [handle.id for handle in summary.handles or ()]
    place = address_of(ids[0])
    clock.advance(seconds=1)
    owner = await HandOwner.acquire(store, place.partition)
    await owner.begin(place.slice, [0, 3])
    outcomes = await client.cancel_many(ids)
    assert {n: outcome for n, outcome in enumerate(outcomes) if outcome != "cancelled"} == {
        0: "too late",
        3: "too late",
    }
    assert await owner.bits("x", place.slice) == [n for n in range(40) if n not in (0, 3)]


async def test_a_cancelled_id_is_free_at_once(ticker: Ticker) -> None:
    await ticker.client.put("log:", "old", id="id", after="1s")
    await ticker.client.cancel("id")
    assert (await ticker.client.put("log:", "new", id="id", after="1s")).outcome == "created"
    assert [one.value() for one in await ticker.advance(seconds=1)] == ["new"]


async def test_a_crafted_handle_cannot_reach_another_task(client: Client, store: Store) -> None:
    handle = await client.put("log:", after="1h")
    stranger = "0" * 32 + "~" + handle.id.partition("~")[2]
    assert await client.cancel(stranger) == "unknown"
    assert (await client.get(stranger)).state in ("unknown", "finished")
    assert (await client.get(handle.id)).state == "pending"
