"""The faults: each strikes once, says whom it hit and for how long, and puts everything right again."""

import asyncio
import itertools
import time
from collections import Counter
from typing import Final

from .ground import Ground
from .node_faults import NodeFaults
from .profile import Kind
from .road_faults import RoadFaults
from .schedule import Planned
from .server_faults import ServerFaults
from .worker_faults import WorkerFaults

_TRIES: Final = 8
_PATIENCE_S: Final = 20.0
"""So long at least a fault looks for somebody to hit: after a server's death all nodes may be starting anew."""


class Faults:
    """Carries out what was planned. A fault counts when it took effect."""

    def __init__(self, ground: Ground) -> None:
        self._pause_s = ground.lease_s / 3
        self._acts = NodeFaults(ground).acts | RoadFaults(ground).acts | ServerFaults(ground).acts
        self._acts |= WorkerFaults(ground).acts
        self.done: Counter[Kind] = Counter()

    async def strike(self, planned: Planned) -> None:
        """Strike once; where it hit nobody (its victim died of something else), choose another."""
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
