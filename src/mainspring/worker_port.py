"""A worker's own small HTTP port: `/livez`, `/readyz` and `/metrics`, and nothing else.

Without the API's web server: a worker has no other use for it, and this much of HTTP is short.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NamedTuple

from . import __version__
from .model.errors import ConfigError
from .model.host_port import HostPort
from .model.metrics import Family, Sample, family, histogram, render, single
from .process_figures import process_figures, store_calls
from .store.store import Store
from .worker.meters import FATES
from .worker.worker import Worker

PATIENCE_S: Final = 5.0
"""For a request to arrive and its answer to be taken."""
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


class _Answer(NamedTuple):
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


_WELL: Final = _Answer(200, '{"status":"ok"}')


class WorkerPort:
    """Open from `start` to `aclose`."""

    def __init__(self, worker: Worker, store: Store) -> None:
        self._worker = worker
        self._store = store
        self._server: asyncio.Server | None = None
        self._answers: dict[str, Callable[[], Awaitable[_Answer]]] = {
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
        with contextlib.suppress(OSError, TimeoutError):  # who asked has gone, or takes too long
            async with asyncio.timeout(PATIENCE_S):
                writer.write(await self._asked(reader))
                await writer.drain()
        writer.close()

    async def _asked(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            return _problem(400, "this is no request that can be read").sent(with_body=True)
        answer = self._answers.get(path.partition("?")[0])
        if answer is None:
            told = _problem(404, f"there are {', '.join(self._answers)}")
        elif method not in ("GET", "HEAD"):
            told = _problem(405, "only GET and HEAD are answered")
        else:
            told = await answer()
        return told.sent(with_body=method != "HEAD")

    async def _livez(self) -> _Answer:
        """The process answers: that is all."""
        return _WELL

    async def _readyz(self) -> _Answer:
        if self._worker.stopping:
            return _problem(503, "the worker is stopping")
        if not await self._store.reachable():
            return _problem(503, "the server does not answer")
        return _WELL

    async def _metrics(self) -> _Answer:
        return _Answer(200, render(_families(self._worker, self._store)), _METRICS)


def _problem(status: int, detail: str) -> _Answer:
    return _Answer(status, f'{{"status":{status},"detail":"{detail}"}}', "application/problem+json")


def _families(worker: Worker, store: Store) -> Iterator[Family]:
    meters, options = worker.ends.meters, worker.options
    labels = (("namespace", store.keys.namespace), ("worker", options.name), ("version", __version__))
    yield Family("mainspring_worker_info", "gauge", "Which worker this is.", (Sample(labels, 1),))
    for fate, text in FATES.items():
        yield family(f"mainspring_runs_{fate}_total", "counter", text, "kind", meters.counts[fate])
    late = "From the due time to the begin of the run; the wait for a worker is in it."
    yield histogram("mainspring_run_lateness_seconds", late, "kind", meters.lateness)
    yield histogram(
        "mainspring_run_seconds", "From the begin of a run to its end, of those that ended well.", "kind", meters.took
    )
    yield single("mainspring_runs_in_hand", "gauge", "Jobs that were taken and are not over.", len(worker.hands.runs))
    yield single("mainspring_runs_limit", "gauge", "Jobs that may run at one time.", options.concurrency)
    yield single("mainspring_ready", "gauge", "1 when the worker is started and not stopping.", not worker.stopping)
    yield single("mainspring_healthy", "gauge", "1 while the last step of every role went well.", worker.healthy)
    yield store_calls(store)
    yield from process_figures()
