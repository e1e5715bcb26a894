"""How safe a put must be before it is confirmed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import hiredis

from ..model.errors import InvalidInput, NotConfirmed, StoreError
from .redis.connection import RedisCommand

WAIT_MS: Final = 5_000


class Pipeline(Protocol):
    async def __call__(self, commands: Sequence[RedisCommand], *, timeout_s: float | None) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Durability:
    """A durability level: `server`, `disk` or `replicas=n`."""

    text: str
    confirm: RedisCommand | None = None
    needed: int = 0


SERVER: Final = Durability("server")


def check_durability(value: str) -> Durability:
    if value == "server":
        return SERVER
    if value == "disk":
        return Durability(value, ("WAITAOF", 1, 0, WAIT_MS), 1)
    match = re.fullmatch(r"replicas=([1-9]\d?)", str(value))
    if match is None:
        raise InvalidInput(f"durability {value!r}: use 'server', 'disk' or 'replicas=n' with n from 1 to 99")
    return Durability(value, ("WAIT", int(match[1]), WAIT_MS), int(match[1]))


def executed(result: list[Any] | StoreError) -> list[Any] | None:
    """Return the replies to the writes, confirmed or not; None if it is unknown whether they were applied."""
    if isinstance(result, NotConfirmed):
        return None if result.replies is None else list(result.replies)
    return None if isinstance(result, StoreError) else result


async def confirm(pipeline: Pipeline, durability: Durability) -> NotConfirmed | None:
    """Wait, on the connection that wrote, until the level is reached; otherwise return what is missing."""
    assert durability.confirm is not None
    [reply] = await pipeline([durability.confirm], timeout_s=WAIT_MS / 1000 + 5)
    if isinstance(reply, hiredis.ReplyError):
        if durability.text == "disk" and await _always_synced(pipeline):
            return None
        reason = f"the server cannot confirm it: {reply}"
        if durability.text == "disk":
            reason += "; it needs Valkey or Redis 7.2 with appendonly yes, or appendfsync always"
    else:
        reached = reply[0] if isinstance(reply, list) else reply
        if reached >= durability.needed:
            return None
        reason = f"{reached} of {durability.needed} confirmed within {WAIT_MS / 1000:g} s"
    return NotConfirmed(f"stored, but {durability.text} is not confirmed ({reason}); repeat with the same id")


async def _always_synced(pipeline: Pipeline) -> bool:
    """Return whether the server syncs every write to disk before it replies: then there is nothing to wait for."""
    [reply] = await pipeline([("CONFIG", "GET", "append*")], timeout_s=5)
    if isinstance(reply, hiredis.ReplyError):
        return False
    settings = dict(zip(reply[::2], reply[1::2], strict=True))
    return settings.get(b"appendonly") == b"yes" and settings.get(b"appendfsync") == b"always"
