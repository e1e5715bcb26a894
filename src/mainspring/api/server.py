"""The API on a socket: uvicorn in the node's event loop, with connections that enforce limits on clients.

uvicorn's own protocol waits forever for a slow client, and responds in plain text to what it cannot parse.
A sweep once a second finds slow clients, so that a request costs no timer.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ..config.config import Config
from ..model.access import ApiKey
from ..model.errors import ConfigError
from ..node.node import Node
from ..store.redis.connection import no_passphrase
from .app import App
from .asgi import GUARDED, RETRY_AFTER_S, Headers, Problem, not_ready
from .auth import OPEN
from .ticks import PATH, KeyedPost, Posted, Shortcut

# Request heads that were accepted on a connection before: a client with a kept-alive connection repeats them.

MOST: Final = 16
"""Heads remembered per connection: they differ in little more than the length of the body."""
MAX_BYTES: Final = 1024
_END: Final = b"\r\n\r\n"


class KnownHeads:
    """Request heads seen on this connection, by their raw bytes, so that a repeat is not parsed again."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Headers, int]] = {}

    def learn(self, packet: bytes, headers: Headers, body: bytes) -> None:
        """Remember what the parser made of a packet, if it was one whole request and nothing else."""
        head, _, rest = packet.partition(_END)
        if rest != body or not 0 < len(head) <= MAX_BYTES:
            return
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[head] = headers, len(body)

    def read(self, packet: bytes) -> tuple[Headers, bytes] | None:
        """Return headers and body of a packet that is one whole request with a known head."""
        if not self._known:
            return None
        head, _, body = packet.partition(_END)
        known = self._known.get(head)
        return None if known is None or known[1] != len(body) else (known[0], body)


MAX_HEAD_BYTES: Final = 32 * 1024
MAX_HEADERS: Final = 100
_OFFER: Final = frozenset({b"connection", b"upgrade", b"http2-settings"})
_CONTINUE: Final = b"HTTP/1.1 100"
SLOWEST_BYTES_A_SECOND: Final = 16 * 1024
"""Slowest rate for bodies: a body may take the timeout plus its size at this rate."""
LONGEST_S: Final = 300.0
"""Longest time for any body: 64 MiB at 16 KiB a second would take more than an hour."""
SMALL_CHUNKS: Final = 1_024
LEAST_CHUNK_BYTES: Final = 16
"""Smallest mean size of chunks after the first `SMALL_CHUNKS`: each chunk costs the same, even a tiny one."""
MAX_AHEAD: Final = 128
"""Most requests that may arrive on a connection before the first of them is answered."""
LINGER_S: Final = 2.0
"""Seconds a client may keep sending a body that is no longer wanted."""


class _Corked:
    """Sends the head of a response together with its body: two sends cost more than the rest of a small response."""

    __slots__ = ("_connection", "_head", "_transport")

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection = connection
        self._transport = connection.transport
        self._head: bytes | None = b""

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return  # the client is gone
        if self._head:
            self._transport.write(self._head + data)
            self._head = None
        elif self._head is None or data.startswith(_CONTINUE):
            self._transport.write(data)
        else:
            self._head = data

    def close(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
            self._head = None
        self._connection.close_gently()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class HttpConnection(HttpToolsProtocol):
    """One client. The limits are set on the class that `limited` makes."""

    most = 4_096
    timeout_s = 20.0
    shortcut: Shortcut | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits_since_s: float | None = None
        """Start of the wait for a request that has begun, or for the first one of a connection."""
        self._stuck_since_s: float | None = None
        self.received = 0
        self._in_head = True
        self._head_bytes = 0
        self._chunks = 0
        self._lingers = False
        """True once the response is sent: further input is not read."""
        self._posted: Posted | None = None
        """An incomplete tick that takes the shortcut."""
        self._known_heads = KnownHeads()
        self._packet = b""
        """The last packet, if a request begins with it."""
        self._running: RequestResponseCycle | Posted | None = None
        """Requests being answered; uvicorn knows only the last one."""
        self._heard_all = False
        """True if the client sends no more and waits for its responses."""
        self._replays = False
        """Feed the parser a head that was seen before."""
        self._rests_since_s: float | None = None
        """Start of the pause between two requests on an open connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since_s = self.loop.time()
        if len(self.connections) > self.most:
            self._refuse(not_ready(f"{self.most} connections are open already"))

    def data_received(self, data: bytes) -> None:
        if self._lingers or self.transport.is_closing():
            return
        rests = self._rests_since_s is not None
        if rests and self._posts_again(data):
            return
        self._packet = data if rests else b""
        if self._waits_since_s is None:
            self._waits_since_s = self.loop.time()
            self.received = 0
            self._rests_since_s = None
        self.received += len(data)
        self._feed(data)
        if self._in_head and self._waits_since_s is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(Problem("headers", f"the headers have more than {MAX_HEAD_BYTES} bytes"))

    def _posts_again(self, data: bytes) -> bool:
        """Handle a tick with a known head, between two requests only: the parser does not see it."""
        known = self._known_heads.read(data)
        if known is None or self.flow.write_paused:
            return False
        headers, body = known
        assert self.shortcut is not None
        posted = self._short(headers, None) if self.shortcut.admits_again(headers) else self._shortened(headers)
        if posted is None:
            return False
        self._rests_since_s = None
        posted.body = body
        posted.start()
        return True

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Continue in HTTP/1.1 after a request that offers another protocol, with a parser that does not see the offer:
        the first parser stops after the head and would treat the body as the other protocol."""
        if self._lingers or self.transport.is_closing():
            return  # it was refused
        headers = [(name, value) for name, value in self.headers if name not in _OFFER]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        line = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._replays = True
        self._feed(b"%b%b\r\n" % (line, head))
        if rest:
            self._feed(rest)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks for it, uvicorn leaves it out
        """A client that has sent everything may still wait for its response."""
        running = self._running
        waits = running is not None and not running.response_complete and not running.more_body
        self._heard_all = waits and self.scheme == "http"
        return self._heard_all

    def on_message_begin(self) -> None:
        if self._replays:
            return
        # The rest of the ASGI scope is built where it is needed.
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._in_head, self._head_bytes, self._chunks = True, 0, 0
        self._rests_since_s = None
        if self._waits_since_s is None:  # follows another one in the same packet
            self._waits_since_s, self.received = self.loop.time(), 0

    def on_url(self, url: bytes) -> None:
        if not self._replays:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._replays:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._replays:
            self._replays = False
            return
        self._in_head = False
        if len(self.headers) > MAX_HEADERS:
            self._refuse(Problem("headers", f"there are more than {MAX_HEADERS} headers"))
            return
        if self.received > MAX_HEAD_BYTES and _size_of(self.headers) > MAX_HEAD_BYTES:
            self._refuse(Problem("headers", f"the headers have more than {MAX_HEAD_BYTES} bytes"))
            return
        if len(self.pipeline) >= MAX_AHEAD:
            detail = f"{MAX_AHEAD} requests wait for their answers; read those first"
            self._refuse(Problem("rate", detail, retry_after=str(RETRY_AFTER_S)))
            return
        if self.url == PATH and self._takes_shortcut():
            return
        if self.parser.get_method() == b"CONNECT":
            self._refuse(Problem("method", "this is not a proxy", allow="GET, POST, PUT, PATCH, DELETE"))
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the list that the scope has
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            self.cycle.transport = _Corked(self)  # type: ignore[assignment]

    def _takes_shortcut(self) -> bool:
        """Return whether a tick can be answered here: it is the first request in line, and nothing is unusual."""
        before: RequestResponseCycle | None = self.cycle
        if self.shortcut is None or self.flow.write_paused or (before is not None and not before.response_complete):
            return False
        parser = self.parser
        if parser.get_method() != b"POST" or parser.get_http_version() != "1.1" or not parser.should_keep_alive():
            return False
        headers = dict(self.headers)
        if self.shortcut.is_usual(headers):
            self._posted = self._shortened(headers)
        return self._posted is not None

    def _shortened(self, headers: Headers) -> Posted | None:
        """Return a tick that takes the shortcut, unless its caller has to be looked up."""
        assert self.shortcut is not None
        key = self.shortcut.key_at_hand(headers)
        if key is None:
            return None
        return self._short(headers, key, Posted if key is OPEN else KeyedPost)

    def _short(self, headers: Headers, key: ApiKey | None, kind: type[Posted] = Posted) -> Posted:
        assert self.shortcut is not None
        self._running = posted = kind(self, self.shortcut, key, headers)
        self.cycle = posted  # type: ignore[assignment]  # what uvicorn asks of a cycle it has
        return posted

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)
        self.pipeline.clear()  # no client waits for these, and each keeps this connection alive
        self._running = self._posted = None
        self.cycle = None  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._posted is not None:
            self._posted.body += body
        else:
            super().on_body(body)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > SMALL_CHUNKS and self.received < self._chunks * LEAST_CHUNK_BYTES:
            detail = f"the body came in chunks of less than {LEAST_CHUNK_BYTES} bytes; send larger ones"
            self._give_up(Problem("malformed", detail))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only its head is complete; see _decline_upgrade
        self._waits_since_s = None
        if self.transport.is_closing() or self.cycle is None:
            return
        posted, self._posted = self._posted, None
        if posted is not None:
            posted.start()
            if posted.let_in:
                self._known_heads.learn(self._packet, posted.headers, posted.body)
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Complete a response as uvicorn does, but without a timer: the sweep finds idle connections."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self._heard_all:
            self.transport.close()
            return
        self.flow.resume_reading()  # only now: each answer would let in another packet full of requests
        if self._waits_since_s is None:
            self._rests_since_s = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Problem("malformed", msg))

    def close_gently(self) -> None:
        """End the response. Read a moment longer from a client that is still sending: closing a connection with unread
        bytes resets it, and the client could lose a response that it has not read yet."""
        cycle: RequestResponseCycle | None = self.cycle
        if self._lingers or self.transport.is_closing():
            return
        if cycle is not None and not cycle.more_body and not self.pipeline:
            self.transport.close()
            return
        self._lingers = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _refuse(self, problem: Problem) -> None:
        if self._lingers or self.transport.is_closing():
            return
        body = problem.body()
        head = [STATUS_LINE[problem.status], b"content-type: application/problem+json\r\n"]
        head += [b"%b: %b\r\n" % header for header in (*GUARDED, *problem.headers)]
        head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join([*head, body]))
        self.close_gently()

    # -- slow clients ------------------------------------------------------------------------------------------

    def sweep(self, now_s: float, since_s: float) -> None:
        """Cut this client if it is too slow; `since_s` is when the last sweep was."""
        if self._lingers:
            return
        if self._rests_since_s is not None and now_s - self._rests_since_s > self.timeout_keep_alive:
            self.transport.close()
            return
        if self.flow.read_paused and self._waits_since_s is not None:
            self._waits_since_s += now_s - since_s  # the delay is ours: reading is paused
        elif self._waits_since_s is not None:
            allowed_s = self.timeout_s + (0.0 if self._in_head else self.received / SLOWEST_BYTES_A_SECOND)
            allowed_s = min(allowed_s, max(LONGEST_S, self.timeout_s))
            if now_s - self._waits_since_s > allowed_s:
                self._give_up(Problem("timeout", f"the request was not there after {allowed_s:g} s"))
                return
        if not self.flow.write_paused:
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = now_s
        elif now_s - self._stuck_since_s > self.timeout_s:
            self.transport.abort()

    def _give_up(self, problem: Problem) -> None:
        """Give the reason, unless a response is in progress or nothing was requested."""
        cycle: RequestResponseCycle | None = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if self.received and not answering:
            self._refuse(problem)
        else:
            self.transport.close()


def _size_of(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def limited(connections: int, timeout_limit_s: float, short_way: Shortcut | None) -> type[HttpConnection]:
    class Limited(HttpConnection):
        most = connections
        timeout_s = timeout_limit_s
        shortcut = short_way

    return Limited


def sweep(connections: Iterable[object], now_s: float, since_s: float) -> None:
    for one in list(connections):
        if isinstance(one, HttpConnection) and not one.transport.is_closing():
            one.sweep(now_s, since_s)


DRAIN_S = 2
"""Seconds for requests in progress once the process stops."""

SWEEP_S = 1.0
"""Seconds between checks for slow clients."""


class ApiServer:
    """Listens until stopped, from the first moment on, so that probes are answered during a long start.

    On a socket shared with other processes it waits for `open`: others may be ready while this one is not.
    """

    def __init__(self, node: Node, listener: socket.socket | None = None) -> None:
        self._node = node
        self._shared = listener is not None
        self.app = App(node)
        tls = _tls_context(node.config)
        self._tls = tls is not None
        self._socket = listener or listen(node.config.host, node.config.port)
        if self.app.takes_requests or not node.config.metrics_open:  # otherwise nothing here needs a key
            node.checks.append(self.app.authenticator.check_start)
        short_way = Shortcut(self.app) if self.app.takes_requests else None
        self._server = _Uvicorn(
            uvicorn.Config(
                self.app,
                http=limited(node.config.api_connections, node.config.api_timeout_s, short_way),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_drain_s(node.config.shutdown_timeout_s),
                backlog=2048,
                ssl_context_factory=None if tls is None else lambda *_: tls,
                headers=[("strict-transport-security", "max-age=31536000")] if self._tls else None,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self._socket, tls=self._tls)

    @property
    def connections(self) -> Collection[object]:
        """Connections that are open now."""
        return self._server.server_state.connections

    async def start(self) -> None:
        if not self._shared:
            self.open()

    def open(self) -> None:
        """Begin to answer."""
        # uvicorn's start and stop are not worth logging: the node reports what matters. Nor is a client that does not
        # speak HTTP: it has its response, and could fill the log at will.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="mainspring-api")
        self._serving.add_done_callback(self._ended)

    async def stop(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            self.app.followers.end()
            await asyncio.wait([self._serving])
        await self.app.quotas.flush()
        for listener in getattr(self._server, "servers", ()):  # still open if it ended by itself
            listener.close()
        self._socket.close()

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not self._server.should_exit and not serving.cancelled():
            self._node.fail(serving.exception() or RuntimeError("the HTTP server ended by itself"))


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the node, which stops the API and then itself."""

    _swept_s = 0.0

    async def on_tick(self, counter: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._swept_s >= SWEEP_S:
            sweep(self.server_state.connections, now_s, self._swept_s)
            self._swept_s = now_s
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _drain_s(shutdown_timeout_s: float) -> int:
    """Return a small part of the whole stop's time, in whole seconds for uvicorn: deliveries need most of it."""
    return max(1, min(DRAIN_S, int(shutdown_timeout_s / 5)))


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of the API."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


CIPHERS: Final = "@SECLEVEL=2:ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:DHE+AES:!aNULL:!eNULL:!aDSS:!SHA1:!AESCCM"
"""Python's default ciphers of TLS 1.2. Debian's Python has those of OpenSSL instead, some without forward secrecy."""


def _tls_context(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context, with Python's default versions and ciphers; None without a certificate."""
    if config.api_tls_cert is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_ciphers(CIPHERS)
        context.load_cert_chain(config.api_tls_cert, config.api_tls_key, no_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"api_tls_cert and api_tls_key: cannot be used: {error}") from None
    return context


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket for the API; port 0 means any free port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]  # the rest repeats the address
        raise ConfigError(f"cannot listen on {host} port {port}: {why}. Choose another with --host or --port") from None
    listener.setblocking(False)
    return listener


def inherit(fd: int) -> socket.socket:
    """Return the listening socket that the parent process opened for all of its children."""
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener
