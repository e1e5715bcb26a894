"""A small TCP proxy between one client and one server, which can break the road in every way a network does."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Final

from .cable import Cable
from .witness import Wire, Witness

Address = tuple[str, int]
Translate = Callable[[bytes], bytes]

_CHUNK: Final = 65_536
_LATE_REPLY_S: Final = 1.0
_RESET: Final = struct.pack("ii", 1, 0)


class Weather:
    """How the road is right now. One object may rule many proxies: all the roads of one client."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.delay_s = 0.0
        self.hold_s = 0.0
        """Over 0: the next write of an owner (or any command, see `hold_all`) is kept for so long, its client cut."""
        self.hold_all = False
        self.swallow = False
        """The next reply is swallowed, and its client cut."""
        self.held = 0
        self.swallowed = 0

    @property
    def silent(self) -> bool:
        return not self._open.is_set()

    def fall_silent(self) -> None:
        """A black hole: connections stay, nothing arrives on either side until `speak`."""
        self._open.clear()

    def speak(self) -> None:
        self._open.set()

    def clear(self) -> None:
        self.speak()
        self.delay_s, self.hold_s, self.swallow, self.hold_all = 0.0, 0.0, False, False

    async def passage(self) -> None:
        """Returns when bytes may go on."""
        while True:
            await self._open.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._open.is_set():
                return


class Proxy:
    """Listens on a port of its own, of loopback or at this end of a cable, and passes everything on."""

    def __init__(
        self,
        upstream: Callable[[], Address],
        weather: Weather,
        *,
        witness: Witness | None = None,
        translator: Callable[[], Callable[[bytes], bytes]] | None = None,
        cable: Cable | None = None,
    ) -> None:
        self._upstream = upstream
        self._cable = cable
        self.weather = weather
        self._witness = witness
        self._translator = translator
        self._server: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._served: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []
        """What went wrong in the proxy itself: no fault of anybody's, but the run proves nothing."""
        self.address: Address = ("", 0)

    @property
    def port(self) -> int:
        return self.address[1]

    async def start(self) -> None:
        listener = self._cable.listen() if self._cable is not None else socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        while self._served:
            self.cut()
            await asyncio.wait(list(self._served), timeout=0.1)

    def cut(self) -> int:
        """Reset every connection; returns how many there were."""
        pipes = list(self._pipes)
        for pipe in pipes:
            pipe.cut()
        return len(pipes)

    def numb(self) -> int:
        """Every connection stays and carries nothing ever again, as after a lost cable; new ones work."""
        for pipe in self._pipes:
            pipe.numb = True
        return len(self._pipes)

    def keep_late(self, work: "asyncio.Task[None]") -> None:
        self._late.add(work)
        work.add_done_callback(self._late.discard)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._served.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._served.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.errors.append(error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection(*self._upstream())
        except OSError:
            _reset(writer)
            return
        wire = Wire(self._witness) if self._witness is not None else None
        pipe = _Pipe(self, (reader, writer), upstream, wire, self._translator() if self._translator else None)
        self._pipes.add(pipe)
        try:
            await pipe.run()
        finally:
            self._pipes.discard(pipe)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Pipe:
    """One connection of the client and the one to the server that belongs to it."""

    def __init__(
        self, proxy: Proxy, client: Ends, server: Ends, wire: Wire | None, translate: Translate | None
    ) -> None:
        self._proxy, self._weather = proxy, proxy.weather
        self._client, self._server = client, server
        self._wire, self._translate = wire, translate
        self.numb = False
        self._ends_late = False
        """The client is cut, but the server's side lives until what was held back has arrived."""

    async def run(self) -> None:
        pumps = [asyncio.create_task(self._to_server()), asyncio.create_task(self._to_client())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self.cut()
        for pump in pumps:
            if not pump.cancelled():
                pump.result()  # a witness that cannot read what it sees must be heard of

    def cut(self) -> None:
        _reset(self._client[1])
        if not self._ends_late:
            _reset(self._server[1])

    async def _to_server(self) -> None:
        reader, writer = self._client[0], self._server[1]
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._weather.passage()
                if self.numb:
                    continue
                owners = self._wire.sent(data) if self._wire is not None else False
                if self._weather.hold_s and (owners or self._weather.hold_all):
                    self._hold(data)
                    return
                writer.write(data)
                await writer.drain()

    async def _to_client(self) -> None:
        reader, writer = self._server[0], self._client[1]
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self._wire is not None:
                    self._wire.heard(data)
                await self._weather.passage()
                if self.numb:
                    continue
                if self._weather.swallow:
                    self._weather.swallow = False
                    self._weather.swallowed += 1
                    return
                writer.write(self._translate(data) if self._translate is not None else data)
                await writer.drain()

    def _hold(self, data: bytes) -> None:
        hold_s, self._weather.hold_s = self._weather.hold_s, 0.0
        self._weather.held += 1
        self._ends_late = True
        self._proxy.keep_late(asyncio.create_task(self._arrive_late(data, hold_s)))

    async def _arrive_late(self, data: bytes, hold_s: float) -> None:
        """An old command reaches the server long after its client is gone; what it answers only the witness hears."""
        reader, writer = self._server
        try:
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.sleep(hold_s)
                writer.write(data)
                async with asyncio.timeout(_LATE_REPLY_S):
                    while data := await reader.read(_CHUNK):
                        if self._wire is not None:
                            self._wire.heard(data)
        finally:
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, as a crashed peer or a firewall does."""
    raw = writer.get_extra_info("socket")
    if raw is not None and not writer.transport.is_closing():
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
