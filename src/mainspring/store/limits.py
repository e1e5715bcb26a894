"""Limits that all nodes of a namespace share: permits of a rate, slots of what may run at one time."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..model.flow import Limit
from .redis.connection import Arg
from .store import Store

_LEASE: Final = re.compile(rb"(\d+):\d+:(\d+)")
"""How many slots a node has, how many more it wanted, and when its lease ends."""


class Ask(NamedTuple):
    """What a node wants of one limit."""

    name: str
    limit: Limit
    used: int
    """Slots that it holds and uses; those it holds and does not use are given back."""
    want: int
    """How many more it would begin now."""
    have: int = 0
    """Permits of the rate that it has in hand."""


class Granted(NamedTuple):
    permits: int
    slots: int
    """What it may use from now on, of what it has too: less than that where others want their share."""
    wait_ms: int
    """Worth asking again after this; 0 when all was granted."""


class SlotCount(NamedTuple):
    """How many slots there are, and how many of them are leased."""

    most: int
    held: int

    @property
    def all_in_use(self) -> bool:
        return self.held >= self.most


async def running_slots(store: Store, queue: str, now_ms: int) -> SlotCount | None:
    """Return the concurrency slots of a queue; None if it has no limit, or no worker has asked yet."""
    flat = await store.run_one(store.keys.slot, [("HGETALL", store.keys.limit(running(queue)))])
    fields: dict[bytes, bytes] = dict(zip(flat[0][::2], flat[0][1::2], strict=True))
    most = int(fields.pop(b"slots", b"0"))
    leases = [lease for one in fields.values() if (lease := _LEASE.fullmatch(one)) is not None]
    held = sum(int(lease[1]) for lease in leases if int(lease[2]) > now_ms * 1000)
    return SlotCount(most, held) if most else None


def running(queue: str) -> str:
    """The name of the limit of what runs of a queue."""
    return f"running:{queue}"


async def ask(store: Store, node: str, asks: Sequence[Ask], lease_ms: int) -> list[Granted]:
    """One call for all; a lost reply costs permits, never breaks a limit."""
    calls = []
    for name, limit, used, want, have in asks:
        rate = limit.rate
        interval_us = 0.0 if rate is None else rate.interval_us
        burst = 0 if rate is None else rate.at_once
        args: list[Arg] = [node, used, want, lease_ms, repr(interval_us), burst, limit.concurrency or 0, have]
        calls.append(store.scripts.call("allow", [store.keys.limit(name)], args))
    replies = await store.run_one(store.keys.slot, calls)
    return [Granted(granted, slots, -(-wait_us // 1000)) for _, granted, slots, wait_us in replies]
