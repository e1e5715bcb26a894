"""Breakers, limits and shares through the engine: a receiver in trouble holds up its own tasks only."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.engine.flow import FlowOptions
from mainspring.engine.lookahead import Reach
from mainspring.model.delivery import DONE, Dead, Delivery, Outcome, Retry
from mainspring.model.explain import Explanation, moment, span
from mainspring.model.flow import BreakerPolicy, Limit, Rate
from mainspring.model.retry import RetryPolicy
from mainspring.model.targets.named import Targets
from mainspring.model.targets.webhook import Webhook
from mainspring.model.task import Task
from mainspring.sinks.base import NamedSink
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.ticker import Ticker
from tests.support.web_receiver import Answer, receiving

Tickers = Callable[..., Awaitable[Ticker]]

BREAKER = BreakerPolicy(min_calls=10, window_ms=10_000, open_ms=5_000, max_open_ms=20_000, probes=2, ramp_ms=10_000)
PATIENT = RetryPolicy(max_attempts=100, base_ms=1_000, factor=1, jitter="none")


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    made = HttpSink(HttpOptions(allow=("127.0.0.0/8",)))
    yield made
    await made.aclose()


class Shop:
    """Answers as set, in a sink of its own."""

    def __init__(self) -> None:
        self.well = True
        self.seen: list[Delivery] = []

    def __call__(self, delivery: Delivery) -> Outcome:
        self.seen.append(delivery)
        return DONE if self.well else Retry("out of order")


class Slow:
    """A sink whose deliveries end when the test says so."""

    def __init__(self) -> None:
        self.under_way: list[asyncio.Future[None]] = []
        self.most = 0
        self.ended = 0

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        mine = [asyncio.get_running_loop().create_future() for _ in batch]
        self.under_way += mine
        self.most = max(self.most, len(self.under_way))
        await asyncio.gather(*mine)
        return [DONE] * len(batch)

    def end(self, count: int) -> None:
        some, self.under_way = self.under_way[:count], self.under_way[count:]
        self.ended += len(some)
        for one in some:
            one.set_result(None)

    async def aclose(self) -> None: ...


class SlowOneByOne(Slow):
    """The same of those whose deliveries end one by one."""

    batch_tasks = 64

    async def deliver_to(self, spec: Webhook, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        del spec
        return await self.deliver(batch)


async def step(ticker: Ticker) -> None:
    """Like a turn, without waiting for deliveries under way."""
    engine = ticker.engine
    await engine.keeper.step()
    engine.lookahead.reconnected()
    while await engine.lookahead.step() == 0.0:
        pass
    await engine.permits.step()
    await engine.dispatcher.step()
    for _ in range(3):
        await asyncio.sleep(0)


async def work_off(ticker: Ticker, slow: Slow, store: Store) -> None:
    async with asyncio.timeout(120):
        while slow.under_way or (await balance(store)).pending:
            slow.end(1_000)
            ticker.clock.advance(ms=500)
            await step(ticker)
    await ticker.turn()


async def put(ticker: Ticker, target: str, count: int, **more: object) -> None:
    await ticker.client.put_many(Task(target, n, after="1s", **more) for n in range(count))  # type: ignore[arg-type]


async def pass_time(ticker: Ticker, seconds: int, step_ms: int = 200) -> None:
    """In small steps: what is held has no due time to go to."""
    for _ in range(seconds * 1000 // step_ms):
        ticker.clock.advance(ms=step_ms)
        await ticker.turn()


async def open_breaker(tickers: Tickers) -> tuple["Shop", Ticker]:
    """A receiver that has failed twenty times, and the node whose breaker has opened by it."""
    shop = Shop()
    shop.well = False
    first = await tickers(options=EngineOptions(node="first", retry=PATIENT, flow=FlowOptions(BREAKER)))
    first.answer("http", shop)
    await put(first, "http://shop.example/", 20)
    await pass_time(first, 2)
    return shop, first


# -- breaker ------------------------------------------------------------------------------------------------------


async def test_a_breaker_closes_after_a_while_without_a_task_for_its_receiver(tickers: Tickers) -> None:
    ticker = await tickers(options=EngineOptions(flow=FlowOptions(BREAKER)))
    ticker.answer("http", lambda _: Retry("down"))
    await ticker.client.put_many(Task("http://shop.example/", n, after="1s", retry="1") for n in range(20))
    await pass_time(ticker, 2)
    flow = ticker.engine.flow
    assert [one.receiver for one in flow.bounded] == ["http://shop.example"]
    ticker.clock.advance(seconds=1_800)
    await ticker.engine.permits.step()
    assert flow.bounded == []


async def test_tasks_that_wait_for_a_host_are_not_sent_once_its_breaker_has_opened(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    ticker = await tickers(sinks={"http": sink}, options=EngineOptions(retry=PATIENT, flow=FlowOptions(BREAKER)))
    with receiving(lambda _: Answer(503)) as dead:
        await put(ticker, dead.url, 1_000)
        await ticker.advance(seconds=1)
        assert len(dead.requests) < 300, "the others were under way too, and waited"
        waiting = (await ticker.client.list(limit=1_000)).tasks
        assert sum(one.attempt == 1 for one in waiting) == 1_000 - len(dead.requests), "and count as not tried"


async def test_a_dead_host_is_left_alone_and_a_healthy_one_is_served(
    tickers: Tickers, store: Store, sink: HttpSink
) -> None:
    ticker = await tickers(sinks={"http": sink}, options=EngineOptions(retry=PATIENT, flow=FlowOptions(BREAKER)))
    well = False
    with receiving(lambda _: Answer(200 if well else 503)) as dead, receiving() as healthy:
        await put(ticker, dead.url, 30)
        await ticker.advance(seconds=1)
        tried = len(dead.requests)
        assert tried == 30, "they were under way before anything was known"
        await put(ticker, dead.url, 300)
        await put(ticker, healthy.url, 300)
        await ticker.advance(seconds=3)
        assert len(healthy.requests) == 300
        assert len(dead.requests) == tried, "its breaker is open"
        await pass_time(ticker, 60)
        probes = len(dead.requests) - tried
        assert 2 <= probes <= 10, "a few probes, less and less often"
        well = True
        await pass_time(ticker, 60)
        counts = Counter(request.headers["idempotency-key"] for request in dead.requests)
        assert len(counts) == 330
        attempts = [int(request.headers["mainspring-attempt"]) for request in dead.requests]
        assert max(attempts) <= 1 + 1 + probes, "held work uses up no attempts"
    books = await balance(store)
    assert (books.done, books.pending, books.dead) == (630, 0, 0)


async def test_on_recovery_the_backlog_goes_out_at_a_growing_rate(tickers: Tickers, store: Store) -> None:
    shop = Shop()
    ticker = await tickers(options=EngineOptions(retry=PATIENT, flow=FlowOptions(BREAKER)))
    ticker.answer("http", shop)
    shop.well = False
    await put(ticker, "http://shop.example/", 20)
    await ticker.advance(seconds=2)
    await put(ticker, "http://shop.example/", 2_000)
    await ticker.advance(seconds=1)
    shop.well, before = True, len(shop.seen)
    per_second = []
    for _ in range(25):
        for _ in range(10):
            ticker.clock.advance(ms=100)
            await ticker.turn()
        per_second.append(len(shop.seen) - before)
        before = len(shop.seen)
    sent = [count for count in per_second if count]
    assert sum(sent) >= 2_000
    assert sent[0] < 40, f"it begins slowly: {per_second}"
    assert max(sent) > 10 * sent[0], f"and ends fast: {per_second}"
    assert (await balance(store)).pending == 0


async def test_a_receiver_that_recovered_gets_its_tasks_although_it_refuses_some(
    tickers: Tickers, store: Store
) -> None:
    _, ticker = await open_breaker(tickers)
    await ticker.client.put_many(Task("http://shop.example/", n, after="1s", retry="1") for n in range(200))
    await pass_time(ticker, 1)
    ticker.answer("http", lambda _: Dead("HTTP 404 Not Found"))
    await pass_time(ticker, 30)
    books = await balance(store)
    assert (books.dead, books.pending) == (220, 0), "three at a time, and not three in every minute"


@pytest.mark.parametrize("end", ["expired", "dropped", "cancelled"])
async def test_tasks_that_are_over_when_their_turn_comes_do_not_keep_a_breaker_from_closing(
    tickers: Tickers, store: Store, end: str
) -> None:
    shop = Shop()
    shop.well = False
    ticker = await tickers(options=EngineOptions(retry=PATIENT, flow=FlowOptions(BREAKER)))
    ticker.answer("http", shop)
    await put(ticker, "http://shop.example/", 20, retry="1")
    await pass_time(ticker, 2)
    ids = [f"old-{n}" for n in range(60)]
    expires = "2s" if end == "expired" else None
    await ticker.client.put_many(Task("http://shop.example/old", id=id, expires=expires) for id in ids)
    await pass_time(ticker, 1)
    if end == "cancelled":
        assert set(await ticker.client.cancel_many(ids)) == {"cancelled"}
    elif end == "dropped":
        await ticker.client.pause(target="http://shop.example/old", mode="drop")
    shop.well = True
    await put(ticker, "http://shop.example/", 10)
    await pass_time(ticker, 20)
    books = await balance(store)
    assert (books.done, books.pending) == (10, 0)
    assert books.dead + books.cancelled == 20 + 60


async def test_explain_says_that_the_breaker_is_open(ticker: Ticker, tickers: Tickers, store: Store) -> None:
    shop = Shop()
    shop.well = False
    ticker = await tickers(options=EngineOptions(retry=PATIENT, flow=FlowOptions(BREAKER)))
    ticker.answer("http", shop)
    await put(ticker, "http://shop.example/", 20)
    await ticker.advance(seconds=1)
    await ticker.client.put("http://shop.example/", id="held", after="1s")
    await ticker.advance(seconds=2)
    told = await ticker.client.explain("held")
    assert "circuit breaker of http://shop.example has been open since" in told.text
    assert "probed until it responds" in told.text


async def test_explain_follows_a_breaker_through_its_probes_and_its_ramp(tickers: Tickers, store: Store) -> None:
    shop = Shop()
    shop.well = False
    policy = BreakerPolicy(min_calls=10, open_ms=10_000, probes=1, ramp_ms=3_600_000)
    ticker = await tickers(options=EngineOptions(retry=PATIENT, flow=FlowOptions(policy)))
    ticker.answer("http", shop)
    await put(ticker, "http://shop.example/", 20)
    await ticker.advance(seconds=1)
    await put(ticker, "http://shop.example/", 400)
    await put(ticker, "http://shop.example/", 100, lane="a")
    await ticker.client.put("http://shop.example/", id="plain", after="3s")
    await ticker.client.put("http://shop.example/", id="in a lane", after="3s", lane="a")
    await ticker.advance(seconds=4)
    [flow_limit] = ticker.engine.flow.bounded
    breaker = flow_limit.breaker
    assert breaker is not None

    async def told(name: str) -> Explanation:
        return await ticker.client.explain(name, lane="a" if name == "in a lane" else None)

    first_ms = breaker.next_ms
    for name in ("plain", "in a lane"):
        found = await told(name)
        assert (found.code, found.until_ms) == ("breaker", first_ms)
        assert f"the next probe is sent in {span(first_ms - ticker.clock.now_ms())} ({moment(first_ms)})" in found.text
        assert found.since_ms is not None
        assert found.reason is not None
        assert "has been open since" in found.reason
    await pass_time(ticker, 10)
    assert breaker.state == "open", "the probe has failed"
    assert breaker.next_ms > first_ms
    assert {(await told(name)).until_ms for name in ("plain", "in a lane")} == {breaker.next_ms}
    shop.well = True
    await pass_time(ticker, 25)
    state: str = breaker.state
    assert state == "ramp"
    for name in ("plain", "in a lane"):
        found = await told(name)
        assert (found.code, found.until_ms) == ("breaker", None)
        assert found.text.endswith("the backlog of http://shop.example is delivered at a growing rate after it failed.")


async def test_a_breaker_that_is_off_never_opens(tickers: Tickers, store: Store) -> None:
    shop = Shop()
    shop.well = False
    options = EngineOptions(retry=RetryPolicy(1), flow=FlowOptions(BreakerPolicy(off=True)))
    ticker = await tickers(options=options)
    ticker.answer("http", shop)
    await put(ticker, "http://shop.example/", 200)
    await ticker.advance(seconds=1)
    await put(ticker, "http://shop.example/", 200)
    await ticker.advance(seconds=1)
    assert len(shop.seen) == 400


async def test_lanes_behind_an_open_breaker_keep_their_order(tickers: Tickers, store: Store) -> None:
    shop = Shop()
    shop.well = False
    ticker = await tickers(options=EngineOptions(retry=PATIENT, flow=FlowOptions(BREAKER)))
    ticker.answer("http", shop)
    await put(ticker, "http://shop.example/", 20)
    await ticker.advance(seconds=2)
    for lane in ("a", "b", "c"):
        await put(ticker, "http://shop.example/", 20, lane=lane)
    await ticker.advance(seconds=3)
    shop.well = True
    await pass_time(ticker, 60)
    for lane in ("a", "b", "c"):
        order = [one.value() for one in shop.seen if one.lane == lane and one.attempt >= 1]
        assert sorted(set(order)) == list(range(20))
        assert list(dict.fromkeys(order)) == list(range(20)), "each for the first time in due order"
    assert (await balance(store)).pending == 0


# -- limits -------------------------------------------------------------------------------------------------------


async def test_two_nodes_share_one_rate(tickers: Tickers, store: Store) -> None:
    flow = FlowOptions(limits={"target:shop": Limit(Rate(50, burst=5))})
    nodes = [await tickers(options=EngineOptions(node=name, flow=flow)) for name in ("a", "b")]
    first, second = nodes
    first.engine.follow({0, 1}, set())
    second.engine.follow({2, 3}, set())
    await put(first, "target:shop", 400)
    await put(first, "log:", 400)
    sent = []
    for _ in range(100):
        first.clock.advance(ms=100)
        for node in nodes:
            await node.turn()
        sent.append(sum(one.target == "target:shop" for node in nodes for one in node.deliveries))
    assert all(node.deliveries for node in nodes), "both have partitions"
    others = sum(one.target == "log:" for node in nodes for one in node.deliveries)
    assert others == 400, "others are not held up"
    assert all(later - sent[at] <= 50 + 5 + 10 for at, later in enumerate(sent[10:])), f"in any second: {sent}"
    assert sent[-1] == 400
    assert (await balance(store)).pending == 0


async def test_explain_says_that_a_task_is_rate_limited(tickers: Tickers, store: Store) -> None:
    flow = FlowOptions(limits={"target:shop": Limit(Rate.read("1/h"))})
    ticker = await tickers(options=EngineOptions(flow=flow))
    for name in ("one", "two", "three"):
        await ticker.client.put("target:shop", id=name, after="1s")
    await ticker.advance(seconds=5)
    assert len(ticker.deliveries) == 1
    texts = [(await ticker.client.explain(name)).text for name in ("one", "two", "three")]
    assert sum("rate-limited to 1/h" in text for text in texts) == 2, texts
    held = [found for name in ("one", "two", "three") if (found := await ticker.client.explain(name)).code != "done"]
    assert [(one.code, one.reason) for one in held] == [("rate-limited", "target:shop is rate-limited to 1/h")] * 2
    assert all(one.since_ms is not None and one.until_ms is None for one in held)


async def test_all_nodes_together_keep_the_limit_of_deliveries_under_way(tickers: Tickers, store: Store) -> None:
    slow = Slow()
    flow = FlowOptions(limits={"target:shop": Limit(concurrency=3)})
    nodes = [await tickers(sinks={"target": slow}, options=EngineOptions(node=name, flow=flow)) for name in ("a", "b")]
    nodes[0].engine.follow({0, 1}, set())
    nodes[1].engine.follow({2, 3}, set())
    await put(nodes[0], "target:shop", 40)
    nodes[0].clock.advance(seconds=1)
    for _ in range(400):
        for node in nodes:
            await step(node)
        slow.end(1)
        nodes[0].clock.advance(ms=20)
        if slow.ended == 40:
            break
    for node in nodes:
        await node.turn()
    assert slow.most == 3
    assert slow.ended == 40
    assert (await balance(store)).done == 40


async def test_a_delivery_that_hangs_keeps_its_own_slot_and_no_other(tickers: Tickers, store: Store) -> None:
    slow = Slow()
    flow = FlowOptions(limits={"target:shop": Limit(concurrency=4)})
    ticker = await tickers(sinks={"target": slow}, options=EngineOptions(flow=flow))
    await put(ticker, "target:shop", 20)
    ticker.clock.advance(seconds=1)
    for _ in range(20):
        await step(ticker)
        ticker.clock.advance(ms=20)
    assert len(slow.under_way) == 4
    hanging = slow.under_way.pop(0)
    for _ in range(200):
        slow.end(1)
        ticker.clock.advance(ms=100)
        await step(ticker)
    assert (slow.ended, hanging.done()) == (19, False)
    assert (await balance(store)).done == 19
    hanging.set_result(None)
    await ticker.turn()
    assert (await balance(store)).done == 20


async def test_a_target_with_a_rate_and_a_concurrency_continues_after_it_was_idle(
    tickers: Tickers, store: Store
) -> None:
    shop = Shop()
    flow = FlowOptions(limits={"target:shop": Limit(Rate(2), concurrency=1)})
    ticker = await tickers(options=EngineOptions(flow=flow))
    ticker.answer("target", shop)
    for sent in range(1, 6):
        await put(ticker, "target:shop", 3)
        await pass_time(ticker, 10)
        assert len(shop.seen) == 3 * sent


@pytest.mark.parametrize("target", ["http://shop.example/", "target:shop"])
async def test_a_head_that_hangs_holds_up_its_own_lane_and_no_other(
    tickers: Tickers, store: Store, target: str
) -> None:
    slow = SlowOneByOne()
    named = NamedSink(Targets({"shop": Webhook("http://shop.example/")}), {"http": slow})
    ticker = await tickers(sinks={"http": slow, "target": named})
    await ticker.client.put_many(Task(target, n, after="1s", lane=f"lane-{n % 8}") for n in range(40))
    ticker.clock.advance(seconds=2)
    await step(ticker)
    assert len(slow.under_way) == 8
    hanging = slow.under_way.pop(0)
    for _ in range(10):
        slow.end(8)
        await step(ticker)
    assert (slow.ended, hanging.done()) == (35, False)
    hanging.set_result(None)
    for _ in range(10):
        await step(ticker)
        slow.end(8)
    await ticker.turn()
    assert (await balance(store)).done == 40


async def test_a_target_that_never_answers_delays_no_other(tickers: Tickers, store: Store) -> None:
    slow = Slow()
    options = EngineOptions(concurrency=200, flow=FlowOptions(BreakerPolicy(off=True)))
    ticker = await tickers(sinks={"target": slow}, options=options)
    healthy = 0
    for number in range(20):
        await put(ticker, "target:dead", 200)
        await put(ticker, "log:", 200)
        for _ in range(10):
            ticker.clock.advance(ms=200)
            await step(ticker)
            await step(ticker)
        if number >= 5:
            assert len(ticker.deliveries) >= healthy + 150, "it goes on, whatever waits for the dead one"
        healthy = len(ticker.deliveries)
    assert slow.most <= 160, "three quarters of the room, and no more"
    assert ticker.engine.lookahead.held < 2_000, "held work is not kept in memory"
    await work_off(ticker, slow, store)
    books = await balance(store)
    assert (books.done, books.pending, books.fired) == (8_000, 0, 0)


async def test_fewer_large_tasks_are_in_flight_at_one_time(tickers: Tickers, store: Store) -> None:
    slow, most_bytes, size, count = Slow(), 2 * 2**20, 8_000, 1_500
    options = EngineOptions(reach=Reach(bytes=most_bytes), flow=FlowOptions(BreakerPolicy(off=True)))
    ticker = await tickers(sinks={"target": slow}, options=options)
    await ticker.client.put_many(Task("target:dead", "x" * size, after=f"{1000 + n}ms") for n in range(count))
    for _ in range(20):
        ticker.clock.advance(ms=200)
        await step(ticker)
        await step(ticker)
    assert 0 < slow.most * size < 2 * most_bytes
    await work_off(ticker, slow, store)
    assert (await balance(store)).done == count


async def test_lanes_of_a_limited_target_keep_their_order_and_the_rate(tickers: Tickers, store: Store) -> None:
    flow = FlowOptions(limits={"target:shop": Limit(Rate(50, burst=5))})
    ticker = await tickers(options=EngineOptions(flow=flow))
    for number in range(10):
        tasks = [Task("target:shop", number, after=f"{1000 + number}ms", lane=f"lane {n}") for n in range(20)]
        await ticker.client.put_many(tasks)
    sent = []
    for _ in range(100):
        ticker.clock.advance(ms=100)
        await ticker.turn()
        sent.append(len(ticker.deliveries))
    assert sent[-1] == 200
    assert all(later - sent[at] <= 50 + 5 + 10 for at, later in enumerate(sent[10:])), f"in any second: {sent}"
    for n in range(20):
        assert [one.value() for one in ticker.deliveries if one.lane == f"lane {n}"] == list(range(10))
    assert (await balance(store)).pending == 0


async def test_held_tasks_are_delivered_by_the_next_owner(tickers: Tickers, store: Store) -> None:
    shop = Shop()
    shop.well = False
    options = EngineOptions(node="first", retry=PATIENT, flow=FlowOptions(BREAKER))
    first = await tickers(options=options)
    first.answer("http", shop)
    await put(first, "http://shop.example/", 20)
    await pass_time(first, 2)
    await put(first, "http://shop.example/", 200)
    await pass_time(first, 2)
    assert len(shop.seen) == 20
    await first.crash()
    shop.well = True
    first.clock.advance(seconds=6)
    second = await tickers(options=EngineOptions(node="second", retry=PATIENT, flow=FlowOptions(BREAKER)))
    second.answer("http", shop)
    await pass_time(second, 10)
    assert len({one.idempotency_key for one in shop.seen}) == 220
    books = await balance(store)
    assert (books.done, books.pending) == (220, 0)


@pytest.mark.parametrize("lanes", [False, True], ids=["without lanes", "in lanes"])
@pytest.mark.parametrize("when", ["open", "ramp"])
async def test_a_takeover_does_not_release_the_backlog_of_a_breaker_at_once(
    tickers: Tickers, store: Store, when: str, lanes: bool
) -> None:
    shop, first = await open_breaker(tickers)
    tasks = (Task("http://shop.example/", n, after="1s", lane=f"lane {n}" if lanes else None) for n in range(1_000))
    await first.client.put_many(tasks)
    await pass_time(first, 2)
    shop.well = True
    if when == "ramp":
        await pass_time(first, 6)
        assert 20 < len(shop.seen) < 200
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers(options=EngineOptions(node="second", retry=PATIENT, flow=FlowOptions(BREAKER)))
    second.answer("http", shop)
    sent = [len(shop.seen)]
    for _ in range(20):
        await pass_time(second, 1)
        sent.append(len(shop.seen))
    assert sent[1] - sent[0] <= 40, f"it begins slowly: {sent}"
    assert sent[1] > sent[0], "it is probed at once: it may be well"
    assert len({one.idempotency_key for one in shop.seen}) == 1_020
    books = await balance(store)
    assert (books.done, books.pending) == (1_020, 0)


async def test_a_takeover_from_a_breaker_whose_receiver_still_fails_sends_a_few_probes(
    tickers: Tickers, store: Store
) -> None:
    shop, first = await open_breaker(tickers)
    await put(first, "http://shop.example/", 500)
    await pass_time(first, 2)
    assert len(shop.seen) == 20
    await first.crash()
    first.clock.advance(seconds=6)
    second = await tickers(options=EngineOptions(node="second", retry=PATIENT, flow=FlowOptions(BREAKER)))
    second.answer("http", shop)
    await pass_time(second, 5)
    assert len(shop.seen) <= 22, "two probes, and open again: the former owner's failures are not repeated"


async def test_a_held_task_can_be_cancelled(tickers: Tickers, store: Store) -> None:
    flow = FlowOptions(limits={"target:shop": Limit(Rate.read("1/m"))})
    ticker = await tickers(options=EngineOptions(flow=flow))
    for name in ("one", "two", "three"):
        await ticker.client.put("target:shop", id=name, after="1s")
    await ticker.advance(seconds=5)
    held = {"one", "two", "three"} - {one.id for one in ticker.deliveries}
    assert len(held) == 2
    gone = held.pop()
    assert await ticker.client.cancel(gone) == "cancelled"
    await pass_time(ticker, 180, step_ms=1_000)
    assert {one.id for one in ticker.deliveries} == {"one", "two", "three"} - {gone}


async def test_a_rate_of_a_queue_bounds_what_is_handed_to_it(tickers: Tickers, store: Store) -> None:
    flow = FlowOptions(limits={"queue:mail": Limit(Rate(10, burst=1))})
    ticker = await tickers(options=EngineOptions(flow=flow))
    await put(ticker, "queue:mail/send", 50)
    await put(ticker, "queue:other/send", 50)
    await ticker.advance(seconds=1)
    counts = Counter(one.target for one in ticker.deliveries)
    assert counts["queue:other/send"] == 50
    assert counts["queue:mail/send"] <= 3


# -- catching up --------------------------------------------------------------------------------------------------


async def test_overdue_tasks_leave_at_the_catch_up_rate_and_due_ones_at_once(tickers: Tickers, store: Store) -> None:
    flow = FlowOptions(catch_up=Rate(100, burst=10), catch_up_after_ms=10_000)
    ticker = await tickers(options=EngineOptions(flow=flow))
    await ticker.client.put_many(Task("log:", "old", after="1s") for _ in range(600))
    await ticker.client.put_many(Task("log:", "old", after="3h") for _ in range(100))
    ticker.clock.advance(seconds=4 * 3600)  # no node was running
    await ticker.client.put_many(Task("log:", "now", after="2s") for _ in range(300))
    counts = []
    for _ in range(100):
        ticker.clock.advance(ms=100)
        await ticker.turn()
        counts.append(Counter(one.value() for one in ticker.deliveries))
    assert counts[25]["now"] == 300, "they did not wait"
    assert counts[25]["old"] < 400
    old = [count["old"] for count in counts]
    assert all(later - old[at] <= 100 + 10 + 10 for at, later in enumerate(old[10:])), old
    assert old[-1] == 700
    assert (await balance(store)).pending == 0


async def test_lanes_that_are_overdue_keep_their_order_and_the_catch_up_rate(tickers: Tickers, store: Store) -> None:
    flow = FlowOptions(catch_up=Rate(50, burst=5), catch_up_after_ms=10_000)
    ticker = await tickers(options=EngineOptions(flow=flow))
    for number in range(8):
        await ticker.client.put_many(Task("log:", number, after=f"{1 + number}s", lane=f"lane {n}") for n in range(20))
    await ticker.client.put_many(Task("log:", 8, after="100s", lane=f"lane {n}") for n in range(20))
    ticker.clock.advance(seconds=100)
    sent = []
    for _ in range(80):
        ticker.clock.advance(ms=100)
        await ticker.turn()
        sent.append(len(ticker.deliveries))
    assert sent[-1] == 180
    assert all(later - sent[at] <= 50 + 5 + 10 + 20 for at, later in enumerate(sent[10:])), sent
    for n in range(20):
        assert [one.value() for one in ticker.deliveries if one.lane == f"lane {n}"] == list(range(9))
    assert (await balance(store)).pending == 0
