"""Schedules end to end, on a clock held by hand: their times, edits, pauses, runs by hand."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import date
from functools import partial
from itertools import count
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.engine.planner import _way_on
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Delivery
from mainspring.model.errors import Conflict, InvalidInput, NotFound, Unavailable
from mainspring.model.schedule.definition import check_definition
from mainspring.model.schedule.input import define, local_ms
from mainspring.model.schedule.recurrence import Recurrence, _slots
from mainspring.model.schedule.view import ScheduleView
from mainspring.model.task import OnConflict, Task
from mainspring.node.schedule_file import carry_out, plan
from mainspring.store.keys import partition_of
from mainspring.store.schedules import found_in_time, sketch_apart
from mainspring.store.store import Store
from mainspring.store.tasks.index import IdRow
from mainspring.store.tasks.put import Widths
from mainspring.store.tasks.put_ids import put_ids
from mainspring.store.verify.checks import verify
from mainspring.testing.faults import Fault, bad_road, calls
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]
START_MS = 1_800_000_000_000
"""2027-01-15T08:00:00Z"""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


async def view_of(client: Client, name: str) -> ScheduleView:
    view = await client.schedules.get(name)
    assert view is not None
    return view


def at(*seconds: int) -> tuple[int, ...]:
    return tuple(START_MS + second * 1000 for second in seconds)


@pytest.mark.parametrize("seconds", [10, 20])
@pytest.mark.parametrize("on_conflict", ["keep", "replace", "reject"])
async def test_the_id_of_a_run_cannot_be_taken_before_it_or_beside_it(
    ticker: Ticker, client: Client, on_conflict: OnConflict, seconds: int
) -> None:
    await client.schedules.add("beat", every="10s", target="log:", payload="run")
    taken = f"beat@2027-01-15T08:00:{seconds}Z"
    for lane in (None, "l"):
        with pytest.raises(Conflict, match="is that of a run of schedule 'beat'; choose another"):
            await client.put("log:", "other", at=at(seconds)[0], id=taken, lane=lane, on_conflict=on_conflict)
    others = [Task("log:", i, at=at(1)[0], id=id) for i, id in enumerate(("a", taken, "beta@2027-01-15T08:00:10Z"))]
    with pytest.raises(Conflict) as caught:
        await client.put_many(others, on_conflict=on_conflict)
    assert [None if one is None else one.outcome for one in caught.value.handles or ()] == ["created", None, "created"]
    came = await ticker.advance(seconds=25)
    assert sorted(str(one.value()) for one in came) == ["0", "2", "run", "run"]


async def test_a_schedule_runs_again_and_again_at_its_times(ticker: Ticker, client: Client) -> None:
    view = await client.schedules.add("beat", every="10s", target="log:", payload={"n": 1})
    assert view.next_ms == at(10, 20, 30)
    came = await ticker.advance(seconds=35)
    assert [one.id for one in came] == [f"beat@2027-01-15T08:00:{s}Z" for s in (10, 20, 30)]
    assert [one.value() for one in came] == [{"n": 1}] * 3
    assert [one.due_ms for one in came] == list(at(10, 20, 30))
    view = await view_of(client, "beat")
    assert (view.runs, view.next_ms, view.state) == (3, at(40, 50, 60), "active")
    assert [(run.planned_ms, run.outcome) for run in view.last_runs] == [(ms, "done") for ms in at(10, 20, 30)]


async def test_cron_lines_run_in_their_zone_over_a_clock_change(
    ticker: Ticker, client: Client, clock: ManualClock
) -> None:
    clock.set(1_806_105_600_000)  # 2027-03-27T00:00Z, the day before Paris leaves out 02:00 to 03:00
    view = await client.schedules.add("nightly", cron="30 2 * * *", timezone="Europe/Paris", target="log:")
    assert view.definition.tz_version
    came = await ticker.advance(hours=72)
    assert [one.id for one in came] == [
        "nightly@2027-03-27T01:30:00Z", "nightly@2027-03-28T01:00:00Z", "nightly@2027-03-29T00:30:00Z",
    ]  # fmt: skip


async def test_several_specs_are_one_schedule_and_exclusions_are_left_out(ticker: Ticker, client: Client) -> None:
    await client.schedules.add(
        "both", cron=["0 9 * * *", "0 10 * * *"], every="12h", exclude="2027-01-16", target="log:"
    )
    came = await ticker.advance(hours=50)
    assert [one.id.partition("@")[2] for one in came] == [
        "2027-01-15T09:00:00Z", "2027-01-15T10:00:00Z", "2027-01-15T20:00:00Z", "2027-01-17T08:00:00Z",
        "2027-01-17T09:00:00Z", "2027-01-17T10:00:00Z",
    ]  # fmt: skip


async def test_bounds_and_max_runs_end_a_schedule_and_it_shows(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("thrice", every="1s", max_runs=3, target="log:")
    await client.schedules.add("until", every="1s", start=START_MS + 5_000, end=START_MS + 7_000, target="log:")
    came = await ticker.advance(seconds=20)
    assert sorted(one.id.partition("@")[0] for one in came) == ["thrice"] * 3 + ["until"] * 3
    for name in ("thrice", "until"):
        view = await view_of(client, name)
        assert (view.state, view.next_ms, view.runs) == ("finished", (), 3)


async def test_a_change_after_which_it_would_never_run_again_is_refused(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("twice", every="1s", max_runs=2, target="log:")
    await ticker.advance(seconds=5)
    for change in (
        client.schedules.edit("twice", every="2s"),
        client.schedules.diff("twice", every="2s"),
        client.schedules.add("twice", every="2s", max_runs=2, target="log:", on_conflict="replace"),
    ):
        with pytest.raises(InvalidInput, match="it has run 2 times, and max_runs is 2; give a larger max_runs or none"):
            await change
    edited = await client.schedules.edit("twice", every="2s", max_runs=3)
    assert (edited.state, len(edited.next_ms)) == ("active", 1)
    assert len(await ticker.advance(seconds=5)) == 1


async def test_a_pause_outlives_a_replacement(client: Client) -> None:
    await client.schedules.add("job", every="1m", target="log:")
    paused = await client.schedules.pause("job", reason="the disk is full", by="ann", until="2h")
    same = await client.schedules.add("job", every="1m", target="log:", on_conflict="replace")
    assert (same.state, same.generation) == ("paused", paused.generation), "nothing was written"
    other = await client.schedules.add("job", every="2m", target="log:", on_conflict="replace")
    assert (other.generation, other.definition.paused) == (paused.generation + 1, paused.definition.paused)
    assert (await client.schedules.resume("job")).state == "active"


async def test_a_pause_ends_within_ten_years_or_with_a_resume(client: Client) -> None:
    await client.schedules.add("job", every="1m", target="log:")
    for until in (10**14, "9999-01-01T00:00:00Z", "600w"):
        with pytest.raises(InvalidInput, match="ten years"):
            await client.schedules.pause("job", until=until)
    assert (await view_of(client, "job")).state == "active"


async def test_a_file_leaves_alone_what_has_made_all_its_runs(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("twice", every="1s", max_runs=2, target="log:")
    await ticker.advance(seconds=5)
    wanted = [define("twice", every="2s", max_runs=2, target="log:"), define("new", every="1h", target="log:")]
    steps = await plan(client.schedules, wanted, "", prune=False)
    assert [one.action for one in steps] == ["over", "create"]
    assert steps[0].lines() == ["! twice: its end has passed, or max_runs is reached; nothing of it is written"]


async def test_a_schedule_with_a_source_of_its_own_is_applied_once(client: Client) -> None:
    wanted = [define("job", every="1h", target="log:", source="somebody")]
    for written in (1, 0):
        steps = await plan(client.schedules, wanted, "file", prune=True)
        assert await carry_out(client.schedules, [one for one in steps if one.action != "same"]) == written
    taken = await plan(client.schedules, [define("job", every="1h", target="log:", source="file")], "file", prune=True)
    assert [one.action for one in taken] == ["change"]


async def test_an_edit_takes_effect_at_once_and_the_old_plan_never_runs(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:", payload="old")
    await ticker.advance(seconds=15)
    edited = await client.schedules.edit("job", every="7s", payload="new", by="ann", note="faster")
    assert edited.generation == 2
    assert [one.value() for one in await ticker.advance(seconds=21)] == ["new"] * 3
    assert (await client.get("job@2027-01-15T08:00:20Z")).state in ("cancelled", "unknown")
    history = await client.schedules.history("job")
    assert [(one.generation, one.by, one.note) for one in history] == [(2, "ann", "faster"), (1, "", "")]
    assert (await view_of(client, "job")).runs == 4, "an edit forgets nothing that was counted"


@pytest.mark.parametrize("ahead_s", [5, 2], ids=["not read yet", "read and planned"])
async def test_an_edit_of_the_payload_alone_keeps_the_planned_time(
    ticker: Ticker, client: Client, ahead_s: int
) -> None:
    await client.schedules.add("job", every="10s", target="log:", payload="old")
    await ticker.advance(seconds=10 - ahead_s)
    await client.schedules.edit("job", payload="new")
    came = await ticker.advance(seconds=10 + ahead_s)
    assert [(one.id[-3:], one.value()) for one in came] == [("10Z", "new"), ("20Z", "new")]


async def test_times_of_an_edit_are_of_the_schedules_zone(client: Client) -> None:
    await client.schedules.add("job", cron="0 9 * * *", timezone="Europe/Paris", target="log:")
    changed = await client.schedules.diff("job", end="2027-03-01 12:00")
    edited = await client.schedules.edit("job", end="2027-03-01 12:00")
    assert edited.definition.end_ms == local_ms("2027-03-01T12:00:00+01:00", None, "end")
    assert list(changed) == ["end"]
    moved = await client.schedules.edit("job", end="2027-03-01 12:00", timezone="Asia/Tokyo")
    assert moved.definition.end_ms == local_ms("2027-03-01T12:00:00+09:00", None, "end")


async def test_an_edit_with_all_specs_in_one_field_is_the_whole_of_them(client: Client) -> None:
    view = await client.schedules.add("job", cron="0 9 * * *", every="5m", target="log:")
    assert (await client.schedules.edit("job", cron=view.definition.specs)).generation == 1, "nothing changed"
    edited = await client.schedules.edit("job", cron=["@every 7m", "0 10 * * *"])
    assert edited.definition.specs == ("0 10 * * *", "@every 7m")
    with pytest.raises(InvalidInput, match="give 1 to 32 specs"):
        await client.schedules.edit("job", cron=[], every=None)


async def test_an_edit_that_changes_nothing_writes_nothing(client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    assert (await client.schedules.edit("job", every="10s")).generation == 1


async def test_rollback_brings_a_former_revision_back(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:", payload=1)
    await client.schedules.edit("job", payload=2)
    await client.schedules.edit("job", payload=3)
    assert (await client.schedules.rollback("job")).payload == 2
    assert (await client.schedules.rollback("job", 1)).payload == 1
    assert [one.value() for one in await ticker.advance(seconds=10)] == [1]
    assert [one.generation for one in await client.schedules.history("job")] == [5, 4, 3, 2, 1]
    await client.schedules.edit("job", payload=6)
    assert await client.schedules.remove("job")
    assert (await client.schedules.rollback("job")).payload == 6, "a removed one comes back as it was"
    assert [one.value() for one in await ticker.advance(seconds=10)] == [6]


async def test_rollback_undoes_the_edit_and_not_the_pause(client: Client) -> None:
    await client.schedules.add("job", cron="*/10 * * * *", target="log:")
    await client.schedules.edit("job", cron="* * * * *")
    await client.schedules.pause("job", reason="too many")
    back = await client.schedules.rollback("job")
    assert (back.definition.specs, back.state) == (("*/10 * * * *",), "paused")
    assert (await client.schedules.resume("job")).state == "active"
    again = await client.schedules.rollback("job", 3)  # the paused one, whose cron was the other
    assert (again.definition.specs, again.state) == (("* * * * *",), "active")


async def test_a_name_is_taken_once(client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:", payload=1)
    with pytest.raises(Conflict, match="exists"):
        await client.schedules.add("job", every="10s", target="log:")
    kept = await client.schedules.add("job", every="20s", target="log:", on_conflict="keep")
    assert (kept.generation, kept.payload) == (1, 1)
    assert (await client.schedules.add("job", every="20s", target="log:", on_conflict="replace")).generation == 2


async def test_one_of_thirty_two_adds_of_one_name_wins(client: Client, ticker: Ticker) -> None:
    adds = [client.schedules.add("job", every="10s", target="log:", payload=n) for n in range(32)]
    answers = await asyncio.gather(*adds, return_exceptions=True)
    won = [answer for answer in answers if isinstance(answer, ScheduleView)]
    assert len(won) == 1
    assert all(isinstance(answer, (Conflict, ScheduleView)) for answer in answers)
    assert [one.value() for one in await ticker.advance(seconds=20)] == [won[0].payload] * 2


async def test_edits_at_the_same_time_come_one_after_the_other(client: Client, ticker: Ticker) -> None:
    await client.schedules.add("job", every="10s", target="log:", payload=-1)
    await asyncio.gather(*(client.schedules.edit("job", payload=n) for n in range(8)))
    assert (await view_of(client, "job")).generation == 9
    assert len(await ticker.advance(seconds=10)) == 1
    with pytest.raises(Conflict, match="generation 9"):
        await client.schedules.edit("job", generation=3, payload=0)


async def test_a_schedule_may_live_in_any_partition(ticker: Ticker, client: Client, store: Store) -> None:
    """Also where the partition of its lane is that of its name."""
    homes = {partition_of(f"user-{number}", len(store.keys)): f"user-{number}" for number in range(50)}
    assert len(homes) == len(store.keys)
    for lane in homes.values():
        await client.schedules.add("job", every="10s", target="log:", lane=lane)
        assert [one.lane for one in await ticker.advance(seconds=10)] == [lane]
        assert (await client.schedules.edit("job", payload=1)).generation > 1
        assert await client.schedules.remove("job")
    assert await ticker.advance(seconds=30) == []


async def test_a_removed_schedule_of_a_lane_is_found_in_its_history_and_comes_back(
    client: Client, clock: ManualClock
) -> None:
    for lane in ("user-1", "user-2", "user-3"):
        await client.schedules.add("job", every="10s", target="log:", lane=lane, payload=1)
        await client.schedules.edit("job", payload=2)
        await client.schedules.remove("job")
        clock.advance(seconds=1)
    revisions = [(one.lane, one.payload) for one in await client.schedules.history("job")]
    assert revisions == [(f"user-{n}", payload) for n in (3, 2, 1) for payload in (b"2", b"1")]
    back = await client.schedules.rollback("job")
    assert (back.definition.lane, back.payload) == ("user-3", 2)


async def test_a_removed_schedule_stops_and_a_new_one_continues_its_generations(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await ticker.advance(seconds=10)
    assert await client.schedules.remove("job")
    assert not await client.schedules.remove("job")
    assert await ticker.advance(minutes=1) == []
    assert await client.schedules.get("job") is None
    assert (await client.schedules.add("job", every="10s", target="log:")).generation == 2
    assert len(await ticker.advance(seconds=10)) == 1


async def test_a_paused_schedule_does_not_run_and_counts_what_it_leaves_out(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    await ticker.advance(seconds=10)
    paused = await client.schedules.pause("job", reason="upgrade", by="ann")
    assert (paused.state, paused.next_ms) == ("paused", ())
    assert paused.definition.paused is not None
    assert paused.definition.paused.reason == "upgrade"
    assert await ticker.advance(seconds=30) == []
    resumed = await client.schedules.resume("job")
    assert (resumed.state, resumed.next_ms[0], resumed.not_run) == ("active", at(50)[0], {"paused": 3})
    assert len(await ticker.advance(seconds=10)) == 1


async def test_a_pause_may_end_by_itself(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("drop", every="10s", target="log:")
    await client.schedules.add("hold", every="10s", target="log:")
    await client.schedules.pause("drop", until="25s")
    await client.schedules.pause("hold", until="25s", mode="hold")
    came = await ticker.advance(seconds=30)
    assert [(one.id[:4], one.due_ms) for one in came] == [("hold", at(25)[0]), ("drop", at(30)[0]), ("hold", at(30)[0])]
    assert (await view_of(client, "drop")).state == "active"


async def test_runs_in_a_pause_that_ended_by_itself_are_counted_once(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("drop", every="10s", target="log:")
    await client.schedules.add("hold", every="10s", target="log:")
    await client.schedules.pause("drop", until="25s")
    await client.schedules.pause("hold", until="25s", mode="hold")
    await ticker.advance(seconds=60)
    for name, runs, not_run in (("drop", 4, {"paused": 2}), ("hold", 5, {"missed": 1})):
        view = await view_of(client, name)
        assert (view.runs, view.not_run) == (runs, not_run)
        assert [one.count for one in view.recent_not_run] == list(not_run.values())
        resumed = await client.schedules.resume(name)  # too late to mean anything
        assert (resumed.runs, resumed.not_run, resumed.next_ms[0]) == (runs, not_run, at(70)[0])
    assert len(await ticker.advance(seconds=10)) == 2
    assert ticker.engine.deliveries.meters.skipped == {"paused": 2, "missed": 1}


async def test_a_pause_that_ends_by_itself_follows_the_misfire_rule_as_well(ticker: Ticker, client: Client) -> None:
    for rule in ("coalesce", "all(2)", "skip"):
        name = rule[:3]
        await client.schedules.add(name, every="10s", target="log:", misfire=rule, grace="1s")
        await client.schedules.pause(name, mode="hold", until="35s")
        await client.schedules.edit(name, payload=rule)  # an edit leaves the pause alone
    came = await ticker.advance(seconds=36)
    assert sorted(one.id for one in came) == [
        "all@2027-01-15T08:00:20Z", "all@2027-01-15T08:00:30Z", "coa@2027-01-15T08:00:30Z",
    ]  # fmt: skip
    await ticker.advance(seconds=10)
    views = {name: await view_of(client, name) for name in ("coa", "all", "ski")}
    assert {name: (view.runs, view.not_run) for name, view in views.items()} == {
        "coa": (2, {"missed": 2}), "all": (3, {"missed": 1}), "ski": (1, {"missed": 3}),
    }  # fmt: skip


async def test_held_back_runs_follow_the_misfire_rule_at_the_end_of_a_pause(ticker: Ticker, client: Client) -> None:
    for rule in ("coalesce", "all", "skip"):
        await client.schedules.add(rule, every="10s", target="log:", misfire=rule, grace="1s")
        await client.schedules.pause(rule, mode="hold")
    await ticker.advance(seconds=35)
    for rule in ("coalesce", "all", "skip"):
        await client.schedules.resume(rule)
    came = await ticker.advance(seconds=1)
    assert sorted(one.id for one in came) == [
        "all@2027-01-15T08:00:10Z", "all@2027-01-15T08:00:20Z", "all@2027-01-15T08:00:30Z",
        "coalesce@2027-01-15T08:00:30Z",
    ]  # fmt: skip
    assert (await view_of(client, "skip")).not_run == {"missed": 3}


async def test_held_back_runs_that_a_backfill_has_put_meanwhile_are_passed_by(ticker: Ticker, client: Client) -> None:
    def planned(came: list[Delivery]) -> list[int]:
        return [(one.body.occurrence[1] - START_MS) // 1000 for one in came if one.body.occurrence is not None]

    await client.schedules.add("job", every="10s", target="log:", misfire="all")
    await client.schedules.pause("job", mode="hold")
    await ticker.advance(seconds=75)
    filled = await client.schedules.backfill("job", start=START_MS + 30_000, end=START_MS + 50_000)
    assert filled.created == 2
    assert planned(await ticker.turn()) == [30, 40]
    await client.schedules.resume("job")
    assert planned(await ticker.advance(seconds=10)) == [10, 20, 50, 60, 70, 80]
    view = await view_of(client, "job")
    assert (view.runs, view.not_run) == (6, {})


async def test_trigger_runs_it_now_and_leaves_the_plan_alone(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", cron="0 12 * * *", target="log:", payload="p")
    handles = [await client.schedules.trigger("job") for _ in range(3)]
    came = await ticker.turn()
    assert sorted(one.id for one in came) == sorted(handle.id for handle in handles)
    assert {one.value() for one in came} == {"p"}
    view = await view_of(client, "job")
    assert (view.generation, view.next_ms[0]) == (1, START_MS + 4 * 3_600_000)
    with pytest.raises(NotFound):
        await client.schedules.trigger("nobody")


async def test_a_backfill_searches_in_a_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.schedules.add("job", cron="0 * * * *", target="log:")
    searched_by: list[int] = []
    between = Recurrence.between

    def noted(self: Recurrence, *given: int) -> list[int]:
        searched_by.append(threading.get_ident())
        return between(self, *given)

    monkeypatch.setattr(Recurrence, "between", noted)
    preview = await client.schedules.backfill("job", start=START_MS - 3_600_000, end=START_MS, dry_run=True)
    assert preview.planned == 1
    assert searched_by
    assert threading.get_ident() not in searched_by


async def test_a_backfill_runs_what_was_planned_and_twice_is_once(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", cron="0 * * * *", target="log:")
    start, end = START_MS - 5 * 3_600_000, START_MS + 86_400_000
    preview = await client.schedules.backfill("job", start=start, end=end, dry_run=True)
    assert (preview.planned, preview.created) == (6, 0)
    assert await ticker.turn() == []
    first = await client.schedules.backfill("job", start=start, end=end, rate=2)
    assert (first.planned, first.created, first.kept) == (6, 6, 0)
    came = await ticker.advance(seconds=2)
    assert [one.id for one in came] == [f"job@2027-01-15T0{hour}:00:00Z" for hour in range(3, 8)], "two a second"
    again = await client.schedules.backfill("job", start=start, end=end, rate=2)
    assert (again.created, again.kept) == (0, 6)
    assert len(await ticker.advance(seconds=10)) == 1
    again = await client.schedules.backfill("job", start=start, end=end)
    assert (again.created, again.kept) == (0, 6)
    assert [one.id for one in await ticker.advance(hours=1)] == ["job@2027-01-15T09:00:00Z"], "the chain goes on"
    with pytest.raises(InvalidInput):
        await client.schedules.backfill("job", start=end, end=start)
    for rate in (float("nan"), 0, 1e-9, 1e-300):
        with pytest.raises(InvalidInput, match="rate"):
            await client.schedules.backfill("job", start=start, end=end, rate=rate)


async def test_an_occurrence_that_is_there_already_is_not_put_a_second_time(
    ticker: Ticker, client: Client, store: Store
) -> None:
    await client.schedules.add("job", every="10s", target="log:")
    number, second = partition_of("job", len(store.keys)), "job@2027-01-15T08:00:20Z"
    definition = (await view_of(client, "job")).definition
    made = sketch_apart(definition, second, at(20)[0], at(20)[0])
    place, row = made.put(START_MS)
    await put_ids(store, {number: [IdRow(made.idh, place, row, at(20)[0])]}, Widths(), now_ms=START_MS)
    came = [one.id for one in await ticker.advance(seconds=25)]
    assert came == ["job@2027-01-15T08:00:10Z", second]


async def test_a_run_is_found_by_its_id(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="10s", target="log:", payload={"a": 1})
    info = await client.get("job@2027-01-15T08:00:10Z")
    assert (info.state, info.due_ms, info.payload) == ("pending", at(10)[0], {"a": 1})
    await ticker.advance(seconds=10)
    assert (await client.get("job@2027-01-15T08:00:10Z")).state == "done"


async def test_runs_of_a_slice_that_is_proven_already_begin_too(ticker: Ticker, client: Client, store: Store) -> None:
    """The smallest of all ticks: it writes only the fired bit and the next run."""
    names = [name for name in (f"job-{n}" for n in range(50)) if partition_of(name, len(store.keys)) == 0][:4]
    for n, name in enumerate(names):
        await client.schedules.add(name, every="10s", start=START_MS + 10_000 + 200 * n, target="log:")
    assert len(await ticker.advance(seconds=31)) == 3 * len(names)


async def test_everything_that_is_near_is_planned_before_it_is_due(
    ticker: Ticker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.engine.planner.PLANS_AT_ONCE", 3)
    await client.schedules.add_many([define(f"job-{n}", every="10s", target="log:") for n in range(60)])
    await ticker.advance(seconds=8)
    chains = [partition.chains for partition in ticker.engine.owned.values()]
    assert sum(len(one.plans) for one in chains) == 60
    assert not any(one.wanted or one.undecided for one in chains)


async def test_a_thousand_schedules_over_all_partitions(ticker: Ticker, client: Client, store: Store) -> None:
    names = [f"job-{n}" for n in range(1000)]
    assert len({partition_of(name, len(store.keys)) for name in names}) == len(store.keys)
    added = await client.schedules.add_many([define(name, every="10s", target="log:") for name in names])
    assert {outcome for _, outcome in added} == {"created"}
    listed = [view.name async for view in client.schedules.all()]
    assert sorted(listed) == sorted(names)
    came = await ticker.advance(seconds=20)
    assert sorted(one.id for one in came) == sorted(
        f"{name}@2027-01-15T08:00:{second}Z" for name in names for second in (10, 20)
    )


async def test_lost_calls_of_a_tick_are_repeated_and_the_others_are_not(
    ticker: Ticker, client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.engine.dispatcher.MOST_OCCURRENCES", 20)
    names = [f"job-{n}" for n in range(400)]
    await client.schedules.add_many([define(name, every="10s", target="log:") for name in names])
    assert await ticker.advance(seconds=9) == []
    ticker.clock.advance(seconds=1)
    with bad_road(ticker.engine.store) as road:
        road.next("lose reply", "never sent", only=calls("tick"))
        with pytest.raises(Unavailable):
            await ticker.engine.dispatcher.step()
        assert sum(calls("tick")(commands) for _, commands in road.trips) >= 3
    await ticker.advance(seconds=10)
    assert sorted(one.id for one in ticker.deliveries) == sorted(
        f"{name}@2027-01-15T08:00:{second}Z" for name in names for second in (10, 20)
    )
    assert (await verify(store)).left == 0


async def test_a_stop_between_the_calls_of_a_tick_delivers_each_run_once(
    ticker: Ticker, client: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop repeats calls without an answer. If the answers still come, nobody else may apply them."""
    monkeypatch.setattr("mainspring.engine.dispatcher.MOST_OCCURRENCES", 20)
    names = [f"job-{n}" for n in range(400)]
    await client.schedules.add_many([define(name, every="10s", target="log:") for name in names])
    assert await ticker.advance(seconds=9) == []
    ticker.clock.advance(seconds=1)
    dispatcher, owned, is_tick = ticker.engine.dispatcher, ticker.engine.owned.values(), calls("tick")
    faults: list[Fault] = ["late reply"] * 100
    with bad_road(ticker.engine.store) as road:
        road.next(*faults, only=lambda commands: not step.cancelling() and is_tick(commands))
        step = asyncio.create_task(dispatcher.step())
        async with asyncio.timeout(10):
            while not all(one.unanswered for one in owned):  # noqa: ASYNC110 - there is no event for this
                await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        await dispatcher.drain()
        road.deliver_late()
        for _ in range(20):
            await asyncio.sleep(0)
        await dispatcher.drain()
    await ticker.turn()
    assert sorted(one.id for one in ticker.deliveries) == sorted(f"{name}@2027-01-15T08:00:10Z" for name in names)
    assert (await verify(store)).left == 0


async def test_an_idle_owner_sends_as_few_calls_with_many_schedules_as_with_few(ticker: Ticker, client: Client) -> None:
    async def asked_while_idle() -> int:
        await ticker.advance(seconds=1)
        with bad_road(ticker.engine.store) as road:
            assert await ticker.advance(minutes=5) == []
        looks_after_them = calls("schedule_check")  # once a minute of real time, on a slow machine in one of the two
        return sum(len(commands) for _, commands in road.trips if not looks_after_them(commands))

    await client.schedules.add("first", cron="0 0 1 1 *", target="log:")
    few = await asked_while_idle()
    await client.schedules.add_many(
        define(f"job-{i:04}", cron=f"{i % 60} {i % 24} {1 + i % 28} 6 *", target="log:") for i in range(2_000)
    )
    many = await asked_while_idle()
    assert 0 < many <= few


async def test_a_schedule_that_could_not_work_is_refused_with_the_reason(client: Client) -> None:
    add = client.schedules.add
    with pytest.raises(InvalidInput, match="never run"):
        await add("job", cron="0 0 31 2 *", target="log:")
    with pytest.raises(InvalidInput, match="minute"):
        await add("job", cron="61 * * * *", target="log:")
    with pytest.raises(InvalidInput, match="'@'"):
        await add("a@b", every="1s", target="log:")
    with pytest.raises(InvalidInput, match="did you mean timezone"):
        await add("job", every="1s", target="log:", timezon="UTC")  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="end has passed"):
        await add("job", every="1s", end=START_MS - 1, target="log:")
    with pytest.raises(InvalidInput, match="buffer_all"):
        await add("job", every="1s", overlap="sometimes", target="log:")
    for bound in (10**14, 1 << 45, "9999-12-31T23:59:59Z", -1):
        with pytest.raises(InvalidInput, match="outside of the years 1970 to 3084"):
            await add("job", every="1s", end=bound, target="log:")
        with pytest.raises(InvalidInput, match="outside of the years 1970 to 3084"):
            await add("job", every="1s", start=bound, target="log:")
    with pytest.raises(InvalidInput, match="max_runs"):
        await add("job", every="1s", max_runs=1 << 64, target="log:")
    assert await client.schedules.get("job") is None


async def test_retries_that_take_longer_than_the_interval_are_refused(client: Client) -> None:
    call = {"target": "https://example.com/hook", "retry": "3 base=200ms factor=1 jitter=500ms", "timeout": "500ms"}
    with pytest.raises(InvalidInput, match=r"= 2\.9 s with its retries"):
        await client.schedules.add("hook", every="2s", **call)  # type: ignore[arg-type]
    assert (await client.schedules.add("hook", every="3s", **call)).generation == 1  # type: ignore[arg-type]


async def test_jitter_and_spread_move_the_start_and_not_the_identity(ticker: Ticker, client: Client) -> None:
    for name in ("a", "b", "c"):
        await client.schedules.add(name, every="1m", jitter="20s", target="log:")
    await client.schedules.add("even", every="1m", spread="20s", target="log:")
    came = await ticker.advance(minutes=3)
    late = {one.id: one.due_ms - START_MS for one in came}
    assert all(one.id.endswith(":00Z") for one in came)
    assert len({ms % 60_000 for one, ms in late.items() if one[:4] != "even"}) > 3
    assert len({ms % 60_000 for one, ms in late.items() if one[:4] == "even"}) == 1


async def test_runs_of_a_schedule_with_a_lane_keep_the_order_of_the_lane(
    ticker: Ticker, client: Client, store: Store
) -> None:
    lane = next(f"lane-{n}" for n in range(50) if partition_of(f"lane-{n}", len(store.keys)) != partition_of("job", 4))
    await client.schedules.add("job", every="10s", target="log:", lane=lane, payload="run")
    await client.put("log:", "before", at=START_MS + 9_000, lane=lane)
    await client.put("log:", "after", at=START_MS + 11_000, lane=lane)
    came = await ticker.advance(seconds=20)
    assert [one.value() for one in came] == ["before", "run", "after", "run"]
    assert (await view_of(client, "job")).runs == 2
    assert [view.name async for view in client.schedules.all()] == ["job"]
    assert (await client.schedules.edit("job", payload="other")).generation == 2
    assert [one.generation for one in await client.schedules.history("job")] == [2, 1]
    with pytest.raises(InvalidInput, match="lane cannot be changed"):
        await client.schedules.edit("job", lane="other")
    with pytest.raises(Conflict, match="exists"):
        await client.schedules.add("job", every="1m", target="log:")
    await client.schedules.trigger("job")
    assert len(await ticker.turn()) == 1
    assert (await verify(store)).left == 0
    assert await client.schedules.remove("job")
    assert await client.schedules.get("job") is None
    assert (await client.schedules.add("job", every="10s", target="log:")).definition.lane is None
    assert len(await ticker.advance(seconds=10)) == 1


_PAST = count(date(1990, 1, 1).toordinal())


async def longest_stretch_s(step: asyncio.Task[Any]) -> float:
    """How long the event loop was held up at the most, in time that its thread has had: others may take more."""
    longest_s, last = 0.0, time.thread_time()
    while not step.done():
        await asyncio.sleep(0)
        longest_s, last = max(longest_s, time.thread_time() - last), time.thread_time()
    return longest_s


# On one server: the search is all that is looked at, and nothing is written in the end.
@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
@pytest.mark.parametrize("way", ["add", "edit"])
async def test_the_event_loop_runs_while_times_are_hard_to_find(client: Client, way: str) -> None:
    def never() -> dict[str, Any]:
        """Each time another one: an answer is kept for those who ask the same."""
        past = date.fromordinal(next(_PAST)).isoformat()
        return {"cron": "0 12 * * *", "exclude": ["* 12 * * *", past]}

    await client.schedules.add("job", cron="@daily", target="log:")
    begun = time.thread_time()
    with pytest.raises(InvalidInput, match="would never run"):
        check_definition(client.schedules.define("other", target="log:", **never()), client.store.clock.now_ms())
    took_s = time.thread_time() - begun
    if way == "add":
        write = asyncio.create_task(client.schedules.add("new", target="log:", **never()))
    else:
        write = asyncio.create_task(client.schedules.edit("job", **never()))
    longest_s = await longest_stretch_s(write)
    with pytest.raises(InvalidInput, match="would never run"):
        await write
    assert longest_s < took_s / 2


@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
@pytest.mark.parametrize("way", ["plan", "missed", "planted anew"])
async def test_the_event_loop_runs_while_the_planner_finds_that_no_run_is_left(
    tickers: Tickers, client: Client, clock: ManualClock, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.model.schedule.recurrence._MAX_SKIPS", 12_000)

    def last_one() -> dict[str, Any]:
        """After this January every day is excluded separately, for longer than the search lasts."""
        past = date.fromordinal(next(_PAST)).isoformat()
        years = [f"{year}-01-01..{year}-01-31" for year in range(2028, 2065)]
        return {"cron": "0 9 * * *", "exclude": ["* * * 2-12 *", "2027-01-16..2027-01-31", past, *years]}

    begun = time.thread_time()
    other = client.schedules.define("other", target="log:", **last_one())
    assert other.slots.after(START_MS + 3_600_000) is None
    took_s = time.thread_time() - begun
    await client.schedules.add("job", target="log:", misfire="skip", **last_one())
    number = partition_of("job", len(client.store.keys))
    if way == "planted anew":
        await client.cancel("job@2027-01-15T09:00:00Z")
    clock.set(START_MS + 3_600_000 * (24 if way == "missed" else 1) - 60_000)
    ticker = await tickers()
    _slots.cache_clear()  # what the write has found out
    step = asyncio.create_task(
        ticker.engine.planner.check(number) if way == "planted anew" else ticker.advance(seconds=120)
    )
    longest_s = await longest_stretch_s(step)
    await step
    view = await view_of(client, "job")
    assert view.next_ms == ()
    assert view.runs == (1 if way == "plan" else 0)
    assert longest_s < took_s / 2


async def test_after_an_outage_many_schedules_with_exclusions_are_settled_together(
    tickers: Tickers, client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread for each would take a turn of the event loop for each."""
    for n in range(60):
        await client.schedules.add(f"job-{n}", every="10s", target="log:", misfire="skip", exclude=["2026-12-25"])
    aside: list[object] = []
    to_thread = asyncio.to_thread

    def counted(search: Callable[[], object]) -> Any:
        aside.append(search)
        return to_thread(search)

    clock.set(START_MS + 3_600_000 - 1_000)
    ticker = await tickers()
    monkeypatch.setattr(asyncio, "to_thread", counted)
    await ticker.advance(seconds=1)
    views = [await view_of(client, f"job-{n}") for n in range(60)]
    assert {view.not_run["missed"] for view in views} == {353}, "those of the last minute are within the grace"
    searches = [search.args[1] for search in aside if isinstance(search, partial) and search.func is found_in_time]
    settled = [search for search in searches if isinstance(search, partial) and search.func is _way_on]
    assert 0 < len(settled) <= 2 * len(client.store.keys)


async def test_schedules_whose_times_are_hard_to_find_keep_no_others_waiting(
    tickers: Tickers, client: Client, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.engine.planner.PLANNING_S", 0.0)
    home = partition_of("job", len(client.store.keys))
    names = [name for n in range(100) if partition_of(name := f"job-{n}", len(client.store.keys)) == home][:4]
    for name in names:
        await client.schedules.add(name, every="10s", target="log:", exclude=["2026-12-25"])
    await client.schedules.add("job", every="10s", target="log:")
    ticker = await tickers()
    clock.set(START_MS + 9_000)
    await ticker.engine.keeper.step()
    while await ticker.engine.lookahead.step() == 0.0:
        pass
    chains = ticker.engine.owned[home].chains
    assert len(chains.wanted) == 5
    planned: list[str] = []
    while chains.wanted:
        await ticker.engine.planner.step()
        made = [plan.definition.name for plan in chains.plans.values() if plan is not None]
        planned += [name for name in made if name not in planned]
    assert planned[0] == "job"
    assert sorted(planned) == sorted([*names, "job"])
    assert len(await ticker.advance(seconds=1)) == 5
