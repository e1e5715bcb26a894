"""Held work in engines that run by themselves: loops, wake-ups and the server's own clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.engine.holds import FEW_BEHIND
from mainspring.model.delivery import DONE, Delivery, Outcome, Retry
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server, ServerCluster

PATIENCE_S = 60


class Target:
    """Keeps what arrives; a task whose value is in `failing` is sent away for an hour."""

    def __init__(self) -> None:
        self.arrived: list[object] = []
        self.failing: set[object] = set()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [self._one(one) for one in batch]

    def _one(self, one: Delivery) -> Outcome:
        if one.value() in self.failing:
            return Retry("no", after_ms=3_000_000)
        self.arrived.append(one.value())
        return DONE

    async def aclose(self) -> None: ...


@pytest.fixture
async def real_store(fleet: Server | ServerCluster, namespace: str) -> AsyncIterator[Store]:
    opened = await Store.open(fleet.url, namespace=namespace, partitions=4)
    try:
        yield opened
        await balance(opened)
    finally:
        await opened.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - engines tell nothing
            await asyncio.sleep(0.01)


async def test_a_pause_is_heard_and_its_end_lets_everything_out(real_store: Store) -> None:
    target, client = Target(), Client.over(real_store)
    engine = Engine(real_store, {"log": target}, EngineOptions())
    await client.pause(reason="before the start")
    await client.put_many(Task("log:", n, lane=f"l{n % 3}") for n in range(30))
    await engine.start()
    try:
        await until(lambda: engine.dispatcher.moved == 30)
        await client.put("log:", "later")
        await until(lambda: engine.dispatcher.moved == 31)
        assert target.arrived == []
        await client.resume()
        engine.called()
        await until(lambda: len(target.arrived) == 31)
        lanes = [[n for n in target.arrived if isinstance(n, int) and n % 3 == lane] for lane in range(3)]
        assert all(lane == sorted(lane) for lane in lanes)
        await client.pause(for_="5s")
        engine.called()
        await until(lambda: bool(engine.flow.pauses))
        await client.put("log:", "at its end")
        await until(lambda: "at its end" in target.arrived)
    finally:
        assert await engine.stop()


async def test_a_lane_behind_a_failed_head_continues_once_a_person_acts(real_store: Store) -> None:
    target, client = Target(), Client.over(real_store)
    target.failing.add(0)
    engine = Engine(real_store, {"log": target}, EngineOptions())
    await engine.start()
    try:
        await client.put_many(Task("log:", n, lane="a") for n in range(FEW_BEHIND * 4))
        await until(lambda: engine.dispatcher.moved == FEW_BEHIND * 4 - 1)
        await client.put("log:", "other")
        await until(lambda: target.arrived == ["other"])
        assert await client.lane_skip_head("a") == "ok"
        await until(lambda: len(target.arrived) == FEW_BEHIND * 4)
        assert target.arrived[1:] == list(range(1, FEW_BEHIND * 4))
    finally:
        assert await engine.stop()
