"""`bench history`: the cost of the history of runs, and how fast runs are found in it."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import median, quantiles
from typing import Final

import msgspec

from ..client.client import Client
from ..model.ids import idh_of, occurrence_id
from ..model.run import HistoryRules, Run, RunEnd, RunRecord
from ..model.shared_settings import HISTORY_BYTES, SharedSettings
from ..store.owner import fire, leases
from ..store.runs import history_state
from ..store.store import Store
from ..testing.kafka import missing_kafka
from ..worker.handler import Handler, Registry
from ..worker.worker import WorkerOptions, working
from .cycle import DEFAULT_HISTORY, until_done
from .environment import BenchEnvironment, ServerChoice, counterpart, open_environment
from .fleet import fleet
from .lifecycle import BenchProgress
from .sinks import MORE, PUT_US, QUEUE, bench_broker, put_jobs, through_kafka, through_webhooks

BATCH: Final = 500
"""Runs in a commit of an owner under load."""
_LEASE_MS: Final = 3_600_000
LEASE_S: Final = 60.0
"""Long, so that a loaded machine does not cost leases."""
_READS: Final = 200
_SCHEDULES: Final = 1_000
_LONE_RUNS: Final = 2_000
"""With fewer runs, the fixed cost of each partition would dominate."""
_BUDGET_BYTES: Final = 16 << 20
_ROOM_BYTES: Final = 4 << 30
"""Far more than the runs take, so that nothing is trimmed except where trimming is measured."""


class HistoryFigures(msgspec.Struct, frozen=True):
    runs: int
    written_per_s: float
    server_us_per_run: float
    """CPU of the server's main thread, rollups included."""
    bytes_per_run: float
    """In commits of 500, with rollups and rings."""
    bytes_per_lone_run: float
    """Runs in commits of their own."""
    last_50_of_schedule_ms_p50: float
    last_50_of_schedule_ms_p99: float
    ping_ms_p99: float
    """A bare exchange with the server, measured by turns with these reads, which make two exchanges each: a busy
    machine delays both."""
    failures_of_24h_ms: float
    """Time to read the newest 1,000 failures, one in a hundred runs."""
    budget_used: float
    """Memory taken by a full budget, divided by the bytes it counts."""
    fire_ratio_with_history: dict[str, float]
    """Rate of webhooks, workers and Kafka (if a broker can be started) with the history, by that without: the median of
    the rounds, which take turns."""
    cpu_ratio_with_history: dict[str, float]
    """The same for tasks per CPU second of this process, puts included: other load on the machine affects it less."""

    @property
    def sound(self) -> bool:
        return self.budget_used <= 1.05


class _Owner:
    """Owns all partitions, and commits runs only."""

    def __init__(self, store: Store, tokens: Sequence[bytes]) -> None:
        self.store = store
        self._tokens = tokens
        self._seqs = [0] * len(tokens)
        self._turn = 0
        self._number = 0
        self._noise = random.Random(1)

    @classmethod
    async def open(cls, place: BenchEnvironment, namespace: str, history_bytes: int) -> "_Owner":
        shared = SharedSettings({HISTORY_BYTES: str(history_bytes)})
        store = await Store.open(place.url, namespace=namespace, shared=shared)
        numbers = [keys.number for keys in store.keys.partitions]
        answers = await leases.acquire(store, numbers, owner="bench", nonce="bench", lease_ms=_LEASE_MS)
        return cls(store, [one.token for one in answers if isinstance(one, leases.Acquired)])

    async def write(self, batch: int) -> None:
        partition = self._turn = (self._turn + 1) % len(self._tokens)
        self._seqs[partition] += 1
        work = fire.Commit(
            partition, self._tokens[partition], self._seqs[partition], 0, 0, [], [], [], [],
            runs=list(self._runs(batch, partition)),
        )  # fmt: skip
        if await fire.commit(self.store, work) != "ok":
            raise RuntimeError("the bench has lost a partition")

    def _runs(self, count: int, partition: int) -> Iterator[Run]:
        now_ms, noise = self.store.clock.now_ms(), self._noise
        for _ in range(count):
            self._number += 1
            took_ms = int(noise.lognormvariate(3.5, 1))
            began_ms = now_ms - took_ms - noise.randrange(20)
            due_ms = began_ms - noise.randrange(6)
            failed = self._number % 100 == 0
            end: RunEnd = "dead" if failed else "done"
            fields = (end, 1, due_ms, began_ms, began_ms + took_ms, "target:orders", "node-1")
            reason, code = ("503: try again later", 503) if failed else ("", 200)
            task_id = None
            if self._number % 10 == 0:  # one in ten is a run of a schedule, always in the same partition
                schedule = partition + self._number // 10 % (_SCHEDULES // len(self._tokens)) * len(self._tokens)
                task_id = occurrence_id(f"report-{schedule}", due_ms)
            idh = os.urandom(16) if task_id is None else idh_of(task_id)
            yield Run(RunRecord(idh, *fields, reason, code, id=task_id, planned_ms=None if task_id is None else due_ms))


async def history(where: ServerChoice, runs: int, tasks: int, rounds: int, progress: BenchProgress) -> HistoryFigures:
    """Write `runs` runs and read some of them; then fill a small budget twice, and write runs one by one; then fire
    `tasks` tasks of each kind with and without the history."""
    async with open_environment(where) as place:
        owner = await _Owner.open(place, place.namespace, _ROOM_BYTES)
        try:
            await owner.write(1)
            before = await place.read()
            for written in range(0, runs, BATCH):
                await owner.write(BATCH)
                progress("writing", written, runs)
            used = (await place.read()).since(before)
            client = Client.over(owner.store)
            names = [f"report-{number % _SCHEDULES}" for number in range(_READS)]
            reads = [(await _ms(client.runs(schedule=name, limit=50)), await _ms(_ping(owner.store))) for name in names]
            failures = await _ms(client.runs(outcome="failed", limit=1000))
        finally:
            await owner.store.aclose()
        lone_bytes = await _lone(place, max(_LONE_RUNS, runs // 50))
        budget_used = await _filled(place, progress)
    last, pings = (quantiles(some, n=100) for some in zip(*reads, strict=True))
    return HistoryFigures(
        runs, round(runs / used.at_s), round(used.server_us / runs, 2),
        round(used.memory / runs, 1), round(lone_bytes, 1),
        round(last[49], 2), round(last[98], 2), round(pings[98], 2), round(failures, 1), round(budget_used, 3),
        *await _fire_ratios(where, tasks, rounds, progress),
    )  # fmt: skip


async def _ms(call: Awaitable[object]) -> float:
    began_s = time.perf_counter()
    await call
    return (time.perf_counter() - began_s) * 1000


async def _ping(store: Store) -> None:
    await store.run_one(store.keys.partitions[0].slot, [("PING",)])


async def _lone(place: BenchEnvironment, runs: int) -> float:
    owner = await _Owner.open(place, f"{place.namespace}-lone", _ROOM_BYTES)
    try:
        await owner.write(1)
        before = await place.read()
        for _ in range(runs):
            await owner.write(1)
        return (await place.read()).since(before).memory / runs
    finally:
        await owner.store.aclose()


async def _filled(place: BenchEnvironment, progress: BenchProgress) -> float:
    """Write much more than a budget holds; return the memory taken, divided by the bytes that the budget counts."""
    owner = await _Owner.open(place, f"{place.namespace}-full", _BUDGET_BYTES)
    try:
        before = await place.read()
        held = _BUDGET_BYTES // 2
        while (await history_state(owner.store)).written < 2 * held // 28:
            for _ in range(len(owner.store.keys)):
                await owner.write(BATCH)
            progress("filling a budget", 0, 1)
        return (await place.read()).since(before).memory / (await history_state(owner.store)).bytes
    finally:
        await owner.store.aclose()


_OFF: Final = HistoryRules({"http:": "off", "kafka:": "off", "queue:": "off"})

_Rate = Callable[[HistoryRules], Awaitable[float]]


async def _fire_ratios(
    where: ServerChoice, tasks: int, rounds: int, progress: BenchProgress
) -> tuple[dict[str, float], dict[str, float]]:
    found: dict[str, tuple[float, float]] = {}
    async with counterpart("mainspring.bench.bare_servers", "receiver") as receiver:

        async def webhooks(rules: HistoryRules) -> float:
            return (await through_webhooks(where, f"{receiver}/hook", tasks, progress, rules))[0]

        found["webhooks"] = await _ratio(webhooks, rounds)
    found["workers"] = await _ratio(lambda rules: _worked(where, tasks, progress, rules), rounds)
    if missing_kafka() is None:
        async with bench_broker() as options:

            async def kafka(rules: HistoryRules) -> float:
                return (await through_kafka(where, options, tasks * MORE, progress, rules))[0]

            await kafka(_OFF)  # only to warm up
            found["kafka"] = await _ratio(kafka, rounds)
    return {kind: one[0] for kind, one in found.items()}, {kind: one[1] for kind, one in found.items()}


async def _ratio(rate: _Rate, rounds: int) -> tuple[float, float]:
    """Return the ratios of rate and of CPU. Measure by turns in alternating order, so that other load affects both
    alike."""
    rates, loads = [], []
    for number in range(rounds):
        order = (_OFF, DEFAULT_HISTORY) if number % 2 else (DEFAULT_HISTORY, _OFF)
        per_s, cpu_s = {}, {}
        for rules in order:
            before_s = time.process_time()
            per_s[rules is _OFF] = await rate(rules)
            cpu_s[rules is _OFF] = time.process_time() - before_s
        rates.append(per_s[False] / per_s[True])
        loads.append(cpu_s[True] / cpu_s[False])
    return round(median(rates), 3), round(median(loads), 3)


async def _worked(where: ServerChoice, tasks: int, progress: BenchProgress, rules: HistoryRules) -> float:
    """Return the rate of a worker whose tasks are all due at the same moment."""

    async def nothing(order: int) -> int:
        return order

    async with open_environment(where) as place:
        store = await Store.open(place.url, namespace=place.namespace)
        try:
            options = WorkerOptions("bench", {QUEUE: 1}, lease_s=LEASE_S, history=rules)
            async with fleet(store, place.url, LEASE_S) as nodes:
                await nodes.add()
                await nodes.settled()
                async with working(store, Registry([Handler(nothing, queue=QUEUE)]), options):
                    due_ms = store.clock.now_ms() + 2000 + tasks * PUT_US // 1000
                    await put_jobs(store, "nothing", [due_ms] * tasks)
                    await asyncio.sleep(max(0, due_ms - store.clock.now_ms()) / 1000)
                    took_s, done = await until_done(store, tasks, time.perf_counter(), progress, what="workers")
            return done / took_s
        finally:
            await store.aclose()
