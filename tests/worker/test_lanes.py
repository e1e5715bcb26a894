"""The policy of a lane holds for tasks that workers run, too."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mainspring import Config, Dead, Retry, Scheduler
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import EXPIRED, EXPIRED_RUNNING, Failure
from mainspring.model.lane import LanePolicy
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.store.verify.checks import verify
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker
from tests.support.fleets import PARTITIONS, Fleet
from tests.support.job_queues import TARGET, HandWorker

Tickers = Callable[..., Awaitable[Ticker]]
PARK = LanePolicy("park")


class Shop:
    """A handler that fails for the set orders, and its calls."""

    def __init__(self) -> None:
        self.told: list[Failure] = []
        self.scheduler = Scheduler(
            Config(redis_url="redis://nobody.invalid", lane_policy=PARK, error_handler=self.tell)
        )
        self.failing: dict[int, Retry | Dead] = {}
        self.ran: list[int] = []
        self.expire = self.scheduler.handler(queue="mail", result_ttl="1h")(self.expire_order)

    async def tell(self, failure: Failure) -> None:
        self.told.append(failure)

    async def expire_order(self, order: int) -> str:
        self.ran.append(order)
        if order in self.failing:
            raise self.failing[order]
        return f"{order} is expired"


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
async def ticker(fleet: Fleet, namespace: str, clock: ManualClock, shop: Shop) -> AsyncIterator[Ticker]:
    options = EngineOptions(lane_policy=PARK)
    made = Ticker(fleet.url, namespace=namespace, partitions=PARTITIONS, clock=clock, options=options)
    async with made.running(shop.scheduler):
        yield made


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Retry("busy", after_ms=1), "busy"),
        (Dead("no such order"), "no such order"),
        (Dead("expired"), "its handler says: expired"),
    ],
)
async def test_park_stops_the_lane_at_the_first_failure_even_a_permanent_one(
    ticker: Ticker, store: Store, shop: Shop, outcome: Retry | Dead, error: str
) -> None:
    shop.failing[0] = outcome
    for n in range(3):
        await shop.expire.after(f"{n + 1}s", id=f"order {n}", lane="a").aput(order=n)
    await ticker.advance(hours=1)
    assert shop.ran == [0]
    assert await list_dead(store) == []
    parked = await ticker.client.lane("a")
    assert (parked.state, parked.behind, parked.error) == ("parked", 2, error)
    head, behind = [await ticker.client.explain(f"order {n}", lane="a") for n in (0, 1)]
    assert (head.code, behind.code, behind.head_id) == ("parked", "parked", "order 0")
    assert await ticker.client.find_result("order 0", lane="a") is None, "it is not over"
    assert not (await verify(store)).reported
    [failure] = shop.told
    assert (failure.id, failure.outcome, failure.next_at_ms) == ("order 0", "parked", None)
    shop.failing.clear()
    assert await ticker.client.lane_resume("a") == "ok"
    await ticker.advance(seconds=5)
    assert shop.ran == [0, 0, 1, 2]
    assert await ticker.client.result("order 0", lane="a", timeout=60) == "0 is expired"
    assert (await balance(store)).pending == 0


@pytest.mark.parametrize("reason", [EXPIRED, EXPIRED_RUNNING])
async def test_a_head_that_expired_parks_nothing(tickers: Tickers, store: Store, reason: str) -> None:
    ticker = await tickers(workers=True, options=EngineOptions(lane_policy=PARK))
    worker = HandWorker(store)
    await ticker.client.put(TARGET, 0, after="1s", id="late", lane="a", expires="2s")
    await ticker.client.put(TARGET, 1, after="2s", id="next", lane="a")
    await ticker.advance(seconds=2)
    if reason == EXPIRED_RUNNING:
        await worker.end(await worker.take_one(), outcome=Dead(reason))
    ticker.clock.advance(seconds=10)
    assert await worker.take() == []
    await ticker.turn()
    assert [(one.id, one.reason) for one in await list_dead(store)] == [("late", reason)]
    assert (await worker.take_one()).id == "next"


async def test_the_node_reports_a_lane_that_has_waited_too_long_for_a_worker(tickers: Tickers) -> None:
    told: list[Failure] = []
    options = EngineOptions(lane_policy=LanePolicy("block", 10_000), error_handler=told.append)
    ticker = await tickers(workers=True, options=options)
    worker = HandWorker(ticker.store)
    await ticker.client.put(TARGET, 0, after="1s", id="head", lane="a")
    for wait_ms in (5_000, 60_000):
        await ticker.advance(seconds=6)
        await worker.end(await worker.take_one(), outcome=Retry("busy", after_ms=wait_ms))
        await ticker.turn()
    await ticker.engine.failures.seen()
    assert [(one.id, one.attempt, one.outcome, one.error) for one in told] == [("head", 2, "parked", "busy")]
    assert (await ticker.client.lane("a")).state == "parked"
