"""Files of numbers: which ticks were taken, which came out. Compared second by second, so that memory stays small."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BLOCK: Final = 8_192
_WIDTH: Final = 8


class Journal:
    """Appends numbers to a file, many at one time."""

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
class Comparison:
    missing: int
    duplicated: int
    unexpected: int
    """Came, and nobody here has sent them."""


def compare(sent: Path, came: Path, ids: int) -> Comparison:
    """What was sent and did not come; what came more than once; what was never sent."""
    wanted, found = _by_second(sent, ids), _by_second(came, ids)
    missing = duplicated = unexpected = 0
    for second in wanted.keys() | found.keys():
        expected = set(wanted.get(second, ()))
        counts = Counter(found.get(second, ()))
        missing += len(expected - counts.keys())
        unexpected += sum(counts[number] for number in counts.keys() - expected)
        duplicated += sum(counts[number] - 1 for number in counts.keys() & expected)
    return Comparison(missing, duplicated, unexpected)


def _by_second(path: Path, ids: int) -> "dict[int, array[int]]":
    numbers = array("q")
    with path.open("rb") as file:
        numbers.fromfile(file, path.stat().st_size // _WIDTH)
    seconds: dict[int, array[int]] = {}
    for number in numbers:
        seconds.setdefault(number // ids // 1000, array("q")).append(number)
    return seconds
