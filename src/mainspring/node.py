"""One process of Mainspring: server, store, engine and client, started and stopped as one."""

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final, Protocol

from .client import Client
from .config import Config
from .embedding import Embedding
from .engine.engine import Engine, EngineOptions
from .engine.lookahead import Reach
from .model.errors import ConfigError, StoreError
from .sinks.base import Sink
from .sinks.log import LogSink
from .sinks.null import NullSink
from .store.checks import check_server
from .store.links import Links
from .store.store import Store
from .store.url import safe_url

log = logging.getLogger("mainspring.node")

WATCH_S: Final = 0.25
ECHO_S: Final = 0.3
"""A signal to a process group arrives twice where a parent (make, a shell) passes it on: that is still one."""

REACH_S: Final = 2.0
"""How long a probe waits for the server's answer."""


class Face(Protocol):
    """What a process shows besides the node: the HTTP API. It stops first, so that nothing new comes in."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Node:
    """Composes one process from its roles."""

    def __init__(self, config: Config, sinks: Mapping[str, Sink] | None = None) -> None:
        self.config = config
        self.embedding = Embedding(config.data_dir) if config.redis_url is None else None
        self._sinks: Mapping[str, Sink] = {"log": LogSink(), "null": NullSink()} if sinks is None else sinks
        self._store: Store | None = None
        self._client: Client | None = None
        self.engine: Engine | None = None
        self._watcher: asyncio.Task[BaseException] | None = None
        self._ended = asyncio.Event()
        self.failure: BaseException | None = None

    # -- what others may ask -----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Started, and not stopping."""
        return self._client is not None and self.failure is None

    @property
    def healthy(self) -> bool:
        """Ready, and every role's last step went well."""
        return self.ready and self.engine is not None and self.engine.healthy

    @property
    def client(self) -> Client | None:
        """A client on the node's own connections; None while the node is not ready."""
        return self._client

    @property
    def where(self) -> str:
        """The place of the data, in words and without secrets."""
        if self.embedding is not None:
            return self.embedding.where
        return safe_url(self.config.redis_url or "")

    async def reachable(self) -> bool:
        """True when the server answers now."""
        if self._store is None:
            return False
        try:
            async with asyncio.timeout(REACH_S):
                await self._store.sample_clock()
        except (StoreError, TimeoutError):
            return False
        return True

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        url = config.redis_url if self.embedding is None else await self.embedding.start()
        assert url is not None
        await _check_servers(url)  # before anything is written: a replica would refuse it in words of its own
        store = await Store.open(url, namespace=config.namespace, partitions=config.partitions)
        self._store = store
        self.engine = engine = Engine(store, self._sinks, _engine_options(config))
        await engine.start()
        self._client = Client.over(store, dedupe_window=f"{config.dedupe_window_s}s")
        self._watcher = asyncio.create_task(self._watch(engine), name="mainspring-watch")
        self._watcher.add_done_callback(self._watch_ended)

    async def stop(self) -> None:
        """Finish what is in flight, hand over, close. The embedded server ends last: all others need it."""
        self._client = None
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait([watcher])
        if self.engine is not None:
            await self.engine.stop()
            self.engine = None
        for sink in self._sinks.values():
            await sink.aclose()
        if self._store is not None:
            await self._store.aclose()
            self._store = None
        if self.embedding is not None:
            await self.embedding.stop()

    async def _watch(self, engine: Engine) -> BaseException:
        """Bring a dead embedded server back; return the error that broke the engine."""
        while (crash := engine.crashed) is None:
            if self.embedding is not None:
                await self.embedding.heal(engine.healthy)
            await asyncio.sleep(WATCH_S)
        return crash

    def _watch_ended(self, watcher: asyncio.Task[BaseException]) -> None:
        if not watcher.cancelled():  # a watch that is broken itself is no better than a broken engine
            self.fail(watcher.exception() or watcher.result())

    def fail(self, error: BaseException) -> None:
        """End the node with exit code 1: a part of it is broken, and it must not pretend to be well."""
        self.failure = error
        self._ended.set()

    # -- as a process ----------------------------------------------------------------------------------------

    async def run_until_signal(self, face: Face | None = None, started: Callable[[], None] = lambda: None) -> int:
        """Start, run until SIGTERM or SIGINT, stop; return the exit code. A second signal ends at once."""
        with _signals(self._ended):
            try:
                if face is not None:
                    await face.start()
                if await self._started_unless_ended():
                    started()
                    await self._ended.wait()
            finally:
                log.info("stopping")
                await _one_after_the_other(face.stop if face is not None else None, self.stop)
        if self.failure is not None:
            log.error(
                "a part of the node broke down, which is a bug: %r. The tasks are safe on the server", self.failure,
                exc_info=self.failure,
            )  # fmt: skip
            return 1
        return 0

    async def _started_unless_ended(self) -> bool:
        """A signal during a long start (a big AOF is loaded) ends it."""
        start = asyncio.create_task(self.start())
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait([start, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not start.done():
            start.cancel()
            await asyncio.wait([start])
            return False
        await start
        return not self._ended.is_set()


async def _one_after_the_other(*steps: Callable[[], Awaitable[None]] | None) -> None:
    """Every step runs, also after one that failed."""
    async with contextlib.AsyncExitStack() as stack:
        for step in reversed(steps):
            if step is not None:
                stack.push_async_callback(step)


@contextlib.contextmanager
def _signals(ended: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    first_at = math.inf

    def receive(number: int) -> None:
        nonlocal first_at
        if loop.time() > first_at + ECHO_S:
            # At once: leases run out by themselves and the embedded server ends with this process.
            os._exit(128 + number)
        first_at = min(first_at, loop.time())
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _check_servers(url: str) -> None:
    """Say what is not as it should be; refuse what cannot work."""
    wrong = []
    async with contextlib.aclosing(await Links.connect(url)) as links:
        for link in links.all():
            for check in await check_server(link):
                if check.status == "error":
                    wrong.append(f"{check.name}: {check.message}")
                elif check.status != "ok":
                    log.warning("server %s, %s: %s", link.address, check.name, check.message)
    if wrong:
        raise ConfigError("this server cannot be used: " + "; ".join(wrong))


def _engine_options(config: Config) -> EngineOptions:
    return EngineOptions(
        node=config.node_id,
        lease_s=config.lease_s,
        reach=Reach(tasks=config.look_ahead, horizon_ms=int(config.horizon_s * 1000)),
        retry=config.retry,
        dedupe_window_s=config.dedupe_window_s,
        shutdown_timeout_s=config.shutdown_timeout_s,
    )
