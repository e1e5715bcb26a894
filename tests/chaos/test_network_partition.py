"""A network that really parts: a node in a network namespace of its own, whose only cable is pulled.

Between node and server is nothing but the cable here: no proxy takes what the kernel would have to send again.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from mainspring.bench.fleet import NodeOrder
from mainspring.client.client import Client
from mainspring.model.task import Task
from mainspring.store import members
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import standalone
from tests.support.chaos.network import Cable, refused

LEASE_S = 1.5
TASKS = 2_000
PASSWORD = secrets.token_hex(8)


@pytest.fixture
def cable() -> Iterator[Cable]:
    why_not = refused()
    if why_not is not None:
        pytest.skip(f"network namespaces are not allowed here ({why_not}); the chaos runs part networks by proxies")
    made = Cable()
    yield made
    made.remove()


@asynccontextmanager
async def node(name: str, url: str, *prefix: str) -> AsyncIterator[None]:
    command = [*prefix, sys.executable, "-m", "mainspring.bench.fleet"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(NodeOrder(url, "main", name, LEASE_S, 3.0)) + b"\n")
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until(store: Store, reached: Callable[[set[str]], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            holdings = await members.holdings(store, await store.sample_clock())
            if reached({one.owner.rpartition("/")[0] for one in holdings}):
                return
            await asyncio.sleep(0.02)


async def test_a_node_whose_cable_is_pulled_loses_its_partitions_and_nothing_else(cable: Cable) -> None:
    with standalone(password=PASSWORD, extra_config={"bind": f"127.0.0.1 {cable.host}"}) as server:
        port = server.url.rpartition(":")[2].partition("/")[0]
        far_url = f"redis://:{PASSWORD}@{cable.host}:{port}"
        async with Client(server.url) as client, node("near", server.url):
            store = await Store.open(server.url)
            try:
                async with node("far", far_url, *cable.inside):
                    await until(store, lambda owners: owners == {"near", "far"})
                    await client.put_many(Task("null:", n, after=f"{1_000 + 2 * n}ms") for n in range(TASKS))
                    cable.pull()
                    await until(store, lambda owners: owners == {"near"})
                    async with asyncio.timeout(60):
                        while (await balance(store)).done < TASKS:  # noqa: ASYNC110  # other processes: only polling
                            await asyncio.sleep(0.05)
                    cable.plug_in()
                    await until(store, lambda owners: owners == {"near", "far"})
                    assert (await balance(store)).done == TASKS, "a former owner finished something once more"
            finally:
                await store.aclose()
