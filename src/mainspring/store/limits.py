"""Limits that all nodes of a namespace share: permits of a rate, slots of what may run at one time."""

from collections.abc import Sequence
from typing import NamedTuple

from ..model.rate import Limit
from .store import Store
from .wire import Arg


class Ask(NamedTuple):
    """What a node wants of one limit."""

    name: str
    limit: Limit
    used: int
    """Slots that it holds and uses; those it holds and does not use are given back."""
    want: int


class Granted(NamedTuple):
    permits: int
    slots: int
    """What it may use from now on, of what it has too: less than that where others want their share."""
    wait_ms: int
    """Worth asking again after this; 0 when all was granted."""


async def ask(store: Store, node: str, asks: Sequence[Ask], lease_ms: int) -> list[Granted]:
    """One call for all; a lost reply costs permits, never breaks a limit."""
    calls = []
    for name, limit, used, want in asks:
        rate = limit.rate
        interval_us = 0.0 if rate is None else rate.interval_us
        burst = 0 if rate is None else rate.at_once
        args: list[Arg] = [node, used, want, lease_ms, repr(interval_us), burst, limit.concurrency or 0]
        calls.append(store.scripts.call("allow", [store.keys.limit(name)], args))
    replies = await store.run_one(store.keys.slot, calls)
    return [Granted(granted, slots, -(-wait_us // 1000)) for _, granted, slots, wait_us in replies]
