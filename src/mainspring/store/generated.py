"""Generated ids: random bytes chosen so that the tasks of one call go where they cost least.

A transaction, and later a tick, costs per partition it touches. So a call is cut into stretches of neighbours, each of
which goes to one partition, the next stretch to the next one. The next call begins one further on, however many
stretches there were: calls of one size would else bring the same times to the same partitions. The partition is still
what the crc16 of the id says: whoever reads needs to know nothing of this.

An id of a stretch is a number with its own crc16 behind it, mixed with four random bytes, and twelve bytes that all of
the stretch share. Such a number adds nothing to the crc16 of an id, so what is random and shared alone decides about
the partition. What differs comes first: of a cancelled task only the first four bytes of its id are kept.
"""

import os
import random
from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from functools import cache
from struct import iter_unpack
from typing import Final, NamedTuple

from ..model.ids import IDH_BYTES

STRETCH: Final = 256
"""Tasks of one call that share a partition: by then its costs per partition are small against those per task."""

GATHERED: Final = 32
"""So many large calls fill the same slices. With more these would get too long, where very many tasks are put."""

_OWN: Final = 4
_CHOSEN: Final = 2
_POLYNOMIAL: Final = 0x1021


class Stretch(NamedTuple):
    """Ids of one partition: each of `heads` with `tail` behind it."""

    partition: int
    heads: Sequence[bytes]
    tail: bytes


class GeneratedIds:
    """Ids for the tasks that carry none."""

    def __init__(self, partitions: int, *, gathered: bool = False) -> None:
        """`gathered`: of calls that fill every partition some in a row do bring the same times to the same ones."""
        self._partitions = partitions
        self._gathered = gathered
        self._large = 0
        """Of those so many."""
        self._next = random.randrange(partitions)
        self._spare_bits = (65536 // partitions).bit_length() - 1
        """So many of crc16's values lead into one partition, at least."""

    def draw(self, count: int) -> Iterator[Stretch]:
        """So many ids, in stretches of about the same length."""
        stretches = -(-count // STRETCH)
        partition = self._begin(stretches)
        while count:
            size = -(-count // stretches)
            yield self._single() if count == stretches == 1 else self._stretch(partition, size)
            partition = (partition + 1) % self._partitions
            count -= size
            stretches -= 1

    def each(self, count: int) -> Iterator[bytes]:
        """The same, one by one."""
        return (head + stretch.tail for stretch in self.draw(count) for head in stretch.heads)

    def _begin(self, stretches: int) -> int:
        if self._gathered and stretches >= self._partitions:
            begin, self._large = self._large // GATHERED % self._partitions, self._large + 1
            return begin
        self._next = (self._next + 1) % self._partitions
        return self._next

    def _single(self) -> Stretch:
        """One task has no neighbours: all of its id is random, and it goes anywhere."""
        idh = os.urandom(IDH_BYTES)
        return Stretch(crc_hqx(idh, 0) % self._partitions, (idh[:_OWN],), idh[_OWN:])

    def _stretch(self, partition: int, size: int) -> Stretch:
        free = os.urandom(IDH_BYTES - _CHOSEN)
        crc = partition + self._partitions * random.getrandbits(self._spare_bits)
        chosen = crc_hqx(free, 0) ^ _register_before(crc)
        return Stretch(partition, _mixed(free[:_OWN], size), free[_OWN:] + chosen.to_bytes(_CHOSEN, "big"))


def _mixed(with_: bytes, size: int) -> list[bytes]:
    """The first numbers, each mixed with these bytes; all of them in one step."""
    together = int.from_bytes(_NUMBERS[: _OWN * size]) ^ int.from_bytes(with_ * size)
    return [head for (head,) in iter_unpack(f"{_OWN}s", together.to_bytes(_OWN * size))]


@cache
def _register_before(crc: int) -> int:
    """What crc16's register must hold, mixed with the chosen bytes, to end as `crc`: its steps backwards."""
    for _ in range(8 * _CHOSEN):
        crc = (crc ^ _POLYNOMIAL) >> 1 | 0x8000 if crc & 1 else crc >> 1
    return crc


def _with_crc(number: bytes) -> bytes:
    return number + crc_hqx(number, 0).to_bytes(_CHOSEN, "big")


_NUMBERS: Final = b"".join(_with_crc(number.to_bytes(_OWN - _CHOSEN)) for number in range(STRETCH))
