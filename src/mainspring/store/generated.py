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
from collections.abc import Sequence
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
        """For a large call, ids that lead what is due in one second into one partition, at most SHARE at a time."""
        seconds = (max(dues_ms) - min(dues_ms)) // 1000 + 1 if dues_ms else 0
        if len(dues_ms) < STRETCH * self._partitions or len(dues_ms) > ENOUGH * self._partitions * seconds:
            return self.draw(len(dues_ms))
        block = os.urandom(IDH_BYTES * len(dues_ms))
        turn = random.randrange(self._partitions)
        stretches: dict[int, list[int]] = {}
        ids: list[bytes] = []
        for at, due_ms in zip(range(0, len(block), IDH_BYTES), dues_ms, strict=True):
            second = due_ms // 1000
            stretch = stretches.get(second)
            if stretch is None or not stretch[0]:
                number = 0 if stretch is None else stretch[2] + 1
                stretch = stretches[second] = [SHARE, self._state_for(second + turn + number), number]
            stretch[0] -= 1
            free = block[at : at + _FREE]
            ids += (free, (crc_hqx(free, 0) ^ stretch[1]).to_bytes(_CHOSEN, "big"))
        return b"".join(ids)

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


def _state_before(crc: int) -> int:
    """What crc16's register must hold, mixed with two more bytes, to end as `crc`: its sixteen steps backwards."""
    for _ in range(8 * _CHOSEN):
        crc = (crc ^ _POLYNOMIAL) >> 1 | 0x8000 if crc & 1 else crc >> 1
    return crc
