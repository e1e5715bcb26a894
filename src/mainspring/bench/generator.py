"""The process that puts a steady load, separate from the engine as applications are. Its order arrives on stdin."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Literal

import msgspec
import uvloop

from ..client.client import Client
from ..model.errors import MainspringError
from ..model.task import Task
from ..store.store import Store
from .baseline import BATCH, BaselineEntry, SortedSetQueue, random_ids
from .lifecycle import TARGET, SteadyLoad, payload_texts

TICK_S: Final = 0.01
_READY: Final = b"ready\n"
_MODULE: Final = "mainspring.bench.generator"

DesignName = Literal["mainspring", "baseline"]
PutRange = Callable[[SteadyLoad, int, int], Awaitable[None]]


class LoadOrder(msgspec.Struct, frozen=True):
    url: str
    namespace: str
    design: DesignName
    lead_ms: int
    tasks: int
    rate: int
    payload_bytes: int


class LoadReport(msgspec.Struct, frozen=True):
    """Result of the puts. A smallest lead near zero means that the generator, not the engine, was late."""

    min_lead_ms: int


async def generate(order: LoadOrder) -> LoadReport:
    store = await Store.open(order.url, namespace=order.namespace)
    try:
        put = _slices(store) if order.design == "mainspring" else await _sorted_set(store)
        load = SteadyLoad(order.tasks, order.rate, await _start_signal(), order.payload_bytes)
        return await _put_steadily(load, put, order.lead_ms, store)
    finally:
        await store.aclose()


async def _start_signal() -> int:
    """Report that this process is ready; return the first due time, which comes as the answer."""
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    return int(await asyncio.to_thread(sys.stdin.readline))


async def _put_steadily(load: SteadyLoad, put: PutRange, lead_ms: int, store: Store) -> LoadReport:
    done, min_lead_ms = 0, lead_ms
    tick_at = time.monotonic()
    while done < load.tasks:
        until = load.due_before(store.clock.now_ms() + lead_ms)
        if until > done:
            await put(load, done, until)
            min_lead_ms = min(min_lead_ms, load.due_ms(done) - store.clock.now_ms())
            done = until
        tick_at = max(tick_at + TICK_S, time.monotonic())
        await asyncio.sleep(tick_at - time.monotonic())
    return LoadReport(min_lead_ms)


def _slices(store: Store) -> PutRange:
    client = Client.over(store)

    async def put(load: SteadyLoad, first: int, last: int) -> None:
        texts = payload_texts(first, last, load.payload_bytes)
        await client.put_many([Task(TARGET, text, load.due_ms(number)) for number, text in enumerate(texts, first)])

    return put


async def _sorted_set(store: Store) -> PutRange:
    queue = SortedSetQueue(store.servers, store.keys.namespace)
    await queue.open()

    async def put(load: SteadyLoad, first: int, last: int) -> None:
        for at in range(first, last, BATCH):
            texts = list(payload_texts(at, min(at + BATCH, last), load.payload_bytes))
            entries = [
                BaselineEntry(TARGET, b'"%b"' % text.encode(), load.due_ms(number))
                for number, text in enumerate(texts, at)
            ]
            await queue.put(random_ids(len(texts)), entries)

    return put


class Apart:
    """The generator process, as the measuring process sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ready(self) -> None:
        """Wait until the generator has connected."""
        if await self._out.readline() != _READY:
            raise MainspringError(f"the generator did not start; exit code {await self._process.wait()}")

    def go(self, first_due_ms: int) -> None:
        self._in.write(b"%d\n" % first_due_ms)

    async def report(self) -> LoadReport:
        """Wait until the generator has put everything; return its report."""
        text = await self._out.read()
        if code := await self._process.wait():
            raise MainspringError(f"the generator ended with exit code {code}")
        return msgspec.json.decode(text, type=LoadReport)

    @property
    def _in(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _out(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    def order(self, order: LoadOrder) -> None:
        # On stdin and not in the arguments: the URL may hold a password.
        self._in.write(msgspec.json.encode(order) + b"\n")


@contextlib.asynccontextmanager
async def apart(order: LoadOrder) -> AsyncIterator[Apart]:
    """Start the generator process; end it when the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", _MODULE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        other = Apart(process)
        other.order(order)
        yield other
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def main() -> None:
    order = msgspec.json.decode(sys.stdin.readline(), type=LoadOrder)
    report = uvloop.run(generate(order))
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
