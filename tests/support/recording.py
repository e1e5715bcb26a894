"""Instruments for a history: what callers were answered, what owners wrote, what targets got.

    caller = Caller(client, history)                     # accepted, cancelled, rescheduled: as the answers say
    record(engine, history.events.append, node="a")      # wrote, begun, finished: as servers and targets answer
    …
    await caller.look_back()
    assert check(history) + await books(store) + await runs_amiss(store, history) == []

The engine is the real one; `record` stands between it and its store and sinks and changes nothing. A write is told when
a server has confirmed it, a delivery when its target has answered, with the moment the server took its begin. That time
is the server's own (`TIME`, asked for in the same trip), never the one that a script reports: a script that takes its
time from somewhere else would hide behind it.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from mainspring.client.client import Client
from mainspring.engine.dispatcher import Dispatcher
from mainspring.engine.engine import Engine
from mainspring.engine.flight import Flight, FlightGroup
from mainspring.engine.partition import BeginCall, CommitCall, OwnerCall
from mainspring.model.clock import Clock
from mainspring.model.delivery import Dead, Delivery, Done, Outcome, Retry
from mainspring.model.errors import Conflict, StoreError
from mainspring.model.ids import idempotency_key
from mainspring.model.run import RunFilter, RunRecord
from mainspring.model.task import BulkCancelOutcome, Handle
from mainspring.sinks.base import Sink
from mainspring.store.durability import SERVER, Durability
from mainspring.store.owner import fire
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.redis.sender import Group, Replies
from mainspring.store.runs import list_runs
from mainspring.store.store import Store
from mainspring.testing.balance import partition_balance, uneven
from mainspring.testing.history import (
    AcceptedEvent,
    BegunEvent,
    Event,
    FaultEvent,
    FinishedAs,
    FinishedEvent,
    History,
    Violation,
    WroteEvent,
)

Tell = Callable[[Event], None]
Deliver = Callable[[Sink, Sequence[Delivery]], Awaitable[Sequence[Outcome]]]


class Moments:
    """A clock in microseconds. One held by hand goes on by one at every look: what happens in order stays in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_us = 0

    def now_us(self) -> int:
        now_us = self._clock.now_ms() * 1000
        if self._clock.manual and 0 <= self._last_us - now_us < 999:
            now_us = self._last_us + 1
        self._last_us = now_us
        return now_us


def record(engine: Engine, tell: Tell, *, node: str = "", moments: Moments | None = None) -> None:
    """From now on tell every write that a server confirms to this engine, and every delivery that a target answers.

    Who records several engines on one clock held by hand gives them the same `moments`.
    """
    EngineRecorder(engine, tell, node, moments or Moments(engine.store.clock))


class _Start(NamedTuple):
    """The write that began a delivery."""

    at_us: int
    token: str


class EngineRecorder:
    """Listens to one engine's dispatcher."""

    def __init__(self, engine: Engine, tell: Tell, node: str, moments: Moments) -> None:
        self._dispatcher = engine.dispatcher
        self._moments = moments
        self._tell = tell
        self._node = node
        self._times = ServerTimes(engine.store, moments)
        self._starts: dict[tuple[int, str, str, int], _Start] = {}
        self._reported: dict[int, tuple[bytes, int]] = {}
        """Token and number of the last reported call, by partition: a repeated one is no new write."""
        vars(self._dispatcher)["_answered"] = self._answered
        own: dict[str, Any] = vars(engine.deliveries)
        own["_sinks"] = {scheme: _ToldSink(sink, self._deliver) for scheme, sink in own["_sinks"].items()}

    def _answered(self, call: OwnerCall, reply: fire.TickReply | fire.CommitReply) -> list[FlightGroup]:
        partition = call.partition
        if reply.status == "ok" and isinstance(call, BeginCall):
            section = call.section
            self._wrote(section.partition, section.token, section.seq, "tick", section.finished)
        elif reply.status == "ok" and isinstance(call, CommitCall):
            work = call.work
            settled = work.finished + len(work.retries) + len(work.deaths)
            self._wrote(work.partition, work.token, work.seq, "commit", settled)
        leaving = Dispatcher._answered(self._dispatcher, call, reply)
        start = _Start(self._times.at_us.get(partition.number, 0), partition.token.decode())
        self._starts.update((_place(flight), start) for group in leaving for flight in group.flights)
        return leaving

    def _wrote(self, partition: int, token: bytes, seq: int, what: str, settled: int) -> None:
        if self._reported.get(partition) != (token, seq):
            self._reported[partition] = (token, seq)
            self._tell(WroteEvent(self._times.at_us.get(partition, 0), partition, token.decode(), what, settled))

    async def _deliver(self, sink: Sink, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        sent_us = self._moments.now_us()
        starts = [self._starts.pop(_place(one)) for one in batch]
        outcomes = await sink.deliver(batch)
        at_us = self._moments.now_us()
        for one, (began_us, token), outcome in zip(batch, starts, outcomes, strict=True):
            task, key, attempt = one.id, one.idempotency_key, one.attempt
            partition = _place(one)[0]
            self._tell(BegunEvent(began_us, task, key, attempt, partition, token, self._node, sent_us))
            self._tell(FinishedEvent(at_us, task, key, attempt, _ending(outcome), partition, ""))
        return outcomes


def _place(one: Delivery) -> tuple[int, str, str, int]:
    assert isinstance(one, Flight), "only deliveries of an engine have a place"
    return one.live.partition, one.live.name, one.live.g_text, one.index


def _ending(outcome: Outcome) -> FinishedAs:
    match outcome:
        case Done():
            return "done"
        case Retry():
            return "retry"
        case Dead():
            return "dead"


class _ToldSink:
    """A sink whose answers are recorded."""

    def __init__(self, sink: Sink, deliver: Deliver) -> None:
        self._sink, self._deliver = sink, deliver

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return await self._deliver(self._sink, batch)

    async def aclose(self) -> None:
        await self._sink.aclose()


class ServerTimes:
    """When the server took the last begin or commit of each partition, by its own clock (or by the test's)."""

    def __init__(self, store: Store, moments: Moments) -> None:
        self._store = store
        self._moments = moments
        self._partitions = {keys.fence: keys.number for keys in store.keys.partitions}
        self.at_us: dict[int, int] = {}
        vars(store)["run"] = self._run

    async def _run(self, groups: Sequence[Group], durability: Durability = SERVER) -> list[Replies | StoreError]:
        writes = [self._written(commands) for _, commands in groups]
        timed = not self._store.clock.manual
        sent: list[Group] = [
            (slot, [*commands, ("TIME",)]) if timed and written else (slot, commands)
            for (slot, commands), written in zip(groups, writes, strict=True)
        ]
        asked_us = self._moments.now_us() if any(writes) else 0
        results = await Store.run(self._store, sent, durability)
        for (slot, _), written, result in zip(sent, writes, results, strict=True):
            if written and not isinstance(result, StoreError):
                at_us = await self._asked(slot, result) if timed else asked_us
                self.at_us.update(dict.fromkeys(written, at_us))
        return results

    def _written(self, commands: Sequence[RedisCommand]) -> list[int]:
        """The partitions whose fences this call is about: only ticks and commits name them first."""
        command = commands[0]
        if command[0] != "EVALSHA" or command[3] not in self._partitions:
            return []
        return [self._partitions[key] for key in map(str, command[3 : 3 + int(command[2])]) if key in self._partitions]

    async def _asked(self, slot: int, result: Replies) -> int:
        """The server's time after the call. If the call was sent once more in full, it is later than this answer."""
        at_us = _micros(result.pop())
        if at_us < result[0][0]:
            [reply] = await Store.run_one(self._store, slot, [("TIME",)])
            at_us = _micros(reply)
        return at_us


def _micros(reply: Sequence[bytes]) -> int:
    return int(reply[0]) * 1_000_000 + int(reply[1])


class RecordingClient:
    """A client that writes down what it was answered."""

    def __init__(self, client: Client, history: History, moments: Moments | None = None) -> None:
        self.client = client
        self.history = history
        self._moments = moments or Moments(client.store.clock)
        self._known: dict[str, Handle] = {}

    async def put(
        self,
        at_ms: int,
        *,
        lane: str | None = None,
        id: str | None = None,
        sure: bool = True,
        client: Client | None = None,
        target: str = "log:",
    ) -> str:
        """Put one task; returns its name. A repeated request is one task. `sure=False`: a server will forget it.

        With another client (whose clock may be wrong) it is still this one that notes when the answer came.
        """
        handle = await (client or self.client).put(target, at=at_ms, lane=lane, id=id)
        name = handle.id.partition("~")[0]
        if name not in self._known:
            self._known[name] = handle
            self.history.accepted(name, at_ms, self._moments.now_us(), lane=lane, sure=sure)
        return name

    async def cancel(self, *names: str) -> list[BulkCancelOutcome]:
        answers = await self.client.cancel_many([self._known[name].id for name in names])
        for name, answer in zip(names, answers, strict=True):
            self.history.cancelled(name, self._known[name].due_ms, answer, self._moments.now_us())
        return answers

    async def reschedule(self, name: str, at_ms: int) -> bool:
        """Move a task; False when it was too late for that."""
        old = self._known[name]
        try:
            moved = await self.client.reschedule(old.id, at=at_ms)
        except Conflict:
            return False
        self.history.rescheduled(name, old.due_ms, at_ms, self._moments.now_us())
        self._known[name] = moved
        return True

    async def look_back(self) -> None:
        """When all is over: what the store says of every task."""
        for name, handle in self._known.items():
            self.history.left(name, (await self.client.get(handle.id)).state, self._moments.now_us())


async def books(store: Store) -> list[Violation]:
    """The partitions whose books do not balance."""
    found = []
    for keys in store.keys.partitions:
        one = await partition_balance(store, keys)
        if not one.even:
            found.append(Violation("books", "", store.clock.now_ms() * 1000, uneven(keys, one)))
    return found


async def all_runs(store: Store) -> list[RunRecord]:
    """The whole history of runs, newest first."""
    found: list[RunRecord] = []
    cursor = None
    while True:
        page = await list_runs(store, RunFilter(), cursor, 1_000)
        found += [run.record for run in page.runs]
        if (cursor := page.next) is None:
            return found


class RunsCompared(NamedTuple):
    """The history of runs beside the list of who was called."""

    records: int
    missing: list[str]
    doubled: list[str]
    lost: int
    """Records of attempts that ended with their node or worker."""
    unseen: int
    """Attempts that had not reached their target."""


Attempt = tuple[str, int]
"""The idempotency key of a task, and the number of the attempt."""


def compare_runs(
    namespace: str, records: Iterable[RunRecord], events: Sequence[Event], unrecorded: Iterable[Attempt] = ()
) -> RunsCompared:
    """Compare the history with what targets saw: an attempt ends at most once, and has as many records as it was begun
    times; all but the last are `lost`. What ended was begun. `unrecorded` ended without a record."""
    begun: Counter[Attempt] = Counter((one.key, one.attempt) for one in events if isinstance(one, BegunEvent))
    at_us = {(one.key, one.attempt): one.at_us for one in events if isinstance(one, FinishedEvent)}
    # Two tasks, for all that the servers know.
    copies = {one.key for one in events if isinstance(one, AcceptedEvent) and one.twice}
    # A server that was promoted may have had neither the record nor the attempt before it.
    forgotten = [one for one in events if isinstance(one, FaultEvent) and one.loses]
    ended: Counter[Attempt] = Counter()
    lost: Counter[Attempt] = Counter()
    for one in records:
        key = idempotency_key(namespace, one.task_id, one.due_ms, one.lane)
        if one.end == "lost":
            lost[key, one.attempt] += 1
        elif one.began_ms:  # its target saw it
            ended[key, one.attempt] += 1
    for attempt in begun.keys() & set(unrecorded):
        ended[attempt] = max(1, ended[attempt])
    missing, doubled = [], []
    for attempt in begun.keys() | ended.keys():
        if any(one.at_us - _UNWRITTEN_US <= at_us.get(attempt, 0) <= one.until_us for one in forgotten):
            continue
        said = (
            f"{attempt[0]}, attempt {attempt[1]}: begun {begun[attempt]}, ended {ended[attempt]}, lost {lost[attempt]}"
        )
        if ended[attempt] + lost[attempt] < begun[attempt]:
            missing.append(said)
        if begun[attempt] == 0 or (ended[attempt] > 1 and attempt[0] not in copies):
            doubled.append(said)
    unseen = sum(max(0, count + ended[attempt] - begun[attempt]) for attempt, count in lost.items())
    return RunsCompared(ended.total() + lost.total(), sorted(missing), sorted(doubled), lost.total(), unseen)


_UNWRITTEN_US: Final = 2_000_000
"""Time within which an answer is committed, far from tight."""


async def runs_amiss(store: Store, history: History) -> list[Violation]:
    """Runs that the history lacks, or has more often than they took place. Of deliveries to the log, only failures are
    recorded; workers by hand record nothing."""
    events = [one for one in history.events if not isinstance(one, BegunEvent) or one.token]
    done = {(one.key, one.attempt) for one in events if isinstance(one, FinishedEvent) and one.ending == "done"}
    found, at_us = compare_runs(history.namespace, await all_runs(store), events, done), store.clock.now_ms() * 1000
    missing = [Violation("books", one, at_us, "the history lacks a run") for one in found.missing]
    return missing + [Violation("books", one, at_us, "the history has a run twice") for one in found.doubled]
