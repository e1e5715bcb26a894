"""Verify beside live traffic: no false alarm, no large step, and repairs that nodes survive."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.model.errors import Conflict
from mainspring.model.task import Task
from mainspring.store.keys import partition_of
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.store import Store
from mainspring.store.verify import checks
from mainspring.store.verify import keys as keys_module
from mainspring.store.verify.checks import verify
from mainspring.store.verify.report import TaskCounters
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road
from mainspring.testing.servers import Server, ServerCluster
from mainspring.testing.ticker import RecordingSink

PARTITIONS = 8
ROUNDS = 6
DELIVERED = 2_000


@pytest.fixture
async def live(fleet: Server | ServerCluster, namespace: str) -> AsyncIterator[Store]:
    """A store under the server's own clock."""
    async with contextlib.aclosing(await Store.open(fleet.url, namespace=namespace, partitions=PARTITIONS)) as store:
        yield store


def sometimes(delivery: Delivery) -> Outcome:
    """One task in ten fails once, one in fifty dies."""
    number = delivery.value()
    if number % 50 == 0:
        return Dead("refused")
    return Retry("busy", after_ms=20 + number % 700) if number % 10 == 1 and delivery.attempt == 1 else DONE


class Traffic:
    """Puts of every kind, cancels, moves and replacements, as fast as they go, until it is stopped."""

    def __init__(self, store: Store) -> None:
        self._client = Client.over(store)
        self._random = random.Random(3)
        self._count = 0
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    async def run(self) -> None:
        while not self._stopped:
            await self._client.put_many([self._task(3_000) for _ in range(60)])
            await self._client.put_many([self._task(3_000, id=True) for _ in range(30)])
            await self._client.put_many([self._task(2_000, lane=True) for _ in range(10)])
            await self._change([self._task(4_000_000, id=True) for _ in range(40)])
            await asyncio.sleep(0)

    async def _change(self, tasks: list[Task]) -> None:
        """Tasks that are far ahead: most are cancelled, in bulk and one by one, others are moved or replaced."""
        summary = await self._client.put_many(tasks, handles=True)
        assert summary.handles is not None
        ids = [handle.id for handle in summary.handles]
        assert set(await self._client.cancel_many(ids[:20])) == {"cancelled"}
        assert await self._client.cancel(ids[20]) == "cancelled"
        for id in ids[21:24]:
            await self._client.put("log:", self._number(), after="1s", id=id, on_conflict="replace")
        for id in ids[24:27]:
            with contextlib.suppress(Conflict):
                await self._client.reschedule(id, after=f"{self._random.randrange(2_000)}ms")

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _task(self, within_ms: int, *, id: bool = False, lane: bool = False) -> Task:
        number = self._number()
        after = f"{self._random.randrange(within_ms)}ms"
        name = f"lane-{number % 5}" if lane else None
        return Task("log:", number, after=after, id=f"id-{number}" if id else None, lane=name)


@contextlib.asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[Engine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def flowing(traffic: Traffic) -> AsyncIterator[Traffic]:
    running = asyncio.create_task(traffic.run())
    try:
        yield traffic
    finally:
        traffic.stop()
        await running


async def watch(store: Store, rounds: int) -> TaskCounters:
    """Verify repeatedly; there may be no finding, and the traffic must continue."""
    books = TaskCounters()
    for _ in range(rounds):
        report = await verify(store)
        assert report.found == {}, report.as_dict()
        assert report.total.missing == 0
        assert report.total.accepted > books.accepted, "nothing was put meanwhile"
        books = report.total
    return books


@pytest.mark.parametrize(
    "fleet", ["valkey", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("redis", "cluster"))], indirect=True
)
async def test_live_traffic_raises_no_false_alarm(live: Store) -> None:
    sink = RecordingSink()
    sink.handlers["log"] = sometimes
    first, second = (Engine(live, {"log": sink}, EngineOptions(node=name)) for name in ("first", "second"))
    async with asyncio.timeout(100), flowing(Traffic(live)):
        async with started(first):
            await watch(live, ROUNDS)
        # The partitions change hands while the traffic continues.
        async with started(second):
            books = await watch(live, ROUNDS)
            while len(sink.deliveries) < DELIVERED:
                books = await watch(live, 1)
    assert min(books.pending, books.done, books.cancelled, books.replaced, books.dead, books.retried) > 0, books
    last, rows = (await verify(live)).total, await balance(live)
    assert last == tuple(getattr(rows, name) for name in last._fields), "the same, counted row by row"


async def test_repairs_beside_a_running_node_lose_nothing(live: Store) -> None:
    """Lists are torn out of their slices again and again while tasks come and fire; each task still arrives."""
    arrived: set[int] = set()
    complete = asyncio.Event()
    wanted, number = set(range(600)), 0

    def arrives(delivery: Delivery) -> None:
        arrived.add(delivery.value())
        if arrived == wanted:
            complete.set()

    sink = RecordingSink()
    sink.handlers["log"] = arrives
    client = Client.over(live)
    async with asyncio.timeout(100), started(Engine(live, {"log": sink})):
        for turn in range(6):
            for _ in range(100):
                await client.put("log:", number, after=f"{500 + number % 1500}ms", id=str(number))
                number += 1
            keys = live.keys.partitions[turn % PARTITIONS]
            await live.run_one(keys.slot, [("DEL", keys.slices), ("HSET", keys.held, "no-such-lane", b"0" * 16)])
            report = await verify(live, repair=True)
            assert report.left == 0, report.as_dict()
            assert report.found["held-lane"] == 1
        await complete.wait()
    assert (await verify(live)).found == {}
    books = await balance(live)
    assert (books.pending, books.fired, books.done) == (0, 0, 600)


async def test_a_repair_of_the_counters_is_no_loss_to_a_running_node(live: Store) -> None:
    """A node counts what its server accepted, and reports what a failover forgot. A repair forgets nothing."""
    sink, client = RecordingSink(), Client.over(live)
    engine = Engine(live, {"log": sink})
    keys = live.keys.partitions[0]
    async with asyncio.timeout(100), started(engine):
        await live.run_one(keys.slot, [("HINCRBY", keys.n, "accepted", 5)])
        while engine.lookahead.accepted.get(0) != 5:  # noqa: ASYNC110  # nodes tell nothing: there is only polling
            await asyncio.sleep(0.01)
        takeovers = engine.keeper.takeovers
        report = await verify(live, repair=True)
        assert (report.found, report.left) == ({"unbalanced": 1}, 0)
        await client.put("log:", "seen", lane=lane_of(live, 0))
        while engine.lookahead.accepted[0] == 5:  # noqa: ASYNC110  # until the node has looked at the counters again
            await asyncio.sleep(0.01)
        assert (engine.lookahead.forgotten, engine.keeper.takeovers) == (0, takeovers)
    assert (await verify(live)).found == {}


def lane_of(store: Store, partition: int) -> str:
    return next(str(n) for n in itertools.count() if partition_of(str(n), len(store.keys)) == partition)


# -- size ------------------------------------------------------------------------------------------------------

TASKS = 200_000


def looked_at(command: RedisCommand) -> int:
    """How many rows, ids, slices or keys a command makes the server look at, at most."""
    word = str(command[0])
    if word == "LRANGE":
        first, last = int(command[2]), int(command[3])
        assert last >= first, "to the end of a list is not bounded"
        return last - first + 1
    if word.endswith("SCAN"):
        return int(command[command.index("COUNT") + 1])
    if word in ("EVALSHA", "EVAL"):
        return int(command[2])
    assert word in _SMALL, f"{word} may look at anything"
    return len(command)


_SMALL = {"TYPE", "HMGET", "GETRANGE", "SPUBLISH", "HGET"}


async def test_no_step_looks_at_more_than_a_bounded_number_of_tasks(live: Store) -> None:
    client = Client.over(live)
    soon_ms = live.clock.now_ms() + 60_000

    def tasks() -> Sequence[Task]:
        named = [Task("log:", None, at=soon_ms + i % 500, id=f"n{i}") for i in range(TASKS // 10)]
        return [Task("log:", None, at=soon_ms + i % 500) for i in range(TASKS - len(named))] + named

    await client.put_many(tasks())
    keys = live.keys.partitions[0]
    # A lane that waits for a cancelled task is the one reason to look at rows.
    await live.run_one(keys.slot, [("HSET", keys.held, "a", b"0" * 16)])
    with bad_road(live) as road:
        report = await verify(live)
    assert report.found == {"held-lane": 1}
    assert (report.total.accepted, report.total.pending) == (TASKS, TASKS)
    commands: list[Any] = [command for _, trip in road.trips for command in trip]
    slices = report.slices // PARTITIONS + 1
    most = max(
        4 * min(slices, keys_module.AT_ONCE) + 2,
        4 * keys_module.KEYS_A_PAGE + 1,
        checks.IDS_A_PAGE + 2,
        checks.ROWS_A_CHUNK,
        checks.DEAD_LETTERS_A_PAGE,
    )
    assert max(map(looked_at, commands)) <= most
    assert sum(command[0] == "LRANGE" for command in commands) > TASKS / PARTITIONS / checks.ROWS_A_CHUNK
    assert (await verify(live, repair=True)).left == 0
