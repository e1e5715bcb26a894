"""Node processes that a benchmark starts, kills and stops. Run as a module, this file is one such node."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec
import uvloop

from ..config.config import Config
from ..model.errors import MainspringError
from ..node.node import Node
from ..sinks.log import NullSink
from ..store import members
from ..store.store import Store

GIVE_UP_S: Final = 60.0
POLL_S: Final = 0.005
_READY: Final = b"ready\n"
_MODULE: Final = "mainspring.bench.fleet"


class BenchFailed(MainspringError):
    """The event to be measured did not happen."""


class NodeOrder(msgspec.Struct, frozen=True):
    """The order that a node process reads from its standard input."""

    url: str
    namespace: str
    node_id: str
    lease_s: float
    horizon_s: float


class NodeProcess:
    """One node process."""

    def __init__(self, id: str, process: asyncio.subprocess.Process) -> None:
        self.id = id
        self.process = process

    async def signal(self, number: signal.Signals) -> float:
        """Send a signal; return the monotonic time at which it was sent."""
        at = time.monotonic()
        self.process.send_signal(number)
        return at


class Fleet:
    """The node processes of one namespace, and the owners of its partitions."""

    def __init__(self, store: Store, url: str, lease_s: float) -> None:
        self.store = store
        self._url = url
        self._lease_s = lease_s
        self._count = 0
        self.members: list[NodeProcess] = []

    async def add(self, *, horizon_s: float = 3.0) -> NodeProcess:
        self._count += 1
        id = f"node-{self._count}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", _MODULE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self.members.append(member := NodeProcess(id, process))
        assert process.stdin is not None
        assert process.stdout is not None
        order = NodeOrder(self._url, self.store.keys.namespace, id, self._lease_s, horizon_s)
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        if await process.stdout.readline() != _READY:
            raise BenchFailed("a node process did not start; see its output above")
        return member

    async def remove(self, member: NodeProcess, number: signal.Signals) -> float:
        """End a node; return the seconds until other nodes own all of its partitions."""
        had = {p for p, owner in enumerate(await self.owners()) if owner == member.id}
        self.members.remove(member)
        at = await member.signal(number)
        await self.until(lambda owners: all(owners[p] not in ("", member.id) for p in had), "a takeover")
        took_s = time.monotonic() - at
        await member.process.wait()
        return took_s

    async def owners(self) -> list[str]:
        now_ms = self.store.clock.now_ms()
        return [one.owner.rpartition("/")[0] for one in await members.holdings(self.store, now_ms)]

    async def settled(self) -> list[str]:
        """Wait until every partition has an owner and no node has two more than another."""
        ids = {member.id for member in self.members}

        def even(owners: list[str]) -> bool:
            held = [owners.count(id) for id in ids]
            return sum(held) == len(owners) and max(held) - min(held) <= 1

        await self.until(even, "an even distribution")
        return await self.owners()

    async def until(self, reached: Callable[[list[str]], bool], what: str) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while not reached(await self.owners()):
            if time.monotonic() > deadline:
                raise BenchFailed(f"{what} did not happen within {GIVE_UP_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                member.process.terminate()
        for member in self.members:
            await member.process.wait()
        self.members.clear()


@contextlib.asynccontextmanager
async def fleet(store: Store, url: str, lease_s: float) -> AsyncIterator[Fleet]:
    made = Fleet(store, url, lease_s)
    try:
        yield made
    finally:
        await made.stop()


async def _main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeOrder)
    config = Config(
        redis_url=order.url,
        namespace=order.namespace,
        node_id=order.node_id,
        lease_s=order.lease_s,
        horizon_s=order.horizon_s,
    )

    def ready() -> None:
        sys.stdout.buffer.write(_READY)
        sys.stdout.buffer.flush()

    ended_with_parent = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    ended_with_parent.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
    code = await Node(config, {"null": NullSink()}).run_until_signal(started=ready)
    os._exit(code)  # the thread that waits for the parent would keep the process alive


if __name__ == "__main__":
    uvloop.run(_main())
