"""A network that really parts: a node in a network namespace of its own, whose only cable is pulled.

The chaos runs part networks by their proxies, which works everywhere. Where this process may make namespaces, the
kernel does it here: packets vanish, connections stay.
"""

import asyncio
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from mainspring.bench.fleet import Order
from mainspring.client import Client
from mainspring.model.task import Task
from mainspring.store import members
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import standalone

LEASE_S = 1.5
TASKS = 2_000
PASSWORD = secrets.token_hex(8)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """A network namespace with one cable to this machine."""

    def __init__(self) -> None:
        name = secrets.token_hex(3)
        self.namespace, self._plug, far = f"ms-{name}", f"ms{name}0", f"ms{name}1"
        net = f"10.{secrets.randbelow(56) + 200}.{secrets.randbelow(256)}"
        self.host = f"{net}.1"
        ip("netns", "add", self.namespace)
        try:
            ip("link", "add", self._plug, "type", "veth", "peer", "name", far)
            ip("link", "set", far, "netns", self.namespace)
            ip("addr", "add", f"{self.host}/30", "dev", self._plug)
            ip("link", "set", self._plug, "up")
            ip("-n", self.namespace, "addr", "add", f"{net}.2/30", "dev", far)
            ip("-n", self.namespace, "link", "set", far, "up")
        except subprocess.CalledProcessError:
            self.remove()
            raise

    def pull(self) -> None:
        ip("link", "set", self._plug, "down")

    def plug_in(self) -> None:
        ip("link", "set", self._plug, "up")

    def remove(self) -> None:
        for words in (("link", "del", self._plug), ("netns", "del", self.namespace)):
            with suppress(subprocess.CalledProcessError):
                ip(*words)


@pytest.fixture
def cable() -> Iterator[Cable]:
    try:
        made = Cable()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not allowed here ({error}); the chaos runs part networks by proxies")
    yield made
    made.remove()


@asynccontextmanager
async def node(name: str, url: str, *prefix: str) -> AsyncIterator[None]:
    command = [*prefix, sys.executable, "-m", "mainspring.bench.fleet"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(Order(url, "main", name, LEASE_S, 3.0)) + b"\n")
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
                async with node("far", far_url, "ip", "netns", "exec", cable.namespace):
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
