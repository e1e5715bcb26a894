"""Web addresses and addresses to listen on, read strictly: text that two programs could read differently is refused.

A guard that checks one host while the connection goes to another is useless. So every address is parsed here, and sent
addresses are put together again from their parts.
"""

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final, NamedTuple, NoReturn, Self
from urllib.parse import SplitResult, quote, urlsplit

from ..errors import InvalidInput

PORTS: Final = {"http": 80, "https": 443}
_URL: Final = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.DOTALL)
_QUERY: Final = re.compile(r"[?#]")
_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2028\u2029]")
_HOST_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AMBIGUOUS: Final = re.compile("[\u00df\u03c2\u200c\u200d]")
"""Letters that the two standards for international names turn into different names."""

IpAddress = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class WebUrl:
    """The normalised parts of an address: lower case, ASCII, no trailing dot."""

    scheme: str
    host: str
    port: int
    path: str
    """Path and query."""
    address: IpAddress | None
    """The host if it is an IP address, not a name."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def shown(self) -> str:
        """The URL for logs, without the query, which often holds keys."""
        path, mark, _ = self.path.partition("?")
        return f"{self.scheme}://{self.authority}{path}{mark and '?…'}"


def shown_address(text: str) -> str:
    """Return a possibly malformed address for errors: text before an @ may be a password, and a query often holds keys.

    If in doubt, hide."""
    scheme, mark, rest = text.partition("://")
    if not mark:
        scheme, rest = "", text
    place, *query = _QUERY.split(rest, maxsplit=1)
    if query and "@" in query[0]:
        return f"{scheme}{mark}…"  # the query may not begin there
    place = place.rpartition("@")[2] if mark else place
    return f"{scheme}{mark}{place}"[:80] + ("?…" if query else "")


@lru_cache(maxsize=1024)
def parse_web_url(text: str) -> WebUrl:
    """Read a URL, or refuse it with the reason."""
    if not (match := _URL.match(text)):
        _refuse(text, "it must start with http:// or https://")
    scheme, authority, path = match.groups()
    if _UNSAFE.search(text):
        _refuse(text, "it holds spaces, control characters or backslashes; percent-encode them")
    if "@" in authority:
        _refuse(text, "user and password do not belong in it; use a named target with auth")
    host, port = _split(text, authority)
    name, address = _host(text, host)
    try:
        path = quote(path, safe="".join(map(chr, range(33, 127))))
    except UnicodeEncodeError:
        _refuse(text, "it is not valid Unicode (a lone surrogate)")
    path = path if path.startswith("/") else "/" + path
    return WebUrl(scheme, name, PORTS[scheme] if port is None else port, path, address)


def _refuse(text: str, reason: str) -> NoReturn:
    raise InvalidInput(f"the address {shown_address(text)!r} is not accepted: {reason}")


def _split(text: str, authority: str) -> tuple[str, int | None]:
    if authority.startswith("["):
        host, bracket, rest = authority.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            _refuse(text, "an IPv6 address must be in brackets, as in http://[2001:db8::1]/")
        host, port = host + bracket, rest[1:]
    else:
        host, _, port = authority.partition(":")
    if not port:
        return host, None
    if not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
        _refuse(text, "the port must be a number from 1 to 65535")
    return host, int(port)


def _host(text: str, host: str) -> tuple[str, IpAddress | None]:
    if host.startswith("["):
        try:
            address = IPv6Address("" if "%" in host else host[1:-1])
        except AddressValueError:
            _refuse(text, "it has an invalid IPv6 address (zones such as %eth0 are not accepted)")
        return str(address), address
    name = _ascii(text, host).lower().removesuffix(".")
    if not name:
        _refuse(text, "it names no host")
    if not _HOST_NAME.fullmatch(name) or len(name) > 253:
        _refuse(text, "its host name is invalid")
    if not _NUMBER.fullmatch(name.rpartition(".")[2]):
        return name, None
    try:
        return name, IPv4Address(name)
    except AddressValueError:
        _refuse(text, "an IPv4 address needs four decimal numbers, as in 192.0.2.1")


def _ascii(text: str, host: str) -> str:
    if host.isascii():
        return host
    if _AMBIGUOUS.search(host):
        _refuse(text, "its host can be read in two ways; write it in its xn-- form")
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        _refuse(text, "its host name is invalid")


LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
_HOST_PATTERN: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_LIKE_A_NETWORK: Final = re.compile(r"[0-9.]+(?:/.*)?|.*[:/].*")


@dataclass(frozen=True, slots=True)
class AllowList:
    """Allowed networks and names. `*.example.org` means every name below example.org, not itself."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        networks: list[IPv4Network | IPv6Network] = []
        names: set[str] = set()
        for entry in (entry.strip() for entry in entries):
            if _LIKE_A_NETWORK.fullmatch(entry):
                networks.append(_network(entry))
            elif _HOST_PATTERN.fullmatch(name := entry.lower().removesuffix(".")):
                names.add(name)
            else:
                raise InvalidInput(
                    f"{entry!r} is neither a network (10.0.0.0/8), an address, nor a name (hooks.internal, *.internal)"
                )
        return cls(tuple(networks), frozenset(names))

    def has_address(self, address: IpAddress) -> bool:
        return any(address in network for network in self.networks)

    def has_name(self, host: str) -> bool:
        if not self.names:
            return False
        labels = host.split(".")
        parents = ("*." + ".".join(labels[i:]) for i in range(1, len(labels)))
        return host in self.names or not self.names.isdisjoint(parents)


def _network(entry: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(entry)
    except ValueError as error:
        raise InvalidInput(f"{entry!r} is not a network: {error}") from None


class HostPort(NamedTuple):
    host: str
    port: int
    """The port; 0 means any free one."""

    @classmethod
    def parse(cls, text: str) -> "HostPort":
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise InvalidInput(f"{text!r} is not an address to listen on; write host:port, e.g. 127.0.0.1:9100")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise InvalidInput(f"{text!r} is not an address to listen on; put the IPv6 address in brackets: [::1]:9100")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_api_url(url: str) -> SplitResult:
    """Return the parts of an API address. Any other content may be a secret, and is not repeated in the error."""
    with contextlib.suppress(ValueError):  # an invalid port
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or parts.username or parts.password)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and plain:
            return parts
    raise InvalidInput("write https://host[:port][/path] and no more; the key goes into api_token")
