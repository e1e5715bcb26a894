"""HTTP connections: aiohttp, limited to the addresses that the guard allows. Only this module imports aiohttp."""

import os
import resource
import socket
import ssl
import time
from functools import lru_cache
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from ..model.errors import InvalidInput
from ..model.targets.url import WebUrl
from .http_network import AddressGuard

KEEP_ALIVE_S: Final = 15.0
DNS_CACHE_S: Final = 10
_MOST_CONNECTIONS: Final = 2000


class GuardedResolver(AbstractResolver):
    """Resolves names to addresses that the guard has approved; connections go to exactly these."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        del family  # both families are resolved, and both are checked
        return [
            ResolveResult(
                hostname=host,
                host=text,
                port=port,
                family=socket.AF_INET6 if ":" in text else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for text in await self._guard.resolve(host, port)
        ]

    async def close(self) -> None:
        """Do nothing: no resource is held."""


class KeptConnections:
    """The reusable connections of one host: in use, most allowed, and peak."""

    __slots__ = ("busy", "most", "peak")

    def __init__(self) -> None:
        self.busy = self.most = self.peak = 0


class Sessions:
    """One session that reuses its connections, and one that closes each after its answer.

    A connection is kept for some time after its answer, and only connections in flight are counted elsewhere: thousands
    of hosts, each called once, would use up the process's file descriptors. Once the limit of kept connections is
    reached, a host that needs another one gets it for one answer only.
    """

    def __init__(self, guard: AddressGuard, most_kept: int) -> None:
        self._most_kept = most_kept
        self._keeping = _session(guard, keep=True)
        self._ending = _session(guard, keep=False)
        self._hosts: dict[tuple[str, int], KeptConnections] = {}
        self._sum = 0
        self._look_at = 0.0

    def lend(self, host: str, port: int) -> tuple[aiohttp.ClientSession, KeptConnections | None]:
        """Return the session for a request that is sent now, and the record to give back after its answer."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)
        kept = self._hosts.get((host, port))
        if self._sum >= self._most_kept and (kept is None or kept.busy >= kept.most):
            return self._ending, None
        if kept is None:
            kept = self._hosts[host, port] = KeptConnections()
        kept.busy += 1
        kept.peak = max(kept.peak, kept.busy)
        if kept.busy > kept.most:
            kept.most += 1
            self._sum += 1
        return self._keeping, kept

    def give_back(self, kept: KeptConnections | None) -> None:
        if kept is not None:
            kept.busy -= 1

    async def close(self) -> None:
        await self._keeping.close()
        await self._ending.close()

    def _look(self, now: float) -> None:
        """Forget connections that were not needed since the last look: their age has closed them."""
        self._look_at = now + KEEP_ALIVE_S
        for kept in self._hosts.values():
            kept.most, kept.peak = kept.peak, kept.busy
        self._hosts = {host: kept for host, kept in self._hosts.items() if kept.most}
        self._sum = sum(kept.most for kept in self._hosts.values())


def _session(guard: AddressGuard, *, keep: bool) -> aiohttp.ClientSession:
    """Return a session without redirects, cookies, or a proxy or password from the environment."""

    def checked_socket(found: tuple[Any, ...]) -> socket.socket:
        family, kind, proto, _, address = found
        guard.check_socket(address[0])
        return socket.socket(family, kind, proto)

    # Limits per host, and for all hosts together, are in http_limits.
    connector = aiohttp.TCPConnector(
        resolver=GuardedResolver(guard),
        ttl_dns_cache=DNS_CACHE_S,
        limit=0,
        keepalive_timeout=KEEP_ALIVE_S if keep else None,
        force_close=not keep,
        socket_factory=checked_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,  # the first bytes are kept as received; nothing can expand in our memory
        skip_auto_headers=("User-Agent", "Content-Type", "Accept-Encoding"),
    )


def url_for(parsed: WebUrl) -> URL:
    """Return aiohttp's form of the address, made of the parts that the guard has checked."""
    url = URL(str(parsed), encoded=True)
    if (url.raw_host, url.port) != (parsed.host, parsed.port):
        raise InvalidInput(f"the address {parsed.shown!r} is not accepted: it can be read in two ways")
    return url


@lru_cache(maxsize=256)
def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that always verifies. With `ca_file` only that authority counts."""
    return ssl.create_default_context(cafile=ca_file)


def most_connections() -> int:
    """Return half of the process's file descriptors: the server's connections and the API need some too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(_MOST_CONNECTIONS, soft // 2))


async def first_bytes(answer: aiohttp.ClientResponse, count: int) -> bytes:
    """Return the start of a body. A short rest is read, so that the connection can be reused; a long one closes it."""
    if answer.content.at_eof():
        return b""
    parts: list[bytes] = []
    size = 0
    while size <= count + _SHORT_REST:
        part = await answer.content.readany()
        if not part:
            break
        parts.append(part)
        size += len(part)
    else:
        answer.close()
    return b"".join(parts)[:count]


_SHORT_REST: Final = 64 * 1024
_UNREADABLE: Final = "its answer cannot be read"


def failure_text(error: BaseException) -> str:
    """Return why a connection failed, in one line."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name cannot be resolved: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the server's certificate is not accepted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ConnectionError) and cause.errno:
            return f"cannot connect: {os.strerror(cause.errno)}"  # asyncio would repeat the address
        return f"cannot connect: {cause.strerror or cause}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{_UNREADABLE}: {error.message}"  # its status is the library's, not the server's
    return f"{type(error).__name__}: {error}"


def failure_brief(error: BaseException) -> str:
    """Return the reason for the log, without text from the server."""
    if isinstance(error, aiohttp.ClientResponseError):
        return _UNREADABLE
    return failure_text(error) if isinstance(error, aiohttp.ClientConnectionError) else type(error).__name__
