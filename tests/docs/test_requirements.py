"""One test per promise of docs/requirements.md that has no better home elsewhere. Real servers, no sleeps."""

import asyncio
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from mainspring import Client, ConfigError, InvalidInput, ManualClock, Retry, Task
from mainspring.config.config import Config
from mainspring.engine.engine import EngineOptions
from mainspring.model.delivery import DONE, Delivery, Outcome
from mainspring.node.node import Node
from mainspring.store.store import Store
from mainspring.testing import Ticker
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server, all_keys, cluster, standalone

DUE_S = {"task1": 1693964754, "task2": 1693965795, "task3": 1693974803, "task4": 1694064809, "task5": 1704064809}
NOW_S = 1694044800


def names(deliveries: Sequence[Delivery]) -> list[str]:
    return [one.value() for one in deliveries]


def in_any_order(due_s: dict[str, int]) -> list[tuple[str, int]]:
    return random.Random(7).sample(sorted(due_s.items()), len(due_s))


# -- A. Tasks found through sorted sets ------------------------------------------------------------------------


async def test_a1_what_is_due_comes_out_in_due_order(mainspring_url: str, mainspring_namespace: str) -> None:
    clock = ManualClock(1693960000_000)
    async with Ticker(mainspring_url, namespace=mainspring_namespace, clock=clock) as ticker:
        for name, due_s in in_any_order(DUE_S):
            await ticker.client.put("log:", name, at=due_s * 1000)
        due = await ticker.client.list(due_before=NOW_S * 1000 + 1)
        assert [task.payload for task in due.tasks] == ["task1", "task2", "task3"]
        assert names(await ticker.advance(ms=NOW_S * 1000 - clock.now_ms())) == ["task1", "task2", "task3"]
        assert (await ticker.client.count()).pending == 2
        assert names(await ticker.advance(seconds=DUE_S["task5"] - NOW_S)) == ["task4", "task5"]


async def test_a1_after_an_outage_the_tasks_of_a_lane_leave_in_due_order(
    mainspring_url: str, mainspring_namespace: str
) -> None:
    clock = ManualClock(1693960000_000)
    async with Ticker(mainspring_url, namespace=mainspring_namespace, clock=clock) as ticker:
        tasks = [Task("log:", name, at=due_s * 1000, lane="one") for name, due_s in in_any_order(DUE_S)]
        await ticker.client.put_many(tasks)
        clock.set(NOW_S * 1000)  # no node was running in between: all three are due at once
        assert names(await ticker.turn()) == ["task1", "task2", "task3"]


class Doors:
    """Which sockets and databases this process opens; an audit hook cannot be taken off, only shut."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, Any]] = set()
        self.watching = False
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if self.watching and event in ("socket.connect", "sqlite3.connect", "subprocess.Popen"):
            self.seen.add((event, args[1] if event == "socket.connect" else args[0]))

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        self.watching = True
        try:
            yield
        finally:
            self.watching = False


async def test_a2_nothing_but_the_server_is_asked_what_is_next(
    mainspring_server: Server, mainspring_ticker: Ticker
) -> None:
    doors = Doors()
    with doors.watch():
        async with mainspring_ticker as ticker:
            await ticker.client.put("log:", "x", after="1h", id="x")
            assert names(await ticker.advance(hours=1)) == ["x"]
    assert doors.seen == {("socket.connect", ("127.0.0.1", mainspring_server.port))}


async def test_a5_a_crash_between_delivery_and_done_repeats_the_delivery_with_the_same_key(
    mainspring_url: str, mainspring_namespace: str, mainspring_clock: ManualClock
) -> None:
    def ticker(**options: Any) -> Ticker:
        return Ticker(mainspring_url, namespace=mainspring_namespace, clock=mainspring_clock, **options)

    delivered = asyncio.Event()

    async def stuck(delivery: Delivery) -> Outcome:
        """Delivered, and then the process dies before it can say so."""
        delivered.set()
        await asyncio.Event().wait()
        return DONE

    async with ticker(handlers={"log": stuck}) as first:
        due_ms = (await first.client.put("log:", {"order": 42}, after="1s", id="order-42")).due_ms
        mainspring_clock.advance(seconds=1)
        turn = asyncio.create_task(first.turn())
        await delivered.wait()
        turn.cancel()
        await asyncio.wait([turn])
        await first.crash()
    async with ticker() as second:
        [again] = await second.advance(seconds=10)
        assert again.idempotency_key == first.deliveries[0].idempotency_key
        assert again.idempotency_key == f"{mainspring_namespace}/order-42/{due_ms}"
        assert await second.advance(hours=1) == []


async def test_a6_a_receiver_that_timed_out_gets_the_same_key_again(mainspring_ticker: Ticker) -> None:
    done: set[str] = set()
    repeats = 0

    def receive(delivery: Delivery) -> Outcome:
        nonlocal repeats
        if delivery.idempotency_key in done:
            repeats += 1
            return DONE
        done.add(delivery.idempotency_key)
        return Retry("no answer within 10 s")

    async with mainspring_ticker as ticker:
        ticker.answer("https", receive)
        await ticker.client.put("https://example.com/orders", {"order": 42}, after="1s")
        assert [one.attempt for one in await ticker.advance(minutes=1)] == [1, 2]
        assert (len(done), repeats) == (1, 1)


async def test_a8_what_a_dead_owner_held_is_released_and_delivered(
    mainspring_url: str, mainspring_namespace: str, mainspring_clock: ManualClock
) -> None:
    lease = EngineOptions(lease_s=5)

    def ticker() -> Ticker:
        return Ticker(mainspring_url, namespace=mainspring_namespace, clock=mainspring_clock, options=lease)

    async with ticker() as first:
        await first.client.put("log:", "x", after="2s")
        assert await first.turn() == []  # owns everything, holds the task in memory
        await first.crash()
    async with ticker() as second:
        assert await second.advance(seconds=4) == []  # the dead one's lease still runs
        assert names(await second.advance(seconds=2)) == ["x"]


# -- B. Ticks --------------------------------------------------------------------------------------------------


async def test_b3_items_spread_over_servers_and_each_always_lands_in_the_same_set() -> None:
    items = [f"item-{number}" for number in range(40)]
    with cluster(3) as nodes:
        places = []
        for clock in (ManualClock(), ManualClock(1_800_000_100_000)):
            async with Client(nodes.url, namespace="spread", partitions=12, clock=clock) as client:
                await client.put_many(
                    [Task("log:", item, after="1h", id=item) for item in items], on_conflict="replace"
                )
                for item in items:
                    assert (await client.get(item)).state == "pending"
                # One task an item although all were put twice: the second put found the first one's set.
                assert (await client.count()).pending == len(items)
            places.append([{key for key in all_keys(server) if key.endswith(b":slices")} for server in nodes.masters])
        assert places[0] == places[1]
        assert all(places[0])


# -- D. Delay queue for real work ------------------------------------------------------------------------------


async def test_d10_eight_thousand_tasks_in_one_second_all_fire_once_at_their_millisecond(
    mainspring_ticker: Ticker,
) -> None:
    async with mainspring_ticker as ticker:
        start_ms = ticker.clock.now_ms() + 60_000
        at = {str(number): start_ms + number % 1000 for number in range(8_000)}
        await ticker.client.put_many(Task("log:", name, at=due_ms) for name, due_ms in at.items())
        ticker.clock.set(start_ms + 499)
        early = names(await ticker.turn())
        ticker.clock.set(start_ms + 999)
        late = names(await ticker.turn())
        assert sorted(early) == sorted(name for name, due_ms in at.items() if due_ms <= start_ms + 499)
        assert sorted(early + late) == sorted(at)
        assert (await balance(ticker.store)).done == 8_000


@pytest.mark.slow
async def test_d10_a_hundred_times_as_many_all_fire_once_and_none_early(mainspring_ticker: Ticker) -> None:
    async with mainspring_ticker as ticker:
        start_ms, count = ticker.clock.now_ms() + 60_000, 800_000
        await ticker.client.put_many(Task("log:", number, at=start_ms + number % 1000) for number in range(count))
        ticker.clock.set(start_ms + 499)
        early = [int(one.payload) for one in await ticker.turn()]  # not all: more are waiting than are held in memory
        assert early
        assert max(number % 1000 for number in early) <= 499
        ticker.clock.set(start_ms + 999)
        late = [int(one.payload) for one in await ticker.turn()]
        assert sorted(early + late) == list(range(count))
        assert (await balance(ticker.store)).done == count


# -- E. Scheduler package --------------------------------------------------------------------------------------


def test_e2_a_config_is_frozen_has_defaults_and_refuses_nonsense() -> None:
    config = Config()
    assert (config.namespace, config.lease_s, config.port) == ("main", 5.0, 8000)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1  # type: ignore[misc]
    nonsense: list[dict[str, Any]] = [{"lease_s": 0.0}, {"port": 70_000}, {"namespace": "a b"}, {"redis_url": "here"}]
    for wrong in nonsense:
        with pytest.raises(ConfigError):
            Config(**wrong)


async def test_e5_an_instant_is_the_same_in_every_zone_and_a_naive_time_is_refused(mainspring_ticker: Ticker) -> None:
    async with mainspring_ticker as ticker:
        utc = datetime.fromtimestamp(ticker.clock.now_ms() / 1000, UTC) + timedelta(hours=1)
        spellings = [utc, utc.astimezone(ZoneInfo("Asia/Tokyo")), utc.astimezone(ZoneInfo("America/New_York"))]
        for spelling in spellings:
            for when in (spelling, spelling.isoformat()):
                handle = await ticker.client.put("log:", at=when)
                assert handle.due_ms == round(utc.timestamp() * 1000)
        with pytest.raises(InvalidInput, match="naive"):
            await ticker.client.put("log:", at=utc.replace(tzinfo=None))
        assert (await ticker.client.count()).pending == len(spellings) * 2


class SlowSink:
    """Takes its time over everything."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self.began = asyncio.Event()
        self.ended = 0

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.began.set()
        await asyncio.sleep(self._takes_s)
        self.ended += len(batch)
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Nothing is held open."""


@pytest.fixture
def kept_server() -> Iterator[Server]:
    with standalone(aof=True) as server:
        yield server


async def _stopped_during_a_delivery(url: str, takes_s: float, timeout_s: float) -> tuple[SlowSink, float]:
    """A node that is stopped while a delivery is under way; how it ended, and how long the stop took."""
    sink = SlowSink(takes_s)
    node = Node(Config(redis_url=url, shutdown_timeout_s=timeout_s), {"log": sink})
    await node.start()
    assert node.client is not None
    await node.client.put("log:", "x", id="x")
    await sink.began.wait()
    began = time.monotonic()
    await node.stop()
    return sink, time.monotonic() - began


async def test_e6_active_work_finishes_before_the_stop(kept_server: Server) -> None:
    sink, _ = await _stopped_during_a_delivery(kept_server.url, 0.3, 20)
    assert sink.ended == 1
    async with contextlib.aclosing(await Store.open(kept_server.url)) as store:
        books = await balance(store)
    assert (books.done, books.fired) == (1, 0)


async def test_e6_work_that_takes_too_long_is_given_up_and_stays_on_the_server(kept_server: Server) -> None:
    sink, took_s = await _stopped_during_a_delivery(kept_server.url, 3600, 0.2)
    assert took_s < 10
    assert sink.ended == 0
    async with contextlib.aclosing(await Store.open(kept_server.url)) as store:
        books = await balance(store)
    assert (books.done, books.fired) == (0, 1)  # the next owner delivers it again
