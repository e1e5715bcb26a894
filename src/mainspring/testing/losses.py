"""The cost of a failure: compares every accepted task with the deliveries and the tasks that are still stored.

    handles = [await client.put("log:", n, after="1h", durability="replicas=1") for n in range(100)]
    …                                                    # a primary is lost, a replica is promoted
    print(report(await losses(client, handles)))         # lost at level replicas=1: 0 of 100

A task without an id of the caller's whose slice is gone looks the same whether it was finished or forgotten. So the
caller says which tasks were delivered. Any other task counts as present only if the server still has it, or it ended
there in another way.
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from ..client.client import Client
from ..model.task import Handle

_THERE: Final = frozenset({"pending", "fired", "cancelled", "replaced", "dead"})


class Loss(NamedTuple):
    """Losses at one level of durability: how many tasks were accepted, and which of them are gone."""

    level: str
    accepted: int
    lost: tuple[str, ...]

    def __str__(self) -> str:
        return f"lost at level {self.level}: {len(self.lost)} of {self.accepted}"


async def losses(client: Client, accepted: Iterable[Handle], delivered: Collection[str] = ()) -> list[Loss]:
    """Return the losses by level; `delivered` are the ids that reached their target."""
    by_level: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    reached = set(delivered)
    for handle in accepted:
        lost = by_level.setdefault(handle.durability, [])
        counts[handle.durability] = counts.get(handle.durability, 0) + 1
        # A generated id is followed by the address it got when it was put; deliveries carry the id without it.
        if handle.id not in reached and handle.id.partition("~")[0] not in reached:
            found = await client.get(handle.id)
            if found.state not in _THERE:
                lost.append(handle.id)
    return [Loss(level, counts[level], tuple(lost)) for level, lost in by_level.items()]


def report(found: Iterable[Loss]) -> str:
    """Return one line per level."""
    return "\n".join(map(str, found))
