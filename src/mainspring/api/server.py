"""The API on a socket: uvicorn in the node's own loop."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from ..model.errors import ConfigError
from ..node import Node
from .app import App

DRAIN_S = 2
"""How long requests under way may take once the process stops."""


class ApiServer:
    """Listens from the first moment (so that probes are answered during a long start) until stopped.

    On a socket that it shares with other processes it waits for `open`: they may be ready while this one is not.
    """

    def __init__(self, node: Node, listener: socket.socket | None = None) -> None:
        self._node = node
        self._shared = listener is not None
        self._socket = listener or listen(node.config.host, node.config.port)
        self._server = _Uvicorn(
            uvicorn.Config(
                App(node),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_drain_s(node.config.shutdown_timeout_s),
                backlog=2048,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self._socket)

    async def start(self) -> None:
        if not self._shared:
            self.open()

    def open(self) -> None:
        """Begin to answer."""
        # Its start and stop are no news of their own: the node tells what matters.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _drain_s(shutdown_timeout_s: float) -> int:
    """A small part of the time for the whole stop, in uvicorn's whole seconds: deliveries need the most of it."""
    return max(1, min(DRAIN_S, int(shutdown_timeout_s / 5)))


def url_of(listener: socket.socket) -> str:
    """Where the API answers."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for the API; port 0 is any that is free."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another with --host or --port"
        ) from None
    listener.setblocking(False)
    return listener


def inherit(fd: int) -> socket.socket:
    """The listening socket that the parent process opened for all of its children."""
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener
