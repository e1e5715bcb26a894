"""Plans the occurrences of schedules ahead of their time, and checks their chains.

Everything an occurrence needs to begin is fetched and computed while it waits. If memory is not enough to decide about
a due occurrence, it waits until the planner has asked the server. At takeover and every minute the planner checks that
each schedule has its next occurrence, and schedules a missing one again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import msgspec

from ..model.clock import Clock, steady_s
from ..model.errors import StoreError
from ..model.schedule.chain import (
    ChainMemory,
    ChainState,
    PastRun,
    after_misfire,
    after_overlap,
    moved_by_end,
    moved_by_rules,
    overlapped_until,
)
from ..model.schedule.definition import Definition
from ..roles import Loops
from ..store import schedules
from ..store.job_queue import run_ends
from ..store.schedules import found_in_time, may_be_long, searched
from ..store.store import Store
from ..store.tasks.index import look_up
from .flight import Flight
from .occurrences import Chains, Occurrence, OccurrencePlan, occurrence_of
from .partition import Partition

log = logging.getLogger("mainspring.engine")


PLANNING_S: Final = 0.25
"""Seconds of planning per partition before the next has its turn: some schedules take long to evaluate."""

KnownSchedule = tuple[Definition | None, ChainState | None]
Candidate = tuple[Flight, OccurrencePlan]
W = TypeVar("W")
T = TypeVar("T")


def fits(known: KnownSchedule | None, occurrence: Occurrence) -> bool:
    return known is not None and known[1] is not None and (known[1].generation, known[1].planned_ms) == occurrence[1:]


async def _found(work: Iterable[tuple[Definition | None, W]], search: Callable[[W], T]) -> list[tuple[W, T]]:
    """Search for times for as many items as fit into `PLANNING_S`, at least one. Schedules that take long come last."""
    ordered = sorted(work, key=lambda one: may_be_long(one[0]))
    items = [item for _, item in ordered]
    found = await searched((one[0] for one in ordered), partial(found_in_time, items, search, PLANNING_S))
    return list(zip(items, found, strict=False))


def _pass_by(plans: Sequence[OccurrencePlan], now_ms: int) -> None:
    for plan in plans:
        plan.pass_by(now_ms)


def _way_on(due: Candidate, now_ms: int) -> tuple[int | None, ChainMemory] | None:
    """Return where the chain continues without this occurrence; None if it is to run."""
    flight, plan = due
    definition, link = plan.definition, plan.link
    moved_ms = moved_by_end(definition, link)
    if moved_ms is not None:
        return moved_ms, link.state
    ended_ms = overlapped_until(definition, link)
    if ended_ms is not None:
        return after_overlap(definition, link, ended_ms - 1)
    late = now_ms - flight.place_ms > definition.grace_ms and not plan.waited
    return after_misfire(definition, link, now_ms) if late else None


def _plan_of(known: KnownSchedule | None, occurrence: Occurrence | None, now_ms: int) -> OccurrencePlan | None:
    """Plan the begin of an occurrence; None if the schedule was edited or removed, or its chain has advanced."""
    definition, link = known or (None, None)
    if definition is None or link is None or occurrence is None or not fits(known, occurrence):
        return None
    if definition.generation != occurrence[1]:
        return None
    plan = OccurrencePlan.of(definition, link, max(now_ms, definition.due_ms(link.planned_ms)))
    if (instead := moved_by_rules(definition, link)) is not None:
        log.info("schedule %s: its next occurrence is moved, because the rules of %s have changed", definition.name,
                 definition.zone, extra={"schedule": definition.name})  # fmt: skip
        plan.skip(*instead)
    return plan


CHECK_S: Final = 60.0
OVERDUE_MS: Final = 15_000
"""An occurrence that is overdue for longer is checked: it may be waiting, or lost."""
LOOK_AGAIN_S: Final = 0.5
"""Seconds between questions about the end of a run that an occurrence waits for."""
NOTE_S: Final = 0.5
"""Interval at which the ends of runs are written."""
PLANS_AT_ONCE: Final = 500
PASSED_BY_AT_ONCE: Final = 1_000
SETTLED_AT_ONCE: Final = 50
IDLE_S: Final = 5.0


class Planner:
    """Plans and checks the schedules of all partitions of a node."""

    def __init__(self, store: Store, owned: dict[int, Partition], loops: Loops) -> None:
        self._store = store
        self._owned = owned
        self._loops = loops
        self._clock: Clock = store.clock
        self._checked: dict[int, tuple[bytes, float]] = {}
        """Partition -> the token under which it was checked, and when."""
        self._note_at = 0.0
        """When the ends of runs are written next; due occurrences go first."""
        self.decisions = 0
        """Plans made and decisions taken: if it grows, something may begin."""
        self.not_run: Counter[str] = Counter()
        """Planned times whose occurrences were missing from the server, by reason."""

    async def step(self) -> float:
        failure: StoreError | None = None
        wait_s = IDLE_S
        for partition in list(self._owned.values()):
            try:
                wait_s = min(wait_s, await self._serve(partition))
            except StoreError as error:
                failure = error
        if steady_s() >= self._note_at:
            self._note_at = steady_s() + NOTE_S
        if any(one.has_ended_runs for one in self._owned.values()):
            wait_s = min(wait_s, max(0.01, self._note_at - steady_s()))
        if failure is not None:
            raise failure  # only now: an unavailable server must not delay the others
        return wait_s

    async def _serve(self, partition: Partition) -> float:
        chains = partition.chains
        news = chains.ended and steady_s() >= self._note_at
        if not (chains.asks or chains.wanted or chains.undecided or news):
            await self._check_in_time(partition)
            return IDLE_S
        chains.asks = False
        try:
            more = await self._plan(partition.number, chains)
            if chains.undecided:
                await self._decide(partition)
            if news:
                more = await self._note_ends(partition.number, chains) or more
        except StoreError:
            chains.asks = True
            raise
        await self._check_in_time(partition)
        if partition.may_begin_now(self._clock.now_ms()):
            self._loops.fire.wake()
        return 0.0 if more or chains.asks else LOOK_AGAIN_S if chains.undecided else IDLE_S

    # -- plans -----------------------------------------------------------------------------------------

    async def _plan(self, number: int, chains: Chains) -> bool:
        """Make some plans; return True if there are more to make."""
        rows = list(islice(chains.wanted, PLANS_AT_ONCE))
        if not rows:
            return False
        occurrences = [occurrence_of(row) for row in rows]
        missing = {one[0]: None for one in occurrences if one is not None and not fits(chains.known.get(one[0]), one)}
        fetched = await schedules.fetch(self._store, number, list(missing)) if missing else []
        known: dict[str, KnownSchedule] = {
            name: (one.definition, one.link) for name, one in zip(missing, fetched, strict=True)
        }
        now_ms = self._clock.now_ms()
        work = []
        for row, one in zip(rows, occurrences, strict=True):
            schedule = None if one is None else known.get(one[0]) or chains.known.get(one[0])
            work.append((None if schedule is None else schedule[0], (row, schedule, one)))
        found = await _found(work, lambda item: _plan_of(*item[1:], now_ms))
        await self._pass_by_backfilled(number, [plan for _, plan in found if plan is not None], now_ms)
        for (row, _, _), plan in found:
            chains.wanted.pop(row, None)
            chains.plans[row] = plan
        planned = {item[0] for item, _ in found}
        for row in rows:
            if row not in planned and row in chains.wanted:  # move it behind the others
                del chains.wanted[row]
                chains.wanted[row] = None
        self.decisions += len(found)
        await asyncio.sleep(0)
        return bool(chains.wanted)

    async def _pass_by_backfilled(self, number: int, plans: Sequence[OccurrencePlan], now_ms: int) -> None:
        """Skip occurrences that are already stored: writing over one would stall the chain until the next check."""
        for _ in range(PASSED_BY_AT_ONCE):
            plans = [plan for plan in plans if plan.may_be_put]
            if not plans:
                return
            found = await look_up(self._store, [(number, plan.following.idh) for plan in plans])
            plans = [plan for plan, address in zip(plans, found, strict=True) if address is not None]
            await searched((plan.definition for plan in plans), partial(_pass_by, plans, now_ms))

    # -- decisions -------------------------------------------------------------------------------------

    async def _decide(self, partition: Partition) -> None:
        """Decide about waiting occurrences: run, skip, or wait on."""
        chains = partition.chains
        ready: list[Candidate] = []
        doubts: list[Candidate] = []
        for row, flight in list(chains.undecided.items()):
            plan = chains.plans.get(row)
            if flight.live.forgotten:
                del chains.undecided[row]
            elif plan is not None and not plan.settled:
                (ready if chains.is_free(plan) else doubts).append((flight, plan))
            elif row in chains.plans:
                self._release(partition, flight)
            else:
                chains.wanted[row] = None
                chains.asks = True
        if doubts:
            ready += await self._ask_for_ends(partition, doubts)
        await self._settle(partition, ready)

    async def _settle(self, partition: Partition, ready: Sequence[Candidate]) -> None:
        """Decide about occurrences whose schedules have no run in progress; those that take long to decide come
        last."""
        chains, until = partition.chains, steady_s() + PLANNING_S
        waiting = sorted(ready, key=lambda due: may_be_long(due[1].definition))
        while waiting and self._may_decide(partition):
            now_ms = self._clock.now_ms()
            some = [(plan.definition, (flight, plan)) for flight, plan in waiting[:SETTLED_AT_ONCE]]
            found = await _found(some, partial(_way_on, now_ms=now_ms))
            if not self._may_decide(partition):
                return
            for (flight, plan), instead in found:
                if instead is None:
                    plan.settled = True
                else:
                    self._miss(flight, plan, instead)
                self._release(partition, flight)
            waiting = waiting[len(found) :]
            await asyncio.sleep(0)  # after an outage there are many, and leases are renewed on the same loop
            if waiting and steady_s() >= until:
                chains.asks = True  # the rest comes after the other partitions
                return

    def _may_decide(self, partition: Partition) -> bool:
        """Return False after a clock jump, which looks like an hour of missed runs: the next owner decides."""
        return self._owned.get(partition.number) is partition and partition.holds_lease

    async def _ask_for_ends(self, partition: Partition, doubts: Sequence[Candidate]) -> list[Candidate]:
        """Ask the server whether the previous runs are over; return the occurrences for which they are."""
        number, chains = partition.number, partition.chains
        free: list[Candidate] = []
        behind: list[tuple[Definition, Candidate]] = []
        links = [plan.link for _, plan in doubts]
        ends = await schedules.over(self._store, number, [link.state.last for link in links])
        asked = [(number, plan.definition.name, plan.link) for _, plan in doubts]
        reported = await run_ends(self._store, asked)
        for (flight, plan), link, end, run_end in zip(doubts, links, ends, reported, strict=True):
            if end is not None:
                run = run_end or PastRun(link.state.last_ms, link.state.began_ms, None, end)
                plan.relink(link.state.with_run(run))
                free.append((flight, plan))
            elif link.state.is_behind(link.planned_ms):
                continue  # it was due before the other began, and begins when that is over
            elif plan.definition.overlap_rule.word == "skip" and not plan.waits_for_end:
                behind.append((plan.definition, (flight, plan)))
            else:
                plan.waited = True
        # The previous runs of these are not over: skip them. Those whose next time takes long to find wait.
        now_ms = self._clock.now_ms()
        found = await _found(behind, lambda due: after_overlap(due[1].definition, due[1].link, now_ms))
        for (flight, plan), (next_ms, state) in found:
            log.info("schedule %s: %s is skipped, the run before it is not over", plan.definition.name, flight.id,
                     extra={"task": flight.id, "schedule": plan.definition.name})  # fmt: skip
            plan.skip(next_ms, state)
            self._release(partition, flight)
        chains.asks = chains.asks or len(found) < len(behind)
        return free

    def _miss(self, flight: Flight, plan: OccurrencePlan, instead: tuple[int | None, ChainMemory]) -> None:
        """Skip an occurrence, and all those that passed until the chain continues."""
        name, link = plan.definition.name, plan.link
        if missed := sum(instead[1].not_run.values()) - sum(link.state.not_run.values()):
            extra = {"task": flight.id, "schedule": name}
            if overlapped_until(plan.definition, link) is not None:
                log.info("schedule %s: %d planned runs are skipped, from %s on: the run before them was not over",
                         name, missed, flight.id, extra=extra)  # fmt: skip
            else:
                log.warning("schedule %s: %d planned runs were missed, from %s on", name, missed, flight.id,
                            extra=extra)  # fmt: skip
        plan.skip(*instead)

    def _release(self, partition: Partition, flight: Flight) -> None:
        self.decisions += 1
        partition.release(flight)

    # -- ends ------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Write the ends of all finished runs now."""
        for number, partition in list(self._owned.items()):
            while partition.has_ended_runs:
                await self._note_ends(number, partition.chains)

    async def _note_ends(self, number: int, chains: Chains) -> bool:
        """Write how runs ended, for people to see and for the next owner."""
        some = dict(islice(chains.ended.items(), PLANS_AT_ONCE))
        links = []
        for name, ongoing in some.items():
            link = ongoing.link
            if ongoing.over is not None:
                link = msgspec.structs.replace(link, state=link.state.with_run(ongoing.over))
            links.append((name, link))
        await schedules.note_ends(self._store, number, links)
        for name, ongoing in some.items():
            if chains.ended.get(name) is ongoing:
                del chains.ended[name]
                if name not in chains.known and ongoing.over is not None and ongoing.link.state.last:
                    chains.runs.pop(ongoing.link.state.last, None)  # the server knows it now
        return bool(chains.ended)

    # -- checking --------------------------------------------------------------------------------------

    async def _check_in_time(self, partition: Partition) -> None:
        token, at = self._checked.get(partition.number, (b"", 0.0))
        if token == partition.token and steady_s() < at + CHECK_S:
            return
        await self.check(partition.number)
        chains = partition.chains
        chains.tidy(self._clock.now_ms())
        self._checked[partition.number] = (partition.token, steady_s())

    async def check(self, number: int) -> int:
        """Schedule missing occurrences of one partition again; return how many."""
        cursor, repaired = 0, 0
        while True:
            cursor, doubtful = await schedules.check(self._store, number, cursor, overdue_ms=OVERDUE_MS)
            links = [one.link for one in doubtful]
            planned = await schedules.still_planned(self._store, number, links) if links else []
            for (name, link), (waits, state) in zip(doubtful, planned, strict=True):
                if waits or await schedules.schedule_again(self._store, number, name, link.claim, state) != "ok":
                    continue  # it is there, it advanced meanwhile, or the next check handles it
                repaired += 1
                self.not_run[schedules.reason_of(state)] += 1
                log.warning("schedule %s: next occurrence was missing (%s); scheduled again", name,
                            schedules.reason_of(state), extra={"schedule": name})  # fmt: skip
            if not cursor:
                return repaired
