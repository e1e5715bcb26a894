"""Begins due tasks, hands them to the sinks, and writes their outcomes."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Final

from ..model.errors import StoreError
from ..roles import Loops
from ..store.job_queue import decode_ack
from ..store.owner import fire
from ..store.owner.fire import CommitReply, TickReply, read_acks
from ..store.store import Store
from .deliveries import Deliveries
from .flight import FlightGroup
from .flow import Flow
from .keeper import Keeper
from .lookahead import LookAhead
from .partition import MOST_OUTCOMES, BeginCall, CommitCall, OwnerCall, Partition, PartitionLost


class TickPace:
    """The wait between ticks: longer under load, so that each call carries more tasks."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._began = 0.0

    def ticked(self, tasks: int, began: float) -> None:
        elapsed = max(began - self._began, 1e-4)
        self._began = began
        # Average over half a second: a single full tick is not yet a load.
        self._rate += (tasks / elapsed - self._rate) * min(1.0, elapsed / 0.5)

    def wait_s(self) -> float:
        """Return the wait until the next tick, counted from the start of the last."""
        gap = next(gap for limit, gap in _GAPS_S if self._rate < limit)
        return max(0.0, self._began + gap - time.monotonic())


_GAPS_S: Final = ((2_000.0, 0.001), (15_000.0, 0.0015), (25_000.0, 0.005), (inf, 0.010))
"""Shortest time between ticks, by the rate in tasks a second up to which it applies; see docs/decisions/0022."""


POLL_S: Final = 0.5
"""Seconds between polls for unannounced acks, and between attempts for tasks whose id is already in a queue."""

IDLE_S: Final = 1.0


class WorkerAcks:
    """Watches partitions for acks of workers.

    A task without a lane is done once it is handed off: the server sets its done bit and adds it to the stream in one
    step. A task of a lane stays fired until its worker's ack arrives; only then may the next task of the lane begin. A
    new owner hands such a task off again, and the server adds it only if it is no longer queued or running.
    """

    def __init__(self, store: Store, owned: dict[int, Partition], deliveries: Deliveries) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._heard: set[int] = set()
        """Partitions with a message since they were last read. Includes those that wait for nothing yet: a worker may
        be done before the owner has the reply to its hand-off."""
        self._poll_at = 0.0

    def woken(self, partitions: Iterable[int]) -> bool:
        """Note partitions that may have new acks; return True if one of them waits for workers."""
        self._heard.update(partitions)
        return any(one.number in self._heard for one in self._waiting())

    def _waiting(self) -> list[Partition]:
        return [one for one in self._owned.values() if one.waits_for_workers]

    @property
    def wait_s(self) -> float:
        waiting = self._waiting()
        if any(one.number in self._heard for one in waiting):
            return 0.0
        return max(0.0, self._poll_at - time.monotonic()) if waiting else IDLE_S

    def handed_off(self, call: CommitCall, answers: Mapping[int, bytes]) -> None:
        """Note which tasks workers have now, from the server's answer to a hand-off."""
        delivered, ended = call.partition.handed_off(call, answers)
        self._deliveries.delivered += delivered
        for address, ack in ended:
            self._ended(call.partition, address, None, ack)

    async def look(self) -> StoreError | None:
        """Read partitions with messages at once and others now and then."""
        called, now_s = self._waiting(), time.monotonic()
        if called and now_s < self._poll_at:
            called = [one for one in called if one.number in self._heard]
        else:
            self._poll_at = now_s + POLL_S
        if not called:
            return None
        self._heard.difference_update(one.number for one in called)
        for partition in called:
            partition.hand_off_again()
        failure = None
        answers = await read_acks(self._store, {one.number: one.ack_cursor for one in called})
        for partition, answer in zip(called, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
            elif self._owned.get(partition.number) is partition:
                for address, (idh, ack) in answer.acks.items():
                    self._ended(partition, address, idh, ack)
                partition.ack_cursor = answer.cursor
                if answer.cursor:
                    self._heard.add(partition.number)
        return failure

    def _ended(self, partition: Partition, address: bytes, idh: bytes | None, ack: bytes) -> None:
        """Settle a lane's task that a worker has ended, and let the lane continue."""
        if (flight := partition.back_from_worker(address, idh)) is not None:
            self._deliveries.ended_by_worker(flight, *decode_ack(ack))


TICK_TASKS: Final = 8_192
"""Most tasks that a tick begins, over all partitions: handling them blocks the loop for some milliseconds."""

BITE_TASKS: Final = 4_096
"""Most tasks that a partition begins in one tick."""

SPILL_TASKS: Final = 1_000
"""Most tasks that a tick moves into hold slices: the server serves no one else meanwhile."""

ROUND_OUTCOMES: Final = 500
"""Outcomes and moves in one round of commits: a target that died may leave thousands, while other tasks are due."""

MOST_OCCURRENCES: Final = 1_000
"""Begins of schedules after which a call is sent, while the next one is made."""

COMMIT_WAIT_S: Final = 0.05
"""Longest wait of a commit: it is sent with a begin, or alone when nothing is due. Few calls, few repeats at a
crash."""


class Dispatcher:
    """Runs round after round; deliveries run concurrently."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        deliveries: Deliveries,
        flow: Flow,
        keeper: Keeper,
        lookahead: LookAhead,
        loops: Loops,
    ) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._flow = flow
        self._keeper = keeper
        self._lookahead = lookahead
        self._loops = loops
        self.acks = WorkerAcks(store, owned, deliveries)
        self.moved = 0
        """Tasks moved into hold slices."""
        self._pace = TickPace()
        self._last_served = self._last_committed = self._last_spilled = -1
        self._listening = 1
        """Workers that received the last hand-off's message."""

    async def step(self) -> float:
        """Run one round; return the seconds until the next is needed."""
        began_s, before = time.monotonic(), self._deliveries.begun
        failures = [
            await self._send(self._unanswered()),
            *await self._tick(began_s),
            await self.acks.look(),
        ]
        self._spill()
        failures.append(await self._send(self._commits(ROUND_OUTCOMES)))
        fired = self._deliveries.begun - before
        if fired:
            self._pace.ticked(fired, began_s)
            self._room_made()
        _raise_first(failures)  # raise late: an unavailable server must not delay the partitions of other servers
        return 0.0 if fired >= TICK_TASKS // 2 else max(self._wait_s(), self._pace.wait_s())

    def _wait_s(self) -> float:
        """Return the seconds until something is due, or a commit has waited long enough."""
        wait_s, soonest_ms, dirty_since = self.acks.wait_s, inf, inf
        for one in self._owned.values():
            if one.to_commit:
                return 0.0
            if one.may_begin:
                if one.has_ready or one.to_move:
                    return 0.0
                soonest_ms = min(soonest_ms, one.soonest_ms)
            dirty_since = min(dirty_since, one.dirty_since)
        if self._flow.free(self._deliveries.in_flight) > 0:  # nothing is unwritten here
            wait_s = min(wait_s, (soonest_ms - self._store.clock.now_ms()) / 1000)
        return min(wait_s, dirty_since + COMMIT_WAIT_S - time.monotonic())

    def _room_made(self) -> None:
        if self._lookahead.waits_for_room:
            self._loops.read.wake()

    # -- what to send -----------------------------------------------------------------------------------

    def _unanswered(self) -> list[OwnerCall]:
        """Return calls whose replies were lost, unchanged: the server knows by their number whether it applied them."""
        return [one.unanswered for one in self._owned.values() if one.unanswered is not None]

    async def _tick(self, now_s: float) -> list[StoreError | None]:
        """Begin what is due; return the failures. Very many runs of schedules leave in several calls."""
        sends: list[asyncio.Task[StoreError | None]] = []
        calls: list[OwnerCall] = []
        occurrences = 0
        try:
            for begun in self._begins(now_s):
                calls.append(begun)
                occurrences += len(begun.section.occurrences)
                if occurrences >= MOST_OCCURRENCES:
                    sends.append(asyncio.create_task(self._send(calls)))
                    await asyncio.sleep(0)  # it leaves now: the server works on it while the next one is made
                    calls, occurrences = [], 0
            failure = await self._send(calls)
            return [failure, *await asyncio.gather(*sends)] if sends else [failure]
        finally:
            for one in sends:
                one.cancel()  # broken off: its call stays unanswered, and only whoever repeats it may apply the answer

    def _begins(self, now_s: float) -> Iterator[BeginCall]:
        """Begin what is due, as far as there is room, and commit plain successes that have waited long enough.

        In a backlog the first few partitions take all the room in large bites: a whole slice at once costs far less per
        task than a few tasks of each partition, and the next tick serves the next partitions.
        """
        now_ms = self._store.clock.now_ms()
        self._flow.tick()
        # Unwritten outcomes count as in flight: a target that fails faster than its retries are written must not fill
        # the memory.
        unwritten = sum(one.unwritten for one in self._owned.values())
        room = all_room = min(TICK_TASKS, self._flow.free(self._deliveries.in_flight + unwritten))
        for partition in _in_turn(self._owned.values(), self._last_served):
            if self._owned.get(partition.number) is not partition:
                continue  # lost while the calls before were sent
            limit = min(room, BITE_TASKS) if partition.may_begin_now(now_ms) else 0
            commit = now_s >= partition.dirty_since + COMMIT_WAIT_S
            if not (limit > 0 or commit) or not partition.holds_lease:
                continue
            queued = partition.to_spill
            # The remaining room is not enough for a large slice: that slice comes first in the next tick.
            begun = partition.begin(now_ms, limit, commit=commit, whole=room < all_room)
            held_back = partition.to_spill - queued
            self._deliveries.note(partition)
            if partition.asks_planner:
                self._loops.plan.wake()
            if held_back > 0 or (begun is not None and begun.groups):
                self._last_served = partition.number
                room -= max(0, held_back)
            if begun is not None:
                room -= begun.tasks
                yield begun

    def _spill(self) -> None:
        """Let held tasks move into hold slices with the next commits, a few per round, partition by partition."""
        now_ms, most = self._store.clock.now_ms(), SPILL_TASKS
        may = [one for one in self._owned.values() if one.to_move and not one.closing and one.holds_lease]
        for partition in _in_turn(may, self._last_spilled):
            if most <= 0:
                break
            most -= partition.spill(most, now_ms)
            self._last_spilled = partition.number
        if most < SPILL_TASKS:
            self._room_made()  # rows that return may have been dropped: read them again

    def _commits(self, most: float) -> list[OwnerCall]:
        """Write outcomes of deliveries, then moves into hold slices, at most `most` in all; serve each partition once
        before any of them twice. Tasks for workers always go to their queues."""
        calls: list[OwnerCall] = []
        in_turn = _in_turn([one for one in self._owned.values() if one.to_commit], self._last_committed)
        for partition in sorted(in_turn, key=lambda one: not one.unwritten):
            call = partition.commit(int(min(most, MOST_OUTCOMES)))
            if call is not None:
                calls.append(call)
                most -= call.size
                if call.size:
                    self._last_committed = partition.number
        return calls

    # -- sending ----------------------------------------------------------------------------------------

    async def _send(self, calls: Sequence[OwnerCall]) -> StoreError | None:
        """Send calls, and apply the answers. A call without an answer stays unanswered. Return a failure, if any."""
        begins = [call for call in calls if isinstance(call, BeginCall)]
        commits = [call for call in calls if isinstance(call, CommitCall)]
        replies: list[TickReply | CommitReply | StoreError] = []
        if begins:
            replies += await fire.tick(self._store, [call.section for call in begins])
        if commits:
            replies += await fire.commit_all(self._store, [call.work for call in commits], self._listening)
        failure: StoreError | None = None
        groups: list[FlightGroup] = []
        calls = [*begins, *commits]
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, StoreError):
                failure = reply
                continue
            left = self._answered(call, reply)
            groups += self._deliveries.inherit(left) if isinstance(call, BeginCall) else left
        if groups:
            self._deliveries.start(groups)
        return failure

    def _answered(self, call: OwnerCall, reply: TickReply | CommitReply) -> list[FlightGroup]:
        """Apply an answer; return the groups that leave now."""
        partition = call.partition
        if self._owned.get(partition.number) is not partition:
            return []  # another node has it by now: nothing leaves here
        try:
            if isinstance(reply, TickReply):
                groups = partition.answered(call, reply.status, reply.x, reply.left_alone)
            else:
                groups = partition.answered(call, reply.status)
        except PartitionLost as lost:
            self._keeper.lose(partition, str(lost))
            return []
        if isinstance(call, CommitCall) and isinstance(reply, CommitReply):
            self._listening = self._listening if reply.listening is None else reply.listening
            if reply.status == "ok":
                self.moved += sum(call.moves.holds.values())
                self.acks.handed_off(call, reply.answers)
                if call.work.moves or call.work.holds:
                    self._loops.read.wake()
        if partition.needs_listing:
            self._loops.read.wake()
        self._deliveries.note(partition)
        return groups

    # -- stopping ---------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait for deliveries in flight and commit them. The caller has stopped the loop, so nothing new begins."""
        # Calls that were unanswered when the loop stopped may have fired tasks on the server: deliver those too.
        _raise_first([await self._send(self._unanswered())])
        while self._deliveries.running or self._has_writes:
            # Write first, then wait: a delivery may outlast the stop, and earlier outcomes must be written by then.
            if not self._has_writes:
                await asyncio.wait(self._deliveries.running, return_when=asyncio.FIRST_COMPLETED)
            await self.flush()

    @property
    def _has_writes(self) -> bool:
        """Return True if an outcome is not yet on the server, or a task waits for its hand-off."""
        return any(one.has_writes for one in self._owned.values())

    async def flush(self) -> None:
        """Write the outcomes so far. Deliveries that end meanwhile may be left for the next call."""
        _raise_first([await self._send(self._unanswered())])
        _raise_first([await self._send(self._commits(inf))])
        begins = [one.begin(-1, 0, commit=True) for one in self._owned.values() if one.has_writes]
        _raise_first([await self._send([one for one in begins if one is not None])])


def _in_turn(partitions: Iterable[Partition], last: int) -> list[Partition]:
    """Return the partitions in order, starting after the one that was served last."""
    return sorted(partitions, key=lambda one: (one.number <= last, one.number))


def _raise_first(failures: Sequence[StoreError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure
