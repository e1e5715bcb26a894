"""Generated ids: random bytes whose last two place neighbours of one call into one partition.

A transaction, and later a tick, costs per partition it touches. Tasks that are put together are mostly due together, so
a call of some hundred tasks goes to a few partitions, one stretch of neighbours each, and the next call to the next
ones. The partition is still what the crc16 of the id says: whoever reads needs to know nothing of this.
"""

import os
import random
from binascii import crc_hqx
from typing import Final

from ..model.ids import IDH_BYTES

STRETCH: Final = 32
"""Tasks that share a partition: by then its costs per partition are small against those per task."""

_CHOSEN: Final = 2
_FREE: Final = IDH_BYTES - _CHOSEN
_POLYNOMIAL: Final = 0x1021


class GeneratedIds:
    """Ids for the tasks that carry none."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._next = random.randrange(partitions)

    def draw(self, count: int) -> bytes:
        """So many ids of 16 bytes, one behind the other."""
        block = os.urandom(IDH_BYTES * count)
        if count < 2 or count >= STRETCH * self._partitions:
            return block  # one task, or so many that chance fills every partition
        stretches = -(-count // STRETCH)
        length = -(-count // stretches) * IDH_BYTES
        return b"".join(self._steered(block[at : at + length]) for at in range(0, len(block), length))

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
