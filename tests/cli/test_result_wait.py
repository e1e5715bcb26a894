"""`mainspring task result --wait`: an outage in between is waited for, as `Client.result` does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner, Result

from mainspring.cli import app
from mainspring.client.http import Api as Remote
from mainspring.config.config import Config
from mainspring.model.errors import Unavailable
from mainspring.sinks.log import NullSink
from mainspring.testing.servers import Server
from tests.support.api_calls import Api, serving_api
from tests.support.relay import relaying
from tests.support.workers import until


@pytest.fixture
async def api(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    monkeypatch.chdir(tmp_path)
    server.call("FLUSHALL")
    async with serving_api(Config(redis_url=server.url, port=0, partitions=4), {"null": NullSink()}) as made:
        yield made


def wait_for(id: str, wait: str, url: str) -> "asyncio.Task[Result]":
    line = ["task", "result", id, "--wait", wait, "--url", url]
    return asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, line))


@pytest.mark.parametrize("begins", ["before the outage", "in the outage"])
@pytest.mark.parametrize("road", ["server", "api"])
async def test_waiting_for_a_result_outlasts_an_outage(api: Api, server: Server, road: str, begins: str) -> None:
    await api.client.put("null:", after="1h", id="order")
    scheme, far = ("redis", server.port) if road == "server" else ("http", urlsplit(api.url).port)
    assert far is not None
    async with relaying(far) as (relay, port):
        if begins == "in the outage":
            relay.close()
        command = wait_for("order", "60s", f"{scheme}://127.0.0.1:{port}")
        if begins == "before the outage":
            await until(lambda: relay.passed)
            relay.close()
        await until(lambda: relay.hung_up > 1 or command.done())
        await api.client.cancel("order")
        relay.open()
        ended = await command
    assert ended.exit_code == 0, ended.exception
    assert "cancelled" in ended.stdout


async def test_when_the_time_is_over_the_outage_is_reported(api: Api) -> None:
    port = urlsplit(api.url).port
    assert port is not None
    async with relaying(port) as (relay, at):
        relay.close()
        ended = await wait_for("order", "10ms", f"http://127.0.0.1:{at}")
    assert isinstance(ended.exception, Unavailable)


async def test_a_node_whose_own_server_is_unavailable_is_unavailable_to_commands(server: Server) -> None:
    server.call("FLUSHALL")
    async with relaying(server.port) as (relay, at):
        config = Config(redis_url=f"redis://127.0.0.1:{at}", port=0, partitions=4)
        async with serving_api(config, {"null": NullSink()}) as api:
            relay.close()
            with contextlib.closing(Remote(api.url)) as remote, pytest.raises(Unavailable, match=api.url):
                await asyncio.to_thread(remote.get, "/v1/tasks", "order")
            relay.open()
