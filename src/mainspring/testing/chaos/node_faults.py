"""Faults of nodes: killed, stopped, told a wrong time; and the comings and goings that are no faults."""

import asyncio
import contextlib

from .fleet import Member
from .ground import Ground
from .member_faults import exchange, kill, stop
from .profile import Kind
from .recorder import now_us
from .schedule import Act, Planned


class NodeFaults:
    """What happens to node processes."""

    def __init__(self, ground: Ground) -> None:
        self._on = ground
        self.acts: dict[Kind, Act] = {
            "kill node": self._kill_node,
            "stop node": self._stop_node,
            "kill leader": self._kill_leader,
            "restart node": self._restart_node,
            "extra node": self._extra_node,
            "clock jump": self._clock_jump,
        }

    async def _kill_node(self, planned: Planned) -> bool:
        return await self._kill(self._on.fleet.pick(planned.pick), "kill node", planned.size)

    async def _kill(self, member: Member | None, kind: str, size: float) -> bool:
        return await kill(self._on, self._on.fleet, member, kind, size, leases=1)

    async def _kill_leader(self, planned: Planned) -> bool:
        """Whoever leads now; after the last leader's death it takes a moment until somebody does."""
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
