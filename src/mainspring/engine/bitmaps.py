"""The fired and done bits of a slice in its owner's memory, and which of them the server has still to get."""

from collections.abc import Sequence
from typing import Final

from ..store.fire import WHOLE

_MASK: Final = tuple(0x80 >> bit for bit in range(8))
_END: Final = 1 << 63
_SMALL_BYTES: Final = 1024
"""Bitmaps up to this size are written whole, many of them in one command."""


class Bitmaps:
    """One bit for each row, by its place in the list; what goes to the server are ranges of bytes."""

    __slots__ = ("dirty_high", "dirty_low", "done", "fired", "redo")

    def __init__(self) -> None:
        self.fired = bytearray()
        self.done = bytearray()
        self.redo = bytearray()
        """Fired by a former owner and not done: to be delivered again."""
        self.dirty_low, self.dirty_high = _END, -1
        """Rows settled since the last commit lie between these."""

    def load(self, fired: bytes, done: bytes) -> None:
        """Take over from a former owner: what was fired and is not done goes out again."""
        self.fired, self.done = bytearray(fired), bytearray(done)
        kept = int.from_bytes(fired, "little") & ~int.from_bytes(done.ljust(len(fired), b"\0"), "little")
        self.redo = bytearray(kept.to_bytes(max(len(fired), len(done)), "little"))

    def grow(self, rows: int) -> None:
        missing = (rows + 7 >> 3) - len(self.fired)
        if missing > 0:
            self.fired += bytes(missing)
        missing = (rows + 7 >> 3) - len(self.done)
        if missing > 0:
            self.done += bytes(missing)

    # -- fired ---------------------------------------------------------------------------------------

    def had_its_turn(self, index: int) -> bool:
        """Done, or fired by this owner."""
        if is_set(self.done, 0, index):
            return True
        return is_set(self.fired, 0, index) and not is_set(self.redo, 0, index)

    def to_redo(self, index: int) -> bool:
        return is_set(self.redo, 0, index)

    def fire(self, indexes: Sequence[int]) -> tuple[int, bytes]:
        """Set the fired bits; return the byte range that changed."""
        fired = self.fired
        if isinstance(indexes, range):
            _set_range(fired, indexes.start, indexes.stop)
        else:
            for i in indexes:
                fired[i >> 3] |= _MASK[i & 7]
        if len(fired) <= _SMALL_BYTES:
            return WHOLE, bytes(fired)
        low, high = min(indexes) >> 3, max(indexes) >> 3
        return low, bytes(fired[low : high + 1])

    def unfire(self, indexes: list[int]) -> None:
        """They did not leave. What a former owner has fired stays fired: it may have been delivered."""
        for i in indexes:
            if not is_set(self.redo, 0, i):
                self.fired[i >> 3] &= ~_MASK[i & 7] & 0xFF

    # -- done ----------------------------------------------------------------------------------------

    def settle(self, indexes: list[int]) -> None:
        done = self.done
        for i in indexes:
            done[i >> 3] |= _MASK[i & 7]
        if len(done) <= _SMALL_BYTES:  # written whole: where in it does not matter
            self.dirty_low, self.dirty_high = 0, max(self.dirty_high, len(done) * 8 - 1)
        else:
            self.dirty_low = min(self.dirty_low, min(indexes))
            self.dirty_high = max(self.dirty_high, max(indexes))

    def settle_all_fired(self, last: int) -> None:
        """All that were fired are done, with those that never had to fire; `last` is the last row there is."""
        union = int.from_bytes(self.done, "little") | int.from_bytes(self.fired, "little")
        self.done = bytearray(union.to_bytes(max(len(self.done), len(self.fired)), "little"))
        self.dirty_low, self.dirty_high = 0, max(last, self.dirty_high)

    def unsettle(self, index: int) -> None:
        self.done[index >> 3] &= ~_MASK[index & 7] & 0xFF

    @property
    def done_rows(self) -> int:
        return int.from_bytes(self.done, "big").bit_count()

    @property
    def done_from_start(self) -> int:
        """So many rows from the start on are done, in whole bytes."""
        return (len(self.done) - len(self.done.lstrip(b"\xff"))) * 8

    # -- what has to be committed --------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        return self.dirty_high >= 0

    def take_dirty(self) -> tuple[int, bytes]:
        """The range of done bytes to commit."""
        if self.dirty_high < 0:
            return 0, b""
        low, high = self.dirty_low >> 3, self.dirty_high >> 3
        self.dirty_low, self.dirty_high = _END, -1
        return (WHOLE, bytes(self.done)) if len(self.done) <= _SMALL_BYTES else (low, bytes(self.done[low : high + 1]))

    def untake_dirty(self, d_at: int, d: bytes) -> None:
        """The range was not written: it has to be committed again."""
        if d:
            first = max(d_at, 0)
            self.dirty_low = min(self.dirty_low, first * 8)
            self.dirty_high = max(self.dirty_high, (first + len(d)) * 8 - 1)


def _set_range(bits: bytearray, first: int, end: int) -> None:
    """Set the bits from `first` up to `end`."""
    low, high = first >> 3, end + 7 >> 3
    ones = (1 << end - first) - 1 << (high * 8 - end)
    bits[low:high] = (int.from_bytes(bits[low:high], "big") | ones).to_bytes(high - low, "big")


def is_set(bits: bytes | bytearray, first_byte: int, index: int) -> bool:
    """A bit of a byte range that starts at `first_byte`; bytes beyond its end count as zero."""
    at = (index >> 3) - first_byte
    return 0 <= at < len(bits) and bits[at] & _MASK[index & 7] != 0
