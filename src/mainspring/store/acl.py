"""The rights that Mainspring needs on a server, and no others, as one ACL line.

The list is what the store sends and what its scripts call; a test reads both and fails on a command that has no place
here, and another runs a good part of the integration tests as a user who may do this and nothing else. Not among
them: CONFIG and DEBUG, which managed services deny, and whatever reaches beyond the keys of a namespace.
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
"""Topology, time and checks. `info` is for the checks at the start and for `mainspring doctor`."""

TRANSACTIONS: Final = ("eval", "evalsha", "exec", "multi", "wait")

CHANNELS: Final = ("spublish", "ssubscribe")

DATA: Final = (
    # texts and bitmaps
    "bitcount", "bitpos", "del", "exists", "get", "getbit", "getrange", "mget", "mset", "object|encoding", "persist",
    "pexpire", "set", "setbit", "setrange", "unlink",
    # hashes
    "hdel", "hexists", "hget", "hgetall", "hincrby", "hlen", "hmget", "hscan", "hset", "hsetnx", "hvals",
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
"""For `mainspring verify`, which looks through all keys; SCAN shows the names of the keys of others as well."""

DISK: Final = ("waitaof",)
"""For `durability="disk"`. Redis 7.0 does not know it, and refuses a line that names it."""


def commands(*, disk: bool = False) -> list[str]:
    """Every command the user may send, a subcommand after a bar."""
    return sorted([*CONNECTION, *TRANSACTIONS, *CHANNELS, *DATA, *VERIFY, *(DISK if disk else ())])


def _rules(namespace: str, *, disk: bool) -> Iterator[str]:
    check_namespace(namespace)
    for pattern in (f"{{{namespace}}}:*", f"{{{namespace}:*"):
        yield f"~{pattern}"
        yield f"&{pattern}"
    yield "-@all"
    yield from (f"+{name}" for name in commands(disk=disk))


def acl_rules(namespace: str, *, secret: str | None = None, disk: bool = False) -> list[str]:
    """Arguments of `ACL SETUSER <user>`; a placeholder if there is no secret."""
    password = ">PASSWORD" if secret is None else "#" + hashlib.sha256(secret.encode()).hexdigest()
    return ["reset", "on", password, *_rules(namespace, disk=disk)]
