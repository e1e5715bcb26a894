"""Schedules that programs declare: which of store and code is right, when they differ."""

import logging

import pytest

from mainspring import Config, Scheduler
from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.schedule.input import define
from mainspring.scheduler.publishing import publish
from mainspring.testing.ticker import Ticker

START_MS = 1_800_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


async def test_what_people_edited_stays_however_often_it_was_paused_since(client: Client) -> None:
    declared = define("nightly", cron="0 2 * * *", target="log:")
    await publish(client.schedules, [declared], START_MS)
    await client.schedules.edit("nightly", cron="0 4 * * *", by="ann")
    for _ in range(12):
        await client.schedules.pause("nightly")
        await client.schedules.resume("nightly")
    await publish(client.schedules, [declared], START_MS)
    view = await client.schedules.get("nightly")
    assert view is not None
    assert view.definition.specs == ("0 4 * * *",)
    await publish(client.schedules, [define("nightly", cron="0 5 * * *", target="log:")], START_MS)
    view = await client.schedules.get("nightly")
    assert view is not None
    assert view.definition.specs == ("0 5 * * *",)


async def test_a_declaration_whose_time_is_over_stops_nobody(
    client: Client, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    end_ms = START_MS + 60_000
    await publish(client.schedules, [define("promo", every="10s", target="log:", end=end_ms)], START_MS)
    clock.advance(seconds=120)
    changed = define("promo", every="10s", target="log:", end=end_ms, payload="other")
    new = define("another", every="10s", target="log:")
    with caplog.at_level(logging.WARNING, logger="mainspring.scheduler"):
        await publish(client.schedules, [changed, new], clock.now_ms())
    assert "the time of what is declared is over" in caplog.text
    assert await client.schedules.get("another") is not None
    view = await client.schedules.get("promo")
    assert view is not None
    assert view.payload is None


async def test_once_with_another_time_runs_once_more(ticker: Ticker, client: Client, clock: ManualClock) -> None:
    for second in (10, 30):
        scheduler = Scheduler(Config(redis_url="redis://nobody.invalid"))
        scheduler.once(START_MS + second * 1000, "log:", name="migrate")
        await publish(client.schedules, scheduler.declared(), clock.now_ms())
        came = await ticker.advance(seconds=20)
        assert [one.due_ms for one in came] == [START_MS + second * 1000]
    assert await ticker.advance(seconds=200_000) == [], "each of them once"


async def test_a_declaration_that_has_made_all_its_runs_stops_nobody(
    ticker: Ticker, client: Client, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(client.schedules, [define("twice", every="5s", target="log:", max_runs=2)], START_MS)
    await ticker.advance(seconds=20)
    new = define("another", every="10s", target="log:")
    with caplog.at_level(logging.WARNING, logger="mainspring.scheduler"):
        await publish(client.schedules, [define("twice", every="7s", target="log:", max_runs=2), new], clock.now_ms())
    assert "it has run 2 times, and max_runs of what is declared is 2" in caplog.text
    assert (await client.schedules.get_many(["twice", "another"])).keys() == {"twice", "another"}
