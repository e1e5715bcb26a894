"""API keys and the audit trail of a namespace: rights of callers, and a record of their changes."""

import logging
import re
import secrets
from typing import Final

import msgspec

from ..model.access import ApiKey
from ..model.audit import Audited, AuditPage, Change
from ..model.errors import InvalidInput
from .store import Store

log = logging.getLogger("mainspring.access")


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ApiKey).decode


def new_key_id() -> str:
    """Return a name for a key in lists and in the audit trail; it grants no access."""
    return f"k{secrets.token_hex(5)}"


async def add_key(store: Store, key: ApiKey) -> None:
    await store.run_one(store.keys.slot, [("HSET", store.keys.access, key.id, _encode(key))])


async def list_keys(store: Store) -> list[ApiKey]:
    """Return all keys, oldest first. An unreadable record authenticates no caller, and is logged."""
    [reply] = await store.run_one(store.keys.slot, [("HGETALL", store.keys.access)])
    found = []
    for name, record in zip(reply[::2], reply[1::2], strict=True):
        try:
            found.append(_decode(record))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("API key %s cannot be read and authenticates no caller: %s", name.decode(errors="replace"), error)
    return sorted(found, key=lambda key: (key.created_ms, key.id))


async def revoke_key(store: Store, key_id: str) -> ApiKey | None:
    """Delete a key; return None if there is none. Nodes notice within a second or two.

    An unreadable record was never a valid key: it is removed, and reported as None.
    """
    keys = store.keys
    record, removed = await store.run_one(keys.slot, [("HGET", keys.access, key_id), ("HDEL", keys.access, key_id)])
    if record is None or not removed:
        return None
    try:
        return _decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the record of API key %s could not be read (%s); it is removed", key_id, error)
        return None


AUDIT_FIELD: Final = b"c"
AUDIT_KEPT: Final = 10_000
_PLACE: Final = re.compile(r"\d{1,15}-\d{1,15}")
_encode_change: Final = msgspec.json.Encoder().encode
_decode_change: Final = msgspec.json.Decoder(Change).decode


async def record_change(store: Store, change: Change, *, kept: int = AUDIT_KEPT) -> None:
    """Write one change and drop the oldest: about `kept` remain, never fewer.

    Changes of tasks have a stream of their own: thousands a second must not push out the record of who made a key or
    paused a target.
    """
    key = store.keys.task_audit if change.what.startswith("task.") else store.keys.audit
    await store.run_one(store.keys.slot, [("XADD", key, "MAXLEN", "~", kept, "*", AUDIT_FIELD, _encode_change(change))])


async def read_audit(store: Store, *, limit: int = 50, cursor: str | None = None) -> AuditPage:
    """Return a page of the trail, newest first. It may exceed `limit` by one change: two may share an id."""
    if type(limit) is not int or not 1 <= limit <= 1000:
        raise InvalidInput(f"limit is {limit!r}; it must lie between 1 and 1000")
    if cursor is not None and not _PLACE.fullmatch(cursor):
        raise InvalidInput(f"cursor {cursor[:80]!r} is not one that the audit trail returned")
    end = "+" if cursor is None else f"({cursor}"
    streams = (store.keys.audit, store.keys.task_audit)
    pages = await store.run_one(store.keys.slot, [("XREVRANGE", key, end, "-", "COUNT", limit + 1) for key in streams])
    found = sorted((_audited(place.decode(), fields) for page in pages for place, fields in page), key=_place_of)[::-1]
    # The cursor is an id, so two changes with the same id must be on the same page.
    size = limit + (len(found) > limit and found[limit].id == found[limit - 1].id)
    return AuditPage(found[:size], found[size - 1].id if len(found) > size else None)


def _place_of(one: Audited) -> tuple[int, int]:
    ms, _, number = one.id.partition("-")
    return int(ms), int(number)


def _audited(place: str, fields: list[bytes]) -> Audited:
    try:
        change = _decode_change(dict(zip(fields[::2], fields[1::2], strict=True))[AUDIT_FIELD])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        change = Change("", "unreadable", f"the entry cannot be read: {error}")
    return Audited(place, int(place.partition("-")[0]), change)
