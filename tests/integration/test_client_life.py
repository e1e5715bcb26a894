"""Opening and closing clients: many at once, and in more than one event loop."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mainspring.client import Client
from mainspring.model.errors import MainspringError
from mainspring.testing.servers import Server, standalone, wait_until


@pytest.fixture
def server() -> Iterator[Server]:
    with standalone() as made:
        yield made


def connections(server: Server) -> int:
    """Of others than this question."""
    return int(server.info("clients")["connected_clients"]) - 1


def test_who_opens_a_client_many_times_at_once_has_one_connection_that_closes(server: Server) -> None:
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
