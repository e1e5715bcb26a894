"""Shared by tests of workers: an engine that hands off, workers beside it, and a way to wait."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from mainspring.client.client import Client
from mainspring.engine.engine import Engine, EngineOptions
from mainspring.model.queue_rules import parse_queues
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.servers import wait_until
from mainspring.worker.handler import Registry, Work
from mainspring.worker.worker import Worker, WorkerOptions
from tests.support.serving import ENVIRON, MAIN

PATIENCE_S = 60.0


async def until(reached: Callable[[], object], what: str = "") -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not reached():  # noqa: ASYNC110  # nothing tells when another process is so far
            await asyncio.sleep(0.01)


async def until_async(reached: Callable[[], Awaitable[object]]) -> None:
    """The same for a question to the server."""
    async with asyncio.timeout(PATIENCE_S):
        while not await reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Place:
    """One namespace with an engine; workers come and go."""

    def __init__(self, url: str, store: Store) -> None:
        self.url = url
        self.store = store
        self.client = Client.over(store, wait_s=30)
        self._stack = contextlib.AsyncExitStack()

    async def worker(self, *works: Work, queues: str | None = None, **options: Any) -> Worker:
        """A worker of its own connections, which serves the queues of its handlers."""
        made = await self.idle_worker(works, queues=parse_queues(queues) if queues else None, **options)
        await made.start()
        self._stack.push_async_callback(made.stop)
        return made

    async def idle_worker(
        self, works: Iterable[Work], *, queues: dict[str, int] | None = None, **options: Any
    ) -> Worker:
        """One whose steps the test calls itself."""
        registry = Registry(works)
        store = await Store.open(self.url, namespace=self.store.keys.namespace)
        self._stack.push_async_callback(store.aclose)
        name = options.pop("name", f"w-{uuid.uuid4().hex[:6]}")
        options.setdefault("shutdown_timeout_s", 10.0)
        served = queues or dict.fromkeys(registry.queues, 1)
        return Worker(store, registry, WorkerOptions(name, served, **options))

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def settled(self) -> None:
        """Until nothing is pending, queued or running; then the books must balance."""
        async with asyncio.timeout(PATIENCE_S):
            while (books := await balance(self.store)).pending or books.fired or books.queued:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def open_place(url: str, namespace: str, partitions: int) -> AsyncIterator[Place]:
    store = await Store.open(url, namespace=namespace, partitions=partitions)
    engine = Engine(store, {}, EngineOptions(lease_s=5.0, command_queues={"elsewhere": "other"}))
    place = Place(url, store)
    await engine.start()
    try:
        yield place
        await place.aclose()
        assert engine.crashed is None
    finally:
        await place.aclose()
        await engine.stop()
        await balance(store)
        await store.aclose()


class WorkerProcess:
    """`mainspring worker` as a user runs it; its handlers write lines to a file that the test reads."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self._err = folder / f"worker-{uuid.uuid4().hex[:6]}.log"
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*MAIN, "worker", *options],
                cwd=folder,
                env=ENVIRON | environ,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
            )

    @property
    def log(self) -> str:
        return self._err.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def started(self) -> bool:
        assert self.process.poll() is None, self.log
        return "serving " in self.log

    def wait_started(self) -> "WorkerProcess":
        wait_until(self.started, f"the worker is ready; its log is in {self._err}", timeout_s=60)
        return self

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def remove(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def lines(file: Path) -> list[dict[str, Any]]:
    """Lines that handlers have written; the last one may be incomplete."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def exists(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    if Path("/proc").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
