"""Random ticks: of which item, when, and as which text. A tick is known again by one number made of item and time."""

import random
import time
from collections.abc import Iterator
from itertools import count
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
    """What the plan asks for, one after the other, due at a random time from now on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random()
        self._least_ms = min(1000, plan.within_ms // 2)
        """Not sooner: a tick that is due while it is posted says nothing about lateness."""
        self._spread_ms = plan.within_ms - self._least_ms
        self._ids = plan.ids
        self._items = self._walk()

    def next(self) -> int | None:
        """The number of the next tick; None after the last."""
        item = next(self._items, None)
        if item is None:
            return None
        ahead_ms = self._least_ms + int(self._random.random() * self._spread_ms)
        return (time.time_ns() // 1_000_000 + ahead_ms) * self._ids + item

    def _walk(self) -> Iterator[int]:
        """Through all items in a mixed order: once, or again and again where time is the limit.

        Not any item at any time: two ticks of one item in one millisecond are one tick, and the sums would not tell.
        Strides rather than a shuffled list: the first tick must not wait for a million of them.
        """
        ids = self._ids
        stride = next(step for step in count(int(ids * _GOLDEN) or 1) if gcd(step, ids) == 1)
        start = self._random.randrange(ids)
        turns = range(ids) if self._plan.seconds is None else count()
        return ((start + turn * stride) % ids for turn in turns)


def text_of(number: int, ids: int) -> bytes:
    """As it is posted, and as it must reach the topic."""
    at_ms, item = divmod(number, ids)
    return b'{"item":"user%d","at":%d}' % (item, at_ms)


def id_of(number: int, ids: int) -> str:
    at_ms, item = divmod(number, ids)
    return f"{_PREFIX}{item}@{at_ms}"


def line_of(number: int, ids: int, target: str, *, named: bool) -> bytes:
    """One line of a batch."""
    at_ms, item = divmod(number, ids)
    text = b'{"target":"%b","at":%d,"payload":{"item":"user%d","at":%d}' % (target.encode(), at_ms, item, at_ms)
    return text + (b',"id":"user%d@%d"}' % (item, at_ms) if named else b"}")


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
