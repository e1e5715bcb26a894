"""The counters of a namespace: every accepted task is in exactly one place.

Tasks are counted row by row, independently of `store/verify/keys.py`, which counts by lengths and bitmaps; tests
compare the two. This module reads everything at once and is meant for tests; on a large server use `mainspring verify`.
"""

from typing import Any, NamedTuple

from ..store.codec import RESENT
from ..store.keys import PartitionKeys
from ..store.redis.connection import RedisCommand
from ..store.store import Store

_COUNTERS = ("accepted", "queued", "done", "cancelled", "replaced", "dead", "retried", "spilled", "aside")


class Balance(NamedTuple):
    """Counts with the invariant accepted = pending + fired + queued + done + cancelled + replaced + dead."""

    accepted: int = 0
    pending: int = 0
    fired: int = 0
    queued: int = 0
    done: int = 0
    cancelled: int = 0
    replaced: int = 0
    dead: int = 0
    retried: int = 0
    spilled: int = 0
    resent: int = 0
    """Rows marked as sent again; not part of the sum."""
    aside: int = 0
    """Tasks of lanes that are in queues; they count as fired."""
    places: int = 0
    """Tasks in queues, by their recorded places (`places`) and by the streams (`streamed`)."""
    streamed: int = 0

    @property
    def even(self) -> bool:
        return self.missing == 0 and self.queued + self.aside == self.places == self.streamed

    @property
    def missing(self) -> int:
        """Accepted tasks that are nowhere; negative if there are more tasks than were accepted."""
        settled = self.done + self.cancelled + self.replaced + self.dead
        return self.accepted - self.pending - self.fired - self.queued - settled


async def balance(store: Store) -> Balance:
    """Return the sum over all partitions; raise AssertionError if one of them does not add up."""
    total = Balance()
    for keys in store.keys.partitions:
        one = await partition_balance(store, keys)
        assert one.even, uneven(keys, one)
        total = Balance(*(a + b for a, b in zip(total, one, strict=True)))
    return total


def uneven(keys: PartitionKeys, one: Balance) -> str:
    """Describe what is wrong with the counters of a partition."""
    if one.missing:
        return f"partition {keys.number}: {one.missing} tasks are missing in {one}"
    return f"partition {keys.number}: the queues do not match the counters in {one}"


_READ = """#!lua flags=no-writes,allow-oom
local out = {redis.call('HMGET', KEYS[2], unpack(ARGV, 2)), {redis.call('HLEN', KEYS[3]), 0}}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  out[2][2] = out[2][2] + redis.call('XLEN', ARGV[1] .. 'q:' .. name)
end
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  out[#out + 1] = redis.call('LRANGE', ARGV[1] .. 's:' .. name, 0, -1)
  for _, kind in ipairs({'f:', 'd:', 'x:'}) do
    out[#out + 1] = redis.call('GET', ARGV[1] .. kind .. name) or ''
  end
end
return out
"""


async def partition_balance(store: Store, keys: PartitionKeys) -> Balance:
    """Return the counts of one partition, read atomically."""
    prefix = keys.slices.removesuffix("slices")
    command: RedisCommand = ("EVAL", _READ, 4, keys.slices, keys.n, keys.queued, keys.queues, prefix, *_COUNTERS)
    [reply] = await store.run_one(keys.slot, [command])
    return _count(reply)


def _count(reply: list[list[Any]]) -> Balance:
    counters = dict(zip(_COUNTERS, (int(value or 0) for value in reply[0]), strict=True))
    places, streamed = reply[1]
    states = {"pending": 0, "fired": 0, "resent": 0, "places": places, "streamed": streamed}
    for at in range(2, len(reply), 4):
        rows, f, d, x = reply[at : at + 4]
        for index, row in enumerate(rows):
            states["resent"] += len(row) > 4 and bool(row[4] & RESENT)
            if not _is_set(x, index) and not _is_set(d, index):
                states["fired" if _is_set(f, index) else "pending"] += 1
    return Balance(**counters, **states)


def _is_set(bits: bytes | list[bytes] | None, index: int) -> bool:
    if not isinstance(bits, bytes) or index >> 3 >= len(bits):
        return False
    return bool(bits[index >> 3] & (0x80 >> (index & 7)))
