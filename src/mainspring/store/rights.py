"""Ask a server which commands its user may send, without executing any of them.

Within a transaction the server checks rights when a command is queued. So all commands are queued on a separate
connection, which is closed before EXEC: nothing is executed.
"""

import contextlib
from typing import Final

import hiredis

from .acl import commands
from .redis.connection import RedisCommand
from .redis.servers import Primary

_UNASKED: Final = frozenset({"multi", "exec", "ssubscribe", "select"})
"""These cannot be queued. Without the right to MULTI and EXEC every put fails with the server's own message."""

_KEY: Final = "KEY"
_SAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "asking": (), "client|setname": ("mainspring",), "cluster|info": (), "cluster|slots": (), "info": (), "ping": (),
    "role": (), "time": (), "eval": ("return 1", "1", _KEY), "evalsha": ("0" * 40, "1", _KEY), "wait": ("0", "1"),
    "waitaof": ("0", "0", "1"), "spublish": (_KEY, "1"), "scan": ("0",), "type": (_KEY,), "object|encoding": (_KEY,),
    "persist": (_KEY,), "pexpire": (_KEY, "1"), "mset": (_KEY, "1"), "mget": (_KEY,), "bitcount": (_KEY,),
    "bitpos": (_KEY, "0"), "getbit": (_KEY, "0"), "setbit": (_KEY, "0", "1"), "getrange": (_KEY, "0", "1"),
    "setrange": (_KEY, "0", "1"), "get": (_KEY,), "set": (_KEY, "1"), "hdel": (_KEY, "a"), "hexists": (_KEY, "a"),
    "hget": (_KEY, "a"), "hgetall": (_KEY,), "hlen": (_KEY,), "hincrby": (_KEY, "a", "1"), "hmget": (_KEY, "a"),
    "hrandfield": (_KEY,), "hscan": (_KEY, "0"), "hset": (_KEY, "a", "1"), "hsetnx": (_KEY, "a", "1"),
    "hvals": (_KEY,), "lindex": (_KEY, "0"), "llen": (_KEY,), "lpos": (_KEY, "a"), "lpush": (_KEY, "a"),
    "lrange": (_KEY, "0", "1"), "lset": (_KEY, "0", "a"), "ltrim": (_KEY, "0", "1"), "rpush": (_KEY, "a"),
    "sadd": (_KEY, "a"), "smembers": (_KEY,), "sscan": (_KEY, "0"), "srem": (_KEY, "a"), "zadd": (_KEY, "1", "a"),
    "zcard": (_KEY,), "zcount": (_KEY, "0", "1"), "zmscore": (_KEY, "a"), "zrange": (_KEY, "0", "1"),
    "zrank": (_KEY, "a"), "zrem": (_KEY, "a"), "zscan": (_KEY, "0"), "zscore": (_KEY, "a"),
    "xack": (_KEY, "w", "1-1"), "xadd": (_KEY, "*", "a", "1"), "xautoclaim": (_KEY, "w", "me", "1", "0"),
    "xclaim": (_KEY, "w", "me", "1", "1-1"), "xdel": (_KEY, "1-1"), "xgroup|create": (_KEY, "w", "0"),
    "xinfo|groups": (_KEY,), "xlen": (_KEY,), "xpending": (_KEY, "w"), "xrange": (_KEY, "-", "+"),
    "xrevrange": (_KEY, "+", "-"), "xreadgroup": ("GROUP", "w", "me", "STREAMS", _KEY, ">"), "del": (_KEY,),
    "exists": (_KEY,), "unlink": (_KEY,),
}  # fmt: skip
"""Arguments with which each command can be queued."""


def probes(key: str, *, disk: bool) -> dict[str, RedisCommand]:
    """Return one call of every command that can be probed."""
    return {
        name: (*name.upper().split("|"), *(key if one == _KEY else one for one in _SAMPLES[name]))
        for name in commands(disk=disk)
        if name not in _UNASKED
    }


async def denied(primary: Primary, key: str, *, disk: bool = False) -> list[str]:
    """Return the commands that the server denies this user for this key."""
    asked = probes(key, disk=disk)
    connection = await primary.dedicated()
    with contextlib.closing(connection):
        _, *replies = await connection.pipeline([("MULTI",), *asked.values()], timeout_s=primary.timeout_s)
    return [name for name, reply in zip(asked, replies, strict=True) if _is_denial(reply)]


def _is_denial(reply: object) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOPERM")
