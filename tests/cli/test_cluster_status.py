"""`mainspring cluster status`: what a person and a program see of the nodes."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from typer.testing import CliRunner, Result

from mainspring.cli.admin import cluster_app
from mainspring.config.config import Config
from mainspring.node.node import Node
from mainspring.testing.servers import Server


async def status(server: Server, *words: str) -> Result:
    return await asyncio.to_thread(
        lambda: CliRunner().invoke(cluster_app, ["status", "--redis-url", server.url, *words])
    )


@pytest.fixture
async def nodes(server: Server) -> AsyncIterator[list[Node]]:
    server.call("FLUSHALL")
    async with AsyncExitStack() as stack:
        started = []
        for name in ("first", "second"):
            node = Node(Config(redis_url=server.url, partitions=8, node_id=name, lease_s=30.0, concurrency=500))
            await node.start()
            stack.push_async_callback(node.stop)
            started.append(node)
        async with asyncio.timeout(60):
            while any(node.engine is None or len(node.engine.owned) != 4 for node in started):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield started


async def test_every_node_is_shown_with_what_it_owns(server: Server, nodes: list[Node]) -> None:
    result = await status(server, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["leader"], report["partitions"], report["without_owner"], report["moving"]) == ("first", 8, [], [])
    first, second = report["nodes"]
    assert (first["id"], first["leader"], second["id"], second["leader"]) == ("first", True, "second", False)
    assert sorted(first["partitions"] + second["partitions"]) == list(range(8))
    assert len(first["partitions"]) == len(second["planned"]) == 4
    for node in (first, second):
        assert node["concurrency"] == 500
        assert node["roles"] == ["scheduler"]
        assert {"look_ahead", "in_flight", "lag_ms", "delivered", "host", "pid", "version"} <= node.keys()


async def test_the_table_marks_the_leader(server: Server, nodes: list[Node]) -> None:
    lines = (await status(server)).stdout.splitlines()
    assert lines[0].split()[:4] == ["NODE", "HOST", "PID", "OWNS"]
    assert lines[1].startswith("first (leader)")
    assert lines[2].startswith("second ")
    assert "8 partitions, plan" in lines[-1]


async def test_without_a_node_status_fails_and_says_how_to_start_one(server: Server) -> None:
    server.call("FLUSHALL")
    result = await status(server)
    assert result.exit_code == 1, "partitions without an owner are a failure for a script that asks"
    assert "32 have no owner" in result.stdout
    assert "no node is running; start one: mainspring serve" in result.stdout


async def test_watch_repeats_until_it_is_interrupted(server: Server, nodes: list[Node]) -> None:
    words = ["-m", "mainspring", "cluster", "status", "--watch", "--json", "--redis-url", server.url]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    reports = [json.loads(await process.stdout.readline()) for _ in range(2)]
    assert [report["leader"] for report in reports] == ["first", "first"]
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
