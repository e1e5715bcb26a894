"""How late the run itself wakes up. Recorder and roads live in it: when it gets no time, nobody gets an answer."""

import asyncio
import time
from typing import Final

from ..events import Fault, Stall
from .recorder import STALL, Journal, now_us

_EVERY_S: Final = 0.02
_LATE_S: Final = 0.02
"""On a machine with time to spare a wake-up is a few milliseconds late at most."""


class Pulse:
    """Measures every stall and writes it down; a long one is a fault too, as nodes may have lost leases by it."""

    def __init__(self, journal: Journal, *, long_s: float) -> None:
        self._journal, self._long_s = journal, long_s

    async def beat(self) -> None:
        """Until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_EVERY_S)
            self.note(time.monotonic() - before - _EVERY_S)

    def note(self, late_s: float) -> None:
        """A wake-up that was so late."""
        until_us = now_us()
        from_us = until_us - int(late_s * 1e6)
        if late_s > _LATE_S:
            self._journal.add(Stall(from_us, until_us))
        if late_s > self._long_s:
            self._journal.add(Fault(from_us, until_us, STALL))
