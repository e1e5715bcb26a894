"""Keep-alive connections to HTTP APIs, kept busy: as soon as one has its answer, the next request goes out on it.

Callbacks on raw connections rather than an HTTP library: whoever measures a server must not be slower than it is.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from ..model.errors import MainspringError

TICK_S: Final = 0.005
PAUSE_S: Final = 0.1
"""Before a connection that broke is made again, and before a request is repeated that was refused for now."""

PATIENCE_S: Final = 30.0
FOR_NOW: Final = (429, 503)
_END: Final = b"\r\n\r\n"


class RoadBlocked(MainspringError):
    """No answer for a long time."""


class Request(NamedTuple):
    """Bytes as they go out, and what they are about."""

    data: bytes
    about: tuple[int, ...]


class Source(Protocol):
    """Where requests come from and where answers go."""

    @property
    def over(self) -> bool:
        """Whether there will be no more requests."""
        ...

    def next(self) -> Request | None:
        """The next request; None: none now."""
        ...

    def answered(self, request: Request, status: int, body: bytes) -> None: ...


def request(path: str, content_type: str, body: bytes, about: tuple[int, ...] = ()) -> Request:
    return Request(_head(path, content_type, len(body)) + body, about)


@lru_cache(maxsize=1024)
def _head(path: str, content_type: str, length: int) -> bytes:
    head = (f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-type: {content_type}", f"content-length: {length}")
    return "\r\n".join(head).encode() + _END


class Road:
    """Some connections to some servers, dealt out in turn. A request whose answer is lost goes out again elsewhere."""

    def __init__(self, urls: Sequence[str], connections: int, source: Source) -> None:
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
        """Until the source is over and everything is answered."""
        self._heard_at = time.monotonic()
        for _ in range(self._connections):
            self._connect()
        try:
            while not self._done:
                self._feed_idle()
                if time.monotonic() > self._heard_at + PATIENCE_S and (self._again or self._busy or not self._open):
                    raise RoadBlocked(f"none of {len(self._places)} schedulers answered for {PATIENCE_S:.0f} s")
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
                pause_s = PAUSE_S  # a scheduler that is gone: the next turn goes to another
            else:
                self._open.add(made)
                self.feed(made)
                return


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, road: Road) -> None:
        self._road = road
        self._transport: asyncio.WriteTransport | None = None
        self._data = b""
        self.request: Request | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none by descent

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
            self._road.took(self, sent, int(data[9:12]), data[end + len(_END) : whole])

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.closed:
            self.closed = True
            self._road.lost(self, self.request)

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
