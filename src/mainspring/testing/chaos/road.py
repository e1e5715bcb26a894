"""All the ways of one client to all servers, under one weather; a cluster's addresses lead through it too."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import hiredis

from .proxy import Proxy, Weather
from .witness import Witness


class Road:
    """One proxy per server for one client: a node or a load generator."""

    def __init__(
        self, name: str, upstreams: Mapping[str, Callable[[], int]], witness: Witness | None, *, translate: bool
    ) -> None:
        self.name = name
        self.weather = Weather()
        translator = self._translator if translate else None
        self._upstreams = upstreams
        self._proxies = {
            server: Proxy(_address(port), self.weather, witness=witness, translator=translator)
            for server, port in upstreams.items()
        }

    async def start(self) -> "Road":
        for proxy in self._proxies.values():
            await proxy.start()
        return self

    async def aclose(self) -> None:
        await asyncio.gather(*(proxy.aclose() for proxy in self._proxies.values()))

    @property
    def ports(self) -> list[int]:
        return [proxy.port for proxy in self._proxies.values()]

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        return sum(proxy.cut() for proxy in self._proxies.values())

    def numb(self) -> int:
        """Let all connections stand and carry nothing more; returns how many there were."""
        return sum(proxy.numb() for proxy in self._proxies.values())

    def _translator(self) -> Callable[[bytes], bytes]:
        ports = {port(): self._proxies[server].port for server, port in self._upstreams.items()}
        return Translator(ports).take


def _address(port: Callable[[], int]) -> Callable[[], tuple[str, int]]:
    return lambda: ("127.0.0.1", port())


class Translator:
    """Rewrites the servers' own ports in replies, so that a client never finds a way around its proxies."""

    def __init__(self, ports: Mapping[int, int]) -> None:
        self._ports = ports
        self._texts = {str(port).encode(): str(other).encode() for port, other in ports.items()}
        self._reader = hiredis.Reader(notEnoughData=...)

    def take(self, data: bytes) -> bytes:
        """Whole replies, translated; the rest waits for more."""
        self._reader.feed(data)
        out = []
        while (reply := self._reader.gets()) is not ...:
            out.append(_encode(self._translated(reply)))
        return b"".join(out)

    def _translated(self, reply: Any) -> Any:
        match reply:
            case hiredis.ReplyError() as error:
                return hiredis.ReplyError(self._in_error(str(error)))
            case [bytes(host), int(port), *rest] if port in self._ports and host.count(b".") == 3:  # CLUSTER SLOTS
                return [host, self._ports[port], *rest]
            case [*rows]:
                return [self._translated(row) for row in rows]
            case bytes() if reply in self._texts:  # SENTINEL MASTER
                return self._texts[reply]
        return reply

    def _in_error(self, text: str) -> str:
        if not text.startswith(("MOVED ", "ASK ")):
            return text
        head, _, port = text.rpartition(":")
        return f"{head}:{self._ports.get(int(port), int(port))}"


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
