"""Faults of the roads between nodes or clients and the servers."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from .fleet import Member
from .ground import Ground
from .profile import Kind
from .recorder import now_us
from .road import Road
from .schedule import Act, Planned

_CATCH_S: Final = 4.0
"""How long a trap waits for a command or a reply to fall into it."""


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
        """An old write arrives long after its sender was cut; mostly the sender is dead by then, another the owner."""
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
        """Connections that nobody closes and nobody answers on: only a timeout can tell."""
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
        """Their cables lie on the floor for so long. True if it hit one that lived."""
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
