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

DRAIN_S = 5
"""How long requests under way may take once the process stops."""


class ApiServer:
    """Listens from the first moment (so that probes are answered during a long start) until stopped."""

    def __init__(self, node: Node) -> None:
        self._node = node
        config = node.config
        self._socket = _listen(config.host, config.port)
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
                timeout_graceful_shutdown=DRAIN_S,
                backlog=2048,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
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


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another with --host or --port"
        ) from None
    listener.setblocking(False)
    return listener
