"""Notices of recorded runs and of states, and the duties of the leader."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest

from mainspring.engine.partition import Partition
from mainspring.model.delivery import Dead, Response
from mainspring.model.errors import Conflict, InvalidInput, NotFound, Unavailable
from mainspring.model.ids import idh_of
from mainspring.model.notice import Beats, Channels
from mainspring.model.run import Run, RunDetails, RunRecord
from mainspring.model.workers import WorkerInfo
from mainspring.node import notifier
from mainspring.node.notifier import NoticeOptions, Notifier, NotifySink
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.store import members
from mainspring.store import notices as store_notices
from mainspring.store.keys import partition_of
from mainspring.store.notices import ENTRIES_AT_ONCE, SETTLED_MS, Notes, Notices
from mainspring.store.owner import fire
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.testing.ticker import Ticker
from tests.support.web_receiver import Receiver, receiving

Tickers = Callable[..., Awaitable[Ticker]]


class Scene:
    """A node with a notifier and a receiver of its notices; runs are recorded as an owner records them."""

    def __init__(self, ticker: Ticker, receiver: Receiver, channels: Channels) -> None:
        self.ticker, self.receiver, self.channels = ticker, receiver, channels
        self.unavailable: set[str] = set()
        self.notifier = self.fresh()

    def fresh(self, *, leads: bool = False, **options: Any) -> Notifier:
        """Return the notifier of a node that has just started."""
        given = NoticeOptions(self.channels, **options)
        owned = self.ticker.engine.owned
        return Notifier(self.ticker.store, given, owned, lambda: self.unavailable, lambda: leads)

    def partition_of(self, name: str) -> Partition:
        return self.ticker.engine.owned[partition_of(name, len(self.ticker.store.keys))]

    async def record(self, *records: RunRecord | Run, partition: str = "nightly", settled: bool = True) -> None:
        owner = self.partition_of(partition)
        if settled:
            self.ticker.clock.advance(ms=1)
        runs = [one if isinstance(one, Run) else Run(one) for one in records]
        work = fire.Commit(owner.number, owner.token, owner.seq + 1, 0, 0, [], [], [], [], runs=runs)
        assert await fire.commit(self.ticker.store, work) == "ok"
        owner.seq += 1
        if settled:
            self.ticker.clock.advance(ms=SETTLED_MS + 1)

    def run(self, end: Any = "done", schedule: str = "nightly", **more: Any) -> RunRecord:
        now_ms = self.ticker.clock.now_ms()
        id = f"{schedule}@{now_ms}"
        fields: dict[str, Any] = {
            "idh": idh_of(id), "attempt": 1, "due_ms": now_ms - 20, "began_ms": now_ms - 10, "ended_ms": now_ms,
            "target": "https://shop.example/run", "by": "node-1", "id": id, "planned_ms": now_ms,
        }  # fmt: skip
        return RunRecord(end=end, **fields | more)

    async def look(self, one: Notifier | None = None) -> None:
        """Let the notifier look until nothing is left, and what it puts go out."""
        while await (one or self.notifier).step() == 0.0:
            pass
        await self.ticker.turn()

    async def minute(self) -> None:
        await self.ticker.advance(minutes=1)

    @property
    def titles(self) -> list[str]:
        return [json.loads(one.body)["title"] for one in self.receiver.requests]

    @property
    def notices(self) -> list[dict[str, Any]]:
        return [notice for one in self.receiver.requests for notice in json.loads(one.body)["notices"]]


@pytest.fixture
def receiver() -> Iterable[Receiver]:
    with receiving() as one:
        yield one


@pytest.fixture
async def http() -> AsyncIterator[HttpSink]:
    made = HttpSink(HttpOptions(allow=("127.0.0.0/8",)))
    yield made
    await made.aclose()


@pytest.fixture
async def stage(tickers: Tickers, store: Store, receiver: Receiver, http: HttpSink) -> Callable[..., Awaitable[Scene]]:
    async def make(handlers: Any = None, workers: bool = False, **table: Any) -> Scene:
        channels = Channels.read({"ops": {"url": receiver.url, **table}})
        sink = NotifySink(channels, http, "shop")
        ticker = await tickers(sinks={"notify": sink}, handlers=handlers, workers=workers)
        sink.notices = Notices(ticker.store)
        await ticker.turn()
        scene = Scene(ticker, receiver, channels)
        await scene.look()
        return scene

    return make


@pytest.fixture
async def scene(stage: Callable[..., Awaitable[Scene]]) -> Scene:
    return await stage()


Stage = Callable[..., Awaitable[Scene]]


# -- runs ------------------------------------------------------------------------------------------------------------


async def test_a_schedule_that_fails_and_recovers_causes_one_notice_each(scene: Scene, store: Store) -> None:
    for end in ("done", "retry", "dead", "done", "done"):
        await scene.record(scene.run(end, reason="HTTP 500"))
        await scene.look()
        await scene.minute()
    assert scene.titles == ["schedule:nightly failed", "schedule:nightly recovered"]
    assert not (await verify(store)).reported


async def test_the_notice_has_the_answer_of_the_receiver(scene: Scene) -> None:
    response = Response(503, (("retry-after", "7"),), b"too <busy>", 12)
    await scene.record(Run(scene.run("dead", code=503, reason="HTTP 503"), RunDetails(response)))
    await scene.look()
    await scene.minute()
    [one] = scene.notices
    assert (one["code"], one["body"], one["headers"]) == (503, "too <busy>", [["retry-after", "7"]])
    assert one["task"].startswith("nightly@")


async def test_runs_recorded_before_there_was_a_channel_cause_no_notices(stage: Stage) -> None:
    scene = await stage()
    keys = scene.ticker.store.keys
    await scene.ticker.store.run_one(keys.slot, [("DEL", keys.notes)])
    await scene.record(scene.run("dead", "weekly"), partition="weekly")
    new = scene.fresh()
    await scene.look(new)
    await scene.record(scene.run("dead", "weekly"), partition="weekly")
    await scene.look(new)
    await scene.minute()
    assert [one["count"] for one in scene.notices] == [1]


async def test_a_success_that_was_recorded_between_two_looks_ends_the_episode(scene: Scene) -> None:
    await scene.record(scene.run("done"))
    await scene.record(scene.run("dead"))
    await scene.record(scene.run("done"))
    await scene.record(scene.run("dead"), scene.run("done"))
    await scene.look()
    await scene.minute()
    assert sorted(one["kind"] for one in scene.notices) == ["failed", "failed", "recovered", "recovered"]


async def test_a_millisecond_that_is_not_over_is_not_followed_yet(scene: Scene) -> None:
    """A node that dies may have seen only some of its runs, and its successor sees them all, in another order."""
    await scene.record(scene.run("dead"))
    await scene.look()
    at_ms = scene.ticker.clock.now_ms()
    await scene.record(scene.run("done", ended_ms=at_ms), settled=False)
    await scene.look()  # a node that follows it here ends the episode
    await scene.record(scene.run("lost", ended_ms=at_ms - 1), settled=False)
    scene.ticker.clock.advance(ms=SETTLED_MS + 1)
    await scene.look()
    await scene.minute()
    assert sorted(one["kind"] for one in scene.notices) == ["failed", "recovered"]


async def test_many_runs_are_followed_in_the_order_in_which_they_were_recorded(scene: Scene) -> None:
    for number in range(3 * ENTRIES_AT_ONCE):
        await scene.record(scene.run("dead" if number % 2 == 0 else "done"))
    await scene.look()
    await scene.minute()
    counts = json.loads(scene.receiver.requests[0].body)["counts"]
    assert counts == {"failed": 3 * ENTRIES_AT_ONCE // 2, "recovered": 3 * ENTRIES_AT_ONCE // 2}


async def test_the_next_owner_continues_the_episode(stage: Stage) -> None:
    scene = await stage(after=2)
    await scene.record(scene.run("dead"))
    await scene.look()
    successor = scene.fresh()
    await scene.record(scene.run("dead"))
    await scene.look(successor)
    await scene.minute()
    assert scene.titles == ["schedule:nightly failed"]
    assert scene.notices[0]["count"] == 2


class Losing(Notices):
    """Loses one reply: the server has done it, and the node does not know."""

    def __init__(self, store: Store, call: str, times: int = 1) -> None:
        super().__init__(store)
        self.call, self.left = call, times

    def _lose(self, call: str) -> None:
        if call == self.call and self.left:
            self.left -= 1
            raise Unavailable("the reply was lost", sent=True)

    async def put(self, tasks: Any, on_conflict: Any = "keep") -> None:
        await super().put(tasks, on_conflict)
        if tasks:
            self._lose("put")

    async def write_notes(self, notes: Any, changed: Any, *where: Any) -> Notes | None:
        written = await super().write_notes(notes, changed, *where)
        if changed:
            self._lose("write")
        return written


@pytest.mark.parametrize("call", ["put", "write"])
async def test_a_node_that_dies_between_notice_and_cursor_causes_one_notice(scene: Scene, call: str) -> None:
    for end in ("dead", "done"):
        await scene.record(scene.run(end))
        scene.notifier._notices = Losing(scene.ticker.store, call)
        with pytest.raises(Unavailable):
            await scene.notifier.step()
        scene.notifier = scene.fresh()
        await scene.look()
        await scene.minute()
    assert scene.titles == ["schedule:nightly failed", "schedule:nightly recovered"]


async def test_two_nodes_that_both_believe_to_own_a_partition_cause_one_notice(scene: Scene) -> None:
    other = scene.fresh()
    await scene.look(other)  # it has read the cursor
    await scene.record(scene.run("dead"))
    await scene.look()
    await scene.look(other)
    await scene.record(scene.run("done"))
    await scene.look(other)
    await scene.look()
    await scene.minute()
    assert [one["kind"] for one in scene.notices] == ["failed", "recovered"]


async def test_ten_thousand_schedules_that_fail_at_once_are_one_message(stage: Stage) -> None:
    scene = await stage()
    many = 10_000
    by_partition: dict[int, list[str]] = {}
    for number in range(many):
        name = f"s{number}"
        by_partition.setdefault(scene.partition_of(name).number, []).append(name)
    for names in by_partition.values():
        for first in range(0, len(names), 500):
            await scene.record(*(scene.run("dead", name) for name in names[first : first + 500]), partition=names[0])
    await scene.look()
    await scene.minute()
    await scene.minute()
    assert scene.titles == ["10,000 failed"]


async def test_without_channels_nothing_is_read_or_written(scene: Scene, store: Store) -> None:
    silent = Notifier(store, NoticeOptions(), scene.ticker.engine.owned, lambda: scene.unavailable, lambda: True)
    before = await Notices(store).read_notes(Notes())
    await scene.record(scene.run("dead"))
    assert await silent.step() > 1
    assert await Notices(store).read_notes(Notes()) == before


async def test_a_receiver_with_tasks_in_many_partitions_has_one_episode(scene: Scene) -> None:
    second = scene.fresh()
    lost = ("dead", "dead", "dead")
    for number, end in enumerate((*lost, "done")):
        name = f"order-{number}"
        await scene.record(scene.run(end, name, planned_ms=None), partition=name)
        await scene.look(second if number % 2 else None)
    await scene.minute()
    assert len({scene.partition_of(f"order-{number}").number for number in range(4)}) > 2
    assert [(one["kind"], one["count"]) for one in scene.notices] == [("dead", 1), ("recovered", 3)]


async def test_a_success_of_another_partition_that_ended_before_the_failure_ends_nothing(scene: Scene) -> None:
    before_ms = scene.ticker.clock.now_ms()
    await scene.record(scene.run("dead", "order-1", planned_ms=None), partition="order-1")
    await scene.look()
    early = scene.run("done", "order-2", planned_ms=None, ended_ms=before_ms - 5)
    await scene.record(early, partition="order-2")
    await scene.look()
    await scene.minute()
    assert scene.titles == ["https://shop.example with a dead task"]


async def test_two_nodes_that_write_at_once_lose_no_decision(scene: Scene) -> None:
    other = scene.fresh()
    await scene.look(other)
    for number in range(8):
        name = f"order-{number}"
        await scene.record(scene.run("dead", name, planned_ms=None), partition=name)

    async def follow(one: Notifier) -> None:
        while await one.step() == 0.0:
            pass

    await asyncio.gather(follow(scene.notifier), follow(other))
    await scene.ticker.turn()
    [episode] = (await Notices(scene.ticker.store).read_notes(Notes())).episodes.values()
    assert episode.failures == 8


async def test_episodes_that_nothing_will_end_are_forgotten(scene: Scene) -> None:
    leader = scene.fresh(leads=True)
    await scene.record(scene.run("dead"), scene.run("dead", "order-1", planned_ms=None))
    await scene.look(leader)
    left: list[int] = []
    for days in (2, 40):
        scene.ticker.clock.advance(seconds=days * 86_400)
        await scene.ticker.turn()
        await scene.look(leader)
        left.append(len((await Notices(scene.ticker.store).read_notes(Notes())).episodes))
    assert left == [1, 0]


async def test_runs_that_cannot_be_read_do_not_stop_the_others(scene: Scene) -> None:
    partition = scene.partition_of("nightly")
    keys = scene.ticker.store.keys.partitions[partition.number]
    await scene.record(scene.run("done"))
    last = (await scene.ticker.store.run_one(keys.slot, [("HGET", keys.runs_n, "last")]))[0]
    later = last.split(b"-")[0] + b"-50"
    await scene.ticker.store.run_one(keys.slot, [("XADD", keys.failed_runs, later, "r", b"\x91\xc0")])
    await scene.record(scene.run("dead"))
    await scene.look()
    await scene.minute()
    assert scene.titles == ["schedule:nightly failed"]


async def test_a_small_limit_of_payloads_does_not_stop_notices(scene: Scene) -> None:
    await scene.ticker.store.set_shared("max_payload_bytes", "10")
    response = Response(500, tuple((f"x-{n}" * 50, "\x07" * 500) for n in range(50)), b"\x07" * 5_000)
    await scene.record(Run(scene.run("dead", reason="x" * 5_000), RunDetails(response)))
    await scene.look()
    await scene.minute()
    assert scene.titles == ["schedule:nightly failed"]


# -- states that a node sees -----------------------------------------------------------------------------------------


async def test_an_open_breaker_causes_one_notice_for_all_nodes_and_one_at_its_end(scene: Scene) -> None:
    second = scene.fresh()
    scene.unavailable = {"https://shop.example", "notify:ops/digest"}
    await scene.look()
    await scene.look(second)
    await scene.minute()
    assert scene.titles == ["https://shop.example unavailable"]
    scene.unavailable = set()
    await scene.look()
    await scene.look(second)
    await scene.minute()
    assert scene.titles[1:] == ["https://shop.example recovered"]


async def test_schedules_that_try_a_receiver_whose_breaker_is_open_are_not_told_of_one_by_one(stage: Stage) -> None:
    scene = await stage(remind="each")
    scene.unavailable = {"https://shop.example"}
    await scene.look()
    for name in ("nightly", "weekly"):
        await scene.record(scene.run("dead", name), partition=name)  # one run after the other tries whether it works
    await scene.record(scene.run("dead", "other", target="https://elsewhere.example/run"), partition="other")
    await scene.look()
    await scene.minute()
    assert {(one["kind"], one["subject"]) for one in scene.notices} == {
        ("breaker", "https://shop.example"),
        ("failed", "schedule:other"),
    }
    scene.unavailable = set()
    await scene.look()
    await scene.record(scene.run("dead"))
    await scene.record(scene.run("done", "weekly"), partition="weekly")
    await scene.look()
    await scene.minute()
    await scene.minute()
    assert [(one["kind"], one["subject"], one["count"]) for one in scene.notices[2:]] == [
        ("recovered", "https://shop.example", 1),
        ("failed", "schedule:nightly", 2),
    ]


async def test_a_state_is_over_at_once_however_many_successes_end_an_episode_of_runs(stage: Stage) -> None:
    scene = await stage(recover_after=3)
    scene.unavailable = {"https://shop.example"}
    await scene.look()
    await scene.minute()
    scene.unavailable = set()
    await scene.look()
    await scene.minute()
    assert scene.titles == ["https://shop.example unavailable", "https://shop.example recovered"]


async def test_a_breaker_whose_node_died_is_over_when_no_node_has_it_open(scene: Scene) -> None:
    leader = scene.fresh(leads=True)
    scene.unavailable = {"https://shop.example"}
    await scene.look(leader)
    for _ in range(5):
        await scene.minute()
        await scene.look(leader)
    assert scene.titles == ["https://shop.example unavailable"]
    scene.unavailable = set()
    leader = scene.fresh(leads=True)  # the other one was killed
    for _ in range(5):
        await scene.look(leader)
        await scene.minute()
    assert scene.titles[1:] == ["https://shop.example recovered"]


async def test_jobs_that_no_worker_takes_cause_a_notice_and_so_does_the_worker_that_comes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await stage(workers=True)
    leader = scene.fresh(leads=True)
    await scene.ticker.client.put("queue:mail/send", 1)
    await scene.ticker.turn()
    # Queues know the server's own time, which no test moves.
    with monkeypatch.context() as patched:
        patched.setattr(notifier, "WAITED_MS", 100 * 366 * 86_400_000)
        await scene.look(leader)
    await scene.minute()
    assert scene.titles == []  # a worker may be starting
    await scene.look(leader)
    await scene.minute()
    assert scene.titles == ["queue:mail without a worker"]
    about = WorkerInfo(id="w", queues={"mail": 1}, lease_ms=600_000)
    await members.worker_beat(scene.ticker.store, "w/1", about)
    await scene.look(leader)
    await scene.minute()
    assert scene.titles[1:] == ["queue:mail recovered"]


async def test_a_target_that_answers_410_causes_a_notice(stage: Stage) -> None:
    scene = await stage(handlers={"target": lambda _: Dead("HTTP 410 Gone", disables=True)})
    leader = scene.fresh(leads=True)
    await scene.ticker.client.put("target:shop", 1)
    await scene.ticker.turn()
    await scene.ticker.engine.pauses.flush()
    scene.ticker.clock.advance(ms=SETTLED_MS + 1)
    await scene.look(leader)
    await scene.minute()
    assert scene.titles == ["1 with a dead task, 1 stopped"]
    await scene.ticker.client.pause(target="target:other", mode="drop", reason="a person's own")
    assert await scene.ticker.client.resume(target="target:shop")
    scene.ticker.clock.advance(seconds=60)
    await scene.look(leader)
    await scene.minute()
    assert scene.titles[1:] == ["target:shop recovered"]


# -- as the leader -----------------------------------------------------------------------------------------------------


async def test_the_leader_calls_the_watchdog_once_a_minute_through_a_task(scene: Scene) -> None:
    leader = scene.fresh(leads=True, watchdog=True)
    follower = scene.fresh(watchdog=True)
    for _ in range(12):
        await scene.look(follower)
        assert await leader.step() > 0
        await scene.ticker.advance(seconds=15)
    calls = [one for one in scene.ticker.deliveries if one.target == "target:mainspring-watchdog"]
    assert len(calls) in (3, 4)
    assert len({one.id for one in calls}) == len(calls)


async def test_a_caller_who_takes_the_ids_of_the_watchdogs_calls_does_not_stop_them(scene: Scene) -> None:
    leader = scene.fresh(leads=True, watchdog=True)
    client = scene.ticker.client
    minute = client.store.clock.now_ms() // 60_000
    for later in range(5):
        await client.put("log:", id=f"watchdog/{minute + later}", after="1h")
    for _ in range(12):
        assert await leader.step() > 0
        await scene.ticker.advance(seconds=15)
    assert len([one for one in scene.ticker.deliveries if one.target == "target:mainspring-watchdog"]) in (3, 4)


async def test_a_beat_of_the_settings_is_missed_even_if_it_never_came(stage: Stage) -> None:
    scene = await stage()
    leader = scene.fresh(leads=True, beats=Beats.read({"backup": {"every": "10m", "grace": "0s"}}))
    for _ in range(12):
        await scene.look(leader)
        await scene.minute()
    assert scene.titles == ["beat:backup missed"]
    assert scene.notices[0]["reason"] == "it never came"
    await scene.ticker.client.beat("backup")
    for _ in range(3):
        await scene.look(leader)
        await scene.minute()
    assert scene.titles[1:] == ["beat:backup recovered"]


async def test_beats_that_come_are_quiet_one_that_does_not_is_missed_and_the_next_recovers(scene: Scene) -> None:
    leader, client = scene.fresh(leads=True), scene.ticker.client
    await client.beat("backup", every="10m", grace="1m")
    for minute in range(56):
        if minute in (10, 20, 30):
            await client.beat("backup")
        await scene.look(leader)
        await scene.minute()
        expected = [] if minute < 42 else ["beat:backup missed"]
        assert scene.titles == expected, minute
    leader = scene.fresh(leads=True)  # the next leader continues with what is stored
    await client.beat("backup")
    await scene.look(leader)
    await scene.minute()
    await scene.minute()
    assert scene.titles == ["beat:backup missed", "beat:backup recovered"]


async def test_a_missing_beat_is_reported_again_if_reminders_are_set(stage: Stage) -> None:
    scene = await stage(remind="1h")
    leader = scene.fresh(leads=True)
    await scene.ticker.client.beat("backup", every="10m", grace="0s")
    for _ in range(205):
        await scene.look(leader)
        await scene.minute()
    assert scene.titles == ["beat:backup missed"] * 4


async def test_a_beat_that_is_removed_is_neither_missed_nor_recovered(scene: Scene) -> None:
    leader, client = scene.fresh(leads=True), scene.ticker.client
    for name in ("late", "early"):
        await client.beat(name, every="1m", grace="0s")
    assert await client.remove_beat("early")
    assert not await client.remove_beat("early")
    for minute in range(6):
        if minute == 4:
            assert await client.remove_beat("late")
        await scene.look(leader)
        await scene.minute()
    assert scene.titles == ["beat:late missed"]
    assert await client.beats() == []
    assert (await Notices(scene.ticker.store).read_notes(Notes())).episodes == {}


async def test_a_beat_without_an_expected_time_is_refused(scene: Scene) -> None:
    client = scene.ticker.client
    with pytest.raises(NotFound, match="say when it is expected"):
        await client.beat("backup")
    with pytest.raises(InvalidInput, match="give one of them"):
        await client.beat("backup", every="1h", cron="* * * * *")
    first = await client.beat("backup", every="1h")
    scene.ticker.clock.advance(seconds=1)
    assert (await client.beat("backup")).deadline_ms == first.deadline_ms + 1_000
    with pytest.raises(InvalidInput, match="128"):
        await client.beat("b" * 129, every="1h")


async def test_beats_are_limited_in_number(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_notices, "MOST_BEATS", 2)
    client = scene.ticker.client
    for name in "ab":
        await client.beat(name, every="1h")
    with pytest.raises(Conflict, match="2 beats are watched already"):
        await client.beat("c", every="1h")
    await client.beat("a")


# -- with a real engine --------------------------------------------------------------------------------------------


async def test_runs_of_an_engine_cause_notices(stage: Stage) -> None:
    answers: list[Any] = [Dead("HTTP 500"), Dead("HTTP 500"), None, None]
    scene = await stage(handlers={"log": lambda _: answers.pop(0)})
    await scene.ticker.client.schedules.add("poll", every="1m", target="log:")
    for _ in range(4):
        await scene.minute()
        await scene.look()
    await scene.minute()
    assert scene.titles == ["schedule:poll failed", "schedule:poll recovered"]
    assert scene.notices[0]["reason"] == "HTTP 500"
