"""A slice most of whose tasks are cancelled is rewritten under another incarnation: no reader may be misled."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Outcome, Retry
from mainspring.model.errors import Unavailable
from mainspring.model.ids import idh_in_lane, idh_of
from mainspring.model.task import Task
from mainspring.store.keys import SECOND_MS, Slice, partition_of
from mainspring.store.store import Store
from mainspring.store.tasks.cancel import Cancel, cancel
from mainspring.store.tasks.find import Finder, Reference
from mainspring.store.tasks.index import look_up, look_up_packed
from mainspring.store.tasks.pages import CHUNK_ROWS
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of

PARTITION = 1
AHEAD_MS = 5_000


def ids_of(store: Store, count: int) -> list[str]:
    """Return ids of one partition."""
    names = (f"order-{n}" for n in range(100 * count))
    return [name for name in names if partition_of(name, len(store.keys)) == PARTITION][:count]


async def put_all(client: Client, names: list[str], place: Slice) -> None:
    tasks = [Task("log:", name, at=place.start_ms + n % SECOND_MS, id=name) for n, name in enumerate(names)]
    assert (await client.put_many(tasks)).created == len(names)


def place_of(clock: ManualClock) -> Slice:
    return Slice.at(clock.now_ms() + AHEAD_MS, SECOND_MS)


async def test_remaining_tasks_fire_and_the_others_leave_nothing_behind(ticker: Ticker) -> None:
    names, place = ids_of(ticker.store, 600), place_of(ticker.clock)
    await put_all(ticker.client, names, place)
    stay = names[::20]
    gone = [name for name in names if name not in stay]
    owner = await HandOwner.acquire(ticker.store, PARTITION)
    before = await owner.incarnation(place)
    assert set(await ticker.client.cancel_many(gone)) == {"cancelled"}
    assert await owner.incarnation(place) != before
    assert len(await owner.rows(place)) == len(stay)
    assert await owner.raw("EXISTS", *owner.keys.slice_keys(place.name)[1:]) == 0
    assert await owner.raw("HLEN", owner.keys.ids) == len(stay)
    assert await owner.raw("OBJECT", "ENCODING", owner.keys.ids) == b"listpack"
    assert {(await ticker.client.get(name)).state for name in stay} == {"pending"}
    ticker.clock.advance(seconds=5)  # the lease of the owner above
    assert [one.value() for one in await ticker.advance(seconds=10)] == stay
    books = await balance(ticker.store)
    assert (books.done, books.cancelled, books.pending) == (len(stay), len(gone), 0)


async def test_an_owner_that_has_read_the_old_list_fires_only_what_stays(ticker: Ticker) -> None:
    names = ids_of(ticker.store, 100)
    await put_all(ticker.client, names, Slice.at(ticker.clock.now_ms() + 2_000, SECOND_MS))
    await ticker.turn()
    assert ticker.engine.owned[PARTITION].waiting == 100, "the owner holds all of them in memory"
    await ticker.client.cancel_many(names[5:])
    assert [one.value() for one in await ticker.advance(seconds=10)] == names[:5]
    assert (await balance(ticker.store)).done == 5


async def test_an_owner_that_has_begun_nothing_yet_cannot_fire_a_cancelled_task(
    client: Client, store: Store, clock: ManualClock
) -> None:
    """Its begin was under way when the slice was rewritten, and names a row that another task has now."""
    names, place = ids_of(store, 64), place_of(clock)
    await put_all(client, names, place)
    clock.set(place.end_ms)
    owner = await HandOwner.acquire(store, PARTITION)
    late = await owner.section(place, begin=[0, 1])
    await client.cancel_many(names[:60])
    assert (await owner.tick(late)).status == "stale"
    assert await owner.bits("f", place) == []


async def test_a_slice_in_which_something_has_begun_is_not_rewritten(
    client: Client, store: Store, clock: ManualClock
) -> None:
    names, place = ids_of(store, 64), place_of(clock)
    await put_all(client, names, place)
    clock.set(place.end_ms)
    owner = await HandOwner.acquire(store, PARTITION)
    assert (await owner.begin(place, [7])).status == "ok"
    before = await owner.incarnation(place)
    outcomes = await client.cancel_many(names[:60])
    assert [name for name, word in zip(names, outcomes, strict=False) if word == "too late"] == [names[7]]
    assert outcomes.count("cancelled") == 59
    assert (await owner.incarnation(place), len(await owner.rows(place))) == (before, 64)


async def test_a_late_cancel_at_the_old_place_hits_no_other_task(
    client: Client, store: Store, clock: ManualClock
) -> None:
    """A cancel looked the task up, then the slice was rewritten: its place is another task's now, or empty."""
    names, place = ids_of(store, 64), place_of(clock)
    await put_all(client, names, place)
    old = await look_up_packed(store, [(PARTITION, idh_of(name)) for name in names])
    late = [Cancel(PARTITION, at, idh_of(name), True) for at, name in zip(old, names, strict=True) if at is not None]
    await client.cancel_many(names[2:])
    assert await cancel(store, late) == ["gone"] * 64
    assert {(await client.get(name)).state for name in names[:2]} == {"pending"}


async def test_a_late_cancel_follows_a_task_to_its_new_place(client: Client, store: Store, clock: ManualClock) -> None:
    names, place = ids_of(store, 64), place_of(clock)
    await put_all(client, names, place)
    [old] = await look_up(store, [(PARTITION, idh_of(names[63]))])
    await client.cancel_many(names[:60])
    reference = Reference(names[63], idh_of(names[63]), PARTITION, False, old)
    assert await Finder(store).cancel([reference]) == ["cancelled"]
    assert (await client.get(names[63])).state == "cancelled"


async def test_a_task_known_only_by_its_handle_keeps_its_place(
    client: Client, store: Store, clock: ManualClock
) -> None:
    names, place = ids_of(store, 64), place_of(clock)
    await put_all(client, names, place)
    handles = [await client.put("log:", "plain", at=place.start_ms) for _ in range(40)]
    handle = next(one for one in handles if address_of(one.id).partition == PARTITION)
    owner = await HandOwner.acquire(store, PARTITION)
    before = await owner.incarnation(place)
    assert set(await client.cancel_many(names)) == {"cancelled"}
    assert await owner.incarnation(place) == before
    assert (await client.get(handle.id)).state == "pending"
    assert await client.cancel(handle.id) == "cancelled"


async def test_a_put_sent_twice_and_cancelled_does_not_come_back_with_its_late_copy(ticker: Ticker) -> None:
    """Only its tombstone distinguishes the copy that arrives last from a new task."""
    place = place_of(ticker.clock)
    names = ids_of(ticker.store, 64)
    await put_all(ticker.client, names, place)
    while True:
        with bad_road(ticker.store) as road:
            road.next("hold back", only=lambda commands: commands[0][0] == "MULTI")
            handle = await ticker.client.put("log:", "twice", at=place.start_ms)
            assert await ticker.client.cancel(handle.id) == "cancelled"
            if address_of(handle.id).partition == PARTITION:
                await ticker.client.cancel_many(names)
                await road.deliver_held()
                break
            await road.deliver_held()
    assert await ticker.advance(seconds=10) == []


async def test_a_lane_that_waits_for_a_cancelled_retry_continues(ticker: Ticker) -> None:
    """Its owner learns of the cancel from the tombstone of the retry: that must not vanish."""
    lane = next(name for name in ids_of(ticker.store, 1))

    def fails(_: object) -> Outcome:
        return Retry("busy", after_ms=3_000)

    ticker.answer("http", fails)
    await ticker.client.put("http://x", "head", id="head", lane=lane, after="0s")
    await ticker.client.put("log:", "next", id="next", lane=lane, after="1s")
    await ticker.turn()
    head = idh_in_lane(idh_of("head"), lane)
    [retry] = await look_up(ticker.store, [(PARTITION, head)])
    assert retry is not None
    names = ids_of(ticker.store, 64)
    await put_all(ticker.client, names, retry.slice)
    finder = Finder(ticker.store)
    hashes = [("head", head), *((name, idh_of(name)) for name in names)]
    references = [Reference(name, idh, PARTITION, False, None) for name, idh in hashes]
    assert set(await finder.cancel(references)) == {"cancelled"}
    assert [one.value() for one in await ticker.advance(seconds=10)] == ["next"]


async def test_a_slice_whose_tasks_are_all_cancelled_is_gone_and_can_be_made_again(ticker: Ticker) -> None:
    names, place = ids_of(ticker.store, 64), place_of(ticker.clock)
    await put_all(ticker.client, names, place)
    owner = await HandOwner.acquire(ticker.store, PARTITION)
    before = await owner.incarnation(place)
    await ticker.client.cancel_many(names)
    assert await owner.raw("ZSCORE", owner.keys.slices, place.name) is None
    assert await owner.raw("EXISTS", *owner.keys.slice_keys(place.name), owner.keys.ids) == 0
    await put_all(ticker.client, names[:3], place)
    assert await owner.incarnation(place) != before
    ticker.clock.advance(seconds=5)
    assert len(await ticker.advance(seconds=10)) == 3


async def test_a_task_named_twice_in_one_call_counts_once(client: Client, store: Store, clock: ManualClock) -> None:
    names = ids_of(store, 64)
    await put_all(client, names, place_of(clock))
    assert set(await client.cancel_many([*names, names[0]])) == {"cancelled"}
    assert (await balance(store)).cancelled == 64


async def test_after_a_lost_reply_the_cancel_counts_and_the_other_tasks_can_be_found(ticker: Ticker) -> None:
    names = ids_of(ticker.store, 64)
    await put_all(ticker.client, names, place_of(ticker.clock))
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=lambda commands: any("compact" in str(command[1:2]) for command in commands))
        with pytest.raises(Unavailable, match="broke the network path"):
            await ticker.client.cancel_many(names[4:])
    assert set(await ticker.client.cancel_many(names[4:])) == {"cancelled"}
    assert {(await ticker.client.get(name)).state for name in names[:4]} == {"pending"}
    assert len(await ticker.advance(seconds=10)) == 4


async def test_a_new_owner_finds_what_stays(ticker: Ticker) -> None:
    names = ids_of(ticker.store, 64)
    await put_all(ticker.client, names, place_of(ticker.clock))
    await ticker.turn()
    await ticker.client.cancel_many(names[4:])
    ticker.engine.keeper.lose(ticker.engine.owned[PARTITION], "a test takes it away")
    assert [one.value() for one in await ticker.advance(seconds=10)] == names[:4]


async def test_a_bulk_put_repeated_is_the_same_tasks(client: Client, store: Store, clock: ManualClock) -> None:
    names, place = ids_of(store, 100), place_of(clock)
    await put_all(client, names, place)
    owner = await HandOwner.acquire(store, PARTITION)
    rows = await owner.rows(place)
    again = [Task("log:", name, after="30s", id=name) for name in names]
    assert (await client.put_many(again)).kept == 100
    assert await owner.rows(place) == rows
    assert await owner.raw("ZCARD", owner.keys.slices) == 1, "no slice is left without a task"
    assert (await balance(store)).accepted == 100


async def test_a_bulk_put_stores_only_new_tasks(client: Client, store: Store, clock: ManualClock) -> None:
    names, place = ids_of(store, 120), place_of(clock)
    await put_all(client, names[::3], place)
    tasks = [Task("log:", name, at=place.start_ms + n, id=name) for n, name in enumerate(names)]
    summary = await client.put_many(tasks, handles=True)
    assert (summary.created, summary.kept) == (80, 40)
    assert [handle.outcome for handle in summary.handles or []] == ["kept", "created", "created"] * 40
    found = await look_up(store, [(PARTITION, idh_of(name)) for name in names])
    owner = await HandOwner.acquire(store, PARTITION)
    rows = await owner.rows(place)
    assert [rows[one.index][5:21] for one in found if one is not None] == [idh_of(name) for name in names]
    assert len(rows) == 120


async def test_a_forgotten_script_does_not_part_the_tasks_from_their_ids(
    client: Client, store: Store, clock: ManualClock
) -> None:
    """Within a transaction an unknown script fails alone: the tasks would be stored without their ids."""
    for primary in store.servers.all():
        await primary.pipeline([("SCRIPT", "FLUSH")])
    names = ids_of(store, 64)
    await put_all(client, names, place_of(clock))
    assert {(await client.get(name)).state for name in names} == {"pending"}


async def test_a_bulk_put_whose_reply_was_lost_is_one_task_each(ticker: Ticker) -> None:
    names, place = ids_of(ticker.store, 64), place_of(ticker.clock)
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=lambda commands: any(command[0] == "EXEC" for command in commands))
        await put_all(ticker.client, names, place)
    assert len(await ticker.advance(seconds=10)) == 64
    assert (await balance(ticker.store)).accepted == 64


async def test_an_owner_does_not_mistake_a_tombstone_that_is_gone_by_now_for_damage(ticker: Ticker) -> None:
    names = ids_of(ticker.store, 100)
    await put_all(ticker.client, names, Slice.at(ticker.clock.now_ms() + 2_000, SECOND_MS))
    assert await ticker.client.cancel(names[0]) == "cancelled"
    with bad_road(ticker.store) as road:
        road.next("late reply", only=uses("LRANGE"))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(ticker.turn())
            while not road.late:  # noqa: ASYNC110  # the road tells nothing
                await asyncio.sleep(0)
            await ticker.client.cancel_many(names[5:])  # before the owner asks whether the tombstone is one
            road.deliver_late()
    assert [one.value() for one in await ticker.advance(seconds=10)] == names[1:5]
    books = await balance(ticker.store)
    assert (books.done, books.cancelled, books.dead) == (4, 96, 0)


async def test_the_next_page_skips_no_task_whose_slice_was_rewritten(
    client: Client, store: Store, clock: ManualClock
) -> None:
    names = ids_of(store, 200)
    due_ms = place_of(clock).start_ms
    await client.put_many(Task("log:", name, at=due_ms, id=name) for name in names)
    shown = await client.list(limit=40)
    assert [task.id for task in shown.tasks] == names[:40]
    await client.cancel_many(names[:150])
    assert [id async for id in ids_behind(client, shown.next)] == names[150:]


async def test_a_page_that_is_being_read_skips_no_task_whose_slice_is_rewritten(
    client: Client, store: Store, clock: ManualClock
) -> None:
    names, place = ids_of(store, 3 * CHUNK_ROWS), place_of(clock)
    await put_all(client, names, place)
    stay = names[2 * CHUNK_ROWS :: 100]
    with bad_road(store) as road:
        road.next("late reply", only=calls("heads"))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            page = group.create_task(client.list(limit=1000))
            while not road.late:  # noqa: ASYNC110  # the road tells nothing
                await asyncio.sleep(0)
            await client.cancel_many([name for name in names if name not in stay])
            road.deliver_late()
    assert sorted(task.id for task in page.result().tasks) == sorted(stay)


async def test_pages_of_held_tasks_skip_no_task_whose_slice_was_rewritten(ticker: Ticker) -> None:
    names, place = ids_of(ticker.store, 200), Slice.at(ticker.clock.now_ms() + 1_000, SECOND_MS)
    await ticker.client.pause(target="log:")
    await put_all(ticker.client, names, place)
    await ticker.advance(seconds=3)
    shown = await ticker.client.list(limit=40)
    assert [task.id for task in shown.tasks] == names[:40]
    owner = HandOwner(ticker.store, PARTITION, b"")
    held = await owner.raw("ZRANGE", owner.keys.slices, 0, -1, "WITHSCORES")
    await ticker.client.cancel_many(names[:150])
    assert await owner.raw("ZRANGE", owner.keys.slices, 0, -1, "WITHSCORES") != held, "it was written anew"
    assert [id async for id in ids_behind(ticker.client, shown.next)] == names[150:]


async def ids_behind(client: Client, cursor: str | None) -> AsyncIterator[str]:
    while cursor is not None:
        page = await client.list(limit=40, cursor=cursor)
        for task in page.tasks:
            yield task.id
        cursor = page.next
