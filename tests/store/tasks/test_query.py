"""Pages in due order and counts by time, in few round trips, exact or saying that they are not."""

import random
from contextlib import suppress

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Body, Retry
from mainspring.model.errors import InvalidInput
from mainspring.model.task import Task
from mainspring.store.codec import entry
from mainspring.store.keys import Slice
from mainspring.store.store import Store
from mainspring.store.tasks.put import fresh_score
from mainspring.testing.faults import bad_road
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of
from tests.support.paging import pages, payloads, reads

HOUR_MS = 3_600_000


async def test_an_empty_namespace_has_an_empty_page(client: Client) -> None:
    page = await client.list()
    assert (page.tasks, page.next) == ([], None)
    assert (await client.count()).pending == 0


@pytest.mark.parametrize("limit", [1, 7, 50, 1000])
@pytest.mark.parametrize("spread_s", [1, 40, 3_000, 400_000])
async def test_pages_show_every_task_once_in_due_order(client: Client, limit: int, spread_s: int) -> None:
    seed = random.Random(spread_s)
    now_ms = client.store.clock.now_ms()
    count = 60 if limit == 1 else 400
    due = [now_ms + seed.randrange(spread_s * 1000) for _ in range(count)]
    await client.put_many(Task("log:", n, at=at_ms) for n, at_ms in enumerate(due))
    shown = [int(str(n)) for n in await payloads(client, limit=limit)]
    assert sorted(shown) == list(range(count))
    assert [due[n] for n in shown] == sorted(due)


async def test_ties_are_in_a_fixed_order_and_none_is_skipped_at_the_edge_of_a_page(client: Client) -> None:
    due_ms = client.store.clock.now_ms() + 5_000
    await client.put_many(Task("log:", n, at=due_ms) for n in range(100))
    first = await payloads(client, limit=9)
    assert len(first) == len(set(map(str, first))) == 100
    assert await payloads(client, limit=33) == first


async def test_mixed_widths_are_merged_in_due_order(client: Client, clock: ManualClock) -> None:
    """Hour slices, second slices and an overdue one; some of the second slices are empty by now."""
    start_ms = clock.now_ms() - clock.now_ms() % HOUR_MS + 2 * HOUR_MS
    await client.put_many(Task("log:", f"h{n:02}", at=start_ms + 1_800_000 + n * 500) for n in range(60))
    clock.set(start_ms - 10)
    near = [Task("log:", f"s{n:02}", at=start_ms + n * 4_000) for n in range(300)]
    summary = await client.put_many(near, handles=True)
    handles = summary.handles or []
    await client.cancel_many(handle.id for handle in handles[:250])
    expected = [*(f"s{n:02}" for n in range(250, 300)), *(f"h{n:02}" for n in range(60))]
    assert await payloads(client, limit=10) == expected
    assert await payloads(client, limit=50) == expected


async def _seconds_within_a_full_hour(client: Client, clock: ManualClock) -> list[int]:
    """Two seconds a task before the tasks of the hour, which were put earlier; all due times in order."""
    start_ms = clock.now_ms() - clock.now_ms() % HOUR_MS + 2 * HOUR_MS
    late = [start_ms + 1_800_000 + n for n in range(3_000)]
    await client.put_many(Task("log:", "hour", at=at_ms) for at_ms in late)
    clock.set(start_ms - 10)
    near = [start_ms + n * 2_000 for n in range(120)]
    await client.put_many(Task("null:", "second", at=at_ms) for at_ms in near)
    return near + late


async def test_an_hour_full_of_tasks_leaves_no_page_of_its_seconds_short(
    client: Client, store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.store.tasks.query.SEARCHED_AT_MOST", 500)
    due = await _seconds_within_a_full_hour(client, clock)
    cursor = None
    for first in range(0, 200, 50):
        with bad_road(store) as road:
            page = await client.list(limit=50, cursor=cursor)
        assert [task.due_ms for task in page.tasks] == due[first : first + 50]
        assert road.round_trips <= 6
        asked = reads(road)
        assert asked
        assert len(asked) == len(set(asked)), "nothing twice"
        cursor = page.next


async def test_a_search_continues_past_an_hour_full_of_tasks_that_do_not_match(
    client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.store.tasks.query.SEARCHED_AT_MOST", 500)
    due = await _seconds_within_a_full_hour(client, clock)
    page = await client.list(limit=50, target="null:")
    assert [task.due_ms for task in page.tasks] == due[:50]


async def test_a_page_that_starts_within_an_hour_slice_ends(client: Client, clock: ManualClock) -> None:
    base_ms = clock.now_ms() - clock.now_ms() % HOUR_MS + 2 * HOUR_MS
    await client.put_many(Task("log:", n, at=base_ms + 1_000_000 + n * 2) for n in range(40))
    clock.set(base_ms + 400_000)
    await client.put_many(Task("log:", 100 + n, at=base_ms + 1_000_001 + n * 2) for n in range(12))
    expected = sorted([*(2 * n for n in range(40)), *(2 * n + 1 for n in range(12))])
    for limit in (1, 4, 50):
        due = [task.due_ms async for tasks in pages(client, limit=limit) for task in tasks]
        assert due == [base_ms + 1_000_000 + ms for ms in expected]


async def test_a_page_after_many_slices_of_the_past_hour_ends(client: Client, clock: ManualClock) -> None:
    """Slices before the range are not walked through, and never make the search go in circles."""
    now_ms = clock.now_ms()
    await client.put_many(Task("log:", n, at=now_ms + n * 1000) for n in range(3_000))
    assert await payloads(client, due_after=now_ms + 2_990_000, limit=4) == list(range(2_990, 3_000))
    assert await payloads(client, due_after=now_ms + 5_000, due_before=now_ms + 8_000) == [5, 6, 7]


@pytest.mark.parametrize("spread_s", [1, 10, 3_500, 3_000_000])
async def test_a_page_of_fifty_takes_two_round_trips(client: Client, store: Store, spread_s: int) -> None:
    now_ms = store.clock.now_ms()
    count = 2_000
    await client.put_many(Task("log:", n, at=now_ms + n * spread_s * 1000 // count) for n in range(count))
    cursor = None
    await client.list(limit=50)  # a server that does not know a script yet takes one trip more
    for first in range(0, 300, 50):
        with bad_road(store) as road:
            page = await client.list(limit=50, cursor=cursor)
        assert road.round_trips <= 2
        due = [task.due_ms for task in page.tasks]
        assert due == [now_ms + n * spread_s * 1000 // count for n in range(first, first + 50)]
        cursor = page.next


async def test_a_page_does_not_read_more_slices_than_it_needs(client: Client, store: Store) -> None:
    now_ms = store.clock.now_ms()
    await client.put_many(Task("log:", n, at=now_ms + n % 100 * 1000) for n in range(20_000))
    with bad_road(store) as road:
        await client.list(limit=50)
    assert 0 < len(reads(road)) <= 3 * len(store.keys)


async def test_only_pending_tasks_are_payloads(ticker: Ticker, store: Store) -> None:
    ticker.answer("log", lambda one: Retry("no", after_ms=5_000) if one.value() == "retry" else None)
    put = ticker.client.put
    await put("log:", "done", after="1s")
    await put("log:", "retry", after="1s")
    gone = await put("log:", "cancelled", after="2s")
    moved = await put("log:", "moved", after="2s")
    await put("log:", "pending", after="3s")
    await ticker.client.cancel(gone.id)
    await ticker.client.reschedule(moved.id, after="4s")
    assert await payloads(ticker.client) == ["done", "retry", "pending", "moved"] or await payloads(ticker.client) == [
        "retry", "done", "pending", "moved",
    ]  # fmt: skip
    await ticker.advance(seconds=1)
    assert await payloads(ticker.client) == ["pending", "moved", "retry"]
    begun = address_of((await put("log:", "fired")).id)
    other = ticker.engine.owned[begun.partition]
    owner = HandOwner(store, begun.partition, other.token)
    owner.seq = other.seq
    await owner.begin(begun.slice, [begun.index])
    assert "fired" not in await payloads(ticker.client)


async def test_a_listed_id_finds_its_task(client: Client) -> None:
    await client.put("log:", "plain", after="1h")
    await client.put("log:", "named", id="a.b~c", after="1h")
    for task in (await client.list()).tasks:
        assert (await client.get(task.id)).payload == task.payload
        assert await client.cancel(task.id) == "cancelled"
    assert (await client.list()).tasks == []


async def test_a_payload_that_is_not_json_hides_neither_its_task_nor_others(client: Client, store: Store) -> None:
    place = Slice.at(store.clock.now_ms() + 5_000, 1000)
    owner = HandOwner(store, 0, b"")
    rows = [entry(n, 0, bytes([n]) * 16, Body("log:", data)) for n, data in enumerate([b"1", b"{", b"2"])]
    await owner.raw("ZADD", owner.keys.slices, fresh_score(place), place.name)
    await owner.raw("RPUSH", owner.keys.entries(place.name), *rows)
    await owner.raw("HINCRBY", owner.keys.n, "accepted", len(rows))
    page = await client.list()
    assert [task.payload for task in page.tasks] == [1, b"{", 2]
    assert (await client.get(page.tasks[1].id)).payload == b"{"


async def test_an_overdue_task_is_listed_with_its_true_due_time(client: Client, clock: ManualClock) -> None:
    await client.put("log:", at=clock.now_ms() - 999_999)
    [task] = (await client.list()).tasks
    assert task.due_ms == clock.now_ms() - 999_999


@pytest.mark.parametrize("cursor", ["", "x", "1.2.3", "1.2.3.4.5", "9" * 40 + ".0.0.0", "-1.-1.-1.-1", "1.2.3.ü"])
async def test_a_cursor_from_elsewhere_is_refused_or_empty(client: Client, cursor: str) -> None:
    with suppress(InvalidInput):
        assert (await client.list(cursor=cursor)).tasks == []


async def test_the_count_of_everything_is_exact(ticker: Ticker) -> None:
    tasks = [Task("log:", n, after=f"{1 + n % 3}s") for n in range(30)]
    summary = await ticker.client.put_many(tasks, handles=True)
    await ticker.client.cancel_many(handle.id for handle in (summary.handles or [])[:5])
    count = await ticker.client.count()
    assert (count.pending, count.exact) == (25, True)
    await ticker.advance(seconds=1)
    assert (await ticker.client.count()).pending == 25 - 8


async def test_counts_by_time_say_when_they_are_estimates(client: Client, clock: ManualClock) -> None:
    now_ms = clock.now_ms()
    await client.put_many(Task("log:", n, at=now_ms + n * 10) for n in range(1_000))
    whole = await client.count(due_after=now_ms + 2_000, due_before=now_ms + 5_000)
    assert (whole.pending, whole.exact) == (300, True)
    part = await client.count(due_after=now_ms + 2_500, due_before=now_ms + 5_500)
    assert not part.exact
    assert 290 <= part.pending <= 310
    assert (await client.count(due_after=now_ms)).pending == 1_000
    assert (await client.count(due_before=now_ms + 1_000)).pending == 100


async def test_counts_leave_out_what_has_left(ticker: Ticker) -> None:
    now_ms = ticker.clock.now_ms()
    summary = await ticker.client.put_many([Task("log:", n, at=now_ms + 500 + n) for n in range(20)], handles=True)
    await ticker.client.cancel((summary.handles or [])[19].id)
    assert (await ticker.client.count(due_after=now_ms, due_before=now_ms + 1_000)).pending == 19
    await ticker.advance(ms=509)
    assert (await ticker.client.count(due_after=now_ms, due_before=now_ms + 1_000)).pending == 9


async def test_an_hour_slice_counts_by_its_share(client: Client, clock: ManualClock) -> None:
    start_ms = clock.now_ms() - clock.now_ms() % HOUR_MS + 3 * HOUR_MS
    await client.put_many(Task("log:", n, at=start_ms + n * 3_600) for n in range(1_000))
    half = await client.count(due_after=start_ms, due_before=start_ms + HOUR_MS // 2)
    assert (half.pending, half.exact) == (500, False)
    assert (await client.count(due_after=start_ms, due_before=start_ms + HOUR_MS)).exact
