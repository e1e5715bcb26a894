"""Pages over tasks with large payloads: what a page reads is bounded in bytes as well as in tasks."""

import asyncio

import pytest

from mainspring.client.client import Client
from mainspring.model.delivery import Dead
from mainspring.model.task import Task
from mainspring.store.redis.servers import info_fields
from mainspring.store.store import Store
from mainspring.store.tasks.pages import PAGE_BYTES
from mainspring.testing.ticker import Ticker
from tests.support.paging import pages

COUNT = 300
PAYLOAD = 60_000


async def sent_bytes(store: Store) -> int:
    """Bytes that the servers have sent to all their clients."""
    total = 0
    for primary in store.servers.all():
        [info] = await primary.pipeline([("INFO", "stats")])
        total += int(info_fields(info)["total_net_output_bytes"])
    return total


async def put_large(client: Client, store: Store, lane: str | None = None) -> None:
    due_ms = store.clock.now_ms() + 60_000
    for first in range(0, COUNT, 50):
        await client.put_many(
            Task("log:", [n, "x" * PAYLOAD], at=due_ms + (COUNT - n) % 7, lane=lane) for n in range(first, first + 50)
        )


@pytest.mark.parametrize(("target", "lane"), [(None, None), ("log:", None), (None, "a")])
async def test_a_page_of_one_task_reads_no_payload_but_its_own(
    client: Client, store: Store, target: str | None, lane: str | None
) -> None:
    await put_large(client, store, lane)
    before = await sent_bytes(store)
    page = await client.list(limit=1, target=target, lane=lane)
    assert page.tasks[0].due_ms == store.clock.now_ms() + 60_000
    assert page.tasks[0].payload[0] % 7 == COUNT % 7
    assert len(page.tasks[0].payload[1]) == PAYLOAD
    assert await sent_bytes(store) - before < 10 * PAYLOAD


async def test_pages_read_at_once_stay_small_together(client: Client, store: Store) -> None:
    await put_large(client, store)
    before = await sent_bytes(store)
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(client.list(limit=1))
    assert await sent_bytes(store) - before < 80 * PAYLOAD


@pytest.mark.parametrize("held", [False, True])
async def test_a_page_of_large_tasks_ends_early_and_the_next_continues(ticker: Ticker, held: bool) -> None:
    client, store = ticker.client, ticker.store
    if held:
        await client.pause(target="log:")
    await put_large(client, store)
    if held:
        await ticker.advance(seconds=63)
    shown: list[int] = []
    async for tasks in pages(client, limit=COUNT):
        assert 0 < len(tasks) <= PAGE_BYTES // PAYLOAD
        shown += [task.payload[0] for task in tasks]
    assert sorted(shown) == list(range(COUNT))
    assert held or shown == sorted(range(COUNT), key=lambda n: ((COUNT - n) % 7, shown.index(n)))


async def test_pages_of_large_dead_letters_end_early(ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Dead("no"))
    await put_large(ticker.client, ticker.store)
    await ticker.advance(seconds=63)
    found, cursor = 0, None
    while True:
        before = await sent_bytes(ticker.store)
        page = await ticker.client.dead_list(limit=COUNT, cursor=cursor)
        assert await sent_bytes(ticker.store) - before < 3 * PAGE_BYTES
        found, cursor = found + len(page.letters), page.next
        if cursor is None:
            break
    assert found == COUNT


async def test_the_head_of_a_lane_is_explained_with_large_payloads(client: Client, store: Store) -> None:
    due_ms = store.clock.now_ms()
    await client.put("log:", "x" * PAYLOAD, id="first", lane="a", at=due_ms - 2_000)
    await client.put("log:", "x" * PAYLOAD, id="second", lane="a", at=due_ms - 1_000)
    assert (await client.explain("second", lane="a")).head_id == "first"
