"""Which callers' ids were cancelled last. The index forgets a cancelled id at once: it may be used again.

Written after the cancel, and only for people who ask what became of a task. What is lost here changes nothing else.
"""

from collections.abc import Iterable
from typing import Final

from ..model.errors import StoreError
from .store import Group, Store

KEPT: Final = 256
"""Of a partition; 16 bytes each."""


async def note(store: Store, cancelled: Iterable[tuple[int, bytes]]) -> None:
    """Of (partition, idh). Where a server does not answer nothing is noted."""
    by_partition: dict[int, list[bytes]] = {}
    for partition, idh in cancelled:
        by_partition.setdefault(partition, []).append(idh)
    groups: list[Group] = []
    for partition, idhs in by_partition.items():
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("RPUSH", keys.off, *idhs[-KEPT:]), ("LTRIM", keys.off, -KEPT, -1)]))
    if groups:
        await store.run(groups)


async def was_cancelled(store: Store, idh: bytes, partitions: Iterable[int]) -> bool:
    """Is the id among them, in one of these partitions?"""
    return idh in await last_cancelled(store, partitions)


async def last_cancelled(store: Store, partitions: Iterable[int]) -> set[bytes]:
    """The hashes of the ids that were cancelled last in these partitions."""
    groups: list[Group] = []
    for partition in partitions:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("LRANGE", keys.off, 0, -1)]))
    results = await store.run(groups)
    return {idh for result in results if not isinstance(result, StoreError) for idh in result[0]}
