"""How often a client may come: one bucket each, which fills with time."""

import time
from collections import OrderedDict
from collections.abc import Callable
from math import ceil
from typing import Final

from .problems import Problem

MOST_CLIENTS: Final = 10_000
FAILURES_A_SECOND: Final = 1.0
FAILURES_AT_ONCE: Final = 20.0
"""Wrong keys an address may show; a person who mistypes one never gets there."""


class Rates:
    """Buckets by client. The one that was quiet for longest is forgotten first: its bucket is full again anyway."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, processes: int = 1) -> None:
        self._now = now
        self._processes = max(1, processes)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, rate: float, burst: float) -> None:
        """One more request; a Problem that says when the next may come if it is too many.

        Of several processes on one port each lets in its part: connections spread over them, and they share no counts.
        """
        now = self._now()
        said, rate, burst = rate, rate / self._processes, max(1.0, burst / self._processes)
        level, at = self._buckets.pop(client, (burst, now))
        level = min(burst, level + (now - at) * rate)
        if level < 1:
            self._buckets[client] = (level, now)
            raise Problem(
                "rate",
                f"more than {said:g} requests a second; wait as Retry-After says",
                retry_after=str(max(1, ceil((1 - level) / rate))),
            )
        self._buckets[client] = (level - 1, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
