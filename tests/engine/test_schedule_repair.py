"""A schedule that has lost its next occurrence gets it back: by its owner, or by `mainspring verify`."""

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock, steady_s
from mainspring.model.schedule.chain import ChainMemory, link_to
from mainspring.store import schedules
from mainspring.store.keys import partition_of
from mainspring.store.schedules import row_of
from mainspring.store.store import Store
from mainspring.store.tasks.find import Finder, Reference
from mainspring.store.verify.checks import verify
from mainspring.testing.faults import bad_road, calls
from mainspring.testing.ticker import Ticker

START_MS = 1_800_000_000_000
FIRST = "job@2027-01-15T08:00:10Z"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


async def lose_the_next_run(client: Client, name: str = FIRST) -> None:
    """By a cancel that breaks off before the chain hears of it."""
    reference = Reference.parse(name, None, len(client.store.keys))
    assert await Finder(client.store).cancel([reference]) == ["cancelled"]


async def test_an_owner_puts_a_missing_run_and_logs_it(
    ticker: Ticker, client: Client, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await lose_the_next_run(client)
    number = partition_of("job", len(store.keys))
    with caplog.at_level(logging.WARNING, logger="mainspring.engine"):
        assert await ticker.engine.planner.check(number) == 1
    assert "schedule job: next occurrence was missing" in caplog.text
    assert await ticker.engine.planner.check(number) == 0
    assert [one.id for one in await ticker.advance(seconds=20)] == ["job@2027-01-15T08:00:20Z"]
    view = await client.schedules.get("job")
    assert view is not None
    assert view.not_run == {"cancelled": 1}


async def test_a_run_that_was_not_cancelled_is_lost(ticker: Ticker, client: Client, store: Store) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await lose_the_next_run(client)
    keys = store.keys.partitions[partition_of("job", len(store.keys))]
    await store.run_one(keys.slot, [("DEL", keys.off)])  # as if it had vanished by itself
    await ticker.advance(seconds=20)
    view = await client.schedules.get("job")
    assert view is not None
    assert view.not_run == {"lost": 1}


async def test_a_new_owner_looks_at_once(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await lose_the_next_run(client)
    assert [one.id for one in await ticker.advance(seconds=20)] == ["job@2027-01-15T08:00:20Z"]


async def test_an_owner_looks_again_every_minute(
    ticker: Ticker, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await client.schedules.add("job", cron="0 12 * * *", target="log:")
    await ticker.turn()  # the look at the takeover is over
    await lose_the_next_run(client, "job@2027-01-15T12:00:00Z")
    planner = ticker.engine.planner
    now_s = steady_s()
    monkeypatch.setattr("mainspring.engine.planner.steady_s", lambda: now_s)
    await planner.step()
    assert not planner.not_run
    now_s += 61
    with caplog.at_level(logging.WARNING, logger="mainspring.engine"):
        await planner.step()
    assert planner.not_run.total() == 1
    assert "schedule job: next occurrence was missing" in caplog.text
    view = await client.schedules.get("job")
    assert view is not None
    assert view.next_ms[0] == START_MS + 28 * 3_600_000, "the day after"


async def test_a_run_that_was_read_and_cancelled_still_puts_the_next(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await ticker.advance(seconds=8)
    await lose_the_next_run(client)
    assert [one.id for one in await ticker.advance(seconds=22)] == [
        "job@2027-01-15T08:00:20Z", "job@2027-01-15T08:00:30Z",
    ]  # fmt: skip
    view = await client.schedules.get("job")
    assert view is not None
    assert (view.runs, view.not_run, view.running_since_ms) == (2, {"cancelled": 1}, None)


@pytest.mark.parametrize(
    "rules", [{"overlap": "skip"}, {"overlap": "buffer_one"}, {"misfire": "skip"}, {"jitter": "1m"}]
)
async def test_cancelling_a_run_that_is_far_ahead_loses_no_other(
    ticker: Ticker, client: Client, rules: dict[str, Any]
) -> None:
    await client.schedules.add("job", cron="0 * * * *", target="log:", **rules)
    await ticker.turn()  # its owner has looked for missing runs, and does so again in a minute
    assert await client.cancel_many(["job@2027-01-15T09:00:00Z", "job@2027-01-15T09:00:00Z"]) == ["cancelled"] * 2
    assert await client.cancel("job@2027-01-15T10:00:00Z") == "cancelled"
    assert [one.id for one in await ticker.advance(hours=4.5)] == [
        "job@2027-01-15T11:00:00Z", "job@2027-01-15T12:00:00Z",
    ]  # fmt: skip
    view = await client.schedules.get("job")
    assert view is not None
    assert (view.runs, view.not_run) == (2, {"cancelled": 2})


async def test_cancelling_a_run_that_was_read_and_the_one_after_it_loses_no_other(
    ticker: Ticker, client: Client
) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await ticker.advance(seconds=8)
    for name in (FIRST, "job@2027-01-15T08:00:20Z"):
        assert await client.cancel(name) == "cancelled"
    assert [one.id for one in await ticker.advance(seconds=35)] == [
        "job@2027-01-15T08:00:30Z", "job@2027-01-15T08:00:40Z",
    ]  # fmt: skip
    view = await client.schedules.get("job")
    assert view is not None
    assert (view.runs, view.not_run) == (2, {"cancelled": 2})


@pytest.mark.parametrize("seen", [False, True])
async def test_a_cancelled_run_stays_cancelled_when_the_schedule_changes(
    ticker: Ticker, client: Client, store: Store, *, seen: bool
) -> None:
    """Before a check has found it, and after."""
    schedules = client.schedules
    await schedules.add("job", every="10s", target="log:")
    await lose_the_next_run(client)
    if seen:
        assert await ticker.engine.planner.check(partition_of("job", len(store.keys))) == 1
    await schedules.edit("job", payload=1)
    await schedules.pause("job", until="5s")
    await schedules.pause("job", mode="hold")
    await schedules.resume("job")
    await schedules.rollback("job")
    assert [one.id for one in await ticker.advance(seconds=25)] == ["job@2027-01-15T08:00:20Z"]
    view = await schedules.get("job")
    assert view is not None
    assert (view.runs, view.not_run) == (1, {"cancelled": 1})
    assert (await verify(store)).left == 0


async def test_a_check_does_not_disturb_what_waits(
    ticker: Ticker, client: Client, store: Store, clock: ManualClock
) -> None:
    """Overdue because no node is running: that is for the misfire rule, not for the check."""
    await client.schedules.add("job", every="1m", target="log:")
    clock.advance(seconds=600)
    assert await ticker.engine.planner.check(partition_of("job", len(store.keys))) == 0
    assert [one.id for one in await ticker.turn()] == ["job@2027-01-15T08:10:00Z"]


async def test_verify_finds_and_puts_a_missing_run(ticker: Ticker, client: Client, store: Store) -> None:
    for name in ("job", "other", "third"):
        await client.schedules.add(name, every="10s", target="log:")
        await client.schedules.edit(name, payload=1)
    assert (await verify(store)).left == 0
    await lose_the_next_run(client)
    keys = store.keys.partitions[partition_of("other", len(store.keys))]
    await store.run_one(keys.slot, [("HDEL", keys.next, "other")])
    keys = store.keys.partitions[partition_of("third", len(store.keys))]
    await store.run_one(keys.slot, [("HDEL", keys.sched, "third")])
    found = await verify(store)
    assert dict(found.found) == {"schedule-chain": 3}
    assert (await verify(store, repair=True)).left == 0
    assert (await verify(store)).left == 0
    assert sorted({one.id.partition("@")[0] for one in await ticker.advance(seconds=20)}) == ["job", "other", "third"]


async def test_an_add_whose_reply_was_lost_is_done_once(client: Client, store: Store, ticker: Ticker) -> None:
    await client.schedules.add("warm-up", every="1h", target="log:")
    with bad_road(store) as road:
        road.next("lose reply", only=calls("schedule_add"))
        added = await client.schedules.add("job", every="10s", target="log:")
        road.next("lose reply", only=calls("schedule_put"))
        edited = await client.schedules.edit("job", payload=2)
        assert (added.generation, edited.generation) == (1, 2)
        assert [one.value() for one in await ticker.advance(seconds=10)] == [2]
        road.next("lose reply", only=calls("schedule_put"))
        assert await client.schedules.remove("job")
    assert await client.schedules.get("job") is None


async def test_a_clock_that_has_jumped_does_not_move_the_next_run_by_an_hour(
    ticker: Ticker, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await ticker.advance(seconds=9)
    leases = {number: one.lease_until for number, one in ticker.engine.owned.items()}

    clock.advance(seconds=3600)
    for one in ticker.engine.owned.values():
        one.lease_until = steady_s()  # the same jump: by this clock no server has spoken for an hour
    await ticker.engine.planner.step()
    await ticker.engine.dispatcher.step()
    assert not ticker.deliveries

    clock.advance(seconds=-3600)  # the servers have answered
    for number, one in ticker.engine.owned.items():
        one.lease_until = leases[number]
    assert [one.id[-4:] for one in await ticker.advance(seconds=31)] == [":10Z", ":20Z", ":30Z", ":40Z"]


@pytest.mark.parametrize(
    ("planned_hour", "ran"),
    [(10, ["15T11:00:00Z", "16T11:00:00Z"]), (12, ["15T12:00:00Z", "16T11:00:00Z"])],
    ids=["its time is later by the new rules", "its time has passed by the new rules"],
)
async def test_a_run_that_was_planned_by_other_rules_of_its_zone_runs_once(
    ticker: Ticker, client: Client, store: Store, clock: ManualClock, planned_hour: int, ran: list[str]
) -> None:
    await client.schedules.add("job", cron="0 12 * * *", timezone="Europe/Paris", target="log:")
    [seen] = await schedules.see(store, ["job"])
    assert seen.definition is not None
    definition = replace(seen.definition, generation=2, tz_version="2020a")
    link = link_to(definition, START_MS + (planned_hour - 8) * 3_600_000, ChainMemory())
    change = schedules.ScheduleWrite("job", seen, definition, link, row_of(definition, link, clock.now_ms()))
    assert await schedules.write(store, [change]) == ["ok"]
    assert [one.id.removeprefix("job@2027-01-") for one in await ticker.advance(hours=30)] == ran
    view = await client.schedules.get("job")
    assert view is not None
    assert (view.runs, view.not_run) == (2, {})
