"""Clocks. The server's time decides; a node estimates it, always slightly behind and never ahead."""

import math
import time
from typing import Final, Protocol

DRIFT: Final = 200e-6
"""Two clocks may drift apart by 200 ppm: the estimate lags by as much so that it never runs ahead."""
OLD_S: Final = 5.0
"""Seconds after which a sample is old: the estimate is a millisecond behind by then, and 17 seconds after a day."""


class Clock(Protocol):
    """The server's time in whole milliseconds, as this process knows it."""

    @property
    def manual(self) -> bool:
        """True if the time moves only by hand; scripts then take their time from the caller."""
        ...

    def now_ms(self) -> int: ...

    @property
    def old(self) -> bool:
        """True if the last sample is too old to extrapolate from."""
        ...

    def sample(self, server_us: int) -> None:
        """Record the server's time from a reply received just now."""
        ...


class ServerClock:
    """Extrapolates from the last known server time with this machine's monotonic clock."""

    manual = False

    def __init__(self) -> None:
        self._base_us = int(time.time() * 1e6)
        self._at = time.monotonic()
        self._sampled = False
        self._heard_s = -math.inf

    @property
    def old(self) -> bool:
        return steady_s() - self._heard_s >= OLD_S

    def _estimate_us(self) -> float:
        return self._base_us + (time.monotonic() - self._at) * 1e6 * (1 - DRIFT)

    def now_ms(self) -> int:
        return int(self._estimate_us() // 1000)

    def sample(self, server_us: int) -> None:
        self._heard_s = steady_s()
        # A reply was stamped before it arrived, so every sample is behind the true time: the largest is the best. Only
        # a sample far behind (the server's clock was set back, another server took over) replaces a larger one.
        behind_us = self._estimate_us() - server_us
        if self._sampled and 0 <= behind_us < 250_000:
            return
        self._base_us, self._at, self._sampled = server_us, time.monotonic(), True


class ManualClock:
    """A clock for tests that moves only by hand."""

    manual = True
    old = False

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = start_ms

    def now_ms(self) -> int:
        """Return epoch milliseconds by this clock."""
        return self._now_ms

    def advance(self, *, ms: int = 0, seconds: float = 0) -> int:
        """Move forward (or, with negative numbers, back) and return the new time."""
        self._now_ms += ms + round(seconds * 1000)
        return self._now_ms

    def set(self, now_ms: int) -> None:
        """Set the clock to a time in epoch milliseconds."""
        self._now_ms = now_ms

    def sample(self, server_us: int) -> None:
        """No offset to learn: the manual clock sets the server's time."""


def steady_s() -> float:
    """Return seconds that also pass while the machine sleeps: a suspended owner must wake up without its lease."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


SHARE: Final = 0.25
"""Part of the loop's time that this work takes at least. On a loop whose turns take 50 ms, work that yields after
every millisecond falls behind although everything waits for it."""
LONGEST_S: Final = 0.01


class TimeSlice:
    """Runs long work in short pieces: `least_s` at a time, longer if the loop's other turns take longer.

    time_slice.begin()
    for piece in work:
        if time_slice.over:
            time_slice.end()
            await asyncio.sleep(0)
            time_slice.begin()
        ...
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = self._length_s = least_s
        self._until = 0.0
        self._ended_at: float | None = None

    def begin(self) -> None:
        now = time.monotonic()
        if self._ended_at is not None:
            self._length_s = min(max(self._least_s, (now - self._ended_at) * SHARE), LONGEST_S)
            self._ended_at = None
        self._until = now + self._length_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> None:
        """End the slice: other tasks have the loop until the next `begin`."""
        self._ended_at = time.monotonic()
