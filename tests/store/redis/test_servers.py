"""Finding the right server: reconnects, cluster slots that move, sentinel failover, healing subscriptions."""

import asyncio
from collections.abc import Callable, Iterator

import hiredis
import pytest

from mainspring.model.errors import StoreError, Unavailable
from mainspring.store.redis.servers import LinkOptions, Servers, key_slot, redirect_of
from mainspring.testing.servers import Kind, Server, ServerCluster, cluster, sentinel, standalone

QUICK = LinkOptions(connect_timeout_s=10, timeout_s=30)


@pytest.fixture
def server(kind: Kind) -> Iterator[Server]:
    with standalone(kind) as started:
        yield started


@pytest.fixture(scope="module")
def nodes(kind: Kind) -> Iterator[ServerCluster]:
    with cluster(3, 0, kind) as started:
        yield started


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is another process's state
            await asyncio.sleep(0.01)


class Heard:
    """Messages of a subscription by channel, and how often it was made again."""

    def __init__(self) -> None:
        self.channels: list[str] = []
        self.connects = 0

    def called(self, channel: str, message: bytes) -> None:
        assert message == b"x"
        self.channels.append(channel)

    def connected(self) -> None:
        self.connects += 1


@pytest.mark.parametrize(
    ("message", "redirect"),
    [
        ("MOVED 5 127.0.0.1:1", "moved"),
        ("ASK 5 127.0.0.1:1", "ask"),
        ("TRYAGAIN Multiple keys", "tryagain"),
        ("CLUSTERDOWN Hash slot not served", "clusterdown"),
        ("READONLY You can't write", "readonly"),
        ("LOADING data", "loading"),
        ("MASTERDOWN Link", "masterdown"),
        ("NOSCRIPT No matching script", "noscript"),
        ("OOM command not allowed", "oom"),
        ("ERR MOVED", None),
        ("moved 5", None),
        ("", None),
    ],
)
def test_an_error_is_classified_by_its_first_word(message: str, redirect: str | None) -> None:
    assert redirect_of(hiredis.ReplyError(message)) == redirect


def test_a_key_and_its_hash_tag_share_a_slot() -> None:
    assert key_slot(b"123456789") == 12739
    assert key_slot(b"{ns:1}:slices") == key_slot(b"ns:1") == key_slot(b"a{ns:1}")
    assert key_slot(b"{}a") != key_slot(b"{}b")


async def test_a_standalone_server_holds_every_slot(server: Server) -> None:
    for url in (server.url, server.unix_url):
        links = await Servers.connect(url, QUICK)
        assert not links.cluster
        assert links.all() == [links.for_slot(0)] == [links.for_slot(16383)]
        await links.refresh()
        assert await links.for_slot(7).pipeline([("PING",)]) == [b"PONG"]
        await links.aclose()


async def test_connect_says_why_it_cannot(server: Server) -> None:
    server.stop()
    with pytest.raises(Unavailable, match="cannot connect"):
        await Servers.connect(server.url, QUICK)


async def test_a_link_comes_back_with_its_server(server: Server) -> None:
    links = await Servers.connect(server.url, QUICK)
    link = links.for_slot(0)
    server.kill()
    for _ in range(3):
        with pytest.raises(Unavailable):
            await link.pipeline([("PING",)])
    server.restart()
    assert await link.pipeline([("PING",)]) == [b"PONG"]
    await links.aclose()


async def test_callers_share_one_attempt_to_connect(server: Server) -> None:
    links = await Servers.connect(server.url, QUICK)
    link = links.for_slot(0)
    server.restart()
    await eventually(lambda: link._main._current is not None and link._main._current.closed)
    before = int(server.info("stats")["total_connections_received"])
    replies = await asyncio.gather(*(link.pipeline([("ECHO", n)]) for n in range(50)))
    assert replies == [[b"%d" % n] for n in range(50)]
    after = int(server.info("stats")["total_connections_received"])
    assert after - before == 2  # ours, and the one that asks
    await links.aclose()


async def test_a_dedicated_connection_blocks_no_other_and_closes_with_the_servers(server: Server) -> None:
    links = await Servers.connect(server.url, QUICK)
    link = links.for_slot(0)
    extra = await link.dedicated()
    blocked = asyncio.create_task(extra.pipeline([("BLPOP", "empty", 0)], timeout_s=None))
    assert await link.pipeline([("PING",)]) == [b"PONG"]
    await links.aclose()
    with pytest.raises(Unavailable):
        await blocked
    with pytest.raises(Unavailable, match="closed"):
        await link.pipeline([("PING",)])


async def test_a_subscription_hears_and_survives_a_lost_connection(server: Server) -> None:
    links = await Servers.connect(server.url, QUICK)
    heard = Heard()
    channels = [f"{{ns:{n}}}:wake" for n in range(5)]
    subscription = await links.for_slot(0).subscribe(channels, heard.called, heard.connected)
    await eventually(lambda: heard.connects == 1)
    await links.for_slot(0).pipeline([("SPUBLISH", channels[3], "x")])
    await eventually(lambda: heard.channels == [channels[3]])
    server.call("CLIENT", "KILL", "TYPE", "pubsub")
    await eventually(lambda: heard.connects == 2)
    server.kill()
    server.restart()
    await eventually(lambda: heard.connects == 3)
    await links.for_slot(0).pipeline([("SPUBLISH", channels[4], "x")])
    await eventually(lambda: heard.channels == [channels[3], channels[4]])
    await subscription.close()
    await links.aclose()


async def test_every_slot_of_a_cluster_leads_to_its_server(nodes: ServerCluster) -> None:
    links = await Servers.connect(nodes.url, QUICK)
    assert links.cluster
    assert len(links.all()) == 3
    for n in range(50):
        key = f"key{n}"
        assert await links.for_slot(key_slot(key.encode())).pipeline([("SET", key, n)]) == [b"OK"]
    await asyncio.gather(*(links.refresh() for _ in range(20)))
    await links.aclose()


async def test_one_reachable_seed_is_enough(nodes: ServerCluster) -> None:
    links = await Servers.connect(f"redis+cluster://127.0.0.1:1,127.0.0.1:{nodes.masters[1].port}", QUICK)
    assert len(links.all()) == 3
    await links.aclose()


async def test_a_moved_slot_is_found_after_refresh(nodes: ServerCluster) -> None:
    links = await Servers.connect(nodes.url, QUICK)
    slot = key_slot(b"moving")
    await links.for_slot(slot).pipeline([("SET", "moving", "here")])
    source = nodes.owner_of(slot)
    target = next(one for one in nodes.masters if one is not source)
    nodes.move_slot(slot, target)
    reply = (await links.for_slot(slot).pipeline([("GET", "moving")]))[0]
    assert redirect_of(reply) == "moved"
    await links.refresh()
    assert links.for_slot(slot).address.endswith(str(target.port))
    assert await links.for_slot(slot).pipeline([("GET", "moving")]) == [b"here"]
    await links.aclose()


async def test_a_subscription_follows_its_slots_through_the_cluster(nodes: ServerCluster) -> None:
    links = await Servers.connect(nodes.url, QUICK)
    heard = Heard()
    channels = [f"{{follow:{n}}}:wake" for n in range(8)]
    await links.all()[0].subscribe(channels, heard.called, heard.connected)
    await eventually(lambda: heard.connects == 1)
    for channel in channels:
        await links.for_channel(channel).pipeline([("SPUBLISH", channel, "x")])
    await eventually(lambda: sorted(heard.channels) == sorted(channels))
    slot = key_slot(channels[0].encode())
    source = nodes.owner_of(slot)
    target = next(one for one in nodes.masters if one is not source)
    nodes.move_slot(slot, target)
    await eventually(lambda: heard.connects >= 2 and links.for_slot(slot).address.endswith(str(target.port)))
    heard.channels.clear()
    await links.for_slot(slot).pipeline([("SPUBLISH", channels[0], "x")])
    await eventually(lambda: heard.channels == [channels[0]])
    await links.aclose()


async def test_refresh_finds_the_replica_that_took_over_in_a_cluster(kind: Kind) -> None:
    with cluster(3, 1, kind) as nodes:
        links = await Servers.connect(nodes.url, QUICK)
        lost = nodes.owner_of(0)
        lost.kill()

        async def writes() -> bool:
            try:
                await links.refresh()
                return await links.for_slot(0).pipeline([("SET", "{06S}", 1)]) == [b"OK"]
            except StoreError:
                return False

        assert key_slot(b"06S") == 0
        async with asyncio.timeout(60):
            while not await writes():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not links.for_slot(0).address.endswith(str(lost.port))
        await links.aclose()


async def test_refresh_finds_the_primary_that_the_sentinels_promoted(kind: Kind) -> None:
    with sentinel(kind) as group:
        links = await Servers.connect(group.url, QUICK)
        link = links.for_slot(0)
        assert link.address.endswith(str(group.primary.port))
        await link.pipeline([("SET", "a", 1), ("WAIT", 1, 2000)])
        group.primary.kill()
        with pytest.raises(Unavailable):
            await link.pipeline([("GET", "a")])
        group.wait_failover()
        await links.refresh()
        assert links.for_slot(9).address.endswith(str(group.replica.port))
        assert await links.for_slot(9).pipeline([("GET", "a"), ("SET", "a", 2)]) == [b"1", b"OK"]
        await links.aclose()


async def test_an_unknown_master_name_is_explained(kind: Kind) -> None:
    with sentinel(kind) as group:
        with pytest.raises(StoreError, match="No such master"):
            await Servers.connect(group.url.replace("/main", "/other"), QUICK)
        for one in group.sentinels:
            one.kill()
        with pytest.raises(Unavailable, match="no sentinel"):
            await Servers.connect(group.url, QUICK)
