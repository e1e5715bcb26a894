"""Verify: damaged slices and ids are set right, and no task is lost on the way."""

import asyncio
import contextlib
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import Engine
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Delivery, Outcome, Retry
from mainspring.store.keys import Slice
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server, ServerCluster
from mainspring.testing.ticker import RecordingSink, Ticker
from tests.support.owner import address_of
from tests.support.verifying import found, home, raw, repaired

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


async def test_a_running_owner_is_notified_of_entries_that_were_put_back(
    fleet: Server | ServerCluster, namespace: str, store: Store
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
        assert await asyncio.wait_for(delivered.get(), 60) == "x"
        assert await engine.stop()
    assert await found(store) == {}


async def test_a_task_finished_before_it_was_orphaned_does_not_fire_again(ticker: Ticker) -> None:
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
    assert "accepted tasks that are nowhere: 1" in report.reported[-1].finding.problem, "what is lost is said"
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
    for name in (b"garbage", b"1000.17", b"999.1800000000000", b"01000.1800000000000", b"\xff.1", b"1000.-1000"):
        await raw(store, keys.number, "ZADD", keys.slices, 1_800_000_000, name)
    assert await found(store) == {"bad-slice": 6}
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
    [told] = (await verify(store)).reported
    await raw(store, keys.number, "HSET", keys.ids, idh, address)
    assert told.finding.repair is not None
    assert "changed" in (await told.finding.repair()).text
    assert await raw(store, keys.number, "HGET", keys.ids, idh) == address
