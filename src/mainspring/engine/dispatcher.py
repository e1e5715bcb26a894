"""Deliver due tasks, tick by tick: begin at the server, hand to the sinks, commit the outcomes."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Final, Self

from ..model.errors import StoreError
from ..store.owner import fire
from ..store.store import Store
from .deliveries import Deliveries
from .due import BeginCall
from .flight import Flight
from .flow import FlowControl
from .hand_off import HandOffs
from .outcomes import Commits
from .partition import HandingOff, Partition

log = logging.getLogger("mainspring.engine")


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


OCCURRENCES_A_CALL: Final = 1_000
"""Begins of schedules after which a call is sent while the next one is made."""

TickWork = list[tuple[Partition, BeginCall]]
TickReplies = list[fire.TickReply | StoreError]


class TickCalls:
    """The begins of a tick: usually one call. If many schedules begin, several calls, each sent as soon as it is made:
    the server puts the next occurrences of some while the node makes the call for others."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: TickWork = []
        self._occurrences = 0
        self._under_way: deque[tuple[TickWork, asyncio.Task[TickReplies]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        # Only when the loop is stopped: calls without a reply are repeated before the end.
        for _, call in self._under_way:
            call.cancel()

    async def add(self, partition: Partition, begun: BeginCall) -> None:
        self._open.append((partition, begun))
        self._occurrences += len(begun.section.occurrences)
        if self._occurrences >= OCCURRENCES_A_CALL:
            self._send()
            await asyncio.sleep(0)  # send the bytes now, not when the next call is made

    async def answered(self) -> tuple[TickWork, TickReplies] | None:
        """Return the next call and the server's reply; None if all were answered."""
        if self._open and self._under_way:
            self._send()
        if self._under_way:
            work, call = self._under_way[0]
            answers = await call
            self._under_way.popleft()
            return work, answers
        work = self._open
        answers = await self._call() if work else []
        self._open = []
        return (work, answers) if work else None

    def _send(self) -> None:
        self._under_way.append((self._open, asyncio.create_task(self._call())))
        self._open, self._occurrences = [], 0

    def _call(self) -> Coroutine[None, None, TickReplies]:
        return fire.tick(self._store, [begun.section for _, begun in self._open])


TICK_TASKS: Final = 8_192
"""Most tasks that a tick begins, over all partitions: handling them blocks the loop for some milliseconds."""

BITE_TASKS: Final = 4_096
"""Most tasks that a partition begins in one tick."""

SPILL_TASKS: Final = 1_000
"""Most tasks that a tick moves into hold slices: the server serves no one else meanwhile."""

OUTCOMES_S: Final = 0.01
"""Seconds a step spends on retries and on moves into hold slices before it looks again at what is due."""

COMMIT_WAIT_S: Final = 0.05
"""Longest wait of a commit: it is sent with a begin, or alone when nothing is due. Few calls, few repeats at a
crash."""


def _raise_first(failures: Sequence[StoreError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure


def _without_planner() -> None:
    """Do nothing: without an engine, occurrences wait until the planner is stepped."""


class Dispatcher:
    """Runs ticks one after the other; deliveries run concurrently."""

    def __init__(
        self,
        store: Store,
        owned: dict[int, Partition],
        deliveries: Deliveries,
        commits: Commits,
        hand_offs: HandOffs,
        flow_control: FlowControl,
        *,
        lost: Callable[[Partition, str], None],
        read_again: Callable[[], None],
        room_made: Callable[[], None],
    ) -> None:
        self._store = store
        self._owned = owned
        self._deliveries = deliveries
        self._commits = commits
        self._hand_offs = hand_offs
        self._flow_control = flow_control
        self._lost = lost
        self._read_again = read_again
        self._room_made = room_made
        self._last_served = -1
        self._last_spilled = -1
        self.pace = TickPace()
        self.ask_planner: Callable[[], None] = _without_planner
        """An occurrence of a schedule is due and cannot begin yet; the engine sets it."""

    # -- one tick ----------------------------------------------------------------------------------

    async def step(self) -> float:
        failures = [await self._resend(), await self._commits.all(OUTCOMES_S)]
        fired = await self._tick()
        failures.append(await self._hand_offs.step())
        _raise_first(failures)  # raise late: an unavailable server must not delay the partitions of other servers
        return self._next_wait(fired)

    def _next_wait(self, fired: int) -> float:
        """Return the seconds until something is due, or a commit has waited long enough."""
        if fired >= TICK_TASKS // 2:
            return 0.0
        wait_s, soonest_ms, dirty_since = self._hand_offs.wait_s, inf, inf
        for one in self._owned.values():
            if one.has_outcomes:
                wait_s = 0.0
            if one.may_begin:
                if one.lanes.woken or one.chains.ready or one.hold_policy.to_move:
                    wait_s = 0.0
                soonest_ms = min(soonest_ms, one.soonest_ms)
            dirty_since = min(dirty_since, one.pending_writes.dirty_since)
        if self._room > 0:
            wait_s = min(wait_s, (soonest_ms - self._store.clock.now_ms()) / 1000)
        wait_s = min(wait_s, dirty_since + COMMIT_WAIT_S - time.monotonic())
        return max(wait_s, self.pace.wait_s())

    @property
    def _room(self) -> int:
        """Return how many tasks may begin now. Unwritten outcomes count as in flight: a target that fails faster than
        its retries are written must not fill the memory."""
        unwritten = sum(len(one.pending_writes.outcomes) for one in self._owned.values())
        return self._flow_control.free(self._deliveries.in_flight + unwritten)

    async def _tick(self) -> int:
        now_ms, now_s = self._store.clock.now_ms(), time.monotonic()
        self._flow_control.tick()
        room = min(TICK_TASKS, self._room)
        with TickCalls(self._store) as calls:
            await self._begin(calls, room, now_ms, now_s)
            self._spill(now_ms)
            fired: int | None = None
            failures = []
            while (answered := await calls.answered()) is not None:
                try:
                    flights, alike = self._take_answers(*answered)
                except StoreError as error:
                    failures.append(error)
                else:
                    self._deliveries.start(flights, alike)
                    fired = (fired or 0) + len(flights)
        _raise_first(failures)
        if fired is None:
            return 0
        self.pace.ticked(fired, now_s)
        self._room_made()
        return fired

    async def _begin(self, calls: TickCalls, room: int, now_ms: int, now_s: float) -> None:
        all_room = room
        for partition in self._in_turn(now_ms, now_s):
            if self._owned.get(partition.number) is not partition:
                continue  # lost since the tick began, while the first calls were sent
            limit = min(room, BITE_TASKS) if partition.may_begin else 0
            commit = now_s >= partition.pending_writes.dirty_since + COMMIT_WAIT_S
            if limit <= 0 and not commit:
                continue
            queued = partition.hold_policy.spill_queue.count
            # The remaining room is not enough for a large slice: that slice comes first in the next tick.
            begun = partition.begin(now_ms, limit, commit=commit, whole=room < all_room)
            if partition.hold_policy.spill_queue.count > queued:
                room -= partition.hold_policy.spill_queue.count - queued
                self._last_served = partition.number
            self._deliveries.bury_damaged(partition)
            if partition.chains.asks:
                self.ask_planner()
            if begun is not None:
                partition.unanswered = begun
                if begun.flights:
                    room -= len(begun.flights)
                    self._last_served = partition.number
                await calls.add(partition, begun)

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

    def _in_turn(self, now_ms: int, now_s: float) -> list[Partition]:
        """Return partitions with something to do, starting after the one served last.

        In a backlog the first few take all the room in large bites: a whole slice at once costs far less per
        task than a few tasks of each partition, and the next tick serves the next partitions.
        """
        turn = [
            one
            for one in self._owned.values()
            if one.unanswered is None
            and (
                (one.may_begin and (one.soonest_ms <= now_ms or one.lanes.woken or one.chains.ready))
                or now_s >= one.pending_writes.dirty_since + COMMIT_WAIT_S
            )
            and one.holds_lease
        ]
        first = next((i for i, one in enumerate(turn) if one.number > self._last_served), 0)
        return turn[first:] + turn[:first]

    def _take_answers(self, all_begun: TickWork, answers: TickReplies) -> tuple[list[Flight], str | None]:
        """Return the flights that leave, and their target if all have the same and none expires."""
        flights: list[Flight] = []
        targets: set[str | None] = set()
        failure: StoreError | None = None
        for (partition, begun), answer in zip(all_begun, answers, strict=True):
            if isinstance(answer, StoreError):
                failure = answer
            else:
                partition.unanswered = None
                if leaving := self._take_answer(partition, begun, answer):
                    flights += leaving
                    targets.add(begun.alike)
        if failure is not None:
            self._deliveries.start(flights)
            raise failure
        return flights, targets.pop() if len(targets) == 1 else None

    def _take_answer(self, partition: Partition, begun: BeginCall, answer: fire.TickReply) -> Sequence[Flight]:
        match answer.status:
            case "ok":
                partition.blocked_ms = -1
                leaving = partition.begun(begun, answer.x)
                if partition.needs_listing:
                    self._read_again()
                if not partition.holds_lease:
                    # Fired, but the lease ran out while we waited: the next owner delivers these.
                    self._lost(partition, "its lease ran out before the send")
                    return ()
                return leaving
            case "early":
                partition.take_back(begun)
            case "more":
                partition.take_back(begun)
                partition.block(begun.section.max_due_ms or 0)
                self._read_again()
            case "stale":
                for live in begun.touched:
                    partition.forget(live)
                self._read_again()
                log.warning("partition %d: a slice is not the one that was read; reading again", partition.number)
            case status:
                self._lost(partition, status)
        return ()

    async def _resend(self) -> StoreError | None:
        """Repeat unanswered calls unchanged: the server knows by their number whether they were applied."""
        failure = None
        sent = [(one, one.unanswered) for one in self._owned.values() if one.unanswered is not None]
        begun = [(partition, work) for partition, work in sent if isinstance(work, BeginCall)]
        try:
            if begun:
                answers = await fire.tick(self._store, [work.section for _, work in begun])
                self._deliveries.start(*self._take_answers(begun, answers))
        except StoreError as error:
            failure = error
        handing = [(partition, work) for partition, work in sent if isinstance(work, HandingOff)]
        if handing:
            failure = await self._hand_offs.send(handing) or failure
        for partition, work in sent:
            if not isinstance(work, (BeginCall, HandingOff)):
                failure = await self._commits.try_one(partition, work) or failure
        return failure

    # -- stopping ---------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait for deliveries in flight and commit them. The caller has stopped the loop, so nothing new begins."""
        # Calls that were unanswered when the loop stopped may have fired tasks on the server: deliver those too.
        _raise_first([await self._resend()])
        while self._deliveries.running or self._has_finished_work:
            # Write first, then wait: a delivery may outlast the stop, and earlier outcomes must be written by then.
            if not self._has_finished_work:
                await asyncio.wait(self._deliveries.running, return_when=asyncio.FIRST_COMPLETED)
            await self.flush()

    @property
    def _has_finished_work(self) -> bool:
        """Return True if an outcome is not yet on the server, or a task waits for its hand-off."""
        return any(one.pending_writes.dirty or one.has_outcomes or one.handed.ready for one in self._owned.values())

    async def flush(self) -> None:
        """Commit everything that is finished. Deliveries that end meanwhile may be left for the next call."""
        _raise_first([await self._resend(), await self._commits.all(), await self._hand_offs.flush()])
        sections = []
        for partition in self._owned.values():
            if not partition.pending_writes.dirty or partition.unanswered is not None:
                continue
            begun = partition.begin(-1, 0, commit=True)
            if begun is not None:
                partition.unanswered = begun
                sections.append((partition, begun))
        if sections:
            answers = await fire.tick(self._store, [begun.section for _, begun in sections])
            self._take_answers(sections, answers)
