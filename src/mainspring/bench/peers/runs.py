"""What ran when: the file in which every run of a peer leaves its number and its time, and what follows from it."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .other_side import RUN

STALL_S: Final = 30.0
"""So long without a run, and what is missing counts as lost. Some peers look for due tasks every few seconds only."""

_POLL_S: Final = 0.25


class Runs:
    """The file, seen from the bench. Its length is the counter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @property
    def count(self) -> int:
        return self.path.stat().st_size // RUN.size

    async def wait(self, numbers: range, tell: Callable[[int], None], *, stall_s: float = STALL_S) -> bool:
        """Until each of these has run; False when there has been no run for a long time."""
        seen, seen_at = -1, time.monotonic()
        while True:
            if (now := self.count) != seen:
                seen, seen_at = now, time.monotonic()
                tell(now)
                # Reading it all costs: only when so many ran as were scheduled up to the last of these.
                if now >= numbers.stop and self.times().keys() >= set(numbers):
                    return True
            elif time.monotonic() - seen_at > stall_s:
                return False
            await asyncio.sleep(_POLL_S)

    def times(self) -> dict[int, list[int]]:
        """For each number the nanoseconds at which it ran."""
        found: dict[int, list[int]] = {}
        text = self.path.read_bytes()
        for number, at_ns in RUN.iter_unpack(text[: len(text) // RUN.size * RUN.size]):
            found.setdefault(number, []).append(at_ns)
        return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of tasks whose due times are known. A task's first run counts; the others are duplicates."""

    lost: int
    duplicated: int
    early: int
    late_ms: list[float]
    """Sorted; negative for what was early."""
    first_ns: int
    last_ns: int

    @property
    def seconds(self) -> float:
        """From the first run to the last."""
        return (self.last_ns - self.first_ns) / 1e9

    def late_by(self, share: float) -> float | None:
        """The lateness that this share of the tasks kept."""
        if not self.late_ms:
            return None
        return round(self.late_ms[min(len(self.late_ms) - 1, int(len(self.late_ms) * share))], 2)


def judge(times: Mapping[int, list[int]], dues_ms: Iterable[tuple[int, int]]) -> Verdict:
    """`dues_ms`: number and due time of every task that counts."""
    lost = duplicated = 0
    late_ms: list[float] = []
    began_ns: list[int] = []
    for number, due_ms in dues_ms:
        runs = times.get(number)
        if runs is None:
            lost += 1
            continue
        duplicated += len(runs) - 1
        began_ns.append(min(runs))
        late_ms.append(min(runs) / 1e6 - due_ms)
    late_ms.sort()
    early = sum(late < 0 for late in late_ms)
    return Verdict(lost, duplicated, early, late_ms, min(began_ns, default=0), max(began_ns, default=0))
