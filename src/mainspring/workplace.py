"""One worker process: server, store, worker and client, started and stopped as one."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Final

from .client import Client
from .config import Config
from .embedding import Embedding
from .model.errors import ConfigError
from .model.host_port import HostPort
from .model.weights import parse_queues
from .publishing import publish
from .scheduler import Scheduler
from .signals import exit_now, stop_in_time, stop_signals
from .store.store import Store
from .store.url import safe_url
from .worker.process import kill_all
from .worker.worker import Worker, WorkerOptions
from .worker_port import WorkerPort

log = logging.getLogger("mainspring.worker")

WATCH_S: Final = 0.25


class Workplace:
    """Composes one process that runs the handlers and commands of a scheduler."""

    def __init__(self, scheduler: Scheduler, config: Config | None = None) -> None:
        self.config = config = config or scheduler.config
        self.scheduler = scheduler
        self.queues = _queues(config, scheduler)
        self.embedding = Embedding(config.data_dir) if config.redis_url is None else None
        self.worker: Worker | None = None
        self._port: WorkerPort | None = None
        self._store: Store | None = None
        self._ended = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    @property
    def where(self) -> str:
        """The place of the data, in words and without secrets."""
        return self.embedding.where if self.embedding is not None else safe_url(self.config.redis_url or "")

    @property
    def port(self) -> int | None:
        """Where it answers probes, if it does."""
        return None if self._port is None else self._port.port

    async def start(self) -> None:
        config = self.config
        url = config.redis_url if self.embedding is None else await self.embedding.start()
        assert url is not None
        self._store = store = await Store.open(
            url, namespace=config.namespace, partitions=config.partitions, options=config.links
        )
        client = Client.over(store, dedupe_window=f"{config.dedupe_window_s}s", timezone=config.timezone)
        self.scheduler.lend(client)
        await publish(client.schedules, self.scheduler.declared(), store.clock.now_ms())
        self.worker = Worker(store, self.scheduler.registry, self._options())
        if config.worker_listen is not None:
            self._port = WorkerPort(self.worker, store)
            await self._port.start(HostPort.parse(config.worker_listen))
        await self.worker.start()
        self._watcher = asyncio.create_task(self._watch(self.worker), name="mainspring-watch")

    def _options(self) -> WorkerOptions:
        config = self.config
        return WorkerOptions(
            config.node_id or f"{socket.gethostname()}-{secrets.token_hex(3)}",
            self.queues,
            strict=config.strict_queues,
            concurrency=config.worker_concurrency,
            lease_s=config.lease_s,
            shutdown_timeout_s=config.shutdown_timeout_s,
            retry=config.retry,
            error_handler=config.error_handler,
            slots=config.queue.slots(),
            queue_retries=config.queue.retries(),
            lane_policy=config.lane_policy,
            queue_lanes=config.queue.lane_policies(),
        )

    async def stop(self) -> None:
        """Finish what runs, give back what does not, close. The embedded server ends last: all others need it.

        All of it is closed even if a part fails, or if who waited gives up: a program that ends in the middle of it.
        """
        async with contextlib.AsyncExitStack() as ends:
            if self.embedding is not None:
                ends.push_async_callback(self.embedding.stop)
            store, self._store = self._store, None
            if store is not None:
                ends.push_async_callback(store.aclose)
            ends.push_async_callback(self.scheduler.aclose)
            port, self._port = self._port, None
            if port is not None:
                ends.push_async_callback(port.aclose)
            watcher, self._watcher = self._watcher, None
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait([watcher])
            worker, self.worker = self.worker, None
            if worker is not None:
                await worker.stop()

    async def _watch(self, worker: Worker) -> None:
        """Bring a dead embedded server back; end the process when a part of it is broken."""
        while worker.crashed is None:
            if self.embedding is not None:
                await self.embedding.heal(worker.healthy)
            await asyncio.sleep(WATCH_S)
        self.failure = worker.crashed
        self._ended.set()

    async def run_until_signal(self, started: Callable[[], None] = lambda: None) -> int:
        """Start, run until SIGTERM, SIGINT or SIGHUP, stop; return the exit code. A second signal ends at once."""
        with stop_signals(self._ended.set, _end_now):
            try:
                await self.start()
                started()
                await self._ended.wait()
            finally:
                log.info("stopping")
                with stop_in_time(self.config.shutdown_timeout_s):
                    await self.stop()
        if self.failure is None:
            return 0
        log.error("a part of the worker broke down, which is a bug: %r", self.failure, exc_info=self.failure)
        return 1


def _end_now(number: int) -> None:
    """At once: jobs come back to others when their leases are over, and commands end with this process."""
    kill_all()
    exit_now(number)


def _queues(config: Config, scheduler: Scheduler) -> dict[str, int]:
    """As asked for; else every queue that has a handler or a command."""
    if config.queues:
        asked = parse_queues(config.queues)
        if strange := sorted(asked.keys() - set(scheduler.registry.queues)):
            log.warning("no handler or command belongs to queue %s: its tasks fail here", ", ".join(strange))
        return asked
    if not scheduler.registry.queues:
        raise ConfigError("there is nothing to run: no handlers (name a module:scheduler) and no [commands.<name>]")
    return dict.fromkeys(scheduler.registry.queues, 1)
