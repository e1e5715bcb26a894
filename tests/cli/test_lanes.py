"""`mainspring lane`, `pause`, `resume` and `pauses`: what a person types and reads."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from unittest.mock import ANY

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from mainspring.cli.audited_client import user
from mainspring.cli.lanes import lane_app as lane
from mainspring.cli.lanes import pause_app as pause
from mainspring.cli.lanes import pauses_app as pauses
from mainspring.cli.lanes import resume_app as resume
from mainspring.client.sync import SyncClient
from mainspring.engine.engine import EngineOptions
from mainspring.model.audit import of_lane
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import Retry
from mainspring.model.errors import InvalidInput
from mainspring.model.lane import LanePolicy
from mainspring.model.task import Task
from mainspring.testing.balance import balance
from mainspring.testing.servers import Server
from mainspring.testing.ticker import Ticker


@pytest.fixture
async def ticker(server: Server) -> AsyncIterator[Ticker]:
    """Lane "a" is parked behind its head h, and two wait; on a clock that commands share."""
    server.call("FLUSHALL")
    clock = ManualClock(int(time.time() * 1000) - 60_000)
    options = EngineOptions(lane_policy=LanePolicy("park"))
    async with Ticker(server.url, namespace="main", partitions=4, clock=clock, options=options) as opened:
        opened.answer("log", lambda one: Retry("busy") if one.id == "h" and one.attempt == 1 else None)
        await opened.client.put("log:", 0, id="h", lane="a", after="1s")
        await opened.client.put_many(Task("log:", n, after=f"{n}s", lane="a") for n in (2, 3))
        await opened.advance(seconds=5)
        clock.set(int(time.time() * 1000))
        await opened.turn()
        yield opened
        await balance(opened.store)


@pytest.fixture
async def blocked(server: Server) -> AsyncIterator[Ticker]:
    """Lane "a" waits for its head h, which is tried again soon: one that is due behind it stays where it was put."""
    server.call("FLUSHALL")
    clock = ManualClock(int(time.time() * 1000) - 60_000)
    async with Ticker(server.url, namespace="main", partitions=4, clock=clock) as opened:
        opened.answer("log", lambda one: Retry("busy", after_ms=9_000) if one.id == "h" else None)
        await opened.client.put("log:", id="h", lane="a", after="1s")
        await opened.client.put("log:", id="next", lane="a", after="2s")
        assert [one.id for one in await opened.advance(seconds=3)] == ["h"]
        yield opened


def cells(result: Result) -> list[list[str]]:
    """Return the rows of a printed list, headers first."""
    return [re.split(" {2,}", line) for line in result.stdout.splitlines()]


async def call(app: Typer, server: Server, *words: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [*words, "--redis-url", server.url]))


async def test_stalled_lanes_are_listed_and_shown(server: Server, ticker: Ticker) -> None:
    listed = await call(lane, server, "list")
    assert cells(listed) == [
        ["LANE", "STATE", "SINCE", "BEHIND", "REASON"],
        ["a", "parked", ANY, "2", "head h, attempt 1: busy"],
    ]
    shown = await call(lane, server, "show", "a")
    assert "a: parked, 2 tasks behind" in shown.output
    assert "error     busy" in shown.output
    [row] = json.loads((await call(lane, server, "list", "--json")).output)
    assert (row["lane"], row["state"], row["behind"], row["head_id"]) == ("a", "parked", 2, "h")
    assert (await call(lane, server, "show", "b")).output.startswith("b: flowing")


async def test_a_lane_whose_tasks_wait_where_they_were_put_shows_an_unknown_number(
    server: Server, blocked: Ticker
) -> None:
    assert cells(await call(lane, server, "list"))[1] == ["a", "retrying", ANY, "?", "head h, attempt 1: busy"]
    assert (await call(lane, server, "show", "a")).output.startswith("a: retrying, some or no tasks behind\n")
    assert json.loads((await call(lane, server, "show", "a", "--json")).output)["behind"] is None
    assert of_lane(await blocked.client.lane("a")) == {"state": "retrying", "head_id": "h", "behind": None}


@pytest.mark.parametrize("word", ["resume", "retry-head"])
async def test_a_parked_lane_is_resumed(server: Server, ticker: Ticker, word: str) -> None:
    assert (await call(lane, server, word, "a")).output == "a: done\n"
    ticker.clock.set(int(time.time() * 1000) + 1_000)
    assert [one.value() for one in await ticker.turn()] == [0, 2, 3]
    await ticker.advance(seconds=5)
    assert (await call(lane, server, "list")).stderr == f"no lane is stalled in namespace main on {server.url}\n"
    again = await call(lane, server, word, "a")
    assert (again.exit_code, again.output) == (1, "a: it is not waiting for a failed task\n")


async def test_a_head_is_skipped_with_a_reason(server: Server, ticker: Ticker) -> None:
    done = await call(lane, server, "skip-head", "a", "--reason", "broken order", "--json")
    assert json.loads(done.output) == {"lane": "a", "answer": "ok"}
    ticker.clock.set(int(time.time() * 1000) + 1_000)
    assert [one.value() for one in await ticker.turn()] == [2, 3]
    dead_letter = await ticker.client.dead_get("h")
    assert dead_letter is not None
    assert dead_letter.reason == "broken order"


async def test_pause_list_and_resume(server: Server, ticker: Ticker) -> None:
    made = await call(pause, server, "--target", "kafka:*", "--reason", "deploy", "--who", "ops", "--for", "1h")
    assert made.output.startswith("paused: target kafka:*, since ")
    assert made.output.endswith("by ops: deploy\n")
    assert (await call(pause, server, "--all", "--drop", "--json")).exit_code == 0
    rows = json.loads((await call(pauses, server, "--json")).output)
    assert [(row["scope"], row["mode"]) for row in rows] == [("target kafka:*", "hold"), ("all", "drop")]
    assert [(row["by"], row["who"]) for row in rows] == [("ops", "ops"), (user(), user())]
    assert [row[:1] + row[3:4] for row in cells(await call(pauses, server))] == [
        ["PAUSED", "MODE"], ["target kafka:*", "hold"], ["all", "drop"],
    ]  # fmt: skip
    assert (await call(resume, server, "--all")).output == "resumed: all\n"
    assert (await call(resume, server, "--target", "kafka:*")).exit_code == 0
    twice = await call(resume, server, "--all")
    assert (twice.exit_code, twice.output) == (1, "all was not paused; see mainspring pauses\n")
    assert (await call(pauses, server)).stderr == f"nothing is paused in namespace main on {server.url}\n"


@pytest.mark.parametrize("words", [(), ("--all", "--lane", "a"), ("--lane", "a", "--queue", "b")])
async def test_a_pause_must_say_what_it_means(server: Server, ticker: Ticker, words: tuple[str, ...]) -> None:
    refused = await call(pause, server, *words)
    assert isinstance(refused.exception, InvalidInput)
    assert "--all, --target, --queue or --lane" in str(refused.exception)


async def test_the_blocking_client_has_the_same_calls(server: Server, ticker: Ticker) -> None:
    def work() -> tuple[str, str, int]:
        with SyncClient(server.url) as client:
            client.pause(lane="x", reason="r")
            paused = client.pauses()[0].reason
            client.resume(lane="x")
            return paused, client.lane("a").state, len(client.lanes())

    assert await asyncio.to_thread(work) == ("r", "parked", 1)
