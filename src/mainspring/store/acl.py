"""The commands and keys that Mainspring needs on a server, as one ACL line.

The list covers what the store sends and what its scripts call. A test reads both and fails on a command missing
here; another runs much of the integration tests as a user with exactly these rights. The list leaves out CONFIG and
DEBUG, which managed services deny, and every command that reaches beyond the keys of a namespace.
"""

import hashlib
from collections.abc import Iterator
from typing import Final

from .keys import check_namespace

CONNECTION: Final = (
    "asking",
    "client|setname",
    "cluster|info",
    "cluster|slots",
    "info",
    "ping",
    "role",
    "select",
    "time",
)
"""Topology, time and checks. `info` is for the start-up checks and `mainspring doctor`."""

TRANSACTIONS: Final = ("eval", "evalsha", "exec", "multi", "wait")

CHANNELS: Final = ("spublish", "ssubscribe")

DATA: Final = (
    # texts and bitmaps
    "bitcount", "bitpos", "del", "exists", "get", "getbit", "getrange", "mget", "mset", "object|encoding", "persist",
    "pexpire", "set", "setbit", "setrange", "unlink",
    # hashes
    "hdel", "hexists", "hget", "hgetall", "hincrby", "hlen", "hmget", "hrandfield", "hscan", "hset", "hsetnx", "hvals",
    # lists
    "lindex", "llen", "lpos", "lpush", "lrange", "lset", "ltrim", "rpush",
    # sets and sorted sets
    "sadd", "smembers", "srem", "sscan", "zadd", "zcard", "zcount", "zmscore", "zrange", "zrank", "zrem", "zscan",
    "zscore",
    # streams
    "xack", "xadd", "xautoclaim", "xclaim", "xdel", "xgroup|create", "xinfo|groups", "xlen", "xpending", "xrange",
    "xreadgroup", "xrevrange",
)  # fmt: skip

VERIFY: Final = ("scan", "type")
"""For `mainspring verify`, which scans all keys; SCAN also shows the names of keys of other programs."""

DISK: Final = ("waitaof",)
"""For `durability="disk"`. Redis 7.0 does not know the command and refuses a rule that names it."""


def commands(*, disk: bool = False) -> list[str]:
    """Return every command the user may send; a subcommand follows a bar."""
    return sorted([*CONNECTION, *TRANSACTIONS, *CHANNELS, *DATA, *VERIFY, *(DISK if disk else ())])


def _rules(namespace: str, *, disk: bool) -> Iterator[str]:
    check_namespace(namespace)
    for pattern in (f"{{{namespace}}}:*", f"{{{namespace}:*"):
        yield f"~{pattern}"
        yield f"&{pattern}"
    yield "-@all"
    yield from (f"+{name}" for name in commands(disk=disk))


def acl_rules(namespace: str, *, secret: str | None = None, disk: bool = False) -> list[str]:
    """Return the arguments of `ACL SETUSER <user>`, with a placeholder if there is no secret."""
    password = ">PASSWORD" if secret is None else "#" + hashlib.sha256(secret.encode()).hexdigest()
    return ["reset", "on", password, *_rules(namespace, disk=disk)]
