"""One request on its way to its handler."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..client import Client
from ..model.access import ApiKey
from ..model.audit import Change
from ..model.errors import Conflict, OutOfMemory
from ..node import Node
from ..store import audit
from ..store.ended import in_index
from .asgi import Headers, Receive
from .gate import check_target
from .problems import Problem, not_ready
from .spaces import Space

if TYPE_CHECKING:
    from .app import App


NO_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType({})


class Call(msgspec.Struct):
    """Who calls, what for, and what with."""

    app: "App"
    key: ApiKey
    address: str
    space: Space | None
    """None on routes that are open to everybody."""
    headers: Headers
    receive: Receive
    params: Mapping[str, str] = NO_PARAMETERS
    query: Any = None
    body: Any = None
    raw_body: bytes = b""
    method: bytes = b""
    path: bytes = b""
    query_string: bytes = b""

    @property
    def client(self) -> Client:
        return self.put_into.client

    @property
    def put_into(self) -> Space:
        if self.space is None:
            raise not_ready("the node is starting or stopping")
        return self.space

    @property
    def node(self) -> Node:
        return self.app.node

    @property
    def namespace(self) -> str:
        return self.client.store.keys.namespace

    @property
    def who(self) -> str:
        """As the audit trail names the caller."""
        return self.key.id if not self.key.hash else f"{self.key.id} ({self.key.name})"

    @property
    def may_reach_all(self) -> bool:
        return self.key.targets is None

    def check_target(self, target: str) -> None:
        """Refuse to send anything where this key may not."""
        check_target(self.key, target)

    def check_seen(self, target: str | None, what: str, name: str) -> None:
        """What goes elsewhere than this key may reach is not there for it."""
        if not self.key.sees(target):
            raise no_such(what, name)

    async def check_not_others(self, task_id: str, lane: str | None = None) -> None:
        """What a key may not see it may not replace either, nor be told of as its own."""
        if self.may_reach_all:
            return
        known = await in_index(self.client.store, task_id, lane)
        if known.state != "unknown" and not self.key.sees(known.target):
            raise Conflict(f"the id {task_id!r} is taken")

    def check_unbound(self) -> None:
        """For what concerns all targets at once."""
        if not self.may_reach_all:
            raise Problem("forbidden", "this key is bound to targets, and this concerns all of them")

    async def audit(
        self, what: str, name: str, before: dict[str, Any] | None = None, after: dict[str, Any] | None = None
    ) -> None:
        """Write down what was changed; the answer waits for it."""
        change = Change(self.who, what, name, self.address, self.key.role, before, after)
        try:
            await audit.record(self.client.store, change, kept=self.node.config.audit_entries)
        except OutOfMemory:
            # On a full server work must still be cancelled and dropped, or it would stay full.
            self.app.tell_unaudited(change)


def no_such(what: str, name: str) -> Problem:
    return Problem("not-found", f"there is no {what} {name[:300]!r}")
