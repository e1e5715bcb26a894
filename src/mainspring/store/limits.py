"""Limits that all nodes of a namespace share: permits of a rate, concurrency slots, quotas of API keys."""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..model.flow import Limit
from .keys import HOUR_MS
from .redis.connection import Arg, RedisCommand
from .store import Store

_LEASE: Final = re.compile(rb"(\d+):\d+:(\d+)")
"""A node's lease: slots it holds, further slots it asked for, and when the lease ends."""


class Ask(NamedTuple):
    """A node's request to one limit."""

    name: str
    limit: Limit
    used: int
    """Slots in use; slots that are held but not used are returned."""
    want: int
    """Further slots it could use now."""
    have: int = 0
    """Permits of the rate that it has left."""


class Granted(NamedTuple):
    permits: int
    slots: int
    """Slots it may use from now on, in all: fewer than it has if other nodes ask for their share."""
    wait_ms: int
    """Time after which to ask again; 0 if everything was granted."""


class SlotCount(NamedTuple):
    """The number of slots, and how many of them are leased."""

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
    """Return the name of the limit on running jobs of a queue."""
    return f"running:{queue}"


async def ask(store: Store, node: str, asks: Sequence[Ask], lease_ms: int) -> list[Granted]:
    """Ask for all limits in one call; a lost reply costs permits but never exceeds a limit."""
    calls = []
    for name, limit, used, want, have in asks:
        rate = limit.rate
        interval_us = 0.0 if rate is None else rate.interval_us
        burst = 0 if rate is None else rate.at_once
        args: list[Arg] = [node, used, want, lease_ms, repr(interval_us), burst, limit.concurrency or 0, have]
        calls.append(store.scripts.call("allow", [store.keys.limit(name)], args))
    replies = await store.run_one(store.keys.slot, calls)
    return [Granted(granted, slots, -(-wait_us // 1000)) for _, granted, slots, wait_us in replies]


_MINUTE_MS: Final = 60_000
_DAY_MS: Final = 24 * HOUR_MS
_COUNTED: Final = re.compile(rb"(\d{1,15}):(tasks|bytes)")
"""A field of a quota: until when it counts, and its unit."""


class KeyPending(NamedTuple):
    """Tasks that an API key has put and that are not due yet."""

    tasks: int = 0
    payload_bytes: int = 0
    until_ms: int = 0
    """When the first part of the count expires; 0 if the count is empty."""


def counts_until_ms(due_ms: int, now_ms: int) -> int:
    """Return when a task stops counting: at the end of its minute, hour or day; the sooner it is due, the finer.

    Minutes, so that a key that puts thousands of immediate tasks a second is not charged for an hour of them; days, so
    that ten years take a few thousand fields instead of a hundred thousand.
    """
    ahead_ms = due_ms - now_ms
    width_ms = _MINUTE_MS if ahead_ms < HOUR_MS else HOUR_MS if ahead_ms < 4 * _DAY_MS else _DAY_MS
    return due_ms - due_ms % width_ms + width_ms


async def count_pending(store: Store, key_id: str, added: Mapping[int, tuple[int, int]], now_ms: int) -> KeyPending:
    """Add tasks and bytes by when they stop counting, remove expired counts, and return what the key has pending.

    Not repeated if the reply is lost: the counts may then be too low by the amount added.
    """
    key, slot = store.keys.quota(key_id), store.keys.slot
    commands: list[RedisCommand] = []
    ahead = {until_ms: counts for until_ms, counts in added.items() if until_ms > now_ms}
    for until_ms, (tasks, payload_bytes) in ahead.items():
        commands.append(("HINCRBY", key, f"{until_ms}:tasks", tasks))
        commands.append(("HINCRBY", key, f"{until_ms}:bytes", payload_bytes))
    if ahead:
        left_ms = max(ahead) - now_ms
        # GT alone never sets an expiry on a key without one; NX alone never extends one.
        commands += [("PEXPIRE", key, left_ms, "NX"), ("PEXPIRE", key, left_ms, "GT")]
    *_, flat = await store.run_one(slot, [*commands, ("HGETALL", key)])
    counted = {b"tasks": 0, b"bytes": 0}
    untils, passed = [], []
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        field = _COUNTED.fullmatch(name)
        if field is None or int(field[1]) <= now_ms:
            passed.append(name)
        else:
            counted[field[2]] += int(value)
            untils.append(int(field[1]))
    if passed:
        await store.run_one(slot, [("HDEL", key, *passed)])
    return KeyPending(counted[b"tasks"], counted[b"bytes"], min(untils, default=0))
