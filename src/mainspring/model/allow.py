"""Which addresses that are not public webhooks may reach all the same."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final, Self

from .errors import InvalidInput
from .weburl import Address

LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
_NAME: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_LIKE_A_NETWORK: Final = re.compile(r"[0-9.]+(?:/.*)?|.*[:/].*")


@dataclass(frozen=True, slots=True)
class AllowList:
    """Networks and names. `*.example.org` means every name below example.org, not itself."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        networks: list[IPv4Network | IPv6Network] = []
        names: set[str] = set()
        for entry in (entry.strip() for entry in entries):
            if _LIKE_A_NETWORK.fullmatch(entry):
                networks.append(_network(entry))
            elif _NAME.fullmatch(name := entry.lower().removesuffix(".")):
                names.add(name)
            else:
                raise InvalidInput(
                    f"{entry!r} is neither a network (10.0.0.0/8), an address, nor a name (hooks.internal, *.internal)"
                )
        return cls(tuple(networks), frozenset(names))

    def has_address(self, address: Address) -> bool:
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
        raise InvalidInput(f"{entry!r} is no network: {error}") from None
