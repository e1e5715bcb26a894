"""The rows of a slice that wait to fire, in the order in which they are due."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple, cast

INDEX_MASK: Final = 0xFFFFFFFF
END: Final = 1 << 63
"""A key behind all others."""
FEW: Final = 256
"""So many rows are kept in order at once; of more the order is found when it is needed."""
_NONE: Final = range(0)
_OFFSET: Final = itemgetter(slice(4))


class Due(NamedTuple):
    """Rows that leave: their places in the list, in the same order the rows themselves, and the latest offset."""

    indexes: Sequence[int]
    rows: list[bytes | None]
    latest: int


class Waiting:
    """The rows of one pass over the list; those that have left, or were left out, are gone from it.

    A row's key is `offset << 32 | index`: sorting keys sorts by millisecond, then by arrival.
    """

    __slots__ = ("at", "due", "first", "fresh", "latest", "loose", "rows")

    def __init__(self, passed: int) -> None:
        self.rows: list[bytes | None] = [None] * passed
        """All that were read, by their places in the list."""
        self._nothing_waits()

    def _nothing_waits(self) -> None:
        self.due: list[int] = []
        """Keys of rows that wait, from `at` on."""
        self.at = 0
        self.loose = False
        """`due` is not in order yet: sorting waits until the order matters."""
        self.fresh = _NONE
        """Rows that wait as well, neighbours in the list: their keys are made when the order matters."""
        self.first, self.latest = END, 0
        """The smallest and the largest offset of what is loose or fresh."""

    def __len__(self) -> int:
        return len(self.due) - self.at + len(self.fresh)

    # -- coming --------------------------------------------------------------------------------------

    def keeps_order(self, count: int) -> bool:
        """So few more are put among those that are in order."""
        return count <= FEW and self.at < len(self.due) and not self.loose

    def add_fresh(self, first: int, least: int, latest: int) -> None:
        """Rows from `first` on to the last that was read; their offsets lie between these."""
        if self.fresh and self.fresh.stop != first:
            apart, self.fresh = self.fresh, _NONE
            self.add(self.keys(apart))
        self.fresh = range(self.fresh.start if self.fresh else first, len(self.rows))
        self.first, self.latest = min(self.first, least), max(self.latest, latest)

    def add(self, keys: list[int]) -> None:
        if self.at:
            del self.due[: self.at]
            self.at = 0
        if self.keeps_order(len(keys)):
            for key in keys:
                insort(self.due, key)
        elif keys:
            self.first, self.latest = min(self.first, min(keys) >> 32), max(self.latest, max(keys) >> 32)
            if self.due and not self.loose:
                self.first, self.latest = min(self.first, self.due[0] >> 32), max(self.latest, self.due[-1] >> 32)
            self.due += keys
            self.loose = True

    def keys(self, places: range) -> list[int]:
        rows = cast("list[bytes]", self.rows[places.start : places.stop])
        return [(offset << 32) | i for i, offset in enumerate(offsets(map(_OFFSET, rows)), places.start)]

    def put_in_order(self) -> None:
        if self.loose or self.fresh:
            due = sorted(self.due[self.at :] + self.keys(self.fresh))
            self._nothing_waits()
            self.due = due

    # -- who is next ---------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Of the earliest that waits."""
        first = self.first if self.loose or self.fresh else END
        if not self.loose and self.at < len(self.due):
            first = min(first, self.due[self.at] >> 32)
        return first

    @property
    def first_key(self) -> int:
        """Of the earliest that waits."""
        self.put_in_order()
        return self.due[self.at] if self.at < len(self.due) else END

    def count_before(self, bound: int) -> int:
        """So many have smaller keys."""
        self.put_in_order()
        return bisect_left(self.due, bound, self.at) - self.at

    # -- going ---------------------------------------------------------------------------------------

    def take(self, bound: int, limit: int) -> Due:
        """Those with smaller keys, in order, up to the limit."""
        self.put_in_order()
        end = bisect_left(self.due, bound, self.at, min(len(self.due), self.at + limit))
        taken = self.due[self.at : end]
        self.at = end
        indexes = _indexes(taken)
        return Due(indexes, list(map(self.rows.__getitem__, indexes)), taken[-1] >> 32 if taken else 0)

    def take_all(self) -> Due:
        """As they came."""
        keys, fresh, latest = self.due[self.at :], self.fresh, self.latest
        if keys and not self.loose:
            latest = max(latest, keys[-1] >> 32)
        self._nothing_waits()
        rows = self.rows[fresh.start : fresh.stop]
        if not keys:
            return Due(fresh, rows, latest)
        indexes = _indexes(keys)
        return Due([*indexes, *fresh], [*map(self.rows.__getitem__, indexes), *rows], latest)

    def cut(self, keep: int) -> list[int]:
        """Let go of all but the earliest; returns the keys of those that went."""
        self.put_in_order()
        gone = self.due[self.at + keep :]
        del self.due[self.at + keep :]
        self.drop_rows(gone)
        return gone

    def drop_rows(self, keys: Iterable[int]) -> None:
        rows = self.rows
        for key in keys:
            rows[key & INDEX_MASK] = None

    def drop_all_rows(self) -> None:
        self.rows = [None] * len(self.rows)


def offsets(heads: Iterable[bytes]) -> "array[int]":
    """Of rows whose first four bytes these are."""
    numbers = array("I", b"".join(heads))
    numbers.byteswap()
    return numbers


def _indexes(keys: list[int]) -> list[int]:
    return [key & INDEX_MASK for key in keys]
