"""A web server that answers 204 to everything, as fast as Python can. Run as a module, it prints its port.

It ends when its standard input closes, and so with the bench that started it, however that ends.
"""

import asyncio
import sys
from typing import Final, cast

import httptools
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


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(ReceiverConnection, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    uvloop.run(main())
