"""How often a node ticks."""

import time
from math import inf
from typing import Final


class Pace:
    """How long to wait between ticks: the busier, the longer, so that each call has more to carry."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._began = 0.0

    def ticked(self, tasks: int, began: float) -> None:
        elapsed = max(began - self._began, 1e-4)
        self._began = began
        # Over half a second: a single full tick is not yet a load.
        self._rate += (tasks / elapsed - self._rate) * min(1.0, elapsed / 0.5)

    def wait_s(self) -> float:
        """Until the next tick, counted from the start of the last."""
        gap = next(gap for limit, gap in _GAPS_S if self._rate < limit)
        return max(0.0, self._began + gap - time.monotonic())


_GAPS_S: Final = ((2_000.0, 0.001), (15_000.0, 0.0015), (25_000.0, 0.005), (inf, 0.010))
"""Up to so many tasks a second, a tick at most every so many seconds; see docs/decisions/0022."""
