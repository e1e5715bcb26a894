"""What runs have left behind. Those of workers are written by `queue_finish.lua`, together with the end of the job."""

from collections.abc import Sequence
from typing import NamedTuple

from ..model.result import Result, decode_result
from .find import Reference
from .store import Group, Store


class KeptResult(NamedTuple):
    """An encoded result, and for how long it is kept."""

    partition: int
    idh: bytes
    data: bytes
    ttl_ms: int


async def keep_results(store: Store, results: Sequence[KeptResult]) -> None:
    """Write them; the first refusal is raised when all were sent."""
    by_partition: dict[int, list[KeptResult]] = {}
    for one in results:
        by_partition.setdefault(one.partition, []).append(one)
    groups: list[Group] = []
    for partition, some in by_partition.items():
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("SET", keys.result(one.idh), one.data, "PX", one.ttl_ms) for one in some]))
    for answer in await store.run(groups):
        if isinstance(answer, Exception):
            raise answer


async def read_result(store: Store, reference: Reference) -> Result | None:
    """The kept result of a task; with an id alone, every partition is asked."""
    every = range(len(store.keys)) if reference.elsewhere else (reference.home,)
    groups: list[Group] = []
    for partition in every:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("GET", keys.result(reference.idh))]))
    found = None
    for answer in await store.run(groups):
        if isinstance(answer, Exception):
            raise answer
        if answer[0] is not None:
            found = decode_result(answer[0])
    return found
