"""The API on a socket: uvicorn in the node's own loop."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Collection, Iterator

import uvicorn

from ..config import Config
from ..model.errors import ConfigError
from ..node import Node
from ..store.wire import no_passphrase
from .app import App
from .protocol import limited, sweep
from .shortcut import Shortcut

DRAIN_S = 2
"""How long requests under way may take once the process stops."""

SWEEP_S = 1.0
"""How often slow clients are looked for."""


class ApiServer:
    """Listens from the first moment (so that probes are answered during a long start) until stopped.

    On a socket that it shares with other processes it waits for `open`: they may be ready while this one is not.
    """

    def __init__(self, node: Node, listener: socket.socket | None = None) -> None:
        self._node = node
        self._shared = listener is not None
        self.app = App(node)
        self._tls = node.config.api_tls_cert is not None
        _check_tls(node.config)
        self._socket = listener or listen(node.config.host, node.config.port)
        if self.app.takes_requests or not node.config.metrics_open:  # else nothing here needs a key
            node.checks.append(self.app.gate.check_start)
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
                ssl_certfile=node.config.api_tls_cert,
                ssl_keyfile=node.config.api_tls_key,
                headers=[("strict-transport-security", "max-age=31536000")] if self._tls else None,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self._socket, tls=self._tls)

    @property
    def connections(self) -> Collection[object]:
        """Those that are open now."""
        return self._server.server_state.connections

    async def start(self) -> None:
        if not self._shared:
            self.open()

    def open(self) -> None:
        """Begin to answer."""
        # Its start and stop are no news of their own: the node tells what matters.
        # Neither is a client that speaks no HTTP: it has its answer, and could fill the log at will.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="mainspring-api")
        self._serving.add_done_callback(self._ended)

    async def stop(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])
        for listener in getattr(self._server, "servers", ()):  # still open if it ended by itself
            listener.close()
        self._socket.close()

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not self._server.should_exit and not serving.cancelled():
            self._node.fail(serving.exception() or RuntimeError("the HTTP server ended by itself"))


class _Uvicorn(uvicorn.Server):
    """Signals belong to the node, which stops the API and then itself."""

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
    """A small part of the time for the whole stop, in uvicorn's whole seconds: deliveries need the most of it."""
    return max(1, min(DRAIN_S, int(shutdown_timeout_s / 5)))


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Where the API answers."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_tls(config: Config) -> None:
    """Say at once, and in words, what is wrong with the certificate."""
    if config.api_tls_cert is None:
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(config.api_tls_cert, config.api_tls_key, no_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"api_tls_cert and api_tls_key: cannot be used: {error}") from None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for the API; port 0 is any that is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]  # the rest says the address once more
        raise ConfigError(f"cannot listen on {host} port {port}: {why}. Choose another with --host or --port") from None
    listener.setblocking(False)
    return listener


def inherit(fd: int) -> socket.socket:
    """The listening socket that the parent process opened for all of its children."""
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener
