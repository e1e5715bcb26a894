"""The process that posts ticks: one by one or in batches over HTTP, or with the client directly to the server."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import uvloop

from ..client.client import Client
from ..model.errors import MainspringError, StoreError
from ..model.task import Task
from .plan import DemoPlan, Journal, Ticks, id_of, lines_of, text_of
from .processes import Inside

# Keep-alive connections to HTTP APIs, kept busy: each sends the next request as soon as it has its response.
#
# Callbacks on raw connections instead of an HTTP library: a load generator must not be slower than the server.

TICK_S: Final = 0.005
PAUSE_S: Final = 0.1
"""Pause before a broken connection is opened again, and before a temporarily refused request is repeated."""

GIVE_UP_S: Final = 30.0
FOR_NOW: Final = (429, 503)
_END: Final = b"\r\n\r\n"


class NoSchedulerAnswers(MainspringError):
    """No scheduler has answered for a long time."""


class Request(NamedTuple):
    """A request as bytes, and the numbers of the ticks in it."""

    data: bytes
    about: tuple[int, ...]


class RequestSource(Protocol):
    """Provides requests and receives the responses."""

    @property
    def over(self) -> bool:
        """Whether there will be no more requests."""
        ...

    def next(self) -> Request | None:
        """Return the next request, or None if there is none now."""
        ...

    def answered(self, request: Request, status: int, body: bytes) -> None: ...


def request(path: str, content_type: str, body: bytes, about: tuple[int, ...] = ()) -> Request:
    return Request(_head(path, content_type, len(body)) + body, about)


@lru_cache(maxsize=1024)
def _head(path: str, content_type: str, length: int) -> bytes:
    head = (f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-type: {content_type}", f"content-length: {length}")
    return "\r\n".join(head).encode() + _END


class ApiConnections:
    """Connections to several servers, assigned in turn. A request whose response is lost is sent again elsewhere."""

    def __init__(self, urls: Sequence[str], connections: int, source: RequestSource) -> None:
        self._places = [_place(url) for url in urls]
        self._connections = connections
        self._source = source
        self._turn = 0
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._again: deque[Request] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._heard_at = 0.0

    async def run(self) -> None:
        """Run until the source is over and everything is answered."""
        self._heard_at = time.monotonic()
        for _ in range(self._connections):
            self._connect()
        try:
            while not self._done:
                self._feed_idle()
                if time.monotonic() > self._heard_at + GIVE_UP_S and (self._again or self._busy or not self._open):
                    raise NoSchedulerAnswers(f"none of {len(self._places)} schedulers answered for {GIVE_UP_S:.0f} s")
                await asyncio.sleep(TICK_S)
        finally:
            for task in self._connecting:
                task.cancel()
            for one in self._open:
                one.close()

    @property
    def _done(self) -> bool:
        return self._source.over and not self._again and not self._busy

    @property
    def _busy(self) -> bool:
        return any(one.request is not None for one in self._open)

    def _feed_idle(self) -> None:
        idle, self._idle = self._idle, []
        for one in idle:
            self.feed(one)

    def feed(self, one: "_Connection") -> None:
        if one.closed:
            return
        following = self._again.popleft() if self._again else self._source.next()
        if following is None:
            self._idle.append(one)
        else:
            one.send(following)

    def took(self, one: "_Connection", sent: Request, status: int, body: bytes) -> None:
        self._heard_at = time.monotonic()
        if status in FOR_NOW:
            self._again.append(sent)
            asyncio.get_running_loop().call_later(PAUSE_S, self.feed, one)
            return
        self._source.answered(sent, status, body)
        self.feed(one)

    def lost(self, one: "_Connection", sent: Request | None) -> None:
        self._open.discard(one)
        if sent is not None:
            self._again.append(sent)
        self._connect(PAUSE_S)

    def _connect(self, pause_s: float = 0.0) -> None:
        task = asyncio.create_task(self._connected(pause_s))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(pause_s)
            self._turn += 1
            host, port = self._places[self._turn % len(self._places)]
            try:
                _, made = await loop.create_connection(lambda: _Connection(self), host, port)
            except OSError:
                pause_s = PAUSE_S  # the scheduler is gone: the next try goes to another
            else:
                self._open.add(made)
                self.feed(made)
                return


class _Connection(asyncio.Protocol):
    """A connection with at most one request in flight."""

    def __init__(self, api_connections: ApiConnections) -> None:
        self._api = api_connections
        self._transport: asyncio.WriteTransport | None = None
        self._data = b""
        self.request: Request | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transport is not a subclass of asyncio's

    def send(self, request: Request) -> None:
        assert self._transport is not None
        self.request = request
        self._transport.write(request.data)

    def data_received(self, data: bytes) -> None:
        self._data = data = self._data + data if self._data else data
        end = data.find(_END)
        if end < 0:
            return
        length = _content_length(data[:end])
        whole = end + len(_END) + length
        if len(data) < whole:
            return
        self._data = b""
        sent, self.request = self.request, None
        if sent is not None:
            self._api.took(self, sent, int(data[9:12]), data[end + len(_END) : whole])

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.closed:
            self.closed = True
            self._api.lost(self, self.request)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()


def _content_length(head: bytes) -> int:
    at = head.lower().find(b"\r\ncontent-length:")
    return 0 if at < 0 else int(head[at + 17 :].split(b"\r\n", 1)[0])


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


TAKEN: Final = (200, 202)
BATCHES_AT_ONCE: Final = 4
"""Batches in flight per scheduler: enough to keep it busy."""

_WHOLE: Final = (b'"failed":0', b'"complete":true')


class GeneratorOrder(msgspec.Struct, frozen=True):
    plan: DemoPlan
    urls: list[str]
    redis_url: str
    namespace: str
    sent: str
    """The file for the numbers of accepted ticks."""


class TickLoad:
    """The ticks to send now: at the plan's pace, until its end."""

    def __init__(self, plan: DemoPlan, inside: Inside) -> None:
        self._plan = plan
        self._inside = inside
        self._ticks = Ticks(plan)
        self._began = time.monotonic()
        self._made = 0
        self._exhausted = False

    @property
    def over(self) -> bool:
        passed_s = time.monotonic() - self._began
        enough = self._plan.seconds is not None and passed_s >= self._plan.seconds
        return self._exhausted or enough or self._inside.stopped

    def take(self, most: int) -> list[int]:
        """Return up to `most` ticks; none when the pace does not allow it yet."""
        if self.over or self._ahead:
            return []
        numbers = self._ticks.take(most)
        self._exhausted = len(numbers) < most
        self._made += len(numbers)
        return numbers

    @property
    def _ahead(self) -> bool:
        return self._plan.rate is not None and self._made > (time.monotonic() - self._began) * self._plan.rate


class Posts:
    """The load as requests; the journal records the accepted ticks."""

    def __init__(self, plan: DemoPlan, load: TickLoad, sent: Journal) -> None:
        self._plan = plan
        self._load = load
        self._sent = sent
        self._size = 1 if plan.via == "http" else plan.batch
        self.refused = 0
        self.first_refusal = ""

    @property
    def over(self) -> bool:
        return self._load.over or self.refused > 0  # a refused request would be refused again

    def next(self) -> Request | None:
        numbers = self._load.take(self._size)
        if not numbers:
            return None
        return self._single(numbers[0]) if self._plan.via == "http" else self._batch(numbers)

    def answered(self, sent: Request, status: int, body: bytes) -> None:
        whole = self._plan.via == "http" or all(word in body for word in _WHOLE)
        if status in TAKEN and whole:
            self._sent.add_all(sent.about)
            return
        self.refused += len(sent.about)
        self.first_refusal = self.first_refusal or f"{status} {body[:300].decode(errors='replace')}"

    def _single(self, number: int) -> Request:
        path = "/ticks?replace=true" if self._plan.replace else "/ticks"
        return request(path, "application/json", text_of(number, self._plan.ids), (number,))

    def _batch(self, numbers: list[int]) -> Request:
        plan = self._plan
        body = lines_of(numbers, plan.ids, plan.target, named=plan.named)
        return request("/v1/tasks:batch?answers=errors", "application/x-ndjson", body, tuple(numbers))


async def post(order: GeneratorOrder, inside: Inside, sent: Journal) -> dict[str, Any]:
    load = TickLoad(order.plan, inside)
    posts = Posts(order.plan, load, sent)
    most = order.plan.connections if order.plan.via == "http" else BATCHES_AT_ONCE * len(order.urls)
    await ApiConnections(order.urls, min(most, order.plan.connections), posts).run()
    return {"refused": posts.refused, "first_refusal": posts.first_refusal}


async def put(order: GeneratorOrder, inside: Inside, sent: Journal) -> dict[str, Any]:
    """Put the ticks without the API, as an application with the client does."""
    plan = order.plan
    async with Client(order.redis_url, namespace=order.namespace) as client:
        load = TickLoad(plan, inside)
        while not load.over:
            numbers = load.take(plan.batch)
            if not numbers:
                await asyncio.sleep(0.002)
                continue
            tasks = [
                Task(
                    plan.target,
                    msgspec.Raw(text_of(number, plan.ids)),
                    number // plan.ids,
                    None,
                    id_of(number, plan.ids),
                )
                for number in numbers
            ]
            await _until_stored(client, tasks)
            sent.add_all(numbers)
    return {"refused": 0, "first_refusal": ""}


async def _until_stored(client: Client, tasks: list[Task]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        try:
            await client.put_many(tasks)
        except StoreError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(PAUSE_S)
        else:
            return


def main() -> None:
    inside = Inside()
    order: GeneratorOrder = inside.order(GeneratorOrder)
    sent = Journal(Path(order.sent))
    inside.total = lambda: sent.count
    inside.ready()
    began = time.monotonic()
    work: Callable[..., Any] = put if order.plan.via == "client" else post
    try:
        figures = uvloop.run(work(order, inside, sent))
    except MainspringError as error:
        raise SystemExit(str(error)) from None
    finally:
        sent.close()
    inside.report(sent=sent.count, seconds=time.monotonic() - began, **figures)


if __name__ == "__main__":
    main()
