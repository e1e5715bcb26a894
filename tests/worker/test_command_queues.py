"""The rules of a queue hold for its commands: those of `commands`, and those with a queue of their own."""

from collections.abc import Awaitable, Callable

import pytest

from mainspring.engine.engine import EngineOptions
from mainspring.engine.flow import FlowOptions
from mainspring.model.flow import Limit, Rate
from mainspring.store.store import Store
from mainspring.store.tasks.dead_letters import list_dead
from mainspring.testing.ticker import Ticker
from tests.support.job_queues import HandWorker

Tickers = Callable[..., Awaitable[Ticker]]
OWN = {"report": "reports"}
QUEUES = ("commands", "reports")


async def taken(store: Store) -> dict[str, int]:
    """How many of each target are in queues; they are there no more."""
    worker = HandWorker(store, queues=QUEUES)
    found: dict[str, int] = {}
    while jobs := await worker.take():
        for job in jobs:
            found[job.body.target] = found.get(job.body.target, 0) + 1
            await worker.end(job)
    return found


@pytest.mark.parametrize(
    ("queue", "held", "free"),
    [("commands", "command:backup", "command:report"), ("reports", "command:report", "command:backup")],
)
async def test_the_rate_of_a_queue_holds_for_its_commands(
    tickers: Tickers, store: Store, queue: str, held: str, free: str
) -> None:
    flow = FlowOptions(limits={f"queue:{queue}": Limit(Rate.read("1/h"))})
    ticker = await tickers(workers=True, options=EngineOptions(flow=flow, command_queues=OWN))
    for number in range(3):
        await ticker.client.put(held, id=f"held {number}", after="1s")
        await ticker.client.put(free, after="1s")
    await ticker.advance(seconds=5)
    codes = sorted([(await ticker.client.explain(f"held {number}")).code for number in range(3)])
    assert codes == ["no-worker", "rate-limited", "rate-limited"]
    assert await taken(store) == {held: 1, free: 3}


@pytest.mark.parametrize(
    ("queue", "held", "free"),
    [("commands", "command:backup", "command:report"), ("reports", "command:report", "command:backup")],
)
async def test_a_paused_queue_holds_its_commands_back(
    tickers: Tickers, store: Store, queue: str, held: str, free: str
) -> None:
    ticker = await tickers(workers=True, options=EngineOptions(command_queues=OWN))
    await ticker.client.pause(queue=queue, by="ops", reason="disk is full")
    await ticker.client.put(held, id="held", after="1s")
    await ticker.client.put(free, after="1s")
    await ticker.advance(seconds=5)
    found = await ticker.client.explain("held")
    assert (found.state, found.code, found.who, found.reason) == ("pending", "paused", "ops", "disk is full")
    assert await taken(store) == {free: 1}
    await ticker.client.resume(queue=queue)
    await ticker.turn()
    assert await taken(store) == {held: 1}


async def test_a_pause_that_drops_a_queue_drops_its_commands(tickers: Tickers, store: Store) -> None:
    ticker = await tickers(workers=True, options=EngineOptions(command_queues=OWN))
    await ticker.client.pause(queue="commands", mode="drop", by="ops")
    for target in ("command:backup", "command:report"):
        await ticker.client.put(target, after="1s")
    await ticker.advance(seconds=5)
    assert [(one.target, one.reason) for one in await list_dead(store)] == [
        ("command:backup", "dropped while paused by ops")
    ]
    assert await taken(store) == {"command:report": 1}
