"""A run measures how late it wakes up: small stalls lengthen what it allows, long ones are faults."""

import asyncio
import time
from pathlib import Path

import pytest

from mainspring.testing.history import FaultEvent, StallEvent
from tests.support.chaos.recorder import STALL, Journal
from tests.support.chaos.run import Pulse


@pytest.mark.parametrize(("late_s", "stalls", "faults"), [(0.019, 0, 0), (0.021, 1, 0), (0.6, 1, 1)])
def test_only_what_is_late_counts(late_s: float, stalls: int, faults: int, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "history.jsonl")
    Pulse(journal, long_s=0.5).note(late_s)
    journal.close()
    events = journal.events
    assert [one.until_us - one.at_us for one in events if isinstance(one, StallEvent)] == [int(late_s * 1e6)] * stalls
    assert [one.what for one in events if isinstance(one, FaultEvent)] == [STALL] * faults


async def test_a_process_without_time_is_noticed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "history.jsonl")
    beat = asyncio.create_task(Pulse(journal, long_s=60.0).beat())
    await asyncio.sleep(0)  # it sleeps now
    time.sleep(0.3)  # noqa: ASYNC251  # nobody gets any time
    async with asyncio.timeout(60):
        while not journal.events:  # noqa: ASYNC110
            await asyncio.sleep(0)
    beat.cancel()
    journal.close()
    stall = journal.events[0]
    assert isinstance(stall, StallEvent)
    assert stall.until_us - stall.at_us >= 270_000
