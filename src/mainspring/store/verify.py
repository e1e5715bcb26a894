"""Proves that every accepted task is somewhere, finds what belongs to nothing, and repairs it on request.

Everything is read while nodes and clients go on. What is compared with each other is read in one step of the server, so
traffic is never mistaken for damage; each step looks at a bounded number of slices, ids or keys. A repair checks
again, in the same step in which it writes, and never removes an entry.
"""

from collections.abc import Callable
from typing import Final

from .keys import PartitionKeys
from .store import Store
from .verify_books import check_books
from .verify_count import read_partition
from .verify_dead import check_dead_letters
from .verify_holds import check_holds
from .verify_index import check_index
from .verify_keys import check_keys, check_types
from .verify_lanes import check_lanes
from .verify_queues import check_queues
from .verify_report import Books, Finding, Repair, Report
from .verify_schedules import check_schedules
from .verify_slices import check_slices

__all__ = ["CHECKS", "Books", "Finding", "Repair", "Report", "verify"]

Progress = Callable[[int, int], None]
"""Called with how many partitions were looked through, and how many there are."""

CHECKS: Final = (check_index, check_lanes, check_holds, check_dead_letters, check_queues, check_schedules)
"""What is looked at in each partition once its slices are in order. To find something new, write such a function, add
it here, and name what it finds in `verify_report.KINDS`; a new key belongs into `verify_keys`."""


async def verify(store: Store, *, repair: bool = False, progress: Progress | None = None) -> Report:
    """Look through a whole namespace; with `repair`, set right what can be. `progress` is told of each partition."""
    report = Report(store.keys.namespace, len(store.keys), repair=repair)
    unreadable: set[int] = set()
    async for finding in check_types(store):
        unreadable |= _partition_of(finding)
        await report.take(finding)
    async for finding in check_keys(store, unreadable):
        if finding.kind == "wrong-type":
            unreadable |= _partition_of(finding)
        await report.take(finding)
    for keys in store.keys.partitions:
        if keys.number not in unreadable:
            await _verify_partition(store, keys, report, repair=repair)
        if progress is not None:
            progress(keys.number + 1, len(store.keys))
    return report


def _partition_of(finding: Finding) -> set[int]:
    return set() if finding.partition is None else {finding.partition}


async def _verify_partition(store: Store, keys: PartitionKeys, report: Report, *, repair: bool) -> None:
    reading = await read_partition(store, keys)
    # First, for ids lead into slices.
    async for finding in check_slices(store, keys, reading):
        await report.take(finding)
    for check in CHECKS:
        async for finding in check(store, keys):
            await report.take(finding)
    if repair:
        reading = await read_partition(store, keys)
    async for finding in check_books(store, keys, reading):
        await report.take(finding)
        if repair:
            reading = await read_partition(store, keys)
    report.slices += len(reading.slices)
    report.books[keys.number] = reading.books
