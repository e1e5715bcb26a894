"""Runs the tests as a user with the rights that `mainspring acl` prints, and no others."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from mainspring.store.acl import acl_rules
from mainspring.testing.servers import Server

ON: Final = ("valkey", "redis")
"""Where every store of the tests signs in as that user; in the cluster it is the server's own one, who may do all."""

USER: Final = "narrow"
SECRET: Final = "narrow-secret"


TESTS_OWN: Final = (
    "memory|usage", "rpop", "pttl", "hkeys", "rename", "keys", "dump", "restore", "zincrby", "config|set",
)  # fmt: skip
"""Commands that some tests send through a store; the product never sends these."""


class Addressed(Protocol):
    url: str


def rules(namespaces: str) -> list[str]:
    """For all namespaces of this pattern: tests make up their names."""
    printed = acl_rules("NAMESPACE", secret=SECRET)
    return [rule.replace("{NAMESPACE", "{" + namespaces) for rule in printed]


def sign_in(fleet: Addressed, servers: Sequence[Server], namespaces: str = "t*", more: Sequence[str] = ()) -> None:
    """From now on the fleet's URL is that of the narrow user; what tests ask a server directly is not."""
    for server in servers:
        answer: Any = server.call("ACL", "SETUSER", USER, *rules(namespaces), *more)
        assert answer == b"OK", answer
    fleet.url = fleet.url.replace("://", f"://{USER}:{SECRET}@", 1)
