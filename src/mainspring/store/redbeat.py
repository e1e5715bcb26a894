"""Keys of other schedulers whose schedules can be imported."""

import hiredis

from ..model.errors import Refused
from .redis.servers import LinkOptions, Servers


async def hash_fields(url: str, prefix: str, field: str) -> dict[str, str]:
    """Return one field of every hash with this key prefix; skip keys of other types and hashes without the field."""
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
