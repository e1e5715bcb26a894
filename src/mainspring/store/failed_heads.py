"""The failed tasks that lanes wait for: where they stand, and whether that is still worth waiting for."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..model.errors import StoreError
from .keys import Address
from .query import Found, look_at
from .store import Group, Store


class Standing(NamedTuple):
    """The failed head of a lane, and where the index has it."""

    partition: int
    lane: str
    idh: bytes
    place: bytes


def waits_for(lane: str, found: Found) -> bool:
    """Whether the lane has to wait for what stands in the place of its failed head. Its id may have been given to
    another task since, of this lane or another; one that cannot be read is left to the owner, who meets it."""
    body = found.body
    return found.state in ("pending", "fired") and (body is None or (body.lane == lane and body.is_retry))


async def places(store: Store, wanted: Mapping[int, Sequence[bytes]]) -> dict[int, Sequence[bytes | None] | StoreError]:
    """Of each partition the places of these heads; None without one: every retry registers its place, and a cancel
    removes it."""
    groups: list[Group] = []
    for p, idhs in wanted.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HMGET", keys.ids, *idhs)]))
    return {
        p: result if isinstance(result, StoreError) else result[0]
        for p, result in zip(wanted, await store.run(groups), strict=True)
    }


async def replaced(store: Store, heads: Sequence[Standing]) -> set[Standing]:
    """Those in whose place nothing stands any more that their lanes would have to wait for."""
    found = await look_at(store, [(Address.unpack(one.partition, one.place), one.idh) for one in heads])
    over = [one for one, what in zip(heads, found, strict=True) if not waits_for(one.lane, what)]
    # Asked after the look: a head that was tried and failed meanwhile stands elsewhere, and its old place says nothing.
    by_partition: dict[int, list[Standing]] = {}
    for one in over:
        by_partition.setdefault(one.partition, []).append(one)
    answers = await places(store, {p: [one.idh for one in some] for p, some in by_partition.items()})
    still: set[Standing] = set()
    for p, some in by_partition.items():
        now = answers[p]
        if isinstance(now, StoreError):
            raise now
        still.update(one for one, place in zip(some, now, strict=True) if place == one.place)
    return still
