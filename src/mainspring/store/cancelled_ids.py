"""Which callers' ids were cancelled last. The index forgets a cancelled id at once: it may be used again.

Written after the cancel, and only for people who ask what became of a task. What is lost here changes nothing else.
"""

from collections.abc import Iterable
from typing import Final

from ..model.errors import StoreError
from ..model.ids import IDH_BYTES
from .store import Group, Store

KEPT: Final = 256
"""Of a partition; 22 bytes each."""

_TIME_BYTES: Final = 6


async def note(store: Store, cancelled: Iterable[tuple[int, bytes]]) -> None:
    """Of (partition, idh), with the time: what else is kept under the id may be older or newer. Where a server does
    not answer nothing is noted."""
    by_partition: dict[int, list[bytes]] = {}
    for partition, idh in cancelled:
        by_partition.setdefault(partition, []).append(idh)
    if not by_partition:
        return
    time = (await store.fresh_ms()).to_bytes(_TIME_BYTES, "big")
    groups: list[Group] = []
    for partition, idhs in by_partition.items():
        keys = store.keys.partitions[partition]
        last = [idh + time for idh in idhs[-KEPT:]]
        groups.append((keys.slot, [("RPUSH", keys.off, *last), ("LTRIM", keys.off, -KEPT, -1)]))
    await store.run(groups)


async def last_cancelled(store: Store, partitions: Iterable[int]) -> dict[bytes, int]:
    """The hashes of the ids that were cancelled last in these partitions, and when."""
    groups: list[Group] = []
    for partition in partitions:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("LRANGE", keys.off, 0, -1)]))
    results = await store.run(groups)
    found = [one for result in results if not isinstance(result, StoreError) for one in result[0]]
    return {one[:IDH_BYTES]: _time_ms(one) for one in sorted(found, key=_time_ms)}


def _time_ms(noted: bytes) -> int:
    return int.from_bytes(noted[IDH_BYTES:], "big")
