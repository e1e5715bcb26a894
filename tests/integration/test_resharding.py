"""Slots that move while tasks are put, cancelled and fired: nothing is lost, doubled, or held up that need not be."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mainspring.client import Client
from mainspring.model.errors import Unavailable
from mainspring.store.keys import SLOTS, Keyspace, partition_of, slot_of, tags
from mainspring.store.sender import Sender
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import Cluster, Kind, Server, SlotMove, cluster, missing

from .traffic import PARTITIONS, QUICK, Scene, Traffic, scene, until

TAG = "{moves}"


@pytest.fixture(scope="module", params=["valkey", "redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    kind: Kind = request.param
    if reason := missing(kind):
        pytest.skip(reason)
    with cluster(3, 0, kind) as started:
        yield started


@pytest.fixture
async def store(nodes: Cluster) -> AsyncIterator[Store]:
    opened = await Store.open(nodes.url, namespace="still", partitions=PARTITIONS, options=QUICK)
    yield opened
    await opened.aclose()
    for server in nodes.masters:
        server.call("FLUSHALL")


def another(nodes: Cluster, slot: int) -> Server:
    """A master that does not hold the slot."""
    holder = nodes.owner_of(slot)
    return next(one for one in nodes.masters if one is not holder)


def begin(nodes: Cluster, slot: int) -> SlotMove:
    return nodes.begin_move(slot, another(nodes, slot))


# -- what a store does with a slot on its way ---------------------------------------------------------------


async def test_of_a_group_only_what_was_refused_is_repeated(nodes: Cluster, store: Store) -> None:
    """The second key has left, the first has not: a blind repeat of both would append to the first twice."""
    slot = slot_of(TAG[1:-1])
    await store.run_one(slot, [("RPUSH", f"{TAG}a", "old"), ("RPUSH", f"{TAG}b", "old")])
    move = begin(nodes, slot)
    move.take(f"{TAG}b")
    commands: list[Any] = [("RPUSH", f"{TAG}a", "new"), ("RPUSH", f"{TAG}b", "new"), ("LLEN", f"{TAG}a")]
    assert await store.run_one(slot, commands) == [2, 2, 2]
    assert await store.hurried(5).run_one(slot, [("LLEN", f"{TAG}b")]) == [2]
    while move.step(10):
        pass
    move.finish()
    assert await store.run_one(slot, [("LLEN", f"{TAG}a"), ("LLEN", f"{TAG}b")]) == [2, 2]


async def test_a_call_on_keys_that_have_all_left_is_asked_for_where_they_are(nodes: Cluster, store: Store) -> None:
    slot = slot_of(TAG[1:-1])
    names = [f"{TAG}a", f"{TAG}b"]
    await store.run_one(slot, [("SET", name, 1) for name in names])
    move = begin(nodes, slot)
    while move.step(10):
        pass
    transaction: list[Any] = [("MULTI",), *(("INCR", name) for name in names), ("EXEC",)]
    brisk = store.hurried(5)
    assert (await brisk.run_one(slot, transaction))[-1] == [2, 2]
    script = "return redis.call('INCR', KEYS[1]) + redis.call('INCR', KEYS[2])"
    assert await brisk.run_one(slot, [("EVAL", script, 2, *names)]) == [6]
    move.finish()
    assert await brisk.run_one(slot, [("MGET", *names)]) == [[b"3", b"3"]]


async def test_a_call_on_split_keys_waits_for_the_end_of_the_move(nodes: Cluster, store: Store) -> None:
    slot = slot_of(TAG[1:-1])
    names = [f"{TAG}a", f"{TAG}b"]
    await store.run_one(slot, [("SET", name, 1) for name in names])
    move = begin(nodes, slot)
    move.take(names[0])
    transaction: list[Any] = [("MULTI",), *(("INCR", name) for name in names), ("INCR", f"{TAG}new"), ("EXEC",)]
    waiting = asyncio.create_task(store.run_one(slot, transaction))
    with pytest.raises(Unavailable, match=f"slot {slot} is on its way") as caught:
        await store.hurried(5).run_one(slot, transaction)
    assert not caught.value.sent, "nothing was executed, so a put may be sent again without a mark"
    while move.step(10):
        pass
    move.finish()
    assert (await waiting)[-1] == [2, 2, 1], "once, and whole"


async def test_patience_ends_with_an_error_that_says_what_may_have_happened(nodes: Cluster, store: Store) -> None:
    slot = slot_of(TAG[1:-1])
    await store.run_one(slot, [("SET", f"{TAG}a", 1)])
    move = begin(nodes, slot)
    sender = Sender(store.links, store.scripts, patience_s=0.2)
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


async def test_puts_and_cancels_wait_for_a_slot_on_its_way(nodes: Cluster, store: Store) -> None:
    """An id that is put while its slot moves must not find itself there when the put is repeated."""
    client = Client.over(store)
    first = await client.put("log:", id="first", after="1h")
    slot = store.keys.partitions[partition_of("first", PARTITIONS)].slot
    move = begin(nodes, slot)
    move.step(1)
    names = [name for n in range(60) if partition_of(name := f"id{n}", PARTITIONS) == partition_of("first", PARTITIONS)]
    puts = [client.put("log:", id=name, after="1h", on_conflict="reject") for name in names]
    waiting = [asyncio.ensure_future(one) for one in (*puts, client.put_many([], durability="server"))]
    cancelled = asyncio.create_task(client.cancel(first.id))
    while move.step(1):
        await asyncio.sleep(0)
    move.finish()
    await asyncio.gather(*waiting)
    assert await cancelled == "cancelled"
    assert (await client.count()).pending == len(names)
    await balance(store)


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


async def test_a_slow_move_there_and_back_loses_and_doubles_nothing(nodes: Cluster) -> None:
    async with scene(nodes.url, lease_s=1.5) as made:
        partitions = made.store.keys.partitions
        others = set(range(1, PARTITIONS))
        everywhere, elsewhere = Traffic(made), Traffic(made, partitions=others)
        await everywhere.go_on(3)
        taken = made.engine.keeper.takeovers
        for _ in ("there", "back"):
            await move_slowly(made, begin(nodes, partitions[0].slot), elsewhere, others)
            await everywhere.go_on(3)  # it waited for the slot, and goes on
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


async def test_a_slot_that_moves_at_once_is_hardly_noticed(nodes: Cluster) -> None:
    if nodes.masters[0].kind != "valkey":
        pytest.skip("Redis 7.0 moves slots key by key only")
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


async def test_an_owner_is_woken_on_the_server_that_a_slot_moved_to(nodes: Cluster) -> None:
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
        vars(made.engine.lookahead)["woken"] = lambda number: (heard.append(number), woken(number))
        await made.client.put("log:", id=name)
        await until(lambda: heard == [0])
        await until(lambda: name in made.delivered)


# -- spread --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masters", [2, 3, 4, 5, 6])
def test_partitions_are_spread_evenly_over_the_masters(masters: int) -> None:
    """As `--cluster create` deals the slots out, and as this project's test clusters do."""
    each = SLOTS / masters
    rounded = [round(each * n) for n in range(masters)]
    for starts in (rounded, [SLOTS * n // masters for n in range(masters)]):
        for namespace in ("main", "shop", *(f"ns{n}" for n in range(40))):
            slots = [keys.slot for keys in Keyspace(namespace, 32).partitions]
            assert len(set(slots)) == 32 == len(tags(namespace, 32))
            held = Counter(sum(slot >= start for start in starts) for slot in slots)
            assert max(held.values()) - min(held.values()) <= 1, (namespace, held)
