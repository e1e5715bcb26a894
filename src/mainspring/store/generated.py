"""Generated ids: random bytes whose last two place tasks of one call where they cost least.

A transaction, and later a tick, costs per partition it touches. Tasks that are put together are mostly due together, so
a call of some hundred tasks goes to a few partitions, one stretch of neighbours each, and the next call to the next
ones. A larger call reaches all partitions anyway; there tasks that are due in the same second share one, so that a
slice gets many rows at once. The partition is still what the crc16 of the id says: whoever reads needs to know nothing
of this.
"""

import os
import random
from binascii import crc_hqx
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain, repeat
from operator import xor
from typing import Final

from ..model.ids import IDH_BYTES

STRETCH: Final = 32
"""Tasks that share a partition: by then its costs per partition are small against those per task."""

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
        block = os.urandom(IDH_BYTES * count)
        if count < 2 or count >= STRETCH * self._partitions:
            return block  # one task, or so many that chance fills every partition
        stretches = -(-count // STRETCH)
        length = -(-count // stretches) * IDH_BYTES
        return b"".join(self._steered(block[at : at + length]) for at in range(0, len(block), length))

    def draw_by_second(self, dues_ms: Sequence[int]) -> bytes:
        """For a large call, ids that lead what is due in one second into one partition, at most SHARE at a time.

        Those of one call differ in a number: of what differs the crc16 is known beforehand.
        """
        seconds = (max(dues_ms) - min(dues_ms)) // 1000 + 1 if dues_ms else 0
        count = len(dues_ms)
        if not STRETCH * self._partitions <= count <= min(ENOUGH * self._partitions * seconds, _MOST_NUMBERS):
            return self.draw(count)
        numbers, crcs = _numbers()
        base = os.urandom(_FREE - _CHOSEN)
        crc = crc_hqx(base + bytes(_CHOSEN), 0)
        chosen = map(numbers.__getitem__, map(xor, crcs, self._states_of(dues_ms, crc)))
        return b"".join(chain.from_iterable(zip(repeat(base), numbers, chosen)))

    def _states_of(self, dues_ms: Sequence[int], crc: int) -> list[int]:
        """For each task what leads it into the partition of its second, mixed with a crc16."""
        turn, partitions = random.randrange(self._partitions), self._partitions
        states = [self._state_for(turn + number) ^ crc for number in range(partitions)]
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

    def _steered(self, block: bytes) -> bytes:
        """The same ids with their last bytes changed so that all have one crc16: one of the next partition's."""
        partition, self._next = self._next, (self._next + 1) % self._partitions
        state = _state_before(partition + self._partitions * random.randrange(65536 // self._partitions))
        ids: list[bytes] = []
        for at in range(0, len(block), IDH_BYTES):
            free = block[at : at + _FREE]
            ids += (free, (crc_hqx(free, 0) ^ state).to_bytes(_CHOSEN, "big"))
        return b"".join(ids)


@cache
def _numbers() -> tuple[list[bytes], list[int]]:
    """All numbers of two bytes, and the crc16 of each: behind other bytes it is the same, mixed with theirs."""
    numbers = [number.to_bytes(_CHOSEN, "big") for number in range(_MOST_NUMBERS)]
    return numbers, [crc_hqx(number, 0) for number in numbers]


def _state_before(crc: int) -> int:
    """What crc16's register must hold, mixed with two more bytes, to end as `crc`: its sixteen steps backwards."""
    for _ in range(8 * _CHOSEN):
        crc = (crc ^ _POLYNOMIAL) >> 1 | 0x8000 if crc & 1 else crc >> 1
    return crc
