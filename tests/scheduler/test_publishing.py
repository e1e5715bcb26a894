"""Schedules that programs declare: which of store and code is right, when they differ."""

import logging

import pytest

from mainspring import Config, InvalidInput, Scheduler
from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.schedule.input import define
from mainspring.scheduler.publishing import publish
from mainspring.testing.ticker import Ticker

START_MS = 1_800_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


NIGHTLY = define("nightly", cron="0 2 * * *", target="log:")
LATER = define("nightly", cron="0 5 * * *", target="log:")


async def specs_of(client: Client, name: str) -> tuple[str, ...]:
    view = await client.schedules.get(name)
    assert view is not None
    return view.definition.specs


async def test_a_program_that_declares_a_former_schedule_again_gets_it(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    for declared in (NIGHTLY, LATER, NIGHTLY):
        with caplog.at_level(logging.INFO, logger="mainspring.scheduler"):
            await publish(client.schedules, [declared], START_MS)
        assert await specs_of(client, "nightly") == declared.specs
    place = f"-n {client.store.keys.namespace}"
    assert f"'mainspring schedule rollback nightly {place}' brings the former one back" in caplog.text
    await client.schedules.rollback("nightly")
    assert await specs_of(client, "nightly") == LATER.specs


async def test_an_edit_by_hand_is_replaced_by_the_code_with_a_warning_that_says_the_way_back(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(client.schedules, [NIGHTLY], START_MS)
    await client.schedules.edit("nightly", cron="0 4 * * *", by="ann")
    await client.schedules.pause("nightly", by="bob")
    with caplog.at_level(logging.WARNING, logger="mainspring.scheduler"):
        await publish(client.schedules, [NIGHTLY], START_MS)
    assert await specs_of(client, "nightly") == NIGHTLY.specs
    assert "schedule 'nightly' is now as this program declares it (before: generation 3, by bob)" in caplog.text
    place = f"-n {client.store.keys.namespace}"
    assert f"'mainspring schedule edit nightly {place} --pin' keeps it" in caplog.text
    view = await client.schedules.get("nightly")
    assert view is not None
    assert view.state == "paused"


async def test_an_edit_that_is_pinned_stays_until_it_is_unpinned(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(client.schedules, [NIGHTLY], START_MS)
    await client.schedules.edit("nightly", cron="0 4 * * *", pinned=True)
    for _ in range(12):
        await client.schedules.pause("nightly")
        await client.schedules.resume("nightly")
    with caplog.at_level(logging.WARNING, logger="mainspring.scheduler"):
        await publish(client.schedules, [LATER], START_MS)
    assert await specs_of(client, "nightly") == ("0 4 * * *",)
    place = f"-n {client.store.keys.namespace}"
    assert f"'mainspring schedule edit nightly {place} --no-pin' lets this program change it" in caplog.text
    await client.schedules.add("nightly", cron="0 6 * * *", target="log:", on_conflict="replace")
    await publish(client.schedules, [LATER], START_MS)
    assert await specs_of(client, "nightly") == ("0 6 * * *",), "a replacement by hand leaves the pin"
    await client.schedules.rollback("nightly")
    await client.schedules.edit("nightly", pinned=False)
    await publish(client.schedules, [LATER], START_MS)
    assert await specs_of(client, "nightly") == LATER.specs


async def test_copies_of_a_program_write_a_declaration_once(client: Client) -> None:
    for _ in range(3):
        await publish(client.schedules, [NIGHTLY], START_MS)
    view = await client.schedules.get("nightly")
    assert view is not None
    assert view.generation == 1


def test_a_program_cannot_pin_what_it_declares() -> None:
    with pytest.raises(InvalidInput, match="schedule 'nightly': pinned is for edits in the store"):
        Scheduler(Config()).register("nightly", "log:", cron="@daily", pinned=True)  # type: ignore[call-arg]


async def test_a_declaration_whose_time_is_over_stops_no_program(
    client: Client, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    end_ms = START_MS + 60_000
    await publish(client.schedules, [define("promo", every="10s", target="log:", end=end_ms)], START_MS)
    clock.advance(seconds=120)
    changed = define("promo", every="10s", target="log:", end=end_ms, payload="other")
    new = define("another", every="10s", target="log:")
    with caplog.at_level(logging.WARNING, logger="mainspring.scheduler"):
        await publish(client.schedules, [changed, new], clock.now_ms())
    assert "the declared one has already ended" in caplog.text
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


async def test_a_declaration_that_has_made_all_its_runs_stops_no_program(
    ticker: Ticker, client: Client, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(client.schedules, [define("twice", every="5s", target="log:", max_runs=2)], START_MS)
    await ticker.advance(seconds=20)
    new = define("another", every="10s", target="log:")
    with caplog.at_level(logging.WARNING, logger="mainspring.scheduler"):
        await publish(client.schedules, [define("twice", every="7s", target="log:", max_runs=2), new], clock.now_ms())
    assert "it has run 2 times, and max_runs of what is declared is 2" in caplog.text
    assert (await client.schedules.get_many(["twice", "another"])).keys() == {"twice", "another"}
