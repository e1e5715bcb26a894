"""Partitions change hands all the time while calls and replies get lost: nothing is lost or repeated."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from mainspring.client.client import Client
from mainspring.config.config import Config
from mainspring.model.delivery import DONE, Delivery, Outcome, Retry
from mainspring.model.errors import Unavailable
from mainspring.node.node import Node
from mainspring.store import members
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.redis.servers import Primary
from mainspring.store.store import Store
from tests.support.fleets import Fleet

PARTITIONS = 8
NODES = 3
FLIPS = 25
TASKS_A_FLIP = 16
LANES = 5
FAULTS = 0.1
"""Half of all calls never arrive, and of the others the reply gets lost."""


class Recorder:
    """Delivers with some hesitation, fails a few first attempts, and watches the lanes."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.ids: Counter[str] = Counter()
        self.busy: Counter[str] = Counter()
        self.in_lane: dict[str, list[int]] = {}
        self.crowded: set[str] = set()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        lanes = [one.body.lane for one in batch if one.body.lane is not None]
        self.busy.update(lanes)
        self.crowded |= {lane for lane in lanes if self.busy[lane] > 1}
        await asyncio.sleep(self._dice.choice([0, 0.001, 0.02]))
        self.busy.subtract(lanes)
        return [self._answer(one) for one in batch]

    def _answer(self, one: Delivery) -> Outcome:
        if one.body.attempt == 1 and self._dice.random() < 0.05:
            return Retry("on purpose", after_ms=self._dice.randint(1, 300))
        self.ids[one.id] += 1
        if one.body.lane is not None:
            self.in_lane.setdefault(one.body.lane, []).append(int(one.id.partition("-")[2]))
        return DONE

    async def aclose(self) -> None:
        """Shared by all nodes."""


def spoil(primary: Primary, dice: random.Random, met: Counter[str]) -> None:
    pipeline = primary.pipeline

    async def send(commands: Sequence[RedisCommand], *, timeout_s: float | None = None) -> list[Any]:
        luck = dice.random()
        if luck < FAULTS / 2:
            met["never sent"] += 1
            raise Unavailable("a test broke the network path", sent=False)
        replies = await pipeline(commands, timeout_s=timeout_s)
        if luck < FAULTS:
            met["reply lost"] += 1
            raise Unavailable("a test broke the network path", sent=True)
        return replies

    vars(primary)["pipeline"] = send


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def start(fleet: Fleet, namespace: str, sink: Recorder, stack: AsyncExitStack) -> list[Node]:
    nodes = []
    for _ in range(NODES):
        # A lease that no hiccup of a loaded machine can use up: losing one would be a reason to deliver again.
        config = Config(redis_url=fleet.url, namespace=namespace, partitions=PARTITIONS, lease_s=20)
        node = Node(config, {"log": sink})
        await node.start()
        stack.push_async_callback(node.stop)
        nodes.append(node)
    return nodes


async def flip(store: Store, names: list[str], dice: random.Random) -> None:
    """An unexpected plan."""
    plan: dict[str, list[int]] = {name: [] for name in names}
    for number in range(PARTITIONS):
        plan[dice.choice(names)].append(number)
    written: list[RedisCommand] = [
        ("HINCRBY", store.keys.plan, "version", 1),
        ("HSET", store.keys.plan, "owners", msgspec.json.encode(plan)),
    ]
    await store.run_one(store.keys.slot, written)
    await members.announce(store)


async def test_hand_overs_among_lost_calls_and_replies_lose_and_repeat_nothing(
    fleet: Fleet, namespace: str, stack: AsyncExitStack
) -> None:
    dice, met = random.Random(3), Counter[str]()
    sink = Recorder(dice)
    nodes = await start(fleet, namespace, sink, stack)
    for primary in [primary for node in nodes if node._store is not None for primary in node._store.servers.all()]:
        spoil(primary, dice, met)
    store = await Store.open(fleet.url, namespace=namespace)
    stack.push_async_callback(store.aclose)
    client = await stack.enter_async_context(Client(fleet.url, namespace=namespace))
    names = [node.seat.membership.id for node in nodes if node.seat is not None]
    for first in range(0, FLIPS * TASKS_A_FLIP, TASKS_A_FLIP):
        await flip(store, names, dice)
        for number in range(first, first + TASKS_A_FLIP):
            lane = f"lane-{number % LANES}" if number % 3 else None
            after = "0s" if lane is not None else f"{dice.randint(0, 300)}ms"
            await client.put("log:", number, after=after, id=f"task-{number}", lane=lane)
    async with asyncio.timeout(60):
        while len(sink.ids) < FLIPS * TASKS_A_FLIP:  # noqa: ASYNC110  # the nodes tell us nothing
            await asyncio.sleep(0.01)
    assert min(met["never sent"], met["reply lost"]) > 10, f"too few faults to prove anything: {met}"
    assert sum(node.engine.keeper.takeovers for node in nodes if node.engine is not None) > 2 * PARTITIONS
    assert set(sink.ids.values()) == {1}
    assert not sink.crowded, "two of one lane at once"
    assert all(numbers == sorted(numbers) for numbers in sink.in_lane.values())
