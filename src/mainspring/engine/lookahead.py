"""Reads slices shortly before they come due, the earliest first, never more than fits."""

import logging
from collections.abc import Callable
from math import inf
from typing import Final

from ..model.errors import StoreError
from ..model.hold import CATCH_UP
from ..store import read
from ..store.listing import Listed
from ..store.store import Store
from . import lane_window
from .hold_watch import LANES_SOON_S, HoldWatch
from .live import LiveSlice
from .partition import Partition
from .reach import Reach
from .room import Room
from .slice_reader import SliceReader

log = logging.getLogger("mainspring.engine")

SLICES_LISTED: Final = 256
MOST_IN_LANES: Final = 2
"""So many times as many as may be read ahead may wait in lanes besides, while the rest of them is moved away."""

PACED_ROWS: Final = 512
"""Of tasks that leave little by little so many wait in memory, and so many more are read at a time."""

WINDOW_MS: Final = 300_000
"""Of an hour slice this much is held at a time, less where room is short."""


def _by_start(live: LiveSlice) -> int:
    return live.slice.start_ms


class LookAhead:
    """Keeps the owned partitions' slices in memory as far as the reach goes."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        reach: Reach,
        fire: Callable[[], None],
        lost: Callable[[Partition, str], None],
    ) -> None:
        self._store = store
        self._owned = owned
        self._reach = reach
        self._fire = fire
        self._holds = HoldWatch(store, owned, fire)
        self._lost = lost
        self.accepted: dict[int, int] = {}
        """The highest count seen of each partition, owned now or before: it never falls unless the server forgets."""
        self.forgotten = 0
        """Accepted tasks that servers have forgotten since: what a failover lost, as far as it was seen before."""
        self._woken: set[int] = set()
        self._next_poll_ms = 0
        self._poll_ms = reach.idle_poll_ms
        self.room = Room(reach, owned)
        self._reader = SliceReader(store, owned, self.room, fire)
        self._window_ms = WINDOW_MS
        self._listed: list[Partition] = []
        """Partitions listed in this round that wait for it."""
        self.hungry = False
        """There was more to read than room for it."""
        self.overdue_after_ms = inf
        """Slices that ended longer ago are overdue: what they hold leaves little by little."""

    @property
    def held(self) -> int:
        """What counts as read ahead. Who waits for a turn in a lane does not, unless these are very many: they are
        moved away, but perhaps not as fast as others come."""
        behind = sum(partition.lanes.behind for partition in self._owned.values())
        waiting = sum(partition.waiting for partition in self._owned.values())
        return waiting + max(0, behind - MOST_IN_LANES * self.room.tasks)

    def woken(self, partition: int) -> None:
        """A put with a near due time went to this partition."""
        self._woken.add(partition)

    def reconnected(self) -> None:
        """Wake-ups may have been missed: look at everything."""
        self._woken.update(self._owned)

    async def step(self) -> float:
        """One round: find out what came, list slices, read. Returns the seconds until the next is needed."""
        now_ms = self._store.clock.now_ms()
        self.room.measure()
        self._look_at_lanes()
        failure = await self._holds.free_lanes() if self._is_time_to_poll(now_ms) or self._woken else None
        failure = await self._holds.open_ended() or failure
        failure = await self._poll(now_ms) or failure
        failure = await self._list(now_ms) or failure
        try:
            more = await self._read(now_ms)
        finally:
            self._let_begin()  # also when some server is away: these may be with another one
        if failure is not None:
            raise failure  # only now: one server that is away must not keep the others from being read
        if more or self._woken:
            return 0.0
        wait_ms = min(self._next_poll_ms - self._store.clock.now_ms(), self._reach.idle_poll_ms)
        return max(0.001, min(wait_ms / 1000, LANES_SOON_S) if self._holds.more else wait_ms / 1000)

    def _let_begin(self) -> None:
        """What a lane waited for is known by now, and the first of it is read."""
        for partition in self._listed:
            partition.waits_for_listing = False
        if self._listed:
            self._listed.clear()
            self._fire()

    def _look_at_lanes(self) -> None:
        """Those that wait for their turn in lanes do not count as what was read ahead, but have a bound too."""
        full = sum(partition.lanes.behind for partition in self._owned.values()) > self.room.tasks
        for partition in self._owned.values():
            partition.lanes.fill(full=full)

    def _is_time_to_poll(self, now_ms: int) -> bool:
        # Further ahead than a poll ever is: the clock was set back since. To wait for it could take an hour.
        return not now_ms < self._next_poll_ms <= now_ms + self._reach.idle_poll_ms

    async def _poll(self, now_ms: int) -> StoreError | None:
        for number in self._woken:
            if number in self._owned:
                self._owned[number].needs_listing = True
        self._woken.clear()
        if not self._is_time_to_poll(now_ms):
            return None
        partitions = list(self._owned.values())
        counts = await read.accepted_counts(self._store, [one.number for one in partitions])
        changed, failure = False, None
        for partition, count in zip(partitions, counts, strict=True):
            if isinstance(count, StoreError):
                failure = count
            elif count < self.accepted.get(partition.number, 0):
                self._rolled_back(partition, count)
            elif count != partition.accepted_seen:
                partition.accepted_seen = self.accepted[partition.number] = count
                partition.needs_listing = changed = True
        if self.held < self.room.tasks // 4:
            self._window_ms = min(WINDOW_MS, self._window_ms * 2)
        self._poll_ms = self._reach.poll_ms if changed else min(self._poll_ms * 2, self._reach.idle_poll_ms)
        self._next_poll_ms = now_ms + self._poll_ms
        if failure is not None:
            self._next_poll_ms = 0
        return failure

    def _rolled_back(self, partition: Partition, count: int) -> None:
        """The server knows of fewer tasks than before: a failover, or a restart, lost what was written last."""
        missing = self.accepted[partition.number] - count
        self.forgotten += missing
        self.accepted[partition.number] = count
        log.error(
            "partition %d: the server has forgotten %d accepted tasks (a failover or restart lost its last writes);"
            " those that were not delivered yet are lost, unless they were put with a level that covers it",
            partition.number,
            missing,
        )
        self._lost(partition, "rolledback")

    async def _list(self, now_ms: int) -> StoreError | None:
        ahead_ms = now_ms + self._reach.horizon_ms
        wanted = [
            one
            for one in self._owned.values()
            if one.needs_listing or (one.next_start_ms is not None and one.next_start_ms < ahead_ms)
        ]
        if not wanted:
            return None
        for one in wanted:
            one.needs_listing = False
            one.gone.clear()
        # Slices that are held already must not use up the number: some may wait behind a lane for long.
        limits = [SLICES_LISTED + len(one.slices) + len(one.strangers) for one in wanted]
        answers = await read.list_slices(self._store, [one.number for one in wanted], before_ms=ahead_ms, limits=limits)
        failure = None
        for partition, limit, answer in zip(wanted, limits, answers, strict=True):
            if isinstance(answer, StoreError):
                partition.needs_listing, failure = True, answer
                continue
            partition.next_start_ms, partition.strangers = answer.next_ms, answer.strangers
            if answer.members == limit:
                # There are more: look again when some of these are gone.
                partition.next_start_ms = now_ms
            self._reconcile(partition, answer.slices)
            if partition.waits_for_listing:
                self._listed.append(partition)
        return failure

    def _reconcile(self, partition: Partition, listed: list[Listed]) -> None:
        for place, g in listed:
            if partition.gone.get(place) == g:
                continue  # dropped while the listing was on its way
            live = partition.slices.get(place)
            if live is not None and live.g != g:
                partition.forget(live)
                live = None
            if live is None:
                live = LiveSlice(partition.keys, place, g)
                if place.end_ms <= self._store.clock.now_ms() - self.overdue_after_ms:
                    live.pace = CATCH_UP
                partition.add(live)
            live.unread = True

    async def _read(self, now_ms: int) -> bool:
        """Read a round of chunks, earliest slices first. True when there is more to read at once."""
        until_ms = now_ms + self._window_ms
        wanted: list[LiveSlice] = []
        paced = False
        for partition in self._owned.values():
            waiting = self._paced_rows(partition)
            for live in partition.slices.values():
                if live.suspended:
                    continue
                paced |= self._has_enough_of(live, partition, now_ms)
                if not live.unread:
                    continue
                enough = live.pace in waiting and waiting[live.pace] >= PACED_ROWS
                if enough and partition.blocked_ms < live.slice.start_ms:
                    paced = True
                    continue
                wanted.append(live)
                if live.pace in waiting:
                    waiting[live.pace] += PACED_ROWS
        # What was held back comes last: there may be much of it, and the others are in time.
        wanted.sort(key=_by_start)
        held = self.held if wanted else 0
        # Little room is no room: in a backlog every tick frees some, and reading a few rows at a time costs most.
        most = self.room.tasks
        least = most // 8
        if held > most - least:
            self._make_room(now_ms)
            held = self.held
        room = most - held
        chunks = self._chunks(wanted, room if room >= least else 0)
        self.hungry = paced or len(chunks) < min(len(wanted), self._reader.at_once)
        if not chunks:
            return False
        await self._reader.fetch(chunks, until_ms, full=held >= most)
        return True

    def _has_enough_of(self, live: LiveSlice, partition: Partition, now_ms: int) -> bool:
        """Of a slice that is read in windows begin the next one, unless enough of the last stands in its lane."""
        if partition.unanswered is not None or not live.needs_next_window(now_ms, self._reach.horizon_ms):
            return False
        if lane_window.has_plenty(partition, live):
            return True
        live.next_window(now_ms + self._window_ms)
        return False

    def _paced_rows(self, partition: Partition) -> dict[str | None, int]:
        """Of what leaves little by little: how much waits in memory, by the key of its hold."""
        waiting: dict[str | None, int] = {}
        for live in partition.slices.values():
            if live.pace is not None:
                waiting[live.pace] = waiting.get(live.pace, 0) + live.waiting
        return {key: rows for key, rows in waiting.items() if key and partition.gates.room(key) is not None}

    def _make_room(self, now_ms: int) -> None:
        """Let go of rows of wide slices that are not due for long: they must not keep out what is due now."""
        self._window_ms = max(2 * self._reach.horizon_ms, self._window_ms // 2)
        for partition in self._owned.values():
            for live in partition.slices.values():
                live.trim_after(now_ms + self._window_ms)

    def _chunks(self, wanted: list[LiveSlice], room: int) -> list[tuple[LiveSlice, read.Chunk]]:
        chunks: list[tuple[LiveSlice, read.Chunk]] = []
        for live in wanted:
            if len(chunks) == self._reader.at_once:
                break
            rows = self._reader.rows_of(live, len(wanted))
            count = min(rows, room)
            if live.pace is not None and self._owned[live.partition].is_paced(live):
                count = min(count, PACED_ROWS)
            # A lane's task waits until all that started before it is read: such slices are read to their end even
            # when there is no room. Rows that do not fit are let go again.
            blocked = self._owned[live.partition].blocked_ms >= live.slice.start_ms
            if count <= 0 and (blocked or live.blocks_its_lane):
                count = rows
            if count > 0:
                room -= count
                overlap = int(0 <= live.tail_index == live.cursor - 1)
                chunk = read.Chunk(live.partition, live.slice, live.cursor, count, live.inherited, overlap)
                chunks.append((live, chunk))
        return chunks
