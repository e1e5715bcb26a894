"""Lists of tasks that are in queues, on every kind of server."""

from collections.abc import Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.model.errors import InvalidInput
from mainspring.model.task import TaskInfo
from mainspring.store.job_queue import take
from mainspring.store.store import Store
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]


async def everything(client: Client, state: str, **more: object) -> list[TaskInfo]:
    found, cursor = [], None
    while True:
        page = await client.list(state=state, limit=7, cursor=cursor, **more)  # type: ignore[arg-type]
        found += page.tasks
        cursor = page.next
        if cursor is None:
            return found


async def test_waiting_and_running_tasks_are_listed_each_once(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(workers=True)
    client = ticker.client
    now_ms = store.clock.now_ms()
    for n in range(40):
        queue = "mail" if n % 2 else "reports"
        await client.put(f"queue:{queue}/send", n, at=now_ms + n, id=f"n{n}" if n % 3 else None)
    await ticker.advance(seconds=1)
    assert sorted(one.payload for one in await everything(client, "queued")) == list(range(40))
    jobs = await take(store, "worker-1", {p: {"mail": 3} for p in range(len(store.keys))})
    running = await everything(client, "running")
    waiting = await everything(client, "queued")
    assert len(running) == len(jobs) > 0
    assert {one.worker for one in running} == {"worker-1"}
    assert sorted(one.payload for one in (*running, *waiting)) == list(range(40))
    for one in (running[0], waiting[0]):
        assert await client.get(one.id) == one
    mail = await everything(client, "queued", target="queue:mail/*")
    assert {one.target for one in mail} <= {"queue:mail/send"}
    assert len(mail) == 20 - len(jobs)
    early = await everything(client, "queued", due_before=now_ms + 10, target="queue:reports/send")
    assert sorted(one.payload for one in early) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("cursor", ["", "1.2.3.4", "q", "q1", "q1.x", "q99999.0", f"q1.{1 << 64}"])
async def test_a_cursor_of_another_list_is_refused(client: Client, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        await client.list(state="queued", cursor=cursor)
