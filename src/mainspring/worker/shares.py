"""How much of each queue a worker takes."""

from collections.abc import Iterable, Mapping
from typing import Final

PROBE: Final = 8
"""An empty queue is asked for this part of the room."""


class Shares:
    """Divides room between queues by weight. What a queue did not use goes to the others."""

    def __init__(self, weights: Mapping[str, int], *, strict: bool = False) -> None:
        self._weights = dict(weights)
        self._strict = strict
        self._owed = dict.fromkeys(self._weights, 0.0)
        self._dry: set[str] = set()
        self._round = 0

    @property
    def queues(self) -> list[str]:
        return list(self._weights)

    def split(self, room: int, having: Iterable[str]) -> dict[str, int]:
        """How much of each queue to ask for, of those that may have something."""
        names = [name for name in self._weights if name in set(having)]
        if not names or room < 1:
            return {}
        if self._strict:
            return {names[0]: room}
        full = [name for name in names if name not in self._dry] or names
        probes = self._probes(room, [name for name in names if name not in full])
        asks = probes | self._by_weight(room - sum(probes.values()), full)
        return {name: asks[name] for name in names if asks.get(name, 0) > 0}

    def _probes(self, room: int, dry: list[str]) -> dict[str, int]:
        """A queue that came back empty is asked for little: it shall be noticed when it fills, and hold up nobody."""
        self._round += 1
        most = room // PROBE or (1 if self._round % PROBE == 0 else 0)
        fit = room // most if most else 0
        first = self._round % len(dry) if dry else 0
        return dict.fromkeys((dry[first:] + dry[:first])[:fit], most)

    def _by_weight(self, room: int, names: list[str]) -> dict[str, int]:
        total = sum(self._weights[name] for name in names)
        asks = {}
        for name in names:
            self._owed[name] += room * self._weights[name] / total
            asks[name] = max(0, int(self._owed[name]))
        spare = room - sum(asks.values())
        for name in sorted(names, key=lambda one: asks[one] - self._owed[one]):
            if spare > 0:
                asks[name], spare = asks[name] + 1, spare - 1
        return asks

    def came(self, asked: Mapping[str, int], got: Mapping[str, int]) -> None:
        """What a round brought: whoever got less than its share keeps no claim to the rest."""
        for name, most in asked.items():
            count = got.get(name, 0)
            self._owed[name] = max(-1.0, min(self._owed[name] - count, 1.0)) if count >= most else 0.0
            if count:
                self._dry.discard(name)
            else:
                self._dry.add(name)
