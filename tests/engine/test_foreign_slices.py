"""Members of the sorted set of slices that are no slices: they stop nothing, and are reported once."""

import logging

import pytest

from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.ticker import Ticker

NAMES = (
    b"garbage",
    b"1000.xyz",
    b"7.7000",
    b"1000.1500",
    b"1000.-1000",
    b"0.0",
    b"1000." + b"9" * 5_000,
    b"\xff\xfe",
    b"1000.+5000",
)


async def plant(store: Store, score: float | str, *names: bytes) -> None:
    for keys in store.keys.partitions:
        await store.run_one(keys.slot, [("ZADD", keys.slices, score, name) for name in names])


async def clear(store: Store, *names: bytes) -> None:
    for keys in store.keys.partitions:
        await store.run_one(keys.slot, [("ZREM", keys.slices, *names)])


@pytest.mark.parametrize("score", [5.5, "now", "inf", "-inf"])
async def test_tasks_fire_and_are_listed_beside_strange_names(
    ticker: Ticker, store: Store, score: float | str, caplog: pytest.LogCaptureFixture
) -> None:
    await plant(store, ticker.clock.now_ms() / 1000 + 0.5 if score == "now" else score, *NAMES)
    tasks = [Task("log:", n, id=f"t{n}", after="1s", lane=None if n % 2 else f"l{n % 5}") for n in range(20)]
    with caplog.at_level(logging.ERROR, "mainspring.store"):
        await ticker.client.put_many(tasks)
        assert len((await ticker.client.list()).tasks) == 20
        assert (await ticker.client.count(due_before=ticker.clock.now_ms() + 3_600_000)).pending == 20
        for _ in range(5):
            await ticker.advance(seconds=1)
    told = [one for one in caplog.messages if "garbage" in one]
    assert len(told) == len(store.keys.partitions), "once for each partition"
    assert len(ticker.deliveries) == 20
    await clear(store, *NAMES)


async def test_a_strange_name_beyond_the_horizon_hides_no_slice_behind_it(ticker: Ticker, store: Store) -> None:
    await plant(store, ticker.clock.now_ms() / 1000 + 20, b"garbage")
    await ticker.client.put("log:", "later", after="40s")
    await ticker.turn()
    assert [one.value() for one in await ticker.advance(seconds=60)] == ["later"]
    await clear(store, b"garbage")
