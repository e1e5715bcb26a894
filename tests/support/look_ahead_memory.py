"""A process that reads ahead and prints how many bytes it grew by at most: give URL, namespace, look-ahead bytes,
and whether tasks come due.

Deliveries never end, so tasks of lanes wait behind the heads of their lanes.
"""

import asyncio
import gc
import os
import sys
from pathlib import Path
from typing import Final

from mainspring.engine.engine import EngineOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Delivery
from mainspring.testing.ticker import Ticker

START_MS: Final = 1_800_000_000_000
PARTITIONS: Final = 4
STEPS: Final = 60
STEP_MS: Final = 50
ROUNDS: Final = 40
"""Rounds of reading in a step at most: where there is no room, there is always more to read."""


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _never(_: Delivery) -> None:
    await asyncio.Event().wait()


async def grow(url: str, namespace: str, limit: int, *, due: bool) -> int:
    clock = ManualClock(START_MS)
    options = EngineOptions(lease_s=300.0, reach=Reach(tasks=10_000_000, bytes=limit))
    ticker = Ticker(
        url, namespace=namespace, partitions=PARTITIONS, clock=clock, options=options, handlers={"log": _never}
    )
    async with ticker:
        engine = ticker.engine
        await engine.keeper.step()
        gc.collect()
        before = most = _resident()
        for step in range(STEPS):
            for _ in range(ROUNDS):
                waits_s = await engine.lookahead.step()
                most = max(most, _resident())
                if waits_s:
                    break
            if not due:
                break
            if step == 0:
                clock.advance(ms=900)
            clock.advance(ms=STEP_MS)
            for _ in range(3):
                await engine.dispatcher.step()
        return most - before


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(grow(sys.argv[1], sys.argv[2], int(sys.argv[3]), due=sys.argv[4] == 'due'))}\n")
    sys.stdout.flush()
    os._exit(0)  # what is in flight never ends
