"""`Scheduler`: handlers declared in a module, their tasks put from programs with and without an event loop."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mainspring import Config, Context, Handle, InvalidInput, MainspringError, Scheduler, Task, TaskFailed
from mainspring.testing.servers import Server, standalone
from tests.support.workers import Place, open_place


@pytest.fixture
def server() -> Iterator[Server]:
    with standalone() as made:
        yield made


@pytest.fixture
async def place(server: Server) -> AsyncIterator[Place]:
    async with open_place(server.url, "app", 4) as made:
        yield made


@pytest.fixture
async def scheduler(server: Server) -> AsyncIterator[Scheduler]:
    made = Scheduler(Config(redis_url=server.url, namespace="app"))
    yield made
    await made.aclose()


async def test_a_handler_is_put_for_later_and_its_result_awaited(place: Place, scheduler: Scheduler) -> None:
    @scheduler.handler(queue="mail", retries=5, timeout="30s", result_ttl="1m")
    async def expire_order(order_id: int, note: str = "late") -> str:
        return f"{order_id} is {note}"

    assert await expire_order(1, "called") == "1 is called"
    await place.worker(*scheduler.registry)
    handle = await expire_order.after("50ms", id="order-42").aput(order_id=42)
    again = await expire_order.after("50ms", id="order-42").aput(order_id=42)
    assert (handle.id, handle.outcome, again.outcome) == ("order-42", "created", "kept")
    assert await handle.result(timeout=60) == "42 is late"
    at = await expire_order.at(place.store.clock.now_ms() + 50, lane="a").aput(7, note="due")
    assert await at.result(timeout="60s") == "7 is due"
    assert (await place.client.get(handle.id)).target == "queue:mail/expire_order"


async def test_an_order_may_have_retries_and_a_timeout_of_its_own(place: Place, scheduler: Scheduler) -> None:
    attempts: list[int] = []

    @scheduler.handler(queue="mail", retries=9, timeout="10m", result_ttl="1m")
    async def hang(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        await asyncio.sleep(600)

    await place.worker(*scheduler.registry)
    handle = await hang.now(retry="2 base=1ms cap=1ms", timeout="50ms").aput()
    with pytest.raises(TaskFailed, match=r"timed out after 0\.05 s"):
        await handle.result(timeout=60)
    assert attempts == [1, 2]


async def test_programs_without_an_event_loop_put_and_wait_too(place: Place, scheduler: Scheduler) -> None:
    @scheduler.handler(queue="math", result_ttl="1m")
    def double(ctx: Context, n: int) -> int:
        assert ctx.attempt == 1
        return n * 2

    await place.worker(*scheduler.registry)

    def program() -> list[int]:
        handles = [double.now().put(n) for n in range(5)]
        return [handle.result(timeout=60) for handle in handles]

    assert await asyncio.to_thread(program) == [0, 2, 4, 6, 8]
    assert threading.active_count() < 80


async def test_msgpack_carries_bytes(place: Place, scheduler: Scheduler) -> None:
    @scheduler.handler(queue="files", codec="msgpack", result_ttl="1m")
    async def size(data: bytes) -> int:
        return len(data)

    await place.worker(*scheduler.registry)
    assert await (await size.now().aput(data=b"\x00\xff" * 10)).result(timeout=60) == 20


async def test_a_wrong_call_is_refused_where_it_is_made(scheduler: Scheduler) -> None:
    @scheduler.handler(queue="mail")
    async def send(to: str) -> None: ...

    with pytest.raises(InvalidInput, match="missing a required argument: 'to'"):
        await send.now().aput()  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="argument to of handler 'mail/send': Expected `str`, got `int`"):
        await send.now().aput(to=5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'idd'"):
        send.now(idd="typo")  # type: ignore[call-arg]


def test_declarations_that_cannot_work_are_refused() -> None:
    scheduler = Scheduler()

    def declare(**options: Any) -> None:
        @scheduler.handler(**options)
        async def work() -> None: ...

    declare(queue="q")
    for options, said in (
        ({"queue": "q"}, "queue:q/work is registered twice"),
        ({"queue": "no spaces"}, "queue 'no spaces'"),
        ({"queue": "q", "name": "a/b"}, "the name of a handler is 'a/b'"),
        ({"queue": "q", "name": "b", "retries": -1}, "retries is -1"),
        ({"queue": "q", "name": "b", "retry": "5 times"}, "retry '5 times': 'times' is not name=value"),
        ({"queue": "q", "name": "b", "retry": 5}, "retry is of type int; give a RetryPolicy or a line such as"),
        ({"queue": "q", "name": "b", "timeout": "0s"}, "timeout is '0s'"),
        ({"queue": "q", "name": "b", "timeout": "soon"}, "timeout: 'soon' is not a delay"),
        ({"queue": "q", "name": "b", "codec": "pickle"}, "codec is 'pickle'; use one of json, msgpack"),
    ):
        with pytest.raises(InvalidInput, match=said):
            declare(**options)
    with pytest.raises(InvalidInput, match="expected a list of strings"):
        scheduler.command("sh", "ls -l")
    assert [work.target for work in scheduler.registry] == ["queue:q/work"]


async def test_a_command_declared_in_code_runs(place: Place, scheduler: Scheduler) -> None:
    scheduler.command("hello", ["/bin/echo", "hello"], timeout="10s")
    await place.worker(*scheduler.registry)
    handle = await place.client.put("command:hello")
    assert (await handle.result(timeout=60)).stdout == b"hello\n"


def test_settings_of_the_process_go_before_those_in_code(server: Server) -> None:
    scheduler = Scheduler(Config(redis_url="redis://elsewhere", namespace="code", worker_concurrency=5))
    scheduler.configure(Config.load({"redis_url": server.url}, {"MAINSPRING_COMMANDS": '{"x": {"argv": ["true"]}}'}))
    assert scheduler.config.redis_url == server.url
    assert (scheduler.config.namespace, scheduler.config.worker_concurrency) == ("code", 5)
    assert "x" in scheduler.commands


def test_a_time_in_seconds_is_refused_where_it_is_declared() -> None:
    scheduler = Scheduler()
    with pytest.raises(InvalidInput, match="at is 1893488400, which looks like seconds"):
        scheduler.once(1_893_488_400, "log:", name="new-year")
    with pytest.raises(InvalidInput, match="start is 1893488400, which looks like seconds"):
        scheduler.every("1d", "log:", name="daily", start=1_893_488_400)


async def test_a_handler_may_be_declared_without_parentheses(place: Place, scheduler: Scheduler) -> None:
    @scheduler.handler
    async def double(n: int) -> int:
        return n * 2

    assert double.handler.target == "queue:default/double"
    assert await double(4) == 8
    with pytest.raises(InvalidInput, match=r"settings go by name, such as handler\(queue='mail'\)"):
        scheduler.handler("mail")  # type: ignore[call-overload]


async def test_retries_count_alike_wherever_they_are_given(place: Place, scheduler: Scheduler) -> None:
    """`retries=2` is two further attempts of a handler, an order, a task and a schedule, beside `retry` too."""

    @scheduler.handler(queue="mail", retries=2)
    async def send(to: str) -> None: ...

    assert send.handler.retry is not None
    assert send.handler.retry.max_attempts == 3
    by_order = await send.after("1h", retries=2).aput(to="a")
    by_put = await place.client.put("log:", after="1h", retries=2, retry="9 base=2s")
    [by_task] = (await place.client.put_many([Task("log:", after="1h", retries=2)], handles=True)).handles or []
    assert (await place.client.get(by_order.id)).retry == "3"
    assert (await place.client.get(by_put.id)).retry == "3 base=2s"
    assert (await place.client.get(by_task.id)).retry == "3"
    declared = scheduler.register("daily", send, cron="@daily", args=["a"], retries=2)
    added = await place.client.schedules.add("daily", cron="@daily", target="log:", retries=2, retry="9 base=2s")
    edited = await place.client.schedules.edit("daily", retries=0)
    assert (declared.retry, added.definition.retry, edited.definition.retry) == ("3", "3 base=2s", "1 base=2s")
    with pytest.raises(InvalidInput, match="retries is -1; give 0 or a larger whole number"):
        await place.client.put("log:", retries=-1)


def test_a_schedule_that_calls_a_webhook_says_at_once_what_has_to_be_installed(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["aiohttp"] = None  # as if it were not installed
from mainspring import Config, Scheduler
scheduler = Scheduler(Config(targets={"hook": {"address": "https://example.com"}}))
scheduler.every("1h", "https://example.com/poll", name="poll")
scheduler.every("1h", "target:hook", name="named")
scheduler.every("1h", "log:", name="other")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    needs = "webhooks need the package aiohttp on this node: pip install 'mainspring[http]'"
    assert done.stderr.splitlines() == [
        f"schedule 'poll' of https://example.com/poll: {needs}",
        f"schedule 'named' of target:hook: {needs}",
    ]


async def test_a_handle_knows_the_key_that_its_attempts_carry(place: Place, scheduler: Scheduler) -> None:
    keys: list[str] = []

    @scheduler.handler(queue="mail", result_ttl="1m")
    async def send(ctx: Context) -> None:
        keys.append(ctx.idempotency_key)
        if ctx.attempt == 1:
            raise RuntimeError

    await place.worker(*scheduler.registry)
    handles = [
        await send.now(id="order 42", retry="2 base=1ms").aput(),
        await send.now(id="order 42", lane="a/b", retry="2 base=1ms").aput(),
        await send.now(retry="2 base=1ms").aput(),
    ]
    for handle in handles:
        await handle.result(timeout=60)
    assert sorted(keys) == sorted([handle.idempotency_key for handle in handles] * 2)
    first = await send.after("1h", id="kept").aput()
    kept = await send.after("2h", id="kept").aput()
    assert (kept.outcome, kept.idempotency_key) == ("kept", first.idempotency_key)
    with pytest.raises(MainspringError, match="belongs to no client"):
        _ = Handle("a", 1).idempotency_key


async def test_get_shows_the_last_error_while_a_task_waits_for_its_retry(place: Place, scheduler: Scheduler) -> None:
    @scheduler.handler(queue="mail")
    async def send() -> None:
        raise RuntimeError("the mail server is away")

    await place.worker(*scheduler.registry)
    handle = await send.now(id="order-42", retry="3 base=4m").aput()
    found = await place.client.get(handle.id)
    async with asyncio.timeout(60):
        while found.attempt == 1:
            found = await place.client.get(handle.id)
    assert (found.state, found.attempt) == ("pending", 2)
    assert found.last_error is not None
    assert "RuntimeError: the mail server is away" in found.last_error
