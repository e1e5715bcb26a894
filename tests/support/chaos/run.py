"""One chaos run: servers, recorder, nodes and load; faults by plan; healing; the check; the report."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from mainspring.client.client import Client
from mainspring.model.errors import StoreError
from mainspring.model.run import RunRecord
from mainspring.model.task import ListedState, QueueState
from mainspring.store.keys import Keyspace
from mainspring.store.redis.servers import LinkOptions
from mainspring.testing.balance import balance, partition_balance
from mainspring.testing.history import (
    AcceptedEvent,
    BegunEvent,
    FaultEvent,
    HealedEvent,
    History,
    LeftEvent,
    StallEvent,
    Violation,
    WroteEvent,
    check,
    slowest,
    unpromised,
)

from ..planted_bugs import planted
from ..recording import all_runs, compare_runs
from .faults import Faults, Ground
from .fleet import Fleet
from .load import Load, Recurring, duplicates, twice_begun, unplanned, with_keys
from .network import Road, refused
from .profile import Kind, Profile, plan
from .recorder import STALL, Journal, Recorder, now_us
from .servers import Clustered, Pair, Stage, Standalone
from .wire_log import Witness

_EVERY_S: Final = 0.02
_LATE_S: Final = 0.02
"""On a machine with time to spare a wake-up is a few milliseconds late at most."""


class Pulse:
    """Measures every stall and writes it down; a long one is a fault too, as nodes may have lost leases by it."""

    def __init__(self, journal: Journal, *, long_s: float) -> None:
        self._journal, self._long_s = journal, long_s

    async def beat(self) -> None:
        """Until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_EVERY_S)
            self.note(time.monotonic() - before - _EVERY_S)

    def note(self, late_s: float) -> None:
        """A wake-up that was so late."""
        until_us = now_us()
        from_us = until_us - int(late_s * 1e6)
        if late_s > _LATE_S:
            self._journal.add(StallEvent(from_us, until_us))
        if late_s > self._long_s:
            self._journal.add(FaultEvent(from_us, until_us, STALL))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run. It passed when `failures` is empty."""

    profile: str
    seed: int
    seconds: float
    lease_s: float
    faults: dict[str, int]
    """How often each fault took effect."""
    wanted: dict[str, int]
    tasks: int
    recurring: int = 0
    """Planned runs of schedules."""
    missing: int = 0
    """Planned runs that never ran."""
    doubled: int = 0
    """Planned runs that ran more than once; the rule `repeated` finds those without a fault to excuse them."""
    records: int = 0
    """Runs in the history, compared with what the recorder saw."""
    untold: int = 0
    """Attempts that the recorder saw and the history lacks."""
    told_twice: int = 0
    """Attempts that the history has more often than they took place."""
    lost_runs: int = 0
    """Records of attempts whose node or worker died."""
    lost_unseen: int = 0
    """Runs that died before the recorder saw the attempt."""
    unsure: int
    """Puts, moves and replaces whose answer was lost."""
    deliveries: int
    duplicates: int
    """Attempts that were delivered more than once."""
    violations: dict[str, int]
    unpromised: int
    """Tasks lost at a durability that did not promise to keep them through what happened."""
    partitions: str
    """How networks were parted: by the kernel, or by proxies and why; empty where none was."""
    drained_s: float | None
    """From healing, when all was due, until all was delivered; None: it never was."""
    slowest_s: float | None
    """The longest that a delivery took after healing, of what was due then; None: one never came."""
    stalled_s: float
    """So much of that the machine stood still, as measured: it comes on top of the two leases allowed."""
    takeovers: int
    stalls: int
    """Times when the machine itself gave a process no time for a third of a lease."""
    failures: list[str]
    histories: str
    """The folder with the history and the logs."""

    @property
    def valid(self) -> bool:
        """Enough faults took effect for the result to mean something."""
        return all(self.faults.get(kind, 0) >= count for kind, count in self.wanted.items())

    def lines(self) -> Iterator[str]:
        yield f"chaos {self.profile}, seed {self.seed}: {'FAILED' if self.failures else 'passed'}"
        faults = ", ".join(f"{self.faults.get(kind, 0)} {kind}" for kind in sorted(self.wanted))
        yield f"  faults      {sum(self.faults.values())} in {self.seconds:g} s: {faults}"
        if self.partitions:
            yield f"  network     partitions {self.partitions}"
        yield f"  tasks       {self.tasks}, of which {self.unsure} were never answered"
        yield f"  schedules   {self.recurring} planned runs, {self.missing} missing, {self.doubled} doubled by faults"
        yield f"  deliveries  {self.deliveries}, duplicates {self.duplicates}, changes of owner {self.takeovers}"
        amiss = f"{self.untold} missing, {self.told_twice} doubled"
        lost = f"{self.lost_runs} lost ({self.lost_unseen} before they were seen)"
        yield f"  history     {self.records} records, {amiss}, {lost}"
        broken = ", ".join(f"{count} {rule}" for rule, count in sorted(self.violations.items())) or "none"
        yield f"  violations  {broken}; lost without a promise: {self.unpromised}"
        drained = "never" if self.drained_s is None else f"{self.drained_s:.2f} s"
        yield f"  drained     {drained} after healing (lease {self.lease_s:g} s); {self.stalls} stalls of the machine"
        slowest = "never came" if self.slowest_s is None else f"took {self.slowest_s:.2f} s"
        allowed = f"{2 * self.lease_s:g} s allowed and {self.stalled_s:.2f} s of measured stalls"
        yield f"  slowest     delivery {slowest}; {allowed}"
        for failure in self.failures:
            yield f"  FAILURE     {failure}"
        if self.failures:
            yield f"  histories   {self.histories}"
            yield f"  again       python -m tests.support.chaos --profile {self.profile} --seed {self.seed}"


def too_few(profile: Profile, done: Mapping[Kind, int]) -> list[str]:
    """Why a run proves nothing, if it does not."""
    return [
        f"invalid run: {kind} took effect {done.get(kind, 0)} times, {count} are needed"
        for kind, count in profile.faults.items()
        if done.get(kind, 0) < count
    ]


NAMESPACE: Final = "chaos"
_PATIENCE_S: Final = 60.0
"""How much longer than allowed a run waits for unfinished tasks: late is late, but how late is worth knowing."""
_POLL_S: Final = 0.02
_UNFINISHED: Final[tuple[ListedState | QueueState, ...]] = ("pending", "fired", "queued", "running")
"""States of a task that has not ended, as they can be listed."""
_TRAP_POLL_S: Final = 0.2
_SHOWN: Final = 10
_PATIENT: Final = LinkOptions(connect_timeout_s=2.0, timeout_s=8.0)


class Run:
    """Everything that lives during a run."""

    def __init__(
        self, profile: Profile, seed: int, folder: Path, seconds: float | None = None, bugs: tuple[str, ...] = ()
    ) -> None:
        self.bugs = bugs
        self.profile, self.seed, self.folder = profile, seed, folder
        self.seconds = profile.seconds if seconds is None else seconds
        self.planned = plan(profile, seed, seconds)
        self.journal = Journal(folder / "history.jsonl")
        self.keys = Keyspace(NAMESPACE, profile.partitions)
        self.witness = Witness(self.keys, self.journal.wrote)
        self.recorder = Recorder(self.journal, self.witness, folder / "recorder")
        self.records: list[RunRecord] = []
        self.failures: list[str] = []
        self.drained_s: float | None = None
        self.partitions = ""
        self.loads: list[Load] = []
        self.recurring: Recurring | None = None
        self.workers: Fleet | None = None

    async def go(self) -> Report:
        watch = asyncio.create_task(Pulse(self.journal, long_s=self.profile.lease_s / 3).beat())
        try:
            await self.recorder.start()
            async with self._on_stage() as (stage, fleet):
                await self._play(stage, fleet)
        finally:
            watch.cancel()
            await self.recorder.aclose()
            self.journal.close()
        return self._judge()

    @contextlib.asynccontextmanager
    async def _on_stage(self) -> AsyncIterator[tuple[Stage, Fleet]]:
        stage = await self._set_stage()
        cabled = await self._cabled()
        lease_s = self.profile.lease_s
        fleet = Fleet(stage, self.recorder, self.folder, lease_s=lease_s, bugs=self.bugs, cabled=cabled)
        if self.profile.workers:
            self.workers = Fleet(stage, self.recorder, self.folder, lease_s=lease_s, bugs=self.bugs, kind="worker")
        try:
            # The namespace is made before its nodes: they shall not choose its partitions.
            async with Client(stage.direct_url, namespace=NAMESPACE, partitions=self.profile.partitions):
                pass
            yield stage, fleet
        finally:
            for one in self._fleets(fleet):
                await one.aclose()
            await stage.aclose()

    def _fleets(self, nodes: Fleet) -> list[Fleet]:
        return [nodes] if self.workers is None else [nodes, self.workers]

    async def _ready(self, nodes: Fleet) -> None:
        await nodes.ready(self.profile.nodes)
        if self.workers is not None:
            await self.workers.ready(self.profile.workers)

    async def _cabled(self) -> bool:
        """Whether nodes get cables of their own; for the report, how networks are parted."""
        if "partition" not in self.profile.faults:
            return False
        why_not = await asyncio.to_thread(refused)
        self.partitions = "by the kernel" if why_not is None else f"by proxies ({why_not})"
        return why_not is None

    async def _set_stage(self) -> Stage:
        kind = {"standalone": Standalone, "cluster": Clustered, "pair": Pair}[self.profile.servers]
        stage = await asyncio.to_thread(kind, self.profile, self.keys, self.witness)
        if isinstance(stage, Pair):
            await stage.open()
        assert isinstance(stage, (Standalone, Clustered, Pair))
        return stage

    # -- the play ------------------------------------------------------------------------------------------

    async def _play(self, stage: Stage, fleet: Fleet) -> None:
        await self._ready(fleet)
        road = await stage.road("load")
        async with self._client(stage.direct_url) as direct, self._client(stage.url(road)) as far:
            ends_us = now_us() + int((self.seconds + 2.0) * 1e6)
            self.loads = [
                Load("direct", direct, self.journal, self.profile, seed=self.seed, ends_us=ends_us, road=None),
                Load("far", far, self.journal, self.profile, seed=self.seed, ends_us=ends_us, road=road),
            ]
            self.recurring = Recurring(direct, self.journal, self.profile.target)
            await self.recurring.add(ends_us)
            stop = asyncio.Event()
            loads = [asyncio.create_task(load.run(stop)) for load in self.loads]
            ground = Ground(
                stage, fleet, [road], self.journal, self.recorder, self.keys, self.profile.lease_s, self.workers
            )
            faults = Faults(ground)
            try:
                await self._strike(faults)
            finally:
                stop.set()
                await asyncio.gather(*loads)
            await self._heal(fleet, [road])
            await self.drain(direct)
            await self._close_books(direct)
        for one in reversed(self._fleets(fleet)):
            await asyncio.gather(*(one.leave(member) for member in one.live))
            self.failures += one.crashes
        self.faults = faults.done
        self.failures += too_few(self.profile, faults.done)
        await road.aclose()
        self.failures += road.errors[:_SHOWN]

    def _client(self, url: str) -> Client:
        return Client(url, namespace=NAMESPACE, wait_s=6.0, options=_PATIENT)

    async def _strike(self, faults: Faults) -> None:
        start = time.monotonic()
        strikes = []
        async with asyncio.TaskGroup() as group:
            for planned in self.planned:
                await asyncio.sleep(max(0.0, start + planned.at_s - time.monotonic()))
                strikes.append(group.create_task(faults.strike(planned)))
            await asyncio.sleep(max(0.0, start + self.seconds - time.monotonic()))
            # Some wait for traffic to fall into their trap: the load continues until the last one has struck.
            while not all(strike.done() for strike in strikes):
                for load in self.loads:
                    load.ends_us = max(load.ends_us, now_us() + 1_000_000)
                await asyncio.sleep(_TRAP_POLL_S)

    async def _heal(self, fleet: Fleet, roads: list[Road]) -> None:
        """From here on nothing is broken; then everything that was put comes due."""
        for road in (*roads, *(member.road for one in self._fleets(fleet) for member in one.live)):
            road.weather.clear()
        await self._ready(fleet)
        self.journal.add(HealedEvent(now_us(), int(self.profile.within_s * 1e6)))
        ends_us = max(load.ends_us for load in self.loads)
        await asyncio.sleep(max(0.0, (ends_us - now_us()) / 1e6))

    async def drain(self, client: Client) -> None:
        """Wait until every accepted task has ended, however often it was moved or retried.

        What the callers know is not enough: a task whose move the servers may have forgotten is owed to nobody, and
        still has to run if they did not forget it. It would look lost if the nodes left before its time.
        """
        limit_s, start = self.profile.within_s + _PATIENCE_S, time.monotonic()
        while left := await self._unfinished(client):
            if time.monotonic() > start + limit_s:
                self.failures.append(f"not all tasks ended within {limit_s:g} s of healing: {left}")
                return
            await asyncio.sleep(_POLL_S)
        self.drained_s = time.monotonic() - start

    async def _unfinished(self, client: Client) -> str:
        """Describe what has not ended yet; empty if everything has."""
        if owed := self._owed():
            return f"{len(owed)} not delivered: {owed[:_SHOWN]}"
        try:
            books = [await partition_balance(client.store, keys) for keys in client.store.keys.partitions]
            held = {state: sum(getattr(one, state) for one in books) for state in ("pending", "fired", "queued")}
            if not any(held.values()):
                return ""
            pages = [await client.list(state=state, limit=_SHOWN) for state in _UNFINISHED]
        except StoreError as error:
            return f"the servers do not answer: {error}"
        ids = [task.id for page in pages for task in page.tasks]
        return f"the servers hold {', '.join(f'{count} {state}' for state, count in held.items())}: {ids[:_SHOWN]}"

    def _owed(self) -> list[str]:
        """Return what must still be delivered: everything that was promised in spite of the faults."""
        lossy = [one for one in self.journal.events if isinstance(one, FaultEvent) and one.loses]
        owed = [load.open for load in self.loads]
        if self.recurring is not None:
            owed.append(self.recurring.open)
        return [
            key
            for some in owed
            for key, accepted in some.items()
            if key not in self.recorder.ended and not _forgiven(accepted, lossy)
        ]

    async def _close_books(self, client: Client) -> None:
        for load in self.loads:
            for put in load.expiring.values():
                if put.accepted.key not in self.recorder.ended:
                    info = await client.get(put.id)
                    self.journal.add(
                        LeftEvent(now_us(), put.accepted.task, info.state if info.state == "dead" else "gone")
                    )
        try:
            self.records = await all_runs(client.store)
            await balance(client.store)
        except AssertionError as error:
            self.failures.append(f"the books do not balance: {error}")
        except StoreError as error:
            self.failures.append(f"the books cannot be read: {error}")

    # -- the judgement ---------------------------------------------------------------------------------------

    def _judge(self) -> Report:
        history = History(NAMESPACE, with_keys(self.journal.events))
        found = check(history)
        self.failures += _spoken(found)
        if self.recorder.untold:
            self.failures.append(f"{len(self.recorder.untold)} deliveries whose begin no server has confirmed")
        events, last = history.events, slowest(history)
        runs = compare_runs(NAMESPACE, self.records, events)
        for what, some in (("missing from", runs.missing), ("doubled in", runs.doubled)):
            if some:
                self.failures.append(f"{len(some)} runs {what} the history: {some[:_SHOWN]}")
        planned = set(self.recurring.open) if self.recurring is not None else set()
        report = Report(
            profile=self.profile.name,
            seed=self.seed,
            seconds=self.seconds,
            lease_s=self.profile.lease_s,
            faults={str(kind): count for kind, count in self.faults.items()},
            wanted={str(kind): count for kind, count in self.profile.faults.items()},
            tasks=sum(load.put for load in self.loads),
            recurring=len(planned),
            missing=len(planned - self.recorder.ended),
            doubled=len(planned & twice_begun(events)),
            records=runs.records,
            untold=len(runs.missing),
            told_twice=len(runs.doubled),
            lost_runs=runs.lost,
            lost_unseen=runs.unseen,
            unsure=sum(load.unsure for load in self.loads),
            deliveries=sum(isinstance(event, BegunEvent) for event in events),
            duplicates=duplicates(events),
            violations=dict(Counter(one.rule for one in found)),
            unpromised=len(unpromised(history)),
            partitions=self.partitions,
            drained_s=self.drained_s,
            slowest_s=last.spent_us / 1e6 if last is not None and last.spent_us is not None else None,
            stalled_s=last.stalled_us / 1e6 if last is not None else 0.0,
            takeovers=sum(isinstance(event, WroteEvent) and event.what == "acquire" for event in events),
            stalls=unplanned(events),
            failures=self.failures,
            histories=str(self.folder),
        )
        (self.folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        (self.folder / "violations.txt").write_text("".join(f"{one}\n" for one in found))
        return report


def _forgiven(accepted: AcceptedEvent, lossy: list[FaultEvent]) -> bool:
    return accepted.level == "server" and any(one.at_us <= accepted.at_us <= one.until_us for one in lossy)


def _spoken(found: list[Violation]) -> list[str]:
    rules = Counter(one.rule for one in found)
    lines = [f"{one.rule}: {one.task} at {one.at_us} us: {one.message}" for one in found[:_SHOWN]]
    more = [f"… {len(found)} violations in all: {dict(rules)}"] if len(found) > _SHOWN else []
    return lines + more


def run(profile: Profile, seed: int, folder: Path, seconds: float | None = None, bugs: tuple[str, ...] = ()) -> Report:
    """Do one run in an event loop of its own; histories, logs and the report stay in the folder.

    `bugs` are planted in every node (see `mutations`): a run that does not find them proves nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)

    async def go() -> Report:
        return await Run(profile, seed, folder, seconds, bugs).go()

    with contextlib.ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(planted(bug))  # the witness knows scripts by their hash
        return asyncio.run(go())
