"""Put without an id: stored whole or not at all, once although it is sent again, found by the handle."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Retry
from mainspring.model.errors import Unavailable
from mainspring.model.task import Task
from mainspring.store.codec import RESENT
from mainspring.store.keys import HOUR_MS, SECOND_MS
from mainspring.store.store import Store
from mainspring.store.tasks.put import CROWDED
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, uses
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of


async def test_a_task_is_found_by_its_handle(client: Client, clock: ManualClock) -> None:
    handle = await client.put("kafka:ticks", {"item": "ü"}, after="30m", lane="a")
    assert (handle.outcome, handle.past, handle.durability) == ("created", False, "server")
    assert handle.due_ms == clock.now_ms() + 30 * 60_000
    found = await client.get(handle.id)
    assert (found.state, found.target, found.payload, found.lane) == ("pending", "kafka:ticks", {"item": "ü"}, "a")
    assert found.due_ms == handle.due_ms


@pytest.mark.parametrize("payload", [None, 0, "", [], {"a": [1, None]}, b"", b"\x00\xff{", "\N{PILE OF POO}"])
async def test_a_payload_comes_out_as_it_went_in(ticker: Ticker, payload: object) -> None:
    await ticker.client.put("log:", payload)
    [delivery] = await ticker.turn()
    assert delivery.value() == payload


async def test_many_tasks_are_put_and_counted(client: Client, store: Store) -> None:
    seen: list[int] = []
    tasks = (Task("log:", n, after=f"{n % 7}s") for n in range(20_000))
    summary = await client.put_many(tasks, progress=seen.append)
    assert (summary.accepted, summary.created, summary.kept, summary.handles) == (20_000, 20_000, 0, None)
    assert seen[-1] == 20_000
    assert seen == sorted(seen)
    books = await balance(store)
    assert (books.accepted, books.pending) == (20_000, 20_000)


async def test_tasks_may_come_from_an_asynchronous_source(client: Client) -> None:
    async def source() -> AsyncIterator[Task]:
        for n in range(10):
            await asyncio.sleep(0)
            yield Task("log:", n, after="1s")

    summary = await client.put_many(source(), handles=True)
    assert summary.accepted == len(summary.handles or ()) == 10


async def test_near_and_far_tasks_of_one_put_come_once_each_at_their_millisecond(
    ticker: Ticker, clock: ManualClock
) -> None:
    """With ids and without, in slices of seconds and of hours; some of both are cancelled before."""
    now_ms, came = clock.now_ms(), dict[int, int]()
    ticker.answer("log", lambda delivery: came.update({delivery.value(): clock.now_ms()}))
    dues_ms = [now_ms + n * 7_919 % (4 * HOUR_MS) + HOUR_MS // 2 for n in range(300)]
    dues_ms += [now_ms + HOUR_MS - 1, now_ms + HOUR_MS, now_ms + HOUR_MS + 1]
    tasks = [Task("log:", n, at=at, id=None if n % 2 else f"o{n}") for n, at in enumerate(dues_ms)]
    summary = await ticker.client.put_many(tasks, handles=True)
    assert [handle.due_ms for handle in summary.handles or ()] == dues_ms
    gone = range(0, len(tasks), 7)
    ids = [handle.id for handle in summary.handles or ()]
    assert await ticker.client.cancel_many([ids[n] for n in gone]) == ["cancelled"] * len(gone)
    delivered = await ticker.advance(hours=5)
    assert came == {n: at for n, at in enumerate(dues_ms) if n not in gone}
    assert len(delivered) == len(came)


async def test_far_tasks_share_hour_slices_and_near_ones_have_seconds(client: Client) -> None:
    near = await client.put("log:", after="59m59s")
    far = await client.put("log:", after="1h")
    assert address_of(near.id).slice.width_ms == SECOND_MS
    assert address_of(far.id).slice.width_ms == HOUR_MS


async def test_resent_copies_are_one_task(ticker: Ticker) -> None:
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        handle = await ticker.client.put("log:", "once", after="1s", lane="a")
    books = await balance(ticker.store)
    assert (books.accepted, books.pending, books.resent) == (2, 2, 1)
    assert (await ticker.client.list()).tasks[0].id == handle.id
    assert len((await ticker.client.list()).tasks) == 1
    assert [one.value() for one in await ticker.advance(seconds=5)] == ["once"]
    books = await balance(ticker.store)
    assert (books.done, books.replaced) == (1, 1)
    assert (await ticker.client.get(handle.id)).state == "finished"


async def test_the_original_arriving_after_its_resend_is_the_same_task(ticker: Ticker) -> None:
    with bad_road(ticker.store) as road:
        road.next("hold back", only=uses("MULTI"))
        await ticker.client.put("log:", "once", after="1s")
        await ticker.turn()
        await road.deliver_held()
    assert (await balance(ticker.store)).pending == 2
    assert [one.value() for one in await ticker.advance(seconds=5)] == ["once"]


async def test_a_resend_that_arrives_when_the_original_has_fired_does_not_fire(ticker: Ticker) -> None:
    with bad_road(ticker.store) as road:
        road.next("lose reply", "hold back", only=uses("MULTI"))
        with pytest.raises(Unavailable) as caught:
            await ticker.client.put("log:", "once", after="0s")
        assert caught.value.sent
        assert [one.value() for one in await ticker.turn()] == ["once"]
        await road.deliver_held()
    assert await ticker.advance(seconds=5) == []
    books = await balance(ticker.store)
    assert (books.done, books.replaced) == (1, 1)


async def test_a_resent_task_that_fails_is_tried_again(ticker: Ticker) -> None:
    ticker.answer("log", lambda delivery: Retry("not yet", after_ms=50) if delivery.attempt == 1 else None)
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        await ticker.client.put("log:", "once", after="100ms")
    assert [one.attempt for one in await ticker.advance(seconds=5)] == [1, 2]
    assert (await balance(ticker.store)).done == 1


async def test_cancelling_a_resent_task_cancels_all_its_copies(ticker: Ticker) -> None:
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        handle = await ticker.client.put("log:", "never", after="1s")
    await ticker.turn()
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert (await ticker.client.get(handle.id)).state == "cancelled"
    assert await ticker.client.cancel(handle.id) == "cancelled"
    assert await ticker.advance(seconds=5) == []
    books = await balance(ticker.store)
    assert (books.accepted, books.cancelled, books.replaced) == (2, 1, 1)


async def test_the_original_of_a_cancelled_resend_never_fires(ticker: Ticker) -> None:
    with bad_road(ticker.store) as road:
        road.next("hold back", only=uses("MULTI"))
        handle = await ticker.client.put("log:", "never", after="1s")
        assert await ticker.client.cancel(handle.id) == "cancelled"
        await road.deliver_held()
    assert await ticker.advance(seconds=5) == []


async def test_a_resent_task_that_has_fired_cannot_be_cancelled(ticker: Ticker) -> None:
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        handle = await ticker.client.put("log:", "once", after="1s")
    await ticker.advance(seconds=1)
    assert await ticker.client.cancel(handle.id) == "too late"
    assert (await ticker.client.get(handle.id)).state == "done"


async def test_a_resent_task_moves_with_all_its_copies(ticker: Ticker) -> None:
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        handle = await ticker.client.put("log:", "once", after="300ms")
    moved = await ticker.client.reschedule(handle.id, after="900ms")
    assert (await ticker.client.get(handle.id)).due_ms == moved.due_ms
    assert [one.due_ms for one in await ticker.advance(seconds=5)] == [moved.due_ms]
    await balance(ticker.store)


async def test_a_put_that_was_never_sent_is_not_marked_as_resent(client: Client, store: Store) -> None:
    with bad_road(store) as road:
        road.next("never sent", only=uses("MULTI"))
        handle = await client.put("log:", after="1s")
    address = address_of(handle.id)
    owner = HandOwner(store, address.partition, b"")
    [row] = await owner.rows(address.slice)
    assert not row[4] & RESENT


async def test_a_crowded_second_is_cut_finer_and_fires_in_order(ticker: Ticker, clock: ManualClock) -> None:
    due_ms = clock.now_ms() + 2_000
    lane = "crowd"
    crowd = CROWDED + 1
    await ticker.client.put_many(Task("null:", None, at=due_ms + 999, lane=lane) for _ in range(3))
    address = address_of((await ticker.client.put("log:", 1, at=due_ms + 500, lane=lane)).id)
    ticker.client._widths.saw(address.partition, address.slice, crowd)
    finer = await ticker.client.put("log:", 0, at=due_ms + 400, lane=lane)
    assert address_of(finer.id).slice.width_ms == 50
    later = await ticker.client.put("log:", 2, at=due_ms + 600, lane=lane)
    assert address_of(later.id).slice.width_ms == 50
    fired = await ticker.advance(seconds=5)
    assert [one.value() for one in fired] == [0, 1, 2, None, None, None]


async def test_a_past_due_time_fires_at_once_and_is_marked(ticker: Ticker, clock: ManualClock) -> None:
    due_ms = clock.now_ms() - 3_600_000
    handle = await ticker.client.put("log:", "late", at=due_ms)
    assert handle.past
    assert handle.due_ms == due_ms
    assert (await ticker.client.get(handle.id)).due_ms == due_ms
    [delivery] = await ticker.turn()
    assert delivery.due_ms == delivery.original_due_ms == due_ms
    assert delivery.idempotency_key.endswith(f"/{due_ms}")


async def test_a_due_time_just_past_fires_at_once(ticker: Ticker, clock: ManualClock) -> None:
    clock.advance(ms=500)
    handle = await ticker.client.put("log:", "late", at=clock.now_ms() - 1)
    assert handle.past
    assert [one.due_ms for one in await ticker.turn()] == [handle.due_ms]


async def test_script_flush_is_healed(ticker: Ticker, store: Store) -> None:
    """At any moment: before a put with id, a begin, a commit, a cancel."""
    for n in range(3):
        for primary in store.servers.all():
            await primary.pipeline([("SCRIPT", "FLUSH")])
        await ticker.client.put("log:", n, id=f"id-{n}", after="1s")
        await ticker.client.put("log:", n, id=f"cancelled-{n}", after="1s")
        for primary in store.servers.all():
            await primary.pipeline([("SCRIPT", "FLUSH")])
        assert await ticker.client.cancel(f"cancelled-{n}") == "cancelled"
        for primary in store.servers.all():
            await primary.pipeline([("SCRIPT", "FLUSH")])
        assert [one.value() for one in await ticker.advance(seconds=1)] == [n]
