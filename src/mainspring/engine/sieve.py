"""Which of the rows that were read have still to fire, where that cannot be said of all of them at a glance."""

from ..store.codec import FORWARD, HEADER_BYTES, INDEXED, TOMB, TOMB_BYTES, is_tomb
from .bitmaps import Bitmaps, is_set
from .waiting import offsets


class Sieve:
    """Looks at each row: it may have left, be cancelled, a repeat of another, or damaged."""

    __slots__ = ("_bits", "_first_of", "_held", "_width_ms", "damaged", "dedupe", "lost", "stubs", "tombs")

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
        self.stubs: dict[int, bytes] = {}
        """Rows of four bytes that were met: cancelled if the server has marked them so, else damaged."""

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
            elif len(row) == TOMB_BYTES:
                self.stubs[i] = row
                rows[i] = None
            elif whole and row[4] & TOMB and is_tomb(row):
                if not row[4] & FORWARD:
                    self.tombs.append(row[5:HEADER_BYTES])
                self._bits.settle([i])
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

    def judge_stubs(self, first_byte: int, cancelled: bytes) -> list[tuple[int, bytes]]:
        """By the bits of the server, from this byte on: those that are marked need no delivery. Returns the others."""
        marked = [i for i in self.stubs if is_set(cancelled, first_byte, i)]
        if marked:
            self.tombs += map(self.stubs.pop, marked)
            self._bits.settle(marked)
        damaged, self.stubs = list(self.stubs.items()), {}
        self.damaged = self.damaged or bool(damaged)
        return damaged

    def _is_repeat(self, row: bytes, index: int) -> bool:
        # Only plain puts are sent twice. A retry or a moved task has its original's idh and is a task of its own.
        if row[4] & INDEXED:
            return False
        return self._first_of.setdefault(row[5:HEADER_BYTES], index) != index
