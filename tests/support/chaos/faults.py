"""The faults: each strikes once, says whom it hit and for how long, and undoes everything."""

import asyncio
import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import hiredis

from mainspring.store.keys import Keyspace
from mainspring.testing.history import FaultEvent, WroteEvent
from mainspring.testing.servers import Server, ServerCluster, ok, wait_until

from .fleet import Fleet, Member
from .network import Road
from .profile import Act, Kind, Planned
from .recorder import Journal, Recorder, now_us
from .servers import Clustered, Pair, Stage, Standalone


@dataclass(frozen=True, slots=True)
class Ground:
    """The parts of a run that can be broken."""

    stage: Stage
    fleet: Fleet
    roads: list[Road]
    """Of the load; each node has its own."""
    journal: Journal
    recorder: Recorder
    keys: Keyspace
    lease_s: float
    workers: Fleet | None = None
    """Where the profile has some."""

    def note(self, what: str, start_us: int, *, node: str | None, loses: bool = False, after_s: float = 0.0) -> None:
        """Something was broken from then until now, and its effects last a little longer."""
        self.journal.add(FaultEvent(start_us, now_us() + int(after_s * 1e6), what, node, loses))


async def kill(on: Ground, fleet: Fleet, member: Member | None, what: str, size: float, *, leases: float) -> bool:
    """SIGKILL, and another one after a while. Its effects last so many leases."""
    if member is None:
        return False
    start_us = now_us()
    await fleet.kill(member)
    on.note(f"{what} {member.name}", start_us, node=member.name, after_s=leases * on.lease_s)
    await asyncio.sleep(size * on.lease_s)
    await fleet.join()
    return True


async def stop(on: Ground, member: Member | None, what: str, size: float) -> bool:
    """SIGSTOP for longer than the lease: it wakes up and believes that it still has everything."""
    if member is None:
        return False
    start_us = now_us()
    member.stopped = True
    member.signal(signal.SIGSTOP)
    await asyncio.sleep(on.lease_s * (1.2 + size))
    member.signal(signal.SIGCONT)
    member.stopped = False
    on.note(f"{what} {member.name}", start_us, node=member.name, after_s=on.lease_s)
    return True


async def exchange(fleet: Fleet, member: Member | None) -> bool:
    """A new one and a clean stop: no fault at all, so nothing may be delivered twice for it."""
    if member is None:
        return False
    await fleet.join()
    if not member.running:
        return False  # another fault killed it meanwhile
    await fleet.leave(member)
    return True


_CATCH_S: Final = 4.0
"""How long a trap waits for a command, a reply or a delivery to fall into it."""
_HANGING: Final = 6
_STOPPING_S: Final = 0.4
"""How long after SIGTERM the failures begin, at most."""
_WRITES: Final = 8
"""With which of its writes after that the node dies, at most."""


class NodeFaults:
    """What happens to node processes."""

    def __init__(self, ground: Ground) -> None:
        self._on = ground
        self.acts: dict[Kind, Act] = {
            "kill node": self._kill_node,
            "stop node": self._stop_node,
            "kill leader": self._kill_leader,
            "kill stopping node": self._kill_stopping_node,
            "restart node": self._restart_node,
            "extra node": self._extra_node,
            "clock jump": self._clock_jump,
        }

    async def _kill_node(self, planned: Planned) -> bool:
        return await self._kill(self._on.fleet.pick(planned.pick), "kill node", planned.size)

    async def _kill(self, member: Member | None, kind: str, size: float) -> bool:
        return await kill(self._on, self._on.fleet, member, kind, size, leases=1)

    async def _kill_leader(self, planned: Planned) -> bool:
        """Return the present leader; after a leader's death it takes a moment until there is one."""
        give_up = asyncio.get_running_loop().time() + 4 * self._on.lease_s
        while True:
            leader = await asyncio.to_thread(self._leader)
            member = next((one for one in self._on.fleet.live if one.name == leader), None)
            if member is not None or asyncio.get_running_loop().time() > give_up:
                return await self._kill(member, "kill leader", planned.size)
            await asyncio.sleep(0.1)

    def _leader(self) -> str:
        for server in self._on.stage.servers:
            with contextlib.suppress(OSError):
                name = server.call("HGET", self._on.keys.leader, "id")
                if isinstance(name, bytes):
                    return name.decode()
        return ""

    async def _stop_node(self, planned: Planned) -> bool:
        return await stop(self._on, self._on.fleet.pick(planned.pick), "stop", planned.size)

    async def _kill_stopping_node(self, planned: Planned) -> bool:
        """SIGTERM while deliveries hang; all but one of them fail in bursts, and SIGKILL falls into the drain."""
        member = self._on.fleet.pick(planned.pick)
        if member is None:
            return False
        recorder, start_us = self._on.recorder, now_us()
        held = recorder.hold(member.name)
        if held is None:
            return False
        caught = await _until(lambda: len(held.waiting) >= _HANGING, _CATCH_S)
        if not caught or not member.running:
            recorder.let_go(member.name)
            return False
        tokens = {one.token for given, _ in held.waiting for one in given}
        member.doomed = True
        member.signal(signal.SIGTERM)
        await asyncio.sleep(_STOPPING_S * planned.pick)
        before, last_write = len(self._on.journal.events), 1 + int(_WRITES * planned.size)

        def written() -> bool:
            events = self._on.journal.events[before:]
            return sum(isinstance(one, WroteEvent) and one.token in tokens for one in events) >= last_write

        give_up = time.monotonic() + _CATCH_S
        while not written() and time.monotonic() < give_up:
            if len(held.waiting) > 1:
                recorder.fail(held, 1)
            await asyncio.sleep(0)  # not longer: between two writes of a drain there is a millisecond
        await self._on.fleet.kill(member)
        self._on.note(f"kill stopping {member.name}", start_us, node=member.name, after_s=self._on.lease_s)
        await self._on.fleet.join()
        return True

    async def _restart_node(self, planned: Planned) -> bool:
        return await exchange(self._on.fleet, self._on.fleet.pick(planned.pick))

    async def _extra_node(self, planned: Planned) -> bool:
        """One more for a while."""
        member = await self._on.fleet.join()
        await asyncio.sleep(self._on.lease_s * (1 + 2 * planned.size))
        if member.running:
            await self._on.fleet.leave(member)
        return True

    async def _clock_jump(self, planned: Planned) -> bool:
        member = self._on.fleet.pick(planned.pick)
        if member is None:
            return False
        start_us = now_us()
        member.order(f"jump {3600 if planned.size < 0.7 else -3600}")
        await asyncio.sleep(self._on.lease_s)
        self._on.note(f"clock jump of {member.name}", start_us, node=member.name, after_s=self._on.lease_s)
        return True


class RoadFaults:
    """What happens on the way."""

    def __init__(self, ground: Ground) -> None:
        self._on = ground
        self.acts: dict[Kind, Act] = {
            "reset": self._reset,
            "dropped reply": self._dropped_reply,
            "delayed command": self._delayed_command,
            "blackhole": self._blackhole,
            "lost cable": self._lost_cable,
            "partition": self._partition,
        }

    def _road(self, planned: Planned) -> tuple[Road, str | None] | None:
        """A node's road, or a load's: whom a fault on it can excuse."""
        if planned.size < 0.25 and self._on.roads:
            return self._on.roads[int(planned.pick * len(self._on.roads))], "a client"
        member = self._on.fleet.pick(planned.pick)
        return (member.road, member.name) if member is not None else None

    async def _reset(self, planned: Planned) -> bool:
        found = self._road(planned)
        if found is None:
            return False
        start_us = now_us()
        cut = found[0].cut()
        self._on.note(f"reset {found[0].name}", start_us, node=found[1], after_s=self._on.lease_s)
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
        self._on.note(f"dropped reply to {road.name}", start_us, node=node, after_s=self._on.lease_s)
        return caught

    async def _delayed_command(self, planned: Planned) -> bool:
        """An old write arrives long after its sender was cut off; mostly the sender is dead by then, and another node
        the owner."""
        found = self._road(planned)
        if found is None:
            return False
        road, node = found
        member = next((one for one in self._on.fleet.live if one.name == node), None)
        doomed = member is not None and planned.size > 0.4
        hold_s = self._on.lease_s * (2.5 if doomed else 0.3 + planned.size)
        start_us, before = now_us(), road.weather.held
        road.weather.hold_all = member is None
        road.weather.hold_s = hold_s
        caught = await _until(lambda: road.weather.held > before, _CATCH_S)
        road.weather.hold_s, road.weather.hold_all = 0.0, False
        if caught and doomed and member is not None and member.running:
            await self._on.fleet.kill(member)
            await self._on.fleet.join()
        if caught:
            await asyncio.sleep(hold_s)
        self._on.note(f"delayed command of {road.name}", start_us, node=node, after_s=self._on.lease_s)
        return caught

    async def _blackhole(self, planned: Planned) -> bool:
        """Silence for less than a lease, or a little more."""
        found = self._road(planned)
        if found is None:
            return False
        await self._silence([found], self._on.lease_s * (0.4 + planned.size), "blackhole")
        return True

    async def _lost_cable(self, planned: Planned) -> bool:
        """Connections that stay open without an answer: only a timeout notices."""
        member = self._on.fleet.pick(planned.pick)
        if member is None:
            return False
        start_us = now_us()
        numb = member.road.numb()
        # A node gives a server half its lease to answer, or a second, before it takes another connection.
        self._on.note(f"lost cable of {member.name}", start_us, node=member.name, after_s=2 * self._on.lease_s)
        return numb > 0

    async def _partition(self, planned: Planned) -> bool:
        """A part of the nodes cannot reach the servers for longer than the lease: cables pulled, or silent roads."""
        first = self._on.fleet.pick(planned.pick)
        if first is None:
            return False
        others = [one for one in self._on.fleet.live if one is not first and one.started.is_set()]
        cut_off = [first, *others[: int(planned.size * len(others))]]
        seconds = self._on.lease_s * (1.2 + planned.size)
        if first.cable is not None:
            return await self._pull(cut_off, seconds)
        await self._silence([(one.road, one.name) for one in cut_off], seconds, "partition")
        return True

    async def _pull(self, members: list[Member], seconds: float) -> bool:
        """Pull their cables for a while. Return True if it hit a live node."""
        start_us = now_us()
        cables = [one.cable for one in members if one.cable is not None]
        try:
            pulled = [await asyncio.to_thread(cable.pull) for cable in cables]
            await asyncio.sleep(seconds)
        finally:
            for cable in cables:
                await asyncio.to_thread(cable.plug_in)
        for one in members:
            # Its kernel tries again at growing intervals, so it may be silent for as long as it has been.
            self._on.note(f"partition of {one.name}", start_us, node=one.name, after_s=seconds)
        return any(pulled)

    async def _silence(self, roads: list[tuple[Road, str | None]], seconds: float, kind: str) -> None:
        start_us = now_us()
        for road, _ in roads:
            road.weather.fall_silent()
        await asyncio.sleep(seconds)
        for road, node in roads:
            road.weather.speak()
            self._on.note(f"{kind} of {road.name}", start_us, node=node, after_s=self._on.lease_s)


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # a trap on somebody else's road: there is only looking
                await asyncio.sleep(0.01)
            return True
    return False


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


def _wait_failed_over(cluster: ServerCluster, victim: Server) -> None:
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


class WorkerFaults:
    """What happens to worker processes."""

    def __init__(self, ground: Ground) -> None:
        self._on = ground
        self.acts: dict[Kind, Act] = {
            "kill worker": self._kill_worker,
            "stop worker": self._stop_worker,
            "restart worker": self._restart_worker,
        }

    @property
    def _workers(self) -> Fleet:
        assert self._on.workers is not None, "the profile has no workers"
        return self._on.workers

    async def _kill_worker(self, planned: Planned) -> bool:
        """Its runs belong to others one lease later."""
        workers = self._workers
        return await kill(self._on, workers, workers.pick(planned.pick), "kill worker", planned.size, leases=2)

    async def _stop_worker(self, planned: Planned) -> bool:
        """It wakes up in runs that others have taken over and ended."""
        return await stop(self._on, self._workers.pick(planned.pick), "stop worker", planned.size)

    async def _restart_worker(self, planned: Planned) -> bool:
        """It finishes the jobs it runs, and gives back those it has not begun."""
        return await exchange(self._workers, self._workers.pick(planned.pick))


_TRIES: Final = 8
_PATIENCE_S: Final = 20.0
"""A fault looks for a victim for at least this long: after a server's death all nodes may be starting again."""


class Faults:
    """Carries out what was planned. A fault counts when it took effect."""

    def __init__(self, ground: Ground) -> None:
        self._pause_s = ground.lease_s / 3
        self._acts = NodeFaults(ground).acts | RoadFaults(ground).acts | ServerFaults(ground).acts
        self._acts |= WorkerFaults(ground).acts
        self.done: Counter[Kind] = Counter()

    async def strike(self, planned: Planned) -> None:
        """Strike once; if the victim died of something else, choose another."""
        give_up = time.monotonic() + _PATIENCE_S
        for attempt in itertools.count():
            if attempt >= _TRIES and time.monotonic() > give_up:
                return
            shift = attempt * 0.37
            shifted = planned._replace(pick=(planned.pick + shift) % 1.0, size=(planned.size + shift) % 1.0)
            if await self._acts[planned.kind](shifted):
                self.done[planned.kind] += 1
                return
            await asyncio.sleep(self._pause_s)
