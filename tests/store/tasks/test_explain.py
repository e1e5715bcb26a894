"""Explain: the one true reason why a task has not run, as a sentence and as a code."""

from collections.abc import Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Dead, Delivery, Outcome, Retry
from mainspring.model.explain import span
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import Task
from mainspring.store import members
from mainspring.store.keys import partition_of
from mainspring.store.store import Store
from mainspring.store.tasks import cancel
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of

Tickers = Callable[..., Awaitable[Ticker]]
HOUR_MS = 3_600_000


async def join(store: Store, name: str, *, lag_ms: int = 0) -> None:
    """A node that is alive and says how far it is behind."""
    about = members.About(lag_ms=lag_ms)
    assert await members.join(store, members.Identity(name, name, 5_000), about) == 1


async def test_a_task_ahead_of_its_time_is_not_due(ticker: Ticker) -> None:
    await ticker.turn()
    await ticker.client.put("log:", "x", id="id", lane="l", after="90m")
    found = await ticker.client.explain("id")
    assert (found.code, found.state, found.wait_ms) == ("not-due", "pending", 90 * 60_000)
    assert (found.target, found.lane, found.due_ms) == ("log:", "l", ticker.clock.now_ms() + 90 * 60_000)
    assert "in 1 h 30 min" in found.text
    assert found.owner is not None
    assert "no node" not in found.text


async def test_a_task_in_retry_shows_its_attempt_its_time_and_the_last_error(ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Retry(f"error {one.attempt}", after_ms=10_000))
    handle = await ticker.client.put("log:", "x", after="1s")
    await ticker.advance(seconds=11)
    found = await ticker.client.explain(handle.id)
    assert (found.code, found.attempt, found.errors) == ("retry", 3, ("error 1", "error 2"))
    assert found.wait_ms == 10_000
    assert "attempt 3 comes in 10 s" in found.text
    assert "error 2" in found.text


async def test_a_task_waits_behind_the_head_of_its_lane_that_is_tried_again(ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Retry("broken", after_ms=60_000) if one.value() == "head" else None)
    await ticker.client.put("log:", "head", id="head", lane="l", after="1s")
    await ticker.client.put("log:", "next", id="next", lane="l", after="2s")
    await ticker.client.put("log:", "far", id="far", lane="l", after="2h")
    await ticker.advance(seconds=5)
    found = await ticker.client.explain("next", lane="l")
    assert (found.code, found.head_id, found.head_state) == ("behind-head", "head", "pending")
    assert found.head_due_ms == ticker.clock.now_ms() + 56_000
    assert "behind head" in found.text
    assert "broken" in found.text
    assert (await ticker.client.explain("head")).code == "retry"
    assert (await ticker.client.explain("far", lane="l")).code == "not-due"


async def test_a_task_waits_behind_the_one_of_its_lane_that_is_under_way(client: Client, store: Store) -> None:
    first = await client.put("log:", "first", lane="l", after="0s")
    await client.put("log:", "second", id="second", lane="l", after="0s")
    address = address_of(first.id)
    owner = await HandOwner.acquire(store, address.partition, owner="n1/p")
    before = await client.explain("second")
    assert (before.code, before.head_id, before.head_state) == ("behind-head", first.id, "pending")
    await owner.begin(address.slice, [address.index])
    found = await client.explain("second")
    assert (found.code, found.head_id, found.head_state) == ("behind-head", first.id, "fired")
    assert "is being delivered" in found.text
    await owner.finish(address.slice, [address.index])
    assert (await client.explain("second")).code == "due"


async def test_another_lane_of_the_same_partition_is_no_head(client: Client, store: Store) -> None:
    lanes = [f"l{n}" for n in range(50) if partition_of(f"l{n}", len(store.keys)) == 0][:2]
    await client.put("log:", "other", lane=lanes[0], after="0s")
    await client.put("log:", "x", id="id", lane=lanes[1], after="0s")
    await HandOwner.acquire(store, 0, owner="n1/p")
    assert (await client.explain("id", lane=lanes[1])).code == "due"


async def test_a_fired_task_names_the_node_that_fires_it(client: Client, store: Store) -> None:
    handle = await client.put("log:", "x", after="0s")
    address = address_of(handle.id)
    owner = await HandOwner.acquire(store, address.partition, owner="n1/p")
    await owner.begin(address.slice, [address.index])
    found = await client.explain(handle.id)
    assert (found.code, found.state, found.owner) == ("fired", "fired", "n1")
    assert "Node n1 is delivering it" in found.text


async def test_a_fired_task_whose_owner_died_waits_for_the_next_one(
    client: Client, store: Store, clock: ManualClock
) -> None:
    handle = await client.put("log:", "x", after="0s")
    address = address_of(handle.id)
    owner = await HandOwner.acquire(store, address.partition, owner="n1/p", lease_ms=5_000)
    await owner.begin(address.slice, [address.index])
    clock.advance(seconds=6)
    await join(store, "n2")
    found = await client.explain(handle.id)
    assert (found.code, found.state, found.owner, found.nodes) == ("no-owner", "fired", None, 1)
    assert "begun and not finished" in found.text
    assert "delivers it again" in found.text


async def test_with_no_node_at_all_it_says_how_to_start_one(client: Client, clock: ManualClock) -> None:
    await client.put("log:", "x", id="id", after="1s")
    ahead = await client.explain("id")
    assert (ahead.code, ahead.nodes) == ("not-due", 0)
    assert "no node is running" in ahead.text
    clock.advance(seconds=3)
    found = await client.explain("id")
    assert (found.code, found.wait_ms, found.nodes, found.owner) == ("no-node", -2_000, 0, None)
    assert "mainspring serve" in found.text


async def test_a_partition_without_owner_is_shown_with_its_planned_owner(client: Client, store: Store) -> None:
    await client.put("log:", "x", id="id")
    await join(store, "n1")
    assert (await client.explain("id")).code == "no-owner"
    who = members.Identity("n1", "n1", 5_000)
    view = await members.beat(store, who, members.About())
    assert view is not None
    assert await members.write_plan(store, who, view, ["n1"] * len(store.keys))
    found = await client.explain("id")
    assert (found.code, found.planned, found.partition) == ("no-owner", "n1", partition_of("id", len(store.keys)))
    assert "node n1 takes it" in found.text


async def test_an_owner_that_is_behind_is_named_with_its_lag(client: Client, store: Store, clock: ManualClock) -> None:
    await client.put("log:", "x", id="id")
    await HandOwner.acquire(store, partition_of("id", len(store.keys)), owner="n1/p", lease_ms=60_000)
    assert (await client.explain("id")).code == "due"
    clock.advance(seconds=30)
    await join(store, "n1", lag_ms=29_000)
    found = await client.explain("id")
    assert (found.code, found.owner, found.lag_ms, found.wait_ms) == ("owner-behind", "n1", 29_000, -30_000)
    assert "29 s behind" in found.text


async def test_a_finished_task_is_explained_by_how_it_ended(ticker: Ticker) -> None:
    answers: dict[str, Outcome] = {"dead": Dead("never")}

    def answer(one: Delivery) -> Outcome | None:
        return answers.get(str(one.value()))

    ticker.answer("log", answer)
    client = ticker.client
    await client.put("log:", "done", id="done", after="1s")
    await client.put("log:", "dead", id="dead", after="1s")
    plain = await client.put("log:", "plain", after="1s")
    gone = await client.put("log:", "gone", after="30s")
    assert await client.cancel(gone.id) == "cancelled"
    await ticker.advance(seconds=1)
    assert (await client.explain("done")).code == "done"
    assert (await client.explain(gone.id)).code == "cancelled"
    dead = await client.explain("dead")
    assert (dead.code, dead.reason, dead.died_ms, dead.attempt) == ("dead", "never", ticker.clock.now_ms(), 1)
    assert "never" in dead.text
    await ticker.advance(minutes=5)
    assert (await client.get(plain.id)).state == "finished", "its slice is gone"
    assert (await client.explain("done")).code == "done", "a mark in the index is only left by what was delivered"
    assert (await client.explain(plain.id)).code == "finished"
    assert (await client.explain("nobody")).code == "unknown"


async def test_a_cancelled_id_is_reported_as_cancelled_until_it_is_used_again(
    ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ticker.client
    await client.put("log:", 1, id="order-42", after="30s")
    await client.put("log:", 1, id="other", lane="l", after="30s")
    assert await client.cancel_many(["order-42", "nobody"]) == ["cancelled", "unknown"]
    assert await client.cancel("other", lane="l") == "cancelled"
    assert (await client.explain("order-42")).code == "cancelled"
    assert (await client.explain("other", lane="l")).code == (await client.explain("other")).code == "cancelled"
    assert (await client.get("order-42")).state == (await client.get("other")).state == "cancelled"
    assert (await client.explain("nobody")).code == "unknown"
    await client.put("log:", 2, id="order-42", after="30s")
    assert (await client.explain("order-42")).code == "not-due"
    await ticker.advance(seconds=31)
    assert await client.cancel("order-42") == "too late"
    assert (await client.explain("order-42")).code == "done"
    monkeypatch.setattr(cancel, "KEPT", 2)
    await client.put_many(Task("log:", n, id=f"n{n}", lane="l", after="30s") for n in range(4))
    for n in range(4):
        await client.cancel(f"n{n}", lane="l")
    codes = [(await client.explain(f"n{n}", lane="l")).code for n in range(4)]
    assert codes == ["unknown", "unknown", "cancelled", "cancelled"], "what is kept is bounded"


@pytest.mark.parametrize("lane", [None, "a"])
async def test_the_later_one_of_two_tasks_with_one_id_is_reported(ticker: Ticker, lane: str | None) -> None:
    client = ticker.client
    ticker.answer("log", lambda _: Dead("never"))
    await client.put("log:", "first", id="job", lane=lane)
    await ticker.advance(seconds=1)
    assert (await client.get("job")).state == "dead"
    await client.put("log:", "second", id="job", lane=lane, after="1h", on_conflict="replace")
    assert await client.cancel("job", lane=lane) == "cancelled"
    assert (await client.get("job")).state == (await client.explain("job")).code == "cancelled"
    over = await client.find_result("job")
    assert over is not None
    assert over.ending == "cancelled"
    assert await client.dead_get("job") is not None, "the dead letter is kept all the same"
    await client.put("log:", "third", id="job", lane=lane, after="1s")
    await ticker.advance(hours=3)
    keys = ticker.store.keys.partitions[partition_of(lane or "job", len(ticker.store.keys))]
    await ticker.store.run_one(keys.slot, [("DEL", keys.ids)])  # as if its time was over
    assert (await client.get("job")).state == (await client.explain("job")).code == "dead"
    over = await client.find_result("job")
    assert over is not None
    assert over.ending == "dead"


async def test_a_dead_task_is_explained_for_as_long_as_its_dead_letter_is_kept(ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Dead("never"))
    await ticker.client.put("log:", "x", id="id", after="1s")
    await ticker.advance(hours=3)
    keys = ticker.store.keys.partitions[partition_of("id", len(ticker.store.keys))]
    assert await ticker.store.run_one(keys.slot, [("DEL", keys.ids)]) is not None
    found = await ticker.client.explain("id")
    assert (found.code, found.reason) == ("dead", "never")
    assert (await ticker.client.dead_replay("id", after="1h")).outcome == "replayed"
    assert (await ticker.client.explain("id")).code == "not-due"


async def test_an_expired_task_is_explained_before_and_after_it_is_a_dead_letter(
    ticker: Ticker, clock: ManualClock
) -> None:
    await ticker.client.put("log:", "x", id="id", after="1s", expires="5s")
    clock.advance(seconds=10)
    waiting = await ticker.client.explain("id")
    assert (waiting.code, waiting.state) == ("expired", "pending")
    assert "expired 4 s ago" in waiting.text
    await ticker.turn()
    buried = await ticker.client.explain("id")
    assert (buried.code, buried.state, buried.reason) == ("expired", "dead", "expired")


async def test_a_moved_task_is_explained_in_its_new_place(client: Client) -> None:
    first = await client.put("log:", "x", after="1m")
    moved = await client.reschedule(first.id, after="2m")
    found = await client.explain(first.id)
    assert (found.code, found.due_ms) == ("not-due", moved.due_ms)
    last = moved
    for n in range(10):
        last = await client.reschedule(last.id, after=f"{3 + n}m")
    for handle in (first, moved, last):
        found = await client.explain(handle.id)
        assert (found.code, found.due_ms) == ("not-due", last.due_ms)
    await client.cancel(last.id)
    assert (await client.explain(first.id)).code == "cancelled"


async def test_a_replaced_id_is_explained_by_its_present_task(client: Client) -> None:
    await client.put("log:", 1, id="id", after="1m")
    again = await client.put("log:", 2, id="id", after="2m", on_conflict="replace")
    found = await client.explain("id")
    assert (found.code, found.due_ms) == ("not-due", again.due_ms)


async def test_an_unreadable_entry_is_reported(client: Client, store: Store) -> None:
    handle = await client.put("log:", "x", after="1s")
    address = address_of(handle.id)
    keys = store.keys.partitions[address.partition]
    s = keys.entries(address.slice.name)
    [row] = await store.run_one(keys.slot, [("LINDEX", s, address.index)])
    await store.run_one(keys.slot, [("LSET", s, address.index, row[:21] + b"\xc1")])
    found = await client.explain(handle.id)
    assert (found.code, found.target) == ("unreadable", None)


async def test_the_head_is_found_in_a_crowded_partition(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(retry=RetryPolicy(max_attempts=1)))
    client = ticker.client
    await client.put_many(Task("log:", n, after=f"{n % 20}s", lane=f"other{n % 7}") for n in range(3_000))
    head = await client.put("log:", "head", lane="l", after="21s")
    await client.put("log:", "x", id="id", lane="l", after="22s")
    ticker.clock.advance(seconds=30)
    partition = partition_of("l", len(store.keys))
    await HandOwner.acquire(store, partition, owner="n1/p")
    found = await client.explain("id", lane="l")
    assert (found.code, found.head_id) == ("behind-head", head.id)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_500, "1.5 s"),
        (60_000, "1 min"),
        (90_061_000, "1 d 1 h"),
        (3_661_000, "1 h 1 min"),
    ],
)
def test_spans_are_shown_in_their_two_largest_units(ms: int, text: str) -> None:
    assert span(ms) == text
