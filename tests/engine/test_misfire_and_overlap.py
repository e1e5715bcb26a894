"""Planned times while no node was running, and while the previous run was not over."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.engine.engine import EngineOptions
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Dead, Delivery, Outcome, Retry
from mainspring.model.retry import RetryPolicy
from mainspring.model.schedule.view import ScheduleView
from mainspring.testing.ticker import Ticker

Tickers = Callable[..., Awaitable[Ticker]]
START_MS = 1_800_000_000_000
MINUTE_MS = 60_000
RETRIES = EngineOptions(retry=RetryPolicy(max_attempts=3, base_ms=25_000, cap_ms=25_000, jitter="none"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


async def view_of(client: Client, name: str) -> ScheduleView:
    view = await client.schedules.get(name)
    assert view is not None
    return view


def minutes(came: list[Delivery]) -> list[int]:
    """The planned minutes of runs, counted from the start."""
    return [(one.body.occurrence[1] - START_MS) // MINUTE_MS for one in came if one.body.occurrence is not None]


# -- nobody was up ----------------------------------------------------------------------------------------------------


async def outage(tickers: Tickers, clock: ManualClock, minutes_away: float) -> Ticker:
    """Nobody is up for so long; then a scheduler comes."""
    clock.advance(seconds=60 * minutes_away)
    return await tickers()


async def test_after_an_outage_the_newest_run_goes_out_once(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("job", every="1m", target="log:")
    ticker = await outage(tickers, clock, 10.5)
    assert minutes(await ticker.turn()) == [10]
    view = await view_of(client, "job")
    assert (view.runs, view.not_run) == (1, {"missed": 9})
    [slot] = view.recent_not_run
    assert (slot.from_ms, slot.count, slot.reason) == (START_MS + MINUTE_MS, 9, "missed")
    assert minutes(await ticker.advance(minutes=2)) == [11, 12]


async def test_within_the_grace_everything_runs(tickers: Tickers, client: Client, clock: ManualClock) -> None:
    await client.schedules.add("job", every="10s", target="log:", grace="60s")
    ticker = await outage(tickers, clock, 0.75)
    assert len(await ticker.turn()) == 4
    assert (await view_of(client, "job")).not_run == {}


async def test_misfire_skip_continues_with_runs_that_are_not_late(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("job", every="1m", target="log:", misfire="skip", grace="30s")
    ticker = await outage(tickers, clock, 10.75)
    assert await ticker.turn() == []
    assert (await view_of(client, "job")).not_run == {"missed": 10}
    assert minutes(await ticker.advance(minutes=2)) == [11, 12]


async def test_misfire_all_runs_the_newest_missed_runs(tickers: Tickers, client: Client, clock: ManualClock) -> None:
    await client.schedules.add("job", every="1m", target="log:", misfire="all(3)")
    ticker = await outage(tickers, clock, 10.5)
    assert minutes(await ticker.turn()) == [8, 9, 10]
    assert (await view_of(client, "job")).not_run == {"missed": 7}


async def test_a_single_run_that_is_late_runs_all_the_same(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("nightly", cron="0 9 * * *", target="log:")
    ticker = await outage(tickers, clock, 60 * 5)
    assert [one.id for one in await ticker.turn()] == ["nightly@2027-01-15T09:00:00Z"]
    assert (await view_of(client, "nightly")).not_run == {}


async def test_a_long_outage_of_a_quick_schedule_is_counted_and_not_walked(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("tick", every="1s", target="log:")
    ticker = await outage(tickers, clock, 60 * 24 * 30)
    assert len(await ticker.turn()) == 1
    assert (await view_of(client, "tick")).not_run == {"missed": 30 * 86_400 - 1}


async def test_a_long_outage_of_a_quick_cron_line_is_counted_to_the_last_slot(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("tick", cron="* * * * * *", target="log:", timezone="Europe/Paris", misfire="all(3)")
    ticker = await outage(tickers, clock, 60 * 24 * 30)
    await ticker.turn()
    view = await view_of(client, "tick")
    assert (view.runs, view.not_run) == (3, {"missed": 30 * 86_400 - 3})


# -- the run before is not over ---------------------------------------------------------------------------------------


class Slow:
    """A target whose runs end when the test says so."""

    def __init__(self, ticker: Ticker) -> None:
        self.begun: list[int] = []
        self._gates: dict[int, asyncio.Event] = {}
        ticker.answer("log", self._deliver)

    async def _deliver(self, delivery: Delivery) -> Outcome | None:
        assert delivery.body.occurrence is not None
        minute = (delivery.body.occurrence[1] - START_MS) // MINUTE_MS
        self.begun.append(minute)
        await self._gates.setdefault(minute, asyncio.Event()).wait()
        return None

    def end(self, minute: int) -> None:
        self._gates.setdefault(minute, asyncio.Event()).set()


async def steps(ticker: Ticker, clock: ManualClock, until_minute: float) -> None:
    """Every role of the engine, minute by minute, without waiting for what is in flight."""
    engine = ticker.engine
    while True:
        await engine.keeper.step()
        for _ in range(6):
            engine.lookahead.reconnected()
            while await engine.lookahead.step() == 0.0:
                pass
            while await engine.planner.step() == 0.0:
                pass
            await engine.dispatcher.step()
            await asyncio.sleep(0)
        now_ms = clock.now_ms()
        end_ms = START_MS + round(until_minute * MINUTE_MS)
        if now_ms >= end_ms:
            return
        clock.set(min(end_ms, now_ms - now_ms % MINUTE_MS + MINUTE_MS))


@pytest.mark.parametrize("overlap", ["skip", "buffer_one", "buffer_all(5)"])
async def test_overdue_tasks_wait_for_their_turn_and_tasks_due_meanwhile_do_not(
    tickers: Tickers, client: Client, clock: ManualClock, overlap: str
) -> None:
    await client.schedules.add("job", every="1m", target="log:", misfire="all(3)", overlap=overlap)
    ticker = await outage(tickers, clock, 10.5)
    slow = Slow(ticker)
    await steps(ticker, clock, 10.5)
    assert slow.begun == [8]
    assert (await client.explain("job@2027-01-15T08:09:00Z")).code == "run-before"
    slow.end(8)
    slow.end(9)
    await steps(ticker, clock, 10.5)
    assert slow.begun == [8, 9, 10]
    await steps(ticker, clock, 12.5)
    slow.end(10)
    await steps(ticker, clock, 12.5)
    assert slow.begun == [8, 9, 10, *{"skip": [], "buffer_one": [11]}.get(overlap, [11])]
    assert (await view_of(client, "job")).not_run["missed"] == 7
    slow.end(11)
    slow.end(12)
    await ticker.turn()


async def test_within_the_grace_runs_that_take_their_time_come_one_after_the_other(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("job", every="1m", target="log:", grace="5m")
    ticker = await outage(tickers, clock, 3.5)
    slow = Slow(ticker)
    await steps(ticker, clock, 5.5)
    assert slow.begun == [1]
    slow.end(1)
    slow.end(2)
    await steps(ticker, clock, 5.5)
    assert slow.begun == [1, 2, 3], "2 and 3 were due before 1 began; 4 and 5 came due while runs went on"
    slow.end(3)
    await steps(ticker, clock, 6)
    assert slow.begun == [1, 2, 3, 6]
    slow.end(6)
    await ticker.turn()
    view = await view_of(client, "job")
    assert (view.runs, view.not_run) == (4, {"overlap": 2})


async def test_by_default_a_run_is_skipped_while_the_one_before_is_running(
    ticker: Ticker, client: Client, clock: ManualClock
) -> None:
    slow = Slow(ticker)
    await client.schedules.add("job", every="1m", target="log:")
    await steps(ticker, clock, 3)
    assert slow.begun == [1]
    slow.end(1)
    await steps(ticker, clock, 4)
    assert slow.begun == [1, 4]
    view = await view_of(client, "job")
    assert (view.runs, view.not_run) == (2, {"overlap": 2})
    assert [(slot.count, slot.reason) for slot in view.recent_not_run] == [(2, "overlap")]
    slow.end(4)
    await ticker.turn()


async def test_a_pause_records_the_run_that_waited_for_the_one_before_it(
    ticker: Ticker, client: Client, clock: ManualClock
) -> None:
    slow = Slow(ticker)
    await client.schedules.add("job", every="1m", target="log:", overlap="buffer_one")
    await steps(ticker, clock, 3)
    await client.schedules.pause("job", reason="2 waits, and 3 would be left out")
    resumed = await client.schedules.resume("job")
    assert (slow.begun, resumed.not_run) == ([1], {"paused": 2})
    await steps(ticker, clock, 4)
    await client.schedules.pause("job", mode="hold")
    slow.end(1)
    await client.schedules.resume("job")
    slow.end(4)
    await steps(ticker, clock, 4.1)
    assert slow.begun == [1, 4], "what was held runs when the pause is over"


async def test_allow_lets_runs_overlap(ticker: Ticker, client: Client, clock: ManualClock) -> None:
    slow = Slow(ticker)
    await client.schedules.add("job", every="1m", target="log:", overlap="allow")
    await steps(ticker, clock, 3)
    assert slow.begun == [1, 2, 3]
    for minute in (1, 2, 3):
        slow.end(minute)
    await ticker.turn()


async def test_buffer_one_keeps_the_first_that_had_to_wait(ticker: Ticker, client: Client, clock: ManualClock) -> None:
    slow = Slow(ticker)
    await client.schedules.add("job", every="1m", target="log:", overlap="buffer_one")
    await steps(ticker, clock, 4.5)
    assert slow.begun == [1]
    found = await client.explain("job@2027-01-15T08:02:00Z")
    assert (found.code, "08:01:00Z" in found.text) == ("run-before", True)
    slow.end(1)
    await steps(ticker, clock, 4.6)
    assert slow.begun == [1, 2], "the one that waited goes as soon as it may"
    assert (await view_of(client, "job")).not_run == {"overlap": 2}
    slow.end(2)
    await steps(ticker, clock, 5)
    assert slow.begun == [1, 2, 5]
    slow.end(5)
    await ticker.turn()


async def test_buffer_all_keeps_its_number_and_leaves_out_the_rest(
    ticker: Ticker, client: Client, clock: ManualClock
) -> None:
    slow = Slow(ticker)
    await client.schedules.add("job", every="1m", target="log:", overlap="buffer_all(2)")
    await steps(ticker, clock, 6.5)
    assert slow.begun == [1]
    for minute in (1, 2, 3):
        slow.end(minute)
    await steps(ticker, clock, 6.7)
    assert slow.begun == [1, 2, 3], "2 and 3 waited, 4 to 6 found the buffer full"
    assert (await view_of(client, "job")).not_run == {"overlap": 3}
    slow.end(7)
    await steps(ticker, clock, 7)
    assert slow.begun == [1, 2, 3, 7]
    await ticker.turn()


async def test_cancelling_a_run_that_waits_for_its_turn_loses_none_of_those_behind_it(
    ticker: Ticker, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("job", every="1m", target="log:", overlap="buffer_all(5)")
    slow = Slow(ticker)
    await steps(ticker, clock, 4.5)
    assert slow.begun == [1]
    assert await client.cancel("job@2027-01-15T08:02:00Z") == "cancelled"
    for minute in (1, 3, 4):
        slow.end(minute)
    await steps(ticker, clock, 4.5)
    assert slow.begun == [1, 3, 4]
    await ticker.turn()
    assert (await view_of(client, "job")).not_run == {"cancelled": 1}


async def test_a_run_that_waits_for_its_retry_is_not_over(tickers: Tickers, client: Client) -> None:
    ticker = await tickers(options=RETRIES)
    answers: list[Outcome | None] = [Retry("busy"), Retry("busy"), None, None]
    ticker.answer("log", lambda _: answers.pop(0))
    await client.schedules.add("job", every="20s", target="log:")
    came = await ticker.advance(seconds=80)
    assert [(one.id[-3:-1], one.attempt) for one in came] == [("20", 1), ("20", 2), ("20", 3), ("20", 1)]
    view = await view_of(client, "job")
    assert view.not_run == {"overlap": 2}


async def test_a_backfill_runs_what_was_missed(tickers: Tickers, client: Client, clock: ManualClock) -> None:
    await client.schedules.add("job", every="1m", target="log:")
    ticker = await outage(tickers, clock, 3.5)
    assert minutes(await ticker.turn()) == [3]
    done = await client.schedules.backfill("job", start=START_MS + 1, end=clock.now_ms())
    assert (done.planned, done.created, done.kept) == (3, 2, 1)
    assert minutes(await ticker.turn()) == [1, 2]


async def test_a_backfill_runs_what_was_skipped_and_twice_is_once(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    ticker = await tickers(options=RETRIES)
    answers: list[Outcome] = [Retry("busy"), Retry("busy")]
    ticker.answer("log", lambda _: answers.pop(0) if answers else None)
    await client.schedules.add("job", every="20s", target="log:")
    await ticker.advance(minutes=30)  # the slices in which these runs were planned are long gone
    assert (await view_of(client, "job")).not_run == {"overlap": 2}
    done = await client.schedules.backfill("job", start=START_MS, end=clock.now_ms())
    assert [one.id[-6:-1] for one in await ticker.turn()] == ["00:00", "00:40", "01:00"]
    assert done.created == 3, "and the one at the very start, which it began after"
    assert (await client.schedules.backfill("job", start=START_MS, end=clock.now_ms())).created == 0


async def test_a_dead_run_is_over_and_shows_how_it_ended(ticker: Ticker, client: Client) -> None:
    ticker.answer("log", lambda _: Dead("no"))
    await client.schedules.add("job", every="10s", target="log:")
    assert len(await ticker.advance(seconds=30)) == 3
    assert [run.outcome for run in (await view_of(client, "job")).last_runs] == ["dead"] * 3


async def test_a_new_owner_knows_that_a_run_waits_for_its_retry(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    first = await tickers(options=RETRIES)
    first.answer("log", lambda _: Retry("busy"))
    await client.schedules.add("job", every="20s", target="log:")
    await first.advance(seconds=21)
    await first.crash()
    clock.advance(seconds=10)
    second = await tickers(options=RETRIES)
    came = await second.advance(seconds=39)
    assert [(one.id[-3:-1], one.attempt) for one in came] == [("20", 2), ("00", 1)]
    assert (await view_of(client, "job")).not_run == {"overlap": 1}


async def test_a_fixed_delay_counts_from_the_end_of_the_run(ticker: Ticker, client: Client, clock: ManualClock) -> None:
    slow = Slow(ticker)
    await client.schedules.add("job", after_end="1m", target="log:")
    await steps(ticker, clock, 3.5)
    assert slow.begun == [1]
    slow.end(1)
    await steps(ticker, clock, 4)
    assert slow.begun == [1]
    slow.end(4)
    await steps(ticker, clock, 4.5)
    assert slow.begun == [1, 4]
    assert (await view_of(client, "job")).not_run == {}
    await ticker.turn()


# -- held back ---------------------------------------------------------------------------------------------------------


async def test_an_edit_does_not_restart_a_fixed_delay(ticker: Ticker, client: Client, clock: ManualClock) -> None:
    await client.schedules.add("job", after_end="10m", target="log:")
    await ticker.advance(minutes=9)
    await client.schedules.edit("job", payload=1)
    assert minutes(await ticker.advance(minutes=1)) == [10], "as it was planned"
    await ticker.advance(minutes=9)
    await client.schedules.edit("job", payload=2)
    assert minutes(await ticker.advance(minutes=1)) == [20]
    await ticker.advance(minutes=4)
    await client.schedules.edit("job", after_end="5m")
    assert minutes(await ticker.advance(minutes=1)) == [25], "the new delay after the last run"
    await client.schedules.edit("job", after_end="1h")
    await ticker.advance(minutes=30)
    await client.schedules.edit("job", after_end="10m")
    assert minutes(await ticker.advance(minutes=1)) == [55], "which is over already"


@pytest.mark.parametrize("rule", ["coalesce", "all(5)"])
async def test_an_outage_misses_no_run_of_a_fixed_delay(
    tickers: Tickers, client: Client, clock: ManualClock, rule: str
) -> None:
    await client.schedules.add("job", after_end="10s", target="log:", misfire=rule)
    ticker = await outage(tickers, clock, 60)
    assert [one.id for one in await ticker.turn()] == ["job@2027-01-15T08:00:10Z"], "the one that was planned"
    assert len(await ticker.advance(seconds=25)) == 2
    assert (await view_of(client, "job")).not_run == {}


async def test_one_run_of_a_fixed_delay_is_missed_or_falls_into_a_pause(
    tickers: Tickers, client: Client, clock: ManualClock
) -> None:
    await client.schedules.add("job", after_end="2m", target="log:", misfire="skip")
    ticker = await outage(tickers, clock, 60)
    assert await ticker.turn() == []
    assert (await view_of(client, "job")).not_run == {"missed": 1}
    assert len(await ticker.advance(minutes=5)) == 2
    await client.schedules.pause("job", reason="rest")
    assert await ticker.advance(minutes=60) == []
    await client.schedules.resume("job")
    assert (await view_of(client, "job")).not_run == {"missed": 1, "paused": 1}
    assert len(await ticker.advance(minutes=5)) == 2


@pytest.mark.parametrize(("rule", "ran"), [("coalesce", [5]), ("all", [1, 2, 3, 4, 5]), ("skip", [])])
async def test_runs_that_a_paused_target_held_back_follow_the_misfire_rule(
    ticker: Ticker, client: Client, rule: str, ran: list[int]
) -> None:
    await client.schedules.add("job", every="1m", target="log:", misfire=rule, overlap="allow", grace="10s")
    await client.pause(target="log:")
    assert await ticker.advance(minutes=5.5) == []
    await client.resume(target="log:")
    assert minutes(await ticker.turn()) == ran
    assert minutes(await ticker.advance(minutes=1))[-1] == 6


async def test_a_paused_target_that_drops_does_not_end_a_schedule(ticker: Ticker, client: Client) -> None:
    await client.schedules.add("job", every="1m", target="log:", grace="10s")
    await client.pause(target="log:", mode="drop")
    assert await ticker.advance(minutes=3.5) == []
    await client.resume(target="log:")
    assert minutes(await ticker.advance(minutes=2))[-1] == 5


@pytest.mark.parametrize("first_late_ms", [0, 400])
async def test_a_schedule_that_is_quicker_than_its_runs_skips_instead_of_falling_behind(
    ticker: Ticker, client: Client, clock: ManualClock, first_late_ms: int
) -> None:
    late_ms: list[int] = []

    def run(delivery: Delivery) -> None:
        assert delivery.body.occurrence is not None
        late_ms.append(clock.now_ms() - delivery.body.occurrence[1])
        if len(late_ms) < 50:  # then the clock stands, and the turn can end
            clock.advance(ms=20)

    ticker.answer("log", run)
    await client.schedules.add("tick", every="1ms", overlap="skip", target="log:")
    clock.advance(ms=1 + first_late_ms)
    await ticker.turn()
    assert len(late_ms) >= 50
    assert max(late_ms[1:]) <= 40
    view = await view_of(client, "tick")
    assert view.runs + view.not_run["overlap"] == (clock.now_ms() - START_MS)
