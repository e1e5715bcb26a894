"""The sink of the benches: takes deliveries at next to no cost and judges them when the clock has stopped."""

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..model.delivery import Delivery
from ..model.errors import MainspringError
from ..model.outcome import DONE, Outcome
from .load import DIGITS, FROM, LANE_TASKS, Expected
from .server_time import ServerTime

STALL_S: Final = 15.0
"""So long without a delivery, and what is missing counts as lost."""

_AFTER_QUOTE: Final = 1
_MOST: Final = 255


class Tally:
    """A sink. Payloads are kept as one block a batch, with the time they came: about 0.1 us a task."""

    def __init__(self, expected: int, clock: ServerTime) -> None:
        self.expected = expected
        self.count = 0
        self.complete = asyncio.Event()
        self.completed_at = 0.0
        self.batches: list[tuple[int, bytes]] = []
        self._clock = clock

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.take([one.body.payload for one in batch])
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def take(self, payloads: list[bytes]) -> None:
        # The clock first: a task counts as received when it is handed over, not when it is filed.
        self.batches.append((self._clock.latest_us(), b"".join(payloads)))
        self.count += len(payloads)
        if self.count >= self.expected and not self.complete.is_set():
            self.completed_at = time.perf_counter()
            self.complete.set()

    async def wait(self) -> bool:
        """Until everything came; False when nothing has come for a long time."""
        seen, seen_at = -1, time.monotonic()
        while not self.complete.is_set():
            if self.count != seen:
                seen, seen_at = self.count, time.monotonic()
            elif time.monotonic() - seen_at > STALL_S:
                self.completed_at = time.perf_counter()
                return False
            try:
                async with asyncio.timeout(0.5):
                    await self.complete.wait()
            except TimeoutError:
                continue
        return True


@dataclass(slots=True)
class Verdict:
    """What the deliveries came to."""

    lost: int = 0
    duplicated: int = 0
    early: int = 0
    fired_after_cancel: int = 0
    misordered: int = 0
    """Tasks of a lane that came after a later one of the same lane."""
    lateness_ms: "array[float]" = field(default_factory=lambda: array("d"))


def judge(load: Expected, batches: Sequence[tuple[int, bytes]], *, late_from_ms: int | None = None) -> Verdict:
    """Count every number; compare every due time. Lateness is kept of tasks due from `late_from_ms` on."""
    verdict = Verdict()
    counts = bytearray(load.tasks)
    lanes: dict[int, int] = {}
    for received_us, block in batches:
        for number in _numbers(block, load.payload_bytes):
            counts[number] = min(counts[number] + 1, _MOST)
            due_ms = load.due_ms(number)
            late_us = received_us - due_ms * 1000
            verdict.early += late_us < 0
            if late_from_ms is not None and due_ms >= late_from_ms:
                verdict.lateness_ms.append(late_us / 1000)
            if load.lanes:
                lane = number // LANE_TASKS
                verdict.misordered += due_ms < lanes.get(lane, 0)
                lanes[lane] = due_ms
    _count(load, counts, verdict)
    return verdict


def _numbers(block: bytes, width: int) -> list[int]:
    if len(block) % width:
        raise MainspringError("a payload came back with another length than it was put with")
    firsts = range(_AFTER_QUOTE, len(block), width)
    return [int(block[at : at + DIGITS]) - FROM for at in firsts]


def _count(load: Expected, counts: bytearray, verdict: Verdict) -> None:
    for number, count in enumerate(counts):
        if count == 1 and not load.cancelled(number):
            continue
        if load.cancelled(number):
            verdict.fired_after_cancel += count
        elif count == 0:
            verdict.lost += 1
        else:
            verdict.duplicated += count - 1
