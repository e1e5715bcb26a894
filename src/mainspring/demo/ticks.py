"""Random ticks: of which item, when, and as which text. A tick is known again by one number made of item and time."""

import random
import time
from array import array
from collections.abc import Sequence
from itertools import chain, count
from math import gcd
from typing import Final

import msgspec

from .plan import Plan

_PREFIX: Final = "user"
_GOLDEN: Final = 0.618
"""Of the items a stride: neighbours are then far apart in time."""


class Tick(msgspec.Struct, gc=False):
    item: str
    at: int


class Ticks:
    """What the plan asks for, one after the other, due at a random time from now on.

    Through all items in a mixed order: once, or again and again where time is the limit. Not any item at any time: two
    ticks of one item in one millisecond are one tick, and the sums would not tell. Strides rather than a shuffled list:
    the first tick must not wait for a million of them.
    """

    def __init__(self, plan: Plan) -> None:
        self._random = random.Random()
        self._least_ms = min(1000, plan.within_ms // 2)
        """Not sooner: a tick that is due while it is posted says nothing about lateness."""
        self._spread_ms = plan.within_ms - self._least_ms
        self._ids = ids = plan.ids
        self._stride = next(step for step in count(int(ids * _GOLDEN) or 1) if gcd(step, ids) == 1)
        self._at = self._random.randrange(ids)
        self._left = ids if plan.seconds is None else None

    def take(self, most: int) -> list[int]:
        """The numbers of the next ticks; fewer after the last."""
        if self._left is not None:
            most = min(most, self._left)
            self._left -= most
        end = self._at + most * self._stride
        walk, self._at = range(self._at, end, self._stride), end % self._ids
        first_ms, spread_ms, ids = time.time_ns() // 1_000_000 + self._least_ms, self._spread_ms, self._ids
        draws = array("Q", self._random.randbytes(8 * most))  # a call for each costs more than the rest of a tick
        return [(first_ms + draw % spread_ms) * ids + at % ids for draw, at in zip(draws, walk, strict=True)]


def text_of(number: int, ids: int) -> bytes:
    """As it is posted, and as it must reach the topic."""
    at_ms, item = divmod(number, ids)
    return b'{"item":"user%d","at":%d}' % (item, at_ms)


def id_of(number: int, ids: int) -> str:
    at_ms, item = divmod(number, ids)
    return f"{_PREFIX}{item}@{at_ms}"


def lines_of(numbers: Sequence[int], ids: int, target: str, *, named: bool) -> bytes:
    """The body of a batch. All lines are filled in at once, which costs three quarters of one after the other."""
    times, items = [number // ids for number in numbers], [number % ids for number in numbers]
    head = target.replace("%", "%%").encode()
    line = b'{"target":"%b","at":%%d,"payload":{"item":"user%%d","at":%%d}' % head
    columns = [times, items, times]
    if named:
        line += b',"id":"user%d@%d"'
        columns += [items, times]
    return b"\n".join([line + b"}"] * len(numbers)) % tuple(chain.from_iterable(zip(*columns, strict=True)))


_decode_all: Final = msgspec.json.Decoder(list[Tick]).decode
_decode_one: Final = msgspec.json.Decoder(Tick).decode


def numbers_of(values: list[bytes], ids: int) -> list[int | None]:
    """Numbers of ticks as they came; None for what somebody else sent."""
    try:
        ticks: list[Tick | None] = list(_decode_all(b"[" + b",".join(values) + b"]"))
    except msgspec.DecodeError:
        ticks = [_maybe(value) for value in values]
    return [None if tick is None else _number(tick, ids) for tick in ticks]


def _maybe(value: bytes) -> Tick | None:
    try:
        return _decode_one(value)
    except msgspec.DecodeError:
        return None


def _number(tick: Tick, ids: int) -> int | None:
    digits = tick.item.removeprefix(_PREFIX)
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 7 or int(digits) >= ids:
        return None
    return tick.at * ids + int(digits)
