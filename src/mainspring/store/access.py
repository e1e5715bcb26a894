"""API keys as the namespace keeps them: `{<namespace>}:access`, key id -> its record, without its text."""

import logging
import secrets
from typing import Final

import msgspec

from ..model.access import ApiKey
from .store import Store

log = logging.getLogger("mainspring.access")

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ApiKey).decode


def new_key_id() -> str:
    """Names a key in lists and in the audit trail; it opens nothing."""
    return f"k{secrets.token_hex(5)}"


async def add_key(store: Store, key: ApiKey) -> None:
    await store.run_one(store.keys.slot, [("HSET", store.keys.access, key.id, _encode(key))])


async def list_keys(store: Store) -> list[ApiKey]:
    """The oldest first. A record that cannot be read lets nobody in, and says so."""
    [reply] = await store.run_one(store.keys.slot, [("HGETALL", store.keys.access)])
    found = []
    for name, record in zip(reply[::2], reply[1::2], strict=True):
        try:
            found.append(_decode(record))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("API key %s cannot be read and lets nobody in: %s", name.decode(errors="replace"), error)
    return sorted(found, key=lambda key: (key.created_ms, key.id))


async def revoke_key(store: Store, key_id: str) -> ApiKey | None:
    """Take a key away for good; None when there is none. Nodes notice within a second or two.

    A record that cannot be read was no key to anybody: it goes, and is told as none.
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
