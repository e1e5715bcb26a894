"""Workers on real servers: what runs, how it ends, and who hears of it."""

import asyncio
import contextlib
import contextvars
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, tzinfo
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mainspring import Context, Dead, Retry, TaskFailed, current, idempotent
from mainspring.model.delivery import Failure
from mainspring.model.errors import InvalidInput, MainspringError, NotFound
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import Task
from mainspring.worker.handler import Handler
from mainspring.worker.worker import TURN_S
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.workers import Place, open_place, until

SOON = RetryPolicy(max_attempts=3, base_ms=1, cap_ms=1, jitter="none")


@pytest.fixture
async def place(fleet: Fleet, namespace: str) -> AsyncIterator[Place]:
    async with open_place(fleet.url, namespace, PARTITIONS) as made:
        yield made


async def test_coroutines_and_plain_functions_run_and_their_results_can_be_awaited(place: Place) -> None:
    main = threading.get_ident()

    async def double(n: int) -> int:
        assert threading.get_ident() == main
        return n * 2

    def in_thread(n: int) -> dict[str, Any]:
        return {"n": n, "elsewhere": threading.get_ident() != main}

    await place.worker(
        Handler(double, queue="math", result_ttl="1m"), Handler(in_thread, queue="math", result_ttl="1m")
    )
    first = await place.client.put("queue:math/double", {"n": 21})
    second = await place.client.put("queue:math/in_thread", {"n": 1}, id="named", lane="a lane")
    assert await first.result(timeout=60) == 42
    assert await second.result(timeout=60) == {"n": 1, "elsewhere": True}
    assert await place.client.result("named", timeout="60s") == {"n": 1, "elsewhere": True}
    kept = await place.client.run_result(first.id)
    assert (kept.ending, kept.attempt) == ("done", 1)
    assert 0 < kept.started_ms <= kept.ended_ms


async def test_a_task_that_keeps_no_result_says_so_and_one_that_waits_times_out(place: Place) -> None:
    async def quiet() -> None: ...

    later = await place.client.put("queue:q/quiet", after="1h")
    with pytest.raises(TimeoutError, match=r"is not over after 0\.05"):
        await later.result(timeout=0.05)
    assert await place.client.cancel(later.id) == "cancelled"
    with pytest.raises(TaskFailed, match="is cancelled"):
        await later.result(timeout=60)
    await place.worker(Handler(quiet, queue="q"))
    handle = await place.client.put("queue:q/quiet", id="quiet")
    with pytest.raises(MainspringError, match="left no result"):
        await handle.result(timeout=60)


@pytest.mark.parametrize("lane", [None, "user-7"])
async def test_a_caller_that_waits_for_a_task_with_an_own_id_learns_that_it_was_cancelled(
    place: Place, lane: str | None
) -> None:
    handle = await place.client.put("queue:mail/nobody", after="1h", id="order-42", lane=lane)
    waiting = asyncio.create_task(handle.result(timeout=60))
    assert await place.client.cancel("order-42", lane=lane) == "cancelled"
    with pytest.raises(TaskFailed, match="is cancelled: cancelled before it ran"):
        await waiting
    assert (await place.client.run_result("order-42")).ending == "cancelled"
    with pytest.raises(NotFound, match="there is no task"):
        await place.client.run_result("never-put")


async def test_wrong_arguments_never_reach_the_handler_and_leave_a_dead_letter_that_names_them(place: Place) -> None:
    called: list[int] = []

    async def sell(order: int) -> None:
        called.append(order)

    await place.worker(Handler(sell, queue="shop", retry=SOON))
    for number, payload in enumerate([{"order": "7"}, {}, {"order": 7, "more": 1}, "text", b"\x80\x04cos\nsystem\n."]):
        await place.client.put("queue:shop/sell", payload, id=f"wrong-{number}")
    await place.client.put("queue:shop/sell", {"order": 7}, id="right")
    await place.settled()
    assert called == [7]
    dead_letters = {one.id: one for one in (await place.client.dead_list()).letters}
    assert dead_letters["wrong-0"].reason == "argument order of handler 'shop/sell': Expected `int`, got `str`"
    assert "missing required field `order`" in dead_letters["wrong-1"].reason
    assert "unknown field `more`" in dead_letters["wrong-2"].reason
    assert "Expected `object`, got `str`" in dead_letters["wrong-3"].reason
    assert "'shop/sell'" in dead_letters["wrong-4"].reason  # a pickle is bytes like any other, and no msgpack map
    assert all(one.attempts == 1 for one in dead_letters.values())


async def test_a_failing_handler_is_tried_again_and_ends_as_a_dead_letter_with_every_error(place: Place) -> None:
    seen: list[tuple[int, str, tuple[str, ...]]] = []
    told: list[Failure] = []

    async def fail(ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.idempotency_key, ctx.errors))
        raise ValueError(f"no {ctx.attempt}")

    await place.worker(Handler(fail, queue="q", retry=SOON, result_ttl="1m"), error_handler=told.append)
    handle = await place.client.put("queue:q/fail", id="bad")
    with pytest.raises(TaskFailed, match="'bad' is dead: ValueError: no 3") as caught:
        await handle.result(timeout=60)
    assert caught.value.result.attempt == 3
    assert [attempt for attempt, _, _ in seen] == [1, 2, 3]
    assert {key for _, key, _ in seen} == {f"{place.store.keys.namespace}/bad/{handle.due_ms}"}
    assert seen[2][2] == ("ValueError: no 1", "ValueError: no 2")
    dead_letter = await place.client.dead_get("bad")
    assert dead_letter is not None
    assert dead_letter.errors == ("ValueError: no 1", "ValueError: no 2", "ValueError: no 3")
    await until(lambda: len(told) == 3)
    assert [one.outcome for one in told] == ["retry", "retry", "dead"]
    assert isinstance(told[0].exception, ValueError)


@pytest.mark.parametrize("lane", [None, "l"])
async def test_a_dead_letter_keeps_the_last_traceback_and_the_log_shows_it(
    place: Place, caplog: pytest.LogCaptureFixture, lane: str | None
) -> None:
    async def charge(ctx: Context) -> None:
        raise ValueError(f"card {ctx.attempt} refused")

    await place.worker(Handler(charge, queue="q", retry=SOON))
    await place.client.put("queue:q/charge", id="bad", lane=lane)
    dead_letter = None
    async with asyncio.timeout(60):
        while dead_letter is None:
            dead_letter = await place.client.dead_get("bad", lane=lane)
    assert dead_letter.traceback.startswith("Traceback (most recent call last):")
    assert "in charge" in dead_letter.traceback
    assert dead_letter.traceback.endswith("ValueError: card 3 refused")
    assert dead_letter.as_dict("main")["traceback"] == dead_letter.traceback
    task = "task bad to queue:q/charge" if lane is None else f"task bad of lane {lane} to queue:q/charge"
    for attempt in (1, 2):
        assert f"{task}: attempt {attempt} failed: ValueError: card {attempt} refused" in caplog.text
    assert f"{task} is dead after 3 attempts: ValueError: card 3 refused" in caplog.text
    assert caplog.text.count("Traceback (most recent call last)") == 1


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def test_invalid_texts_harm_neither_the_worker_nor_other_tasks(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "mainspring")  # who collects the tests' lines could not write them either

    async def strange(how: str) -> str:
        if how == "log":
            current().log("bad \udce9")
            return "done"
        raise ValueError("bad \udce9") if how == "error" else Unspeakable

    async def plain() -> int:
        return 1

    await place.worker(
        Handler(strange, queue="q", retry=SOON, result_ttl="1m"), Handler(plain, queue="q", result_ttl="1m")
    )
    for n in range(3):
        await place.client.put("queue:q/strange", {"how": ("log", "error", "unspeakable")[n]}, id=f"s{n}")
        await place.client.put("queue:q/plain", id=f"p{n}")
    assert [await place.client.result(f"p{n}", timeout=60) for n in range(3)] == [1, 1, 1]
    logged = await place.client.run_result("s0", timeout=60)
    assert (logged.ending, logged.log) == ("done", ("bad ?",))
    reasons = [(await place.client.run_result(f"s{n}", timeout=60)).reason for n in (1, 2)]
    assert "ValueError: bad ?" in reasons[0]
    assert "Unspeakable, whose message cannot be read" in reasons[1]


async def test_a_rule_by_exception_type_knows_a_timeout(place: Place) -> None:
    async def slow() -> None:
        await asyncio.sleep(60)

    policy = RetryPolicy.read({"retries": 5, "base": "1ms", "on": {"TimeoutError": "dead"}})
    await place.worker(Handler(slow, queue="q", timeout="50ms", retry=policy, result_ttl="1m"))
    await place.client.put("queue:q/slow", id="slow")
    result = await place.client.run_result("slow", timeout=60)
    assert (result.ending, result.attempt) == ("dead", 1)


async def test_a_new_task_of_an_id_does_not_answer_with_the_result_of_the_old_one(place: Place) -> None:
    async def echo(n: int) -> int:
        return n

    await place.worker(Handler(echo, queue="q", result_ttl="1m"))
    for n in (1, 2, 3):
        handle = await place.client.put("queue:q/echo", {"n": n}, id="same", on_conflict="replace", after="50ms")
        assert await handle.result(timeout=60) == n


async def test_retry_and_dead_can_be_raised_and_returned(place: Place) -> None:
    attempts: dict[str, int] = {}

    async def answer(how: str, ctx: Context) -> object:
        attempts[how] = ctx.attempt
        if ctx.attempt > 1:
            return "fine"
        match how:
            case "raise retry":
                raise Retry("busy", after="1ms")
            case "return retry":
                return Retry(after="1ms")
            case "raise dead":
                raise Dead("no such order")
            case _:
                return Dead("gone")

    await place.worker(Handler(answer, queue="q", retries=5, result_ttl="1m"))
    ways = ("raise retry", "return retry", "raise dead", "return dead")
    handles = {way: await place.client.put("queue:q/answer", {"how": way}) for way in ways}
    assert await handles["raise retry"].result(timeout=60) == "fine"
    assert await handles["return retry"].result(timeout=60) == "fine"
    with pytest.raises(TaskFailed, match="no such order"):
        await handles["raise dead"].result(timeout=60)
    with pytest.raises(TaskFailed, match="gone"):
        await handles["return dead"].result(timeout=60)
    assert attempts == {"raise retry": 2, "return retry": 2, "raise dead": 1, "return dead": 1}


class Reason(StrEnum):
    NO_STOCK = "nothing in stock"


class Busy(Retry):
    """Made in its own way, with a number that was worked out."""

    def __init__(self, after_ms: Any) -> None:
        self.after_ms = after_ms


class NoSuchOrder(Dead):
    def __init__(self, order: int) -> None:
        self.order = order


ODD: dict[str, tuple[Callable[[], Retry | Dead], str]] = {
    "a fraction": (lambda: Retry("busy", after_ms=0.4), "busy"),  # type: ignore[arg-type]
    "no number": (lambda: Retry("busy", after_ms=float("nan")), "after_ms is nan"),  # type: ignore[arg-type]
    "a text": (lambda: Retry("busy", after_ms="5"), "after_ms is '5'"),  # type: ignore[arg-type]
    "a past": (lambda: Retry("busy", after_ms=-(10**15)), "busy"),
    "an exception": (lambda: Dead(KeyError("order")), "KeyError: 'order'"),  # type: ignore[arg-type]
    "an enum": (lambda: Dead(Reason.NO_STOCK), "nothing in stock"),
    "bytes": (lambda: Dead(b"gone"), "b'gone'"),  # type: ignore[arg-type]
    "a subclass": (lambda: Busy(0.4), "another attempt was asked for"),
    "a subclass without a number": (lambda: Busy("soon"), "after_ms is 'soon'"),
    "a subclass without a reason": (lambda: NoSuchOrder(7), "NoSuchOrder"),
}


@pytest.mark.parametrize("raised", [False, True])
async def test_an_odd_outcome_ends_its_own_task_and_no_other(place: Place, raised: bool) -> None:
    async def on_loop(how: str) -> object:
        return in_thread(how)

    def in_thread(how: str) -> object:
        outcome = ODD[how][0]()
        if raised:
            raise outcome
        return outcome

    worker = await place.worker(
        *(Handler(one, queue="q", retry=RetryPolicy(max_attempts=2, base_ms=1, cap_ms=1), result_ttl="1m")
          for one in (on_loop, in_thread)),
    )  # fmt: skip
    for name in ("on_loop", "in_thread"):
        handles = {how: await place.client.put(f"queue:q/{name}", {"how": how}) for how in ODD}
        for how, handle in handles.items():
            with pytest.raises(TaskFailed, match=re.escape(ODD[how][1])):
                await handle.result(timeout=60)
    assert worker.healthy


async def test_a_tasks_own_policy_goes_before_the_handlers(place: Place) -> None:
    attempts: list[int] = []

    async def fail() -> None:
        attempts.append(current().attempt)
        raise RuntimeError("no")

    await place.worker(Handler(fail, queue="q", retries=9))
    await place.client.put("queue:q/fail", retry="2 base=1ms cap=1ms")
    await place.settled()
    assert attempts == [1, 2]


async def test_a_handlers_policy_may_be_a_line(place: Place) -> None:
    async def fail() -> None:
        raise ValueError

    await place.worker(Handler(fail, queue="q", retry="2 base=1ms cap=1ms"))
    handle = await place.client.put("queue:q/fail")
    await place.settled()
    dead_letter = await place.client.dead_get(handle.id)
    assert dead_letter is not None
    assert dead_letter.attempts == 2


@pytest.mark.parametrize("step", ["decide", "write"])
async def test_an_error_while_a_run_is_ended_fails_the_attempt(
    place: Place, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    async def fail() -> None:
        raise ValueError("from the handler")

    async def fine() -> int:
        return 1

    broken, well = Handler(fail, queue="q", retry="1"), Handler(fine, queue="q", result_ttl="1m")
    # Stand-ins for a bug of ours: a policy that is none breaks the decision, a text for a number breaks the write.
    if step == "decide":
        broken.retry = "1"  # type: ignore[assignment]
    else:
        broken.result_ttl_ms = "1"  # type: ignore[assignment]
    worker = await place.worker(broken, well)
    well_before = worker.healthy
    task = Task("queue:q/fail", None, id="odd", retry="1" if step == "write" else None)
    await place.client.put_many([task, *(Task("queue:q/fine", None, id=f"fine-{n}") for n in range(20))])
    await until(lambda: "odd: its run could not be ended" in caplog.text)
    for n in range(20):
        assert await place.client.result(f"fine-{n}", timeout=60) == 1
    assert worker.crashed is None
    assert (well_before, worker.healthy) == (True, False)
    async with asyncio.timeout(60):
        while (found := await place.client.get("odd")).attempt < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "the run could not be ended: " in found.errors[0]
    await place.client.cancel("odd")


async def test_an_exception_whose_own_code_fails_is_the_end_of_its_run_only(place: Place) -> None:
    class Odd(Dead):
        @property
        def response(self) -> None:
            raise RuntimeError("no response")

        @response.setter
        def response(self, value: object) -> None: ...

    async def fail() -> None:
        raise Odd("odd")

    await place.worker(Handler(fail, queue="q", retry="1"))
    await place.client.put("queue:q/fail", id="odd")
    await place.settled()
    dead_letter = await place.client.dead_get("odd")
    assert dead_letter is not None
    assert dead_letter.reason == "Odd, which cannot be read: RuntimeError: no response"


async def test_a_run_that_takes_too_long_is_cancelled_and_counts_as_failed(place: Place) -> None:
    cancelled = asyncio.Event()
    free = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def block(ctx: Context) -> str:
        while not ctx.cancelled:
            free.wait(0.01)
        return "an answer that nobody wants"

    options: Any = {"queue": "q", "timeout": "50ms", "retries": 0, "result_ttl": "1m"}
    worker = await place.worker(Handler(hang, **options), Handler(block, **options), concurrency=2)
    handles = [await place.client.put("queue:q/hang"), await place.client.put("queue:q/block")]
    for handle in handles:
        with pytest.raises(TaskFailed, match=r"timed out after 0\.05 s"):
            await handle.result(timeout=60)
    assert cancelled.is_set()
    await until(lambda: worker.executor.room >= 2)


async def test_a_tasks_own_timeout_goes_before_the_handlers(place: Place) -> None:
    async def hang() -> None:
        await asyncio.sleep(600)

    await place.worker(Handler(hang, queue="q", timeout="10m", retries=0, result_ttl="1m"))
    handle = await place.client.put("queue:q/hang", timeout="50ms", id="hang")
    with pytest.raises(TaskFailed, match=r"timed out after 0\.05 s"):
        await handle.result(timeout=60)
    dead_letter = await place.client.dead_get("hang")
    assert dead_letter is not None
    assert dead_letter.timeout_ms == 50


async def test_a_run_past_its_expiry_is_dead_and_not_tried_again(place: Place) -> None:
    async def hang() -> None:
        await asyncio.sleep(600)

    await place.worker(Handler(hang, queue="q", retries=9, result_ttl="1m"))
    handle = await place.client.put("queue:q/hang", expires="300ms")
    with pytest.raises(TaskFailed, match="expir"):
        await handle.result(timeout=60)


async def test_a_running_task_can_be_cancelled(place: Place) -> None:
    began, ended = asyncio.Event(), asyncio.Event()
    told = threading.Event()

    async def wait_for_ever() -> None:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    def wait_in_thread(ctx: Context) -> None:
        told.set()
        while not ctx.cancelled:
            pass
        told.clear()

    options: Any = {"queue": "q", "result_ttl": "1m"}
    await place.worker(Handler(wait_for_ever, **options), Handler(wait_in_thread, **options), lease_s=6.0)
    first = await place.client.put("queue:q/wait_for_ever", id="one")
    second = await place.client.put("queue:q/wait_in_thread", id="two")
    async with asyncio.timeout(60):
        await began.wait()
    await until(told.is_set)
    await place.client.cancel_many(["one", "two"])
    for handle in (first, second):
        with pytest.raises(TaskFailed, match="is cancelled: cancelled while it ran"):
            await handle.result(timeout=60)
    assert ended.is_set()
    await until(lambda: not told.is_set())
    await place.settled()
    assert (await place.client.dead_list()).letters == []


async def test_the_context_has_the_task_and_keeps_lines(place: Place) -> None:
    seen: dict[str, Any] = {}

    def work(ctx: Context) -> None:
        assert current() is ctx
        ctx.log("step %d", 1)
        ctx.log("100 % done")
        seen.update(id=ctx.id, key=ctx.idempotency_key, attempt=ctx.attempt, lane=ctx.lane, due=ctx.due)

    await place.worker(Handler(work, queue="q", result_ttl="1m"))
    handle = await place.client.put("queue:q/work", id="an id", lane="a lane")
    kept = await place.client.run_result(handle.id, lane="a lane", timeout=60)
    assert kept.log == ("step 1", "100 % done")
    assert seen["key"] == f"{place.store.keys.namespace}/a%20lane/an%20id/{handle.due_ms}"
    assert (seen["id"], seen["attempt"], seen["lane"]) == ("an id", 1, "a lane")
    assert round(seen["due"].timestamp() * 1000) == handle.due_ms
    with pytest.raises(MainspringError, match="no task is being run here"):
        current()


async def test_context_variables_of_a_handler_do_not_reach_the_next_job(place: Place) -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
    seen: list[str] = []

    async def look(name: str) -> None:
        seen.append(who.get())
        who.set(name)

    def look_in_thread(name: str) -> None:
        seen.append(who.get())
        who.set(name)

    await place.worker(Handler(look, queue="q"), Handler(look_in_thread, queue="q"), concurrency=1)
    ways = ("look", "look_in_thread")
    await place.client.put_many(Task(f"queue:q/{ways[i % 2]}", {"name": str(i)}) for i in range(20))
    await place.settled()
    assert seen == ["nobody"] * 20


async def test_many_jobs_run_at_once_and_never_more_than_allowed(place: Place) -> None:
    running, most = 0, 0
    gate = asyncio.Event()

    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 8:
            gate.set()
        await gate.wait()
        await asyncio.sleep(0)
        running -= 1

    worker = await place.worker(Handler(count, queue="q"), concurrency=8)
    await place.client.put_many(Task("queue:q/count", None) for _ in range(200))
    await place.settled()
    assert most == 8
    assert worker.executor.ended == 200


class Panic(BaseException):
    """As extensions written in other languages raise it."""


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Panic])
async def test_a_handler_that_ends_the_program_ends_its_task_only(place: Place, ending: type[BaseException]) -> None:
    async def leave() -> None:
        raise ending

    def leave_in_thread() -> None:
        raise ending

    options: Any = {"queue": "q", "retries": 0, "result_ttl": "1m"}
    worker = await place.worker(Handler(leave, **options), Handler(leave_in_thread, **options), concurrency=2)
    for name in ("leave", "leave_in_thread"):
        for _ in range(3):
            handle = await place.client.put(f"queue:q/{name}")
            with pytest.raises(TaskFailed, match=ending.__name__):
                await handle.result(timeout=60)
    assert worker.crashed is None
    assert not worker.executor.runs
    assert worker.executor.room >= 2


class Nowhere(tzinfo):
    """A zone whose offset cannot be asked for: whoever encodes a time in it runs this."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def utcoffset(self, _: datetime | None) -> NoReturn:
        raise self._error

    dst = tzname = utcoffset


@pytest.mark.parametrize("error", [ValueError, RuntimeError, SystemExit])
@pytest.mark.parametrize("once", [False, True])
async def test_a_return_value_that_cannot_be_stored_is_no_reason_to_fail_or_to_be_unwell(
    place: Place, error: type[BaseException], *, once: bool
) -> None:
    async def odd() -> datetime:
        return datetime(2030, 1, 1, tzinfo=Nowhere(error))

    work = idempotent(odd) if once else odd
    worker = await place.worker(Handler(work, queue="q", retries=0, result_ttl="1m"))
    handle = await place.client.put("queue:q/odd")
    found = await place.client.run_result(handle.id, timeout=20)
    assert found.ending == "done"
    assert once or found.reason.startswith("the handler's return value cannot be stored: ")
    assert (worker.crashed, worker.healthy, worker.executor.runs) == (None, True, set())


class LeavesInItsMessage(Exception):
    def __str__(self) -> str:
        raise SystemExit


class NoTraceback(Exception):
    @property
    def __traceback__(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("none of your business")


class NoAttributes(Exception):
    def __getattribute__(self, name: str) -> NoReturn:
        raise KeyboardInterrupt(name)


@pytest.mark.parametrize("kind", [LeavesInItsMessage, NoTraceback, NoAttributes])
async def test_an_exception_that_nobody_can_look_at_ends_its_task_only(place: Place, kind: type[Exception]) -> None:
    async def fail() -> None:
        raise kind

    def fail_in_thread() -> None:
        raise kind

    worker = await place.worker(*(Handler(work, queue="q", retries=0) for work in (fail, fail_in_thread)))
    for name in ("fail", "fail_in_thread"):
        handle = await place.client.put(f"queue:q/{name}")
        with pytest.raises(TaskFailed, match=kind.__name__):
            await handle.result(timeout=20)
    assert (worker.crashed, worker.healthy, worker.executor.runs) == (None, True, set())


async def test_a_coroutine_that_swallows_its_timeout_has_failed(place: Place) -> None:
    async def late() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        return "late"

    await place.worker(Handler(late, queue="q", timeout="50ms", retries=0, result_ttl="1m"))
    with pytest.raises(TaskFailed, match="timed out"):
        await (await place.client.put("queue:q/late")).result(timeout=60)


async def test_a_run_that_cancels_itself_and_returns_ends_no_other(place: Place) -> None:
    async def cancels_itself() -> None:
        me = asyncio.current_task()
        assert me is not None
        me.cancel()

    async def waits() -> str:
        await asyncio.sleep(0)
        return "done"

    tasks = [Task(f"queue:q/{name}", None) for name in ("cancels_itself", "waits", "cancels_itself", "waits")]
    handles = (await place.client.put_many(tasks, handles=True)).handles
    assert handles is not None
    await place.worker(*(Handler(one, queue="q", retries=0, result_ttl="1m") for one in (cancels_itself, waits)))
    answers = [await place.client.result(one.id, timeout=60) for one in handles]
    assert answers == [None, "done", None, "done"]


async def test_work_that_was_made_and_not_done_is_no_success(place: Place) -> None:
    async def later() -> None: ...

    def coroutine() -> Any:
        return later()

    def generator() -> Any:
        return (number for number in range(3))

    options: Any = {"queue": "q", "retries": 0, "result_ttl": "1m"}
    await place.worker(Handler(coroutine, **options), Handler(generator, **options))
    for name in ("coroutine", "generator"):
        with pytest.raises(TaskFailed, match=f"the handler returned a {name}, which is never run"):
            await (await place.client.put(f"queue:q/{name}")).result(timeout=60)


def test_a_generator_is_no_handler() -> None:
    def walk() -> Iterator[int]:
        yield 1

    async def walk_on_loop() -> AsyncIterator[int]:
        yield 1

    for function in (walk, walk_on_loop):
        with pytest.raises(InvalidInput, match="is a generator"):
            Handler(function, queue="q")


async def test_a_forked_child_that_comes_back_ends(place: Place, tmp_path: Path) -> None:
    pids = tmp_path / "pid"

    def fork() -> str:
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the child")
        pids.write_text(str(pid))
        return "in the parent"

    await place.worker(Handler(fork, queue="q", retries=0, result_ttl="1m"))
    handle = await place.client.put("queue:q/fork")
    assert await handle.result(timeout=60) == "in the parent"
    _, status = await asyncio.to_thread(os.waitpid, int(pids.read_text()), 0)
    assert os.waitstatus_to_exitcode(status) == 1


async def test_a_coroutine_that_blocks_the_loop_is_reported(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def block() -> None:
        time.sleep(1.2)  # noqa: ASYNC251  # what nobody should do

    await place.worker(Handler(block, queue="q"))
    await place.client.put("queue:q/block")
    await until(lambda: "the event loop was blocked" in caplog.text)
    await place.settled()


@pytest.mark.parametrize("lane", [None, "a lane"])
async def test_a_handler_that_a_worker_does_not_know_is_left_to_others_untried(
    place: Place, caplog: pytest.LogCaptureFixture, lane: str | None
) -> None:
    ran: list[tuple[int, tuple[str, ...]]] = []

    async def sent() -> None: ...

    async def send(ctx: Context) -> None:
        ran.append((ctx.attempt, ctx.job.body.errors))

    first = await place.worker(Handler(sent, queue="q"), retry=RetryPolicy(max_attempts=1))
    await place.client.put("queue:q/send", id="later", lane=lane)
    await until(lambda: "this worker does not know queue:q/send" in caplog.text)
    assert "did you mean queue:q/sent?" in caplog.text
    await first.stop()
    await place.worker(Handler(send, queue="q"))
    await place.settled()
    assert ran == [(1, ())]
    assert first.finisher.meters.counts["failed"]["queue"] == 0


async def test_an_answer_that_cannot_be_kept_does_not_fail_the_task(place: Place) -> None:
    ran: list[int] = []

    async def odd() -> object:
        ran.append(1)
        return object()

    async def large() -> str:
        return "x" * 10**6

    await place.worker(Handler(odd, queue="q", result_ttl="1m"), Handler(large, queue="q", result_ttl="1m"))
    handle = await place.client.put("queue:q/odd")
    with pytest.raises(MainspringError, match="is done, but the handler's return value cannot be stored"):
        await handle.result(timeout=60)
    with pytest.raises(MainspringError, match="too large to store"):
        await (await place.client.put("queue:q/large")).result(timeout=60)
    assert ran == [1]


async def test_the_tasks_of_a_lane_run_one_after_the_other_in_due_order(place: Place) -> None:
    seen: list[int] = []
    running = 0

    async def step(n: int) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        seen.append(n)
        running -= 1

    now_ms = place.store.clock.now_ms()
    await place.client.put_many(
        Task("queue:q/step", {"n": n}, at=now_ms + 200 + n, lane="one") for n in reversed(range(30))
    )
    await place.worker(Handler(step, queue="q"))
    await place.settled()
    assert seen == list(range(30))


async def test_a_worker_that_took_a_task_lets_others_answer_the_next_messages(place: Place) -> None:
    async def send() -> None: ...

    worker = await place.idle_worker([Handler(send, queue="mail")])
    taker = worker.taker
    assert [taker.turn_s(3) for _ in range(2)] == [0.0, 0.0]
    await place.client.put("queue:mail/send")
    async with asyncio.timeout(60):
        while not taker.turn_s(3):
            taker.ready.add_all()
            await taker.step()
    assert [taker.turn_s(3) for _ in range(2)] == [TURN_S, 0.0]
    assert taker.turn_s(1) == 0.0, "nobody else heard the call"
    await worker.stop()


async def test_a_message_to_workers_names_the_queues_that_have_jobs(place: Place) -> None:
    async def send() -> None: ...

    heard: asyncio.Queue[bytes] = asyncio.Queue()
    subscription = await place.store.servers.all()[0].subscribe(
        [keys.work for keys in place.store.keys.partitions],
        on_message=lambda _, message: heard.put_nowait(message),
        on_connect=lambda: None,
    )
    worker = await place.idle_worker([Handler(send, queue="mail")], queues={"mail": 1, "reports": 1})
    worker.taker.ready.add_all()
    await worker.taker.step()
    assert worker.taker.ready.queues == []
    async with asyncio.timeout(60):
        while heard.empty():  # a message that comes before the subscription is lost
            await place.client.put("queue:mail/send")
            await asyncio.sleep(0.05)
        message = await heard.get()
    assert message.split()[1:] == [b"mail"]
    worker.heard(0, message)
    assert worker.taker.ready.queues == ["mail"]
    await worker.stop()
    await subscription.close()


async def test_a_trickle_of_tasks_spreads_over_idle_workers(place: Place) -> None:
    ran: Counter[str] = Counter()

    def handler(worker: str) -> Handler:
        async def send() -> None:
            ran[worker] += 1
            await asyncio.sleep(0.003)

        return Handler(send, queue="mail")

    for worker in ("a", "b", "c"):
        await place.worker(handler(worker), name=worker)
    first_ms = place.store.clock.now_ms() + 500
    for number in range(200):
        await place.client.put("queue:mail/send", at=first_ms + number * 20)
    await until(lambda: ran.total() == 200)
    assert max(ran.values()) <= 100, ran
