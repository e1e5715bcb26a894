"""Reading what runs have left behind; `queue_finish.lua` writes it."""

from ..model.result import Result, decode_result
from .find import Reference
from .store import Group, Store


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
