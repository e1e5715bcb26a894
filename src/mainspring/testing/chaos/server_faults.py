"""Faults of the servers: killed, hung, slow, without scripts, resharded, failed over."""

import asyncio

import hiredis

from ..server_group import ok
from ..server_process import Server, wait_until
from ..servers import Cluster
from .ground import Ground
from .profile import Kind
from .recorder import now_us
from .schedule import Act, Planned
from .stage import Clustered, Pair, Standalone


class ServerFaults:
    """What happens to servers, one thing at a time."""

    def __init__(self, ground: Ground) -> None:
        self._on = ground
        self._turn = asyncio.Lock()
        self.acts: dict[Kind, Act] = {
            "kill server": self._kill_server,
            "hang server": self._hang_server,
            "slow server": self._slow_server,
            "script flush": self._script_flush,
            "slot migration": self._migrate_slot,
            "failover": self._failover,
            "promotion": self._promotion,
        }

    async def _kill_server(self, planned: Planned) -> bool:
        assert isinstance(self._on.stage, Standalone)
        server = self._on.stage.server
        async with self._turn:
            start_us = now_us()
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(planned.size * self._on.lease_s)
            await asyncio.to_thread(server.start)
            self._on.note("kill server", start_us, node=None, after_s=self._on.lease_s)
        return True

    async def _hang_server(self, planned: Planned) -> bool:
        async with self._turn:
            servers = self._on.stage.servers
            server = servers[int(planned.pick * len(servers))]
            start_us = now_us()
            server.pause()
            await asyncio.sleep(self._on.lease_s * (0.5 + planned.size))
            server.resume()
            self._on.note("hang server", start_us, node=None, after_s=self._on.lease_s)
        return True

    async def _slow_server(self, planned: Planned) -> bool:
        """Every answer takes its time, for everybody."""
        start_us = now_us()
        roads = [*(member.road for member in self._on.fleet.live), *self._on.roads]
        for road in roads:
            road.weather.delay_s = 0.02 + 0.15 * planned.size
        await asyncio.sleep(2 * self._on.lease_s)
        for road in roads:
            road.weather.delay_s = 0.0
        self._on.note("slow server", start_us, node=None, after_s=self._on.lease_s)
        return True

    async def _script_flush(self, _: Planned) -> bool:
        async with self._turn:
            for server in await asyncio.to_thread(lambda: self._on.stage.servers):
                await asyncio.to_thread(server.call, "SCRIPT", "FLUSH")
        return True

    async def _migrate_slot(self, planned: Planned) -> bool:
        """A partition's slot moves to another master with all its keys, while it is written to and fired from."""
        assert isinstance(self._on.stage, Clustered)
        async with self._turn:
            slot = self._on.keys.partitions[int(planned.pick * len(self._on.keys))].slot
            return await asyncio.to_thread(_move, self._on.stage, slot, planned.size)

    async def _failover(self, planned: Planned) -> bool:
        """A master dies; its replica is promoted by the others; it comes back as a replica."""
        assert isinstance(self._on.stage, Clustered)
        async with self._turn:
            masters = await asyncio.to_thread(lambda: self._on.stage.servers)
            victim = masters[int(planned.pick * len(masters))]
            # What the replica had not yet is gone: answers of the last moment are no promise.
            start_us = now_us() - 1_000_000
            await asyncio.to_thread(victim.kill)
            await asyncio.to_thread(_wait_failed_over, self._on.stage.cluster, victim)
            self._on.note("failover", start_us, node=None, loses=True, after_s=self._on.lease_s)
            await asyncio.to_thread(victim.start)
            await asyncio.to_thread(self._on.stage.cluster.wait_ok)
            await asyncio.to_thread(_wait_replica, victim)
        return True

    async def _promotion(self, planned: Planned) -> bool:
        """The replica falls behind, the primary dies, and the replica takes its place without the last writes."""
        assert isinstance(self._on.stage, Pair)
        async with self._turn:
            start_us = now_us() - 1_000_000
            self._on.stage.link_weather.fall_silent()
            await asyncio.sleep(0.3 + planned.size)
            await self._on.stage.promote()
            self._on.note("promotion", start_us, node=None, loses=True, after_s=self._on.lease_s)
        return True


def _move(stage: Clustered, slot: int, size: float) -> bool:
    source = stage.cluster.owner_of(slot)
    masters = stage.servers
    others = [server for server in masters if server is not source]
    target = others[int(size * len(others))]
    move = stage.cluster.begin_move(slot, target)
    while move.step(3):
        pass
    owner = target.call("CLUSTER", "MYID")
    for server in (target, *(one for one in masters if one is not target)):
        ok(server.call("CLUSTER", "SETSLOT", slot, "NODE", owner))
    return True


def _wait_failed_over(cluster: Cluster, victim: Server) -> None:
    living = [server for server in cluster.servers if server is not victim]
    wait_until(
        lambda: all(_covered(server, victim.port) for server in living), "a replica was promoted", timeout_s=30.0
    )


def _covered(server: Server, dead_port: int) -> bool:
    rows = server.call("CLUSTER", "SLOTS")
    if isinstance(rows, hiredis.ReplyError):
        return False
    whole = sum(last - first + 1 for first, last, *_ in rows) == 16384
    return (
        whole and all(row[2][1] != dead_port for row in rows) and b"cluster_state:ok" in server.call("CLUSTER", "INFO")
    )


def _wait_replica(server: Server) -> None:
    def follows() -> bool:
        info = server.info("replication")
        return info.get("role") == "slave" and info.get("master_link_status") == "up"

    wait_until(follows, "the former master follows the new one", timeout_s=30.0)
