"""Reads slices shortly before they come due, the earliest first, never more than fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..model.errors import StoreError
from ..store import read
from ..store.store import Store
from .live import LiveSlice
from .partition import Partition

CHUNK_ROWS: Final = 1_000
"""Rows a reply brings at most: parsing them blocks the loop for about a millisecond."""

CHUNKS_AT_ONCE: Final = 32
SLICES_LISTED: Final = 256
WINDOW_MS: Final = 300_000
"""Of an hour slice this much is held at a time."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far ahead an owner reads."""

    tasks: int = 200_000
    horizon_ms: int = 3_000
    poll_ms: int = 250
    idle_poll_ms: int = 1_000


class LookAhead:
    """Keeps the owned partitions' slices in memory as far as the reach goes."""

    def __init__(
        self, store: Store, owned: dict[int, Partition], reach: Reach, fire: Callable[[], None]
    ) -> None:
        self._store = store
        self._owned = owned
        self._reach = reach
        self._fire = fire
        self._woken: set[int] = set()
        self._next_poll_ms = 0
        self._poll_ms = reach.idle_poll_ms

    @property
    def held(self) -> int:
        return sum(partition.waiting for partition in self._owned.values())

    def woken(self, partition: int) -> None:
        """A put with a near due time went to this partition."""
        self._woken.add(partition)

    def reconnected(self) -> None:
        """Wake-ups may have been missed: look at everything."""
        self._woken.update(self._owned)

    async def step(self) -> float:
        """One round: find out what came, list slices, read. Returns the seconds until the next is needed."""
        now_ms = self._store.clock.now_ms()
        await self._poll(now_ms)
        await self._list(now_ms)
        more = await self._read(now_ms)
        if more or self._woken:
            return 0.0
        return max(0.001, (self._next_poll_ms - self._store.clock.now_ms()) / 1000)

    async def _poll(self, now_ms: int) -> None:
        for number in self._woken:
            if number in self._owned:
                self._owned[number].needs_listing = True
        self._woken.clear()
        if now_ms < self._next_poll_ms:
            return
        partitions = list(self._owned.values())
        counts = await read.accepted_counts(self._store, [one.number for one in partitions])
        changed, failure = False, None
        for partition, count in zip(partitions, counts, strict=True):
            if isinstance(count, StoreError):
                failure = count
            elif count != partition.accepted_seen:
                partition.accepted_seen = count
                partition.needs_listing = changed = True
        self._poll_ms = self._reach.poll_ms if changed else min(self._poll_ms * 2, self._reach.idle_poll_ms)
        self._next_poll_ms = now_ms + self._poll_ms
        if failure is not None:
            self._next_poll_ms = 0
            raise failure

    async def _list(self, now_ms: int) -> None:
        ahead_ms = now_ms + self._reach.horizon_ms
        wanted = [
            one
            for one in self._owned.values()
            if one.needs_listing or (one.next_start_ms is not None and one.next_start_ms < ahead_ms)
        ]
        if not wanted:
            return
        for one in wanted:
            one.needs_listing = False
        answers = await read.list_slices(
            self._store, [one.number for one in wanted], before_ms=ahead_ms, limit=SLICES_LISTED
        )
        for partition, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, StoreError):
                partition.needs_listing = True
                raise answer
            listed, later = answer
            partition.next_start_ms = later[0].slice.start_ms if later else None
            if len(listed) == SLICES_LISTED:
                # There are more: look again when some of these are gone.
                partition.next_start_ms = now_ms
            self._reconcile(partition, listed)

    def _reconcile(self, partition: Partition, listed: list[read.Listed]) -> None:
        for place, g in listed:
            live = partition.slices.get(place)
            if live is not None and live.g != g:
                partition.forget(live)
                live = None
            if live is None:
                live = partition.slices[place] = LiveSlice(partition.number, place, g)
                live.sift = partition.recovering
            live.unread = True
        partition.recovering = False

    async def _read(self, now_ms: int) -> bool:
        """Read a round of chunks, earliest slices first. True when there is more to read at once."""
        until_ms = now_ms + WINDOW_MS
        room = self._reach.tasks - self.held
        wanted: list[LiveSlice] = []
        for partition in self._owned.values():
            for live in partition.slices.values():
                if live.needs_next_window(now_ms, self._reach.horizon_ms):
                    live.next_window(until_ms)
                if live.unread:
                    wanted.append(live)
        if room <= 0:
            # What has started must be read to its end even when full: a lane's task waits for that. Rows that do
            # not fit are let go again.
            wanted = [live for live in wanted if live.slice.start_ms <= now_ms]
        wanted.sort(key=lambda live: live.slice.start_ms)
        batch = wanted[:CHUNKS_AT_ONCE]
        if batch:
            await self._read_batch(batch, until_ms, room)
        return len(batch) > 0 and (room > 0 or any(live.unread for live in batch))

    async def _read_batch(self, batch: list[LiveSlice], until_ms: int, room: int) -> None:
        chunks = [
            read.Chunk(live.partition, live.slice, live.cursor, CHUNK_ROWS, live.sift and live.tail_index < 0)
            for live in batch
        ]
        answers = await read.read_chunks(self._store, chunks)
        failure = None
        for live, chunk, answer in zip(batch, chunks, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
            elif not live.forgotten and live.cursor == chunk.first:
                room -= self._take(live, chunk, answer, until_ms, room)
        self._fire()
        if failure is not None:
            raise failure

    def _take(self, live: LiveSlice, chunk: read.Chunk, answer: read.Rows, until_ms: int, room: int) -> int:
        if chunk.bitmaps:
            live.load_bitmaps(answer.fired, answer.done)
            live.sift = live.sift or bool(answer.fired or answer.done)
        live.unread = len(answer.rows) == chunk.count
        if not answer.rows:
            return 0
        live.open_window(until_ms)
        gained = live.absorb(answer.rows)
        if gained > room or live.waiting > self._reach.tasks // 2:
            gained -= live.trim(max(CHUNK_ROWS, live.waiting - max(0, gained - room)))
        return gained
