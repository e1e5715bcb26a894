"""A failing head: block, skip or park; and the commands for a stalled lane."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.model.delivery import Dead, Delivery, Failure, Outcome, Retry
from mainspring.model.lane import LanePolicy
from mainspring.model.retry import RetryPolicy
from mainspring.model.task import Task
from mainspring.store.keys import partition_of
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]
RETRY = RetryPolicy(max_attempts=100, base_ms=10_000, factor=1.0, jitter="none")


def values(deliveries: list[Delivery]) -> list[Any]:
    return [one.value() for one in deliveries]


def options(policy: str, **rest: Any) -> EngineOptions:
    return EngineOptions(retry=RETRY, lane_policy=LanePolicy.parse(policy), **rest)


class Target:
    """Fails for the values that are set, until they are changed."""

    def __init__(self, *failing: object, outcome: Outcome = Retry("busy")) -> None:  # noqa: B008  # frozen
        self.failing, self.outcome = set(failing), outcome

    def __call__(self, delivery: Delivery) -> Outcome | None:
        return self.outcome if delivery.value() in self.failing else None


async def put(ticker: Ticker, count: int = 4, lane: str = "a") -> list[str]:
    tasks = [Task("log:", n, after=f"{1000 + n}ms", lane=lane) for n in range(count)]
    return [one.id for one in (await ticker.client.put_many(tasks, handles=True)).handles or ()]


async def test_skip_frees_the_lane_and_retries_the_head_later(tickers: Tickers, store: Store) -> None:
    target = Target(0)
    ticker = await tickers(options=options("skip"), handlers={"log": target})
    await put(ticker)
    assert values(await ticker.advance(seconds=2)) == [0, 1, 2, 3]
    assert await ticker.client.lanes() == []
    target.failing.clear()
    assert values(await ticker.advance(seconds=10)) == [0]
    await balance(store)


@pytest.mark.parametrize("outcome", [Retry("busy"), Dead("never")])
async def test_park_stops_the_lane_at_the_first_failure_until_a_person_acts(
    tickers: Tickers, store: Store, outcome: Outcome
) -> None:
    target = Target(0, outcome=outcome)
    ticker = await tickers(options=options("park"), handlers={"log": target})
    [head, *_] = await put(ticker)
    await put(ticker, 2, lane="other")
    assert sorted(values(await ticker.advance(hours=3)), key=str) == [0, 0]
    [parked, other] = sorted(await ticker.client.lanes(), key=lambda one: one.lane)
    assert (parked.lane, parked.state, parked.behind, parked.attempts) == ("a", "parked", 3, 1)
    assert (parked.error, parked.next_ms) == (outcome.reason, None)  # type: ignore[union-attr]
    assert (other.lane, other.state, other.behind) == ("other", "parked", 1)
    assert (await ticker.client.get(head)).state == "pending"
    assert await list_dead(store) == []
    assert not (await verify(store)).reported
    target.failing.clear()
    assert await ticker.client.lane_resume("a") == "ok"
    assert values(await ticker.advance(seconds=1)) == [0, 1, 2, 3]
    assert (await ticker.client.lane("a")).state in ("flowing", "returning")
    assert (await ticker.client.lane("other")).state == "parked"
    assert [one.attempt for one in ticker.deliveries if one.lane == "a"] == [1, 2, 1, 1, 1]


@pytest.mark.parametrize("outcome", [Retry("busy"), Dead("never")])
async def test_the_error_handler_gets_a_parked_lane_and_no_death(tickers: Tickers, outcome: Outcome) -> None:
    seen: list[Failure] = []
    ticker = await tickers(options=options("park", error_handler=seen.append), handlers={"log": lambda _: outcome})
    await ticker.client.put("log:", id="head", lane="a", after="1s")
    await ticker.advance(seconds=5)
    await ticker.engine.failures.seen()
    assert [(one.id, one.outcome, one.next_at_ms) for one in seen] == [("head", "parked", None)]


async def test_a_parked_lane_stays_parked_after_a_takeover_and_parks_again(tickers: Tickers, store: Store) -> None:
    first = await tickers(options=options("park"), handlers={"log": Target(0)})
    await put(first)
    await first.advance(seconds=5)
    await first.crash()
    first.clock.advance(seconds=6)
    target = Target(0)
    second = await tickers(options=options("park"), handlers={"log": target})
    assert values(await second.advance(hours=1)) == []
    assert (await second.client.lane("a")).state == "parked"
    assert await second.client.lane_retry_head("a") == "ok"
    assert values(await second.advance(hours=1)) == [0]
    assert (await second.client.lane("a")).attempts == 2
    target.failing.clear()
    assert await second.client.lane_retry_head("a") == "ok"
    assert values(await second.advance(seconds=1)) == [0, 1, 2, 3]
    await balance(store)


async def test_block_waits_for_the_retries_and_parks_when_it_takes_too_long(tickers: Tickers, store: Store) -> None:
    target = Target(0)
    ticker = await tickers(options=options("block 35s"), handlers={"log": target})
    await put(ticker)
    await ticker.advance(seconds=5)
    waiting = await ticker.client.lane("a")
    assert (waiting.state, waiting.attempts, waiting.error) == ("retrying", 1, "busy")
    assert waiting.next_ms == waiting.since_ms + 10_000  # type: ignore[operator]
    assert values(await ticker.advance(minutes=30)) == [0, 0, 0], "tried at 0, 10, 20 and 30 s, and parked then"
    assert (await ticker.client.lane("a")).state == "parked"
    target.failing.clear()
    assert await ticker.client.lane_retry_head("a") == "ok"
    assert values(await ticker.advance(seconds=1)) == [0, 1, 2, 3]
    await balance(store)


async def test_the_longest_block_counts_from_the_first_failure_although_the_head_was_put_off(
    tickers: Tickers,
) -> None:
    target = Target(0, outcome=Retry("the host is busy", after_ms=5_000, untried=True))
    ticker = await tickers(options=options("block 35s"), handlers={"log": target})
    await put(ticker)
    await ticker.advance(minutes=2)
    target.outcome = Retry("out of order")
    await ticker.advance(seconds=20)
    lane = await ticker.client.lane("a")
    assert (lane.state, lane.error) == ("retrying", "out of order"), "it has failed for twenty seconds"
    await ticker.advance(seconds=20)
    assert (await ticker.client.lane("a")).state == "parked"


async def test_the_longest_block_counts_on_after_a_takeover(tickers: Tickers) -> None:
    first = await tickers(options=options("block 35s"), handlers={"log": Target(0)})
    await put(first)
    await first.advance(seconds=25)
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers(options=options("block 35s"), handlers={"log": Target(0)})
    await second.advance(minutes=10)
    assert len(first.deliveries) + len(second.deliveries) == 4
    assert (await second.client.lane("a")).state == "parked"


async def test_a_target_has_a_policy_of_its_own(tickers: Tickers) -> None:
    rules = {"target:strict": LanePolicy("park"), "target:loose": LanePolicy("skip")}
    ticker = await tickers(options=options("block", target_lanes=rules), handlers={"target": Target(0)})
    for lane in ("strict", "loose", "other"):
        await ticker.client.put_many(Task(f"target:{lane}", n, after=f"{1000 + n}ms", lane=lane) for n in range(2))
    await ticker.advance(seconds=3)
    assert sorted((one.lane, one.value()) for one in ticker.deliveries) == [
        ("loose", 0), ("loose", 1), ("other", 0), ("strict", 0),
    ]  # fmt: skip
    assert {one.lane: one.state for one in await ticker.client.lanes()} == {"strict": "parked", "other": "retrying"}


@pytest.mark.parametrize("policy", ["block", "park"])
async def test_a_head_that_is_skipped_by_hand_is_a_dead_letter_and_its_lane_continues(
    tickers: Tickers, store: Store, policy: str
) -> None:
    ticker = await tickers(options=options(policy), handlers={"log": Target(0)})
    await put(ticker, 60)
    await ticker.advance(seconds=3)
    assert await ticker.client.lane_skip_head("a", reason="not worth it") == "ok"
    assert await ticker.client.lane_skip_head("a") == "no head", "its owner has not looked yet"
    assert await ticker.client.lane_retry_head("a") == "no head"
    assert values(await ticker.advance(seconds=1)) == list(range(1, 60))
    [dead_letter] = await list_dead(store)
    assert (dead_letter.reason, dead_letter.attempts, dead_letter.errors, dead_letter.lane) == (
        "not worth it",
        1,
        ("busy",),
        "a",
    )
    assert (await ticker.client.dead_replay(dead_letter.id)).outcome == "replayed"
    keys = store.keys.partitions[partition_of("a", 4)]
    assert await store.run_one(keys.slot, [("HLEN", keys.held)]) == [0]
    assert not (await verify(store)).reported


@pytest.mark.parametrize("by", ["lane_resume", "lane_retry_head"])
async def test_a_parked_lane_whose_head_has_expired_continues_when_it_is_resumed(tickers: Tickers, by: str) -> None:
    ticker = await tickers(options=options("park"), handlers={"log": Target(0)})
    await ticker.client.put("log:", 0, after="1s", id="head", lane="a", expires="1m")
    await ticker.client.put("log:", 1, after="2s", lane="a")
    assert values(await ticker.advance(hours=1)) == [0]
    assert (await ticker.client.lane("a")).state == "parked"
    assert await getattr(ticker.client, by)("a") == "ok"
    assert values(await ticker.advance(seconds=1)) == [1]
    assert (await ticker.client.explain("head", lane="a")).code == "expired"
    await balance(ticker.store)


async def test_retry_head_does_not_wait_for_its_time(tickers: Tickers) -> None:
    target = Target(0)
    ticker = await tickers(options=options("block"), handlers={"log": target})
    await put(ticker, 60)
    await ticker.advance(seconds=3)
    target.failing.clear()
    assert await ticker.client.lane_retry_head("a") == "ok"
    assert values(await ticker.advance(seconds=1)) == list(range(60))


@pytest.mark.parametrize("policy", ["block", "park"])
async def test_a_failed_head_that_is_cancelled_frees_its_lane_at_once(
    tickers: Tickers, store: Store, policy: str
) -> None:
    slow = RetryPolicy(max_attempts=9, base_ms=3_600_000, cap_ms=3_600_000, jitter="none")
    made = EngineOptions(retry=slow, lane_policy=LanePolicy.parse(policy if policy == "park" else "block 2d"))
    ticker = await tickers(options=made, handlers={"log": Target(0)})
    [head, *_] = await put(ticker, 60)
    await ticker.advance(seconds=3)
    assert await ticker.client.cancel(head) == "cancelled"
    assert values(await ticker.advance(seconds=2)) == list(range(1, 60))
    await balance(store)


async def test_lanes_that_flow_have_no_head(ticker: Ticker) -> None:
    client = ticker.client
    assert await client.lane_retry_head("a") == "no head"
    assert await client.lane_skip_head("a") == "no head"
    assert await client.lane_resume("a") == "no head"
    assert (await client.lane("a")).state == "flowing"


async def test_a_paused_lane_is_shown_and_resumed_like_a_parked_one(ticker: Ticker) -> None:
    await ticker.client.pause(lane="a", reason="stocktaking", by="ops", for_="1h")
    await put(ticker)
    await ticker.advance(seconds=3)
    [held] = await ticker.client.lanes()
    assert (held.state, held.cause, held.behind) == ("held", "pause:lane a", 4)
    assert (held.reason, held.by, held.who) == ("stocktaking", "ops", "ops")
    assert await ticker.client.lane_resume("a") == "ok"
    assert values(await ticker.advance(seconds=1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("outcome", [Retry("busy", after_ms=7_200_000), Retry("away", after_ms=300_000, untried=True)])
async def test_a_lane_does_not_wait_for_an_attempt_after_its_head_has_expired(
    tickers: Tickers, store: Store, outcome: Retry
) -> None:
    ticker = await tickers(options=options("block 1h"), handlers={"log": Target(0, outcome=outcome)})
    head = await ticker.client.put("log:", 0, after="1s", expires="20s", lane="a")
    await ticker.client.put("log:", 1, after="2s", lane="a")
    await ticker.advance(seconds=10)
    assert (await ticker.client.lane("a")).state == "retrying"
    if not outcome.untried:
        assert "before another attempt; the last error was: busy" in (await ticker.client.explain(head.id)).text
    assert values(await ticker.advance(seconds=15)) == [1]
    assert (await ticker.client.explain(head.id)).code == "expired"
    assert (await balance(store)).done == 1


async def test_an_expired_head_does_not_park_its_lane(tickers: Tickers) -> None:
    ticker = await tickers(options=options("park"))
    await ticker.client.put("log:", "expires", after="1s", expires="1s", lane="a")
    await ticker.client.put("log:", "next", after="2s", lane="a")
    ticker.clock.advance(seconds=5)
    assert values(await ticker.turn()) == ["next"]


@pytest.mark.parametrize("wait_ms", [1_000, 4_000, 60_000])
async def test_a_failed_head_that_is_moved_is_still_waited_for(tickers: Tickers, store: Store, wait_ms: int) -> None:
    target = Target(0, outcome=Retry("busy", after_ms=wait_ms))
    ticker = await tickers(options=options("block 2h"), handlers={"log": target})
    [head, *_] = await put(ticker, 2)
    assert values(await ticker.advance(ms=1_500)) == [0]
    await ticker.client.reschedule(head, after="600s")
    target.failing.clear()
    assert values(await ticker.advance(seconds=590)) == []
    assert values(await ticker.advance(seconds=11)) == [0, 1]
    await balance(store)


@pytest.mark.parametrize("wait_ms", [1_000, 4_000, 60_000])
async def test_a_failed_head_that_is_cancelled_frees_its_lane(tickers: Tickers, store: Store, wait_ms: int) -> None:
    target = Target(0, outcome=Retry("busy", after_ms=wait_ms))
    ticker = await tickers(options=options("block 2h"), handlers={"log": target})
    [head, *_] = await put(ticker, 2)
    assert values(await ticker.advance(ms=1_500)) == [0]
    assert await ticker.client.cancel(head) == "cancelled"
    assert values(await ticker.advance(seconds=5)) == [1]
    await balance(store)
