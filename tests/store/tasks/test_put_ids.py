"""Put with an id: a repeated request is one task, and the caller says which one wins."""

import asyncio
from collections import Counter

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock, ServerClock
from mainspring.model.delivery import Dead, Outcome, Retry
from mainspring.model.errors import Conflict, Unavailable
from mainspring.model.task import Handle, OnConflict, Task
from mainspring.store.keys import HOUR_MS, Address, Slice
from mainspring.store.store import Store
from mainspring.store.tasks import index
from mainspring.testing.balance import balance
from mainspring.testing.faults import bad_road, calls, uses
from mainspring.testing.ticker import Ticker

POLICIES: tuple[OnConflict, ...] = ("keep", "replace", "earliest", "reject")
STATES = ("pending", "fired", "done", "finished", "dead", "retrying", "cancelled", "expired mark")


async def test_a_repeated_put_is_one_task(client: Client, store: Store) -> None:
    first = await client.put("log:", 1, id="order-42", after="1h")
    again = await client.put("log:", 2, id="order-42", after="2h")
    assert (first.outcome, again.outcome) == ("created", "kept")
    assert again.due_ms == first.due_ms
    assert (await client.get("order-42")).payload == 1
    assert (await balance(store)).accepted == 1


@pytest.mark.parametrize(
    "task_id",
    [
        "{a}", "}{", "{", "a:b:c", "a b", "line\nbreak", "nul\0", "\N{PILE OF POO}", "ü" * 128, "~1.2.3.4.5", " ", "%",
        "{other}:slices", "..", "a" * 256, "0" * 31, "ABCDEF" * 6, "*", "[a-z]?",
    ],
)  # fmt: skip
async def test_no_id_can_break_a_key_or_leave_its_slot(ticker: Ticker, task_id: str) -> None:
    await ticker.client.put("log:", "id", id=task_id, after="1s")
    await ticker.client.put("log:", "lane", id="in a lane", after="1s", lane=task_id)
    assert (await ticker.client.get(task_id)).state == "pending"
    assert (await ticker.client.put("log:", id=task_id)).outcome == "kept"
    fired = await ticker.advance(seconds=1)
    assert sorted(one.value() for one in fired) == ["id", "lane"]
    by_value = {one.value(): one for one in fired}
    assert (by_value["id"].id, by_value["lane"].lane) == (task_id, task_id)
    key = by_value["id"].idempotency_key
    assert key.isascii()
    assert key.isprintable()
    assert " " not in key


class Known:
    """Brings the task "id" into a state, due 500 ms ahead in the beginning."""

    def __init__(self, ticker: Ticker) -> None:
        self.ticker = ticker
        self.gate = asyncio.Event()

    async def reach(self, state: str) -> None:
        ticker = self.ticker
        answers: dict[str, Outcome] = {"dead": Dead("no"), "retrying": Retry("not yet", after_ms=60_000)}
        ticker.answer("log", lambda one: answers.get(state) if one.value() == "old" else None)
        await ticker.client.put("log:", "old", id="id", after="500ms")
        if state == "cancelled":
            await ticker.client.cancel("id")
        elif state == "fired":
            ticker.answer("log", self._pause)
            await ticker.engine.keeper.step()
            await ticker.engine.lookahead.step()
            ticker.clock.advance(ms=500)
            await ticker.engine.lookahead.step()
            await ticker.engine.dispatcher.step()
        elif state in ("done", "dead", "retrying"):
            await ticker.advance(ms=500)
        elif state == "finished":
            await ticker.advance(seconds=10)
        elif state == "expired mark":
            await ticker.advance(hours=1.01)

    async def _pause(self, delivery: object) -> None:
        await self.gate.wait()


EXPECTED = {
    # policy: what becomes of a second put, by state of the first
    "keep": ("kept", "kept", "kept", "kept", "kept", "kept", "created", "created"),
    "replace": ("replaced", "created", "created", "created", "created", "replaced", "created", "created"),
    "earliest": ("replaced", "kept", "kept", "kept", "kept", "replaced", "created", "created"),
    "reject": ("Conflict", "Conflict", "Conflict", "Conflict", "Conflict", "Conflict", "created", "created"),
}


async def put_again(client: Client, policy: OnConflict) -> str:
    try:
        return (await client.put("log:", "new", id="id", after="300ms", on_conflict=policy)).outcome
    except Conflict:
        return "Conflict"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", STATES)
async def test_on_conflict_by_state(ticker: Ticker, clock: ManualClock, policy: OnConflict, state: str) -> None:
    known = Known(ticker)
    await known.reach(state)
    outcome = await put_again(ticker.client, policy)
    assert outcome == EXPECTED[policy][STATES.index(state)]
    await balance(ticker.store)
    if outcome in ("created", "replaced"):
        info = await ticker.client.get("id")
        assert (info.state, info.payload) == ("pending", "new")
    known.gate.set()
    ticker.answer("log", lambda _: None)
    later = [one.value() for one in await ticker.advance(minutes=3)]
    new = ["new"] if outcome in ("created", "replaced") else []
    old = ["old"] if state in ("pending", "retrying") and outcome != "replaced" else []
    assert sorted(value for value in later if value != "old" or state != "fired") == new + old
    await balance(ticker.store)


async def test_earliest_keeps_the_earlier_of_two(ticker: Ticker) -> None:
    await ticker.client.put("log:", "first", id="id", after="10s")
    assert (await ticker.client.put("log:", "later", id="id", after="20s", on_conflict="earliest")).outcome == "kept"
    assert (
        await ticker.client.put("log:", "sooner", id="id", after="5s", on_conflict="earliest")
    ).outcome == "replaced"
    assert [one.value() for one in await ticker.advance(minutes=1)] == ["sooner"]
    await balance(ticker.store)


async def test_two_tasks_with_one_id_in_one_call_come_one_after_the_other(ticker: Ticker) -> None:
    tasks = [Task("log:", n, id="same", after="1s") for n in range(3)]
    kept = await ticker.client.put_many(tasks, handles=True)
    assert [handle.outcome for handle in kept.handles or ()] == ["created", "kept", "kept"]
    replaced = await ticker.client.put_many(tasks, on_conflict="replace")
    assert (replaced.created, replaced.replaced) == (0, 3)
    assert [one.value() for one in await ticker.advance(seconds=1)] == [2]
    await balance(ticker.store)


async def test_very_many_tasks_with_one_id_that_is_kept_take_one_trip(client: Client, store: Store) -> None:
    tasks = [Task("log:", number, after=f"{number + 1}h", id="a") for number in range(500)]
    tasks.insert(250, Task("log:", "other", after="1s", id="b"))
    warm = [Task("log:", after="1h", id=f"warm {number}") for number in range(4 * len(store.keys))]
    await client.put_many(warm)  # a server that does not know the script yet takes one trip more
    with bad_road(store) as road:
        summary = await client.put_many(tasks, handles=True)
        assert len(road.trips) <= 2, "on a cluster one for each server"
    assert summary.handles is not None
    assert [one.outcome for one in summary.handles] == ["created", *["kept"] * 249, "created", *["kept"] * 250]
    assert {one.due_ms for one in summary.handles if one.id == "a"} == {summary.handles[0].due_ms}
    assert (await client.get("a")).payload == 0
    assert (await balance(store)).accepted == 2 + len(warm)
    again = await client.put_many(tasks, handles=True)
    assert again.handles is not None
    assert {one.outcome for one in again.handles} == {"kept"}
    assert [one.due_ms for one in again.handles] == [one.due_ms for one in summary.handles]


async def test_an_id_in_a_lane_is_found_without_naming_the_lane(client: Client) -> None:
    await client.put("log:", id="only-in-a-lane", lane="far away", after="1s")
    assert (await client.get("only-in-a-lane")).state == "pending"
    assert await client.cancel("only-in-a-lane") == "cancelled"


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_put_whose_reply_was_lost_finds_its_own_task(client: Client, store: Store, policy: OnConflict) -> None:
    with bad_road(store) as road:
        road.next("lose reply", only=uses("EVALSHA"))
        handle = await client.put("log:", 1, id="id", after="1s", on_conflict=policy)
    assert handle.outcome in ("created", "kept")
    assert (await balance(store)).accepted == 1


async def test_a_replace_whose_reply_was_lost_is_one_task(ticker: Ticker) -> None:
    await ticker.client.put("log:", "old", id="id", after="1s")
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=calls("replace"))
        await ticker.client.put("log:", "new", id="id", after="2s", on_conflict="replace")
    assert [one.value() for one in await ticker.advance(seconds=5)] == ["new"]
    await balance(ticker.store)


async def test_a_replace_after_a_lost_reply_does_not_take_the_old_task_for_its_own(ticker: Ticker) -> None:
    """Same id, same payload, same second: only the millisecond distinguishes them."""
    now_ms = ticker.clock.now_ms() // 1000 * 1000
    await ticker.client.put("log:", "same", id="id", at=now_ms + 5_100)
    with bad_road(ticker.store) as road:
        road.next("lose reply", only=calls("put_ids"))
        await ticker.client.put("log:", "same", id="id", at=now_ms + 5_900, on_conflict="replace")
    [delivery] = await ticker.advance(seconds=10)
    assert delivery.due_ms == now_ms + 5_900


async def test_two_replaces_at_once_leave_one_task(ticker: Ticker) -> None:
    await ticker.client.put("log:", "old", id="id", after="1s")
    puts = [ticker.client.put("log:", n, id="id", after="2s", on_conflict="replace") for n in range(6)]
    await asyncio.gather(*puts)
    assert len(await ticker.advance(seconds=5)) == 1
    books = await balance(ticker.store)
    assert (books.done, books.accepted, books.replaced) == (1, 7, 6)


@pytest.mark.parametrize("policy", ["replace", "earliest"])
async def test_very_many_callers_may_change_one_id_at_once(ticker: Ticker, policy: OnConflict) -> None:
    """Each attempt fails for another's success, so a set number of them is too few for somebody."""
    wanted = [ticker.client.put("log:", n, id="id", after=f"{200 - n}m", on_conflict=policy) for n in range(100)]
    handles = await asyncio.gather(*wanted)
    assert Counter(one.outcome for one in handles)["created"] == 1
    assert (await ticker.client.count()).pending == 1
    if policy == "earliest":
        assert (await ticker.client.get("id")).payload == 99


async def test_a_task_that_changes_during_a_keep_is_kept(store: Store, client: Client) -> None:
    """Its marks have expired long ago, so each of them looked as if there was nothing to keep."""
    past_ms = store.clock.now_ms() - 3 * HOUR_MS
    await client.put("log:", id="id", at=past_ms)
    keeping: asyncio.Task[Handle] | None = None
    for n in range(20):
        with bad_road(store) as road:
            road.next("late reply", only=lambda sent: calls("put_ids")(sent) or calls("replace")(sent))
            keeping = keeping or asyncio.create_task(client.put("log:", "mine", id="id", after="1h"))
            while not road.late and not keeping.done():  # noqa: ASYNC110  # the road tells nothing
                await asyncio.sleep(0)
            if keeping.done():
                break
            await client.put("log:", n, id="id", at=past_ms, on_conflict="replace")
            road.deliver_late()
    assert keeping is not None
    assert (await keeping).outcome == "kept"
    assert (await keeping).due_ms == past_ms
    assert (await client.count()).pending == 1


async def test_a_retry_of_a_replaced_run_does_not_come_back(ticker: Ticker) -> None:
    """The id was given to another task while the first was under way; then the first fails."""
    known = Known(ticker)
    await known.reach("fired")
    await ticker.client.put("log:", "new", id="id", after="5s", on_conflict="replace")
    ticker.answer("log", lambda one: Retry("no", after_ms=1_000) if one.value() == "old" else None)
    ticker.engine.deliveries.cancel()
    await ticker.crash()
    # The next owner delivers the old run again, and that fails.
    async with Ticker(
        ticker._url, namespace=ticker._namespace, clock=ticker.clock,
        handlers={"log": lambda one: Retry("no", after_ms=1_000) if one.value() == "old" else None},
    ) as second:  # fmt: skip
        fired = [one.value() for one in await second.advance(minutes=1)]
        assert sorted(fired) == ["new", "old"]
        await balance(second.store)


async def test_finished_ids_are_swept_after_the_dedupe_window(ticker: Ticker, store: Store) -> None:
    for n in range(20):
        await ticker.client.put("log:", n, id=f"id-{n}", after="1s")
    await ticker.client.put("log:", id="pending", after="3h")
    await ticker.advance(minutes=59)
    await sweep_all(ticker)
    assert await indexed(store) == 21, "within the window a finished id leaves its mark"
    await ticker.advance(minutes=2)
    await sweep_all(ticker)
    assert await indexed(store) == 1, "what is pending stays, however long"
    assert (await ticker.client.get("id-1")).state == "unknown"
    assert (await ticker.client.put("log:", id="id-1")).outcome == "created"


async def test_the_id_of_a_task_that_is_hours_late_is_not_swept(ticker: Ticker, store: Store) -> None:
    """Forgotten, a repeated request would be a second task beside the one that has yet to fire."""
    await ticker.turn()
    await ticker.client.put("log:", id="late", after="1s")
    ticker.clock.advance(seconds=3 * 3600)
    await sweep_all(ticker)
    assert await indexed(store) == 1
    assert (await ticker.client.put("log:", id="late", after="1s")).outcome == "kept"


async def sweep_all(ticker: Ticker) -> None:
    for _ in range(10 * len(ticker.store.keys)):
        await ticker.engine.sweeper.step()


async def indexed(store: Store) -> int:
    lengths = [await store.run_one(keys.slot, [("HLEN", keys.ids)]) for keys in store.keys.partitions]
    return sum(length for [length] in lengths)


async def test_a_large_call_is_stored_and_cancelled_whole(client: Client, store: Store) -> None:
    """Lua cannot spread more than some thousand values; a call that failed on that half-way would lose tasks."""
    ids = [f"id-{n}" for n in range(8192)]
    summary = await client.put_many(Task("log:", id=name, lane="one", after="1h") for name in ids)
    assert summary.created == len(ids)
    again = await client.put_many(Task("log:", id=name, lane="one", after="1h") for name in ids)
    assert again.kept == len(ids)
    books = await balance(store)
    assert books.accepted == books.pending == len(ids)
    assert set(await client.cancel_many(ids, lane="one")) == {"cancelled"}
    assert (await balance(store)).cancelled == len(ids)
    assert await indexed(store) == 0


async def test_a_put_with_id_to_an_unavailable_server_fails_clearly(client: Client, store: Store) -> None:
    with bad_road(store) as road:
        road.next("never sent", "never sent", "never sent", "never sent")
        with pytest.raises(Unavailable):
            await client.put("log:", id="id")


class Ahead(ServerClock):
    """A node's clock that is an hour ahead of the server's."""

    def now_ms(self) -> int:
        return super().now_ms() + HOUR_MS


async def test_a_clock_that_runs_ahead_forgets_no_id_before_its_window_is_over(
    mainspring_url: str, mainspring_namespace: str
) -> None:
    store = await Store.open(mainspring_url, namespace=mainspring_namespace, partitions=1, clock=Ahead())
    keys = store.keys.partitions[0]
    over = Slice.at(await store.sample_clock() - HOUR_MS - 10_000, 1000)
    address = Address(0, over, 1, 0).pack()
    await store.run_one(keys.slot, [("HSET", keys.ids, b"i" * 16, address)])
    assert await index.sweep(store, 0, 0, window_ms=60_000) == (0, 0)
    assert await index.sweep(store, 0, 0, window_ms=5_000) == (0, 1)
    await store.aclose()


async def test_a_task_is_not_called_dead_for_an_earlier_one_of_its_id(ticker: Ticker) -> None:
    """Both within one millisecond: the time of the dead letter alone does not distinguish them."""
    ticker.answer("log", lambda one: Dead("no") if one.value() == "first" else None)
    await ticker.client.put("log:", "first", id="order-42")
    await ticker.advance(seconds=0)
    assert (await ticker.client.get("order-42")).state == "dead"
    await ticker.client.put("log:", "second", id="order-42", on_conflict="replace")
    assert [one.value() for one in await ticker.advance(seconds=0)] == ["second"]
    assert (await ticker.client.get("order-42")).state == "done"
    await ticker.advance(seconds=10)
    assert (await ticker.client.get("order-42")).state == "finished", "its slice is gone, the dead letter is there"
