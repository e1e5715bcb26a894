"""Generated ids: random bytes chosen so that the tasks of one call go where they cost least.

A transaction, and later a tick, costs per partition it touches. So a call is cut into stretches of neighbours, each of
which goes to one partition, the next stretch and the next call to the next one. The partition is still what the crc16
of the id says: whoever reads needs to know nothing of this.

An id of a stretch is twelve bytes that all of it share, and a number with its own crc16 behind it. Such a number adds
nothing to the crc16 of what stands before it, so the shared bytes alone decide about the partition.
"""

import os
import random
from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple

from ..model.ids import IDH_BYTES

STRETCH: Final = 256
"""Tasks of one call that share a partition: by then its costs per partition are small against those per task."""

_TAIL: Final = 4
_CHOSEN: Final = 2
_RANDOM: Final = IDH_BYTES - _TAIL - _CHOSEN
_FIRST_BITS: Final = 12
"""The first number of a stretch is a random one of so many bits: that, too, keeps ids apart."""
_POLYNOMIAL: Final = 0x1021


class Stretch(NamedTuple):
    """Ids of one partition: `head` with each of `tails` behind it."""

    partition: int
    head: bytes
    tails: Sequence[bytes]


class GeneratedIds:
    """Ids for the tasks that carry none."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._next = random.randrange(partitions)
        self._spare_bits = (65536 // partitions).bit_length() - 1
        """So many of crc16's values lead into one partition, at least."""

    def draw(self, count: int) -> Iterator[Stretch]:
        """So many ids, in stretches of about the same length."""
        stretches = -(-count // STRETCH)
        while count:
            size = -(-count // stretches)
            yield self._single() if count == stretches == 1 else self._stretch(size)
            count -= size
            stretches -= 1

    def each(self, count: int) -> Iterator[bytes]:
        """The same, one by one."""
        return (stretch.head + tail for stretch in self.draw(count) for tail in stretch.tails)

    def _single(self) -> Stretch:
        """One task has no neighbours: all of its id is random, and it goes anywhere."""
        idh = os.urandom(IDH_BYTES)
        return Stretch(crc_hqx(idh, 0) % self._partitions, idh[:-_TAIL], (idh[-_TAIL:],))

    def _stretch(self, size: int) -> Stretch:
        partition, self._next = self._next, (self._next + 1) % self._partitions
        free = os.urandom(_RANDOM)
        crc = partition + self._partitions * random.getrandbits(self._spare_bits)
        head = free + (crc_hqx(free, 0) ^ _register_before(crc)).to_bytes(_CHOSEN, "big")
        first = random.getrandbits(_FIRST_BITS)
        return Stretch(partition, head, _tails()[first : first + size])


@cache
def _tails() -> list[bytes]:
    numbers = [number.to_bytes(_TAIL - _CHOSEN, "big") for number in range((1 << _FIRST_BITS) + STRETCH)]
    return [number + crc_hqx(number, 0).to_bytes(_CHOSEN, "big") for number in numbers]


@cache
def _register_before(crc: int) -> int:
    """What crc16's register must hold, mixed with the chosen bytes, to end as `crc`: so many steps backwards."""
    for _ in range(8 * (_CHOSEN + _TAIL)):
        crc = (crc ^ _POLYNOMIAL) >> 1 | 0x8000 if crc & 1 else crc >> 1
    return crc
