"""Begins what is due, hands it to the sinks, and writes what became of it."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final

from ..model.errors import StoreError
from ..roles import Loops
from ..store.job_queue import decode_ack
from ..store.owner import fire
from ..store.owner.fire import forget_acks, read_acks
from ..store.store import Store
from .deliveries import Deliveries
from .due import BeginCall
from .flight import FlightGroup
from .flow import FlowControl
from .keeper import Keeper
from .lookahead import LookAhead
from .partition import MOST_OUTCOMES, CommitCall, OwnerCall, Partition, PartitionLost


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
"""Shortest time between ticks for rates up to so many tasks a second; see docs/decisions/0022."""


POLL_S: Final = 0.5
"""Seconds between polls for unannounced acks, and between attempts for tasks whose id is already in a queue."""

IDLE_S: Final = 1.0
FORGOTTEN_AT_ONCE: Final = 1_000


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
        self._watched: dict[Partition, None] = {}
        self._heard: set[int] = set()
        """Partitions with a message since they were last read. Includes those that wait for nothing yet: a worker may
        be done before the owner has the reply to its hand-off."""
        self._poll_at = 0.0

    def woken(self, partitions: Iterable[int]) -> bool:
        """Note partitions that may have new acks; return True if one of them is watched."""
        self._heard.update(partitions)
        return self._called

    @property
    def _called(self) -> bool:
        return bool(self._heard) and any(one.number in self._heard for one in self._watched)

    @property
    def wait_s(self) -> float:
        if self._called:
            return 0.0
        return max(0.0, self._poll_at - time.monotonic()) if self._watched else IDLE_S

    def handed_off(self, partition: Partition, call: CommitCall, answers: Mapping[int, bytes]) -> None:
        """Note which tasks workers have now, from the server's answer to a hand-off."""
        delivered, ended = partition.handed_off(call, answers)
        self._deliveries.delivered += delivered
        for address, ack in ended:
            self._ended(partition, address, None, ack)
        if partition.waits_for_workers and partition not in self._watched:
            if not self._watched:
                self._poll_at = time.monotonic() + POLL_S
            self._watched[partition] = None

    async def look(self) -> StoreError | None:
        """Read partitions with messages at once and others now and then."""
        for partition in list(self._watched):
            if not partition.waits_for_workers or self._owned.get(partition.number) is not partition:
                del self._watched[partition]
        if not self._watched:
            return None
        if time.monotonic() >= self._poll_at:
            called = list(self._watched)
            self._poll_at = time.monotonic() + POLL_S
        else:
            called = [one for one in self._watched if one.number in self._heard]
        if not called:
            return None
        self._heard.difference_update(one.number for one in called)
        for partition in called:
            partition.hand_off_again()
        failures = [await self._forget(called), await self._read(called)]
        return next((failure for failure in failures if failure is not None), None)

    async def _read(self, called: list[Partition]) -> StoreError | None:
        failure = None
        waiting = [partition for partition in called if partition.awaits_acks]
        answers = await read_acks(self._store, {one.number: one.ack_cursor for one in waiting})
        for partition, answer in zip(waiting, answers, strict=True):
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

    async def _forget(self, called: list[Partition]) -> StoreError | None:
        """Delete the acks of tasks whose end the server knows: they are no longer needed."""
        known = {one: over for one in called if (over := one.known_ends(FORGOTTEN_AT_ONCE))}
        if not known:
            return None
        failure = await forget_acks(self._store, {one.number: over for one, over in known.items()})
        if failure is None:
            for partition, over in known.items():
                partition.forget_ends(over)
        return failure


TICK_TASKS: Final = 8_192
"""Most tasks that a tick begins, over all partitions: handling them blocks the loop for some milliseconds."""

BITE_TASKS: Final = 4_096
"""Most tasks that a partition begins in one tick."""

SPILL_TASKS: Final = 1_000
"""Most tasks that a tick moves into hold slices: the server serves no one else meanwhile."""

ROUND_OUTCOMES: Final = 500
"""Outcomes and moves in one round of commits: a target that died may leave thousands, while other tasks are due."""

MOST_OCCURRENCES: Final = 1_000
"""Begins of schedules after which a tick is sent; the next one follows at once."""

COMMIT_WAIT_S: Final = 0.05
"""Longest wait of a commit: it is sent with a begin, or alone when nothing is due. Few calls, few repeats at a
crash."""

Sent = list[tuple[Partition, OwnerCall]]


class Dispatcher:
    """Runs round after round; deliveries run concurrently."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        deliveries: Deliveries,
        flow_control: FlowControl,
        keeper: Keeper,
        lookahead: LookAhead,
        loops: Loops,
    ) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._flow_control = flow_control
        self._keeper = keeper
        self._lookahead = lookahead
        self._loops = loops
        self.acks = WorkerAcks(store, owned, deliveries)
        self.moved = 0
        """Tasks moved into hold slices."""
        self.pace = TickPace()
        self._last_served = self._last_committed = self._last_spilled = -1
        self._listening = 1
        """Workers that received the last hand-off's message."""

    async def step(self) -> float:
        """Run one round; return the seconds until the next is needed."""
        began_s, before = time.monotonic(), self._deliveries.begun
        failures = [
            await self._send(self._unanswered()),
            await self._send(self._begins(began_s)),
            await self.acks.look(),
            await self._send(self._commits(ROUND_OUTCOMES)),
        ]
        fired = self._deliveries.begun - before
        if fired:
            self.pace.ticked(fired, began_s)
            self._room_made()
        _raise_first(failures)  # raise late: an unavailable server must not delay the partitions of other servers
        return 0.0 if fired >= TICK_TASKS // 2 else max(self._wait_s(), self.pace.wait_s())

    def _wait_s(self) -> float:
        """Return the seconds until something is due, or a commit has waited long enough."""
        wait_s, soonest_ms, dirty_since = self.acks.wait_s, inf, inf
        for one in self._owned.values():
            if one.unwritten or one.has_outcomes:
                wait_s = 0.0
            if one.may_begin:
                if one.has_ready or one.hold_policy.to_move:
                    wait_s = 0.0
                soonest_ms = min(soonest_ms, one.soonest_ms)
            dirty_since = min(dirty_since, one.dirty_since)
        if self._room > 0:
            wait_s = min(wait_s, (soonest_ms - self._store.clock.now_ms()) / 1000)
        return min(wait_s, dirty_since + COMMIT_WAIT_S - time.monotonic())

    @property
    def _room(self) -> int:
        """Return how many tasks may begin now. Unwritten outcomes count as in flight: a target that fails faster than
        its retries are written must not fill the memory."""
        unwritten = sum(one.unwritten for one in self._owned.values())
        return self._flow_control.free(self._deliveries.in_flight + unwritten)

    def _room_made(self) -> None:
        if self._lookahead.waits_for_room:
            self._loops.read.wake()

    # -- what to send ------------------------------------------------------------------------------

    def _unanswered(self) -> Sent:
        """Return calls whose replies were lost, unchanged: the server knows by their number whether it applied them."""
        return [(one, one.unanswered) for one in self._owned.values() if one.unanswered is not None]

    def _begins(self, now_s: float) -> Sent:
        """Begin what is due, as far as there is room, and commit plain successes that have waited long enough."""
        now_ms = self._store.clock.now_ms()
        self._flow_control.tick()
        room = all_room = min(TICK_TASKS, self._room)
        occurrences = 0
        calls: Sent = []
        for partition in self._in_turn(now_ms, now_s):
            limit = min(room, BITE_TASKS) if partition.may_begin else 0
            commit = now_s >= partition.dirty_since + COMMIT_WAIT_S
            if limit <= 0 and not commit:
                continue
            queued = partition.to_spill
            # The remaining room is not enough for a large slice: that slice comes first in the next tick.
            begun = partition.begin(now_ms, limit, commit=commit, whole=room < all_room)
            held_back = partition.to_spill - queued
            self._deliveries.bury_damaged(partition)
            if partition.chains.asks:
                self._loops.plan.wake()
            if held_back > 0 or (begun is not None and begun.groups):
                self._last_served = partition.number
                room -= max(0, held_back)
            if begun is not None:
                calls.append((partition, begun))
                room -= begun.tasks
                occurrences += len(begun.section.occurrences)
                if occurrences >= MOST_OCCURRENCES:
                    break
        self._spill(now_ms)
        return calls

    def _in_turn(self, now_ms: int, now_s: float) -> list[Partition]:
        """Return partitions with something to do, starting after the one served last.

        In a backlog the first few take all the room in large bites: a whole slice at once costs far less per
        task than a few tasks of each partition, and the next tick serves the next partitions.
        """
        turn = [
            one
            for one in self._owned.values()
            if one.unanswered is None
            and (one.may_begin_now(now_ms) or now_s >= one.dirty_since + COMMIT_WAIT_S)
            and one.holds_lease
        ]
        first = next((i for i, one in enumerate(turn) if one.number > self._last_served), 0)
        return turn[first:] + turn[:first]

    def _spill(self, now_ms: int) -> None:
        """Move held tasks into hold slices, a few per tick, partition by partition."""
        some = [one for one in self._owned.values() if one.hold_policy.to_move and not one.closing and one.holds_lease]
        most = SPILL_TASKS
        for partition in sorted(some, key=lambda one: (one.number <= self._last_spilled, one.number)):
            if most <= 0:
                break
            most -= partition.hold_policy.spill(most, now_ms)
            partition.survey()
            self._last_spilled = partition.number
        if most < SPILL_TASKS:
            self._room_made()  # rows that return may have been dropped: read them again

    def _commits(self, most: float) -> Sent:
        """Write what became of tasks: outcomes of deliveries before moves into hold slices, up to `most` of these; no
        partition twice before another once. Tasks for workers go to their queues in any case."""
        some = [one for one in self._owned.values() if one.unwritten or one.has_outcomes]
        some.sort(key=lambda one: (not one.unwritten, one.number <= self._last_committed, one.number))
        calls: Sent = []
        for partition in some:
            call = partition.commit(int(min(most, MOST_OUTCOMES)))
            if call is not None:
                calls.append((partition, call))
                most -= call.size
                if call.size:
                    self._last_committed = partition.number
        return calls

    # -- sending ---------------------------------------------------------------------------------------

    async def _send(self, calls: Sent) -> StoreError | None:
        """Send calls, and apply the answers. A call without an answer stays unanswered. Return a failure, if any."""
        begins = [(partition, call) for partition, call in calls if isinstance(call, BeginCall)]
        commits = [(partition, call) for partition, call in calls if isinstance(call, CommitCall)]
        failure = await self._send_begins(begins) if begins else None
        return (await self._send_commits(commits) if commits else None) or failure

    async def _send_begins(self, begins: Sequence[tuple[Partition, BeginCall]]) -> StoreError | None:
        failure: StoreError | None = None
        groups: list[FlightGroup] = []
        replies = await fire.tick(self._store, [call.section for _, call in begins])
        for (partition, call), reply in zip(begins, replies, strict=True):
            if isinstance(reply, StoreError):
                failure = reply
            else:
                groups += self._answered(partition, call, reply.status, reply.x) or ()
                self._deliveries.note_passed(partition)
        self._deliveries.start(self._deliveries.inherit(groups))
        return failure

    async def _send_commits(self, commits: Sequence[tuple[Partition, CommitCall]]) -> StoreError | None:
        failure: StoreError | None = None
        leaving: list[FlightGroup] = []
        replies = await fire.commit_all(self._store, [call.work for _, call in commits], self._listening)
        for (partition, call), reply in zip(commits, replies, strict=True):
            if isinstance(reply, StoreError):
                failure = reply
                continue
            if reply.listening is not None:
                self._listening = reply.listening
            groups = self._answered(partition, call, reply.status)
            if groups is None or reply.status != "ok":
                continue
            leaving += groups
            self.moved += sum(call.moves.holds.values())
            if call.handed:
                self.acks.handed_off(partition, call, reply.answers)
            if call.work.retries or call.work.moves or call.work.holds:
                self._loops.read.wake()
        self._deliveries.start(leaving)
        return failure

    def _answered(
        self, partition: Partition, call: OwnerCall, status: fire.WriteStatus, x: list[bytes] | None = None
    ) -> list[FlightGroup] | None:
        """Apply an answer; return the groups that leave now, or None if the partition had to be given up."""
        if self._owned.get(partition.number) is not partition:
            return None  # another node has it by now: nothing leaves here
        try:
            groups = partition.answered(call, status, x or [])
        except PartitionLost as lost:
            self._keeper.lose(partition, str(lost))
            return None
        if partition.needs_listing:
            self._loops.read.wake()
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
        """Write what has ended. Deliveries that end meanwhile may be left for the next call."""
        _raise_first([await self._send(self._unanswered())])
        _raise_first([await self._send(self._commits(inf))])
        begins = ((one, one.begin(-1, 0, commit=True)) for one in self._owned.values() if one.has_writes)
        _raise_first([await self._send([(one, begun) for one, begun in begins if begun is not None])])


def _raise_first(failures: Sequence[StoreError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure
