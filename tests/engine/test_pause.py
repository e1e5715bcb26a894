"""Pauses: everything, a target, a queue or a lane is paused; held tasks go out afterwards, in order."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.delivery import Delivery, Retry
from mainspring.model.errors import InvalidInput
from mainspring.model.task import Task
from mainspring.store.keys import partition_of
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]


def values(deliveries: list[Delivery]) -> list[Any]:
    return [one.value() for one in deliveries]


async def test_a_paused_target_holds_its_tasks_and_no_others(ticker: Ticker, store: Store) -> None:
    client = ticker.client
    await client.pause(target="kafka:a", reason="deploy", by="ops")
    await client.put_many(Task(f"kafka:{name}", f"{name}{n}", after=f"{n}s") for n in range(5) for name in "ab")
    assert sorted(values(await ticker.advance(seconds=10))) == [f"b{n}" for n in range(5)]
    assert (await balance(store)).spilled == 5
    assert not (await verify(store)).reported
    assert await client.resume(target="kafka:a")
    assert sorted(values(await ticker.turn())) == [f"a{n}" for n in range(5)]
    await ticker.advance(seconds=10)
    assert (await balance(store)).pending == 0
    for keys in store.keys.partitions:
        assert await store.run_one(keys.slot, [("ZCARD", keys.slices)]) == [0]


@pytest.mark.parametrize(
    ("scope", "held"),
    [
        ({}, {"kafka:a", "kafka:b", "https://x.example/1", "queue:mail/send", "log:"}),
        ({"target": "kafka:*"}, {"kafka:a", "kafka:b"}),
        ({"target": "https://x.example/*"}, {"https://x.example/1"}),
        ({"queue": "mail"}, {"queue:mail/send"}),
        ({"lane": "a"}, {"log:"}),
    ],
)
async def test_a_pause_holds_exactly_its_scope_until_it_is_resumed(
    ticker: Ticker, store: Store, scope: dict[str, str], held: set[str]
) -> None:
    targets = {"kafka:a", "kafka:b", "https://x.example/1", "queue:mail/send"}
    await ticker.client.pause(**scope)  # type: ignore[arg-type]
    await ticker.client.put_many(Task(target, target, after="1s") for target in targets)
    await ticker.client.put("log:", "log:", after="1s", lane="a")
    assert set(values(await ticker.advance(seconds=2))) == (targets | {"log:"}) - held
    assert await ticker.client.resume(**scope)
    assert set(values(await ticker.turn())) == held


async def test_a_pause_ends_by_itself_at_its_time(ticker: Ticker, store: Store) -> None:
    pause = await ticker.client.pause(for_="30s", reason="short")
    assert pause.until_ms == ticker.clock.now_ms() + 30_000
    await ticker.client.put("log:", "x", after="1s")
    assert values(await ticker.advance(seconds=20)) == []
    assert [one.reason for one in await ticker.client.pauses()] == ["short"]
    assert values(await ticker.advance(seconds=20)) == ["x"]
    assert await ticker.client.pauses() == []
    assert await store.run_one(store.keys.slot, [("EXISTS", store.keys.pauses)]) == [0]


async def test_a_paused_lane_keeps_its_order_through_a_takeover(tickers: Tickers, store: Store) -> None:
    first = await tickers()
    await first.client.pause(lane="a")
    await first.client.put_many(Task("log:", n, after=f"{1000 + n}ms", lane="a") for n in range(50))
    assert values(await first.advance(seconds=3)) == []
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers()
    await second.client.put("log:", "new", after="1s", lane="a")
    assert values(await second.advance(seconds=5)) == []
    await second.client.resume(lane="a")
    assert values(await second.turn()) == [*range(50), "new"]
    await balance(store)


async def test_a_lane_with_several_targets_waits_whole_for_the_one_that_is_paused(ticker: Ticker) -> None:
    await ticker.client.pause(target="kafka:a")
    targets = ["kafka:b", "kafka:a", "kafka:b", "kafka:b"]
    await ticker.client.put_many(Task(one, n, after=f"{1000 + n}ms", lane="l") for n, one in enumerate(targets))
    assert values(await ticker.advance(seconds=5)) == [0]
    await ticker.client.resume(target="kafka:a")
    assert values(await ticker.turn()) == [1, 2, 3]


async def test_the_retry_of_a_head_waits_for_a_pause_too(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(
        handlers={"log": lambda one: Retry("no", after_ms=5_000) if one.attempt == 1 and one.value() == 0 else None}
    )
    await ticker.client.put_many(Task("log:", n, after=f"{1000 + n}ms", lane="a") for n in range(3))
    assert values(await ticker.advance(seconds=2)) == [0]
    await ticker.client.pause(target="log:*")
    assert values(await ticker.advance(seconds=20)) == []
    await ticker.crash()
    ticker.clock.advance(seconds=6)
    second = await tickers()
    assert values(await second.turn()) == []
    await second.client.resume(target="log:*")
    assert values(await second.advance(seconds=1)) == [0, 1, 2]
    await balance(store)


async def test_a_pause_that_drops_leaves_dead_letters(ticker: Ticker, store: Store) -> None:
    client = ticker.client
    await client.pause(target="log:", mode="drop", reason="maintenance", by="ops")
    await client.put("log:", "x", id="x", after="1s")
    cancelled = await client.put("log:", "c", after="1s")
    await client.put_many(Task("log:", n, after="1s", lane="a") for n in range(3))
    await client.cancel(cancelled.id)
    await client.put("kafka:t", "y", after="1s")
    assert values(await ticker.advance(seconds=5)) == ["y"]
    dead_letters = await list_dead(store)
    assert {one.reason for one in dead_letters} == {"dropped while paused by ops: maintenance"}
    assert len(dead_letters) == 4
    assert {(one.attempts, one.errors) for one in dead_letters} == {(0, ())}
    assert (await client.explain("x")).text.startswith("It was dropped while paused by ops: maintenance, ")
    books = await balance(store)
    assert (books.dead, books.cancelled, books.done, books.pending) == (4, 1, 1, 0)
    assert (await client.get("x")).state == "dead"
    await client.resume(target="log:")
    assert (await client.dead_replay("x")).outcome == "replayed"
    assert values(await ticker.advance(seconds=1)) == ["x"]


async def test_a_pause_that_comes_again_while_tasks_come_back_lets_the_rest_go(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(reach=Reach(tasks=64)))
    await ticker.client.pause()
    await ticker.client.put_many(Task("log:", n, after="1s", id=f"x{n}") for n in range(400))
    assert values(await ticker.advance(seconds=5)) == []
    await ticker.client.resume()
    await ticker.engine.pauses.step()
    for _ in range(6):
        await ticker.engine.lookahead.step()
    await ticker.engine.dispatcher.step()
    await ticker.client.pause(reason="again")
    for _ in range(3):
        await ticker.turn()
    some = len(ticker.deliveries)
    assert 0 < some < 400
    assert ticker.engine.lookahead.held == 0
    assert (await balance(store)).spilled == 400, "what stands in a hold slice already is not moved again"
    await ticker.client.resume()
    for _ in range(20):
        await ticker.turn()
    assert sorted(values(ticker.deliveries)) == list(range(400))


async def test_a_wider_pause_takes_over_what_a_narrower_one_held(ticker: Ticker, store: Store) -> None:
    await ticker.client.pause(target="log:")
    await ticker.client.put_many(Task("log:", n, after="1s") for n in range(5))
    await ticker.advance(seconds=3)
    await ticker.client.pause(reason="all")
    await ticker.client.resume(target="log:")
    assert values(await ticker.advance(seconds=3)) == []
    await ticker.client.resume()
    assert sorted(values(await ticker.turn())) == list(range(5))
    await balance(store)


async def test_a_hundred_lanes_of_a_paused_target_come_back_each_in_its_order(ticker: Ticker, store: Store) -> None:
    await ticker.client.pause(target="log:")
    tasks = [Task("log:", n, after=f"{1000 + n}ms", lane=f"l{n % 100}") for n in range(500)]
    await ticker.client.put_many(tasks)
    ticker.clock.advance(seconds=3)
    assert await ticker.turn() == []
    assert ticker.engine.lookahead.held == 0
    await ticker.client.resume(target="log:")
    await ticker.turn()
    by_lane: dict[str | None, list[int]] = {}
    for one in ticker.deliveries:
        by_lane.setdefault(one.lane, []).append(one.value())
    assert sum(map(len, by_lane.values())) == 500
    assert all(lane == sorted(lane) for lane in by_lane.values())
    await ticker.advance(seconds=5)
    for keys in store.keys.partitions:
        assert await store.run_one(keys.slot, [("ZCARD", keys.slices)]) == [0]


async def test_a_node_reads_the_pauses_before_it_fires_anything(tickers: Tickers) -> None:
    first = await tickers()
    await first.client.put("log:", "x", after="0s")
    await first.client.pause()
    assert await first.turn() == []
    assert partition_of("x", 4) in first.engine.owned


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": "kafka:a", "lane": "b"},
        {"target": "nothing"},
        {"mode": "maybe"},
        {"for_": "-3s"},
        {"for_": "3s", "until": 1},
        {"until": 1},
    ],
)
async def test_a_pause_that_makes_no_sense_is_refused(ticker: Ticker, wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        await ticker.client.pause(**wrong)  # type: ignore[arg-type]
    assert await ticker.client.pauses() == []
