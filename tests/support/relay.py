"""A road to a server that a test closes and opens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Passes bytes on; while it is closed it disconnects clients, and counts them."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open = True
        self.passed = 0
        self.hung_up = 0
        self._ends: set[asyncio.StreamWriter] = set()

    def close(self) -> None:
        self._open = False
        for end in self._ends:
            end.transport.abort()

    def open(self) -> None:
        self._open = True

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            self.hung_up += 1
            writer.transport.abort()
            return
        self.passed += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        ends = {writer, far_writer}
        self._ends |= ends
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        self._ends -= ends


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def relaying(port: int) -> AsyncIterator[tuple[Relay, int]]:
    """A relay to this port, and the port where it listens."""
    relay = Relay(port)
    server = await asyncio.start_server(relay.carry, "127.0.0.1", 0)
    try:
        yield relay, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        relay.close()
