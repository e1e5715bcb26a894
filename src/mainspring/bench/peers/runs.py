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

_POLL_S: Final = 0.05


class Runs:
    """The file, seen from the bench. Its length is the counter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @property
    def count(self) -> int:
        return self.path.stat().st_size // RUN.size

    async def wait(self, count: int, tell: Callable[[int], None], *, stall_s: float = STALL_S) -> bool:
        """Until there are so many; False when there has been no run for a long time."""
        seen, seen_at = -1, time.monotonic()
        while (now := self.count) < count:
            if now != seen:
                seen, seen_at = now, time.monotonic()
                tell(now)
            elif time.monotonic() - seen_at > stall_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

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
    last_ns: int

    def late_by(self, share: float) -> float | None:
        """The lateness that this share of the tasks kept."""
        if not self.late_ms:
            return None
        return round(self.late_ms[min(len(self.late_ms) - 1, int(len(self.late_ms) * share))], 2)


def judge(times: Mapping[int, list[int]], dues_ms: Iterable[tuple[int, int]]) -> Verdict:
    """`dues_ms`: number and due time of every task that counts."""
    lost = duplicated = last_ns = 0
    late_ms: list[float] = []
    for number, due_ms in dues_ms:
        runs = times.get(number)
        if runs is None:
            lost += 1
            continue
        duplicated += len(runs) - 1
        late_ms.append(min(runs) / 1e6 - due_ms)
        last_ns = max(last_ns, min(runs))
    late_ms.sort()
    return Verdict(lost, duplicated, sum(late < 0 for late in late_ms), late_ms, last_ns)
