"""Shared by tests of verify: damage by raw commands, finding it, repairing it."""

from typing import Any

from mainspring.store.keys import PartitionKeys, partition_of
from mainspring.store.store import Store
from mainspring.store.verify.checks import verify
from mainspring.store.verify.report import KINDS, Report


async def raw(store: Store, partition: int, *command: Any) -> Any:
    [reply] = await store.run_one(store.keys.partitions[partition].slot, [command])
    return reply


async def found(store: Store) -> dict[str, int]:
    report = await verify(store)
    assert report.left == report.found.total()
    assert set(report.found) <= set(KINDS)
    return dict(report.found)


async def repaired(store: Store) -> Report:
    """Repair, all of it; and a second look finds nothing."""
    report = await verify(store, repair=True)
    assert report.left == 0, report.as_dict()
    assert all(one.repair is not None and one.repair.text for one in report.reported), "every repair is reported"
    assert await found(store) == {}
    return report


def home(store: Store, name: str) -> PartitionKeys:
    """The partition of a lane or an id."""
    return store.keys.partitions[partition_of(name, len(store.keys))]
