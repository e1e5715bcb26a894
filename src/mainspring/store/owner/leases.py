"""Owning partitions: acquire, renew, release. See docs/internals/protocol.md#ownership."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...model.errors import StoreError
from ..redis.connection import Arg
from ..redis.sender import Group
from ..store import Store


class Acquired(NamedTuple):
    token: bytes


class Busy(NamedTuple):
    owner: str
    left_ms: int


AcquireAnswer = Acquired | Busy | StoreError


async def acquire(
    store: Store, partitions: Sequence[int], *, owner: str, nonce: str, lease_ms: int, free_ms: int = 0
) -> list[AcquireAnswer]:
    """Try to become the owner of each partition that had no owner in the last `free_ms`."""
    args: list[Arg] = [owner, nonce, lease_ms, free_ms]
    groups: list[Group] = []
    for p in partitions:
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [store.scripts.call("acquire", [keys.own, keys.fence], args)]))
    answers: list[AcquireAnswer] = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            answers.append(result)
            continue
        [reply] = result
        store.clock.sample(reply[0])
        answers.append(Acquired(reply[2]) if reply[1] == b"ok" else Busy(reply[2].decode(), reply[3]))
    return answers


async def renew(store: Store, tokens: Mapping[int, bytes], *, lease_ms: int) -> dict[int, bool | StoreError]:
    """Renew the leases; False for a partition that has another owner now."""
    owned = list(tokens)
    # A script may not span slots in a cluster; on one server all leases are one call.
    chunks = [[p] for p in owned] if store.servers.cluster else [owned]
    groups: list[Group] = []
    for chunk in chunks:
        owns = [store.keys.partitions[p].own for p in chunk]
        call = store.scripts.call("renew", owns, [lease_ms, *(tokens[p] for p in chunk)])
        groups.append((store.keys.partitions[chunk[0]].slot, [call]))
    answers: dict[int, bool | StoreError] = {}
    for chunk, result in zip(chunks, await store.run(groups) if owned else [], strict=False):
        if isinstance(result, StoreError):
            answers.update(dict.fromkeys(chunk, result))
            continue
        [reply] = result
        store.clock.sample(reply[0])
        answers.update({p: status == b"ok" for p, status in zip(chunk, reply[1:], strict=True)})
    return answers


async def last_calls(store: Store, tokens: Mapping[int, bytes]) -> dict[int, int | StoreError]:
    """Return the number of each owner's last call that the server remembers; -1 if it remembers another owner."""
    if not tokens:
        return {}
    chunks = [[p] for p in tokens] if store.servers.cluster else [list(tokens)]
    groups: list[Group] = []
    for chunk in chunks:
        keys = [store.keys.partitions[p] for p in chunk]
        groups.append((keys[0].slot, [("MGET", *(one.fence for one in keys))]))
    answers: dict[int, int | StoreError] = {}
    for chunk, result in zip(chunks, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            answers.update(dict.fromkeys(chunk, result))
            continue
        for p, fence in zip(chunk, result[0], strict=True):
            token, _, number = (fence or b"").rpartition(b":")
            answers[p] = int(number) if token == tokens[p] else -1
    return answers


def token_granted_to(nonce: str) -> bytes:
    """Return a stand-in for the token of an acquire whose answer was lost; only `release` accepts it."""
    return b"." + nonce.encode()


async def release(store: Store, tokens: Mapping[int, bytes]) -> dict[int, bool | StoreError]:
    """Release partitions; False for one that was not this owner's (any more).

    It may be repeated. A partition that cannot be reached becomes free when its lease ends.
    """
    groups: list[Group] = []
    for p, token in tokens.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [store.scripts.call("release", [keys.own, keys.fence], [token])]))
    results = await store.run(groups) if groups else []
    return {
        p: result if isinstance(result, StoreError) else result[0][1] == b"ok"
        for p, result in zip(tokens, results, strict=True)
    }
