"""Keys of other programs, to be taken over."""

import hiredis

from ..model.errors import Refused
from .redis.servers import LinkOptions, Servers


async def hash_fields(url: str, prefix: str, field: str) -> dict[str, str]:
    """One field of every hash whose key begins so; keys of other types and hashes without it are left out."""
    servers = await Servers.connect(url, LinkOptions())
    found: dict[str, str] = {}
    try:
        for primary in servers.all():
            cursor = b"0"
            while True:
                [reply] = await primary.pipeline([("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 500)])
                if isinstance(reply, hiredis.ReplyError):
                    raise Refused(f"the server refused: {reply}")
                cursor, keys = reply
                values = await primary.pipeline([("HGET", key, field) for key in keys]) if keys else []
                for key, value in zip(keys, values, strict=True):
                    if isinstance(value, bytes):
                        found[key.decode(errors="replace")] = value.decode(errors="replace")
                if cursor == b"0":
                    break
    finally:
        await servers.aclose()
    return found
