"""Accidents around membership and hand-over: each was possible once, and is named after what went wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from math import inf
from typing import Any

import hiredis
import pytest

from mainspring.client.client import Client
from mainspring.cluster import Membership, Seat
from mainspring.config.config import Config
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.engine.keeper import Keeper
from mainspring.engine.partition import Partition, Settled
from mainspring.engine.slice import LiveSlice
from mainspring.model.clock import ManualClock, steady_s
from mainspring.model.delivery import DONE, Delivery, Outcome
from mainspring.model.errors import StoreError
from mainspring.node.node import Node
from mainspring.store import members
from mainspring.store.keys import Slice
from mainspring.store.members import About, Identity
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.store import Store
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.servers import Server
from tests.support.flows import open_flow
from tests.support.owner import HandOwner

PARTITIONS = 8
ALL = set(range(PARTITIONS))
LONG_S = 60.0
"""No lease of this length ends during a test: what is free was given back."""


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


@pytest.fixture
async def store(server: Server) -> AsyncIterator[Store]:
    server.call("FLUSHALL")
    opened = await Store.open(server.url, partitions=PARTITIONS)
    yield opened
    await opened.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the nodes tell us nothing: there is only polling
            await asyncio.sleep(0.01)


async def holders(store: Store) -> set[int]:
    """Partitions that somebody holds."""
    held = await members.holdings(store, await store.sample_clock())
    return {number for number, one in enumerate(held) if one.owner}


def keeper_of(store: Store, name: str = "k", changed: Callable[[], None] = lambda: None) -> Keeper:
    return Keeper(store, {}, node=name, lease_s=LONG_S, changed=changed, flow=open_flow())


@asynccontextmanager
async def slow_answers(store: Store, script: str) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Calls of this script are executed at once; their answers arrive when the second event is set."""
    [primary] = store.servers.all()
    pipeline, asked, answer = primary.pipeline, asyncio.Event(), asyncio.Event()

    async def send(commands: Sequence[RedisCommand], *, timeout_s: float | None = None) -> list[Any]:
        replies = await pipeline(commands, timeout_s=timeout_s)
        if calls(script)(commands):
            asked.set()
            await answer.wait()
        return replies

    vars(primary)["pipeline"] = send
    try:
        yield asked, answer
    finally:
        answer.set()
        del vars(primary)["pipeline"]


# -- leases ---------------------------------------------------------------------------------------------------


class Steady:
    """The clock by which a keeper counts its leases, held by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = steady_s()
        monkeypatch.setattr("mainspring.engine.keeper.steady_s", lambda: self.now_s)


@pytest.mark.parametrize("script", ["acquire", "renew"])
async def test_a_lease_counts_from_when_it_was_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """Counted from the answer it would outlast the one on the server, and two nodes would fire the same tasks."""
    steady, owned = Steady(monkeypatch), dict[int, Partition]()
    keeper = Keeper(store, owned, node="k", lease_s=LONG_S, changed=lambda: None, flow=open_flow())
    keeper.follow({0}, set())
    if script == "renew":
        await keeper.step()
        steady.now_s += LONG_S / 2
    asked_at = steady.now_s
    async with slow_answers(store, script) as (asked, answer):
        step = asyncio.create_task(keeper.step())
        await asked.wait()
        steady.now_s += LONG_S / 4
        answer.set()
        await step
    assert owned[0].lease_until == asked_at + LONG_S


async def test_partitions_wait_one_lease_for_their_former_node(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its former or planned owner may only be late: partitions would move to and fro."""
    server.call("FLUSHALL")
    clock, steady, owned = ManualClock(), Steady(monkeypatch), dict[int, Partition]()
    store = await Store.open(server.url, partitions=1, clock=clock)
    keeper = Keeper(store, owned, node="k", lease_s=LONG_S, changed=lambda: None, flow=open_flow())
    keeper.follow(set(), set())
    await HandOwner.acquire(store, owner="late", lease_ms=int(LONG_S * 1000))
    await keeper.step()
    clock.advance(ms=int(3 * LONG_S * 1000) - 1)  # over for two leases but a millisecond
    steady.now_s += 3 * LONG_S
    await keeper.step()
    assert not owned
    clock.advance(ms=1)
    steady.now_s += LONG_S
    await keeper.step()
    assert set(owned) == {0}
    await store.aclose()


# -- a stop that meets an acquire ---------------------------------------------------------------------------


async def test_a_partition_granted_while_the_node_stopped_is_given_back(store: Store) -> None:
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


async def test_a_partition_granted_to_an_interrupted_start_is_given_back(store: Store) -> None:
    engine = Engine(store, {"log": Gated()}, EngineOptions(lease_s=LONG_S))
    async with slow_answers(store, "acquire") as (asked, answer):
        starting = asyncio.create_task(engine.start())
        await asked.wait()
        starting.cancel()
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        answer.set()
        await stopping
    assert await holders(store) == set()


async def test_a_partition_granted_after_the_stop_began_does_not_wait_for_a_slow_delivery(store: Store) -> None:
    sink = Gated()
    engine = Engine(store, {"log": sink}, EngineOptions(lease_s=LONG_S))
    engine.follow({0}, set())
    await engine.start()
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
        async with asyncio.timeout(60):
            while await holders(store) != {0}:  # noqa: ASYNC110  # as above
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


async def test_after_an_outage_the_owners_come_back_before_anybody_takes_spare_partitions(store: Store) -> None:
    keeper = keeper_of(store)
    keeper.follow({0}, set())
    with bad_road(store) as road:
        road.next("never sent", only=calls("acquire"))
        with pytest.raises(StoreError):
            await keeper.step()
    keeper._spare_at = 0.0
    await keeper.step()
    assert set(keeper._owned) == {0}


async def test_an_unavailable_server_does_not_keep_partitions_of_others_from_being_taken(store: Store) -> None:
    keeper = keeper_of(store)
    keeper.follow({0}, set())
    keeper._spare_at = 0.0
    with bad_road(store) as road:
        road.next("never sent", only=calls("acquire"))  # of partition 0
        with pytest.raises(StoreError):
            await keeper.step()
    assert set(keeper._owned) == ALL - {0}


async def test_spare_partitions_are_left_to_their_planned_owners_by_a_node_that_waited_for_its_id(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = keeper_of(store)
    keeper.follow({0}, set())
    monkeypatch.setattr("mainspring.engine.keeper.steady_s", lambda: steady_s() + 2 * LONG_S)
    await keeper.step()
    assert set(keeper._owned) == {0}


async def test_a_hand_over_continues_although_notifying_the_others_failed(store: Store) -> None:
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


async def test_a_partition_granted_in_a_lost_reply_is_given_back_if_it_is_no_longer_planned(
    store: Store,
) -> None:
    await keeper_of(store, "loads the script").step()
    await store.run([(keys.slot, [("DEL", keys.own)]) for keys in store.keys.partitions])
    keeper = keeper_of(store)
    with bad_road(store) as road:
        road.next("lose reply", only=calls("acquire"))
        with pytest.raises(StoreError):
            await keeper.step()
    assert await holders(store) == ALL
    keeper.follow({1}, set())
    await keeper.step()
    await keeper.step()
    assert await holders(store) == {1} == set(keeper._owned)


async def test_firing_resumes_at_once_if_no_node_waits_for_the_partition_any_more(store: Store) -> None:
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
    partition.settle(Settled())  # never drained
    for _ in range(4):
        partition.open_until = 0.0
        await keeper._hand_over()
        partition.closing_since -= LONG_S + 1
        await keeper._hand_over()
        assert not partition.closing
        pauses.append(partition.open_until - steady_s())
    assert all(later > 1.5 * earlier for earlier, later in pairwise(pauses))


# -- membership -------------------------------------------------------------------------------------------------


def membership_of(store: Store, name: str, follow: Any = lambda *_: None) -> Membership:
    return Membership(store, name, lease_s=LONG_S, describe=About, follow=follow)


@pytest.mark.parametrize("fault", ["never sent", "lose reply"])
@pytest.mark.parametrize("what", [calls("join"), uses("SPUBLISH"), calls("beat")], ids=["join", "announce", "beat"])
async def test_a_start_that_failed_half_way_leaves_no_member_behind(store: Store, fault: Any, what: Any) -> None:
    await membership_of(store, "loads the scripts").enter()
    await members.beat(store, Identity("loads the scripts", "", 1), About())
    seat = Seat(store, membership_of(store, "unlucky"), lambda: None)
    with bad_road(store) as road:
        road.next(fault, only=what)
        with suppress(StoreError):
            await seat.start()
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
async def test_an_unreadable_plan_is_replaced(store: Store, fields: dict[str, str]) -> None:
    given: list[set[int]] = []
    node = membership_of(store, "node", lambda mine, _: given.append(mine))
    await node.enter()
    await node.step()
    changes: list[RedisCommand] = [("HSET", store.keys.plan, key, value) for key, value in fields.items()]
    await store.run_one(store.keys.slot, changes)
    await members.look(store)
    for _ in range(3):
        await node.step()
    assert given[-1] == ALL
    view, _ = await members.look(store)
    assert set(view.owners) == {"node"}


@pytest.mark.parametrize("term", ["garbage", "1.5", ""])
async def test_an_unreadable_leadership_is_taken_again(store: Store, term: str) -> None:
    await store.run_one(store.keys.slot, [("HSET", store.keys.leader, "id", "x", "nonce", "y", "term", term)])
    node = membership_of(store, "node")
    await node.enter()
    await members.look(store)
    for _ in range(3):
        await node.step()
    view, _ = await members.look(store)
    assert view.leader == "node"
    assert set(view.owners) == {"node"}


async def test_after_an_outage_of_more_than_a_lease_nothing_is_planned_before_the_others_are_back(
    server: Server, store: Store
) -> None:
    clock = ManualClock()
    timed = await Store.open(server.url, partitions=PARTITIONS, clock=clock)
    try:
        first, second = membership_of(timed, "first"), membership_of(timed, "second")
        for node in (first, second, first):
            if not node.order:
                await node.enter()
            await node.step()
        before = (await members.look(timed))[0]
        assert set(before.owners) == {"first", "second"}
        clock.advance(seconds=LONG_S)
        for node in (first, first, first, second, second):
            await node.step()
        first._plans_from = 0.0
        await first.step()
        after = (await members.look(timed))[0]
        assert set(after.members) == {"first", "second"}
        assert (after.version, after.owners) == (before.version, before.owners)
    finally:
        await timed.aclose()


async def test_a_stop_does_not_wait_for_a_slot_that_is_on_its_way(store: Store) -> None:
    node = membership_of(store, "node")
    await node.enter()
    [primary] = store.servers.all()
    attempts: list[Sequence[RedisCommand]] = []

    async def send(commands: Sequence[RedisCommand], *, timeout_s: float | None = None) -> list[Any]:
        attempts.append(commands)
        return [hiredis.ReplyError("TRYAGAIN Multiple keys request during rehashing of slot")] * len(commands)

    vars(primary)["pipeline"] = send
    try:
        await node.withdraw()
        await node.leave()
    finally:
        del vars(primary)["pipeline"]
    assert len(attempts) == 2


async def test_a_predecessor_with_a_longer_lease_is_waited_for(store: Store) -> None:
    """Its lease was shortened in the settings, and then it was killed."""
    await members.join(store, Identity("pod-1", "killed", 3_000), About())
    again = Membership(store, "pod-1", lease_s=0.5, describe=About, follow=lambda *_: None)
    await again.enter()
    assert again.order == 2


async def test_a_node_whose_id_was_taken_while_it_hung_ends_as_one_that_is_refused(
    server: Server, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(redis_url=server.url, partitions=PARTITIONS, lease_s=LONG_S, node_id="pod-1")
    node = Node(config, {"log": Gated()})
    running = asyncio.create_task(node.run_until_signal())
    await until(lambda: node.ready)
    other = b'2:another process:60000:0:{"host": "web2", "pid": 17}'
    await store.run_one(store.keys.slot, [("HSET", store.keys.nodes, "pod-1", other)])
    await members.announce(store)
    assert await running == 2
    assert "node id 'pod-1' is in use by process 17 on web2" in caplog.text
    assert "which is a bug" not in caplog.text
    assert await holders(store) == set()


# -- partition --------------------------------------------------------------------------------------------------


async def test_a_slice_that_is_forgotten_leaves_no_commit_behind(store: Store) -> None:
    """Otherwise the dispatcher runs again every millisecond, for an empty commit."""
    keys = store.keys.partitions[0]
    partition, live = Partition(keys, b"token", inf, open_flow()), LiveSlice(keys, Slice.at(0, 1000), 1.0)
    partition.add(live)
    partition._note_dirty(live, 1.0)
    partition.forget(live)
    assert partition.drained
    assert partition.dirty_since == inf
