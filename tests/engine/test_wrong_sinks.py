"""Sinks that break their promises: only their own tasks fail and are tried again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.model.delivery import DONE, Delivery, Outcome, Retry
from mainspring.model.limits import HORIZON_MS
from mainspring.model.retry import RetryPolicy
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]
POLICY = EngineOptions(retry=RetryPolicy(3, base_ms=1_000, jitter="none"))


class Wrong:
    """Does something wrong once, and its work from then on."""

    def __init__(self, wrong: Callable[[], Any]) -> None:
        self._wrong = wrong
        self.calls = 0

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.calls += 1
        if self.calls > 1:
            return [DONE] * len(batch)
        wrong: Sequence[Outcome] = self._wrong()
        return wrong

    async def aclose(self) -> None: ...


class Plain(Wrong):
    """Its `deliver` is no coroutine: called, it has done all it will do."""

    def deliver(self, batch: Sequence[Delivery]) -> Any:
        self.calls += 1
        return self._wrong()


class KeepsAnswers(Wrong):
    keeps_answers = True


def cancelled() -> Any:
    raise asyncio.CancelledError


def generated() -> Any:
    return (DONE for _ in range(1))


async def put_and_turn(ticker: Ticker) -> str:
    """One task to the sink, one to another, both due."""
    handle = await ticker.client.put("kafka:a", after="1s")
    await ticker.client.put("log:", after="1s")
    ticker.clock.advance(seconds=2)
    await ticker.turn()
    return handle.id


@pytest.mark.parametrize("kind", [Wrong, KeepsAnswers])
@pytest.mark.parametrize("wrong", [lambda: None, generated, cancelled, lambda: 7, lambda: [object()]])
async def test_a_wrong_answer_of_a_sink_is_a_failed_delivery(
    tickers: Tickers, store: Store, kind: type[Wrong], wrong: Callable[[], Any]
) -> None:
    sink = kind(wrong)
    ticker = await tickers(sinks={"kafka": sink}, options=POLICY)
    wanted = await put_and_turn(ticker)
    task = await ticker.client.get(wanted)
    assert (task.state, task.attempt) == ("pending", 2)
    assert (await balance(store)).done == 1, "that of another sink is not touched"
    ticker.clock.advance(seconds=5)
    await ticker.turn()
    assert (await balance(store)).done == 2
    assert (sink.calls, ticker.engine.deliveries.in_flight) == (2, 0)


@pytest.mark.parametrize("given", [None, [DONE]])
async def test_a_deliver_that_is_no_coroutine_fails_its_tasks_only(tickers: Tickers, store: Store, given: Any) -> None:
    ticker = await tickers(sinks={"kafka": Plain(lambda: given)}, options=POLICY)
    wanted = await put_and_turn(ticker)
    task = await ticker.client.get(wanted)
    assert (task.state, task.attempt) == ("pending", 2)
    assert task.errors[0].startswith("TypeError")
    assert (await balance(store)).done == 1


@pytest.mark.parametrize("untried", [False, True])
@pytest.mark.parametrize("after_ms", [10**30, float("inf")])
async def test_a_time_beyond_all_calendars_is_cut_to_the_horizon(
    tickers: Tickers, store: Store, after_ms: Any, untried: bool
) -> None:
    ticker = await tickers(sinks={"kafka": Wrong(lambda: [Retry("x", after_ms, untried)])}, options=POLICY)
    wanted = await put_and_turn(ticker)
    task = await ticker.client.get(wanted)
    assert (task.state, task.due_ms) == ("pending", ticker.clock.now_ms() + HORIZON_MS)


async def test_a_time_that_is_no_number_ends_that_task(tickers: Tickers, store: Store) -> None:
    timeless = Retry("x")
    timeless.after_ms = float("-inf")  # type: ignore[assignment]
    ticker = await tickers(sinks={"kafka": Wrong(lambda: [timeless])}, options=POLICY)
    wanted = await put_and_turn(ticker)
    assert (await ticker.client.get(wanted)).state == "dead"


async def test_a_delivery_given_up_at_a_stop_is_no_failed_delivery(tickers: Tickers, store: Store) -> None:
    begun = asyncio.Event()

    class Slow:
        async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
            begun.set()
            await asyncio.Event().wait()
            return []

        async def aclose(self) -> None: ...

    ticker = await tickers(sinks={"kafka": Slow()}, options=POLICY)
    handle = await ticker.client.put("kafka:a", after="1s")
    ticker.clock.advance(seconds=2)
    turning = asyncio.ensure_future(ticker.turn())
    await begun.wait()
    deliveries = ticker.engine.deliveries
    deliveries.cancel()
    await turning
    assert (deliveries.in_flight, (await ticker.client.get(handle.id)).attempt) == (0, 1)
    assert (await ticker.client.get(handle.id)).state == "fired"
