"""A web server in a thread of its own, from the standard library: nothing in it is shared with what is tested."""

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mainspring.model.delivery import Body, Delivery, GivenDelivery


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    """By lower-case names."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class Receiver:
    """Keeps requests, counts connections, answers as set."""

    def __init__(self, answer: Callable[[Request], Answer], host: str, tls: ssl.SSLContext | None) -> None:
        self.requests: list[Request] = []
        self.connections = 0
        self.answer = answer
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._server = _Server((host, 0), _Handler)
        self._server.receiver = self
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.scheme = "http" if tls is None else "https"
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}/hook"

    def connected(self) -> None:
        with self._lock:
            self.connections += 1

    def serve(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self.answer(request)
        finally:
            with self._lock:
                self.at_once -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    receiver: Receiver
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or does not trust us, is part of some tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.receiver.connected()

    def _serve(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, self.rfile.read(size))
        answer = self.server.receiver.serve(request)
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)


@contextmanager
def receiving(
    answer: Callable[[Request], Answer] = lambda _: Answer(),
    *,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> Iterator[Receiver]:
    receiver = Receiver(answer, host, tls)
    try:
        yield receiver
    finally:
        receiver.close()


def delivery(target: str, payload: bytes = b'{"order": 42}', *, number: int = 0, **more: Any) -> Delivery:
    return GivenDelivery(Body(target, payload, **more), "main", number.to_bytes(16, "big"), 1_700_000_000_123)
