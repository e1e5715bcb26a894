"""Opening and closing clients: many at once, in more than one event loop, and open for long."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from mainspring.client.client import BATCH, Client
from mainspring.model import clock as clock_module
from mainspring.model.clock import ServerClock
from mainspring.model.errors import MainspringError
from mainspring.model.task import Handle, Task
from mainspring.testing.servers import Server, standalone, wait_until


@pytest.fixture
def server() -> Iterator[Server]:
    with standalone() as made:
        yield made


def connections(server: Server) -> int:
    """Return the number of connections to the server, without the one that asks."""
    return int(server.info("clients")["connected_clients"]) - 1


def test_a_client_opened_many_times_at_once_has_one_connection_that_closes(server: Server) -> None:
    client = Client(server.url)

    async def use() -> None:
        await asyncio.gather(*(client.open() for _ in range(8)))
        assert connections(server) == 1
        await client.aclose()

    asyncio.run(use())
    wait_until(lambda: connections(server) == 0, "the connection is closed")


def test_a_client_that_was_opened_in_another_loop_says_so(server: Server) -> None:
    client = Client(server.url)
    with asyncio.Runner() as first:
        first.run(client.open())
        with pytest.raises(MainspringError, match="another event loop"), asyncio.Runner() as second:
            second.run(client.count())
        first.run(client.aclose())


GONE = """
import asyncio, sys
from mainspring import Client

client = Client(sys.argv[1])

async def use():
    await client.aclose()
    async with client:
        print((await client.count()).pending)

asyncio.run(client.open())
asyncio.run(use())
"""


def test_a_client_whose_loop_is_gone_can_be_closed_and_opened_again(server: Server) -> None:
    ended = subprocess.run([sys.executable, "-c", GONE, server.url], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def _now_ms(server: Server) -> int:
    seconds, micros = server.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


@pytest.mark.parametrize(
    "move",
    [
        lambda client: client.put("log:", after="10s"),
        lambda client: client.put("log:", after="10s", id="another"),
        lambda client: client.reschedule("known", after="10s"),
        lambda client: client.schedules.trigger("daily", after="10s"),
    ],
)
async def test_delays_count_from_the_servers_time_even_if_a_client_is_open_for_long(
    server: Server, monkeypatch: pytest.MonkeyPatch, move: Callable[[Client], Awaitable[Handle]]
) -> None:
    """Counted on a little too slowly for a day, its clock is 17 seconds behind: the delay would be over at once."""
    clock = ServerClock()
    async with Client(server.url, clock=clock) as client:
        await client.put("log:", after="1h", id="known")
        await client.schedules.add("daily", cron="@daily", target="log:")
        clock.sample(_now_ms(server) * 1000 - 17_280_000)
        steady_s = clock_module.steady_s
        monkeypatch.setattr(clock_module, "steady_s", lambda: steady_s() + 86_400)
        before_ms = _now_ms(server)
        assert (await move(client)).due_ms >= before_ms + 10_000


async def test_each_batch_of_a_slow_source_counts_from_the_servers_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, steady_s = ServerClock(), clock_module.steady_s

    async def tasks() -> AsyncIterator[Task]:
        for _ in range(BATCH):
            yield Task("log:", after="10s")
        clock.sample(_now_ms(server) * 1000 - 17_280_000)
        monkeypatch.setattr(clock_module, "steady_s", lambda: steady_s() + 86_400)
        yield Task("log:", after="10s")

    async with Client(server.url, clock=clock) as client:
        before_ms = _now_ms(server)
        summary = await client.put_many(tasks(), handles=True)
    assert all(handle.due_ms >= before_ms + 10_000 for handle in summary.handles or ())
