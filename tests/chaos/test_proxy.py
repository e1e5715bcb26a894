"""The proxy breaks the road in every way it says it does, and the witness sees what the node does not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from mainspring.model.clock import ServerClock
from mainspring.model.errors import Unavailable
from mainspring.store.keys import Keyspace
from mainspring.store.redis.servers import LinkOptions, Servers
from mainspring.store.scripts import Scripts
from mainspring.store.store import Store
from mainspring.testing.servers import Server, cluster
from tests.support.chaos.network import Road
from tests.support.chaos.wire_log import Witness, Write
from tests.support.owner import HandOwner

QUICK = LinkOptions(connect_timeout_s=5.0, timeout_s=2.0)
PARTITIONS = 4


@asynccontextmanager
async def road_to(server: Server, witness: Witness | None = None) -> AsyncIterator[Road]:
    road = await Road("test", {"server": lambda: server.port}, witness, translate=False).start()
    try:
        yield road
    finally:
        await road.aclose()


@asynccontextmanager
async def links_over(road: Road) -> AsyncIterator[Servers]:
    links = await Servers.connect(f"redis://{road.addresses[0]}", QUICK)
    try:
        yield links
    finally:
        await links.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # a server tells nobody what reached it
            await asyncio.sleep(0.01)


async def test_everything_goes_through_unchanged(mainspring_server: Server, mainspring_namespace: str) -> None:
    key, value = f"{{{mainspring_namespace}}}:x", bytes(range(256)) * 1000
    async with road_to(mainspring_server) as road, links_over(road) as links:
        assert await links.all()[0].pipeline([("SET", key, value), ("GET", key)]) == [b"OK", value]
    mainspring_server.call("DEL", key)


async def test_a_reset_breaks_what_is_under_way_and_the_next_call_gets_through(mainspring_server: Server) -> None:
    async with road_to(mainspring_server) as road, links_over(road) as links:
        [link] = links.all()
        road.weather.fall_silent()
        call = asyncio.create_task(link.pipeline([("PING",)], timeout_s=60))
        await asyncio.sleep(0)
        assert road.cut() == 1
        with pytest.raises(Unavailable):
            await call
        road.weather.speak()
        assert await link.pipeline([("PING",)]) == [b"PONG"]


async def test_a_dropped_reply_was_executed(mainspring_server: Server, mainspring_namespace: str) -> None:
    key = f"{{{mainspring_namespace}}}:x"
    async with road_to(mainspring_server) as road, links_over(road) as links:
        [link] = links.all()
        road.weather.swallow = True
        with pytest.raises(Unavailable) as lost:
            await link.pipeline([("INCR", key)])
        assert lost.value.sent
        assert road.weather.swallowed == 1
        assert await link.pipeline([("GET", key)]) == [b"1"]
    mainspring_server.call("DEL", key)


async def test_a_black_hole_keeps_the_connection_and_says_nothing(mainspring_server: Server) -> None:
    async with road_to(mainspring_server) as road, links_over(road) as links:
        [link] = links.all()
        road.weather.fall_silent()
        with pytest.raises(Unavailable, match="no reply within"):
            await link.pipeline([("PING",)])
        road.weather.speak()
        assert await link.pipeline([("PING",)]) == [b"PONG"]


async def test_after_a_lost_cable_only_a_new_connection_carries_anything(mainspring_server: Server) -> None:
    async with road_to(mainspring_server) as road, links_over(road) as links:
        [link] = links.all()
        assert road.numb() == 1
        with pytest.raises(Unavailable, match="no reply within"):
            await link.pipeline([("PING",)])
        assert await link.pipeline([("PING",)]) == [b"PONG"]


async def test_a_held_command_arrives_after_its_sender_was_cut(
    mainspring_server: Server, mainspring_namespace: str
) -> None:
    key = f"{{{mainspring_namespace}}}:x"
    async with road_to(mainspring_server) as road, links_over(road) as links:
        [link] = links.all()
        road.weather.hold_all, road.weather.hold_s = True, 3.0
        with pytest.raises(Unavailable):
            await link.pipeline([("SET", key, "old")])
        assert await link.pipeline([("SET", key, "new"), ("GET", key)]) == [b"OK", b"new"]
        await until(lambda: mainspring_server.call("GET", key) == b"old")
        assert road.weather.held == 1
    mainspring_server.call("DEL", key)


async def test_the_witness_sees_writes_whose_reply_was_dropped_and_no_refused_ones(
    mainspring_server: Server, mainspring_namespace: str
) -> None:
    seen: list[Write] = []
    witness = Witness(Keyspace(mainspring_namespace, PARTITIONS), seen.append)
    async with road_to(mainspring_server, witness) as road:
        url = f"redis://{road.addresses[0]}"
        store = await Store.open(url, namespace=mainspring_namespace, partitions=PARTITIONS)
        former = await HandOwner.acquire(store, 2, owner="former", lease_ms=1)
        token = former.token.decode()
        assert [(one.what, one.partition, one.token) for one in seen] == [("acquire", 2, token)]
        # In full: a server that does not know the script yet would answer with an error, and do nothing.
        call = store.scripts.in_full(
            store.scripts.call("release", [former.keys.own, former.keys.fence], [former.token])
        )
        road.weather.swallow = True
        with pytest.raises(Unavailable):
            await former.raw(*call)
        assert [(one.what, one.token) for one in seen[1:]] == [("release", token)]
        reply = await former.raw(*call)
        assert reply[1] == b"fenced"
        assert len(seen) == 2
        await store.aclose()


async def test_a_cluster_sends_its_clients_only_through_their_proxies() -> None:
    with await asyncio.to_thread(cluster, 2) as servers:
        real = {one.port for one in servers.servers}
        upstreams = {str(one.port): (lambda one=one: one.port) for one in servers.servers}
        road = await Road("test", upstreams, None, translate=True).start()
        links = await Servers.connect("redis+cluster://" + ",".join(road.addresses), QUICK)
        try:
            assert {link.address for link in links.all()} == set(road.addresses)
            wrong = links.for_slot(16383)
            [error] = await wrong.pipeline([("GET", "{b}")])  # slot 3300 belongs to the other one
            assert str(error).startswith("MOVED 3300 127.0.0.1:")
            assert int(str(error).rpartition(":")[2]) not in real
        finally:
            await links.aclose()
            await road.aclose()


async def test_a_call_that_the_witness_cannot_read_is_not_passed_over_in_silence(
    mainspring_server: Server, mainspring_namespace: str
) -> None:
    witness = Witness(Keyspace(mainspring_namespace, PARTITIONS), lambda _: None)
    async with road_to(mainspring_server, witness) as road, links_over(road) as links:
        [link] = links.all()
        assert road.errors == []
        with pytest.raises(Unavailable):
            await link.pipeline([Scripts(ServerClock()).call("tick", ["key"], ["no number of sections"])])
        await until(lambda: bool(road.errors))
        assert "a proxy of test failed: ValueError" in road.errors[0]
