"""The latest that the server's clock can stand at: what `early` and lateness are judged by.

A delivery is early when its due time lies ahead of the server's clock at the moment the sink has it. What is
known of that clock from here is an interval; judged by its upper end, nothing is called early that was not,
and lateness is never flattered. What it may overlook is bounded by the interval's width, `doubt_us`:

- a private server runs on this machine and reads the same clock as we do: the interval is a point;
- of any other server the interval follows from TIME: asked at a, answered at b (by our clock) with s, the
  server's clock was ahead of ours by at least s - b and at most s - a. The tightest of many samples counts,
  and every sample loses 200 ppm as it ages, because the two clocks drift.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from ..model.clock import DRIFT

_SAMPLE_EVERY_S: Final = 0.05
_FIRST_SAMPLES: Final = 50


class ServerTime:
    """`ask` returns the server's TIME in microseconds; None where the server shares this machine's clock."""

    def __init__(self, ask: Callable[[], Awaitable[int]] | None = None) -> None:
        self._ask = ask
        self._low_us = self._high_us = 0.0
        self._at_us = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._ask is None:
            return
        for _ in range(_FIRST_SAMPLES):
            await self._sample(self._ask)
        self._task = asyncio.create_task(self._keep(self._ask))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def latest_us(self) -> int:
        """No server clock stands later than this, now."""
        if self._ask is None:
            return time.time_ns() // 1000
        now_us = _local_us()
        return int(now_us + self._high_us + (now_us - self._at_us) * DRIFT)

    @property
    def doubt_us(self) -> float:
        """How much earlier it may stand."""
        if self._ask is None:
            return 0.0
        return self._high_us - self._low_us + 2 * (_local_us() - self._at_us) * DRIFT

    def now_ms(self) -> int:
        return self.latest_us() // 1000

    async def until(self, when_ms: int) -> None:
        """Until that time has come whichever end of the interval is right."""
        while True:
            left_ms = when_ms - (self.latest_us() - self.doubt_us) / 1000
            if left_ms <= 0:
                return
            await asyncio.sleep(left_ms / 1000)

    async def _keep(self, ask: Callable[[], Awaitable[int]]) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_EVERY_S)
            await self._sample(ask)

    async def _sample(self, ask: Callable[[], Awaitable[int]]) -> None:
        asked_us = _local_us()
        server_us = await ask()
        answered_us = _local_us()
        low, high = server_us - answered_us, server_us - asked_us
        if self._at_us:
            aged = (answered_us - self._at_us) * DRIFT
            low, high = max(low, self._low_us - aged), min(high, self._high_us + aged)
        if low > high:  # the server's clock was set: what was known before is worth nothing
            low, high = server_us - answered_us, server_us - asked_us
        self._low_us, self._high_us, self._at_us = low, high, answered_us


def _local_us() -> float:
    return time.monotonic_ns() / 1000
