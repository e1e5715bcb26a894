"""The synchronous client does what the asynchronous one does."""

import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mainspring.client.client import Client
from mainspring.client.dead_letters import DeadLetters
from mainspring.client.schedules import Schedules
from mainspring.client.sync import SyncClient, SyncDeadLetters, SyncSchedules
from mainspring.model.errors import InvalidInput, MainspringError, TaskFailed, Unavailable
from mainspring.model.task import Task
from mainspring.testing.servers import Server, wait_until


@pytest.fixture
def client(server: Server) -> Iterator[SyncClient]:
    with SyncClient(server.url, namespace="sync", partitions=4) as opened:
        yield opened
    server.call("FLUSHALL")


def test_every_public_call_of_the_asynchronous_client_is_there() -> None:
    asynchronous = {
        name for name, _ in inspect.getmembers(Client, inspect.iscoroutinefunction) if not name.startswith("_")
    }
    assert {"put", "put_many", "list", "result", "dead_replay", "pause"} <= asynchronous
    assert asynchronous - {"open", "aclose"} <= set(vars(SyncClient))
    assert SyncClient.put.__doc__ == Client.put.__doc__
    for part, blocking in ((DeadLetters, SyncDeadLetters), (Schedules, SyncSchedules)):
        calls = {name for name, _ in inspect.getmembers(part, inspect.iscoroutinefunction) if not name.startswith("_")}
        assert calls - {"former", "rewrite"} <= set(vars(blocking))


def test_old_names_of_the_calls_on_dead_letters_work(client: SyncClient) -> None:
    flat = {name.removeprefix("dead_") for name in dir(Client) if name.startswith("dead_")}
    assert flat == {"list", "get", "replay", "replay_many", "drop", "drop_many", "export", "count"}
    for name in flat:
        assert getattr(Client, f"dead_{name}").__doc__ == getattr(DeadLetters, name).__doc__
    assert client.dead_list(limit=1) == client.dead.list(limit=1)
    assert client.dead_count(died_after=10**12) == client.dead.count(died_after=10**12) == 0
    assert client.dead_replay("a").outcome == client.dead.replay("a").outcome == "unknown"


def test_a_task_can_be_put_found_moved_counted_listed_and_cancelled(client: SyncClient) -> None:
    handle = client.put("log:", {"n": 1}, after="1h", id="a")
    assert handle.outcome == "created"
    assert client.get("a").payload == {"n": 1}
    assert client.reschedule("a", after="2h").due_ms > handle.due_ms
    assert client.put_many(Task("log:", n, after="1h") for n in range(10)).accepted == 10
    assert client.count().pending == 11
    assert [task.id for task in client.list(limit=100).tasks][-1] == "a"
    assert client.cancel("a") == "cancelled"
    client.put("log:", after="1h", id="b")
    assert client.cancel_many(["b", "c"]) == ["cancelled", "unknown"]
    assert client.count().pending == 10


async def test_every_handle_of_one_task_waits_for_its_result(server: Server) -> None:
    async with Client(server.url, namespace="sync", partitions=4) as client:
        await client.put("log:", id="moved", after="1h")
        moved = await client.reschedule("moved", after="2h")
        await client.schedules.add("job", cron="0 2 * * *", target="log:", lane="daily")
        triggered = await client.schedules.trigger("job", after="1h")
        assert await client.cancel_many([moved.id, triggered.id]) == ["cancelled", "cancelled"]
        for handle in (moved, triggered):
            with pytest.raises(MainspringError, match=r"cancelled|no task"):
                await handle.result(timeout="5s")
    server.call("FLUSHALL")


async def test_every_handle_cancels_its_own_task(server: Server) -> None:
    async with Client(server.url, namespace="sync", partitions=4) as client:
        here = await client.put("log:", id="same", after="1h")
        there = await client.put("log:", id="same", after="1h", lane="a")
        await client.schedules.add("job", cron="0 2 * * *", target="log:", lane="daily")
        triggered = await client.schedules.trigger("job", after="1h")
        assert await there.cancel() == "cancelled"
        assert (await client.get("same", lane="")).state == "pending"
        moved = await client.reschedule("same", after="2h", lane="")
        for handle in (await client.put("log:", after="1h"), triggered, moved, here):
            assert await handle.cancel() == "cancelled"
            assert await handle.cancel() == "cancelled"
        [many] = (await client.put_many([Task("log:", after="1h")], handles=True)).handles or []
        with pytest.raises(MainspringError, match=rf"no client; ask client.cancel\('{many.id}'\)"):
            many.cancel()
    server.call("FLUSHALL")


def test_handles_of_a_synchronous_client_cancel_without_an_event_loop(client: SyncClient) -> None:
    client.put("log:", id="moved", after="1h")
    client.schedules.add("job", cron="0 2 * * *", target="log:")
    triggered = client.schedules.trigger("job", after="1h")
    for handle in (client.put("log:", after="1h"), client.reschedule("moved", after="2h"), triggered):
        assert handle.cancel() == "cancelled"
    assert client.get("moved").state == "cancelled"
    with pytest.raises(TaskFailed, match="cancelled"):
        triggered.result(timeout="10s")


def test_handles_of_a_synchronous_client_wait_without_an_event_loop(client: SyncClient) -> None:
    client.put("log:", id="moved", after="1h")
    client.schedules.add("job", cron="0 2 * * *", target="log:")
    for handle in (client.reschedule("moved", after="2h"), client.schedules.trigger("job", after="1h")):
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.01)


def test_errors_reach_the_caller(client: SyncClient) -> None:
    with pytest.raises(InvalidInput, match="no known scheme"):
        client.put("nowhere")


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_an_iterable_that_ends_the_program_does_not_end_the_client(
    client: SyncClient, ending: type[BaseException]
) -> None:
    def tasks() -> Iterator[Task]:
        yield Task("log:", after="1h")
        raise ending

    with pytest.raises(ending):
        client.put_many(tasks())
    assert client.count().pending == 0


def test_threads_share_one_client(client: SyncClient) -> None:
    threads = [threading.Thread(target=lambda n=n: client.put("log:", n, after="1h", id=str(n))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.count().pending == 20


def test_a_callback_that_calls_the_client_raises_instead_of_waiting_for_ever(client: SyncClient) -> None:
    with pytest.raises(MainspringError, match="wait for itself"):
        client.put_many([Task("log:")], progress=lambda _: print(client.count()))  # noqa: T201


def test_a_closed_client_says_so_and_its_thread_is_gone(server: Server) -> None:
    before = set(threading.enumerate())  # other files may have left a client open
    client = SyncClient(server.url, namespace="sync", partitions=4)
    client.close()
    client.close()
    with pytest.raises(MainspringError, match="closed"):
        client.count()
    assert set(threading.enumerate()) <= before
    server.call("FLUSHALL")


def test_a_call_under_way_may_end_before_the_client_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainspring.client.sync.CLOSE_S", 60.0)
    client = SyncClient(server.url, namespace="sync", partitions=4)
    with ThreadPoolExecutor(2) as threads:
        server.pause()
        try:
            counting = threads.submit(client.count)
            wait_until(lambda: len(client._under_way) == 1, "the call is under way")
            closing = threads.submit(client.close)
            wait_until(lambda: client._closed, "it closes")
            assert not closing.done()
        finally:
            server.resume()
        assert counting.result(60).pending == 0
        closing.result(60)
    server.call("FLUSHALL")


def test_calls_that_wait_for_ever_end_with_an_error_before_the_connections_close(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise some of many callers would find their connection closed first, and say that."""
    monkeypatch.setattr("mainspring.client.sync.CLOSE_S", 0.01)
    client.put("queue:nobody/works", id="waits")
    with ThreadPoolExecutor(64) as threads:
        waiting = [threads.submit(client.result, "waits") for _ in range(64)]
        wait_until(lambda: len(client._under_way) == 64, "the calls are under way")
        client.close()
    for call in waiting:
        with pytest.raises(MainspringError, match="closed during this call"):
            call.result()


def test_a_callback_that_closes_the_client_raises(client: SyncClient) -> None:
    with pytest.raises(MainspringError, match="wait for itself"):
        client.put_many([Task("log:")], progress=lambda _: client.close())
    assert client.count().pending == 1


def test_a_server_that_is_not_there_is_an_error_at_once_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(Unavailable):
        SyncClient("redis://127.0.0.1:1")
    assert set(threading.enumerate()) <= before
