"""Verify: what is in order is left alone; each kind of damage is found, repaired, and gone afterwards."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import EngineOptions
from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.model.retry import RetryPolicy
from mainspring.store.keys import slot_of
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.verify import keys as keys_module
from mainspring.store.verify.checks import verify
from mainspring.store.verify.keys import fixed_keys
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, uses
from mainspring.testing.ticker import Ticker
from tests.support.verifying import found, home, raw, repaired

Tickers = Callable[..., Awaitable[Ticker]]


# -- nothing is wrong ------------------------------------------------------------------------------------------


async def test_everything_a_task_can_go_through_leaves_balanced_counters_and_no_orphan(
    tickers: Tickers, store: Store
) -> None:
    def answer(delivery: Delivery) -> Outcome:
        ends: dict[object, Outcome] = {"dies": Dead("no"), "again": Retry("busy")}
        return ends.get(delivery.value(), DONE)

    ticker = await tickers(handlers={"log": answer}, options=EngineOptions(retry=RetryPolicy(max_attempts=3)))
    client = ticker.client
    for number in range(40):
        await client.put("log:", after=f"{number % 7}s", id=f"id-{number}", lane=f"lane-{number % 3}")
    for payload in ("dies", "again"):
        for lane in (None, "a", "b"):
            await client.put("log:", payload, after="1s", lane=lane, id=f"{payload}-{lane}")
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=uses("MULTI"))
        await client.put("log:", "twice", after="2s")
    handle = await client.put("log:", after="3s")
    await client.reschedule(handle.id, after="9s")
    await client.put("log:", "new", after="4s", id="id-6", lane="lane-0", on_conflict="replace")
    assert await client.cancel("id-5", lane="lane-2") == "cancelled"
    for _ in range(12):
        report = await verify(store)
        assert report.found == {}, report.as_dict()
        rows = await balance(store)
        assert report.total == tuple(getattr(rows, name) for name in report.total._fields), "counted row by row"
        await ticker.advance(seconds=1)
    await ticker.advance(hours=2)
    assert await found(store) == {}
    assert (await verify(store)).total.dead == 6


async def test_ids_of_finished_tasks_are_kept_on_purpose(ticker: Ticker) -> None:
    await ticker.client.put("log:", after="1s", id="a")
    await ticker.advance(minutes=10)
    keys = home(ticker.store, "a")
    assert await raw(ticker.store, keys.number, "HLEN", keys.ids) == 1
    assert await raw(ticker.store, keys.number, "ZCARD", keys.slices) == 0
    assert await found(ticker.store) == {}


def test_every_key_that_is_written_is_known(store: Store) -> None:
    names = {getattr(store.keys, name) for name in vars(store.keys)}
    for keys in store.keys.partitions:
        names |= {getattr(keys, field.name) for field in fields(keys)}
    channels = {store.keys.cluster, *(name for keys in store.keys.partitions for name in (keys.wake, keys.work))}
    written = {name.encode() for name in names if isinstance(name, str) and "}:" in name and name not in channels}
    assert written == set(fixed_keys(store.keys))


# -- lanes and dead letters ------------------------------------------------------------------------------------


async def test_verify_frees_a_lane_that_waits_for_a_missing_task(ticker: Ticker) -> None:
    store = ticker.store
    keys = home(store, "a")
    await raw(store, keys.number, "HSET", keys.held, "a", os.urandom(16))
    assert await found(store) == {"held-lane": 1}
    await repaired(store)
    assert await raw(store, keys.number, "HLEN", keys.held) == 0


async def test_an_owner_frees_a_lane_that_waits_for_a_missing_task(ticker: Ticker) -> None:
    store = ticker.store
    keys = home(store, "a")
    await raw(store, keys.number, "HSET", keys.held, "a", os.urandom(16))
    await ticker.client.put("log:", "x", after="1s", lane="a")
    assert [one.value() for one in await ticker.advance(seconds=5)] == ["x"]
    assert await raw(store, keys.number, "HLEN", keys.held) == 0


async def test_an_unreadable_record_of_held_work_is_removed(ticker: Ticker) -> None:
    store = ticker.store
    keys = home(store, "a")
    await ticker.client.pause(lane="a")
    await ticker.client.put("log:", "x", after="1s", lane="a")
    await ticker.advance(seconds=5)
    assert await found(store) == {}
    [name] = await raw(store, keys.number, "HKEYS", keys.holds)
    await raw(store, keys.number, "HSET", keys.holds, name, "nonsense", "no name of a slice", "")
    assert await found(store) == {"hold-record": 2}
    await repaired(store)
    await ticker.client.resume(lane="a")
    assert [one.value() for one in await ticker.turn()] == ["x"]


async def test_a_lane_whose_head_waits_for_its_retry_or_was_cancelled_is_in_order(ticker: Ticker) -> None:
    store, client = ticker.store, ticker.client
    ticker.answer("log", lambda delivery: Retry("busy", after_ms=600_000) if delivery.attempt == 1 else DONE)
    await client.put("log:", "waits", after="1s", lane="a", id="a")
    await client.put("log:", "cancelled", after="1s", lane="b", id="b")
    await ticker.advance(seconds=2)
    assert await client.cancel("b", lane="b") == "cancelled"
    held = [await raw(store, keys.number, "HLEN", keys.held) for keys in store.keys.partitions]
    assert sum(held) == 2
    assert await found(store) == {}
    await ticker.advance(hours=1)
    assert [await raw(store, keys.number, "HLEN", keys.held) for keys in store.keys.partitions] == [0] * len(held)


async def test_both_halves_of_a_dead_letter_are_brought_together(ticker: Ticker) -> None:
    store = ticker.store
    ticker.answer("log", lambda _: Dead("no"))
    for name in ("kept", "undated", "empty"):
        await ticker.client.put("log:", name, after="1s", id=name, lane="a")
    await ticker.advance(seconds=5)
    keys = home(store, "a")
    dead_letters = {dead_letter.id: dead_letter for dead_letter in await list_dead(store)}
    pairs = await raw(store, keys.number, "HGETALL", keys.dead)
    records = list(zip(pairs[::2], pairs[1::2], strict=True))
    by_id = {one: idh for idh, record in records for one in dead_letters if one.encode() in record}
    await raw(store, keys.number, "ZREM", keys.dead_times, by_id["undated"])
    await raw(store, keys.number, "HDEL", keys.dead, by_id["empty"])
    assert await found(store) == {"dead-letter": 2}
    await repaired(store)
    left = {dead_letter.id: dead_letter for dead_letter in await list_dead(store)}
    assert left == {name: dead_letters[name] for name in ("kept", "undated")}
    died_ms = await raw(store, keys.number, "ZSCORE", keys.dead_times, by_id["undated"])
    assert float(died_ms) == dead_letters["undated"].died_ms


# -- counters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        ("HINCRBY", "accepted", 3),
        ("HINCRBY", "accepted", -2),
        ("HINCRBY", "done", 7),
        ("HSET", "cancelled", "many"),
        ("HSET", "repairs", "x"),
        ("HDEL", "accepted"),
        ("DEL",),
    ],
    ids=str,
)
async def test_counters_are_corrected_and_keep_counting(ticker: Ticker, damage: tuple[Any, ...]) -> None:
    store, client = ticker.store, ticker.client
    for number in range(4):
        await client.put("log:", after=f"{number}s", lane="a", id=str(number))
    await ticker.advance(ms=500)
    await client.cancel("3", lane="a")
    keys = home(store, "a")
    command, *rest = damage
    await raw(store, keys.number, command, keys.n, *rest)
    wrong = damage != ("HSET", "repairs", "x")
    assert await found(store) == ({"unbalanced": 1} if wrong else {})
    await repaired(store)
    await client.put("log:", after="5s", lane="a")
    await ticker.advance(seconds=10)
    books = await balance(store)
    assert (books.pending, books.fired) == (0, 0)


async def test_repairs_that_meet_do_not_repair_twice(ticker: Ticker) -> None:
    store = ticker.store
    for number in range(20):
        await ticker.client.put("log:", number, after=f"{number}s", id=str(number))
    for keys in store.keys.partitions:
        await raw(store, keys.number, "DEL", keys.slices)
        await raw(store, keys.number, "HINCRBY", keys.n, "accepted", 5)
    reports = await asyncio.gather(*(verify(store, repair=True) for _ in range(4)))
    assert [report.left for report in reports] == [0] * 4
    assert await found(store) == {}
    assert (await balance(store)).accepted == 20
    assert sorted(one.value() for one in await ticker.advance(minutes=1)) == list(range(20))


# -- what nobody can repair --------------------------------------------------------------------------------------


async def test_unknown_keys_and_wrong_types_are_reported_and_left_to_a_person(client: Client, store: Store) -> None:
    await client.put("log:", after="1h", lane="a")
    keys = home(store, "a")
    other = store.keys.partitions[(keys.number + 1) % len(store.keys)]
    foreign = f"{store.keys.namespace}:99.99"
    planted = {
        f"{{{keys.tag}}}:what": keys.slot,
        f"{{{keys.tag}}}:s:garbage": keys.slot,
        f"{{{store.keys.namespace}}}:who": store.keys.slot,
        f"{{{foreign}}}:n": slot_of(foreign),
        other.dead: other.slot,
        keys.entries("1000.1800000000000"): keys.slot,
    }
    for name, slot in planted.items():
        await store.run_one(slot, [("SET", name, "x")])
    assert await found(store) == {"unknown-key": 4, "wrong-type": 2}
    report = await verify(store, repair=True)
    assert report.left == 6
    assert all(one.repair is not None and not one.repair.done and one.repair.text for one in report.reported)
    assert sorted(report.counters) == [p for p in range(len(store.keys)) if p not in (keys.number, other.number)]
    for name, slot in planted.items():
        await store.run_one(slot, [("DEL", name)])
    assert await found(store) == {}


async def test_a_partition_that_never_holds_still_is_not_called_proven(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        await client.put("log:", after=f"{number + 1}m", lane="a")
    for name in ("AT_ONCE", "MOST_AT_ONCE", "PAGE"):
        monkeypatch.setattr(keys_module, name, 2)
    report = await verify(store)
    assert report.found == {}, "in pages, while nothing moves"
    assert (report.total.pending, report.slices) == (8, 8)
    reading = asyncio.create_task(verify(store))
    while not reading.done():
        await client.put("log:", after="1h", lane="a")
    report = await reading
    assert report.found == {"not-proven": 1}
    assert "calmer" in report.reported[0].finding.advice


async def test_a_busy_partition_is_proven_in_one_step_where_that_is_not_too_much(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        await client.put("log:", after=f"{number + 1}m", lane="a")
    for name in ("AT_ONCE", "PAGE"):
        monkeypatch.setattr(keys_module, name, 2)
    reading = asyncio.create_task(verify(store))
    while not reading.done():
        await client.put("log:", after="8m", lane="a")
    assert (await reading).found == {}
