"""`@idempotent`: what it promises on real servers, and what it says where it cannot know."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mainspring import Context, Retry, TaskFailed, current, idempotent
from mainspring.model.clock import steady_s
from mainspring.model.errors import InvalidInput
from mainspring.store import job_queue
from mainspring.testing.faults import bad_road
from mainspring.worker.context import Memory
from mainspring.worker.handler import Handler
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.workers import Place, open_place, until


@pytest.fixture
async def place(fleet: Fleet, namespace: str) -> AsyncIterator[Place]:
    async with open_place(fleet.url, namespace, PARTITIONS) as made:
        yield made


async def delivered_again(place: Place, handler: Handler) -> Any:
    """Run a task and lose the word of its end, as a worker does that dies right after; then run it once more."""
    first = await place.idle_worker([handler])
    handle = await place.client.put(handler.target)
    asks = {partition: {handler.queue: 1} for partition in range(PARTITIONS)}
    async with asyncio.timeout(60):
        while not (jobs := await job_queue.take(place.store, first.options.name, asks)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    first.executor.add(jobs, steady_s())
    await until(lambda: not first.executor.runs)
    first.finisher.unsent.clear()
    await place.worker(handler, lease_s=0.5)
    return await handle.result(timeout=60)


async def test_a_coroutine_that_has_run_is_not_run_again_and_keeps_its_answer(place: Place) -> None:
    calls: list[str] = []

    @idempotent
    async def charge(ctx: Context) -> dict[str, int]:
        calls.append(ctx.idempotency_key)
        return {"paid": len(calls)}

    assert await delivered_again(place, Handler(charge, queue="q", result_ttl="1m")) == {"paid": 1}
    assert len(calls) == 1


async def test_a_plain_function_that_has_run_is_not_run_again(place: Place) -> None:
    calls: list[str] = []

    @idempotent(keep="1h")
    def charge() -> int:
        calls.append(current().idempotency_key)
        return len(calls)

    assert await delivered_again(place, Handler(charge, queue="q", result_ttl="1m")) == 1
    assert len(calls) == 1


@pytest.mark.parametrize("how", ["raise", "return"])
async def test_a_run_that_failed_is_run_again(place: Place, how: str) -> None:
    calls: list[int] = []

    @idempotent()
    async def charge(ctx: Context) -> Any:
        calls.append(ctx.attempt)
        if len(calls) == 1 and how == "raise":
            raise Retry("the bank is away", after="1ms")
        return Retry(after="1ms") if len(calls) == 1 else "paid"

    await place.worker(Handler(charge, queue="q", result_ttl="1m"))
    handle = await place.client.put("queue:q/charge")
    assert await handle.result(timeout=60) == "paid"
    assert calls == [1, 2]


@pytest.mark.parametrize("plain", [False, True])
async def test_a_run_whose_record_the_server_did_not_take_is_not_repeated(place: Place, plain: bool) -> None:
    calls: list[int] = []

    @idempotent
    async def charge(ctx: Context) -> str:
        calls.append(ctx.attempt)
        return "paid"

    @idempotent
    def charge_in_thread(ctx: Context) -> str:
        calls.append(ctx.attempt)
        return "paid"

    function = charge_in_thread if plain else charge
    worker = await place.worker(Handler(function, name="charge", queue="q", result_ttl="1m", retries=3))
    with bad_road(worker.store) as road:
        road.next("never sent", only=lambda commands: any(one[0] == "SET" and "NX" not in one for one in commands))
        handle = await place.client.put("queue:q/charge")
        assert await handle.result(timeout=60) == "paid"
    assert calls == [1]


async def begun_and_never_ended(place: Place, handler: Handler) -> Any:
    """A record that a process left which died in the middle of the handler."""
    handle = await place.client.put(handler.target)
    asks = {partition: {handler.queue: 1} for partition in range(PARTITIONS)}
    async with asyncio.timeout(60):
        while not (jobs := await job_queue.take(place.store, "dead", asks)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await Memory(place.store).begin(jobs[0], 60_000) is None
    await place.worker(handler, lease_s=0.5)
    return handle


async def test_a_run_that_began_and_never_ended_runs_again(place: Place) -> None:
    @idempotent()
    async def charge() -> str:
        return "again"

    handle = await begun_and_never_ended(place, Handler(charge, queue="q", result_ttl="1m"))
    assert await handle.result(timeout=60) == "again"
    kept = await place.client.run_result(handle.id)
    assert kept.log == ("attempt 1 began and never ended; running again",)


async def test_a_run_that_began_and_never_ended_can_be_left_to_a_person(place: Place) -> None:
    @idempotent(unsure="dead")
    async def charge() -> str:
        raise AssertionError("must not run")

    handle = await begun_and_never_ended(place, Handler(charge, queue="q", result_ttl="1m"))
    with pytest.raises(TaskFailed, match="attempt 1 began and never ended; how far it came is unknown"):
        await handle.result(timeout=60)


async def test_a_run_that_was_taken_over_and_fails_takes_back_nothing_of_the_other(place: Place) -> None:
    calls: list[int] = []
    goes_on = asyncio.Event()

    @idempotent()
    async def charge() -> str:
        calls.append(1)
        if len(calls) == 1:
            await goes_on.wait()
            raise ConnectionError("found out too late")
        return "paid"

    handler = Handler(charge, queue="q", result_ttl="1m")
    silent = await place.idle_worker([handler])
    handle = await place.client.put(handler.target)
    asks = {partition: {handler.queue: 1} for partition in range(PARTITIONS)}
    async with asyncio.timeout(60):
        while not (jobs := await job_queue.take(place.store, silent.options.name, asks)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    silent.executor.add(jobs, steady_s())
    await until(lambda: len(calls) == 1)
    await place.worker(handler, lease_s=0.5)
    assert await handle.result(timeout=60) == "paid"
    goes_on.set()
    await until(lambda: not silent.executor.runs)
    silent.finisher.unsent.clear()
    record = await Memory(place.store).begin(jobs[0], 60_000)
    assert record is not None
    assert (record.done, record.value) == (True, "paid")


async def test_two_tasks_are_two_runs_and_an_odd_answer_is_no_failure(place: Place) -> None:
    calls: list[int] = []

    @idempotent()
    async def charge(n: int) -> object:
        calls.append(n)
        return object()

    await place.worker(Handler(charge, queue="q"))
    for n in range(3):
        await place.client.put("queue:q/charge", {"n": n})
    await place.settled()
    assert sorted(calls) == [0, 1, 2]


async def test_outside_of_a_worker_it_is_a_plain_call() -> None:
    @idempotent()
    async def double(n: int) -> int:
        return n * 2

    @idempotent()
    def half(n: int) -> float:
        return n / 2

    assert await double(21) == 42
    assert half(21) == 10.5
    with pytest.raises(InvalidInput, match="keep must be longer than zero"):
        idempotent(keep="0s")
