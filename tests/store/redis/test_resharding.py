"""Slots that move while tasks are put, cancelled and fired: nothing is lost, doubled, or held up that need not be."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.errors import Unavailable
from mainspring.model.task import Task
from mainspring.store.keys import SLOTS, Keyspace, Slice, partition_of, slot_of
from mainspring.store.redis.sender import Sender
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import Kind, Server, ServerCluster, SlotMove, cluster
from tests.support.owner import HandOwner
from tests.support.traffic import PARTITIONS, QUICK, Scene, Traffic, scene, until

TAG = "{moves}"


@pytest.fixture(scope="module")
def nodes(kind: Kind) -> Iterator[ServerCluster]:
    with cluster(3, 0, kind) as started:
        yield started


@pytest.fixture
async def store(nodes: ServerCluster) -> AsyncIterator[Store]:
    opened = await Store.open(nodes.url, namespace="still", partitions=PARTITIONS, options=QUICK)
    yield opened
    await opened.aclose()
    for server in nodes.masters:
        server.call("FLUSHALL")


def another(nodes: ServerCluster, slot: int) -> Server:
    """A master that does not hold the slot."""
    holder = nodes.owner_of(slot)
    return next(one for one in nodes.masters if one is not holder)


def begin(nodes: ServerCluster, slot: int) -> SlotMove:
    return nodes.begin_move(slot, another(nodes, slot))


# -- what a store does with a slot on its way ---------------------------------------------------------------


async def test_only_the_refused_commands_of_a_group_are_repeated(nodes: ServerCluster, store: Store) -> None:
    """The second key has left, the first has not: a blind repeat of both would append to the first twice."""
    slot = slot_of(TAG[1:-1])
    await store.run_one(slot, [("RPUSH", f"{TAG}a", "old"), ("RPUSH", f"{TAG}b", "old")])
    move = begin(nodes, slot)
    move.take(f"{TAG}b")
    commands: list[Any] = [("RPUSH", f"{TAG}a", "new"), ("RPUSH", f"{TAG}b", "new"), ("LLEN", f"{TAG}a")]
    assert await store.run_one(slot, commands) == [2, 2, 2]
    assert await store.urgent(5).run_one(slot, [("LLEN", f"{TAG}b")]) == [2]
    while move.step(10):
        pass
    move.finish()
    assert await store.run_one(slot, [("LLEN", f"{TAG}a"), ("LLEN", f"{TAG}b")]) == [2, 2]


async def test_a_call_on_keys_that_have_all_left_is_asked_for_where_they_are(
    nodes: ServerCluster, store: Store
) -> None:
    slot = slot_of(TAG[1:-1])
    names = [f"{TAG}a", f"{TAG}b"]
    await store.run_one(slot, [("SET", name, 1) for name in names])
    move = begin(nodes, slot)
    while move.step(10):
        pass
    transaction: list[Any] = [("MULTI",), *(("INCR", name) for name in names), ("EXEC",)]
    brisk = store.urgent(5)
    assert (await brisk.run_one(slot, transaction))[-1] == [2, 2]
    script = "return redis.call('INCR', KEYS[1]) + redis.call('INCR', KEYS[2])"
    assert await brisk.run_one(slot, [("EVAL", script, 2, *names)]) == [6]
    move.finish()
    assert await brisk.run_one(slot, [("MGET", *names)]) == [[b"3", b"3"]]


async def test_a_call_on_split_keys_waits_for_the_end_of_the_move(nodes: ServerCluster, store: Store) -> None:
    slot = slot_of(TAG[1:-1])
    names = [f"{TAG}a", f"{TAG}b"]
    await store.run_one(slot, [("SET", name, 1) for name in names])
    move = begin(nodes, slot)
    move.take(names[0])
    transaction: list[Any] = [("MULTI",), *(("INCR", name) for name in names), ("INCR", f"{TAG}new"), ("EXEC",)]
    waiting = asyncio.create_task(store.run_one(slot, transaction))
    with pytest.raises(Unavailable, match=f"slot {slot} is moving to another server") as caught:
        await store.urgent(5).run_one(slot, transaction)
    assert not caught.value.sent, "nothing was executed, so a put may be sent again without a mark"
    while move.step(10):
        pass
    move.finish()
    assert (await waiting)[-1] == [2, 2, 1], "once, and whole"


async def test_patience_ends_with_an_error_that_says_what_may_have_happened(nodes: ServerCluster, store: Store) -> None:
    slot = slot_of(TAG[1:-1])
    await store.run_one(slot, [("SET", f"{TAG}a", 1)])
    move = begin(nodes, slot)
    sender = Sender(store.servers, store.scripts, retry_for_s=0.2)
    both: list[Any] = [("INCR", f"{TAG}a"), ("MSETNX", f"{TAG}a", 1, f"{TAG}new", 1)]
    [refused, half] = await sender.run([(slot, both[1:]), (slot, both)])
    assert isinstance(refused, Unavailable)
    assert not refused.sent
    assert isinstance(half, Unavailable)
    assert half.sent, "its first command was executed"
    while move.step(10):
        pass
    move.finish()
    assert await store.run_one(slot, [("GET", f"{TAG}a")]) == [b"2"], "and only once"


async def test_puts_and_cancels_wait_for_a_slot_on_its_way(nodes: ServerCluster, store: Store) -> None:
    """An id that is put while its slot moves must not find itself there when the put is repeated."""
    client = Client.over(store)
    first = await client.put("log:", id="first", after="1h")
    slot = store.keys.partitions[partition_of("first", PARTITIONS)].slot
    move = begin(nodes, slot)
    move.step(1)
    names = [name for n in range(60) if partition_of(name := f"id{n}", PARTITIONS) == partition_of("first", PARTITIONS)]
    puts = [client.put("log:", id=name, after="1h", on_conflict="reject") for name in names]
    waiting = [asyncio.ensure_future(one) for one in puts]
    cancelled = asyncio.create_task(client.cancel(first.id))
    while await asyncio.to_thread(move.step, 1):
        pass
    move.finish()
    await asyncio.gather(*waiting)
    assert await cancelled == "cancelled"
    assert (await client.count()).pending == len(names)
    await balance(store)


async def test_a_put_recreates_no_key_on_the_server_that_its_slot_has_left(nodes: ServerCluster, store: Store) -> None:
    """The key would be there twice, and the one that arrives last would take the other's tasks with it."""
    client = Client.over(store)
    await client.put_many(Task("log:", after="1h") for _ in range(100))
    keys = store.keys.partitions[0]
    move = begin(nodes, keys.slot)
    move.take(keys.slices)
    before = move.left()
    lane = next(lane for n in range(100) if partition_of(lane := f"lane{n}", PARTITIONS) == 0)
    # Due at once, so that the put wakes the owner as well.
    waiting = asyncio.create_task(client.put_many([Task("log:", lane=lane), Task("log:", lane=lane, after="1h")]))
    with pytest.raises(Unavailable, match="moving to another server"):
        await Client.over(store.urgent(5)).put("log:", lane=lane)
    assert move.left() == before
    while await asyncio.to_thread(move.step, 5):
        pass
    move.finish()
    await waiting
    assert (await balance(store)).pending == 102


async def test_a_bulk_cancel_keeps_the_list_of_a_slot_on_its_way(nodes: ServerCluster) -> None:
    """A script that deletes a list to write it again cannot do that there: its second half is refused."""
    clock = ManualClock()
    store = await Store.open(nodes.url, namespace="bulk", partitions=1, clock=clock)
    client = Client.over(store)
    summary = await client.put_many([Task("log:", id=f"t{n}", after="1s") for n in range(64)], handles=True)
    assert summary.handles is not None
    place = Slice.at(summary.handles[0].due_ms, 1000)
    clock.advance(seconds=1)
    owner = await HandOwner.acquire(store)
    await owner.begin(place, [0])
    await client.cancel("t1")  # now every key that a cancel names is there
    move = begin(nodes, store.keys.partitions[0].slot)
    keys = store.keys.partitions[0]
    # Many, but not nearly all: those would be a call of another kind, which waits.
    assert await client.cancel_many([f"t{n}" for n in range(2, 64, 2)]) == ["cancelled"] * 31
    assert move.left() >= {key.encode() for key in (*keys.slice_keys(place.name)[:2], keys.ids, keys.n)}
    while move.step(10):
        pass
    move.finish()
    books = await balance(store)
    assert (books.cancelled, books.pending, books.fired) == (32, 31, 1)
    await store.aclose()
    nodes.owner_of(keys.slot).call("FLUSHALL")


# -- under load -------------------------------------------------------------------------------------------


async def move_slowly(made: Scene, move: SlotMove, elsewhere: Traffic, others: set[int]) -> None:
    """Key by key, for longer than a lease; between the steps the other partitions must be put to and fire."""
    began = time.monotonic()
    steps = 0
    while steps < 4 or time.monotonic() < began + 1.5 * made.engine.options.lease_s:
        await asyncio.to_thread(move.step, 2)
        fired = made.delivered_from(others)
        await elsewhere.go_on(2)
        await until(lambda: made.delivered_from(others) > fired)  # noqa: B023
        steps += 1
    while await asyncio.to_thread(move.step, 50):
        pass
    await asyncio.to_thread(move.finish)


@pytest.mark.parametrize("kind", ["valkey", pytest.param("redis", marks=pytest.mark.slow)], indirect=True)
async def test_a_slow_move_there_and_back_loses_and_doubles_nothing(nodes: ServerCluster) -> None:
    # Each move outlasts a lease, and no hiccup of a loaded machine does.
    async with scene(nodes.url, lease_s=5) as made:
        partitions = made.store.keys.partitions
        others = set(range(1, PARTITIONS))
        everywhere, elsewhere = Traffic(made), Traffic(made, partitions=others)
        await everywhere.go_on(3)
        taken = made.engine.keeper.takeovers
        for _ in ("there", "back"):
            await move_slowly(made, begin(nodes, partitions[0].slot), elsewhere, others)
            await everywhere.go_on(3)  # it waited for the slot, and continues
        for number in (1, 2, 3):
            await asyncio.to_thread(nodes.move_slot, partitions[number].slot, another(nodes, partitions[number].slot))
            await everywhere.go_on(2)
        await everywhere.stop()
        await elsewhere.stop()
        await made.all_delivered()
        assert made.engine.keeper.takeovers == taken, "leases go on while a slot is on its way"
        assert not made.unsure
        # No fault was noted: a resharding is none, so even a task that is delivered twice is an error.
        assert made.violations() == []


@pytest.mark.parametrize("kind", ["valkey"], indirect=True)  # Redis 7.0 moves slots key by key only
async def test_a_slot_that_moves_at_once_is_hardly_noticed(nodes: ServerCluster) -> None:
    async with scene(nodes.url) as made:
        traffic = Traffic(made)
        await traffic.go_on(3)
        for number in (0, 1, 0, 1):
            slot = made.store.keys.partitions[number].slot
            await asyncio.to_thread(nodes.move_at_once, slot, another(nodes, slot))
            await traffic.go_on(2)
        await traffic.stop()
        await made.all_delivered()
        assert not made.unsure
        assert made.violations() == []


async def test_an_owner_is_woken_on_the_server_that_a_slot_moved_to(nodes: ServerCluster) -> None:
    """Without the subscription there a near task would wait for the next poll: polls are made rare here."""
    async with scene(nodes.url) as made:
        slot = made.store.keys.partitions[0].slot
        name = next(name for n in range(1000) if partition_of(name := f"wake{n}", PARTITIONS) == 0)
        await asyncio.to_thread(nodes.move_slot, slot, another(nodes, slot))
        wake = made.store.keys.partitions[0].wake
        await until(lambda: nodes.owner_of(slot).call("PUBSUB", "SHARDNUMSUB", wake)[1] == 1)
        await until(lambda: made.engine.healthy)
        heard: list[int] = []
        woken = made.engine.lookahead.woken

        def hear(number: int) -> None:
            heard.append(number)
            woken(number)

        vars(made.engine.lookahead)["woken"] = hear
        await made.client.put("log:", id=name)
        await until(lambda: bool(heard))  # twice where that server had to be sent the script first
        assert set(heard) == {0}
        await until(lambda: name in made.delivered)


# -- spread --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masters", [2, 3, 4, 5, 6])
def test_partitions_are_spread_evenly_over_the_masters(masters: int) -> None:
    """As `--cluster create` and the test clusters of this project distribute the slots."""
    rounded = [round(SLOTS / masters * n) for n in range(masters)]
    for starts in (rounded, [SLOTS * n // masters for n in range(masters)]):
        assert max(apart(name, starts) for name in ("main", *(f"ns{n}" for n in range(40)))) <= 1


def apart(namespace: str, starts: list[int]) -> int:
    """By how many partitions the masters differ, if each holds the slots from its start on."""
    slots = [keys.slot for keys in Keyspace(namespace, 32).partitions]
    assert len(set(slots)) == 32
    held = Counter(sum(slot >= start for start in starts) for slot in slots)
    return max(held.values()) - min(held.values())
