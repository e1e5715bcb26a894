"""Which of the rows that were read have still to fire, where that cannot be said of all of them at a glance."""

from ..store.codec import FORWARD, HEADER_BYTES, INDEXED, TOMB, TOMB_BYTES, is_tomb
from .bitmaps import Bitmaps
from .waiting import offsets


class Sieve:
    """Looks at each row: it may have left, be cancelled, a repeat of another, or damaged."""

    __slots__ = ("_bits", "_first_of", "_held", "_width_ms", "damaged", "dedupe", "lost", "tombs")

    def __init__(self, width_ms: int, bits: Bitmaps, held: set[int]) -> None:
        self._width_ms = width_ms
        self._bits = bits
        self._held = held
        self.dedupe = False
        """Some put was sent twice: all copies of one task are one task."""
        self.lost = 0
        """Repeats of one put that were dropped since the last commit."""
        self.damaged = False
        """Some row's header cannot be true: look at each row before it leaves."""
        self.tombs: list[bytes] = []
        """The first bytes of the ids of cancelled rows that were met, until somebody takes note."""
        self.start_pass()

    def start_pass(self) -> None:
        self._first_of: dict[bytes, int] = {}

    def sift(self, rows: list[bytes | None], first: int, seen: int, low: int) -> list[int]:
        """Keys of the rows from `first` on that still have to fire; the rest is let go, and marked done where it needs
        no delivery. Before `seen` an earlier window had all keys below `low`."""
        some = [row or b"" for row in rows[first:]]
        heads = offsets(row[:4].ljust(4, b"\0") for row in some)
        keys = []
        for i, row in enumerate(some, first):
            whole = len(row) >= HEADER_BYTES
            # Every copy is registered, also one that has left already.
            repeated = self.dedupe and whole and self._is_repeat(row, i)
            if i in self._held or self._bits.had_its_turn(i):
                rows[i] = None
            elif repeated:
                self.lost += 1
                self._bits.settle([i])
                rows[i] = None
            elif (not whole or row[4] & TOMB) and is_tomb(row):
                self._bury(i, row)
                rows[i] = None
            else:
                # A damaged entry has no time of its own; it goes out at once, to the dead letters.
                damaged = len(row) <= HEADER_BYTES or heads[i - first] >= self._width_ms or row[4] & TOMB != 0
                self.damaged = self.damaged or damaged
                key = i if damaged else (heads[i - first] << 32) | i
                if i < seen and key < low:
                    rows[i] = None  # left in an earlier window
                else:
                    keys.append(key)
        return keys

    def _bury(self, index: int, row: bytes) -> None:
        if len(row) == TOMB_BYTES or not row[4] & FORWARD:
            self.tombs.append(row if len(row) == TOMB_BYTES else row[5:HEADER_BYTES])
        self._bits.settle([index])

    def _is_repeat(self, row: bytes, index: int) -> bool:
        # Only plain puts are sent twice. A retry or a moved task has its original's idh and is a task of its own.
        if row[4] & INDEXED:
            return False
        return self._first_of.setdefault(row[5:HEADER_BYTES], index) != index
