"""All the ways of one client to all servers, under one weather; a cluster's addresses lead through it too."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import hiredis

from .cable import Cable
from .proxy import Address, Proxy, Weather
from .witness import Witness


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
        """Of the proxies themselves; there should be none."""
        return [f"a proxy of {self.name} failed: {error!r}" for one in self._proxies.values() for error in one.errors]

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        return sum(proxy.cut() for proxy in self._proxies.values())

    def numb(self) -> int:
        """Let all connections stand and carry nothing more; returns how many there were."""
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
