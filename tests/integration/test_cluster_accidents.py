"""Accidents around membership and hand-over: each was possible once, and is named after what went wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from mainspring.cluster.membership import Membership
from mainspring.cluster.seat import Seat
from mainspring.config import Config
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.engine.keeper import Keeper
from mainspring.engine.partition import Partition
from mainspring.model.clock import steady_s
from mainspring.model.delivery import Delivery
from mainspring.model.errors import StoreError
from mainspring.model.outcome import DONE, Outcome
from mainspring.node import Node
from mainspring.store import members, ownership
from mainspring.store.members import About, Identity
from mainspring.store.store import Store
from mainspring.store.wire import Command
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.servers import Server, standalone

PARTITIONS = 8
ALL = set(range(PARTITIONS))
LONG_S = 60.0
"""No lease of this length ends during a test: what is free was given back."""
SHORT_S = 1.0


class Gated:
    """A sink that answers when its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.under_way: set[str] = set()
        self.delivered: list[str] = []

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.under_way |= {one.id for one in batch}
        await self.gate.wait()
        self.delivered += [one.id for one in batch]
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Shared by all nodes."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with standalone() as started:
        yield started


@pytest.fixture
async def stores(server: Server) -> AsyncIterator[Callable[[], Any]]:
    """Opens stores on a clean server."""
    server.call("FLUSHALL")
    async with AsyncExitStack() as stack:

        async def opened() -> Store:
            store = await Store.open(server.url, partitions=PARTITIONS)
            stack.push_async_callback(store.aclose)
            return store

        yield opened


@pytest.fixture
async def store(stores: Callable[[], Any]) -> Store:
    opened: Store = await stores()
    return opened


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not condition():  # noqa: ASYNC110  # the nodes tell us nothing: there is only polling
            await asyncio.sleep(0.01)


async def holders(store: Store) -> set[int]:
    """Partitions that somebody holds."""
    held = await members.holdings(store, await store.sample_clock())
    return {number for number, one in enumerate(held) if one.owner}


def keeper_of(store: Store, name: str = "k", changed: Callable[[], None] = lambda: None) -> Keeper:
    return Keeper(store, {}, node=name, lease_s=LONG_S, changed=changed)


@asynccontextmanager
async def slow_answers(store: Store, script: str) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Calls of this script are executed at once; their answers arrive when the second event is set."""
    [link] = store.links.all()
    pipeline, asked, answer = link.pipeline, asyncio.Event(), asyncio.Event()

    async def send(commands: Sequence[Command], *, timeout_s: float | None = None) -> list[Any]:
        replies = await pipeline(commands, timeout_s=timeout_s)
        if calls(script)(commands):
            asked.set()
            await answer.wait()
        return replies

    vars(link)["pipeline"] = send
    try:
        yield asked, answer
    finally:
        answer.set()
        del vars(link)["pipeline"]


# -- a stop that meets an acquire ---------------------------------------------------------------------------


async def test_what_was_granted_while_the_node_stopped_is_given_back(store: Store) -> None:
    engine = Engine(store, {"log": Gated()}, EngineOptions(lease_s=LONG_S))
    engine.follow(set(), set())
    await engine.start()
    async with slow_answers(store, "acquire") as (asked, answer):
        engine.follow(ALL, set())
        await asked.wait()
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        answer.set()
        assert await stopping
    assert await holders(store) == set(), "locked for a lease by a node that is gone"


async def test_what_was_granted_after_the_stop_began_does_not_wait_for_a_slow_delivery(store: Store) -> None:
    sink = Gated()
    engine = Engine(store, {"log": sink}, EngineOptions(lease_s=LONG_S))
    engine.follow({0}, set())
    await engine.start()
    from mainspring.client import Client

    client = Client.over(store)
    for number in range(64):
        await client.put("log:", number, after="0s", id=f"t{number}")
    await until(lambda: bool(sink.under_way))
    async with slow_answers(store, "acquire") as (asked, answer):
        engine.follow(ALL, set())
        await asked.wait()
        stopping = asyncio.create_task(engine.stop())
        await until(lambda: engine.keeper._leaving)
        answer.set()
        async with asyncio.timeout(20):
            while await holders(store) != {0}:
                await asyncio.sleep(0.01)
    assert not stopping.done()
    sink.gate.set()
    await stopping


# -- keeper --------------------------------------------------------------------------------------------------


async def test_a_node_that_cannot_reach_a_partition_does_not_ask_others_to_give_it_up(store: Store) -> None:
    owner, cut_off = keeper_of(store, "owner"), keeper_of(store, "cut off")
    await owner.step()
    await cut_off.step()
    assert cut_off.waiting == ALL
    with bad_road(store) as road:
        road.next("never sent", only=calls("acquire"))
        with pytest.raises(StoreError):
            await cut_off.step()
    assert cut_off.waiting == set(), "whoever takes them would be asked at once, and nobody would fire"


async def test_a_server_that_is_away_does_not_keep_spare_partitions_of_others_from_being_taken(store: Store) -> None:
    keeper = keeper_of(store)
    keeper.follow({0}, set())
    keeper._spare_at = 0.0
    with bad_road(store) as road:
        road.next("never sent", only=calls("acquire"))  # of partition 0
        with pytest.raises(StoreError):
            await keeper.step()
    assert set(keeper._owned) == ALL - {0}


async def test_spare_partitions_are_left_to_their_planned_owners_by_a_node_that_waited_for_its_id(
    store: Store,
) -> None:
    keeper = keeper_of(store)
    keeper._spare_at = steady_s() - 1  # the start took longer than a lease
    keeper.follow({0}, set())
    await keeper.step()
    assert set(keeper._owned) == {0}


async def test_a_hand_over_whose_call_to_the_others_fails_goes_on(store: Store) -> None:
    keeper, other = keeper_of(store), keeper_of(store, "other")
    other.follow({1}, set())
    await other.step()
    keeper.follow({0}, set())
    await keeper.step()
    await other.release()
    keeper.follow({1}, {0})
    with bad_road(store) as road:
        road.next("never sent", only=uses("SPUBLISH"))
        await keeper.step()
    assert set(keeper._owned) == {1}


@pytest.mark.parametrize("fault", ["never sent", "lose reply"])
async def test_a_release_that_got_lost_is_repeated(store: Store, fault: Any) -> None:
    keeper = keeper_of(store)
    await keeper.step()
    keeper.follow(ALL - {3}, {3})
    with bad_road(store) as road:
        road.next(fault, only=calls("release"))
        await keeper.step()
    await keeper.step()
    assert await holders(store) == ALL - {3}


async def test_firing_goes_on_at_once_where_nobody_waits_any_more(store: Store) -> None:
    told: list[int] = []
    keeper = keeper_of(store, changed=lambda: told.append(1))
    await keeper.step()
    keeper._owned[3].closing_since = steady_s()
    told.clear()
    keeper.follow(ALL, set())
    assert not keeper._owned[3].closing
    assert told, "the dispatcher sleeps, for nothing could begin"


async def test_a_partition_that_is_never_idle_is_closed_less_and_less_often(store: Store) -> None:
    keeper = keeper_of(store)
    await keeper.step()
    keeper.follow(ALL - {0}, {0})
    partition, pauses = keeper._owned[0], []
    partition.lost = 1  # never drained
    for _ in range(4):
        partition.open_until = 0.0
        await keeper._hand_over()
        partition.closing_since -= LONG_S + 1
        await keeper._hand_over()
        assert not partition.closing
        pauses.append(partition.open_until - steady_s())
    assert all(later > 1.5 * earlier for earlier, later in zip(pauses, pauses[1:], strict=False))


# -- membership -------------------------------------------------------------------------------------------------


def membership_of(store: Store, name: str, follow: Any = lambda *_: None) -> Membership:
    return Membership(store, name, lease_s=LONG_S, describe=About, follow=follow)


@pytest.mark.parametrize("fault", ["never sent", "lose reply"])
@pytest.mark.parametrize("what", [calls("join"), uses("SPUBLISH"), calls("beat")])
async def test_a_start_that_failed_half_way_leaves_no_member_behind(store: Store, fault: Any, what: Any) -> None:
    await membership_of(store, "loads the scripts").enter()
    await members.beat(store, Identity("loads the scripts", "", 1), About())
    seat = Seat(store, membership_of(store, "unlucky"), lambda: None)
    with bad_road(store) as road:
        road.next(fault, only=what)
        try:
            await seat.start()
        except StoreError:
            pass
        finally:
            if seat.joined:
                await seat.stop()
    view, _ = await members.look(store)
    assert set(view.members) == {"loads the scripts"}


async def test_a_record_that_cannot_be_read_breaks_no_node(store: Store) -> None:
    node = membership_of(store, "node")
    await node.enter()
    await node.step()
    await members.join(store, Identity("stranger", "n", 60_000), About())
    for record in (b'{"concurrency": "many"}', b"\xff\xfe", b'{"concurrency": 0}', b'{"concurrency": -5}', b""):
        await store.run_one(store.keys.slot, [("HSET", store.keys.nodes, "stranger", b"2:n:60000:0:" + record)])
        await node.step()
        view, _ = await members.look(store)
        assert set(view.members) == {"node", "stranger"}
        assert view.owners.count("node") >= PARTITIONS // 2
    for garbage in (b"", b"garbage", b"1:2", b"x:n:60000:0:{}"):
        await store.run_one(store.keys.slot, [("HSET", store.keys.nodes, b"\xff", garbage)])
        await members.look(store)
        await node.step()


@pytest.mark.parametrize(
    "fields",
    [
        {"owners": "garbage"},
        {"owners": '{"node": [0, 99, -1, "x"]}'},
        {"owners": '{"node": [0, 99, -1]}'},
        {"version": "garbage"},
        {"version": "1.5"},
    ],
)
async def test_a_plan_that_cannot_be_read_is_written_anew(store: Store, fields: dict[str, str]) -> None:
    given: list[set[int]] = []
    node = membership_of(store, "node", lambda mine, _: given.append(mine))
    await node.enter()
    await node.step()
    changes: list[Command] = [("HSET", store.keys.plan, key, value) for key, value in fields.items()]
    await store.run_one(store.keys.slot, changes)
    await members.look(store)
    for _ in range(3):
        await node.step()
    assert given[-1] == ALL
    view, _ = await members.look(store)
    assert set(view.owners) == {"node"}


@pytest.mark.parametrize("term", ["garbage", "1.5", ""])
async def test_a_leadership_that_cannot_be_read_is_taken_anew(store: Store, term: str) -> None:
    await store.run_one(store.keys.slot, [("HSET", store.keys.leader, "id", "x", "nonce", "y", "term", term)])
    node = membership_of(store, "node")
    await node.enter()
    await members.look(store)
    for _ in range(3):
        await node.step()
    view, _ = await members.look(store)
    assert view.leader == "node"
    assert set(view.owners) == {"node"}


# -- whole nodes ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def nodes(server: Server, count: int, **settings: Any) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            config = Config(redis_url=server.url, partitions=PARTITIONS, **settings)
            node = Node(config, {"log": Gated()})
            await node.start()
            stack.push_async_callback(node.stop)
            started.append(node)
        yield started


def owned(started: Sequence[Node]) -> list[set[int]]:
    return [set(one.engine.owned) if one.engine is not None else set() for one in started]


async def test_a_server_that_was_away_for_longer_than_a_lease_moves_no_partition(server: Server, store: Store) -> None:
    async with nodes(server, 4, lease_s=SHORT_S) as started:
        await until(lambda: sorted(map(len, owned(started))) == [2, 2, 2, 2])
        before = owned(started)
        server.pause()
        try:
            await until(lambda: owned(started) == [set()] * 4)
        finally:
            server.resume()
        orders = [one.seat.membership.order for one in started if one.seat is not None]

        def all_came_back() -> bool:
            now = [one.seat.membership for one in started if one.seat is not None]
            return all(one.order > was and one.view is not None for one, was in zip(now, orders, strict=True))

        await until(all_came_back)
        await until(lambda: sorted(map(len, owned(started))) == [2, 2, 2, 2])
        plans = set()
        for _ in range(40):
            plans.add((await members.look(store))[0].owners)
            await asyncio.sleep(0.05)
        assert owned(started) == before
        print(len(plans))


async def test_a_stop_does_not_hang_on_a_server_that_hangs(server: Server, store: Store) -> None:
    async with nodes(server, 1, lease_s=SHORT_S) as [node]:
        await until(lambda: owned([node]) == [ALL])
        server.pause()
        try:
            began = steady_s()
            await node.stop()
            print("stop took", steady_s() - began)
        finally:
            server.resume()
