"""`explain` of tasks that are held: paused by whom, parked, behind which head, coming back."""

from collections.abc import Awaitable, Callable

from mainspring.engine.engine import EngineOptions
from mainspring.engine.holds import FEW_BEHIND
from mainspring.model.delivery import Retry
from mainspring.model.explain import moment
from mainspring.model.lane import LanePolicy
from mainspring.model.task import Task
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]


async def test_a_paused_task_says_by_whom_since_when_why_and_until_when(ticker: Ticker) -> None:
    client, now_ms = ticker.client, ticker.clock.now_ms()
    await client.pause(target="log:", reason="deploy", by="ops", for_="1h")
    await client.put("log:", id="x", after="1s")
    await client.put("log:", id="later", after="2h")
    await ticker.advance(seconds=5)
    found = await client.explain("x")
    assert found.code == "paused"
    assert found.text == (
        f"It has been due for 4 s and is paused: target log:, since {moment(now_ms)} by ops (deploy),"
        f" until {moment(now_ms + 3_600_000)}; it is delivered afterwards."
    )
    assert (found.since_ms, found.by, found.reason) == (now_ms, "ops", "deploy")
    assert found.who == found.by, "its old name"
    assert found.until_ms == now_ms + 3_600_000
    assert (await client.explain("later")).code == "not-due"


async def test_a_task_behind_a_paused_one_of_its_lane_is_paused_too(ticker: Ticker) -> None:
    await ticker.client.pause(target="kafka:a")
    await ticker.client.put("kafka:a", id="first", after="1s", lane="l")
    await ticker.client.put("kafka:b", id="second", after="2s", lane="l")
    await ticker.advance(seconds=5)
    found = await ticker.client.explain("second")
    assert found.code == "paused"
    assert "target kafka:a" in found.text


async def test_a_spilled_task_names_the_head_it_waits_for(ticker: Ticker) -> None:
    ticker.answer("log", lambda one: Retry("busy", after_ms=60_000) if one.id == "head" else None)
    await ticker.client.put("log:", id="head", after="1s", lane="a")
    many = [Task("log:", n, after=f"{1001 + n}ms", id=f"x{n}", lane="a") for n in range(FEW_BEHIND + 8)]
    await ticker.client.put_many(many)
    await ticker.advance(seconds=5)
    found = await ticker.client.explain("x7")
    assert (found.code, found.head_id) == ("behind-head", "head")
    assert "failed (busy) and will be retried, attempt 2" in found.text
    assert (await ticker.client.explain("head")).code == "retry"


async def test_parked_head_and_those_behind_it(tickers: Tickers) -> None:
    ticker = await tickers(
        options=EngineOptions(lane_policy=LanePolicy("park")), handlers={"log": lambda _: Retry("busy")}
    )
    await ticker.client.put("log:", id="head", after="1s", lane="a")
    await ticker.client.put("log:", id="next", after="2s", lane="a")
    await ticker.advance(seconds=5)
    head, behind = await ticker.client.explain("head"), await ticker.client.explain("next")
    assert (head.code, behind.code) == ("parked", "parked")
    assert head.text.startswith("It failed (busy), and its lane a is parked until someone acts;")
    assert behind.text.startswith("Its lane a is parked behind head, which failed (busy);")
    assert behind.text.endswith("mainspring lane show a.")


async def test_explain_says_that_a_held_task_is_being_released(ticker: Ticker) -> None:
    await ticker.client.pause()
    await ticker.client.put("log:", id="x", after="1s")
    await ticker.advance(seconds=5)
    await ticker.client.resume()
    found = await ticker.client.explain("x")
    assert (found.code, found.text.endswith("is being released now.")) == ("held", True)
