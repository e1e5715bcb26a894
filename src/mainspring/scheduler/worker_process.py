"""A worker as a process of its own, with a small HTTP port for `/livez`, `/readyz` and `/metrics`.

Without the API's web server: a worker needs it for nothing else, and this much of HTTP is short.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from .. import __version__
from ..client.client import Client
from ..config.config import Config
from ..model.errors import ConfigError, WrongFormat
from ..model.metrics import Family, Sample, family, histogram, render, single
from ..model.queue_rules import parse_queues
from ..model.shared_settings import SharedSettings
from ..model.targets.url import HostPort
from ..node.process import exit_now, process_figures, stop_in_time, stop_signals, store_calls
from ..node.supervisor import Embedding
from ..roles import Loop
from ..store.redis.url import safe_url
from ..store.store import Store
from ..worker.command import kill_all
from ..worker.finisher import FATES
from ..worker.worker import Worker, WorkerOptions
from .publishing import publish
from .scheduler import Scheduler

log = logging.getLogger("mainspring.worker")


GIVE_UP_S: Final = 5.0
"""Seconds for a request to arrive and its response to be taken."""
MAX_HEAD_BYTES: Final = 16 * 1024

_JSON: Final = "application/json"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


class _HttpAnswer(NamedTuple):
    status: int
    body: str
    kind: str = _JSON

    def sent(self, *, with_body: bool) -> bytes:
        body = self.body.encode()
        head = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\ncontent-type: {self.kind}\r\n"
            f"content-length: {len(body)}\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\n"
            "connection: close\r\n\r\n"
        )
        return head.encode() + (body if with_body else b"")


_WELL: Final = _HttpAnswer(200, '{"status":"ok"}')


class WorkerPort:
    """A small HTTP server, open from `start` to `aclose`."""

    def __init__(self, worker: Worker, store: Store) -> None:
        self._worker = worker
        self._store = store
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Callable[[], Awaitable[_HttpAnswer]]] = {
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
        }

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, where: HostPort) -> None:
        try:
            self._server = await asyncio.start_server(self._serve, where.host, where.port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"worker_listen: {where} cannot be listened on: {error.strerror or error}") from None

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # the client has gone, or takes too long
            async with asyncio.timeout(GIVE_UP_S):
                writer.write(await self._asked(reader))
                await writer.drain()
        writer.close()

    async def _asked(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            return _problem(400, "the request cannot be read").sent(with_body=True)
        answer = self._answers.get(path.partition("?")[0])
        if answer is None:
            response = _problem(404, f"there are {', '.join(self._answers)}")
        elif method not in ("GET", "HEAD"):
            response = _problem(405, "only GET and HEAD are answered")
        else:
            response = await answer()
        return response.sent(with_body=method != "HEAD")

    async def _livez(self) -> _HttpAnswer:
        """Answer as long as the process runs."""
        return _WELL

    async def _readyz(self) -> _HttpAnswer:
        if self._worker.stopping:
            return _problem(503, "the worker is stopping")
        if (outage := await self._store.outage()) is not None:
            return _problem(503, outage)
        return _WELL

    async def _metrics(self) -> _HttpAnswer:
        return _HttpAnswer(200, render(_families(self._worker, self._store)), _METRICS)


def _problem(status: int, detail: str) -> _HttpAnswer:
    body = msgspec.json.encode({"status": status, "detail": detail}).decode()
    return _HttpAnswer(status, body, "application/problem+json")


def _families(worker: Worker, store: Store) -> Iterator[Family]:
    meters, options = worker.finisher.meters, worker.options
    labels = (("namespace", store.keys.namespace), ("worker", options.name), ("version", __version__))
    yield Family("mainspring_worker_info", "gauge", "Namespace, id and version of this worker.", (Sample(labels, 1),))
    for fate, text in FATES.items():
        yield family(f"mainspring_runs_{fate}_total", "counter", text, "kind", meters.counts[fate])
    late = "Seconds from the due time to the start of the run, including the wait for a worker."
    yield histogram("mainspring_run_lateness_seconds", late, "kind", meters.lateness)
    yield histogram(
        "mainspring_run_seconds", "Seconds from the start to the end of a successful run.", "kind", meters.took
    )
    yield single("mainspring_runs_in_hand", "gauge", "Jobs taken and not finished.", len(worker.executor.runs))
    yield single("mainspring_runs_limit", "gauge", "Limit on jobs that run at the same time.", options.concurrency)
    yield single(
        "mainspring_ready", "gauge", "1 if the worker has started and is not stopping, else 0.", not worker.stopping
    )
    yield single("mainspring_healthy", "gauge", "1 if the last step of every role succeeded, else 0.", worker.healthy)
    yield store_calls(store)
    yield from process_figures()


WATCH_S: Final = 0.25


class Workplace:
    """Composes one process that runs the handlers and commands of a scheduler."""

    def __init__(self, scheduler: Scheduler, config: Config | None = None) -> None:
        self.config = config = config or scheduler.config
        self.scheduler = scheduler
        self.queues = _queues(config, scheduler)
        self.embedding = Embedding(config.data_dir, config.embedded_memory_bytes) if config.redis_url is None else None
        self.worker: Worker | None = None
        self._port: WorkerPort | None = None
        self._store: Store | None = None
        self._ended = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._format_loop = Loop("namespace", self._keep_format)
        self.failure: BaseException | None = None

    @property
    def where(self) -> str:
        """The place of the data, in words and without secrets."""
        return self.embedding.where if self.embedding is not None else safe_url(self.config.redis_url or "")

    @property
    def port(self) -> int | None:
        """Port for probes, if there is one."""
        return None if self._port is None else self._port.port

    async def start(self) -> None:
        """Connect, publish what is declared, and start to take jobs."""
        config = self.config
        url = config.redis_url if self.embedding is None else await self.embedding.start()
        assert url is not None
        self._store = store = await Store.open(
            url,
            namespace=config.namespace,
            partitions=config.partitions,
            options=config.links,
            shared=SharedSettings(config.shared, fills=config.shared),
        )
        client = Client.over(store, timezone=config.timezone)
        self.scheduler._lend(client)
        await publish(client.schedules, self.scheduler.declared(), store.clock.now_ms())
        self.worker = Worker(store, self.scheduler.registry, self._options(store))
        if config.worker_listen is not None:
            self._port = WorkerPort(self.worker, store)
            await self._port.start(HostPort.parse(config.worker_listen))
        await self.worker.start()
        self._format_loop.start()
        self._watcher = asyncio.create_task(self._watch(self.worker), name="mainspring-watch")

    def _options(self, store: Store) -> WorkerOptions:
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
            log_redact=config.log_redact,
            slots=config.queue.slots(),
            queue_retries=config.queue.retries(),
            lane_policy=config.lane_policy,
            queue_lanes=store.shared.queue_lanes,
            history=config.history_rules,
        )

    async def stop(self) -> None:
        """Finish running jobs, return the others, close. The embedded server ends last: all others need it.

        Everything is closed even if a part fails, or if the caller is cancelled in the middle.
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
            await self._format_loop.stop()
            worker, self.worker = self.worker, None
            if worker is not None:
                await worker.stop()

    async def _watch(self, worker: Worker) -> None:
        """Restart a dead embedded server; end the process if a part of it is broken."""
        while (crash := worker.crashed or self._format_loop.crashed) is None:
            if self.embedding is not None:
                await self.embedding.heal(worker.healthy)
            await asyncio.sleep(WATCH_S)
        self.failure = crash
        self._ended.set()

    async def _keep_format(self) -> float:
        """Check the format: a worker with another partition count would wait at streams that no node fills."""
        if self._store is not None:
            await self._store.keep_format()
        return self.config.lease_s

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
        if isinstance(self.failure, WrongFormat):
            log.error("the worker cannot continue: %s", self.failure)
            return 2
        log.error("a part of the worker broke down, which is a bug: %r", self.failure, exc_info=self.failure)
        return 1


def _end_now(number: int) -> None:
    """End at once: other workers get the jobs when their leases expire, and commands end with this process."""
    kill_all()
    exit_now(number)


def _queues(config: Config, scheduler: Scheduler) -> dict[str, int]:
    """Return the requested queues, or every queue with a handler or a command."""
    if config.queues:
        asked = parse_queues(config.queues)
        if strange := sorted(asked.keys() - set(scheduler.registry.queues)):
            log.warning("no handler or command belongs to queue %s: others must run its tasks", ", ".join(strange))
        return asked
    if not scheduler.registry.queues:
        raise ConfigError("there is nothing to run: no handlers (name a module:scheduler) and no [commands.<name>]")
    return dict.fromkeys(scheduler.registry.queues, 1)
