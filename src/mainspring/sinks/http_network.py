"""Where webhooks may go: names are resolved here, and only public or allowed addresses are accepted.

The caller who puts a task chooses its URL, and the node runs inside a network that the caller cannot reach. So
addresses that are not public are refused: literal addresses before anything is sent, names after every resolution, and
both again when the socket is created. The connection goes to exactly the address that was checked.
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from ..model.errors import InvalidInput
from ..model.targets.url import AllowList, IpAddress, WebUrl, parse_web_url

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves host and port to addresses; raises OSError if there are none."""

_MAX_CHECKED_NAMES: Final = 1024


class ForbiddenAddress(InvalidInput):
    """An address that is neither public nor allowed."""


_NOT_PUBLIC: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("a metadata service", ("169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", "100.100.100.200/32",
                            "168.63.129.16/32", "192.0.0.192/32", "fd00:ec2::/32", "fd20:ce::254/128")),
    ("the loopback", ("127.0.0.0/8", "::1/128")),
    ("unspecified", ("0.0.0.0/8", "::/128")),
    ("private", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")),
    ("link-local", ("169.254.0.0/16", "fe80::/10")),
    ("behind a carrier's NAT", ("100.64.0.0/10",)),
    ("multicast", ("224.0.0.0/4", "ff00::/8")),
    ("an IPv4 address inside an IPv6 one", ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96",
                                            "64:ff9b:1::/48", "2001::/32", "2002::/16")),
    ("reserved", ("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24",
                  "203.0.113.0/24", "240.0.0.0/4", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20",
                  "5f00::/16")),
)  # fmt: skip
"""The first match gives the reason."""

_RANGES: Final = tuple((ip_network(text), reason) for reason, texts in _NOT_PUBLIC for text in texts)
_V4: Final = tuple((network, reason) for network, reason in _RANGES if isinstance(network, IPv4Network))
_V6: Final = tuple((network, reason) for network, reason in _RANGES if isinstance(network, IPv6Network))
_UNICAST: Final = IPv6Network("2000::/3")
_ONLY_BY_ADDRESS: Final = frozenset({"a metadata service", "link-local"})
"""Reasons that an allowed name does not override: a careless name must not give away the machine's credentials."""


def not_public(address: IpAddress) -> str | None:
    """Return why an address is not public; None for a public one."""
    ranges: Sequence[tuple[IPv4Network | IPv6Network, str]] = _V4 if isinstance(address, IPv4Address) else _V6
    for network, reason in ranges:
        if address in network:
            return reason
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return "reserved"
    return None if address.is_global else "not public"


def embedded(address: IpAddress) -> IPv4Address | None:
    """Return the IPv4 address inside an IPv6 one, which a gateway on the path may unpack."""
    if isinstance(address, IPv4Address):
        return None
    number = int(address)
    if address in IPv6Network("2002::/16"):
        return IPv4Address(number >> 80 & 0xFFFFFFFF)
    if address in IPv6Network("2001::/32"):
        return IPv4Address(~number & 0xFFFFFFFF)  # Teredo hides the client's address by inverting it
    carriers = ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96")
    if number > 1 and any(address in IPv6Network(carrier) for carrier in carriers):
        return IPv4Address(number & 0xFFFFFFFF)
    return None


class AddressGuard:
    """Checks addresses. `lookup` resolves names."""

    def __init__(self, allow: AllowList, lookup: Lookup) -> None:
        self._allow = allow
        self._lookup = lookup
        self._by_name: OrderedDict[str, None] = OrderedDict()
        """Addresses that are accepted only because an allowed name led to them."""

    def check_number(self, url: WebUrl) -> None:
        """Refuse a URL whose host is an IP address that must not be reached."""
        _check_literal(url, self._allow)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name. One forbidden address forbids it: we do not choose which one is used."""
        found = [text.partition("%")[0] for text in await self._lookup(host, port)]
        if not found:
            raise OSError(socket.EAI_NONAME, "the name has no address")
        by_name = self._allow.has_name(host)
        for text in found:
            if _is_only_named(self._allow, host, ip_address(text), by_name=by_name):
                self._remember(text)
        return found

    def check_socket(self, text: str) -> None:
        """Check the address of a socket last, however it was found."""
        if text not in self._by_name:
            _is_only_named(self._allow, text, ip_address(text), by_name=False)

    def _remember(self, text: str) -> None:
        self._by_name[text] = None
        self._by_name.move_to_end(text)
        if len(self._by_name) > _MAX_CHECKED_NAMES:
            self._by_name.popitem(last=False)


def check_literal_target(target: str, allow: AllowList) -> None:
    """Refuse a target whose host is an IP address that webhooks may not reach. Names are checked once resolved."""
    if target.startswith(("http://", "https://")):
        _check_literal(parse_web_url(target), allow)


@lru_cache(maxsize=4096)
def leads_inside(target: str) -> bool:
    """Return whether the host of a webhook is an IP address that is not public."""
    try:
        check_literal_target(target, AllowList())
    except ForbiddenAddress:
        return True
    return False


def _check_literal(url: WebUrl, allow: AllowList) -> None:
    if url.address is not None:
        _is_only_named(allow, url.host, url.address, by_name=False)


def _is_only_named(allow: AllowList, host: str, address: IpAddress, *, by_name: bool) -> bool:
    """Refuse an address, or return whether only its name makes it acceptable."""
    parts = [one for one in (address, embedded(address)) if one is not None and not allow.has_address(one)]
    wrong = {one: reason for one in parts if (reason := not_public(one)) is not None}
    if wrong and not (by_name and _ONLY_BY_ADDRESS.isdisjoint(wrong.values())):
        raise ForbiddenAddress(_refusal(host, address, wrong))
    return bool(wrong)


def _refusal(host: str, address: IpAddress, wrong: dict[IpAddress, str]) -> str:
    where = host if host == str(address) else f"{host} ({address})"
    culprit, reason = next(iter(wrong.items()))
    inside = "" if culprit == address else f" carries {culprit}, which"
    plain, quoted = ",".join(map(str, wrong)), ", ".join(f'"{one}"' for one in wrong)
    return (
        f"{where}{inside} is {reason}: webhooks go to public addresses only. To allow it, set "
        f"http_allow = [{quoted}] in mainspring.toml, MAINSPRING_HTTP_ALLOW={plain}, or --http-allow {plain}"
    )


# Names are resolved in separate threads, so that a slow name server blocks nothing else. The system's resolver cannot
# be cancelled, and a name whose server is dead keeps its thread for up to a minute. So each name has at most one
# thread, and names that did not resolve last time may use only some of the threads.

_THREADS: Final = 64
_UNPROVEN: Final = 48
"""Threads for names that are new, or got no answer at their last lookup."""

_MAX_LOOKUPS: Final = 4096
_LOOKUP_TIMEOUT_S: Final = 10.0


class SystemLookup:
    """`getaddrinfo`, bounded in time and in the number of threads."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._asking: dict[str, asyncio.Future[list[str]]] = {}
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._unproven = asyncio.Semaphore(_UNPROVEN)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
                if host not in self._asking and host not in self._answered:
                    await self._unproven.acquire()
                    if not self._ask(host, port, self._unproven):
                        self._unproven.release()
                else:
                    self._ask(host, port)
                return await asyncio.shield(self._asking[host])
        except TimeoutError:
            self._answered.pop(host, None)
            raise OSError(socket.EAI_AGAIN, f"no answer within {_LOOKUP_TIMEOUT_S:.0f} s") from None

    def _ask(self, host: str, port: int, permit: asyncio.Semaphore | None = None) -> bool:
        """Start a lookup. Return False if one is running already: all callers wait for the same answer."""
        if host in self._asking:
            return False
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "mainspring-dns")

        def answered(asked: "asyncio.Future[list[str]]") -> None:
            del self._asking[host]
            self._answered.pop(host, None)
            if permit is not None:
                permit.release()
            if not asked.cancelled() and asked.exception() is None:
                self._answered[host] = None
                if len(self._answered) > _MAX_LOOKUPS:
                    self._answered.popitem(last=False)

        asking = asyncio.get_running_loop().run_in_executor(self._threads, _addresses, host, port)
        self._asking[host] = asking
        asking.add_done_callback(answered)
        return True

    def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
