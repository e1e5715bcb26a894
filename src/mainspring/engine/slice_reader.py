"""Reads chunks of slices and takes their rows into memory, by pieces, so that ticks get their turn."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from ..model.errors import StoreError
from ..model.stint import Stint
from ..store import read
from ..store.codec import same_entry
from ..store.store import Store
from . import lane_window
from .live import LiveSlice
from .partition import Partition
from .room import Room

log = logging.getLogger("mainspring.engine")

CHUNK_ROWS: Final = 1_000
"""Rows a reply brings at most: parsing them blocks the loop for about a millisecond."""

ROWS_AT_ONCE: Final = 2_000
"""Where a round brings more, the next asks fewer slices: a tick may stand behind it on the same connection."""
CHUNK_BYTES: Final = 512 * 1024
"""And so much at most, about, by the rows of the slice that were read before."""

FIRST_ROWS: Final = (64, 16)
"""Of a slice of which nothing is known so few are read first: its rows may be large. Fewer where many slices are read
at once."""

STINT_S: Final = 0.002
"""So long rows are taken in before what is due has its turn on the loop."""
CHUNKS_AT_ONCE: Final = (32, 512)
"""Slices read at once: few where they are full, many where they hold little."""

LANE_WINDOW: Final = 64
"""Of the tasks that were held back in a lane at least so many are in memory when it goes on."""


class SliceReader:
    """One for all partitions of a node."""

    def __init__(self, store: Store, owned: dict[int, Partition], room: Room, fire: Callable[[], None]) -> None:
        self._store = store
        self._owned = owned
        self._room = room
        self._fire = fire
        self._stint = Stint(STINT_S)
        self.at_once = CHUNKS_AT_ONCE[0]
        """Slices that are read together: by what the last ones brought."""

    def rows_of(self, live: LiveSlice, slices: int) -> int:
        """How many rows a slice may bring, where so many are to be read."""
        few = CHUNKS_AT_ONCE[0]
        # Few slices may be long ones: only where there are many does each get less.
        together = max(few, min(self.at_once, slices))
        most, least = FIRST_ROWS
        known = CHUNK_BYTES // int(live.row_bytes) if live.read_rows else max(least, most * few // together)
        return max(1, min(CHUNK_ROWS * few // together, known))

    async def fetch(self, chunks: list[tuple[LiveSlice, read.Chunk]], until_ms: int, *, full: bool) -> None:
        answers = await read.read_chunks(self._store, [chunk for _, chunk in chunks])
        rows = sum(len(answer.rows) for answer in answers if not isinstance(answer, StoreError))
        few, many = CHUNKS_AT_ONCE
        self.at_once = max(few, self.at_once // 2) if rows > ROWS_AT_ONCE else min(many, self.at_once * 2)
        failure = None
        self._stint.begin()
        for (live, chunk), answer in zip(chunks, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
                continue
            if self._stint.over:
                self._stint.step_aside()
                await asyncio.sleep(0)
                self._stint.begin()
            if not live.forgotten and live.cursor == chunk.first:
                if chunk.overlap and not (answer.before and same_entry(answer.before[0], live.tail)):
                    self._read_anew(live, gone=not answer.before)
                else:
                    self._take(live, chunk, answer, until_ms, full=full)
        with_stubs = [live for live, _ in chunks if live.sieve.stubs]
        if with_stubs:
            failure = await self._judge_stubs(with_stubs) or failure
        self._fire()
        if failure is not None:
            raise failure

    async def _judge_stubs(self, lives: list[LiveSlice]) -> StoreError | None:
        """Of a cancelled task four bytes are left, and a mark: asked for after the rows, so none is missing."""
        ranges = [(min(live.sieve.stubs) >> 3, max(live.sieve.stubs) >> 3) for live in lives]
        wanted = [(live.partition, live.slice, *ends) for live, ends in zip(lives, ranges, strict=True)]
        failure = None
        for live, (first, _), bits in zip(lives, ranges, await read.cancelled_bits(self._store, wanted), strict=True):
            if isinstance(bits, StoreError):
                live.restart()
                failure = bits
                continue
            partition = self._owned.get(live.partition)
            if partition is not None and not live.forgotten:
                live.judge_stubs(first, bits)
                partition.took(live, time.monotonic())
        return failure

    def _read_anew(self, live: LiveSlice, *, gone: bool) -> None:
        """Other rows stand where some were read: a failover forgot those, and puts have come since.

        Begin proves the last row only. Were the list just read on, what took the place of the forgotten rows would
        never be seen, and be marked as done with them.
        """
        if not gone:  # one that is gone was mostly dropped by this very node a moment ago
            log.warning("partition %d: a slice has lost rows that were read; reading again", live.partition)
        if live.partition in self._owned:
            self._owned[live.partition].forget(live)

    def _take(self, live: LiveSlice, chunk: read.Chunk, answer: read.Rows, until_ms: int, *, full: bool) -> None:
        if chunk.bitmaps:
            live.load_bitmaps(answer.fired, answer.done)
        live.unread = len(answer.rows) == chunk.rows
        if not answer.rows:
            return
        live.open_window(until_ms)
        live.absorb(answer.rows)
        # Half of the room is the most that one slice may take; past that only its earliest rows are held. A slice
        # that is read although there is no room keeps what the next tick can use.
        most = max(self._room.tasks // 2, 1)
        if full:
            most = min(most, max(self.rows_of(live, 1), self._room.tasks // 8))
        partition = self._owned.get(live.partition)
        if live.slice.is_hold and live.has_lanes and partition is not None:
            # Tasks of one lane: they leave one at a time, and many lanes may be about to go on.
            lane_window.trim(partition, live, max(self._room.tasks // 64, LANE_WINDOW))
        elif live.waiting > most:
            live.trim(most // 2 + 1)
        if partition is not None:
            partition.took(live, time.monotonic())
