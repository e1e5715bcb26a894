"""Commit: a task leaves its slice only together with what becomes of it, and only by the hand of its owner."""

import time
from collections.abc import Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.dead_letter import DeadLetter
from mainspring.model.delivery import DONE, Dead, Outcome, Retry
from mainspring.model.errors import Refused, Unavailable
from mainspring.model.retry import RetryPolicy
from mainspring.store.codec import INDEXED, decode, entry
from mainspring.store.keys import Address, Slice
from mainspring.store.owner import fire
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.testing.balance import balance
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.ticker import Ticker
from tests.support.owner import HandOwner, address_of

Tickers = Callable[..., Awaitable[Ticker]]


class Begun:
    """One task that has begun, and the commit that gives it a retry."""

    def __init__(self, owner: HandOwner, address: Address, work: fire.Commit, retry_at: Slice) -> None:
        self.owner, self.address, self.work, self.retry_at = owner, address, work, retry_at


@pytest.fixture
async def begun(client: Client, store: Store, clock: ManualClock) -> Begun:
    handle = await client.put("log:", "x", after="0s")
    address = address_of(handle.id)
    owner = await HandOwner.acquire(store, address.partition)
    await owner.begin(address.slice, [address.index])
    [row] = await owner.rows(address.slice)
    retry_at = Slice.at(clock.now_ms() + 60_000, 1000)
    retry = fire.NewPlace(row[5:21], retry_at, entry(0, INDEXED, row[5:21], decode(row)), address.pack())
    touch = await owner.touch(address.slice, done=[address.index])
    work = fire.Commit(owner.partition, owner.token, owner.seq + 1, 0, 0, [touch], [retry], [], [])
    return Begun(owner, address, work, retry_at)


async def test_commit_leaves_task_only_with_its_retry(begun: Begun, store: Store) -> None:
    assert await fire.commit(store, begun.work) == "ok"
    assert await begun.owner.bits("d", begun.address.slice) == [0]
    assert len(await begun.owner.rows(begun.retry_at)) == 1
    books = await balance(store)
    assert (books.accepted, books.pending, books.retried) == (1, 1, 1)


async def test_a_repeated_commit_after_a_lost_reply_changes_nothing(begun: Begun, store: Store) -> None:
    assert await fire.commit(store, begun.work) == "ok"
    assert await fire.commit(store, begun.work) == "ok"
    assert len(await begun.owner.rows(begun.retry_at)) == 1
    assert (await balance(store)).retried == 1


async def test_a_former_owner_cannot_mark_done(begun: Begun, store: Store, clock: ManualClock) -> None:
    clock.advance(seconds=5)
    await HandOwner.acquire(store, begun.owner.partition, owner="next")
    assert await fire.commit(store, begun.work) == "fenced"
    assert (await begun.owner.finish(begun.address.slice, [0])).status == "fenced"
    assert await begun.owner.bits("d", begun.address.slice) == []
    assert await begun.owner.raw("EXISTS", begun.owner.keys.entries(begun.retry_at.name)) == 0


async def test_a_commit_from_the_future_says_rolled_back(begun: Begun, store: Store) -> None:
    assert await fire.commit(store, begun.work._replace(seq=begun.work.seq + 1)) == "rolledback"
    assert (await balance(store)).fired == 1


async def test_a_stale_commit_writes_nothing_at_all(begun: Begun, store: Store) -> None:
    [touch] = begun.work.touches
    stale = touch._replace(header=b"\0" * 20)
    dead_letter = fire.Death(b"\1" * 16, b"", 0)
    assert await fire.commit(store, begun.work._replace(touches=[stale], deaths=[dead_letter])) == "stale"
    assert await begun.owner.bits("d", begun.address.slice) == []
    assert await begun.owner.raw("EXISTS", begun.owner.keys.entries(begun.retry_at.name)) == 0
    assert await begun.owner.raw("EXISTS", begun.owner.keys.dead) == 0


async def test_a_commit_that_breaks_off_half_way_leaves_no_task_done_without_its_dead_letter(
    begun: Begun, store: Store
) -> None:
    """A script that fails midway does not roll back: with its done bits written first the task would be lost."""
    [retry] = begun.work.retries
    work = begun.work._replace(retries=[], deaths=[fire.Death(retry.idh, b"letter", 0)])
    await begun.owner.raw("SET", begun.owner.keys.dead, "somebody's hand in the data")
    with pytest.raises(Refused, match="WRONGTYPE"):
        await fire.commit(store, work)
    assert await begun.owner.bits("d", begun.address.slice) == []
    await begun.owner.raw("DEL", begun.owner.keys.dead)
    assert await fire.commit(store, work) == "ok"
    assert await begun.owner.bits("d", begun.address.slice) == [0]
    assert await begun.owner.raw("HVALS", begun.owner.keys.dead) == [b"letter"]


async def test_done_bits_never_travel_ahead_of_their_retry(ticker: Ticker, tickers: Tickers) -> None:
    """A delivery that fails while the commit of another partition is on its way, and then the node dies."""
    ticker.answer("log", lambda _: Retry("no", after_ms=10_000))
    await ticker.client.put("log:", "x", after="1s")
    await ticker.turn()
    ticker.clock.advance(seconds=1)
    dispatcher = ticker.engine.dispatcher
    await dispatcher.step()
    while ticker.engine.deliveries.in_flight:
        await _breathe()
    assert any(one.has_outcomes for one in ticker.engine.owned.values())
    # As in a round for which this outcome came too late.
    await dispatcher._tick(time.monotonic() + 1)
    await ticker.crash()
    ticker.clock.advance(seconds=6)
    second = await tickers()
    assert [one.value() for one in await second.advance(minutes=1)] != []
    await balance(second.store)


async def _breathe() -> None:
    import asyncio

    await asyncio.sleep(0)


async def test_a_retry_carries_attempt_errors_and_the_same_key(tickers: Tickers, store: Store) -> None:
    policy = RetryPolicy(max_attempts=4, base_ms=1_000, jitter="none")
    answers: list[Outcome] = [Retry("first"), Retry("second", after_ms=10), Retry("third"), DONE]
    ticker = await tickers(options=EngineOptions(retry=policy))
    ticker.answer("log", lambda one: answers[one.attempt - 1])
    handle = await ticker.client.put("log:", "x", id="id", after="1s")
    fired = await ticker.advance(minutes=1)
    assert [one.attempt for one in fired] == [1, 2, 3, 4]
    assert {one.idempotency_key for one in fired} == {fired[0].idempotency_key}
    assert {one.original_due_ms for one in fired} == {handle.due_ms}
    assert [one.due_ms - handle.due_ms for one in fired] == [0, 1_000, 1_010, 5_010]
    assert fired[-1].body.errors == ("first", "second", "third")
    books = await balance(ticker.store)
    assert (books.done, books.retried, books.dead) == (1, 3, 0)


async def test_the_last_failure_leaves_a_dead_letter_with_every_error(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(options=EngineOptions(retry=RetryPolicy(max_attempts=2)))
    ticker.answer("log", lambda one: Retry(f"error {one.attempt}"))
    handle = await ticker.client.put("log:", {"a": 1}, id="id", lane="l", after="1s")
    assert len(await ticker.advance(minutes=1)) == 2
    [dead_letter] = await list_dead(ticker.store)
    assert dead_letter == DeadLetter(
        id="id", reason="error 2", died_ms=dead_letter.died_ms, due_ms=handle.due_ms, target="log:", payload=b'{"a":1}',
        lane="l", attempts=2, errors=("error 1", "error 2"), place=dead_letter.place, lane_in_key=True,
    )  # fmt: skip
    assert (await ticker.client.get("id")).state == "dead"
    books = await balance(ticker.store)
    assert (books.dead, books.retried) == (1, 1)


async def test_a_dead_task_is_not_tried_again(ticker: Ticker) -> None:
    ticker.answer("log", lambda _: Dead("never"))
    await ticker.client.put("log:", after="1s")
    assert len(await ticker.advance(hours=1)) == 1
    assert [dead_letter.reason for dead_letter in await list_dead(ticker.store)] == ["never"]


async def test_a_task_that_lives_again_after_its_death_is_not_dead(ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Dead("no") if one.value() == "old" else None)
    await ticker.client.put("log:", "old", id="id", after="1s")
    await ticker.advance(seconds=1)
    await ticker.client.put("log:", "new", id="id", after="10s", on_conflict="replace")
    assert (await ticker.client.get("id")).state == "pending"
    again = await ticker.client.put("log:", "newer", id="id", after="20s", on_conflict="replace")
    assert again.outcome == "replaced", "taken for dead, it would have been put beside the first"
    assert [one.value() for one in await ticker.advance(minutes=1)] == ["newer"]
    assert (await ticker.client.get("id")).state in ("done", "finished")


async def test_an_expired_task_is_recorded_and_not_delivered_late(ticker: Ticker, clock: ManualClock) -> None:
    await ticker.client.put("log:", "late", id="id", after="1s", expires="10s")
    await ticker.client.put("log:", "on time", after="1s", expires="12s")
    clock.advance(seconds=11, ms=1)  # no node was running
    assert sorted(one.value() for one in await ticker.turn()) == ["on time"]
    [dead_letter] = await list_dead(ticker.store)
    assert (dead_letter.id, dead_letter.reason) == ("id", "expired")
    books = await balance(ticker.store)
    assert (books.done, books.dead) == (1, 1)


@pytest.mark.parametrize("script", ["tick", "commit"])
@pytest.mark.parametrize("fault", ["lose reply", "never sent", "hold back"])
async def test_a_call_that_failed_is_sent_again_unchanged(ticker: Ticker, script: str, fault: Fault) -> None:
    ticker.answer("log", lambda one: Retry("no", after_ms=1_000) if one.attempt == 1 else None)
    await ticker.client.put("log:", after="1s")
    await ticker.turn()
    with bad_road(ticker.store) as road:
        road.next(fault, fault, only=calls(script))
        for _ in range(6):
            try:
                await ticker.advance(seconds=1)
            except Unavailable:
                continue
            finally:
                await road.deliver_held()
    await ticker.advance(seconds=1)
    assert [one.attempt for one in ticker.deliveries] == [1, 2]
    books = await balance(ticker.store)
    assert (books.done, books.retried, books.accepted) == (1, 1, 1)


async def test_a_sink_that_raises_or_miscounts_is_a_failed_delivery(tickers: Tickers, store: Store) -> None:
    class Broken:
        async def deliver(self, batch):  # type: ignore[no-untyped-def]
            if batch[0].value() == "raise":
                raise RuntimeError("boom")
            return []

        async def aclose(self) -> None: ...

    options = EngineOptions(retry=RetryPolicy(max_attempts=1))
    ticker = await tickers(sinks={"kafka": Broken(), "queue": Broken()}, options=options)
    await ticker.client.put("kafka:a", "raise")
    await ticker.client.put("queue:b", "miscount")
    await ticker.client.put("log:", "fine")
    await ticker.turn()
    reasons = sorted(dead_letter.reason for dead_letter in await list_dead(ticker.store))
    assert reasons[0] == "RuntimeError: boom"
    assert "one outcome for each task" in reasons[1]
    assert [one.value() for one in ticker.deliveries] == ["fine"]
    await balance(ticker.store)
