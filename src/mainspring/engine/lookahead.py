"""Read slices shortly before they come due, as far as memory allows, and watch for holds that end."""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Final

from ..model.clock import TimeSlice
from ..model.errors import StoreError
from ..model.lane import CATCH_UP
from ..roles import Loops
from ..store.codec import same_entry
from ..store.owner import holds, read
from ..store.owner.holds import Standing
from ..store.owner.read import Listed
from ..store.store import Store
from .flow import Flow
from .holds import Hold
from .keeper import Keeper
from .partition import Partition
from .slice import LiveSlice

log = logging.getLogger("mainspring.engine")


@dataclass(frozen=True, slots=True)
class Reach:
    """How far ahead an owner reads."""

    tasks: int = 200_000
    bytes: int = 256 * 1024 * 1024
    horizon_ms: int = 5_000
    poll_ms: int = 250
    idle_poll_ms: int = 1_000


LEAST: Final = 16
"""Tasks that may be in memory even if they are very large: with none, nothing could be delivered."""


ROW_BYTES: Final = 112
"""Memory of a row that waits in its slice, besides its own bytes: the object, its place in the list, its key."""

FLIGHT_BYTES: Final = 800
"""Memory of a decoded row that waits in its lane, besides its own bytes; the payload's bytes are held twice."""

SLOT_BYTES: Final = 8
"""Memory of a row that has left its slice, or was dropped."""


CHUNK_ROWS: Final = 1_000
"""Most rows in a reply: parsing them blocks the loop for about a millisecond."""

ROWS_AT_ONCE: Final = 2_000
"""Above this, the next round reads fewer slices: a tick may be queued behind it on the same connection."""
CHUNK_BYTES: Final = 512 * 1024
"""Approximate bytes of a reply, estimated from the rows of the slice read before."""

FIRST_ROWS: Final = (64, 16)
"""Rows read first from an unknown slice, whose rows may be large; fewer if many slices are read at once."""

TIME_SLICE_S: Final = 0.002
"""Seconds spent on taking in rows before due tasks get their turn on the loop."""
CHUNKS_AT_ONCE: Final = (32, 512)
"""Slices read at once: few if they are full, many if they hold little."""

LANE_WINDOW: Final = 64
"""Held tasks of a lane kept in memory, at least, when the lane continues; fewer if they are large."""


HEADS_ASKED: Final = 256
"""Failed heads of a partition that are looked up at once."""


LANES_AT_ONCE: Final = 256
"""Lanes of a partition whose held tasks are reopened at the same time; the others follow as these finish. A pause may
have held thousands, and each has a slice to find, to read, to check in every tick and to drop."""

LANES_SOON_S: Final = 0.02

SLICES_LISTED: Final = 256
MOST_IN_LANES: Final = 2
"""Lanes may hold up to this multiple of the look-ahead limit while the excess is spilled."""

PACED_ROWS: Final = 512
"""Rows of a paced slice (one that leaves gradually) kept in memory, and read at a time."""

WINDOW_MS: Final = 300_000
"""Milliseconds of an hour slice held in memory at a time; less if room is short."""


class LookAhead:
    """Keeps the owned partitions' slices in memory as far as the reach goes."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        reach: Reach,
        keeper: Keeper,
        flow: Flow,
        loops: Loops,
    ) -> None:
        self._store = store
        self._owned = owned
        self._reach = reach
        self._loops = loops
        self._keeper = keeper
        self._flow = flow
        self.accepted: dict[int, int] = {}
        """Highest count seen of each partition, owned now or before: it never falls unless the server loses data."""
        self._more_held = False
        """True if more holds can be reopened as soon as the current ones are done."""
        self.forgotten = 0
        """Accepted tasks that servers have lost in failovers, as far as they had been counted."""
        self._woken: set[int] = set()
        self._next_poll_ms = 0
        self._poll_ms = reach.idle_poll_ms
        self.limit = reach.tasks
        """Tasks that may be in memory besides those in lanes: fewer than configured if they are large."""
        self._time_slice = TimeSlice(TIME_SLICE_S)
        self._at_once = CHUNKS_AT_ONCE[0]
        """Slices read together, adjusted by how many rows the last round brought."""
        self._row_bytes = 0.0
        """Bytes of the rows read lately, the largest slice's mean: rows of an unknown slice may be as large."""
        self._window_ms = WINDOW_MS
        self._listed: list[Partition] = []
        """Partitions whose lanes waited for the listing of this round, and may begin again."""
        self.waits_for_room = False
        """True if there was more to read than room for it."""

    @property
    def held(self) -> int:
        """Number of tasks read ahead. Tasks in lanes count only if they are very many: spilling them may be slower than
        the arrival of others."""
        waiting = sum(partition.waiting for partition in self._owned.values())
        return waiting + max(0, self._behind - MOST_IN_LANES * self.limit)

    @property
    def _behind(self) -> int:
        return sum(partition.behind for partition in self._owned.values())

    def woken(self, partition: int) -> None:
        """Note a put with a near due time in this partition."""
        self._woken.add(partition)

    def reconnected(self) -> None:
        """Check everything: wake-ups may have been missed."""
        self._woken.update(self._owned)

    async def step(self) -> float:
        """Run one round: detect new tasks, list slices, read. Return the seconds until the next round is needed."""
        now_ms = self._store.clock.now_ms()
        self._measure()
        failure = await self._free_lanes() if self._is_time_to_poll(now_ms) or self._woken else None
        failure = await self._open_ended() or failure
        failure = await self._poll(now_ms) or failure
        failure = await self._list(now_ms) or failure
        try:
            more = await self._read(now_ms)
        finally:
            if self._listed:
                for partition in self._listed:  # even if one server is unavailable: these may be on another
                    partition.waits_for_listing = False
                self._listed.clear()
                self._loops.fire.wake()
        if failure is not None:
            raise failure  # raise late: an unavailable server must not keep the others from being read
        if more or self._woken:
            return 0.0
        wait_ms = min(self._next_poll_ms - self._store.clock.now_ms(), self._reach.idle_poll_ms)
        return max(0.001, min(wait_ms / 1000, LANES_SOON_S) if self._more_held else wait_ms / 1000)

    def _measure(self) -> None:
        """Estimate from their size how many tasks may be in memory and in flight: the configured number, or fewer."""
        rows = out = decoded = slots = 0
        rows_bytes = decoded_bytes = out_bytes = 0.0
        for partition in self._owned.values():
            for live in partition.lives:
                slots += len(live.queue.rows)
                as_flight = 2 * live.row_bytes + FLIGHT_BYTES
                # A task of a lane is decoded when it is due, and may wait in its lane for a long time.
                as_row = as_flight if live.has_lanes else live.row_bytes + ROW_BYTES
                held = len(live.held)  # some of these have left: only their size matters here
                rows += live.waiting + held
                rows_bytes += (live.waiting + held) * as_row
                decoded += held
                decoded_bytes += held * as_flight
                out += live.out
                out_bytes += live.out * as_flight
        self.limit = self._reach.tasks
        if rows:
            moving = sum(partition.standing for partition in self._owned.values())
            a_row, a_flight = rows_bytes / rows, decoded_bytes / decoded if decoded else 0.0
            # Tasks being moved into hold slices are already counted, but as rows.
            taken = slots * SLOT_BYTES + self._behind * a_flight + moving * max(0.0, a_flight - a_row)
            self.limit = min(self._reach.tasks, max(LEAST, int((self._reach.bytes - taken) / a_row)))
        by_size = max(LEAST, int(self._reach.bytes / out_bytes * out)) if out else self._flow.concurrency
        self._flow.most = min(self._flow.concurrency, by_size)
        # Tasks that wait in lanes do not count as read ahead.
        full = self._behind > self.limit
        for partition in self._owned.values():
            partition.fill_lanes(full=full)

    def _is_time_to_poll(self, now_ms: int) -> bool:
        # Further ahead than any poll: the clock was set back since. Waiting for that time could take an hour.
        return not now_ms < self._next_poll_ms <= now_ms + self._reach.idle_poll_ms

    # -- held tasks --------------------------------------------------------------------------------------

    async def _free_lanes(self) -> StoreError | None:
        """Free lanes whose failed head was cancelled, given up or replaced."""
        asked = [
            (partition, lane, Standing(partition.number, lane.name, idh, lane.place))
            for partition in self._owned.values()
            for lane, idh in partition.heads_to_ask(HEADS_ASKED)
        ]
        if not asked:
            return None
        try:
            places = await holds.look_at_heads(self._store, [one for _, _, one in asked])
        except StoreError as error:
            return error
        failure = None
        gone: dict[Partition, list[Standing]] = {}
        for (partition, lane, one), place in zip(asked, places, strict=True):
            if isinstance(place, StoreError):
                failure = place
            elif place is None:
                gone.setdefault(partition, []).append(one)
            elif lane.head == one.idh:
                lane.place = place  # it need not be looked at again while it stays there
        for partition, heads in gone.items():
            if self._owned.get(partition.number) is partition:
                partition.heads_are_gone((one.lane, one.idh) for one in heads)
                self._loops.fire.wake()
        return failure

    async def _open_ended(self) -> StoreError | None:
        """Read the slices of holds that have ended, like any other slice."""
        wanted: dict[Partition, list[Hold]] = {}
        self._more_held = False
        for partition in self._owned.values():
            policy = partition.hold_policy
            if policy.by_place:
                # Without hold slices that are being read and delivered, or wait to be dropped.
                back = sum(live.slice.is_hold and not live.suspended for live in partition.lives)
                more = policy.look_again(LANES_AT_ONCE - back)
                found, further = policy.to_find(LANES_AT_ONCE - back)
                if found:
                    wanted[partition] = found
                self._more_held |= more or further
        if not wanted:
            return None
        places = {partition.number: [hold.place for hold in some] for partition, some in wanted.items()}
        answers, failure = await holds.scores(self._store, places), None
        for partition, some in wanted.items():
            scores = answers[partition.number]
            if isinstance(scores, StoreError):
                failure = scores
                continue
            lives = {
                hold: None if g is None else LiveSlice(partition.keys, hold.place, g)
                for hold, g in zip(some, scores, strict=True)
                if hold.live is None and hold.open and not hold.pending
            }
            partition.add(*(live for live in lives.values() if live is not None))
            policy = partition.hold_policy
            for hold, live in lives.items():
                policy.found(hold, live)
        return failure

    # -- new tasks ---------------------------------------------------------------------------------------

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
            elif count != self.accepted.get(partition.number):
                self.accepted[partition.number] = count
                partition.needs_listing = changed = True
        if self.held < self.limit // 4:
            self._window_ms = min(WINDOW_MS, self._window_ms * 2)
        self._poll_ms = self._reach.poll_ms if changed else min(self._poll_ms * 2, self._reach.idle_poll_ms)
        self._next_poll_ms = now_ms + self._poll_ms
        if failure is not None:
            self._next_poll_ms = 0
        return failure

    def _rolled_back(self, partition: Partition, count: int) -> None:
        """Record that the server has fewer tasks than before: a failover or restart lost its last writes."""
        missing = self.accepted[partition.number] - count
        self.forgotten += missing
        self.accepted[partition.number] = count
        log.error(
            "partition %d: the server has forgotten %d accepted tasks (a failover or restart lost its last writes);"
            " those that were not delivered yet are lost, unless they were put with a level that covers it",
            partition.number,
            missing,
        )
        self._keeper.lose(partition, "rolledback")

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
            one.gone = {}
        # Slices in memory must not use up the number: some may wait behind a lane for a long time.
        limits = [SLICES_LISTED + len(one.lives) + len(one.strangers) for one in wanted]
        answers = await read.list_slices(self._store, [one.number for one in wanted], before_ms=ahead_ms, limits=limits)
        failure = None
        for partition, limit, answer in zip(wanted, limits, answers, strict=True):
            if isinstance(answer, StoreError):
                partition.needs_listing, failure = True, answer
                continue
            partition.next_start_ms, partition.strangers = answer.next_ms, answer.strangers
            if answer.members == limit:
                # There are more: list again when some of these are gone.
                partition.next_start_ms = now_ms
            self._reconcile(partition, answer.slices)
            if partition.waits_for_listing:
                self._listed.append(partition)
        return failure

    def _reconcile(self, partition: Partition, listed: list[Listed]) -> None:
        gone = partition.gone
        for place, g in listed:
            if gone.get(place) == g:
                continue  # dropped while the listing was on its way
            live = partition.live_at(place)
            if live is not None and live.g != g:
                partition.forget(live)
                live = None
            if live is None:
                live = LiveSlice(partition.keys, place, g)
                if place.end_ms <= self._store.clock.now_ms() - self._flow.overdue_after_ms:
                    live.pace = CATCH_UP
                partition.add(live)
            live.unread = True

    async def _read(self, now_ms: int) -> bool:
        """Read a round of chunks, earliest slices first. Return True if there is more to read at once."""
        until_ms = now_ms + self._window_ms
        wanted, paced = self._wanted(now_ms)
        held = self.held if wanted else 0
        # Treat little room as none: in a backlog every tick frees some, and reading few rows at a time is inefficient.
        most = self.limit
        least = most // 8
        if held > most - least:
            self._make_room(now_ms)
            held = self.held
        room = most - held
        chunks = self._chunks(wanted, room if room >= least else 0)
        self.waits_for_room = paced or len(chunks) < min(len(wanted), self._at_once)
        if not chunks:
            return False
        await self._fetch(chunks, until_ms, full=held >= most)
        return True

    def _wanted(self, now_ms: int) -> tuple[list[LiveSlice], bool]:
        """Return the slices with rows to read, and whether others are left because they leave gradually."""
        wanted: list[LiveSlice] = []
        paced = False
        for partition in self._owned.values():
            waiting = Counter[str]()  # rows in memory of slices that are paced, by the keys of their holds
            for live in partition.lives:
                if live.pace is not None:
                    waiting[live.pace] += live.waiting
            for live in partition.lives:
                if live.suspended:
                    continue
                paced |= self._has_enough_of(live, partition, now_ms)
                if not live.unread:
                    continue
                if live.pace is not None and self._flow.room(live.pace) < inf:
                    if waiting[live.pace] >= PACED_ROWS and partition.blocked_ms < live.slice.start_ms:
                        paced = True
                        continue
                    waiting[live.pace] += PACED_ROWS
                wanted.append(live)
        # Held tasks come last: there may be many, and the others are on time.
        wanted.sort(key=lambda live: live.slice.start_ms)
        return wanted, paced

    def _has_enough_of(self, live: LiveSlice, partition: Partition, now_ms: int) -> bool:
        """Begin the next window of a slice, unless enough of the last one waits in its lane; return True then."""
        if partition.unanswered is not None or not live.needs_next_window(now_ms, self._reach.horizon_ms):
            return False
        policy = partition.hold_policy
        hold = policy.by_place.get(live.slice)
        if hold is not None and hold.has_plenty():
            return True
        live.next_window(now_ms + self._window_ms)
        return False

    def _make_room(self, now_ms: int) -> None:
        """Drop rows of wide slices that are due late, to make room for what is due now."""
        self._window_ms = max(2 * self._reach.horizon_ms, self._window_ms // 2)
        for partition in self._owned.values():
            for live in partition.lives:
                live.trim_after(now_ms + self._window_ms)

    def _chunks(self, wanted: list[LiveSlice], room: int) -> list[tuple[LiveSlice, read.Chunk]]:
        chunks: list[tuple[LiveSlice, read.Chunk]] = []
        for live in wanted:
            if len(chunks) == self._at_once:
                break
            rows = self._rows_of(live, len(wanted))
            count = min(rows, room)
            if live.pace is not None and self._flow.room(live.pace) < inf:
                count = min(count, PACED_ROWS)
            # A lane's task waits until everything that started before it is read, so such slices are read to their end
            # even if there is no room. Rows that do not fit are dropped again.
            blocked = self._owned[live.partition].blocked_ms >= live.slice.start_ms
            if count <= 0 and (blocked or live.blocks_its_lane):
                count = rows
            if count > 0:
                room -= count
                overlap = int(0 <= live.tail_index == live.cursor - 1)
                chunk = read.Chunk(live.partition, live.slice, live.cursor, count, live.inherited, overlap)
                chunks.append((live, chunk))
        return chunks

    def _rows_of(self, live: LiveSlice, slices: int) -> int:
        """Return how many rows to read from a slice when `slices` slices are read."""
        few = CHUNKS_AT_ONCE[0]
        # A few slices may be long: read less of each only if there are many.
        together = max(few, min(self._at_once, slices))
        most, least = FIRST_ROWS
        if live.read_rows:
            known = CHUNK_BYTES // max(1, int(live.row_bytes))
        elif self._row_bytes:
            known = min(max(least, most * few // together), CHUNK_BYTES // int(self._row_bytes))
        else:
            known = least
        return max(1, min(CHUNK_ROWS * few // together, known))

    async def _fetch(self, chunks: list[tuple[LiveSlice, read.Chunk]], until_ms: int, *, full: bool) -> None:
        answers = await read.read_chunks(self._store, [chunk for _, chunk in chunks])
        rows = sum(len(answer.rows) for answer in answers if not isinstance(answer, StoreError))
        few, many = CHUNKS_AT_ONCE
        self._at_once = max(few, self._at_once // 2) if rows > ROWS_AT_ONCE else min(many, self._at_once * 2)
        failure = None
        self._time_slice.begin()
        for (live, chunk), answer in zip(chunks, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
                continue
            if self._time_slice.over:
                self._time_slice.end()
                await asyncio.sleep(0)
                self._time_slice.begin()
            partition = self._owned.get(live.partition)
            if partition is None or live.forgotten or live.cursor != chunk.first:
                continue
            if chunk.overlap and not (answer.before and same_entry(answer.before[0], live.tail)):
                # Its rows changed: a failover lost some of the rows read, and puts have come since. Begin proves only
                # the last row. If reading simply continued, the rows that replaced the lost ones would never be seen,
                # and would be marked as done with them.
                if answer.before:  # otherwise it is gone: most likely this node has dropped it
                    log.warning("partition %d: a slice has lost rows that were read; reading again", live.partition)
                partition.forget(live)
            else:
                self._take_in(partition, live, chunk, answer, until_ms, full=full)
        with_stubs = [live for live, _ in chunks if live.stubs]
        if with_stubs:
            failure = await self._judge_stubs(with_stubs) or failure
        self._loops.fire.wake()
        if any(one.asks_planner for one in self._owned.values()):
            self._loops.plan.wake()
        if failure is not None:
            raise failure

    async def _judge_stubs(self, lives: list[LiveSlice]) -> StoreError | None:
        """Find out which four-byte rows are cancelled tasks. The marks are read after the rows, so none is missing."""
        ranges = [(min(live.stubs) >> 3, max(live.stubs) >> 3) for live in lives]
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

    def _take_in(
        self,
        partition: Partition,
        live: LiveSlice,
        chunk: read.Chunk,
        answer: read.SliceRows,
        until_ms: int,
        *,
        full: bool,
    ) -> None:
        if chunk.bitmaps:
            live.load_bitmaps(answer.fired, answer.done)
        live.unread = len(answer.rows) == chunk.rows
        if not answer.rows:
            return
        live.open_window(until_ms)
        live.absorb(answer.rows)
        self._row_bytes = max(live.row_bytes, 0.9 * self._row_bytes)
        # A slice may take at most half of the room; beyond that only its earliest rows are held. A slice that is read
        # although there is no room keeps what the next tick can use.
        most = max(self.limit // 2, 1)
        if full:
            most = min(most, max(self._rows_of(live, 1), self.limit // 8))
        policy = partition.hold_policy
        hold = policy.by_place.get(live.slice) if live.has_lanes else None
        if hold is not None:
            # Tasks of a lane leave one at a time, and many lanes may be about to continue.
            window = min(LANE_WINDOW, CHUNK_BYTES // max(1, int(live.row_bytes)))
            hold.trim(live, max(self.limit // 64, window, 1))
        elif live.waiting > most:
            live.trim(most // 2 + 1)
        partition.took(live, time.monotonic())
