"""`Scheduler`: handlers declared in a module, their tasks put from programs with and without an event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mainspring import Config, Context, Scheduler
from mainspring.model.errors import InvalidInput, TaskFailed
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
    def double(n: int, ctx: Context) -> int:
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
        await send.now().aput()
    with pytest.raises(InvalidInput, match="argument to of handler 'mail/send': Expected `str`, got `int`"):
        await send.now().aput(to=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'idd'"):
        send.now(idd="typo")


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
        ({"queue": "q", "name": "b", "retry": "5 times"}, "retry '5 times': 'times' is no name=value"),
        ({"queue": "q", "name": "b", "retry": 5}, "retry is a int; give a RetryPolicy or a line such as"),
        ({"queue": "q", "name": "b", "timeout": "0s"}, "timeout is '0s'"),
        ({"queue": "q", "name": "b", "timeout": "soon"}, "timeout: 'soon' is not a delay"),
        ({"queue": "q", "name": "b", "codec": "pickle"}, "codec is 'pickle'; use one of json, msgpack"),
    ):
        with pytest.raises(InvalidInput, match=said):
            declare(**options)
    with pytest.raises(InvalidInput, match="expected a list of texts"):
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
