"""The options of a demo, the ticks it sends, and the journals that account for them."""

import random
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from math import gcd
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..model.errors import InvalidInput

Via = Literal["http", "batch", "client"]

MOST_IDS: Final = 4_000_000
"""Limit, so that a tick's time and item fit into 64 bits."""

TOPIC: Final = "ticks"


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Ticks of `ids` items at random times within the next `within_ms`, posted `via` one of three ways."""

    ids: int = 1_000_000
    within_ms: int = 600_000
    rate: float | None = None
    """Ticks per second; None posts as fast as they are accepted."""
    seconds: float | None = None
    """Seconds during which ticks are posted; None posts one for each item."""
    schedulers: int = 2
    via: Via = "http"
    replace: bool = False
    """A tick of an item that already has one moves it, as `POST /ticks?replace=true` does."""
    named: bool = True
    """Ticks have ids, so that one whose response was lost can be posted again. Only batches work without ids."""
    connections: int = 64
    """Connections of the generator, over all schedulers."""
    batch: int = 2_000
    """Ticks per request, if they are sent in batches."""
    lease_s: float = 2.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("ids", 1, MOST_IDS),
            ("within_ms", 100, 7 * 86_400_000),
            ("schedulers", 1, 64),
            ("connections", 1, 4_096),
            ("batch", 1, 10_000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidInput(f"{name} is {value}; give a value from {low} to {high}")
        if (self.rate is not None and self.rate <= 0) or (self.seconds is not None and self.seconds <= 0):
            raise InvalidInput("rate and seconds must be more than 0")
        if self.replace and (self.via != "http" or not self.named):
            raise InvalidInput("replace works only via http, with named ticks")

    @property
    def target(self) -> str:
        return f"kafka:{TOPIC}"


class ConsumerOrder(msgspec.Struct, frozen=True):
    properties: dict[str, str]
    """Settings of the Kafka library: how to reach the servers."""
    fetch_bytes: int
    """Bytes requested per fetch; smaller responses come after some milliseconds."""
    topic: str
    ids: int
    within_ms: int
    """Longest time from post to due time. The rate rises for this long at the start, and falls as long at the end."""
    came: str
    """The file for the numbers of ticks that arrived."""


_PREFIX: Final = "user"
_GOLDEN: Final = 0.618
"""Stride as a share of the items: neighbours are then far apart in time."""


class DemoTick(msgspec.Struct, gc=False):
    item: str
    at: int


class Ticks:
    """The ticks that the plan asks for, one after the other, each due at a random time from now on.

    Items are visited in a mixed order: once, or repeatedly if the plan has a time limit. Items are not drawn at random,
    because two ticks of one item in the same millisecond are one tick, which would spoil the sums. Strides make the
    order, not a shuffled list: the first tick need not wait until a million are shuffled.
    """

    def __init__(self, plan: DemoPlan) -> None:
        self._random = random.Random()
        self._least_ms = min(1000, plan.within_ms // 2)
        """Least delay: a tick that is due while it is posted says nothing about lateness."""
        self._spread_ms = plan.within_ms - self._least_ms
        self._ids = ids = plan.ids
        self._stride = next(step for step in count(int(ids * _GOLDEN) or 1) if gcd(step, ids) == 1)
        self._at = self._random.randrange(ids)
        self._left = ids if plan.seconds is None else None

    def take(self, most: int) -> list[int]:
        """Return the numbers of the next ticks; fewer at the end."""
        if self._left is not None:
            most = min(most, self._left)
            self._left -= most
        end = self._at + most * self._stride
        walk, self._at = range(self._at, end, self._stride), end % self._ids
        first_ms, spread_ms, ids = time.time_ns() // 1_000_000 + self._least_ms, self._spread_ms, self._ids
        draws = array("Q", self._random.randbytes(8 * most))  # a call for each would cost more than the rest
        return [(first_ms + draw % spread_ms) * ids + at % ids for draw, at in zip(draws, walk, strict=True)]


def text_of(number: int, ids: int) -> bytes:
    """Return the tick as it is posted, and as it must reach the topic."""
    at_ms, item = divmod(number, ids)
    return b'{"item":"user%d","at":%d}' % (item, at_ms)


def id_of(number: int, ids: int) -> str:
    at_ms, item = divmod(number, ids)
    return f"{_PREFIX}{item}@{at_ms}"


def lines_of(numbers: Sequence[int], ids: int, target: str, *, named: bool) -> bytes:
    """Return the body of a batch. One format call for all lines costs a quarter less than one per line."""
    times, items = [number // ids for number in numbers], [number % ids for number in numbers]
    head = target.replace("%", "%%").encode()
    line = b'{"target":"%b","at":%%d,"payload":{"item":"user%%d","at":%%d}' % head
    columns = [times, items, times]
    if named:
        line += b',"id":"user%d@%d"'
        columns += [items, times]
    return b"\n".join([line + b"}"] * len(numbers)) % tuple(chain.from_iterable(zip(*columns, strict=True)))


_decode_all: Final = msgspec.json.Decoder(list[DemoTick]).decode
_decode_one: Final = msgspec.json.Decoder(DemoTick).decode


def numbers_of(values: list[bytes], ids: int) -> list[int | None]:
    """Return the numbers of received ticks; None for messages of other senders."""
    try:
        ticks: list[DemoTick | None] = list(_decode_all(b"[" + b",".join(values) + b"]"))
    except msgspec.DecodeError:
        ticks = [_maybe(value) for value in values]
    return [None if tick is None else _number(tick, ids) for tick in ticks]


def _maybe(value: bytes) -> DemoTick | None:
    try:
        return _decode_one(value)
    except msgspec.DecodeError:
        return None


def _number(tick: DemoTick, ids: int) -> int | None:
    digits = tick.item.removeprefix(_PREFIX)
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 7 or int(digits) >= ids:
        return None
    return tick.at * ids + int(digits)


_BLOCK: Final = 8_192
_WIDTH: Final = 8


class Journal:
    """A file of numbers, written many at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._numbers = array("q")
        self.count = 0

    def add(self, number: int) -> None:
        self._numbers.append(number)
        self.count += 1
        if len(self._numbers) >= _BLOCK:
            self.flush()

    def add_all(self, numbers: Iterable[int]) -> None:
        before = len(self._numbers)
        self._numbers.extend(numbers)
        self.count += len(self._numbers) - before
        if len(self._numbers) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        self._file.write(self._numbers.tobytes())
        self._file.flush()
        del self._numbers[:]

    def close(self) -> None:
        self.flush()
        self._file.close()


@dataclass(frozen=True, slots=True)
class JournalComparison:
    missing: int
    duplicated: int
    unexpected: int
    """Ticks that arrived but were not sent by this demo."""


def compare(sent: Path, came: Path, ids: int) -> JournalComparison:
    """Compare the journals: ticks that did not arrive, arrived more than once, or were never sent."""
    wanted, found = _by_second(sent, ids), _by_second(came, ids)
    missing = duplicated = unexpected = 0
    for second in wanted.keys() | found.keys():
        expected = set(wanted.get(second, ()))
        counts = Counter(found.get(second, ()))
        missing += len(expected - counts.keys())
        unexpected += sum(counts[number] for number in counts.keys() - expected)
        duplicated += sum(counts[number] - 1 for number in counts.keys() & expected)
    return JournalComparison(missing, duplicated, unexpected)


def _by_second(path: Path, ids: int) -> "dict[int, array[int]]":
    numbers = array("q")
    with path.open("rb") as file:
        numbers.fromfile(file, path.stat().st_size // _WIDTH)
    seconds: dict[int, array[int]] = {}
    for number in numbers:
        seconds.setdefault(number // ids // 1000, array("q")).append(number)
    return seconds
