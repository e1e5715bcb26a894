"""Requests that wait for a slow host are looked at again before they are sent."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.testing.ticker import Ticker
from tests.support.web_receiver import Answer, Receiver, Request, receiving

Tickers = Callable[..., Awaitable[Ticker]]


class SlowHost:
    """A host with one connection, on which the first request is answered when the test says so."""

    def __init__(self, ticker: Ticker, receiver: Receiver, arrived: asyncio.Event, release: threading.Event) -> None:
        self.ticker, self.engine = ticker, ticker.engine
        self.receiver, self._arrived, self._release = receiver, arrived, release

    @property
    def bodies(self) -> list[bytes]:
        return [request.body for request in self.receiver.requests]

    async def fire(self) -> None:
        """Begin what is due, until the host has the first of it and the rest waits."""
        await self.engine.keeper.step()
        while await self.engine.lookahead.step() == 0.0:
            pass
        for arrived in (1, 2):
            self.ticker.clock.advance(seconds=1)
            while self.engine.deliveries.in_flight < arrived:
                await self.engine.dispatcher.step()
            await self._arrived.wait()

    async def answer(self) -> None:
        self._release.set()
        await asyncio.wait(self.engine.deliveries.running)


@asynccontextmanager
async def slow_host(tickers: Tickers, *, expires: bool = False) -> AsyncIterator[SlowHost]:
    sink = HttpSink(HttpOptions(allow=("127.0.0.0/8",), concurrency=1))
    ticker = await tickers(sinks={"http": sink}, options=EngineOptions(lease_s=300.0))
    loop, arrived, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def answer(_: Request) -> Answer:
        loop.call_soon_threadsafe(arrived.set)
        release.wait(60)
        return Answer()

    with receiving(answer) as receiver:
        host = SlowHost(ticker, receiver, arrived, release)
        await ticker.client.put(receiver.url, "first", after="1s")
        await ticker.client.put(receiver.url, "second", after="2s", expires="3s" if expires else None)
        try:
            yield host
        finally:
            release.set()
            await sink.aclose()


async def test_a_task_that_expires_while_it_waits_for_its_host_is_not_sent(tickers: Tickers) -> None:
    async with slow_host(tickers, expires=True) as host:
        await host.fire()
        host.ticker.clock.advance(seconds=10)
        await host.answer()
        await host.ticker.turn()
        assert host.bodies == [b'"first"']
        assert host.engine.deliveries.meters.expired["http"] == 1
        assert host.engine.deliveries.meters.delivered["http"] == 1


async def test_the_wait_for_a_host_is_no_part_of_the_run_that_is_recorded(tickers: Tickers) -> None:
    async with slow_host(tickers) as host:
        await host.ticker.client.put(host.receiver.url, "third", after="2s")
        await host.fire()
        host.ticker.clock.advance(seconds=600)
        await host.answer()
        await host.ticker.turn()
        assert sorted(host.bodies) == [b'"first"', b'"second"', b'"third"']
        third, second, first = sorted(
            (run.record for run in (await host.ticker.client.runs()).runs), key=lambda one: one.due_ms, reverse=True
        )
        assert first.began_ms < first.due_ms + 60_000
        for one in (second, third):
            assert one.due_ms + 590_000 < one.began_ms <= one.ended_ms < one.began_ms + 60_000


async def test_a_task_that_is_paused_while_it_waits_for_its_host_is_sent_after_the_pause(tickers: Tickers) -> None:
    async with slow_host(tickers) as host:
        await host.fire()
        await host.ticker.client.pause(reason="upkeep")
        await host.engine.pauses.step()
        await host.answer()
        await host.ticker.advance(ms=1500)
        assert host.bodies == [b'"first"']
        await host.ticker.client.resume()
        await host.ticker.turn()
        assert host.bodies == [b'"first"', b'"second"']
        assert host.engine.deliveries.meters.retried["http"] == 0


async def test_a_request_that_waits_for_its_host_is_never_sent_after_a_cancel_that_was_answered_cancelled(
    tickers: Tickers,
) -> None:
    async with slow_host(tickers) as host:
        client = host.ticker.client
        third = await client.put(host.receiver.url, "third", after="2s")
        fourth = await client.put(host.receiver.url, "fourth", after="2s")
        await host.fire()
        assert await client.cancel(third.id) == "too late"
        await client.pause(reason="upkeep")
        await host.engine.pauses.step()
        await host.answer()
        await host.ticker.advance(ms=1500)
        assert await client.cancel_many([third.id, fourth.id]) == ["cancelled"] * 2, "they wait like any others"
        await client.resume()
        await host.ticker.turn()
        assert host.bodies == [b'"first"', b'"second"']


async def test_a_request_that_waits_for_its_host_is_not_sent_by_a_former_owner(tickers: Tickers) -> None:
    async with slow_host(tickers) as host:
        await host.fire()
        for partition in list(host.engine.owned.values()):
            host.engine.keeper.lose(partition, "taken over in a test")
        await host.answer()
        assert host.bodies == [b'"first"']


async def test_a_request_that_waits_for_its_host_is_not_sent_after_the_lease(
    tickers: Tickers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow_host(tickers) as host:
        await host.fire()
        for partition in host.engine.owned.values():
            monkeypatch.setattr(partition, "lease_until", 0.0)
        await host.answer()
        assert host.bodies == [b'"first"']
