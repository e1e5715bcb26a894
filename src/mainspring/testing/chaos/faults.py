"""The faults: each strikes once, says whom it hit and for how long, and puts everything right again."""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import hiredis

from ...store.keys import Keyspace
from ..events import Fault
from ..server_group import ok
from ..server_process import Server, wait_until
from ..servers import Cluster
from .fleet import Fleet, Member
from .profile import Kind
from .recorder import Journal, now_us
from .road import Road
from .schedule import Planned
from .stage import Clustered, Pair, Stage, Standalone

_TRIES: Final = 12
_NOTICED_S: Final = 15.0
"""A node gives a server ten seconds to answer before it takes another connection."""
_CATCH_S: Final = 4.0
"""How long a trap waits for a command or a reply to fall into it."""


class Faults:
    """Carries out what was planned. A fault counts when it took effect."""

    def __init__(
        self, stage: Stage, fleet: Fleet, roads: list[Road], journal: Journal, keys: Keyspace, *, lease_s: float
    ) -> None:
        self._stage, self._fleet, self._roads = stage, fleet, roads
        self._journal, self._keys, self._lease_s = journal, keys, lease_s
        self._server_turn = asyncio.Lock()
        self.done: Counter[Kind] = Counter()
        self._acts: dict[Kind, Callable[[Planned], Awaitable[bool]]] = {
            "kill node": self._kill_node, "stop node": self._stop_node, "kill leader": self._kill_leader,
            "restart node": self._restart_node, "extra node": self._extra_node, "clock jump": self._clock_jump,
            "reset": self._reset, "dropped reply": self._dropped_reply, "delayed command": self._delayed_command,
            "blackhole": self._blackhole, "lost cable": self._lost_cable, "partition": self._partition,
            "kill server": self._kill_server, "hang server": self._hang_server, "slow server": self._slow_server,
            "script flush": self._script_flush,
            "slot migration": self._migrate_slot, "failover": self._failover, "promotion": self._promotion,
        }  # fmt: skip

    async def strike(self, planned: Planned) -> None:
        """Strike once; where it hit nobody (its victim died of something else), choose another."""
        for attempt in range(_TRIES):
            shifted = planned._replace(pick=(planned.pick + attempt * 0.37) % 1.0)
            if await self._acts[planned.kind](shifted):
                self.done[planned.kind] += 1
                return
            await asyncio.sleep(self._lease_s / 3)

    def _note(self, kind: str, start_us: int, *, node: str | None, loses: bool = False, after_s: float = 0.0) -> None:
        self._journal.add(Fault(start_us, now_us() + int(after_s * 1e6), kind, node, loses))

    # -- nodes -----------------------------------------------------------------------------------------------

    async def _kill_node(self, planned: Planned) -> bool:
        return await self._kill(self._fleet.pick(planned.pick), "kill node", planned.size)

    async def _kill(self, member: Member | None, kind: str, size: float) -> bool:
        if member is None:
            return False
        start_us = now_us()
        await self._fleet.kill(member)
        self._note(f"{kind} {member.name}", start_us, node=member.name, after_s=self._lease_s)
        await asyncio.sleep(size * self._lease_s)
        await self._fleet.join()
        return True

    async def _kill_leader(self, planned: Planned) -> bool:
        """Whoever leads now; after the last leader's death it takes a moment until somebody does."""
        give_up = asyncio.get_running_loop().time() + 4 * self._lease_s
        while True:
            leader = await asyncio.to_thread(self._leader)
            member = next((one for one in self._fleet.live if one.name == leader), None)
            if member is not None or asyncio.get_running_loop().time() > give_up:
                return await self._kill(member, "kill leader", planned.size)
            await asyncio.sleep(0.1)

    def _leader(self) -> str:
        for server in self._stage.servers:
            with contextlib.suppress(OSError):
                name = server.call("HGET", self._keys.leader, "id")
                if isinstance(name, bytes):
                    return name.decode()
        return ""

    async def _stop_node(self, planned: Planned) -> bool:
        """SIGSTOP for longer than the lease: it wakes up and believes that it still owns everything."""
        member = self._fleet.pick(planned.pick)
        if member is None:
            return False
        start_us = now_us()
        member.stopped = True
        member.signal(signal.SIGSTOP)
        await asyncio.sleep(self._lease_s * (1.2 + planned.size))
        member.signal(signal.SIGCONT)
        member.stopped = False
        self._note(f"stop {member.name}", start_us, node=member.name, after_s=self._lease_s)
        return True

    async def _restart_node(self, planned: Planned) -> bool:
        """A clean stop and a new one: no fault at all, so nothing may be delivered twice for it."""
        member = self._fleet.pick(planned.pick)
        if member is None:
            return False
        await self._fleet.join()
        await self._fleet.leave(member)
        return True

    async def _extra_node(self, planned: Planned) -> bool:
        """One more for a while."""
        member = await self._fleet.join()
        await asyncio.sleep(self._lease_s * (1 + 2 * planned.size))
        if member.running:
            await self._fleet.leave(member)
        return True

    async def _clock_jump(self, planned: Planned) -> bool:
        member = self._fleet.pick(planned.pick)
        if member is None:
            return False
        start_us = now_us()
        member.order(f"jump {3600 if planned.size < 0.7 else -3600}")
        await asyncio.sleep(self._lease_s)
        self._note(f"clock jump of {member.name}", start_us, node=member.name, after_s=self._lease_s)
        return True

    # -- roads -----------------------------------------------------------------------------------------------

    def _road(self, planned: Planned) -> tuple[Road, str | None] | None:
        """A node's road, or a load's: whom a fault on it can excuse."""
        if planned.size < 0.25 and self._roads:
            return self._roads[int(planned.pick * len(self._roads))], "a client"
        member = self._fleet.pick(planned.pick)
        return (member.road, member.name) if member is not None else None

    async def _reset(self, planned: Planned) -> bool:
        found = self._road(planned)
        if found is None:
            return False
        start_us = now_us()
        cut = found[0].cut()
        self._note(f"reset {found[0].name}", start_us, node=found[1], after_s=self._lease_s)
        return cut > 0

    async def _dropped_reply(self, planned: Planned) -> bool:
        found = self._road(planned)
        if found is None:
            return False
        road, node = found
        start_us, before = now_us(), road.weather.swallowed
        road.weather.swallow = True
        caught = await _until(lambda: road.weather.swallowed > before, _CATCH_S)
        road.weather.swallow = False
        self._note(f"dropped reply to {road.name}", start_us, node=node, after_s=self._lease_s)
        return caught

    async def _delayed_command(self, planned: Planned) -> bool:
        """An old write arrives long after its sender was cut; mostly the sender is dead by then, another the owner."""
        found = self._road(planned)
        if found is None:
            return False
        road, node = found
        member = next((one for one in self._fleet.live if one.name == node), None)
        doomed = member is not None and planned.size > 0.4
        hold_s = self._lease_s * (2.5 if doomed else 0.3 + planned.size)
        start_us, before = now_us(), road.weather.held
        road.weather.hold_all = member is None
        road.weather.hold_s = hold_s
        caught = await _until(lambda: road.weather.held > before, _CATCH_S)
        road.weather.hold_s, road.weather.hold_all = 0.0, False
        if caught and doomed and member is not None and member.running:
            await self._fleet.kill(member)
            await self._fleet.join()
        if caught:
            await asyncio.sleep(hold_s)
        self._note(f"delayed command of {road.name}", start_us, node=node, after_s=self._lease_s)
        return caught

    async def _blackhole(self, planned: Planned) -> bool:
        """Silence for less than a lease, or a little more."""
        found = self._road(planned)
        if found is None:
            return False
        await self._silence([found], self._lease_s * (0.4 + planned.size), "blackhole")
        return True

    async def _lost_cable(self, planned: Planned) -> bool:
        """Connections that nobody closes and nobody answers on: only a timeout can tell."""
        member = self._fleet.pick(planned.pick)
        if member is None:
            return False
        start_us = now_us()
        numb = member.road.numb()
        self._note(f"lost cable of {member.name}", start_us, node=member.name, after_s=_NOTICED_S)
        return numb > 0

    async def _partition(self, planned: Planned) -> bool:
        """A part of the nodes cannot reach the servers for longer than the lease."""
        first = self._fleet.pick(planned.pick)
        if first is None:
            return False
        others = [one for one in self._fleet.live if one is not first and one.started.is_set()]
        cut_off = [first, *others[: int(planned.size * len(others))]]
        await self._silence(
            [(one.road, one.name) for one in cut_off], self._lease_s * (1.2 + planned.size), "partition"
        )
        return True

    async def _silence(self, roads: list[tuple[Road, str | None]], seconds: float, kind: str) -> None:
        start_us = now_us()
        for road, _ in roads:
            road.weather.fall_silent()
        await asyncio.sleep(seconds)
        for road, node in roads:
            road.weather.speak()
            self._note(f"{kind} of {road.name}", start_us, node=node, after_s=self._lease_s)

    # -- servers ---------------------------------------------------------------------------------------------

    async def _kill_server(self, planned: Planned) -> bool:
        assert isinstance(self._stage, Standalone)
        server = self._stage.server
        async with self._server_turn:
            start_us = now_us()
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(planned.size * self._lease_s)
            await asyncio.to_thread(server.start)
            self._note("kill server", start_us, node=None, after_s=self._lease_s)
        return True

    async def _hang_server(self, planned: Planned) -> bool:
        async with self._server_turn:
            servers = self._stage.servers
            server = servers[int(planned.pick * len(servers))]
            start_us = now_us()
            server.pause()
            await asyncio.sleep(self._lease_s * (0.5 + planned.size))
            server.resume()
            self._note("hang server", start_us, node=None, after_s=self._lease_s)
        return True

    async def _slow_server(self, planned: Planned) -> bool:
        """Every answer takes its time, for everybody."""
        start_us = now_us()
        roads = [*(member.road for member in self._fleet.live), *self._roads]
        for road in roads:
            road.weather.delay_s = 0.02 + 0.15 * planned.size
        await asyncio.sleep(2 * self._lease_s)
        for road in roads:
            road.weather.delay_s = 0.0
        self._note("slow server", start_us, node=None, after_s=self._lease_s)
        return True

    async def _script_flush(self, _: Planned) -> bool:
        async with self._server_turn:
            for server in await asyncio.to_thread(lambda: self._stage.servers):
                await asyncio.to_thread(server.call, "SCRIPT", "FLUSH")
        return True

    async def _migrate_slot(self, planned: Planned) -> bool:
        """A partition's slot moves to another master with all its keys, while it is written to and fired from."""
        assert isinstance(self._stage, Clustered)
        async with self._server_turn:
            slot = self._keys.partitions[int(planned.pick * len(self._keys))].slot
            return await asyncio.to_thread(_move, self._stage, slot, planned.size)

    async def _failover(self, planned: Planned) -> bool:
        """A master dies; its replica is promoted by the others; it comes back as a replica."""
        assert isinstance(self._stage, Clustered)
        async with self._server_turn:
            masters = await asyncio.to_thread(lambda: self._stage.servers)
            victim = masters[int(planned.pick * len(masters))]
            # What the replica had not yet is gone: answers of the last moment are no promise.
            start_us = now_us() - 1_000_000
            await asyncio.to_thread(victim.kill)
            await asyncio.to_thread(_wait_failed_over, self._stage.cluster, victim)
            self._note("failover", start_us, node=None, loses=True, after_s=self._lease_s)
            await asyncio.to_thread(victim.start)
            await asyncio.to_thread(self._stage.cluster.wait_ok)
            await asyncio.to_thread(_wait_replica, victim)
        return True

    async def _promotion(self, planned: Planned) -> bool:
        """The replica falls behind, the primary dies, and the replica takes its place without the last writes."""
        assert isinstance(self._stage, Pair)
        async with self._server_turn:
            start_us = now_us() - 1_000_000
            self._stage.link_weather.fall_silent()
            await asyncio.sleep(0.3 + planned.size)
            await self._stage.promote()
            self._note("promotion", start_us, node=None, loses=True, after_s=self._lease_s)
        return True


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # a trap on somebody else's road: there is only looking
                await asyncio.sleep(0.01)
            return True
    return False


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
