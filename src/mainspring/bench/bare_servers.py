"""Bare web servers that the benches compare with. Run as a module, with the name of one, it prints its port.

`receiver` answers 204 to everything, as fast as Python can. `echo` is an ASGI application that echoes each body: the
most that uvicorn can do. Both end when their standard input closes, and so with the bench that started them.
"""

import asyncio
import socket
import sys
from typing import Any, Final, cast

import httptools
import uvicorn
import uvloop

_ANSWER: Final = b"HTTP/1.1 204 No Content\r\n\r\n"


class ReceiverConnection(asyncio.Protocol):
    """A connection that answers each complete request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._transport is not None
        self._transport.write(_ANSWER)


async def receiver() -> None:
    """Serve the receiver."""
    server = await asyncio.get_running_loop().create_server(ReceiverConnection, "127.0.0.1", 0)
    await _announced(server.sockets[0].getsockname()[1])


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 202, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def echo() -> None:
    """Serve the ASGI application."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        config = uvicorn.Config(
            _echo, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        await _announced(listener.getsockname()[1])
        server.should_exit = True
        await serving


async def _announced(port: int) -> None:
    """Print the port; return when the standard input closes."""
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    uvloop.run({"receiver": receiver, "echo": echo}[sys.argv[1]]())
