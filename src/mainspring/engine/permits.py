"""Asks the server for permits and slots of limits that all nodes share, a few at a time, and minds the valves."""

from collections.abc import Callable
from typing import Final

from ..store import limits
from ..store.store import Store
from .valve import Valve
from .valves import Valves

IDLE_S: Final = 1.0
SOON_S: Final = 0.02
"""While something waits, valves are looked at this often."""

_PROBED: Final = ("open", "half-open")


class Permits:
    """The role that keeps valves supplied."""

    def __init__(self, store: Store, valves: Valves, *, node: str, lease_s: float, changed: Callable[[], None]) -> None:
        self._store = store
        self._valves = valves
        self._node = node
        self._lease_ms = int(lease_s * 1000)
        self._changed = changed
        self.supplied = 0
        """Rounds in which something was granted."""

    async def step(self) -> float:
        """One round; returns the seconds until the next is needed."""
        self._valves.look()
        now_ms = self._store.clock.now_ms()
        wanting = [one for one in self._valves.bounded if one.limit and self._is_due(one, now_ms)]
        if wanting:
            asks = [limits.Ask(one.receiver, one.limit, one.in_flight, one.want(), one.permits) for one in wanting]
            answers = await limits.ask(self._store, self._node, asks, self._lease_ms)
            now_ms = self._store.clock.now_ms()
            supplied = [
                one.granted(ask.want, answer, now_ms) for one, ask, answer in zip(wanting, asks, answers, strict=True)
            ]
            if any(supplied):
                self.supplied += 1
                self._changed()
        return self._wait_s(now_ms)

    def _is_due(self, valve: Valve, now_ms: int) -> bool:
        if valve.thirsty:
            return now_ms >= valve.ask_at_ms or valve.ask_at_ms > now_ms + self._lease_ms
        # Slots are leased: those in use are renewed, those that nobody needs are given back.
        renew = valve.limit.concurrency is not None and (valve.slots > 0 or valve.in_flight > 0)
        return renew and now_ms >= valve.renewed_ms + self._lease_ms // 3

    def _wait_s(self, now_ms: int) -> float:
        waits = [IDLE_S]
        for valve in self._valves.bounded:
            if valve.thirsty:
                waits.append((valve.ask_at_ms - now_ms) / 1000)
            elif (breaker := valve.breaker) is not None and breaker.next_ms > now_ms and breaker.state in _PROBED:
                waits.append((breaker.next_ms - now_ms) / 1000)  # once that is past, it waits for tasks
            elif valve.refused or valve.slow_since_ms:
                waits.append(SOON_S)
        return max(SOON_S / 4, min(waits))
