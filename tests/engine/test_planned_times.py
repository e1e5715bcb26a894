"""Whatever people and outages do to a schedule, each of its planned times has run, or is counted with the reason."""

import random
from collections.abc import Awaitable, Callable

import pytest

from mainspring.client.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.ids import occurrence_id
from mainspring.testing.ticker import Ticker

START_MS = 1_800_000_000_000
STEP_MS = 10_000
Action = Callable[[int], Awaitable[object]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


class Fate:
    """Changes of the schedule `job`; its runs are remembered."""

    def __init__(self, ticker: Ticker, client: Client, clock: ManualClock) -> None:
        self.ticker, self.client, self.clock = ticker, client, clock
        self.ran: list[str] = []
        schedules = client.schedules
        self.actions: dict[str, Action] = {
            "time": self.time,
            "more time": self.time,
            "outage": self.outage,
            "cancel": self.cancel,
            "pause": lambda _: schedules.pause("job"),
            "pause until": lambda n: schedules.pause("job", until=f"{n}s"),
            "hold": lambda _: schedules.pause("job", mode="hold"),
            "hold until": lambda n: schedules.pause("job", mode="hold", until=f"{n}s"),
            "resume": lambda _: schedules.resume("job"),
            "edit": lambda n: schedules.edit("job", payload=n),
        }

    async def time(self, seconds: int) -> None:
        self.ran += [one.id for one in await self.ticker.advance(seconds=seconds)]

    async def outage(self, seconds: int) -> None:
        self.clock.advance(seconds=seconds)
        self.ran += [one.id for one in await self.ticker.turn()]

    async def cancel(self, _: int) -> None:
        view = await self.client.schedules.get("job")
        assert view is not None
        if view.state == "active":
            await self.client.cancel(occurrence_id("job", view.next_ms[0]))


@pytest.mark.parametrize("seed", range(10))
async def test_every_planned_time_has_run_or_is_counted(
    ticker: Ticker, client: Client, clock: ManualClock, seed: int
) -> None:
    dice = random.Random(seed)
    misfire, grace = dice.choice(["coalesce", "skip", "all(2)", "all"]), dice.choice(["1s", "15s", "60s"])
    await client.schedules.add("job", every="10s", target="log:", misfire=misfire, grace=grace)
    fate, told = Fate(ticker, client, clock), [misfire, grace]
    for _ in range(12):
        name, seconds = dice.choice(list(fate.actions)), dice.choice([3, 7, 10, 25, 70, 200])
        told.append(f"{name} {seconds}")
        await fate.actions[name](seconds)
    await client.schedules.resume("job")
    await fate.time(300)
    view = await client.schedules.get("job")
    assert view is not None
    assert (view.runs, len(set(fate.ran))) == (len(fate.ran), len(fate.ran)), told
    planned = (view.next_ms[0] - START_MS) // STEP_MS - 1
    assert view.runs + sum(view.not_run.values()) == planned, (told, view.not_run, view.recent_not_run)
