"""`/v1/audit`: who changed what."""

from typing import Final

import msgspec

from ..model.audit import AuditPage
from ..store.audit import trail
from .asgi import Answer, answer
from .call import Call
from .routes import Route


class AuditQuery(msgspec.Struct, frozen=True):
    limit: int = 50
    cursor: str | None = None


async def list_audit(call: Call) -> Answer:
    call.check_unbound()
    return answer(await trail(call.client.store, limit=call.query.limit, cursor=call.query.cursor))


ROUTE: Final = Route(
    "GET", "/v1/audit", list_audit, "admin", "The audit trail, the newest first.", query=AuditQuery,
    answers={200: AuditPage},
)  # fmt: skip
