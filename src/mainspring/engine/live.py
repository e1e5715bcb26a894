"""A slice as its owner holds it: how far its list is read, what waits, and the bitmaps."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

from ..store.codec import HEADER_BYTES, INDEXED, LANE, RESENT, SCHEDULED, TOMB, header
from ..store.fire import Touch
from ..store.keys import HOUR_MS, PartitionKeys, Slice
from .bitmaps import Bitmaps
from .sieve import Sieve
from .waiting import END, FEW, INDEX_MASK, Due, Waiting

_FLAGS: Final = itemgetter(4)
_PLAIN: Final = frozenset(
    indexed | lane | scheduled for indexed in (0, INDEXED) for lane in (0, LANE) for scheduled in (0, SCHEDULED)
)
"""Flags of entries that nothing was done to."""


class LiveSlice:
    """Rows are kept only while they wait; a slice too large to hold is read in windows of its earliest rows."""

    __slots__ = (
        "bits", "cursor", "deferred", "finished", "forgotten", "from_ms", "g", "g_text", "has_lanes", "has_schedules",
        "held", "high", "inherited", "kept", "keys", "low", "name", "namespace", "occurrences", "out", "pace",
        "partition", "passes", "proven", "queue", "read_bytes", "read_rows", "seen", "sieve", "sift", "slice",
        "suspended", "tail", "tail_index", "unread",
    )  # fmt: skip

    def __init__(self, keys: PartitionKeys, place: Slice, g: float) -> None:
        self.namespace = keys.namespace
        self.partition = keys.number
        self.name = place.name
        self.keys = keys.slice_keys(self.name)
        self.g_text = repr(g)
        self.inherited = True
        """A former owner may have fired some of it: its bitmaps have to be read first."""
        self.slice = place
        self.from_ms = place.from_ms
        """Offsets count from here."""
        self.suspended = False
        """A hold slice whose hold lasts: nothing of it is read."""
        self.pace: str | None = None
        """Of tasks without lanes, held or overdue: the key of the hold that may let them out little by little."""
        self.g = g
        self.forgotten = False
        self.has_lanes = False
        self.has_schedules = False
        self.occurrences: list[bytes] = []
        """Rows of schedules that were read, until somebody takes note."""
        self.held: set[int] = set()
        """Rows that lanes hold or that are on their way: another pass over the list must not take them again."""
        self.passes = 0
        self.unread = True
        """There may be rows on the server that were not read."""
        self.read_rows = self.read_bytes = 0
        """Of all passes together, without what is left of cancelled tasks: that takes next to nothing."""
        self.out = 0
        """Rows that were fired and are not settled."""
        self.finished = 0
        """Tasks delivered since the last commit, for the counter."""
        self.bits = Bitmaps()
        self.sieve = Sieve(place.width_ms, self.bits, self.held)
        self.sift = False
        """Some rows were fired before this pass over the list: look at each."""
        self.tail, self.tail_index = b"", -1
        """The last row ever read: as long as it stands there, everything before it is what was read."""
        self.proven = -1
        """The last row that the server has confirmed in an answered call."""
        self.low, self.high = 0, END
        self._start_pass(0)

    def _start_pass(self, seen: int) -> None:
        self.passes += 1
        self.kept = END
        self.seen = seen
        # A hold slice is read many times over, a window at a time, and mostly finished from its start on.
        self.cursor = self._finished_rows() if self.slice.is_hold and not self.sieve.dedupe else 0
        self.deferred = 0
        self.queue = Waiting(self.cursor)
        """The rows that were read in this pass, and which of them wait."""
        self.sieve.start_pass()

    # -- reading -----------------------------------------------------------------------------------

    def load_bitmaps(self, fired: bytes, done: bytes) -> None:
        """Take over from a former owner: what was fired and is not done goes out again."""
        self.bits.load(fired, done)
        self.sift = bool(fired or done)
        self.inherited = False

    def absorb(self, rows: list[bytes]) -> int:
        """Take in the next rows of the list; return how many now wait to fire."""
        first, waiting = self.cursor, self.waiting
        self.cursor += len(rows)
        if rows and self.cursor > self.tail_index:
            self.tail, self.tail_index = header(rows[-1]), self.cursor - 1
        self.bits.grow(self.cursor)
        sizes = list(map(len, rows))
        whole = sizes if not sizes or min(sizes) > HEADER_BYTES else [size for size in sizes if size > HEADER_BYTES]
        self.read_rows += len(whole)
        self.read_bytes += sum(whole)
        try:
            flags = set(map(_FLAGS, rows))
        except IndexError:  # an entry shorter than its flags: cancelled, or damaged
            flags = {TOMB, *(row[4] for row in rows if len(row) > 4)}
        if not self.sieve.dedupe and any(flag & RESENT for flag in flags):
            self.restart(dedupe=True)
            return -waiting
        self.has_lanes = self.has_lanes or any(flag & LANE for flag in flags)
        if self.has_lanes:
            self.pace = None  # those of lanes must not be left waiting here while later ones of theirs leave
        queue = self.queue
        plain = bool(rows) and not self.sift and not self.sieve.dedupe and flags <= _PLAIN
        # Offsets come first in an entry: the largest entry has the largest.
        least, latest = (_offset(min(rows)), _offset(max(rows))) if plain else (0, 0)
        queue.rows += rows
        if plain and latest < self.slice.width_ms and len(whole) == len(rows):
            if self.high == END and not any(flag & SCHEDULED for flag in flags) and not queue.keeps_order(len(rows)):
                queue.add_fresh(first, least, latest)
                return len(rows)
            keys = queue.keys(range(first, self.cursor))
        else:
            keys = self.sieve.sift(queue.rows, first, self.seen, self.low)
        if self.high != END:
            keys = self._within_window(keys)
        if any(flag & SCHEDULED for flag in flags):
            self.has_schedules = True
            held = map(queue.rows.__getitem__, map(INDEX_MASK.__and__, keys))
            self.occurrences += [row for row in held if row is not None and len(row) > 4 and row[4] & SCHEDULED]
        queue.add(keys)
        return self.waiting - waiting

    def judge_stubs(self, first_byte: int, cancelled: bytes) -> None:
        """Rows of four bytes that are not marked as cancelled go out at once, to the dead letters."""
        self.step_back(self.sieve.judge_stubs(first_byte, cancelled))

    def _within_window(self, keys: list[int]) -> list[int]:
        kept = [key for key in keys if key < self.high]
        if len(kept) < len(keys):
            self.deferred += len(keys) - len(kept)
            self.queue.drop_rows(key for key in keys if key >= self.high)
        return kept

    def trim(self, keep: int) -> int:
        """Hold only the earliest rows; the others are read again in a later pass. Returns how many were let go."""
        gone = self.queue.cut(keep)
        if gone:
            self.high, self.kept = gone[0], keep
            self.deferred += len(gone)
        return len(gone)

    def trim_after(self, until_ms: int) -> None:
        """Hold only what is due before a time."""
        if self.slice.end_ms <= until_ms:
            return
        bound = max(0, until_ms - self.from_ms) << 32
        keep = self.queue.count_before(bound)
        if keep < self.waiting:
            self.trim(keep)
            self.high, self.kept = bound, END

    def open_window(self, until_ms: int) -> None:
        """Of a wide slice hold only what is due before a time."""
        if self.slice.width_ms >= HOUR_MS and self.high == END:
            self.high = max(0, until_ms - self.from_ms) << 32

    def needs_next_window(self, now_ms: int, ahead_ms: int) -> bool:
        """True when rows were left out, their time comes near, and most of those held have left."""
        if not self.deferred or self.unread:
            return False
        near = self.from_ms + (self.high >> 32) <= now_ms + ahead_ms
        return near and self.waiting <= self.kept // 4

    def next_window(self, until_ms: int) -> int:
        """Start another pass over the list for the rows from the last window's end on. Returns rows let go."""
        let_go = self.waiting
        # Rows that were put back may stand behind the end of the window, and others before them that were let go.
        self.low = min(self.queue.first_key, self.high)
        seen = self.cursor
        self._start_pass(seen)
        self.sift = True
        self.high = END
        self.open_window(until_ms)
        self.unread = True
        return let_go

    def restart(self, *, dedupe: bool = False) -> None:
        """Read the list again from its start; what this owner fired is skipped."""
        self.sieve.dedupe = self.sieve.dedupe or dedupe
        self.low, self.high = 0, END
        self.sift = True
        self._start_pass(0)
        self.unread = True

    # -- holding back --------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Let go of all that waits; nothing is read until it goes on."""
        self.restart()
        self.suspended = True

    def resume(self) -> None:
        self.restart()
        self.suspended = False

    @property
    def blocks_its_lane(self) -> bool:
        """A hold slice of a lane: as long as it is not read to its end, nobody knows who comes next."""
        return self.unread and self.slice.is_hold and (self.has_lanes or not self.cursor)

    def move_out(self, indexes: list[int]) -> tuple[int, bytes]:
        """Rows leave for another slice without having been begun: fired and done in one step. Returns the range of
        fired bytes that changed."""
        changed = self.bits.fire(indexes)
        self.settle_many(indexes)
        self.held.difference_update(indexes)
        return changed

    def _finished_rows(self) -> int:
        """So many rows from the start on are done."""
        return min(self.bits.done_from_start, self.tail_index + 1)

    # -- firing ------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> float:
        """What a row takes, as far as is known; 0 before the first is read."""
        return self.read_bytes / self.read_rows if self.read_rows else 0.0

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def next_due_ms(self) -> int | None:
        queue = self.queue
        return self.from_ms + queue.first_offset if queue else None

    def take_due(self, now_ms: int, limit: int) -> Due:
        """Rows due by now, in due order; they no longer wait.

        A large slice that is wholly overdue leaves as it came: its rows are late by more than their order says, and
        nothing has to be sorted. Lanes choose their order for themselves.
        """
        queue = self.queue
        if self.slice.end_ms <= now_ms and FEW < len(queue) <= limit and self.high == END:
            return queue.take_all()
        return queue.take((now_ms - self.from_ms + 1) << 32, limit)

    def put_back(self, keys: list[int]) -> None:
        self.queue.add(keys)

    def step_back(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Rows that were held back, with their keys, wait again.

        Another pass over the list may have begun since. It has let go of those it has passed already; to the others it
        comes, and must not take them for rows that left in an earlier window.
        """
        keys = []
        for key, row in rows:
            index = key & INDEX_MASK
            self.held.discard(index)
            if index < self.cursor:
                self.queue.rows[index] = row
                keys.append(key)
            else:
                self.low = min(self.low, key)
        self.queue.add(keys)

    def mark_fired(self, indexes: Sequence[int]) -> tuple[int, bytes]:
        """Set the fired bits; return the byte range that changed."""
        self.out += len(indexes)
        if self.bits.redo:
            self.held.update(indexes)
        return self.bits.fire(indexes)

    def to_redo(self, index: int) -> bool:
        """A former owner has fired this row and not finished it."""
        return self.bits.to_redo(index)

    def unmark_fired(self, indexes: list[int]) -> None:
        """They did not leave. What a former owner has fired stays fired: it may have been delivered."""
        self.out -= len(indexes)
        self.held.difference_update(indexes)
        self.bits.unfire(indexes)

    def land(self, count: int, indexes: Iterable[int]) -> None:
        """So many rows that were fired are settled; which ones is asked only if others are still out."""
        self.out -= count
        if self.out or self.bits.redo:
            self.settle_many(list(indexes))
            return
        self.bits.settle_all_fired(self.tail_index)
        if not self.queue:
            self.let_rows_go()

    def reopen(self, index: int) -> None:
        """A row that was settled is under way after all: it is fired, and not done."""
        self.out += 1
        self.bits.unsettle(index)
        self.held.add(index)

    def let_rows_go(self) -> None:
        """Nothing waits: the rows are needed no more. One that has to wait again is read again."""
        if not self.held:
            self.queue.drop_all_rows()
            self.passes += 1

    def settle_many(self, indexes: list[int]) -> None:
        """Nothing is left to do for these rows."""
        self.bits.settle(indexes)
        rows = self.queue.rows
        known = len(rows)
        for i in indexes:
            if i < known:
                rows[i] = None

    def touch(self, begun: Sequence[int], *, commit: bool) -> Touch:
        """Mark rows as fired and hand over what has to be written: those bits, and the done bits since last time.

        Rows that an answered call has proven need no proof again: had the server lost them since, it would have
        lost that call too, and the sequence number would show it.
        """
        f_at, f = self.mark_fired(begun) if begun else (0, b"")
        d_at, d = self.bits.take_dirty() if commit else (0, b"")
        m = self.tail_index if self.tail_index > self.proven else -1
        return Touch(self.name, self.keys, self.g_text, m, self.tail if m >= 0 else b"", f_at, f, d_at, d)

    @property
    def all_done(self) -> bool:
        if self.unread or self.bits.dirty or self.deferred or self.waiting:
            return False
        return self.bits.done_rows >= self.cursor


def _offset(row: bytes) -> int:
    return int.from_bytes(row[:4], "big")
