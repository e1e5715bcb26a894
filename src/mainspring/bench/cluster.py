"""`bench cluster`: how soon other nodes take over, how much moves, and what several processes fire together."""

import asyncio
import random
import signal
import statistics
import time
from typing import Final

import msgspec

from ..client.client import Client
from ..model.task import Task
from ..store.store import Store
from .cycle import until_done
from .environment import BenchEnvironment, ServerChoice, open_environment
from .fleet import BenchFailed, Fleet, fleet
from .lifecycle import TARGET, BenchProgress

NODES: Final = 4
STOPS: Final = 5
HORIZON_S: Final = 0.1
"""A short look-ahead: four processes must not have more of the work done in advance than one."""


class ClusterFigures(msgspec.Struct, frozen=True):
    lease_s: float
    takeover_kill_p50_s: float
    takeover_kill_max_s: float
    takeover_term_max_s: float
    moved_share_on_join: float
    imbalance: int
    """Largest difference in partitions between two equal nodes."""
    fire_per_s_1: float
    fire_per_s_4: float
    kills: int
    tasks: int
    lost: int

    @property
    def sound(self) -> bool:
        return self.lost == 0


class _Moves(msgspec.Struct, frozen=True):
    kills_s: list[float]
    stops_s: list[float]
    moved: float
    imbalance: int


async def cluster(
    where: ServerChoice, *, lease_s: float, kills: int, tasks: int, progress: BenchProgress
) -> ClusterFigures:
    async with open_environment(where) as place:
        await place.time.stop()
        store = await Store.open(place.url, namespace=place.namespace)
        try:
            moves = await _moves(store, place, lease_s, kills, progress)
        finally:
            await store.aclose()
    alone, lost_alone = await _fired(where, 1, tasks, progress)
    together, lost_together = await _fired(where, NODES, tasks, progress)
    return ClusterFigures(
        lease_s=lease_s,
        takeover_kill_p50_s=round(statistics.median(moves.kills_s), 3),
        takeover_kill_max_s=round(max(moves.kills_s), 3),
        takeover_term_max_s=round(max(moves.stops_s), 3),
        moved_share_on_join=round(moves.moved, 3),
        imbalance=moves.imbalance,
        fire_per_s_1=round(alone),
        fire_per_s_4=round(together),
        kills=kills,
        tasks=tasks,
        lost=lost_alone + lost_together,
    )


async def _moves(store: Store, place: BenchEnvironment, lease_s: float, kills: int, progress: BenchProgress) -> _Moves:
    dice = random.Random(1)  # chooses the node to kill; the leader can be chosen like any other
    async with fleet(store, place.url, lease_s) as nodes:
        for _ in range(NODES):
            await nodes.add()
        before = await nodes.settled()
        imbalance = _imbalance(before)
        await nodes.add()
        after = await nodes.settled()
        imbalance = max(imbalance, _imbalance(after))
        moved = sum(a != b for a, b in zip(before, after, strict=True)) / len(before)
        stops_s = [await _end_one(nodes, dice, signal.SIGTERM) for _ in range(STOPS)]
        kills_s = []
        for number in range(kills):
            progress("kills", number, kills)
            kills_s.append(await _end_one(nodes, dice, signal.SIGKILL))
    return _Moves(kills_s, stops_s, moved, imbalance)


async def _end_one(nodes: Fleet, dice: random.Random, number: signal.Signals) -> float:
    took_s = await nodes.remove(dice.choice(nodes.members), number)
    await nodes.add()
    await nodes.settled()
    return took_s


def _imbalance(owners: list[str]) -> int:
    held = [owners.count(owner) for owner in set(owners)]
    return max(held) - min(held)


async def _fired(where: ServerChoice, processes: int, tasks: int, progress: BenchProgress) -> tuple[float, int]:
    """Return the tasks per second that this many processes fire when all come due at once, and how many are missing."""
    async with open_environment(where) as place:
        await place.time.stop()
        store = await Store.open(place.url, namespace=place.namespace)
        try:
            async with fleet(store, place.url, 5.0) as nodes:
                for _ in range(processes):
                    await nodes.add(horizon_s=HORIZON_S)
                await nodes.settled()
                due_ms = store.clock.now_ms() + 4_000 + tasks // 150
                due_ms += -due_ms % 1_000  # the start of a slice: an earlier slice would be read earlier
                await Client.over(store).put_many(Task(TARGET, "x" * 46, due_ms) for _ in range(tasks))
                if (late_ms := await store.sample_clock() - due_ms) > 0:
                    raise BenchFailed(f"putting {tasks} tasks took {late_ms} ms too long; take fewer with --tasks")
                await asyncio.sleep((due_ms - store.clock.now_ms()) / 1000)
                took_s, done = await until_done(
                    store, tasks, time.perf_counter(), progress, what=f"firing with {processes}"
                )
                return done / took_s, tasks - done
        finally:
            await store.aclose()
