"""Verify: each kind of damage is found, repaired without losing a task, and gone afterwards."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import pytest

from mainspring.client import Client
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Delivery
from mainspring.model.outcome import DONE, Dead, Outcome, Retry
from mainspring.model.retry import RetryPolicy
from mainspring.store import verify_count
from mainspring.store.dead import list_dead
from mainspring.store.keys import PartitionKeys, Slice, partition_of, score_of
from mainspring.store.store import Store
from mainspring.store.verify import Report, verify
from mainspring.store.verify_keys import fixed_keys
from mainspring.store.verify_report import KINDS
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, uses
from mainspring.testing.owner import address_of
from mainspring.testing.servers import Cluster, Server
from mainspring.testing.ticker import RecordingSink, Ticker

Tickers = Callable[..., Awaitable[Ticker]]


async def raw(store: Store, partition: int, *command: Any) -> Any:
    [reply] = await store.run_one(store.keys.partitions[partition].slot, [command])
    return reply


async def found(store: Store) -> dict[str, int]:
    report = await verify(store)
    assert report.left == report.found.total()
    assert set(report.found) <= set(KINDS)
    return dict(report.found)


async def repaired(store: Store) -> Report:
    """Repair, all of it; and a second look finds nothing."""
    report = await verify(store, repair=True)
    assert report.left == 0, report.as_dict()
    assert all(one.repair is not None and one.repair.text for one in report.told), "every repair is reported"
    assert await found(store) == {}
    return report


def home(store: Store, name: str) -> PartitionKeys:
    """The partition of a lane or an id."""
    return store.keys.partitions[partition_of(name, len(store.keys))]


# -- nothing is wrong ------------------------------------------------------------------------------------------


async def test_everything_a_task_can_go_through_leaves_even_books_and_no_orphan(tickers: Tickers, store: Store) -> None:
    def answer(delivery: Delivery) -> Outcome:
        return {"dies": Dead("no"), "again": Retry("busy")}.get(delivery.value(), DONE)

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
    channels = {store.keys.cluster, *(keys.wake for keys in store.keys.partitions)}
    written = {name.encode() for name in names if isinstance(name, str) and "}:" in name and name not in channels}
    assert written == set(fixed_keys(store.keys))


# -- entries and slices ----------------------------------------------------------------------------------------


async def test_entries_of_no_live_slice_are_put_back_and_fire(ticker: Ticker) -> None:
    store = ticker.store
    await ticker.client.put("log:", 1, after="2s", id="a")
    keys = home(store, "a")
    await ticker.client.put("log:", 2, after="30m", id="b", lane="a")
    await raw(store, keys.number, "DEL", keys.slices)
    assert await found(store) == {"orphan-list": 2, "orphan-index": 2, "unbalanced": 1}
    await repaired(store)
    assert (await ticker.client.get("a")).state == "pending", "it is found by its id again"
    assert [one.value() for one in await ticker.advance(hours=1)] == [1, 2]
    assert (await balance(store)).done == 2


async def test_a_running_owner_is_told_of_entries_that_were_put_back(
    fleet: Server | Cluster, namespace: str, store: Store
) -> None:
    delivered: asyncio.Queue[Any] = asyncio.Queue()
    sink = RecordingSink()
    sink.handlers["log"] = lambda delivery: delivered.put_nowait(delivery.value())
    async with contextlib.aclosing(await Store.open(fleet.url, namespace=namespace)) as live:
        engine = Engine(live, {"log": sink})
        await engine.start()
        await Client.over(live).put("log:", "x", after="50m", id="a")
        keys = home(live, "a")
        [name] = await raw(live, keys.number, "ZRANGE", keys.slices, 0, -1)
        # Its second is over by now, and no owner knows of it.
        old = Slice.at(live.clock.now_ms() - 60_000, 1000)
        await raw(live, keys.number, "RENAME", keys.entries(name.decode()), keys.entries(old.name))
        await raw(live, keys.number, "DEL", keys.slices)
        report = await verify(live, repair=True)
        assert report.left == 0
        assert await asyncio.wait_for(delivered.get(), 30) == "x"
        assert await engine.stop()
    assert await found(store) == {}


async def test_what_was_finished_before_it_was_orphaned_does_not_fire_again(ticker: Ticker) -> None:
    store = ticker.store
    await ticker.client.put("log:", "early", after="1s", lane="a")
    await ticker.client.put("log:", "late", after="1999ms", lane="a")
    assert [one.value() for one in await ticker.advance(ms=1500)] == ["early"]
    keys = home(store, "a")
    await raw(store, keys.number, "DEL", keys.slices)
    await repaired(store)
    assert [one.value() for one in await ticker.advance(seconds=10)] == ["late"]


async def test_bits_of_a_slice_that_is_gone_are_removed_before_they_hide_a_new_task(
    ticker: Ticker, clock: ManualClock
) -> None:
    store = ticker.store
    keys = home(store, "a")
    place = Slice.at(clock.now_ms() + 5_000, 1000)
    for bitmap in keys.slice_keys(place.name)[1:]:
        await raw(store, keys.number, "SETBIT", bitmap, 0, 1)
    assert await found(store) == {"orphan-bitmap": 1}
    await repaired(store)
    await ticker.client.put("log:", "x", at=place.start_ms, lane="a")
    assert [one.value() for one in await ticker.advance(seconds=10)] == ["x"]


async def test_a_slice_without_entries_is_removed(ticker: Ticker) -> None:
    store = ticker.store
    address = address_of((await ticker.client.put("log:", after="1h")).id)
    keys = store.keys.partitions[address.partition]
    await raw(store, keys.number, "DEL", keys.entries(address.slice.name))
    assert await found(store) == {"empty-slice": 1, "unbalanced": 1}
    report = await repaired(store)
    assert "accepted tasks are nowhere" in report.told[-1].finding.problem, "what is lost is said"
    assert (await balance(store)).accepted == 0


async def test_a_retry_that_gives_way_to_another_task_leaves_no_empty_slice(ticker: Ticker, clock: ManualClock) -> None:
    store, client = ticker.store, ticker.client

    async def replaced_meanwhile(delivery: Delivery) -> Outcome:
        if delivery.value() == "old":
            await client.put("log:", "new", after="1h", id="a", on_conflict="replace")
            return Retry("busy", after_ms=60_000)
        return DONE

    ticker.answer("log", replaced_meanwhile)
    await client.put("log:", "old", after="1s", id="a")
    await ticker.advance(seconds=10)
    assert await found(store) == {}
    assert [one.value() for one in await ticker.advance(hours=2)] == ["new"]


async def test_a_name_that_is_no_slice_is_taken_out(ticker: Ticker) -> None:
    store = ticker.store
    keys = home(store, "a")
    for name in (b"garbage", b"1000.17", b"999.1800000000000", b"01000.1800000000000", b"\xff.1"):
        await raw(store, keys.number, "ZADD", keys.slices, 1_800_000_000, name)
    assert await found(store) == {"bad-slice": 5}
    await repaired(store)
    await ticker.client.put("log:", "x", after="1s", lane="a")
    assert [one.value() for one in await ticker.advance(seconds=5)] == ["x"]


async def test_a_slice_with_the_score_of_another_time_gets_its_own_and_its_ids_stay_true(ticker: Ticker) -> None:
    store = ticker.store
    await ticker.client.put("log:", "x", after="5s", id="a")
    keys = home(store, "a")
    [name, score] = await raw(store, keys.number, "ZRANGE", keys.slices, 0, -1, "WITHSCORES")
    await raw(store, keys.number, "ZINCRBY", keys.slices, 3600, name)
    assert await found(store) == {"bad-slice": 1}
    await repaired(store)
    assert float(await raw(store, keys.number, "ZSCORE", keys.slices, name)) == float(score)
    assert (await ticker.client.get("a")).state == "pending"
    assert [one.value() for one in await ticker.advance(seconds=10)] == ["x"]


@pytest.mark.parametrize("bitmap", ["f", "d", "x"])
async def test_bits_past_the_end_are_cut_off_also_in_the_memory_of_the_owner(ticker: Ticker, bitmap: str) -> None:
    store = ticker.store
    await ticker.client.put("log:", 0, after="2s", lane="a")
    keys = home(store, "a")
    [name] = await raw(store, keys.number, "ZRANGE", keys.slices, 0, -1)
    for index in (1, 2, 9, 40):
        await raw(store, keys.number, "SETBIT", f"{{{keys.tag}}}:{bitmap}:{name.decode()}", index, 1)
    await ticker.turn()  # the owner has read them
    assert await found(store) == {"stray-bits": 1}
    await repaired(store)
    for number in (1, 2):
        await ticker.client.put("log:", number, after="2s", lane="a")
    assert [one.value() for one in await ticker.advance(seconds=5)] == [0, 1, 2]
    assert (await balance(store)).done == 3


# -- ids -------------------------------------------------------------------------------------------------------


async def test_ids_that_lead_nowhere_are_removed(ticker: Ticker, clock: ManualClock) -> None:
    store, client = ticker.store, ticker.client
    for name in ("kept", "beyond", "other", "lost", "short", "odd"):
        await client.put("log:", name, after="1h", id=name, lane="a")
    keys = home(store, "a")
    flat = await raw(store, keys.number, "HGETALL", keys.ids)
    index = dict(zip(flat[::2], flat[1::2], strict=True))
    kept, beyond, other, lost, short, odd = sorted(index, key=lambda idh: index[idh][10:])  # in the order of putting
    coming = Slice.at(clock.now_ms() + 60_000, 1000)
    wrong = {
        beyond: index[beyond][:10] + (99).to_bytes(4, "big"),
        other: index[kept],
        lost: b"\x01" + coming.start_ms.to_bytes(6, "big") + bytes(7),
        short: b"short",
        odd: b"\x09" + bytes(13),
    }
    for idh, address in wrong.items():
        await raw(store, keys.number, "HSET", keys.ids, idh, address)
    assert await found(store) == {"orphan-index": 5}
    await repaired(store)
    assert await raw(store, keys.number, "HKEYS", keys.ids) == [kept]
    assert (await client.get("lost", lane="a")).state == "unknown"
    delivered = {one.value() for one in await ticker.advance(hours=2)}
    assert delivered == {"kept", "beyond", "other", "lost", "short", "odd"}, "the tasks themselves are untouched"


async def test_an_id_that_was_set_right_meanwhile_is_left_alone(ticker: Ticker) -> None:
    store = ticker.store
    await ticker.client.put("log:", after="1h", id="a")
    keys = home(store, "a")
    [idh, address] = await raw(store, keys.number, "HGETALL", keys.ids)
    await raw(store, keys.number, "HSET", keys.ids, idh, address[:10] + b"\0\0\0\x63")
    [told] = (await verify(store)).told
    await raw(store, keys.number, "HSET", keys.ids, idh, address)
    assert told.finding.repair is not None
    assert "changed" in (await told.finding.repair()).text
    assert await raw(store, keys.number, "HGET", keys.ids, idh) == address


# -- lanes and dead letters ------------------------------------------------------------------------------------


async def test_a_lane_that_waits_for_nobody_goes_on(ticker: Ticker) -> None:
    store = ticker.store
    keys = home(store, "a")
    await raw(store, keys.number, "HSET", keys.held, "a", os.urandom(16))
    await ticker.client.put("log:", "x", after="1s", lane="a")
    assert await ticker.advance(seconds=5) == []
    assert await found(store) == {"held-lane": 1}
    await repaired(store)
    assert [one.value() for one in await ticker.turn()] == ["x"], "the owner has read again"


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
    letters = {letter.id: letter for letter in await list_dead(store)}
    pairs = await raw(store, keys.number, "HGETALL", keys.dead)
    by_id = {letter: idh for idh, record in zip(pairs[::2], pairs[1::2], strict=True) for letter in letters
             if letter.encode() in record}  # fmt: skip
    await raw(store, keys.number, "ZREM", keys.dead_times, by_id["undated"])
    await raw(store, keys.number, "HDEL", keys.dead, by_id["empty"])
    assert await found(store) == {"dead-letter": 2}
    await repaired(store)
    left = {letter.id: letter for letter in await list_dead(store)}
    assert left == {name: letters[name] for name in ("kept", "undated")}
    died_ms = await raw(store, keys.number, "ZSCORE", keys.dead_times, by_id["undated"])
    assert float(died_ms) == letters["undated"].died_ms


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
async def test_counters_are_set_right_and_go_on_counting(ticker: Ticker, damage: tuple[Any, ...]) -> None:
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


async def test_unknown_keys_and_wrong_types_are_told_and_left_to_a_person(client: Client, store: Store) -> None:
    await client.put("log:", after="1h", lane="a")
    keys = home(store, "a")
    other = store.keys.partitions[(keys.number + 1) % len(store.keys)]
    place = Slice(1000, 1_800_000_000_000)
    planted = {
        f"{{{keys.tag}}}:what": keys,
        f"{{{keys.tag}}}:s:garbage": keys,
        f"{{{store.keys.namespace}:99.99}}:n": None,
        f"{{{store.keys.namespace}}}:who": None,
        other.dead: other,
        keys.entries(place.name): keys,
    }
    slots = {name: store.keys.slot if owner is None else owner.slot for name, owner in planted.items()}
    del planted[f"{{{store.keys.namespace}:99.99}}:n"]  # in a cluster it belongs to a slot of its own
    for name in planted:
        await store.run_one(slots[name], [("SET", name, "x")])
    assert await found(store) == {"unknown-key": 3, "wrong-type": 2}
    report = await verify(store, repair=True)
    assert report.left == 5
    assert all(one.repair is not None and not one.repair.done and one.repair.text for one in report.told)
    assert sorted(report.books) == [p for p in range(len(store.keys)) if p not in (keys.number, other.number)]
    for name in planted:
        await store.run_one(slots[name], [("DEL", name)])
    assert await found(store) == {}


async def test_a_partition_that_never_holds_still_is_not_called_proven(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        await client.put("log:", after=f"{number + 1}m", lane="a")
    for name in ("AT_ONCE", "MOST_AT_ONCE", "PAGE"):
        monkeypatch.setattr(verify_count, name, 2)
    report = await verify(store)
    assert report.found == {}, "in pages, while nothing moves"
    assert (report.total.pending, report.slices) == (8, 8)
    reading = asyncio.create_task(verify(store))
    while not reading.done():
        await client.put("log:", after="1h", lane="a")
    report = await reading
    assert report.found == {"not-proven": 1}
    assert "calmer" in report.told[0].finding.advice


async def test_a_busy_partition_is_proven_in_one_step_where_that_is_not_too_much(
    client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        await client.put("log:", after=f"{number + 1}m", lane="a")
    for name in ("AT_ONCE", "PAGE"):
        monkeypatch.setattr(verify_count, name, 2)
    reading = asyncio.create_task(verify(store))
    while not reading.done():
        await client.put("log:", after="8m", lane="a")
    assert (await reading).found == {}


def test_a_score_is_exact(store: Store) -> None:
    """The rule that tells a bad score from a good one compares doubles."""
    for r in (0, 1, (1 << 20) - 1):
        assert float(repr(score_of(1_800_000_000_000, r))) == score_of(1_800_000_000_000, r)
