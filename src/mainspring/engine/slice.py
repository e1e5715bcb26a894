"""A slice in its owner's memory: how far its list is read, which rows wait, and the fired and done bits."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple, cast

from ..store.codec import (
    HEADER_BYTES,
    INDEXED,
    LANE,
    RESENT,
    SCHEDULED,
    TOMBSTONE,
    TOMBSTONE_BYTES,
    header,
    is_tombstone,
)
from ..store.keys import HOUR_MS, PartitionKeys, Slice
from ..store.owner.fire import WHOLE, Touch

_MASK: Final = tuple(0x80 >> bit for bit in range(8))
_SMALL_BYTES: Final = 1024
"""Bitmaps up to this size are written whole, many of them in one command."""


class Bitmaps:
    """One bit per row, by index in the list; ranges of bytes are sent to the server."""

    __slots__ = ("dirty_high", "dirty_low", "done", "fired", "redo")

    def __init__(self) -> None:
        self.fired = bytearray()
        self.done = bytearray()
        self.redo = bytearray()
        """Rows fired by a former owner and not done: to be delivered again."""
        self.dirty_low, self.dirty_high = END, -1
        """Range of the rows settled since the last commit."""

    def load(self, fired: bytes, done: bytes) -> None:
        """Load a former owner's bits: rows that were fired and are not done are delivered again."""
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
        """Return whether a row is done, or was fired by this owner."""
        if is_set(self.done, 0, index):
            return True
        return is_set(self.fired, 0, index) and not is_set(self.redo, 0, index)

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

    def unfire(self, indexes: Sequence[int]) -> None:
        """Clear the fired bits of rows that did not leave. Rows fired by a former owner stay fired: they may have been
        delivered."""
        for i in indexes:
            if not is_set(self.redo, 0, i):
                self.fired[i >> 3] &= ~_MASK[i & 7] & 0xFF

    # -- done ----------------------------------------------------------------------------------------

    def settle(self, indexes: Sequence[int]) -> None:
        done = self.done
        for i in indexes:
            done[i >> 3] |= _MASK[i & 7]
        if len(done) <= _SMALL_BYTES:  # written whole: the position does not matter
            self.dirty_low, self.dirty_high = 0, max(self.dirty_high, len(done) * 8 - 1)
        else:
            self.dirty_low = min(self.dirty_low, min(indexes))
            self.dirty_high = max(self.dirty_high, max(indexes))

    def settle_all_fired(self, last: int) -> None:
        """Mark all fired rows as done, and rows that never had to fire; `last` is the index of the last row."""
        union = int.from_bytes(self.done, "little") | int.from_bytes(self.fired, "little")
        self.done = bytearray(union.to_bytes(max(len(self.done), len(self.fired)), "little"))
        self.dirty_low, self.dirty_high = 0, max(last, self.dirty_high)

    @property
    def done_rows(self) -> int:
        return int.from_bytes(self.done, "big").bit_count()

    @property
    def done_from_start(self) -> int:
        """Number of rows done from the start on, in whole bytes."""
        return (len(self.done) - len(self.done.lstrip(b"\xff"))) * 8

    # -- to commit --------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        return self.dirty_high >= 0

    def take_dirty(self) -> tuple[int, bytes]:
        """Return the range of done bytes to commit."""
        if self.dirty_high < 0:
            return 0, b""
        low, high = self.dirty_low >> 3, self.dirty_high >> 3
        self.dirty_low, self.dirty_high = END, -1
        return (WHOLE, bytes(self.done)) if len(self.done) <= _SMALL_BYTES else (low, bytes(self.done[low : high + 1]))

    def untake_dirty(self, d_at: int, d: bytes) -> None:
        """Restore a range that was not written: it has to be committed again."""
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
    """Return a bit of a byte range that starts at `first_byte`; bytes beyond its end count as zero."""
    at = (index >> 3) - first_byte
    return 0 <= at < len(bits) and bits[at] & _MASK[index & 7] != 0


INDEX_MASK: Final = 0xFFFFFFFF
END: Final = 1 << 63
"""A key greater than all others."""
FEW: Final = 256
"""Up to this many rows are inserted in order; more are sorted only when the order is needed."""
_NONE: Final = range(0)
_OFFSET: Final = itemgetter(slice(4))


class Due(NamedTuple):
    """Rows that leave: their indexes, the rows themselves in the same order, and the latest offset."""

    indexes: Sequence[int]
    rows: list[bytes | None]
    latest: int


class DueRows:
    """The rows of one pass over the list; rows that left, or were dropped, are removed.

    A row's key is `offset << 32 | index`: sorting keys sorts by millisecond, then by arrival.
    """

    __slots__ = ("at", "due", "first", "fresh", "latest", "loose", "rows")

    def __init__(self, passed: int) -> None:
        self.rows: list[bytes | None] = [None] * passed
        """All rows that were read, by index."""
        self._nothing_waits()

    def _nothing_waits(self) -> None:
        self.due: list[int] = []
        """Keys of waiting rows, from `at` on."""
        self.at = 0
        self.loose = False
        """Keys of waiting rows in no order; sorted when the order matters."""
        self.fresh = _NONE
        """Further waiting rows, a range of indexes: their keys are computed when the order matters."""
        self.first, self.latest = END, 0
        """Smallest and largest offset of loose and fresh rows."""

    def __len__(self) -> int:
        return len(self.due) - self.at + len(self.fresh)

    # -- adding --------------------------------------------------------------------------------------

    def keeps_order(self, count: int) -> bool:
        """Return True if `count` more rows can be inserted in order."""
        return count <= FEW and self.at < len(self.due) and not self.loose

    def add_fresh(self, first: int, least: int, latest: int) -> None:
        """Add the rows from `first` to the last one read; their offsets lie between `least` and `latest`."""
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

    # -- the next row ---------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Offset of the earliest waiting row."""
        first = self.first if self.loose or self.fresh else END
        if not self.loose and self.at < len(self.due):
            first = min(first, self.due[self.at] >> 32)
        return first

    @property
    def first_key(self) -> int:
        """Key of the earliest waiting row."""
        self.put_in_order()
        return self.due[self.at] if self.at < len(self.due) else END

    def count_before(self, bound: int) -> int:
        """Count the waiting rows with smaller keys."""
        self.put_in_order()
        return bisect_left(self.due, bound, self.at) - self.at

    # -- taking ---------------------------------------------------------------------------------------

    def take(self, bound: int, limit: int) -> Due:
        """Take rows with smaller keys, in order, up to the limit."""
        self.put_in_order()
        end = bisect_left(self.due, bound, self.at, min(len(self.due), self.at + limit))
        taken = self.due[self.at : end]
        self.at = end
        indexes = _indexes(taken)
        return Due(indexes, list(map(self.rows.__getitem__, indexes)), taken[-1] >> 32 if taken else 0)

    def take_all(self) -> Due:
        """Take all waiting rows in the order of their arrival."""
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
        """Drop all but the `keep` earliest rows; return the keys of the others."""
        self.put_in_order()
        gone = self.due[self.at + keep :]
        del self.due[self.at + keep :]
        self.drop_rows(gone)
        return gone

    def drop_rows(self, keys: Iterable[int]) -> None:
        rows = self.rows
        for key in keys:
            rows[key & INDEX_MASK] = None


def offsets(heads: Iterable[bytes]) -> "array[int]":
    """Decode the offsets of rows from their first four bytes."""
    numbers = array("I", b"".join(heads))
    numbers.byteswap()
    return numbers


def _indexes(keys: list[int]) -> list[int]:
    return [key & INDEX_MASK for key in keys]


_FLAGS: Final = itemgetter(4)
_PLAIN: Final = frozenset(
    indexed | lane | scheduled for indexed in (0, INDEXED) for lane in (0, LANE) for scheduled in (0, SCHEDULED)
)
"""Flags of plain entries, which were never changed."""


class LiveSlice:
    """A slice in memory. Rows are kept only while they wait; a large slice is read in windows of its earliest rows."""

    __slots__ = (
        "_first_of", "bits", "cursor", "damaged", "dedupe", "deferred", "finished", "forgotten", "from_ms", "g",
        "g_text", "has_lanes", "has_schedules", "held", "high", "inherited", "kept", "keys", "low", "name", "namespace",
        "needs_filter", "occurrences", "out", "pace", "partition", "proven", "queue", "read_bytes", "read_rows",
        "repeats", "seen", "slice", "stubs", "suspended", "tail", "tail_index", "unread",
    )  # fmt: skip

    def __init__(self, keys: PartitionKeys, place: Slice, g: float) -> None:
        self.namespace = keys.namespace
        self.partition = keys.number
        self.name = place.name
        self.keys = keys.slice_keys(self.name)
        self.g_text = repr(g)
        self.inherited = True
        """True if a former owner may have fired some rows: the bitmaps have to be read first."""
        self.slice = place
        self.from_ms = place.from_ms
        """Time from which the offsets of its rows count."""
        self.suspended = False
        """True for a hold slice whose hold lasts: it is not read."""
        self.pace: str | None = None
        """Key of the hold that releases its tasks gradually (held or overdue tasks without lanes)."""
        self.g = g
        self.forgotten = False
        self.has_lanes = False
        self.has_schedules = False
        self.occurrences: list[bytes] = []
        """Rows of schedules that were read, until the partition takes them."""
        self.held: set[int] = set()
        """Rows that are in lanes or being moved: another pass over the list must not take them again."""
        self.unread = True
        """True if the server may have rows that were not read."""
        self.read_rows = self.read_bytes = 0
        """Rows and bytes read in all passes, without tombstones, which are tiny."""
        self.out = 0
        """Number of rows fired and not settled."""
        self.finished = 0
        """Tasks delivered since the last commit, for the counter."""
        self.bits = Bitmaps()
        self.needs_filter = False
        """True if some rows were fired before this pass over the list: filter each row."""
        self.dedupe = False
        """True if some put was sent twice: all copies of one task count as one."""
        self.repeats: list[int] = []
        """Rows that repeat a put, until the partition takes them: they are counted together with their done bits."""
        self.damaged: set[int] = set()
        """Rows with an impossible header. If there are any, each row of the slice is decoded separately."""
        self.tail, self.tail_index = b"", -1
        """The last row read: while the server still has it, all rows before it are those that were read."""
        self.proven = -1
        """The last row that the server has confirmed in a reply."""
        self.low, self.high = 0, END
        """An earlier window had all rows before `seen` with keys below `low`. This one ends before the key `high`."""
        self._start_pass(0)

    def _start_pass(self, seen: int) -> None:
        self.kept = END
        self.seen = seen
        # A hold slice is read many times, a window at a time, and its finished rows are mostly at its start.
        skips = self.slice.is_hold and not self.dedupe
        self.cursor = min(self.bits.done_from_start, self.tail_index + 1) if skips else 0
        self.deferred = 0
        self.queue = DueRows(self.cursor)
        """The rows read in this pass, and which of them wait."""
        self._first_of: dict[bytes, int] = {}
        self.stubs: dict[int, bytes] = {}
        """Rows of four bytes: cancelled if the server has marked them, otherwise damaged."""

    # -- reading -----------------------------------------------------------------------------------

    def load_bitmaps(self, fired: bytes, done: bytes) -> None:
        """Load a former owner's bits: rows that were fired and are not done are delivered again."""
        self.bits.load(fired, done)
        self.needs_filter = bool(fired or done)
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
            flags = {TOMBSTONE, *(row[4] for row in rows if len(row) > 4)}
        if not self.dedupe and any(flag & RESENT for flag in flags):
            self.restart(dedupe=True)
            return -waiting
        self.has_lanes = self.has_lanes or any(flag & LANE for flag in flags)
        if self.has_lanes:
            self.pace = None  # a lane's earlier task must not wait here while its later ones leave
        queue = self.queue
        plain = bool(rows) and not self.needs_filter and not self.dedupe and flags <= _PLAIN
        # An entry begins with its offset, so entries sort by offset.
        least, latest = (_offset(min(rows)), _offset(max(rows))) if plain else (0, 0)
        queue.rows += rows
        if plain and latest < self.slice.width_ms and len(whole) == len(rows):
            if self.high == END and not any(flag & SCHEDULED for flag in flags) and not queue.keeps_order(len(rows)):
                queue.add_fresh(first, least, latest)
                return len(rows)
            keys = queue.keys(range(first, self.cursor))
        else:
            keys = self._still_to_fire(first)
        if self.high != END:
            beyond = [key for key in keys if key >= self.high]
            self.deferred += len(beyond)
            queue.drop_rows(beyond)
            keys = [key for key in keys if key < self.high]
        if any(flag & SCHEDULED for flag in flags):
            self.has_schedules = True
            held = map(queue.rows.__getitem__, map(INDEX_MASK.__and__, keys))
            self.occurrences += [row for row in held if row is not None and len(row) > 4 and row[4] & SCHEDULED]
        queue.add(keys)
        return self.waiting - waiting

    def _still_to_fire(self, first: int) -> list[int]:
        """Return the keys of rows from `first` on that still have to fire. Drop the others, and mark those done that
        need no delivery."""
        rows = self.queue.rows
        some = [row or b"" for row in rows[first:]]
        heads = offsets(row[:4].ljust(4, b"\0") for row in some)
        keys = []
        for i, row in enumerate(some, first):
            whole = len(row) >= HEADER_BYTES
            # Register every copy, also one that has left already.
            repeated = self.dedupe and whole and self._is_repeat(row, i)
            if i in self.held or self.bits.had_its_turn(i):
                rows[i] = None
            elif repeated:
                self.repeats.append(i)
                self.held.add(i)
                rows[i] = None
            elif len(row) == TOMBSTONE_BYTES:
                self.stubs[i] = row
                rows[i] = None
            elif whole and row[4] & TOMBSTONE and is_tombstone(row):
                self.bits.settle([i])
                rows[i] = None
            else:
                # The due time of a damaged entry is unknown: send it to the dead letters at once.
                damaged = len(row) <= HEADER_BYTES or heads[i - first] >= self.slice.width_ms or row[4] & TOMBSTONE != 0
                if damaged:
                    self.damaged.add(i)
                key = i if damaged else (heads[i - first] << 32) | i
                if i < self.seen and key < self.low:
                    rows[i] = None  # left in an earlier window
                else:
                    keys.append(key)
        return keys

    def _is_repeat(self, row: bytes, index: int) -> bool:
        # Only plain puts are sent twice. A retry or a moved task has its original's id hash but is a separate task.
        if row[4] & INDEXED:
            return False
        return self._first_of.setdefault(row[5:HEADER_BYTES], index) != index

    def judge_stubs(self, first_byte: int, cancelled: bytes) -> None:
        """Mark cancelled rows done by the server's bits, which start at this byte. Send the other four-byte rows to the
        dead letters at once: they are damaged."""
        if marked := [i for i in self.stubs if is_set(cancelled, first_byte, i)]:
            self.bits.settle(marked)
        damaged = [(i, row) for i, row in self.stubs.items() if not is_set(cancelled, first_byte, i)]
        self.stubs = {}
        self.damaged.update(i for i, _ in damaged)
        self.step_back(damaged)

    def trim(self, keep: int) -> int:
        """Keep only the earliest rows; the others are read again in a later pass. Return how many were dropped."""
        gone = self.queue.cut(keep)
        if gone:
            self.high, self.kept = gone[0], keep
            self.deferred += len(gone)
        return len(gone)

    def trim_after(self, until_ms: int) -> None:
        """Drop rows that are due after a time."""
        if self.slice.end_ms <= until_ms:
            return
        bound = max(0, until_ms - self.from_ms) << 32
        keep = self.queue.count_before(bound)
        if keep < self.waiting:
            self.trim(keep)
            self.high, self.kept = bound, END

    def open_window(self, until_ms: int) -> None:
        """Keep only rows of a wide slice that are due before a time."""
        if self.slice.width_ms >= HOUR_MS and self.high == END:
            self.high = max(0, until_ms - self.from_ms) << 32

    def needs_next_window(self, now_ms: int, ahead_ms: int) -> bool:
        """Return True if rows were left out, their time comes near, and most of the rows in memory have left."""
        if not self.deferred or self.unread:
            return False
        near = self.from_ms + (self.high >> 32) <= now_ms + ahead_ms
        return near and self.waiting <= self.kept // 4

    def next_window(self, until_ms: int) -> int:
        """Start another pass over the list for rows after the last window's end. Return how many rows were dropped."""
        let_go = self.waiting
        # Rows that were put back may lie beyond the end of the window, after dropped rows.
        self.low = min(self.queue.first_key, self.high)
        seen = self.cursor
        self._start_pass(seen)
        self.needs_filter = True
        self.high = END
        self.open_window(until_ms)
        self.unread = True
        return let_go

    def restart(self, *, dedupe: bool = False) -> None:
        """Read the list again from its start; skip rows that this owner has fired."""
        self.dedupe = self.dedupe or dedupe
        self.low, self.high = 0, END
        self.needs_filter = True
        self._start_pass(0)
        self.unread = True

    # -- holding --------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Drop all waiting rows and read nothing until `resume`."""
        self.restart()
        self.suspended = True

    def resume(self) -> None:
        self.restart()
        self.suspended = False

    @property
    def blocks_its_lane(self) -> bool:
        """True for a partly read hold slice of a lane: until it is read, the next task of the lane is unknown."""
        return self.unread and self.slice.is_hold and (self.has_lanes or not self.cursor)

    def move_out(self, indexes: list[int]) -> tuple[int, bytes]:
        """Move rows to another slice before they were begun: fired and done in one step. Return the changed range of
        fired bytes."""
        changed = self.bits.fire(indexes)
        self.settle_many(indexes)
        self.held.difference_update(indexes)
        return changed

    # -- firing ------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a row; 0 before the first is read."""
        return self.read_bytes / self.read_rows if self.read_rows else 0.0

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def next_due_ms(self) -> int | None:
        queue = self.queue
        return self.from_ms + queue.first_offset if queue else None

    def take_due(self, now_ms: int, limit: int) -> Due:
        """Return the rows due by now, in due order, and stop them waiting.

        A large slice that is wholly overdue leaves in list order: its rows are so late that their order does not
        matter, and nothing has to be sorted. Lanes choose their own order.
        """
        queue = self.queue
        if self.slice.end_ms <= now_ms and FEW < len(queue) <= limit and self.high == END:
            return queue.take_all()
        return queue.take((now_ms - self.from_ms + 1) << 32, limit)

    def step_back(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Make rows that were held wait again; given with their keys.

        Another pass over the list may have begun since. It has dropped the rows that it has passed; it will reach the
        others, and must not mistake them for rows that left in an earlier window.
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

    def to_redo(self, index: int) -> bool:
        """Return True if a former owner has fired this row and not finished it."""
        return is_set(self.bits.redo, 0, index)

    def unmark_fired(self, indexes: Sequence[int]) -> None:
        """Clear the fired bits of rows that did not leave. Rows fired by a former owner stay fired: they may have been
        delivered."""
        self.out -= len(indexes)
        self.held.difference_update(indexes)
        self.bits.unfire(indexes)

    def land(self, indexes: Sequence[int]) -> None:
        """Settle fired rows."""
        self.out -= len(indexes)
        if self.out or self.bits.redo:
            self.settle_many(indexes)
            return
        self.bits.settle_all_fired(self.tail_index)
        if not self.queue:
            self.let_rows_go()

    def reopen(self, index: int) -> None:
        """Mark a settled row as in flight after all: fired, and not done."""
        self.out += 1
        self.bits.done[index >> 3] &= ~_MASK[index & 7] & 0xFF
        self.held.add(index)

    def let_rows_go(self) -> None:
        """Drop the bytes of all rows if none waits; a row that has to wait again is read again."""
        if not self.held:
            self.queue.rows = [None] * len(self.queue.rows)

    def settle_many(self, indexes: Sequence[int]) -> None:
        """Mark rows as done."""
        self.bits.settle(indexes)
        rows = self.queue.rows
        known = len(rows)
        for i in indexes:
            if i < known:
                rows[i] = None

    def touch(self, begun: Sequence[int], *, commit: bool) -> Touch:
        """Mark rows as fired; return what has to be written: their bits, and the done bits since the last call.

        Rows confirmed in an earlier reply need no further proof: had the server lost them since, it would also have
        lost that call, and the sequence number would show it.
        """
        f_at, f = self.bits.fire(begun) if begun else (0, b"")
        self.out += len(begun)
        if self.bits.redo:
            self.held.update(begun)
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
