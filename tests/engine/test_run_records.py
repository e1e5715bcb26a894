"""Records of a node in the history: each attempt once with its end, and each planned time that did not run with its
reason."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.model.errors import Unavailable
from mainspring.model.retry import RetryPolicy
from mainspring.model.run import LOST, HistoryRules, RunRecord
from mainspring.node.notifier import Forwarder
from mainspring.store.keys import partition_of
from mainspring.store.tasks.find import Finder, resolve
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]
START_MS = 1_800_000_000_000
HOOK = "https://example.com/hook"


def options(**rules: Any) -> EngineOptions:
    retry = RetryPolicy(max_attempts=3, base_ms=5_000, factor=1.0, jitter="none")
    return EngineOptions(node="node-1", retry=retry, history=HistoryRules.read(rules))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


async def history(client: Client, **where: Any) -> list[RunRecord]:
    return [run.record for run in (await client.runs(limit=1_000, **where)).runs]


def answering(*outcomes: Outcome) -> Callable[[Delivery], Outcome]:
    left = list(outcomes)
    return lambda _: left.pop(0) if left else DONE


async def test_each_attempt_is_a_record_and_a_later_success_erases_none(tickers: Tickers) -> None:
    slow = TimeoutError("no answer within 30 s")
    answers = answering(Retry("busy"), Retry(str(slow), error=slow))
    ticker = await tickers(handlers={"https": answers}, options=options())
    await ticker.client.put(HOOK, "payload", id="order-1", lane="a", after="1s")
    await ticker.advance(seconds=30)
    last, second, first = await history(ticker.client, id="order-1", lane="a")
    assert (first.end, first.reason, first.attempt, first.code) == ("retry", "busy", 1, None)
    assert first.next_ms == first.ended_ms + 5_000
    assert (second.end, second.reason, second.attempt, second.code) == ("timeout", str(slow), 2, "TimeoutError")
    assert second.next_ms == second.ended_ms + 5_000
    assert (last.end, last.reason, last.attempt, last.next_ms) == ("done", "", 3, None)
    for one in (first, second, last):
        assert (one.task_id, one.lane, one.target, one.by) == ("order-1", "a", HOOK, "node-1")
        assert (one.due_ms, one.sent_bytes) == (START_MS + 1_000, len(b'"payload"'))
        assert one.due_ms <= one.began_ms <= one.ended_ms
    assert await history(ticker.client, outcome="failed") == [second, first]
    [hour] = (await ticker.client.run_stats(start=START_MS, end=START_MS + 60_000)).stats
    assert (hour.ok, hour.retried, hour.failed) == (1, 2, 0)


async def test_the_last_attempt_may_end_dead_or_by_its_timeout(tickers: Tickers) -> None:
    slow = TimeoutError("no answer")
    answers = {"a": Dead("refused"), "b": Dead("no answer", error=slow)}
    ticker = await tickers(handlers={"https": lambda one: answers[one.id]}, options=options())
    for task_id in answers:
        await ticker.client.put(HOOK, id=task_id, after="1s")
    await ticker.advance(seconds=2)
    assert {one.id: (one.end, one.next_ms) for one in await history(ticker.client)} == {
        "a": ("dead", None), "b": ("timeout", None)
    }  # fmt: skip
    assert [one.id for one in await history(ticker.client, outcome="timeout")] == ["b"]
    [hour] = (await ticker.client.run_stats(start=START_MS, end=START_MS + 60_000)).stats
    assert (hour.ok, hour.retried, hour.failed) == (0, 0, 2)


async def test_the_runs_of_a_schedule_have_their_planned_times(tickers: Tickers, client: Client) -> None:
    ticker = await tickers(options=options())
    await client.schedules.add("nightly", every="1m", target="log:")
    await ticker.advance(minutes=3)
    found = await history(client, schedule="nightly")
    assert [one.planned_ms for one in found] == [START_MS + minute * 60_000 for minute in (3, 2, 1)]
    assert {one.schedule for one in found} == {"nightly"}


@pytest.mark.parametrize("ahead_s", [8, 0])
@pytest.mark.parametrize("told", [True, False])
async def test_a_planned_run_that_is_cancelled_is_one_record(
    tickers: Tickers, client: Client, *, ahead_s: int, told: bool
) -> None:
    """Read by its owner before it was cancelled or not, and by a client that told the schedule or died before."""
    ticker = await tickers(options=options())
    await client.schedules.add("job", every="10s", target="log:")
    await ticker.advance(seconds=ahead_s)
    first = "job@2027-01-15T08:00:10Z"
    if told:
        assert await client.cancel(first) == "cancelled"
    else:
        assert await Finder(client.store).cancel([await resolve(client.store, first, None)]) == ["cancelled"]
    for _ in range(8):
        await ticker.advance(seconds=5)
        await ticker.engine.planner.check(partition_of("job", len(client.store.keys)))
    await ticker.advance(seconds=5)
    found = await history(client, schedule="job", outcome="cancelled")
    assert [(one.planned_ms, one.id) for one in found] == [(START_MS + 10_000, first)]
    view = await client.schedules.get("job")
    assert view is not None
    assert view.not_run == {"cancelled": 1}


async def test_a_planned_run_that_is_cancelled_is_one_record_if_the_reply_to_its_begin_is_lost(
    tickers: Tickers, client: Client
) -> None:
    """The canceller has advanced the schedule and recorded it, and the owner does not hear that it left it alone."""
    ticker = await tickers(options=options())
    await client.schedules.add("job", every="10s", target="log:")
    await ticker.advance(seconds=8)
    first = "job@2027-01-15T08:00:10Z"
    assert await client.cancel(first) == "cancelled"
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=calls("tick"))
        with pytest.raises(Unavailable):
            await ticker.advance(seconds=2)
    await ticker.advance(seconds=20)
    found = await history(client, schedule="job")
    assert [(one.end, one.planned_ms) for one in found] == [
        ("done", START_MS + 30_000), ("done", START_MS + 20_000), ("cancelled", START_MS + 10_000)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "kept"),
    [({}, ["dead", "done"]), ({"https:": "failures"}, ["dead"]), ({"https:": "off"}, []), ({"kafka:": "off"}, None)],
)
async def test_kept_runs_follow_the_rules(tickers: Tickers, rules: dict[str, str], kept: list[str] | None) -> None:
    ticker = await tickers(handlers={"https": answering(DONE, Dead("refused"))}, options=options(**rules))
    for _ in range(2):
        await ticker.client.put(HOOK, after="1s")
        await ticker.advance(seconds=2)
    assert [one.end for one in await history(ticker.client)] == (["dead", "done"] if kept is None else kept)


async def test_only_failures_of_kafka_tasks_are_kept(tickers: Tickers) -> None:
    ticker = await tickers(handlers={"kafka": answering(DONE, Retry("away"))}, options=options())
    for _ in range(2):
        await ticker.client.put("kafka:orders", after="1s")
        await ticker.advance(seconds=2)
    assert [one.end for one in await history(ticker.client)] == ["retry"]


async def deliver_until(ticker: Ticker, count: int) -> None:
    """Take steps until this many deliveries have begun."""
    while len(ticker.deliveries) < count:
        await step(ticker)


async def step(ticker: Ticker) -> None:
    await ticker.engine.lookahead.step()
    await ticker.engine.planner.step()
    await ticker.engine.dispatcher.step()
    await asyncio.sleep(0)


async def test_each_owner_that_dies_in_an_attempt_leaves_a_record_before_the_next_one_begins(
    tickers: Tickers, clock: ManualClock
) -> None:
    stuck = asyncio.Event()

    async def hang(_: Delivery) -> None:
        await stuck.wait()

    client: Client | None = None
    for number in range(3):
        ticker = await tickers(handlers={"kafka": hang}, options=options())
        if client is None:
            client = ticker.client
            await client.put("kafka:a", id="order-1", after="1s")
            await ticker.turn()
            clock.advance(seconds=1)
        else:
            await ticker.engine.keeper.step()
        await deliver_until(ticker, 1)
        assert len(await history(ticker.client)) == number, "it is known before the task goes out again"
        await ticker.crash()
        clock.advance(seconds=6)
    last = await tickers(options=options())
    assert len(await last.turn()) == 1
    found = await history(last.client)
    assert [(one.end, one.attempt, one.reason, one.began_ms) for one in found] == [("lost", 1, LOST, 0)] * 3


# -- what did not run ----------------------------------------------------------------------------------------------


async def test_an_expired_task_is_recorded(tickers: Tickers, client: Client, clock: ManualClock) -> None:
    await client.put("log:", id="order-1", after="1s", expires="5s")
    clock.advance(seconds=60)
    ticker = await tickers(options=options())
    await ticker.turn()
    [one] = await history(client)
    assert (one.task_id, one.end, one.began_ms) == ("order-1", "expired", 0)


async def test_planned_times_that_no_node_was_running_for_are_recorded(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("nightly", every="1m", target="log:")
    clock.advance(seconds=605)
    ticker = await tickers(options=options())
    await ticker.turn()
    done, missed = sorted(await history(client, schedule="nightly"), key=lambda one: one.end)
    assert (done.end, missed.end, missed.reason) == ("done", "missed", "missed: 9 planned times")
    assert await history(client, outcome="missed") == [missed]


async def test_a_run_that_is_skipped_for_the_one_before_is_a_record(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    stuck = asyncio.Event()

    async def hang(_: Delivery) -> None:
        await stuck.wait()

    ticker = await tickers(handlers={"kafka": hang}, options=options())
    await client.schedules.add("nightly", every="1m", target="kafka:a")
    await ticker.turn()
    clock.advance(seconds=60)
    await deliver_until(ticker, 1)
    clock.advance(seconds=60)
    for _ in range(5):
        await step(ticker)
    [one] = await history(client, outcome="skipped")
    assert (one.task_id, one.reason, one.began_ms) == ("nightly@2027-01-15T08:02:00Z", "overlap", 0)
    stuck.set()
    await ticker.turn()
    assert {one.end for one in await history(client, schedule="nightly")} == {"done", "skipped"}


async def test_runs_of_a_paused_schedule_and_of_excluded_days_are_records(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    ticker = await tickers(options=options())
    await client.schedules.add("paused", every="1h", target="log:")
    await client.schedules.pause("paused", mode="drop")
    await client.schedules.add("free", cron="0 12 * * *", timezone="UTC", exclude=["2027-01-16"], target="log:")
    await ticker.advance(hours=50)
    await client.schedules.resume("paused")
    await ticker.advance(hours=2)
    [one] = await history(client, outcome="paused")
    assert (one.schedule, one.reason) == ("paused", "paused: 50 planned times")
    [one] = await history(client, outcome="excluded")
    assert (one.schedule, one.reason) == ("free", "excluded")
    assert (one.task_id, one.planned_ms) == ("free@2027-01-16T12:00:00Z", START_MS + 28 * 3_600_000)


# -- forwarding ----------------------------------------------------------------------------------------------------

ELSEWHERE = "kafka:runs"


async def forward(ticker: Ticker, forwarder: Forwarder | None = None) -> None:
    """Let a node that has just started, or the one given, forward all there is, and what it puts go out."""
    one = forwarder or Forwarder(ticker.store, ticker.engine.owned, ELSEWHERE)
    while await one.step() == 0.0:
        pass
    await ticker.turn()


async def test_every_record_is_forwarded_with_the_id_of_its_run(tickers: Tickers) -> None:
    ticker = await tickers(handlers={"https": answering(Retry("busy"), Dead("refused"))}, options=options())
    forwarder = Forwarder(ticker.store, ticker.engine.owned, ELSEWHERE)
    for number in range(5):
        await ticker.client.put(HOOK, id=f"order-{number}", after="1s")
        await ticker.advance(seconds=10)
        await forward(ticker, forwarder)
    runs = {run.id: run.as_dict() for run in (await ticker.client.runs(limit=100)).runs}
    came = [one for one in ticker.deliveries if one.target == ELSEWHERE]
    assert {one.id: one.value() for one in came} == runs
    assert len(came) == len(runs) == 6
    await forward(ticker, forwarder)
    await forward(ticker)
    assert sum(one.target == ELSEWHERE for one in ticker.deliveries) == 6, "nothing is new"


async def test_a_node_that_dies_while_it_forwards_loses_no_record(tickers: Tickers) -> None:
    ticker = await tickers(handlers={"https": answering(Dead("refused"))}, options=options())
    for _ in range(20):
        await ticker.client.put(HOOK, after="1s")
    await ticker.advance(seconds=2)
    dying = Forwarder(ticker.store, ticker.engine.owned, ELSEWHERE)
    with bad_road(ticker.store) as road:
        road.next("never sent", only=uses("HSET"))  # the tasks are stored, the cursor is not
        with pytest.raises(Unavailable):
            await dying.step()
    await ticker.turn()
    before = sum(one.target == ELSEWHERE for one in ticker.deliveries)
    assert before > 0
    await forward(ticker)
    came = {one.id for one in ticker.deliveries if one.target == ELSEWHERE}
    assert came == {run.id for run in (await ticker.client.runs(limit=100)).runs}


async def test_records_of_the_forwarding_itself_are_not_forwarded(tickers: Tickers) -> None:
    ticker = await tickers(handlers={"kafka": lambda _: Dead("away")}, options=options())
    await ticker.client.put(ELSEWHERE, id="order-1", after="1s")
    await ticker.advance(seconds=2)
    for _ in range(3):
        await forward(ticker)
    [first, *failures] = reversed((await ticker.client.runs()).runs)
    assert [one.record.id for one in failures] == [first.id], "each record goes out once, whatever becomes of it"
