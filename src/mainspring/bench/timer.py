"""How late a bare timer is on this machine: the least lateness possible for any program that waits for a time.

A separate process does nothing but wait for one moment after the other, until its standard input closes.
"""

import asyncio
import contextlib
import select
import sys
import time
from collections.abc import AsyncIterator
from typing import Final

import msgspec

_MODULE: Final = "mainspring.bench.timer"
_READY: Final = b"ready\n"


class Late(msgspec.Struct):
    """Lateness of the timer in milliseconds; filled in when the block ends."""

    ms: list[float] = []


@contextlib.asynccontextmanager
async def bare_timer(rate: int) -> AsyncIterator[Late]:
    """Wait for `rate` moments per second in another process while the block runs."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", _MODULE, str(rate), stdin=pipe, stdout=pipe, limit=1 << 24
    )
    assert process.stdin is not None
    assert process.stdout is not None
    late = Late()
    try:
        await process.stdout.readline()  # the process counts from here on
        yield late
    finally:
        process.stdin.close()
        report = await process.stdout.read()
        await process.wait()
    late.ms = msgspec.json.decode(report, type=list[float])


def percentile(values: list[float], share: float) -> float:
    """Return a percentile of a non-empty list, in any order."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main(rate: int) -> None:
    late_ms: list[float] = []
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    began = time.perf_counter()
    while True:
        due = began + (len(late_ms) + 1) / rate
        if select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
            break
        late_ms.append(round((time.perf_counter() - due) * 1000, 3))
    sys.stdout.buffer.write(msgspec.json.encode(late_ms))


if __name__ == "__main__":
    main(int(sys.argv[1]))
