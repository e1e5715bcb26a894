"""Dead letters: found by page and filter, replayed without loss or double, dropped and exported."""

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mainspring.cli.dead import lines_of
from mainspring.client.client import Client
from mainspring.client.dead_letters import FlatDeadLetterCalls
from mainspring.client.sync import SyncClient
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.dead_letter import DeadLetter
from mainspring.model.delivery import Dead, Delivery, Outcome, Retry
from mainspring.model.errors import InvalidInput, Unavailable
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import Task
from mainspring.store.store import Store
from mainspring.store.tasks import dead_letters
from mainspring.store.tasks.dead_letters import DeadLetterLimits
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import TARGET, HandWorker
from tests.support.owner import address_of

Tickers = Callable[..., Awaitable[Ticker]]


def dies(delivery: Delivery) -> Outcome:
    return Dead(f"no {delivery.target}")


@pytest.fixture
def dying(ticker: Ticker) -> Ticker:
    """Everything that is delivered dies, until somebody says otherwise."""
    for scheme in ("log", "kafka", "queue"):
        ticker.answer(scheme, dies)
    return ticker


def heal(ticker: Ticker) -> None:
    for scheme in ("log", "kafka", "queue"):
        ticker.answer(scheme, lambda _: None)


async def pages(client: Client, **options: Any) -> list[list[DeadLetter]]:
    page = await client.dead.list(**options)
    found = [page.letters]
    while page.next is not None:
        page = await client.dead.list(**options, cursor=page.next)
        found.append(page.letters)
    return found


async def ids(client: Client, **options: Any) -> list[str]:
    return [dead_letter.id for dead_letters in await pages(client, **options) for dead_letter in dead_letters]


async def even(store: Store) -> None:
    report = await verify(store)
    assert not report.found, report.reported
    await balance(store)


# -- how long they are kept ---------------------------------------------------------------------------------------


async def buried(ticker: Ticker, *names: str) -> None:
    """One after the other, a second apart; those of lane `l` are in one partition."""
    ticker.answer("log", dies)
    for name in names:
        await ticker.client.put("log:", id=name, lane="l")
        await ticker.advance(seconds=1)


async def test_dead_letters_past_their_age_are_dropped_by_the_owner(
    tickers: Tickers, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    ticker = await tickers(options=EngineOptions(dead_letters=DeadLetterLimits(max_age_ms=60_000)))
    await buried(ticker, "old", "older")
    ticker.clock.advance(seconds=59)
    await buried(ticker, "young")
    await ticker.engine.sweeper.step()
    assert await ids(ticker.client) == ["young"]
    assert ticker.engine.sweeper.dead_letters_dropped == {"age": 2, "number": 0}
    assert "dropped the oldest dead letters: 2 older than dead_letters_max_age, 0 beyond" in caplog.text
    await even(store)
    assert (await balance(store)).dead == 3, "it counts deaths"


async def test_beyond_the_number_the_oldest_dead_letters_are_dropped(
    tickers: Tickers, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    limits = DeadLetterLimits(most=2 * len(store.keys))
    ticker = await tickers(options=EngineOptions(dead_letters=limits))
    await buried(ticker, "a", "b", "c", "d")
    await ticker.engine.sweeper.step()
    assert await ids(ticker.client) == ["d", "c"]
    assert ticker.engine.sweeper.dead_letters_dropped == {"age": 0, "number": 2}
    assert "0 older than dead_letters_max_age, 2 beyond dead_letters_max" in caplog.text
    await even(store)


async def test_many_dead_letters_are_dropped_in_bounded_steps(
    tickers: Tickers, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "AT_ONCE", 3)
    ticker = await tickers(options=EngineOptions(dead_letters=DeadLetterLimits(max_age_ms=1_000)))
    await buried(ticker, *"abcdefg")
    ticker.clock.advance(seconds=30)
    left = []
    while await ticker.engine.sweeper.step() == 0.0:
        left.append(len(await ids(ticker.client)))
    assert (left, await ids(ticker.client)) == ([4, 1], [])
    await even(store)


async def test_without_limits_dead_letters_stay(tickers: Tickers) -> None:
    ticker = await tickers()
    await buried(ticker, "a")
    ticker.clock.advance(seconds=400 * 86_400)
    await ticker.engine.sweeper.step()
    assert await ids(ticker.client) == ["a"]


# -- looking -----------------------------------------------------------------------------------------------------


async def test_dead_letters_are_listed_newest_first_each_once(dying: Ticker) -> None:
    for n in range(40):
        await dying.client.put("log:", n, id=f"t{n:02}", after=f"{n}s")
    await dying.advance(minutes=1)
    expected = [f"t{n:02}" for n in reversed(range(40))]
    for limit in (1, 7, 40, 1000):
        assert await ids(dying.client, limit=limit) == expected


@pytest.mark.parametrize("limit", [1, 9, 100])
async def test_dead_letters_of_one_millisecond_are_neither_skipped_nor_shown_twice(dying: Ticker, limit: int) -> None:
    await dying.client.put_many(Task("log:", n, id=f"t{n}", after="1s") for n in range(150))
    await dying.advance(seconds=1)
    shown = await ids(dying.client, limit=limit)
    assert sorted(shown) == sorted(f"t{n}" for n in range(150))
    assert shown == await ids(dying.client, limit=1000)


async def test_the_next_page_continues_although_the_last_dead_letter_of_the_page_is_gone(dying: Ticker) -> None:
    await dying.client.put_many(Task("log:", n, id=f"t{n}", after="1s") for n in range(60))
    await dying.advance(seconds=1)
    order = await ids(dying.client, limit=1000)
    page = await dying.client.dead.list(limit=20)
    for dead_letter in page.letters:
        assert await dying.client.dead.drop(dead_letter.id) == "dropped"
    rest = (await dying.client.dead.list(limit=1000, cursor=page.next)).letters
    assert [dead_letter.id for dead_letter in rest] == order[20:]


async def test_filters_find_what_they_name(dying: Ticker, clock: ManualClock) -> None:
    start_ms = clock.now_ms()
    await dying.client.put("log:", 1, id="a", after="1s")
    await dying.client.put("kafka:orders", 2, id="b", lane="l", after="2s")
    await dying.client.put("kafka:other", 3, id="c", lane="m", after="3s")
    await dying.advance(seconds=5)
    client = dying.client
    assert await ids(client, target="kafka:orders") == ["b"]
    assert await ids(client, target="kafka:*") == ["c", "b"]
    assert await ids(client, target="kafka:") == []
    assert await ids(client, lane="m") == ["c"]
    assert await ids(client, reason="NO LOG") == ["a"]
    assert await ids(client, died_after=start_ms + 2_000) == ["c", "b"]
    assert await ids(client, died_before=start_ms + 2_000) == ["a"]
    assert await ids(client, died_after=start_ms + 2_000, died_before=start_ms + 3_000, target="k*", limit=1) == ["b"]


@pytest.mark.parametrize("cursor", ["", "x", "1.2", "1.2.zz", "1.2.00", "-1.0." + "00" * 16, "1.99999999." + "00" * 16])
async def test_a_cursor_from_elsewhere_is_refused(client: Client, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="not one that list returned"):
        await client.dead.list(cursor=cursor)


async def test_wrong_questions_are_refused(client: Client) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        await client.dead.list(limit=0)
    with pytest.raises(InvalidInput, match="range is empty"):
        await client.dead.list(died_after=10**12, died_before=10**12)
    with pytest.raises(InvalidInput, match="both at and after"):
        await client.dead.replay("x", at=5, after="1s")
    for rate in (0, -1, float("nan"), 1e9):
        with pytest.raises(InvalidInput, match="rate"):
            await client.dead.replay_many(rate=rate)


@pytest.mark.parametrize(("fails", "told"), [(False, "attempts    0"), (True, "attempts    1")])
async def test_a_dead_letter_counts_the_attempts_that_were_made(ticker: Ticker, fails: bool, told: str) -> None:
    ticker.answer("log", lambda _: Retry("busy", after_ms=60_000))
    await ticker.client.put("log:", id="late", after="1s", expires="20s")
    if fails:
        await ticker.advance(seconds=2)
    ticker.clock.advance(seconds=60)
    await ticker.advance(seconds=1)
    dead_letter = await ticker.client.dead.get("late")
    assert dead_letter is not None
    assert (dead_letter.reason, dead_letter.attempts, dead_letter.errors) == (
        "expired",
        int(fails),
        ("busy",) if fails else (),
    )
    assert told in lines_of(dead_letter, "main")
    assert [line for line in lines_of(dead_letter, "main") if line.startswith("error")] == ["error 1     busy"] * fails
    assert dead_letter.as_dict("main")["attempts"] == (await ticker.client.explain("late")).attempt == int(fails)


async def test_a_dead_letter_says_why_the_task_died_and_everything_else(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(retry=RetryPolicy(max_attempts=3)))
    ticker.answer("log", lambda one: Retry(f"error {one.attempt}"))
    handle = await ticker.client.put("log:", {"a": 1}, id="id", lane="l", after="1s")
    await ticker.advance(minutes=5)
    dead_letter = await ticker.client.dead.get("id")
    assert dead_letter is not None
    assert (dead_letter.reason, dead_letter.errors, dead_letter.attempts) == (
        "error 3",
        ("error 1", "error 2", "error 3"),
        3,
    )
    assert (dead_letter.due_ms, dead_letter.lane, dead_letter.value()) == (handle.due_ms, "l", {"a": 1})
    assert await ticker.client.dead.get("id", lane="l") == dead_letter
    assert await ticker.client.dead.get("other") is None


async def test_a_replayed_dead_letter_keeps_the_rules_of_its_task(dying: Ticker) -> None:
    await dying.client.put("log:", 1, id="id", after="1s", retry="3 base=7s", timeout="5s")
    await dying.advance(seconds=2)
    dead_letter = await dying.client.dead.get("id")
    assert dead_letter is not None
    assert (dead_letter.retry, dead_letter.timeout_ms) == ("3 base=7s", 5_000)
    await dying.client.dead.replay("id", after="1h")
    found = await dying.client.get("id")
    assert (found.state, found.retry, found.timeout_ms) == ("pending", "3 base=7s", 5_000)


async def test_a_task_without_an_id_is_found_by_its_handle_and_by_its_dead_letter(dying: Ticker) -> None:
    handle = await dying.client.put("log:", "x", after="1s")
    await dying.advance(seconds=1)
    dead_letter = await dying.client.dead.get(handle.id)
    assert dead_letter is not None
    assert await dying.client.dead.get(dead_letter.id) == dead_letter


async def test_an_unreadable_dead_letter_does_not_hide_the_others(dying: Ticker, store: Store) -> None:
    await dying.client.put("log:", "x", id="fine", after="1s")
    await dying.advance(seconds=1)
    keys = store.keys.partitions[0]
    await store.run_one(keys.slot, [("HSET", keys.dead, b"\1" * 16, b"junk"), ("ZADD", keys.dead_times, 5, b"\1" * 16)])
    fine, junk = [dead_letter for dead_letters in await pages(dying.client) for dead_letter in dead_letters]
    assert fine.id == "fine"
    assert (junk.id, junk.died_ms, junk.entry, junk.damaged) == ("01" * 16, 5, b"junk", True)
    assert (await dying.client.dead.replay(junk.id)).outcome == "damaged"
    assert await dying.client.dead.drop(junk.id) == "dropped"


# -- replaying -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["id", None])
async def test_a_replayed_task_is_the_same_task_with_attempt_one(dying: Ticker, id: str | None) -> None:
    handle = await dying.client.put("log:", {"a": 1}, id=id, lane="l", after="1s", expires="5s")
    [first] = await dying.advance(seconds=10)
    heal(dying)
    dead_id = id or first.id
    answer = await dying.client.dead.replay(dead_id)
    assert (answer.outcome, answer.due_ms) == ("replayed", dying.clock.now_ms())
    assert await dying.client.dead.get(dead_id) is None
    assert (await dying.client.get(handle.id)).state == "pending"
    [again] = await dying.advance(seconds=1)
    assert (again.id, again.lane, again.value(), again.attempt) == (first.id, "l", {"a": 1}, 1)
    assert again.idempotency_key == first.idempotency_key
    assert again.body.errors == ()
    assert (await dying.client.get(handle.id)).state in ("done", "finished")
    books = await balance(dying.store)
    assert (books.accepted, books.dead, books.done) == (2, 1, 1)
    await even(dying.store)


async def test_a_replay_can_have_another_time_and_another_key(dying: Ticker) -> None:
    await dying.client.put("log:", "x", id="id", after="1s")
    [first] = await dying.advance(seconds=1)
    heal(dying)
    answer = await dying.client.dead.replay("id", after="2h", new_key=True)
    assert answer.due_ms == dying.clock.now_ms() + 7_200_000
    assert await dying.advance(hours=1) == []
    [again] = await dying.advance(hours=1)
    assert (again.due_ms, again.original_due_ms) == (answer.due_ms, answer.due_ms)
    assert again.idempotency_key != first.idempotency_key


async def test_a_dead_task_is_shown_with_its_target_and_its_errors(dying: Ticker) -> None:
    handle = await dying.client.put("log:", "x", id="id", after="1s")
    await dying.advance(seconds=1)
    [dead_letter] = (await dying.client.dead.list()).letters
    info = await dying.client.get("id")
    assert (info.state, info.target, info.due_ms, info.attempt) == ("dead", "log:", handle.due_ms, dead_letter.attempts)
    assert info.errors == dead_letter.errors
    assert info.errors


async def test_a_replay_that_dies_again_leaves_one_dead_letter_with_the_original_due_time(dying: Ticker) -> None:
    handle = await dying.client.put("log:", "x", id="id", after="1s")
    await dying.advance(seconds=1)
    await dying.client.dead.replay("id", after="1s")
    await dying.advance(seconds=1)
    [dead_letter] = (await dying.client.dead.list()).letters
    assert (dead_letter.due_ms, dead_letter.died_ms) == (handle.due_ms, dying.clock.now_ms())
    assert (await dying.client.get("id")).state == "dead"
    assert (await balance(dying.store)).dead == 2
    await even(dying.store)


async def test_a_live_task_of_the_same_id_is_not_overwritten(dying: Ticker) -> None:
    await dying.client.put("log:", "old", id="id", after="1s")
    await dying.advance(seconds=1)
    heal(dying)
    await dying.client.put("log:", "new", id="id", after="10s", on_conflict="replace")
    for _ in range(2):
        answer = await dying.client.dead.replay("id")
        assert answer.outcome == "conflict"
        assert "pending or under way" in answer.note
    assert (await dying.client.dead.replay("id", dry_run=True)).outcome == "conflict"
    assert await dying.client.dead.get("id") is not None
    assert [one.value() for one in await dying.advance(minutes=1)] == ["new"]
    assert (await dying.client.dead.replay("id")).outcome == "replayed", "the new one is over"
    assert [one.value() for one in await dying.advance(minutes=1)] == ["old"]
    await even(dying.store)


@pytest.mark.parametrize("taken", [False, True])
async def test_a_task_of_the_same_id_in_a_queue_is_not_overwritten(tickers: Tickers, store: Store, taken: bool) -> None:
    ticker, worker = await tickers(workers=True), HandWorker(store)
    client = ticker.client
    await client.put(TARGET, "old", id="id", after="1s")
    await ticker.advance(seconds=1)
    await worker.end(await worker.take_one(), outcome=Dead("no"))
    await client.put(TARGET, "new", id="id", after="1s", on_conflict="replace")
    await ticker.advance(seconds=1)
    jobs = await worker.take() if taken else []
    assert (await client.get("id")).state == ("running" if taken else "queued")
    for dry_run in (True, False):
        assert (await client.dead.replay("id", dry_run=dry_run)).outcome == "conflict"
    [new] = jobs or await worker.take()
    await worker.end(new, outcome=Retry("again", 1_000))
    await ticker.advance(seconds=1)
    again = await worker.take_one()
    assert (again.body.attempt, again.body.payload) == (2, b'"new"'), "its retry was not taken for one replaced"
    await worker.end(again)
    assert (await client.dead.replay("id")).outcome == "replayed", "the new one is over"
    await even(store)


async def test_an_id_without_a_dead_letter_is_unknown(client: Client) -> None:
    assert (await client.dead.replay("id")).outcome == "unknown"
    assert await client.dead.drop("id") == "unknown"


@pytest.mark.parametrize("fault", ["lose reply", "never sent", "hold back"])
async def test_a_replay_whose_reply_was_lost_is_one_task(dying: Ticker, fault: Fault) -> None:
    await dying.client.put("log:", "x", id="id", after="1s")
    await dying.advance(seconds=1)
    heal(dying)
    with bad_road(dying.store) as road:
        road.next(fault, only=calls("dead_replay"))
        assert (await dying.client.dead.replay("id")).outcome == "replayed"
        assert len([one for one in road.trips if calls("dead_replay")(one[1])]) == 2
        await road.deliver_held()
    assert [one.value() for one in await dying.advance(minutes=1)] == ["x"]
    books = await balance(dying.store)
    assert (books.accepted, books.dead, books.done) == (2, 1, 1)


async def test_a_replay_that_failed_can_be_repeated(dying: Ticker) -> None:
    await dying.client.put("log:", "x", id="id", after="1s")
    await dying.advance(seconds=1)
    heal(dying)
    with bad_road(dying.store) as road:
        road.next("lose reply", "never sent", "never sent", only=calls("dead_replay"))
        with pytest.raises(Unavailable):
            await dying.client.dead.replay("id")
    assert (await dying.client.dead.replay("id")).outcome == "unknown", "it is a task again"
    assert (await dying.client.get("id")).state == "pending"
    assert len(await dying.advance(minutes=1)) == 1
    await even(dying.store)


Between = Callable[[Callable[[], Awaitable[object]]], None]


@pytest.fixture
def between(dying: Ticker, monkeypatch: pytest.MonkeyPatch) -> Between:
    """Something that others do after the first attempt of our call has failed and before the second."""
    recover = dying.store.recover

    def do(work: Callable[[], Awaitable[object]]) -> None:
        async def work_then_recover() -> None:
            monkeypatch.undo()
            await work()
            await recover()

        monkeypatch.setattr(dying.store, "recover", work_then_recover)

    return do


async def test_a_dead_letter_that_was_dropped_meanwhile_is_not_reported_as_replayed(
    dying: Ticker, store: Store, between: Between
) -> None:
    await dying.client.put("log:", "x", id="id", after="1s")
    await dying.advance(seconds=1)
    between(lambda: Client.over(store).dead.drop("id"))
    with bad_road(dying.store) as road:
        road.next("hold back", only=calls("dead_replay"))
        assert (await dying.client.dead.replay("id")).outcome == "gone"
        await road.deliver_held()
    assert await dying.advance(minutes=1) == []
    await even(dying.store)


async def test_a_task_that_was_put_meanwhile_is_not_overwritten(dying: Ticker, store: Store, between: Between) -> None:
    await dying.client.put("log:", "old", id="id", after="1s")
    await dying.advance(seconds=1)
    heal(dying)
    between(lambda: Client.over(store).put("log:", "new", id="id", after="5s", on_conflict="replace"))
    with bad_road(dying.store) as road:
        road.next("hold back", only=calls("dead_replay"))
        assert (await dying.client.dead.replay("id")).outcome == "conflict"
        await road.deliver_held()
    assert [one.value() for one in await dying.advance(minutes=1)] == ["new"]
    assert await dying.client.dead.get("id") is not None
    await even(dying.store)


@pytest.mark.parametrize("script", ["dead_replay", "dead_drop"])
async def test_a_late_call_does_not_touch_the_dead_letter_of_a_later_death(
    dying: Ticker, store: Store, between: Between, script: str
) -> None:
    """Another caller replayed it and it died again: the new letter is left alone."""
    await dying.client.put("log:", "x", id="id", after="1s")
    await dying.advance(seconds=1)

    async def die_again() -> None:
        assert (await Client.over(store).dead.replay("id", after="1s")).outcome == "replayed"
        assert len(await dying.advance(seconds=1)) == 1

    between(die_again)
    with bad_road(dying.store) as road:
        road.next("hold back", only=calls(script))
        await (dying.client.dead.replay("id") if script == "dead_replay" else dying.client.dead.drop("id"))
        await road.deliver_held()
    dead_letter = await dying.client.dead.get("id")
    assert dead_letter is not None
    assert dead_letter.died_ms == dying.clock.now_ms()
    books = await balance(dying.store)
    assert (books.accepted, books.dead, books.pending) == (2, 2, 0)


@pytest.mark.parametrize("fault", ["lose reply", "never sent"])
async def test_a_replay_of_many_survives_lost_replies(dying: Ticker, fault: Fault) -> None:
    await dying.client.put_many(Task("log:", n, after="1s") for n in range(250))
    await dying.advance(seconds=1)
    heal(dying)
    with bad_road(dying.store) as road:
        road.next(fault, only=calls("dead_replay"))
        summary = await dying.client.dead.replay_many()
    assert (summary.replayed, summary.seen) == (250, 250)
    assert sorted(one.value() for one in await dying.advance(seconds=5)) == list(range(250))
    books = await balance(dying.store)
    assert (books.accepted, books.dead, books.done) == (500, 250, 250)


async def test_filters_choose_what_is_replayed_and_the_first_to_die_goes_first(dying: Ticker) -> None:
    for n in range(6):
        await dying.client.put("kafka:a" if n % 2 else "log:", n, id=f"t{n}", lane="l", after=f"{n + 1}s")
    await dying.advance(minutes=1)
    heal(dying)
    seen: list[int] = []
    summary = await dying.client.dead.replay_many(
        target="kafka:a", progress=lambda so_far: seen.append(so_far.replayed)
    )
    assert (summary.replayed, seen[-1]) == (3, 3)
    assert [one.value() for one in await dying.advance(seconds=5)] == [1, 3, 5], "the lane keeps its order"
    assert await ids(dying.client) == ["t4", "t2", "t0"]


async def test_tasks_that_die_again_meanwhile_are_not_replayed_for_ever(dying: Ticker, clock: ManualClock) -> None:
    await dying.client.put_many(Task("log:", n, after="1s") for n in range(300))
    await dying.advance(seconds=1)
    clock.advance(seconds=1)
    rounds = 0

    async def at_once(_: float) -> None:
        nonlocal rounds
        rounds += 1
        clock.advance(seconds=1)
        await dying.turn()

    summary = await dying.client.dead.replay_many(rate=100, sleep=at_once)
    assert summary.replayed == 300
    assert rounds >= 1, "some died again while others were still to come"
    await dying.advance(minutes=1)
    assert len(await ids(dying.client, limit=1000)) == 300
    assert (await balance(dying.store)).dead == 600


async def test_a_rate_spreads_what_comes_due(dying: Ticker, clock: ManualClock) -> None:
    await dying.client.put_many(Task("log:", n, after="1s") for n in range(35))
    await dying.advance(seconds=1)
    heal(dying)
    start_ms = clock.now_ms()
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(ms=round(seconds * 1000) + 1)

    assert (await dying.client.dead.replay_many(rate=10, sleep=sleep)).replayed == 35
    due = sorted(one.due_ms - start_ms for one in await dying.advance(minutes=1))
    assert due == [n * 100 for n in range(35)]
    assert sum(slept) > 1.5, "not all was put at once: a replay that is stopped has to stop"


async def test_a_rate_from_a_time_on_needs_no_waiting(dying: Ticker, clock: ManualClock) -> None:
    await dying.client.put_many(Task("log:", n, after="1s") for n in range(25))
    await dying.advance(seconds=1)
    heal(dying)
    start_ms = clock.now_ms() + 60_000

    async def never(_: float) -> None:
        raise AssertionError("there is nothing to wait for")

    await dying.client.dead.replay_many(rate=5, after="1m", sleep=never)
    assert sorted(one.due_ms for one in await dying.advance(minutes=2)) == [start_ms + n * 200 for n in range(25)]


async def test_a_dry_run_changes_nothing(dying: Ticker) -> None:
    await dying.client.put_many(Task("log:", n, id=f"t{n}", after="1s") for n in range(5))
    await dying.advance(seconds=1)
    await dying.client.put("log:", "new", id="t3", after="10s", on_conflict="replace")
    summary = await dying.client.dead.replay_many(dry_run=True)
    assert (summary.dry_run, summary.replayed, summary.conflict) == (True, 4, 1)
    assert await dying.client.dead.drop_many(dry_run=True) == 5
    assert len(await ids(dying.client)) == 5
    books = await balance(dying.store)
    assert (books.accepted, books.pending) == (6, 1)


async def bury_damaged(ticker: Ticker) -> DeadLetter:
    """The letter of an entry that cannot be read."""
    address = address_of((await ticker.client.put("log:", "x", after="1s")).id)
    keys = ticker.store.keys.partitions[address.partition]
    row = b"\0\0\0\1\0" + b"\7" * 16 + b"\xc1"
    await ticker.store.run_one(keys.slot, [("LSET", keys.entries(address.slice.name), address.index, row)])
    await ticker.advance(seconds=2)
    [dead_letter] = (await ticker.client.dead.list()).letters
    return dead_letter


async def test_a_damaged_entry_is_not_replayed_but_exported_and_dropped(dying: Ticker) -> None:
    dead_letter = await bury_damaged(dying)
    assert dead_letter.entry.endswith(b"\xc1")
    await dying.client.put("log:", "y", id="whole", after="1s")
    await dying.advance(seconds=1)
    answer = await dying.client.dead.replay(dead_letter.id)
    assert answer.outcome == "damaged"
    assert "cannot be read" in answer.note
    summary = await dying.client.dead.replay_many()
    assert (summary.replayed, summary.damaged) == (1, 1)
    assert [one.id for one in summary.problems] == [dead_letter.id]
    lines: list[bytes] = []
    assert await dying.client.dead.export(lines.append) == 1
    told = json.loads(lines[0])
    assert base64.b64decode(told["entry_base64"]) == dead_letter.entry
    assert await dying.client.dead.drop(dead_letter.id) == "dropped"
    assert (await dying.client.dead.list()).letters == []
    await even(dying.store)


# -- dropping and exporting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lose reply", "never sent", "hold back"])
async def test_a_drop_whose_reply_was_lost_is_reported_as_done(dying: Ticker, fault: Fault) -> None:
    await dying.client.put("log:", "x", id="id", after="1s")
    await dying.advance(seconds=1)
    with bad_road(dying.store) as road:
        road.next(fault, only=calls("dead_drop"))
        assert await dying.client.dead.drop("id") == "dropped"
        await road.deliver_held()
    assert await dying.client.dead.get("id") is None
    assert (await balance(dying.store)).dead == 1, "it died, whether or not its letter is kept"
    await even(dying.store)


async def test_filters_choose_what_is_dropped(dying: Ticker) -> None:
    for n in range(6):
        await dying.client.put("kafka:a" if n % 2 else "log:", n, id=f"t{n}", after=f"{n + 1}s")
    await dying.advance(minutes=1)
    assert await dying.client.dead.drop_many(target="log:") == 3
    assert await ids(dying.client) == ["t5", "t3", "t1"]
    assert await dying.client.dead.drop_many() == 3
    assert await ids(dying.client) == []
    await even(dying.store)


async def test_an_export_holds_everything_the_oldest_first(dying: Ticker) -> None:
    await dying.client.put("log:", {"a": [1, "ü"]}, id="one", lane="l", after="1s")
    await dying.client.put("kafka:t", b"\xff\0", id="two", after="2s")
    fired = await dying.advance(seconds=5)
    written: list[bytes] = []
    assert await dying.client.dead.export(written.append) == 2
    one, two = [json.loads(line) for line in b"".join(written).splitlines()]
    assert (one["id"], one["payload"], one["lane"], one["reason"]) == ("one", {"a": [1, "ü"]}, "l", "no log:")
    assert (one["errors"], one["attempts"], one["damaged"]) == (["no log:"], 1, False)
    assert (two["id"], base64.b64decode(two["payload_base64"])) == ("two", b"\xff\0")
    assert [one["idempotency_key"], two["idempotency_key"]] == [delivery.idempotency_key for delivery in fired]


async def test_ten_thousand_dead_letters_go_in_bounded_calls(dying: Ticker, store: Store) -> None:
    count = 10_000
    await dying.client.put_many(Task("log:", n, after=f"{1 + n % 3}s") for n in range(count))
    await dying.advance(seconds=4)
    lines: list[bytes] = []
    with bad_road(dying.store) as road:
        shown = await pages(dying.client, limit=1000)
        assert (
            sum(map(len, shown))
            == len({dead_letter.id for dead_letters in shown for dead_letter in dead_letters})
            == count
        )
        assert await dying.client.dead.export(lines.append) == count
        one_page = await dying.client.dead.list(reason="no such reason", limit=10)
    assert one_page.letters == []
    records = [len(command) - 2 for _, trip in road.trips for command in trip if command[0] == "HMGET"]
    assert max(records) <= 100, "records are read a hundred at a time, however many there are"
    assert max(map(len, lines)) < 100 * 1024
    with bad_road(dying.store) as road:
        summary = await dying.client.dead.replay_many()
    assert summary.replayed == count
    sizes = [len(command) for _, trip in road.trips for command in trip if calls("dead_replay")([command])]
    assert max(sizes) < 100 * 6 + 200 * 4, "a call carries a hundred letters at most"
    heal(dying)
    assert len(await dying.advance(seconds=5)) == count
    books = await balance(dying.store)
    assert (books.accepted, books.dead, books.done) == (2 * count, count, count)


# -- the synchronous client ------------------------------------------------------------------------------------------


def test_every_call_is_there_without_an_event_loop() -> None:
    names = {name for name in vars(FlatDeadLetterCalls) if name.startswith("dead_")}
    assert len(names) == 8
    assert names <= set(vars(SyncClient))
