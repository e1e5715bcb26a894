"""Generated ids: random bytes whose last two place tasks of one call where they cost least.

A transaction, and later a tick, costs per partition it touches. Tasks that are put together are mostly due together, so
a call of some thousand tasks goes to a few partitions, one stretch of neighbours each, and the next call to the next
ones. In a large call whose tasks are due over a long time those of one second share a partition instead, so that a
slice gets many rows at once. The partition is still what the crc16 of the id says: whoever reads needs to know nothing
of this.
"""

import os
import random
from binascii import crc_hqx
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, repeat
from operator import xor
from struct import iter_unpack, pack
from typing import Final

from ..model.ids import IDH_BYTES

STRETCH: Final = 256
"""Tasks of one call that share a partition: by then its costs per partition are small against those per task."""

LARGE: Final = 32
"""Tasks for each partition from which on a call is large."""

SHARE: Final = 64
"""Tasks of one second and one large call that share a partition: beyond that a slice gains nothing by more of them."""

ENOUGH: Final = 8
"""Rows that fall into each slice by chance from which on nothing needs to be chosen."""

_CHOSEN: Final = 2
_FREE: Final = IDH_BYTES - _CHOSEN
_POLYNOMIAL: Final = 0x1021
_MOST_NUMBERS: Final = 1 << 8 * _CHOSEN


class GeneratedIds:
    """Ids for the tasks that carry none."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._next = random.randrange(partitions)
        self._states: dict[int, int] = {}

    def draw(self, count: int) -> bytes:
        """So many ids of 16 bytes, one behind the other."""
        stretches = -(-count // STRETCH)
        if count < 2 or stretches >= self._partitions or count > _MOST_NUMBERS:
            return os.urandom(IDH_BYTES * count)  # one task, or so many that chance fills every partition
        length = -(-count // stretches)
        turns = range(self._next, self._next + stretches)
        self._next = turns.stop % self._partitions
        return self._numbered(chain.from_iterable(repeat(self._state_for(turn), length) for turn in turns), count)

    def draw_by_second(self, dues_ms: Sequence[int]) -> bytes:
        """For a large call, ids that lead what is due in one second into one partition, at most SHARE at a time.

        Those of one call differ in a number: of what differs the crc16 is known beforehand.
        """
        seconds = (max(dues_ms) - min(dues_ms)) // 1000 + 1 if dues_ms else 0
        count = len(dues_ms)
        if not LARGE * self._partitions <= count <= min(ENOUGH * self._partitions * seconds, _MOST_NUMBERS):
            return self.draw(count)
        return self._numbered(self._states_of(dues_ms), count)

    def _numbered(self, states: Iterable[int], count: int) -> bytes:
        """Ids that differ in a number, each with the last bytes that lead from its state to where it belongs."""
        numbers, crcs = _numbers()
        base = os.urandom(_FREE - _CHOSEN)
        crc = crc_hqx(base + bytes(_CHOSEN), 0)
        chosen = map(numbers.__getitem__, map(xor, crcs, map(xor, states, repeat(crc, count))))
        return b"".join(chain.from_iterable(zip(repeat(base), numbers, chosen)))

    def _states_of(self, dues_ms: Sequence[int]) -> list[int]:
        """For each task what leads it into the partition of its second."""
        turn, partitions = random.randrange(self._partitions), self._partitions
        states = [self._state_for(turn + number) for number in range(partitions)]
        seconds = [due_ms // 1000 for due_ms in dues_ms]
        if max(Counter(seconds).values()) <= SHARE:
            return [states[second % partitions] for second in seconds]
        seen: Counter[int] = Counter()
        found = []
        for second in seconds:
            found.append(states[(second + seen[second] // SHARE) % partitions])
            seen[second] += 1
        return found

    def _state_for(self, turn: int) -> int:
        """Of some crc16 that belongs to the partition whose turn it is."""
        partition = turn % self._partitions
        state = self._states.get(partition)
        if state is None:
            state = _state_before(partition + self._partitions * random.randrange(65536 // self._partitions))
            self._states[partition] = state
        return state


@cache
def _numbers() -> tuple[list[bytes], list[int]]:
    """All numbers of two bytes, and the crc16 of each: behind other bytes it is the same, mixed with theirs."""
    together = pack(f">{_MOST_NUMBERS}H", *range(_MOST_NUMBERS))
    numbers = [number for (number,) in iter_unpack(f"{_CHOSEN}s", together)]
    return numbers, list(map(crc_hqx, numbers, repeat(0)))


def _state_before(crc: int) -> int:
    """What crc16's register must hold, mixed with two more bytes, to end as `crc`: its sixteen steps backwards."""
    for _ in range(8 * _CHOSEN):
        crc = (crc ^ _POLYNOMIAL) >> 1 | 0x8000 if crc & 1 else crc >> 1
    return crc
