"""Lists and counts over held tasks: all of them once, and never all of them at once."""

import pytest

from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.store.tasks import pages as pages_module
from mainspring.testing.faults import NetworkFaults, bad_road
from mainspring.testing.ticker import Ticker
from tests.support.paging import pages, payloads, reads


async def held(ticker: Ticker, count: int, *, targets: str = "ab", a_ms: int = 1) -> int:
    """Tasks of paused targets, so many each millisecond, and ten that are not due yet. When the first was due."""
    due_ms = ticker.clock.now_ms() + 1_000
    for name in targets:
        await ticker.client.pause(target=f"kafka:{name}")
    tasks = [Task(f"kafka:{targets[n % len(targets)]}", n, at=due_ms + n // a_ms) for n in range(count)]
    await ticker.client.put_many(tasks)
    await ticker.client.put_many(Task("log:", f"later {n}", after=f"{60 + n}m") for n in range(10))
    for _ in range(20):  # not each at its millisecond: that they are held is what counts here
        ticker.clock.advance(ms=55 + -(-count // a_ms) // 20)
        await ticker.turn()
    return due_ms


def entries_read(road: NetworkFaults) -> int:
    """At most: what was asked for."""
    return sum(read.rows for read in reads(road) if ":4294967296." in read.key)


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
async def test_pages_show_every_held_task_once_and_before_all_others(ticker: Ticker, limit: int) -> None:
    count = 40 if limit == 1 else 700
    await held(ticker, count, a_ms=20)
    shown = await payloads(ticker.client, limit=limit)
    assert sorted(shown[:count]) == list(range(count))
    assert shown[count:] == [f"later {n}" for n in range(10)]


async def test_tasks_that_left_meanwhile_are_not_listed(ticker: Ticker) -> None:
    await held(ticker, 200, a_ms=10)
    ids = [
        task.id async for some in pages(ticker.client, limit=50) for task in some if task.payload in (0, 63, 64, 199)
    ]
    assert await ticker.client.cancel_many(ids) == ["cancelled"] * 4
    shown = await payloads(ticker.client, limit=50)
    assert sorted(one for one in shown if isinstance(one, int)) == [n for n in range(200) if n not in (0, 63, 64, 199)]


async def test_a_held_task_is_listed_with_its_own_time_and_found_by_its_id(ticker: Ticker) -> None:
    due_ms = await held(ticker, 30)
    for task in (await ticker.client.list(limit=40)).tasks[:30]:
        assert task.due_ms == due_ms + task.payload
        assert (await ticker.client.get(task.id)).payload == task.payload


async def test_held_tasks_are_filtered_by_time_and_target(ticker: Ticker) -> None:
    due_ms = await held(ticker, 300)
    inside = await payloads(ticker.client, due_after=due_ms + 100, due_before=due_ms + 110)
    assert sorted(inside) == list(range(100, 110))
    only_b = await payloads(ticker.client, target="kafka:b", limit=20)
    assert sorted(only_b) == list(range(1, 300, 2))


async def test_a_page_reads_few_of_many_held_tasks(ticker: Ticker, store: Store) -> None:
    await held(ticker, 9_000, targets="a", a_ms=300)
    cursor = None
    for _ in range(3):
        with bad_road(store) as road:
            page = await ticker.client.list(limit=50, cursor=cursor)
        assert len(page.tasks) == 50
        assert entries_read(road) <= 2 * pages_module.AT_ONCE
        assert road.round_trips <= 4
        cursor = page.next


async def test_a_search_that_finds_nothing_stops_after_a_bounded_number_of_tasks(
    ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.store.tasks.query.SEARCHED_AT_MOST", 500)
    await held(ticker, 3_000, targets="a", a_ms=300)
    page = await ticker.client.list(target="kafka:none", limit=10)
    assert (page.tasks, page.next is None) == ([], False)
    assert await payloads(ticker.client, target="kafka:none", limit=10) == []
    assert await payloads(ticker.client, target="log:", limit=10) == [f"later {n}" for n in range(10)]


async def test_held_tasks_are_counted(ticker: Ticker, store: Store) -> None:
    due_ms = await held(ticker, 500)
    past = await ticker.client.count(due_after=due_ms - 10_000, due_before=ticker.clock.now_ms() + 1)
    assert (past.pending, past.exact) == (500, True)
    part = await ticker.client.count(due_after=due_ms + 100, due_before=due_ms + 150)
    assert (part.pending, part.exact) == (50, True)
    assert (await ticker.client.count(due_after=ticker.clock.now_ms())).pending == 10
    with bad_road(store) as road:
        everything = await ticker.client.count(due_after=due_ms - 50 * 86_400_000)
    assert (everything.pending, entries_read(road)) == (510, 0)


async def test_a_count_of_very_many_tasks_samples_and_says_so(
    ticker: Ticker, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_ms = await held(ticker, 9_000, targets="a", a_ms=300)
    monkeypatch.setattr(pages_module, "COUNTED_AT_MOST", 1_000)
    with bad_road(store) as road:
        half = await ticker.client.count(due_after=due_ms, due_before=due_ms + 15)
    assert not half.exact
    assert 3_500 <= half.pending <= 5_500
    assert entries_read(road) <= 1_000 + 10 * 64 * len(store.keys)
