"""The audit trail: `{<namespace>}:audit`, a stream of bounded length. The server gives each entry its time."""

import re
from typing import Final

import msgspec

from ..model.audit import Audited, AuditPage, Change
from ..model.errors import InvalidInput
from .store import Store

FIELD: Final = b"c"
KEPT: Final = 10_000
_PLACE: Final = re.compile(r"\d{1,15}-\d{1,15}")
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Change).decode


async def record(store: Store, change: Change, *, kept: int = KEPT) -> None:
    """Write one change. The oldest fall out: about `kept` stay, never fewer."""
    key = store.keys.audit
    await store.run_one(store.keys.slot, [("XADD", key, "MAXLEN", "~", kept, "*", FIELD, _encode(change))])


async def trail(store: Store, *, limit: int = 50, cursor: str | None = None) -> AuditPage:
    """A page of the trail, the newest first."""
    if type(limit) is not int or not 1 <= limit <= 1000:
        raise InvalidInput(f"limit is {limit!r}; it must lie between 1 and 1000")
    if cursor is not None and not _PLACE.fullmatch(cursor):
        raise InvalidInput(f"cursor {cursor[:80]!r} is not one that the audit trail returned")
    end = "+" if cursor is None else f"({cursor}"
    [rows] = await store.run_one(store.keys.slot, [("XREVRANGE", store.keys.audit, end, "-", "COUNT", limit + 1)])
    found = [_audited(place.decode(), fields) for place, fields in rows[:limit]]
    return AuditPage(found, found[-1].id if len(rows) > limit else None)


def _audited(place: str, fields: list[bytes]) -> Audited:
    try:
        change = _decode(dict(zip(fields[::2], fields[1::2], strict=True))[FIELD])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        change = Change("", "unreadable", f"the entry cannot be read: {error}")
    return Audited(place, int(place.partition("-")[0]), change)
