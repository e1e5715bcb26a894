"""Puts, cancels, moves, owners, lost replies, late duplicates and restarts, in any order, against a real server.

After every step the server and the model agree. `MAINSPRING_EXAMPLES=2000` runs longer than CI does.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar

import pytest
import uvloop
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mainspring.client.client import Client
from mainspring.engine import dispatcher, lookahead, partition
from mainspring.engine import holds as holds_module
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.model.errors import Conflict, NotFound, StoreError, Unavailable
from mainspring.model.lane import LanePolicy
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import OnConflict, Task
from mainspring.store.codec import HEADER_BYTES, decode, is_tombstone
from mainspring.store.keys import Keyspace, Slice
from mainspring.store.redis.connection import RedisCommand
from mainspring.store.redis.servers import Primary
from mainspring.store.scripts import Scripts
from mainspring.store.store import Store
from mainspring.store.tasks import cancel, encode, put, put_ids
from mainspring.testing.servers import Server, standalone
from mainspring.testing.ticker import turn
from tests.support.simulation_model import SURE, Known, Model, Row

T = TypeVar("T")
PARTITIONS = 3
LEASE_S = 60
DEDUPE_S = 600
PATIENCE_S = 10.0
TURNS = 3
"""Tasks that do not fit into memory at once are read and fired in later turns."""
RETRY = RetryPolicy(max_attempts=3, base_ms=700, factor=2.0, cap_ms=5_000, jitter="none")
IDS = {"a": None, "b": None, "ä {1}:\n": None, "in lane": "left", "also in lane": "right"}
"""Ids in use and the lane each belongs to: identity is (partition, id), and the lane decides the partition."""
LANES = (None, None, "left", "right")
NEVER_PARKED = LanePolicy("block", 300 * 86_400_000)

PUTS = {Scripts(ManualClock()).call(name, [], [])[1] for name in ("put_ids", "replace")}


def _compacts(command: RedisCommand) -> bool:
    """Calls that bring their script; those within a transaction come late only together with it."""
    return command[0] == "EVAL" and "local function compact" in str(command[1])


Trouble = Literal["refused", "request lost", "reply lost"]
Fault = tuple[int, Trouble, int] | None
"""Which of the next pipelines fails, how, and how many in a row."""

troubles = st.sampled_from(["refused", "request lost", "reply lost"])
faults: st.SearchStrategy[Fault] = st.one_of(
    st.none(), st.none(), st.tuples(st.integers(0, 7), troubles, st.integers(1, 2))
)
dues = st.one_of(
    st.integers(-5_000, 0), st.integers(0, 3_000), st.integers(0, 90_000), st.just(3_700_000), st.just(9_000_000)
)
outcomes: st.SearchStrategy[list[Outcome]] = st.lists(
    st.sampled_from([DONE, DONE, Retry("busy"), Retry("later", after_ms=2_500), Dead("no")]), max_size=8
)
conflicts: st.SearchStrategy[OnConflict] = st.sampled_from(["keep", "replace", "earliest", "reject"])
ids = st.sampled_from(sorted(IDS))
picks = st.integers(0, 9_999)
"""Choose one of several, by the remainder of a division. Draws from the tasks themselves would depend on what a real
server has answered: on a busy machine a repeated example drew something else, and Hypothesis gave up."""


class NetworkFaults:
    """The way to the server: now and then a request or a reply gets lost on it. Remembers what went over it."""

    def __init__(self, store: Store, sent: list[RedisCommand]) -> None:
        [self._primary] = store.servers.all()
        self._send = self._primary.pipeline
        vars(self._primary)["pipeline"] = self.pipeline
        self._sent = sent
        self._plan: list[Trouble | None] = []
        self.failed = False

    def expect(self, fault: Fault) -> None:
        self.failed = False
        self._plan = [] if fault is None else [None] * fault[0] + [fault[1]] * fault[2]

    async def pipeline(self, commands: Sequence[RedisCommand], *, timeout_s: float | None = None) -> list[Any]:
        trouble = self._plan.pop(0) if self._plan else None
        if trouble in ("refused", "request lost"):
            self.failed = True
            raise Unavailable(f"made up: {trouble}", sent=trouble != "refused")
        self._sent += [command for command in commands if command[0] == "EVALSHA" or _compacts(command)]
        replies = await self._send(commands, timeout_s=timeout_s)
        if trouble is not None:
            self.failed = True
            raise Unavailable("made up: the reply was lost", sent=True)
        return replies


class Recorder:
    """A sink that records its deliveries and answers as set."""

    def __init__(self, model: Model, clock: ManualClock) -> None:
        self._model = model
        self._clock = clock
        self.answers: list[Outcome] = []
        self.during: Callable[[Delivery], Awaitable[None]] | None = None
        self.flaws: list[AssertionError] = []
        """The engine takes what a sink raises for a failed delivery; the test must not."""

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        given: list[Outcome] = []
        for one in batch:
            outcome = self.answers.pop(0) if self.answers else DONE
            n, now_ms = one.value()["n"], self._clock.now_ms()
            note(f"  delivered {n} attempt {one.attempt}: {outcome}")
            given.append(outcome)
            try:
                self._model.deliver(n, one.idempotency_key, one.attempt, now_ms, outcome, one.idh)
                if self.during is not None:
                    await self.during(one)
            except AssertionError as flaw:
                self.flaws.append(flaw)
        return given

    async def aclose(self) -> None:
        """Nothing is held open."""


class Node:
    """One process with an engine; it can be replaced by a new one at any moment."""

    def __init__(self, store: Store, road: NetworkFaults, sink: Recorder, reach: Reach) -> None:
        self.store, self.road, self._sink, self._reach = store, road, sink, reach
        self.engine = self.fresh()

    def fresh(self) -> Engine:
        options = EngineOptions("node", LEASE_S, self._reach, RETRY, lane_policy=NEVER_PARKED)
        self.engine = Engine(self.store, {"null": self._sink}, options)
        return self.engine

    @property
    def owns_all(self) -> bool:
        return len(self.engine.owned) == PARTITIONS


class Timeline(RuleBasedStateMachine):
    """Two nodes and a client on one server with a clock that is moved by hand."""

    server: ClassVar[Server]
    reach: ClassVar[Reach] = Reach()

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)  # as nodes have it
        self.clock = ManualClock()
        self.model = Model("sim", RETRY, dedupe_ms=DEDUPE_S * 1000)
        self.keys = Keyspace("sim", PARTITIONS)
        self.sent: list[RedisCommand] = []
        self.nodes: list[Node] = []
        self.sink = Recorder(self.model, self.clock)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        # Not by the runner, which sets and resets the handler of Ctrl-C around each of a hundred thousand calls.
        result = self.runner.get_loop().run_until_complete(bounded())
        flaws, self.sink.flaws = self.sink.flaws, []
        if flaws:
            raise flaws[0]
        return result

    @initialize()
    def begin(self) -> None:
        self.server.call("FLUSHALL")
        self.run(self._open(self.reach))

    async def _open(self, reach: Reach) -> None:
        for _ in range(2):
            store, road = await self._store()
            self.nodes.append(Node(store, road, self.sink, reach))
        store, self.road = await self._store()
        store.shared.take({"dedupe_window": f"{DEDUPE_S}s"})
        self.client = Client.over(store)

    async def _store(self) -> tuple[Store, NetworkFaults]:
        store = await Store.open(self.server.url, namespace="sim", partitions=PARTITIONS, clock=self.clock)
        return store, NetworkFaults(store, self.sent)

    def teardown(self) -> None:
        try:
            if self.nodes:
                self._finish()
        finally:
            for store in [node.store for node in self.nodes] + [self.client.store] if self.nodes else []:
                self.run(store.aclose())
            self.runner.close()

    def _finish(self) -> None:
        """In the end everything that was accepted has come to its end."""
        [node, _] = self.nodes
        for road in (self.road, *(one.road for one in self.nodes)):
            road.expect(None)
        node.fresh()
        for lane in self.model.paused:
            self.run(self.client.resume(lane=lane))
        self.model.paused.clear()
        for _ in range(12):
            self.clock.advance(seconds=LEASE_S + 1 if not node.owns_all else 5_000)
            self._turn(node, clean=True)
            self.agree()
        left = self.model.open()
        assert not left, f"never finished: {left}"

    # -- what callers do -------------------------------------------------------------------------------------

    @rule(delays=st.lists(st.tuples(dues, st.sampled_from(LANES)), min_size=1, max_size=6), fault=faults)
    def put_without_ids(self, delays: list[tuple[int, str | None]], fault: Fault) -> None:
        now_ms = self.clock.now_ms()
        known = [self._new(None, lane, now_ms + delay) for delay, lane in delays]
        tasks = [Task("null:", {"n": one.n}, at=one.due_ms, lane=one.lane) for one in known]
        self.road.expect(fault)
        try:
            summary = self.run(self.client.put_many(tasks, handles=True))
        except StoreError:
            self._expected_failure()
            for one in known:
                one.unsure("absent")
        else:
            for one, handle in zip(known, summary.handles or (), strict=True):
                assert handle.due_ms == one.due_ms
                one.handles.append(handle.id)
        for one in known:
            one.copies = self.road.failed
            self.model.accept(one)

    def _new(self, id: str | None, lane: str | None, due_ms: int) -> Known:
        return Known(self.model.next_n(), id, lane, due_ms, due_ms, late=due_ms < self.clock.now_ms())

    @rule(id=ids, delay=dues, on_conflict=conflicts, fault=faults)
    def put_with_id(self, id: str, delay: int, on_conflict: OnConflict, fault: Fault) -> None:
        now_ms = self.clock.now_ms()
        task = self._new(id, IDS[id], now_ms + delay)
        former = self.model.by_id.get(id)
        possible = self.model.answers_to(task, on_conflict, now_ms)
        self.road.expect(fault)
        try:
            handle = self.run(
                self.client.put("null:", {"n": task.n}, at=task.due_ms, id=id, lane=IDS[id], on_conflict=on_conflict)
            )
            answer: str = handle.outcome
        except Conflict:
            answer = "conflict"
        except StoreError:
            self._expected_failure()
            answer = "unanswered"
        note(f"  task {task.n} {answer}")
        if self.road.failed:
            # The call was repeated, or given up: its own first attempt may have put the task.
            if "created" in possible or "replaced" in possible:
                task.unsure("absent")
                task.handles.append(id)
                self.model.tasks[task.n] = task
                if former is not None and former.open and "replaced" in possible:
                    former.unsure("replaced")
            return
        assert answer in possible, f"answered {answer}, expected {possible} ({former})"
        if answer in ("created", "replaced"):
            task.handles.append(id)
            if answer == "replaced":
                assert former is not None
                former.state = "replaced"
            self.model.accept(task)

    @rule(pick=picks, nth=picks, names_lane=st.booleans(), fault=faults)
    @precondition(lambda self: self.model.tasks)
    def cancel(self, pick: int, nth: int, names_lane: bool, fault: Fault) -> None:
        task = self._some(pick)
        if not task.handles:
            return
        handle = task.handles[nth % len(task.handles)]
        target = self.model.by_id.get(handle, task)
        lane = target.lane if target.id is not None and names_lane else None
        self.road.expect(fault)
        try:
            answer = self.run(self.client.cancel(handle, lane=lane))
        except StoreError:
            self._expected_failure()
            if target.state == "pending":
                target.unsure("cancelled")
            return
        note(f"  task {target.n}: {answer}")
        if answer == "cancelled":
            assert target.state in ("pending", "cancelled"), f"cancelled, but it was {target}"
            target.state = "cancelled"
        else:
            assert target.state != "pending", f"answered {answer} for {target}"

    @rule(pick=picks, nth=picks, delay=dues, fault=faults)
    @precondition(lambda self: self.model.tasks)
    def reschedule(self, pick: int, nth: int, delay: int, fault: Fault) -> None:
        task = self._some(pick)
        if not task.handles:
            return
        handle = task.handles[nth % len(task.handles)]
        target = self.model.by_id.get(handle, task)
        due_ms = self.clock.now_ms() + delay
        target.late = target.late or delay < 0
        self.road.expect(fault)
        try:
            moved = self.run(self.client.reschedule(handle, at=due_ms))
        except (Conflict, NotFound):
            assert target.state != "pending" or self.road.failed, f"not moved: {target}"
            return
        except StoreError:
            self._expected_failure()
            target.moves_to = due_ms if target.state == "pending" else None
            return
        assert target.state == "pending", f"moved, but it was {target}"
        self.model.move(target, due_ms)
        if moved.id not in target.handles:
            target.handles.append(moved.id)

    def _some(self, pick: int) -> Known:
        """A task, most likely one that is still open."""
        some = [task.n for task in self.model.open()] * 4 + sorted(self.model.tasks)
        return self.model.tasks[some[pick % len(some)]]

    def _expected_failure(self) -> None:
        assert self.road.failed, "a call failed although nothing was wrong"

    @rule(lane=st.sampled_from(["left", "right", None]))
    def pause(self, lane: str | None) -> None:
        """A lane, or everything. Nodes hear of it in their next turn."""
        self.run(self.client.pause(lane=lane))
        self.model.pause(lane)

    @rule(pick=picks)
    @precondition(lambda self: self.model.paused)
    def resume(self, pick: int) -> None:
        lane = sorted(self.model.paused, key=str)[pick % len(self.model.paused)]
        assert self.run(self.client.resume(lane=lane))
        self.model.paused.discard(lane)

    # -- what nodes do -----------------------------------------------------------------------------------------

    @rule(ms=st.one_of(st.integers(1, 3_000), st.sampled_from([10_000, 70_000, 3_600_000])))
    def advance(self, ms: int) -> None:
        self.clock.advance(ms=ms)

    @rule(ms=st.integers(1, 3_000), answers=outcomes)
    def time_passes(self, ms: int, answers: list[Outcome]) -> None:
        """The ordinary case: the owner of the partitions fires due tasks."""
        self.clock.advance(ms=ms)
        owner = next((i for i, node in enumerate(self.nodes) if node.engine.owned), 0)
        self.turn(owner, answers, None, False)

    @rule(which=st.integers(0, 1), answers=outcomes, fault=faults, meddle=st.booleans())
    def turn(self, which: int, answers: list[Outcome], fault: Fault, meddle: bool) -> None:
        """A node does everything there is to do."""
        node = self.nodes[which]
        node.road.expect(fault)
        self.road.expect(None)
        self.sink.answers = list(answers)
        self.sink.during = self._cancel_too_late if meddle else None
        self._turn(node, clean=fault is None)

    async def _cancel_too_late(self, delivery: Delivery) -> None:
        n = delivery.value()["n"]
        handles = self.model.tasks[n].handles
        if handles and not self.model.tasks[n].copies:
            assert await self.client.cancel(handles[-1]) != "cancelled", f"task {n} is under way"

    def _turn(self, node: Node, *, clean: bool) -> None:
        # A begin that was sent and not answered is sent again, even if tasks were paused since.
        self.model.hears = all(one.unanswered is None for one in node.engine.owned.values())
        try:
            for _ in range(TURNS):
                self._watch(node, turn(node.engine))
        except StoreError:
            assert node.road.failed, "a turn failed although nothing was wrong"
        finally:
            self.model.hears = False
        if node.road.failed or not clean:
            self._anything_may_repeat()
            return
        if node.owns_all:
            self._resolve()
            left = list(self.model.overdue(self.clock.now_ms()))
            assert not left, f"due and not delivered: {left}"

    def _watch(self, node: Node, work: Coroutine[Any, Any, Any]) -> None:
        takeovers = node.engine.keeper.takeovers

        async def watched() -> None:
            await work
            if node.engine.keeper.takeovers != takeovers:
                note("  took over")

        # A new owner delivers again what was under way when the former one went.
        if not node.owns_all:
            self._anything_may_repeat()
        errors: list[BaseException] = []

        def seen(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            errors.append(context.get("exception") or AssertionError(context["message"]))

        self.runner.get_loop().set_exception_handler(seen)
        self.run(watched())
        assert not errors, errors

    def _anything_may_repeat(self) -> None:
        for task in self.model.tasks.values():
            if task.state == "fired":
                task.may_repeat = True

    @rule(which=st.integers(0, 1), answers=outcomes)
    def write_with_old_state(self, which: int, answers: list[Outcome]) -> None:
        """A node that does not know yet that it lost its partitions continues to write."""
        node = self.nodes[which]
        node.road.expect(None)
        self.sink.answers, self.sink.during = list(answers), None

        async def write() -> None:
            await node.engine.dispatcher.step()
            await node.engine.dispatcher.drain()
            await node.engine.sweeper.drop_finished()

        self._anything_may_repeat()
        self.run(write())

    @rule()
    def let_leases_lapse(self) -> None:
        self.clock.advance(seconds=LEASE_S + 1)
        self._anything_may_repeat()

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        self._anything_may_repeat()
        self.nodes[which].fresh()

    @rule(which=st.integers(0, 1), fault=faults)
    def stop_cleanly(self, which: int, fault: Fault) -> None:
        node = self.nodes[which]
        node.road.expect(fault)
        self.sink.answers, self.sink.during = [], None
        try:
            assert self.run(node.engine.stop()) or node.road.failed
        except StoreError:
            assert node.road.failed
        node.fresh()
        self._anything_may_repeat()

    @rule(which=st.integers(0, 1), steps=st.integers(1, 40))
    def sweep_ids(self, which: int, steps: int) -> None:
        node = self.nodes[which]
        node.road.expect(None)
        for _ in range(steps):
            self.run(node.engine.sweeper.step())

    # -- what befalls the server ---------------------------------------------------------------------------------

    @rule()
    def forget_scripts(self) -> None:
        self.server.call("SCRIPT", "FLUSH")

    @rule(back=st.integers(1, 40))
    @precondition(lambda self: self.sent)
    def late_duplicate(self, back: int) -> None:
        """A command that was executed long ago arrives once more."""
        command = self.sent[-min(back, len(self.sent))]
        # The server's own clock is always that of the moment; ours travels as the last argument.
        self.server.call(*command[:-1], self.clock.now_ms() * 1000)
        self._anything_may_repeat()
        if command[1] in PUTS:
            # An id that was cancelled, or forgotten after its window, is free: the put is a new one.
            for task in self.model.tasks.values():
                if task.id is not None and not task.open:
                    task.unsure("pending")

    @rule()
    def kill_and_restart(self) -> None:
        self.server.kill()
        self.server.start()
        self.run(self._notice_restart())

    async def _notice_restart(self) -> None:
        for store in (self.client.store, *(node.store for node in self.nodes)):
            [primary] = store.servers.all()
            await _reopen(primary)

    # -- after every step ----------------------------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        if not self.nodes:
            return
        for road in (self.road, *(node.road for node in self.nodes)):
            road.expect(None)
        self._resolve()
        self.run(self._compare())

    def _resolve(self) -> None:
        rows: dict[int, list[Row]] = {}
        idhs: dict[int, bytes] = {}
        places = self._places()
        found = [one for rows_of_one in self._rows_of(places) for one in rows_of_one]
        for n, row in found:
            if n:
                rows.setdefault(n, []).append(row)
                idhs[n] = row.idh
        open_rows = Counter(row.partition for _, row in found)
        partitions = self.keys.partitions
        replies = self.server.calls(
            [("HKEYS", names.dead) for names in partitions] + [("HMGET", names.n, *_COUNTED) for names in partitions]
        )
        dead = {dead_letter for dead_letters in replies[:PARTITIONS] for dead_letter in dead_letters}
        for p, counted in enumerate(replies[PARTITIONS:]):
            counts = [int(c or 0) for c in counted]
            assert counts[0] == open_rows[p] + sum(counts[1:]), f"partition {p}: {counts}, {open_rows[p]} open"
        self.model.resolve(rows, dead, idhs)
        for task in self.model.tasks.values():
            if task.id is not None and task.open:
                self.model.by_id[task.id] = task

    def _places(self) -> list[tuple[int, Slice]]:
        """Every slice there is, and its partition."""
        replies = self.server.calls([("ZRANGE", names.slices, 0, -1) for names in self.keys.partitions])
        return [(p, Slice.parse(name)) for p, names in enumerate(replies) for name in names]

    def _rows_of(self, places: Sequence[tuple[int, Slice]]) -> list[list[tuple[int, Row]]]:
        """The open rows of each, all read at once: this is done after every step."""
        reads: list[RedisCommand] = []
        for p, place in places:
            s, f, d, x = self.keys.partitions[p].slice_keys(place.name)
            reads += [("GET", f), ("GET", d), ("GET", x), ("LRANGE", s, 0, -1)]
        replies = self.server.calls(reads) if reads else []
        return [list(_open_rows(*places[at // 4], *replies[at : at + 4])) for at in range(0, len(replies), 4)]

    async def _compare(self) -> None:
        await self._compare_states()
        await self._compare_lists()

    async def _compare_states(self) -> None:
        asked = [
            (task, handle)
            for task in self.model.tasks.values()
            for handle in task.handles
            if task.id is None or self.model.by_id.get(task.id) is task
        ]
        answers = await asyncio.gather(*(self.client.get(handle) for _, handle in asked))
        for (task, handle), info in zip(asked, answers, strict=True):
            what = f"get({handle!r}) says {info}, the model {task}"
            assert info.state in SURE[task.state], what
            if info.state == "pending":
                assert (info.due_ms, info.attempt) == (task.due_ms, task.attempt), what
                assert (info.payload, info.lane) == ({"n": task.n}, task.lane), what

    async def _compare_lists(self) -> None:
        listed = []
        cursor = None
        while True:
            page = await self.client.list(limit=4, cursor=cursor)
            listed += page.tasks
            cursor = page.next
            if cursor is None:
                break
        held = self._held()
        assert [info.payload["n"] for info in listed[: len(held)]] == held, "held tasks are not the first of the list"
        others = listed[len(held) :]
        dues = [info.due_ms or 0 for info in others if not self.model.tasks[info.payload["n"]].late]
        assert dues == sorted(dues), "the list is not in due order"
        shown = sorted({(info.payload["n"], info.due_ms) for info in listed})
        waiting = [one for one in self.model.tasks.values() if one.state == "pending" and not one.copies]
        copies = {one.n for one in self.model.tasks.values() if one.copies}
        assert [row for row in shown if row[0] not in copies] == sorted((one.n, one.due_ms) for one in waiting)
        assert len(listed) == len(shown) or copies, "the list shows a task twice"

    def _held(self) -> list[int]:
        """Return the tasks in hold slices as lists show them: slice by slice."""
        holds = sorted((p, place) for p, place in self._places() if place.is_hold)
        return [n for rows in self._rows_of(holds) for n, row in rows if not row.fired]


_COUNTED = ("accepted", "done", "cancelled", "replaced", "dead")


def _open_rows(
    p: int, place: Slice, fired: bytes | None, done: bytes | None, gone: bytes | None, listed: list[bytes]
) -> Iterator[tuple[int, Row]]:
    """Return the tasks of one slice that are neither done nor gone, with their numbers."""
    for i, row in enumerate(listed):
        if _bit(done or b"", i) or _bit(gone or b"", i):
            continue
        if is_tombstone(row):
            assert len(row) > 4, "a tombstone that nobody counts as cancelled or replaced"
            yield 0, Row(p, row[5:HEADER_BYTES], 0, 0, fired=False)  # the copy of a task that was sent again
            continue
        body = decode(row)
        due_ms = body.due_ms
        if due_ms is None:
            due_ms = place.from_ms + int.from_bytes(row[:4], "big")
        n = int(body.payload[5:-1])
        yield n, Row(p, row[5:HEADER_BYTES], due_ms, body.attempt, _bit(fired or b"", i))


def _bit(bits: bytes, index: int) -> bool:
    byte = index >> 3
    return byte < len(bits) and bits[byte] >> (7 - index % 8) & 1 == 1


async def _reopen(primary: Primary) -> None:
    """Let the link see that its connection ended: what comes next goes over a new one."""
    for _ in range(100):
        try:
            await primary.pipeline([("PING",)])
            return
        except Unavailable:
            await asyncio.sleep(0)


# With room for four tasks only, everything is read in windows. That still finds flaws in long searches.
ROOM = [200_000, 4] if "MAINSPRING_SCARCE" in os.environ else [200_000]

PROFILE = settings(
    max_examples=int(os.environ.get("MAINSPRING_EXAMPLES", "40")),
    stateful_step_count=30,
    deadline=None,
    derandomize="CI" in os.environ and "MAINSPRING_EXAMPLES" not in os.environ,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is bounded is bounded tightly, and chance is in Hypothesis's hands."""
    monkeypatch.setattr(lookahead, "CHUNK_ROWS", 4)
    monkeypatch.setattr(lookahead, "CHUNKS_AT_ONCE", (2, 4))
    monkeypatch.setattr(lookahead, "SLICES_LISTED", 4)
    monkeypatch.setattr(put, "CROWDED", 5)
    monkeypatch.setattr(dispatcher, "COMMIT_WAIT_S", 0.0)  # no time of its own: every run takes the same steps
    # A handful of tasks goes the ways that are meant for many.
    monkeypatch.setattr(put_ids, "MANY", 2)
    monkeypatch.setattr(holds_module, "FEW_BEHIND", 0)
    monkeypatch.setattr(partition, "MOST_MOVES", 2)
    monkeypatch.setattr(lookahead, "LANE_WINDOW", 2)
    monkeypatch.setattr(cancel, "DENSE_TASKS", 1)
    monkeypatch.setattr(encode, "FEW", 1)
    monkeypatch.setattr(encode, "STRETCH", 2)
    monkeypatch.setattr(encode, "os", SimpleNamespace(urandom=random.randbytes))


@pytest.mark.timeout(0 if os.environ.get("MAINSPRING_EXAMPLES") else 400)
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.parametrize("tasks_held", ROOM, ids=lambda held: f"room for {held}")
def test_the_server_and_the_model_agree_on_every_step(
    crowded: None, tasks_held: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = settings(PROFILE, max_examples=times * PROFILE.max_examples)
    monkeypatch.setattr(Timeline, "reach", Reach(tasks=tasks_held))
    with standalone("valkey", aof=True, extra_config={"appendfsync": "always"}) as server:
        Timeline.server = server
        run_state_machine_as_test(Timeline, settings=profile)
