"""Memory of the look-ahead, measured in a process of its own."""

import asyncio
import os
import sys
from typing import Final

import pytest

from mainspring.client.client import Client
from mainspring.engine.lookahead import CHUNK_BYTES, CHUNK_ROWS, CHUNKS_AT_ONCE
from mainspring.model.clock import ManualClock
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.testing.servers import standalone
from tests.support.look_ahead_memory import PARTITIONS, START_MS

LANES: Final = 20
PATIENCE_S: Final = 120
OVERHEAD: Final = 150
"""Bytes of an entry that are not its payload, roughly."""


@pytest.mark.parametrize("lanes", [False, True], ids=["plain", "lanes"])
@pytest.mark.parametrize(
    ("payload", "limit", "tasks"),
    [(48, 16 << 20, 120_000), (1_000, 32 << 20, 40_000), (64_000, 64 << 20, 1_400)],
    ids=["48 B", "1 kB", "64 kB"],
)
async def test_reading_ahead_keeps_its_limit_of_memory(payload: int, limit: int, tasks: int, lanes: bool) -> None:
    with standalone() as server:
        store = await Store.open(server.url, namespace="m", partitions=PARTITIONS, clock=ManualClock(START_MS))
        client = Client.over(store)
        for first in range(0, tasks, 20_000):
            some = range(first, min(tasks, first + 20_000))
            await client.put_many(
                Task(
                    "log:",
                    os.urandom(payload),
                    at=START_MS + 1_000 + n % 3_000,
                    lane=str(n % LANES) if lanes else None,
                )
                for n in some
            )
        await store.aclose()
        command = ("-m", "tests.support.look_ahead_memory", server.url, "m", str(limit), "due" if lanes else "early")
        # Released memory must return to the system at once: a large row leaves holes that smaller ones do not fill.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "32768"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, env=environment
        )
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await process.communicate()
    # Besides what is kept there is what a round of reading brings.
    round_bytes = CHUNKS_AT_ONCE[0] * min(CHUNK_BYTES, CHUNK_ROWS * (payload + OVERHEAD))
    assert limit // 4 < int(said) < 1.2 * limit + round_bytes
