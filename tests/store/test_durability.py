"""How safe a put is before it is answered: what was asked is confirmed, or the answer says that it is not."""

import asyncio

import pytest

from mainspring.client.client import Client
from mainspring.model.errors import NotConfirmed
from mainspring.model.task import Task
from mainspring.store import durability
from mainspring.testing.balance import balance
from mainspring.testing.servers import Kind, Server, delete_namespace, standalone, wait_until
from tests.support.missing_parts import need_server


def started(kind: Kind, **config: str) -> Server:
    need_server(kind)
    names = {name.replace("_", "-"): value for name, value in config.items()}
    return standalone(kind, aof="appendonly" in names, extra_config=names)


def follower(primary: Server) -> Server:
    return standalone("valkey", extra_config={"replicaof": f"127.0.0.1 {primary.port}"})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for disks and replicas that do not come end after a tenth of a second."""
    monkeypatch.setattr(durability, "WAIT_MS", 100)


async def test_disk_is_confirmed_by_a_server_with_an_append_only_file() -> None:
    with started("valkey", appendonly="yes") as server:
        async with Client(server.url) as client:
            handle = await client.put("log:", 1, after="1h", durability="disk")
            named = await client.put("log:", 1, id="id", after="1h", durability="disk")
            summary = await client.put_many([Task("log:", after="1h")] * 100, durability="disk")
            assert handle.durability == named.durability == summary.durability == "disk"
        server.kill()
        server.restart()
        async with Client(server.url) as client:
            assert (await client.get(handle.id)).state == (await client.get("id")).state == "pending"
            assert (await client.count()).pending == 102


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_a_server_that_syncs_every_write_needs_no_wait(kind: Kind) -> None:
    with started(kind, appendonly="yes", appendfsync="always") as server:
        async with Client(server.url) as client:
            assert (await client.put("log:", durability="disk")).durability == "disk"


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_disk_without_a_disk_is_stored_and_not_confirmed(kind: Kind, quick: None) -> None:
    with started(kind) as server:
        async with Client(server.url) as client:
            with pytest.raises(NotConfirmed, match="stored, but disk is not confirmed") as caught:
                await client.put("log:", id="id", after="1h", durability="disk")
            assert "repeat with the same id" in str(caught.value)
            assert "appendonly" in str(caught.value)
            assert caught.value.handles is not None
            [handle] = caught.value.handles
            assert handle is not None
            assert (handle.id, handle.outcome, handle.durability) == ("id", "created", "server")
            assert (await client.get("id")).state == "pending"
            with pytest.raises(NotConfirmed):
                await client.put("log:", id="id", after="1h", durability="disk")
            assert (await balance(client.store)).accepted == 1, "the repeat is the same task"


async def test_replicas_are_confirmed_by_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for(ms: int) -> None:
        monkeypatch.setattr(durability, "WAIT_MS", ms)

    wait_for(30_000)  # one that does answer is waited for
    with started("valkey", repl_diskless_sync_delay="0") as primary, follower(primary) as replica:
        wait_until(lambda: replica.info("replication").get("master_link_status") == "up", "the replica follows")
        async with Client(primary.url) as client:
            handle = await client.put("log:", id="id", after="1h", durability="replicas=1")
            assert handle.durability == "replicas=1"
            assert replica.call("EXISTS", client.store.keys.partitions[0].n) in (0, 1)
            wait_for(3_000)
            with pytest.raises(NotConfirmed, match="1 of 2 confirmed"):
                await client.put("log:", after="1h", durability="replicas=2")
            replica.pause()
            wait_for(100)
            with pytest.raises(NotConfirmed, match="0 of 1 confirmed"):
                await client.put("log:", id="two", after="1h", durability="replicas=1")
            # A repeat that changes nothing must not be confirmed by replicas that have seen nothing. By another client:
            # on the connection of the first the server would wait for what that had written.
            async with Client(primary.url) as another:
                with pytest.raises(NotConfirmed, match="0 of 1 confirmed"):
                    await another.put("log:", id="two", after="1h", durability="replicas=1")
            replica.resume()
            wait_for(30_000)
            assert (await client.put("log:", id="two", after="1h", durability="replicas=1")).outcome == "kept"
            wait_for(100)
            with pytest.raises(NotConfirmed, match="of 2 confirmed"):
                await client.put("log:", id="two", after="2h", on_conflict="replace", durability="replicas=2")
            await balance(client.store)


async def test_waiting_for_replicas_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "WAIT_MS", 600_000)
    with started("valkey") as server:
        async with Client(server.url) as client, asyncio.timeout(60):
            slow = asyncio.create_task(client.put("log:", after="1h", durability="replicas=1"))
            while not await waits(client):
                pass
            await client.put("log:", after="1h")
            assert not slow.done()
            slow.cancel()
        delete_namespace(server, "main")


async def test_a_level_that_is_out_of_reach_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "WAIT_MS", 600_000)
    with started("valkey", appendonly="yes", appendfsync="everysec") as server:
        async with Client(server.url) as client, asyncio.timeout(60):
            slow = asyncio.create_task(client.put("log:", after="1h", durability="replicas=9"))
            while not await waits(client):
                pass
            assert (await client.put("log:", after="1h", durability="disk")).durability == "disk"
            assert not slow.done()
            slow.cancel()
        delete_namespace(server, "main")


async def waits(client: Client) -> bool:
    """The server keeps somebody waiting for its replicas."""
    [about] = await client.store.servers.for_slot(0).pipeline([("INFO", "clients")])
    return b"blocked_clients:1\r" in about
