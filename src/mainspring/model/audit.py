"""One change as the audit trail tells it. Never a payload, never a secret."""

from typing import Any

import msgspec


class Change(msgspec.Struct, frozen=True, omit_defaults=True, rename={"address": "from"}):
    """Who did what to which object, from where; `before` and `after` hold only what changed."""

    who: str
    what: str
    """`task.cancel`, `dead.drop`, `key.add`, …"""
    object: str
    address: str = ""
    role: str = ""
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class Audited(msgspec.Struct, frozen=True):
    """A change in the trail: its place there, and when it was written, by the server's clock."""

    id: str
    at_ms: int
    change: Change


class AuditPage(msgspec.Struct, frozen=True):
    """The newest first, and where to go on (None at the end)."""

    changes: list[Audited]
    next: str | None
