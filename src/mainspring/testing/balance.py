"""The books of a namespace: every accepted task is somewhere, and in one place only."""

from typing import NamedTuple

from ..model.errors import StoreError
from ..store.codec import RESENT
from ..store.keys import PartitionKeys
from ..store.store import Store
from ..store.wire import Command

_COUNTERS = ("accepted", "done", "cancelled", "replaced", "dead", "retried")
_TRIES = 100


class Balance(NamedTuple):
    """accepted = pending + fired + done + cancelled + replaced + dead, at every moment."""

    accepted: int = 0
    pending: int = 0
    fired: int = 0
    done: int = 0
    cancelled: int = 0
    replaced: int = 0
    dead: int = 0
    retried: int = 0
    resent: int = 0
    """Rows marked as sent again; not part of the sum."""

    @property
    def even(self) -> bool:
        return self.missing == 0

    @property
    def missing(self) -> int:
        """Accepted tasks that are nowhere; negative: tasks that nobody accepted."""
        settled = self.done + self.cancelled + self.replaced + self.dead
        return self.accepted - self.pending - self.fired - settled


async def balance(store: Store) -> Balance:
    """The sum over all partitions; raises AssertionError when one of them does not add up."""
    total = Balance()
    for keys in store.keys.partitions:
        one = await partition_balance(store, keys)
        assert one.even, f"partition {keys.number}: {one.missing} tasks are missing in {one}"
        total = Balance(*(a + b for a, b in zip(total, one, strict=True)))
    return total


async def partition_balance(store: Store, keys: PartitionKeys) -> Balance:
    """One partition, read in one transaction."""
    for _ in range(_TRIES):
        [[names]] = [await store.run_one(keys.slot, [("ZRANGE", keys.slices, 0, -1)])]
        commands: list[Command] = [
            ("MULTI",),
            ("ZRANGE", keys.slices, 0, -1),
            ("HMGET", keys.n, *_COUNTERS),
        ]
        for name in names:
            s, f, d, x = keys.slice_keys(name.decode())
            commands += [("LRANGE", s, 0, -1), ("GET", f), ("GET", d), ("GET", x)]
        reply = (await store.run_one(keys.slot, [*commands, ("EXEC",)]))[-1]
        if reply[0] == names:
            return _count(reply)
    raise StoreError("the list of slices keeps changing")


def _count(reply: list[list[bytes]]) -> Balance:
    counters = dict(zip(_COUNTERS, (int(value or 0) for value in reply[1]), strict=True))
    states = {"pending": 0, "fired": 0, "resent": 0}
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
