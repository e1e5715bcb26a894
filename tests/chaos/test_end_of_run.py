"""A chaos run ends when the servers hold no unfinished task, not when its callers are owed nothing."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from mainspring import DONE, Retry
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Delivery, Outcome
from mainspring.store.keys import PartitionKeys
from mainspring.store.store import Store
from mainspring.testing.balance import Balance, partition_balance
from mainspring.testing.history import AcceptedEvent, FaultEvent
from mainspring.testing.ticker import Ticker

from ..support.chaos import run as chaos_run
from ..support.chaos.load import Load
from ..support.chaos.profile import PROFILES
from ..support.chaos.run import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run at its end, which gives up as soon as it finds something unfinished."""
    profile = PROFILES["promotion"]
    monkeypatch.setattr(chaos_run, "_PATIENCE_S", -profile.within_s)
    made = Run(profile, 1, tmp_path)
    yield made
    made.journal.close()


@pytest.fixture
def ticker(mainspring_url: str, mainspring_namespace: str, mainspring_clock: ManualClock) -> Ticker:
    return Ticker(mainspring_url, namespace=mainspring_namespace, clock=mainspring_clock, workers=True)


async def moved(ticker: Ticker) -> str:
    await ticker.client.put("log:", {}, id="moved", after="1s")
    await ticker.client.reschedule("moved", after="1h")
    return "1 pending, 0 fired, 0 queued: ['moved']"


async def retried(ticker: Ticker) -> str:
    def fail_once(delivery: Delivery) -> Outcome:
        return Retry("busy", after_ms=3_600_000) if delivery.attempt == 1 else DONE

    ticker.answer("log", fail_once)
    await ticker.client.put("log:", {}, id="retried", after="0s")
    await ticker.turn()
    return "1 pending, 0 fired, 0 queued: ['retried']"


async def in_a_lane(ticker: Ticker) -> str:
    """The second waits for the first, which waits for its retry."""
    await ticker.client.put("log:", {}, id="second", after="2s", lane="orders")

    def fail_once(delivery: Delivery) -> Outcome:
        return Retry("busy", after_ms=3_600_000) if delivery.id == "first" and delivery.attempt == 1 else DONE

    ticker.answer("log", fail_once)
    await ticker.client.put("log:", {}, id="first", after="1s", lane="orders")
    await ticker.advance(seconds=3)
    return "2 pending, 0 fired, 0 queued: ["


async def in_a_queue(ticker: Ticker) -> str:
    await ticker.client.put("queue:work/run", {}, id="queued", after="0s")
    await ticker.turn()
    return "0 pending, 0 fired, 1 queued: ['queued']"


@pytest.mark.parametrize("accept", [moved, retried, in_a_lane, in_a_queue])
async def test_a_run_that_has_to_end_names_what_the_servers_still_hold(
    accept: Callable[[Ticker], Awaitable[str]], run: Run, ticker: Ticker
) -> None:
    async with ticker:
        held = await accept(ticker)
        await run.drain(ticker.client)
    assert run.drained_s is None
    [failure] = run.failures
    assert held in failure


@pytest.mark.parametrize("accept", [moved, retried, in_a_lane])
async def test_a_run_ends_once_everything_that_was_accepted_has_come_due(
    accept: Callable[[Ticker], Awaitable[str]], run: Run, ticker: Ticker
) -> None:
    async with ticker:
        await accept(ticker)
        await ticker.advance(hours=2)
        await run.drain(ticker.client)
    assert run.failures == []
    assert run.drained_s is not None


async def test_a_run_waits_for_a_move_that_the_servers_may_have_forgotten(run: Run, ticker: Ticker) -> None:
    """Its old due time is promised and past, its new one is not promised: no caller is owed anything."""
    async with ticker:
        load = Load("direct", ticker.client, run.journal, run.profile, seed=1, ends_us=0, road=None)
        run.loads.append(load)
        await moved(ticker)
        due_ms = ticker.clock.now_ms() + 3_600_000
        load.open["moved"] = AcceptedEvent(5, "moved", "moved", due_ms, instead="before", level="server")
        run.journal.add(FaultEvent(1, 9, "promotion", loses=True))
        await run.drain(ticker.client)
        assert "['moved']" in run.failures[0]
        run.failures.clear()
        await ticker.advance(hours=2)
        await run.drain(ticker.client)
    assert run.failures == []


async def test_a_run_asks_again_until_nothing_is_left(
    run: Run, ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_run, "_PATIENCE_S", 600.0)

    async def time_passes(store: Store, keys: PartitionKeys) -> Balance:
        found = await partition_balance(store, keys)
        await ticker.advance(minutes=1)
        return found

    monkeypatch.setattr(chaos_run, "partition_balance", time_passes)
    async with ticker:
        await moved(ticker)
        await run.drain(ticker.client)
        assert [one.id for one in ticker.deliveries] == ["moved"]
    assert run.failures == []
