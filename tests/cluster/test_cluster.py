"""Several nodes in one process share the work: plan, hand-over, takeover. Killed processes are tests/chaos's."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import count

import msgspec
import pytest

from mainspring.client.client import Client
from mainspring.cluster import Membership
from mainspring.config.config import Config
from mainspring.model.clock import steady_s
from mainspring.model.delivery import DONE, Delivery, Outcome
from mainspring.model.errors import ConfigError
from mainspring.node.node import Node
from mainspring.store import members
from mainspring.store.keys import partition_of
from mainspring.store.members import About, Identity
from mainspring.store.store import Store
from mainspring.testing.faults import bad_road, calls
from mainspring.testing.servers import Server

PARTITIONS = 8
LONG_S = 10.0
"""A lease that no hiccup of a loaded machine can use up: in these tests nothing is delivered twice."""
CALM_S = 5.0
"""A lease that can be seen to last, and then to end."""
SHORT_S = 1.0


class Basket:
    """Keeps what all nodes deliver; `gate` holds deliveries up."""

    def __init__(self) -> None:
        self.ids: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.under_way: set[str] = set()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.under_way |= {one.id for one in batch}
        await self.gate.wait()
        self.ids.update(one.id for one in batch)
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Shared by all nodes."""


class Site:
    """A server and the nodes on it."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.basket = Basket()
        self._stack = stack

    async def node(self, *, lease_s: float = LONG_S, node_id: str | None = None, **settings: object) -> Node:
        settings = {"partitions": PARTITIONS, "lease_s": lease_s, "node_id": node_id} | settings
        node = Node(Config(redis_url=self.url, **settings), {"log": self.basket})  # type: ignore[arg-type]
        await node.start()
        self._stack.push_async_callback(node.stop)
        return node

    async def store(self) -> Store:
        store = await Store.open(self.url, partitions=PARTITIONS)
        self._stack.push_async_callback(store.aclose)
        return store

    async def client(self) -> Client:
        return await self._stack.enter_async_context(Client(self.url, partitions=PARTITIONS))


@pytest.fixture
async def site(server: Server) -> AsyncIterator[Site]:
    server.call("FLUSHALL")
    async with AsyncExitStack() as stack:
        yield Site(server.url, stack)


def owned(*nodes: Node) -> list[int]:
    return [len(node.engine.owned) if node.engine is not None else 0 for node in nodes]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the nodes tell us nothing: there is only polling
            await asyncio.sleep(0.01)


async def abandon(node: Node) -> None:
    """As if the process were killed: it writes nothing more."""
    assert node.engine is not None
    assert node.seat is not None
    await node.seat.loop.stop()
    for loop in node.engine.loops:
        await loop.stop()
    node.engine.owned.clear()
    node.seat.joined = False


class Load:
    """Puts tasks one after the other until it is stopped."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.ids: list[str] = []
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        for number in count():
            if self._stop.is_set():
                return
            id = f"task-{number}"
            await self._client.put("log:", number, after=f"{random.randint(0, 300)}ms", id=id)
            self.ids.append(id)

    async def stop(self) -> list[str]:
        self._stop.set()
        await self._task
        return self.ids


async def test_nodes_share_the_partitions_evenly_and_each_task_is_delivered_once_while_they_come_and_go(
    site: Site,
) -> None:
    first = await site.node()
    load = Load(await site.client())
    second = await site.node()
    await until(lambda: owned(first, second) == [4, 4])
    third = await site.node()
    await until(lambda: sorted(owned(first, second, third)) == [2, 3, 3])
    await first.stop()  # the leader
    await until(lambda: owned(second, third) == [4, 4])
    await second.stop()
    await until(lambda: owned(third) == [8])
    ids = await load.stop()
    await until(lambda: len(site.basket.ids) == len(ids))
    assert Counter(ids) == site.basket.ids


async def test_weights_come_from_concurrency(site: Site) -> None:
    large = await site.node(concurrency=3_000)
    small = await site.node(concurrency=1_000)
    await until(lambda: owned(large, small) == [6, 2])


async def test_begun_tasks_stay_and_others_move(site: Site) -> None:
    first, client = await site.node(), await site.client()
    site.basket.gate.clear()
    for number in range(40):
        await client.put("log:", number, after="0s", id=f"begun-{number}")
    await until(lambda: len(site.basket.under_way) == 40)
    second = await site.node()
    assert second.engine is not None
    await until(lambda: bool(second.engine is not None and second.engine.keeper.waiting))
    for number in range(40):
        await client.put("log:", number, after="0s", id=f"later-{number}")
    site.basket.gate.set()
    await until(lambda: owned(first, second) == [4, 4])
    await until(lambda: len(site.basket.ids) == 80)
    assert set(site.basket.ids.values()) == {1}, "a partition that moved repeated what was in flight"


async def test_a_slow_delivery_does_not_hold_up_what_comes_due_in_its_partition(site: Site) -> None:
    first, client = await site.node(lease_s=CALM_S), await site.client()
    site.basket.gate.clear()
    for number in range(40):
        await client.put("log:", number, after="0s", id=f"slow-{number}")
    await until(lambda: len(site.basket.under_way) == 40)
    second = await site.node(lease_s=CALM_S)
    await until(lambda: bool(second.engine is not None and second.engine.keeper.waiting))
    for number in range(40):
        await client.put("log:", number, after="0s", id=f"quick-{number}")
    await until(lambda: len(site.basket.under_way) == 80)
    assert not site.basket.ids, "the gate is still closed"
    assert first.engine is not None
    site.basket.gate.set()
    await until(lambda: len(site.basket.ids) == 80)


async def test_a_dead_nodes_partitions_go_to_the_others_after_its_lease(site: Site) -> None:
    nodes = [await site.node(lease_s=SHORT_S) for _ in range(3)]
    await until(lambda: sorted(owned(*nodes)) == [2, 3, 3])
    client = await site.client()
    handles = [await client.put("log:", n, after="1500ms", id=f"t{n}") for n in range(50)]
    await abandon(nodes[0])  # the leader, before any of it is due
    await until(lambda: sum(owned(*nodes[1:])) == PARTITIONS)
    await until(lambda: len(site.basket.ids) == len(handles))


async def test_a_second_live_node_with_a_configured_id_is_refused_and_a_restarted_one_is_not(site: Site) -> None:
    first = await site.node(lease_s=CALM_S, node_id="pod-1")
    with pytest.raises(ConfigError, match=r"node id 'pod-1' is in use by process \d+ on .*--node-id"):
        await site.node(lease_s=CALM_S, node_id="pod-1")
    assert first.healthy
    await abandon(first)
    again = await site.node(lease_s=CALM_S, node_id="pod-1")
    await until(lambda: owned(again) == [PARTITIONS])


async def test_any_node_takes_a_partition_that_had_no_owner_for_two_leases(site: Site) -> None:
    store, ghost = await site.store(), Identity("ghost", "n", 60_000)
    node = await site.node(lease_s=SHORT_S)
    await until(lambda: owned(node) == [PARTITIONS])
    # A member that is planned for half of the partitions and asks for them, but cannot acquire any.
    without = About(concurrency=node.config.concurrency)
    wanting = About(concurrency=node.config.concurrency, waiting=tuple(range(PARTITIONS)))
    await members.join(store, ghost, wanting)
    await until(lambda: owned(node) == [PARTITIONS // 2])
    await members.beat(store, ghost, without)
    await until(lambda: owned(node) == [PARTITIONS])
    client = await site.client()
    for number in range(40):
        await client.put("log:", number, after="0s")
    await until(lambda: len(site.basket.ids) == 40)
    # It is well again: it gets what it waits for.
    await members.beat(store, ghost, wanting)
    await until(lambda: owned(node) == [PARTITIONS // 2])


async def test_a_leader_that_is_cut_off_steps_down_before_its_lease_is_over(server: Server, site: Site) -> None:
    store = await site.store()
    alone = Membership(store, "a", lease_s=SHORT_S, describe=About, follow=lambda *_: None)
    await alone.enter()
    await alone.step()
    assert alone.leads
    # On the server the lease counts from when the beat arrived, here from when it was sent: never later.
    [lease_end] = await store.run_one(store.keys.slot, [("ZSCORE", store.keys.beats, "a")])
    steps_down_ms = (alone._leads_until - steady_s() + time.time()) * 1000
    assert steps_down_ms <= float(lease_end) + 1
    server.pause()
    try:
        await until(lambda: not alone.leads)
    finally:
        server.resume()


async def test_two_leaders_at_once_do_no_harm(site: Site) -> None:
    nodes = [await site.node() for _ in range(3)]
    store, dice = await site.store(), random.Random(7)
    await until(lambda: sorted(owned(*nodes)) == [2, 3, 3])
    load = Load(await site.client())
    names = [node.seat.membership.id for node in nodes if node.seat is not None]
    for _ in range(30):
        # Every node believes to lead, and a plan appears that none of them wrote.
        for node in nodes:
            assert node.seat is not None
            node.seat.membership._leads_until = float("inf")
        plan = msgspec.json.encode(_random_plan(names, dice))
        await store.run_one(
            store.keys.slot,
            [("HINCRBY", store.keys.plan, "version", 1), ("HSET", store.keys.plan, "owners", plan)],
        )
        leader = nodes[dice.randrange(3)].seat.membership._who  # type: ignore[union-attr]
        await store.run_one(store.keys.slot, [("HSET", store.keys.leader, "id", leader.id, "nonce", leader.nonce)])
        await members.announce(store)
        seen = len(load.ids)
        await until(lambda seen=seen: len(load.ids) >= seen + 20)  # type: ignore[misc]
    ids = await load.stop()
    await until(lambda: len(site.basket.ids) == len(ids))
    assert Counter(ids) == site.basket.ids
    await until(lambda: sorted(owned(*nodes)) == [2, 3, 3])


def _random_plan(names: list[str], dice: random.Random) -> dict[str, list[int]]:
    plan: dict[str, list[int]] = {name: [] for name in names}
    for number in range(PARTITIONS):
        plan[dice.choice(names)].append(number)
    return plan


async def test_a_stop_hands_over_as_it_drains(site: Site) -> None:
    first, second = await site.node(), await site.node()
    await until(lambda: owned(first, second) == [4, 4])
    client = await site.client()
    site.basket.gate.clear()
    await client.put("log:", 1, after="0s", id="in-flight")
    await until(lambda: site.basket.under_way == {"in-flight"})
    stopper, other = (first, second) if first.engine and first.engine.deliveries.in_flight else (second, first)
    stopping = asyncio.create_task(stopper.stop())
    await until(lambda: owned(other) == [PARTITIONS - 1])
    assert not stopping.done(), "one delivery is still under way"
    site.basket.gate.set()
    await stopping
    await until(lambda: owned(other) == [PARTITIONS])
    assert site.basket.ids == {"in-flight": 1}


async def test_a_reply_lost_at_the_stop_gives_nothing_up(site: Site) -> None:
    node, client = await site.node(), await site.client()
    site.basket.gate.clear()
    await client.put("log:", 1, after="0s", id="in-flight")
    await until(lambda: site.basket.under_way == {"in-flight"})
    assert node.engine is not None
    engine = node.engine
    with bad_road(engine.store) as road:
        stopping = asyncio.create_task(node.stop())
        await until(lambda: engine.owned == {} or list(engine.owned) == [partition_of("in-flight", PARTITIONS)])
        road.next("lose reply", only=calls("tick"))
        site.basket.gate.set()
        await stopping
    again = await site.node()
    await client.put("log:", 2, after="0s", id="after")
    await until(lambda: "after" in site.basket.ids)
    assert site.basket.ids == {"in-flight": 1, "after": 1}, "what was finished before the stop was delivered again"
    assert again.healthy
