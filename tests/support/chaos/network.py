"""The network of a chaos run: proxies and cables that can be cut between one client and the servers.

A proxy that falls silent still answers for the network: it takes every packet. When the cable is pulled, the kernel of
the node itself finds that nothing comes back: packets vanish, connections stand, and what was sent arrives late and
all at once when it is plugged in again.

    cable = Cable()
    listener = cable.listen()                      # what the namespace can reach of this machine: nothing else
    Popen([*cable.inside, "python", …])            # a process that has no other network
    cable.pull()
    …
    cable.plug_in()
    cable.remove()

The namespace has no name. It lives as long as a process in it: a keeper, which ends when this process does, however
that ends. With the namespace the kernel removes both ends of the cable, so no run leaves anything behind for the next.
"""

import asyncio
import contextlib
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address
from typing import Any, Final

import hiredis

from .wire_log import Wire, Witness

_KEEPER: Final = ("unshare", "--net", "sh", "-c", "echo made; exec cat")
_FIRST_NET: Final = IPv4Address("198.18.0.0")
"""198.18.0.0/15 is set aside for tests of networks: nobody's own addresses lie there."""
_NETS: Final = 1 << 15
_NET_SIZE: Final = 4
_PATIENCE_S: Final = 10.0
_CALL: Final = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"


class NoCable(Exception):
    """Network namespaces cannot be had here; the message says why."""


class Cable:
    """A network namespace and the cable between it and this machine."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.plug = f"ms{secrets.token_hex(5)}"
        """The name of this machine's end."""
        self._keeper = _keeper()
        self.inside: tuple[str, ...] = ("nsenter", f"--net=/proc/{self._keeper.pid}/ns/net", "--")
        """The words before a command that run it at the far end."""
        try:
            _ip(f"link add {self.plug} type veth peer name far netns {self._keeper.pid}")
            # No two links of a machine have the same number, so no two cables have the same address.
            net = _FIRST_NET + socket.if_nametoindex(self.plug) % _NETS * _NET_SIZE
            self.host = str(net + 1)
            """This machine, as seen from the far end."""
            _ip(f"addr add {self.host}/30 dev {self.plug}", f"link set {self.plug} up")
            _ip(f"addr add {net + 2}/30 dev far", "link set far up", "link set lo up", inside=self.inside)
        except (NoCable, OSError):
            self.remove()
            raise

    def listen(self) -> socket.socket:
        """Return a socket on a free port of this end, for callers from the far end."""
        listener = socket.socket()
        try:
            # Bound to the cable too: when it is pulled, answers must not go looking for another way.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.plug.encode())
            listener.bind((self.host, 0))
            listener.listen()
        except OSError:
            listener.close()
            raise
        return listener

    def pull(self) -> bool:
        """Let nothing pass, in either direction. Return False if the cable was removed meanwhile."""
        return self._set("down")

    def plug_in(self) -> bool:
        """Everything passes again. False if the cable was removed meanwhile."""
        return self._set("up")

    def _set(self, state: str) -> bool:
        with self._turn:
            if self._keeper.returncode is None:
                _ip(f"link set {self.plug} {state}")
            return self._keeper.returncode is None

    def remove(self) -> None:
        """Take both ends away; processes at the far end have no network from then on."""
        with self._turn:
            if self._keeper.returncode is not None:
                return
            with contextlib.suppress(NoCable):  # never made
                _ip(f"link del {self.plug}")
            self._keeper.communicate(timeout=_PATIENCE_S)


def refused() -> str | None:
    """Why there can be no cables here (no rights, no tools, a firewall), or None. Makes one and sends through it."""
    try:
        cable = Cable()
    except (NoCable, OSError) as error:
        return str(error)
    try:
        with cable.listen() as listener:
            call = [*cable.inside, sys.executable, "-I", "-S", "-c", _CALL, *map(str, listener.getsockname())]
            subprocess.run(call, check=True, capture_output=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nothing comes through a cable: {error}"
    finally:
        cable.remove()
    return None


def _keeper() -> "subprocess.Popen[bytes]":
    """The process that keeps a namespace in being until its input ends."""
    pipe = subprocess.PIPE
    # A session of its own: Ctrl-C is for the run, which takes its cables away in order.
    keeper = subprocess.Popen(_KEEPER, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert keeper.stdout is not None
    if keeper.stdout.readline() != b"made\n":
        _, complaint = keeper.communicate(timeout=_PATIENCE_S)
        raise NoCable(complaint.decode(errors="replace").strip())
    return keeper


def _ip(*lines: str, inside: tuple[str, ...] = ()) -> None:
    """Commands of `ip`, here or in a namespace."""
    call = [*inside, "ip", "-batch", "-"]
    done = subprocess.run(call, input="\n".join(lines).encode(), capture_output=True, timeout=_PATIENCE_S, check=False)
    if done.returncode != 0:
        raise NoCable(f"ip {'; '.join(lines)}: {done.stderr.decode(errors='replace').strip()}")


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
        """Return when bytes may continue."""
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
        """Errors of the proxy itself: they make the run prove nothing."""
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


class Road:
    """One proxy per server for one client: a node, by its own cable if it has one, or a load generator."""

    def __init__(
        self,
        name: str,
        upstreams: Mapping[str, Callable[[], int]],
        witness: Witness | None,
        *,
        translate: bool,
        cable: Cable | None = None,
    ) -> None:
        self.name = name
        self.weather = Weather()
        translator = self._translator if translate else None
        self._upstreams = upstreams
        self._proxies = {
            server: Proxy(_address(port), self.weather, witness=witness, translator=translator, cable=cable)
            for server, port in upstreams.items()
        }

    async def start(self) -> "Road":
        for proxy in self._proxies.values():
            await proxy.start()
        return self

    async def aclose(self) -> None:
        await asyncio.gather(*(proxy.aclose() for proxy in self._proxies.values()))

    @property
    def addresses(self) -> list[str]:
        """As they stand in a URL."""
        return ["{}:{}".format(*proxy.address) for proxy in self._proxies.values()]

    @property
    def errors(self) -> list[str]:
        """Errors of the proxies themselves; there should be none."""
        return [f"a proxy of {self.name} failed: {error!r}" for one in self._proxies.values() for error in one.errors]

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        return sum(proxy.cut() for proxy in self._proxies.values())

    def numb(self) -> int:
        """Keep all connections open and let them carry nothing; return how many there were."""
        return sum(proxy.numb() for proxy in self._proxies.values())

    def _translator(self) -> Callable[[bytes], bytes]:
        return Translator({port(): self._proxies[server].address for server, port in self._upstreams.items()}).take


def _address(port: Callable[[], int]) -> Callable[[], tuple[str, int]]:
    return lambda: ("127.0.0.1", port())


class Translator:
    """Rewrites the servers' own addresses in replies, so that a client never finds a way around its proxies."""

    def __init__(self, addresses: Mapping[int, Address]) -> None:
        self._addresses = addresses
        self._reader = hiredis.Reader(notEnoughData=...)

    def take(self, data: bytes) -> bytes:
        """Complete replies, translated; an incomplete one waits for more."""
        self._reader.feed(data)
        out = []
        while (reply := self._reader.gets()) is not ...:
            out.append(_encode(self._translated(reply)))
        return b"".join(out)

    def _translated(self, reply: Any) -> Any:
        match reply:
            case hiredis.ReplyError() as error:
                return hiredis.ReplyError(self._in_error(str(error)))
            case [bytes(host), int(port), *rest] if port in self._addresses and host.count(b".") == 3:  # CLUSTER SLOTS
                host_seen, port_seen = self._addresses[port]
                return [host_seen.encode(), port_seen, *rest]
            case [*rows]:
                return [self._translated(row) for row in rows]
        return reply

    def _in_error(self, text: str) -> str:
        if not text.startswith(("MOVED ", "ASK ")):
            return text
        head, _, address = text.rpartition(" ")
        host, _, port = address.rpartition(":")
        return "{} {}:{}".format(head, *self._addresses.get(int(port), (host, port)))


def _encode(reply: Any) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case hiredis.ReplyError():
            return b"-%b\r\n" % str(reply).encode()
        case _:
            return b"*%d\r\n" % len(reply) + b"".join(map(_encode, reply))
