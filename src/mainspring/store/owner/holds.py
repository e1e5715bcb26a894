"""State of held work that a new owner reads: lanes that wait for their head, and hold slices. See docs/lanes.md."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...model.errors import StoreError
from ...model.lane import HoldRecord
from ..keys import HOLDS_FROM_S, Address, Slice
from ..redis.sender import Group
from ..store import Store
from ..tasks.index import look_up
from ..tasks.query import Found, look_at
from .read import slice_named


class FailedHead(NamedTuple):
    """The failed task that a lane waits for."""

    idh: bytes
    since_ms: int
    """When the task failed for the first time; 0 if not recorded."""

    @classmethod
    def unpack(cls, raw: bytes) -> "FailedHead":
        return cls(raw[:16], int.from_bytes(raw[16:24], "big"))

    def pack(self) -> bytes:
        return self.idh + self.since_ms.to_bytes(8, "big")


class Inherited(NamedTuple):
    heads: dict[str, FailedHead]
    slices: dict[Slice, HoldRecord | None]
    """Hold slices with tasks in them; None if the record is lost."""
    ended: dict[str, int]
    """Names of hold slices that are gone, and since when."""
    heads_inside: set[str]
    """Lanes whose failed head is in a hold slice too."""


async def inherit(store: Store, partition: int) -> Inherited:
    """Read all of it, the latest holds first."""
    keys = store.keys.partitions[partition]
    held, records, names = await store.run_one(
        keys.slot,
        [
            ("HGETALL", keys.held),
            ("HGETALL", keys.holds),
            ("ZRANGE", keys.slices, HOLDS_FROM_S, "+inf", "BYSCORE"),
        ],
    )
    heads = {held[i].decode(): FailedHead.unpack(held[i + 1]) for i in range(0, len(held), 2)}
    known = {records[i].decode(errors="replace"): HoldRecord.decode(records[i + 1]) for i in range(0, len(records), 2)}
    places = [_hold_slice(name.decode(errors="replace")) for name in reversed(names)]
    slices = {place: known.pop(place.name, None) for place in places if place is not None}
    ended = {name: record.ended_ms if record else 0 for name, record in known.items() if _hold_slice(name)}
    waiting = [record.lane for record in slices.values() if record is not None and record.lane in heads]
    found = await look_up(store, [(partition, heads[lane].idh) for lane in waiting if lane is not None])
    inside = {lane for lane, at in zip(waiting, found, strict=True) if lane and at is not None and at.slice.is_hold}
    return Inherited(heads, slices, ended, inside)


async def record_of(store: Store, partition: int, place: Slice) -> HoldRecord | None:
    """Return the hold to which a slice belongs."""
    keys = store.keys.partitions[partition]
    [raw] = await store.run_one(keys.slot, [("HGET", keys.holds, place.name)])
    return None if raw is None else HoldRecord.decode(raw)


def _hold_slice(name: str) -> Slice | None:
    """Return the slice, or None for a name that is not a hold slice's: `mainspring verify` reports it."""
    place = slice_named(name.encode())
    return place if place is not None and place.is_hold else None


async def scores(store: Store, wanted: Mapping[int, Sequence[Slice]]) -> dict[int, list[float | None] | StoreError]:
    """Return the incarnations of hold slices, by partition; None for a slice that does not exist (any more)."""
    groups: list[Group] = []
    for p, places in wanted.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("ZMSCORE", keys.slices, *(place.name for place in places))]))
    return {
        p: result if isinstance(result, StoreError) else [None if one is None else float(one) for one in result[0]]
        for p, result in zip(wanted, await store.run(groups), strict=True)
    }


async def forget_records(
    store: Store, partition: int, ended: Sequence[tuple[str, int]], *, window_ms: int
) -> Sequence[tuple[str, int]]:
    """Forget records of hold slices that are gone, given the times when they went; return those forgotten."""
    oldest = sorted(ended, key=lambda one: one[1])
    args = [value for one in oldest for value in one]
    keys = store.keys.partitions[partition]
    return oldest[: await store.call(partition, "forget_holds", [keys.holds], [window_ms, *args])]


class Standing(NamedTuple):
    """The failed head of a lane, and its address in the index as far as it is known."""

    partition: int
    lane: str
    idh: bytes
    place: bytes


def waits_for(lane: str, found: Found) -> bool:
    """Return whether the lane has to wait for the task found in the place of its failed head. The head's id may have
    been given to another task since, of this lane or another. The owner decides about an unreadable task."""
    body = found.body
    return found.state in ("pending", "fired") and (body is None or (body.lane == lane and body.is_retry))


async def look_at_heads(store: Store, heads: Sequence[Standing]) -> list[bytes | StoreError | None]:
    """Return the addresses of these heads; None for a head that its lane has to wait for no longer.

    A head without an address was cancelled or given up: every retry registers its place. At another place than the
    known one, another task may have its id.
    """
    places = await _places(store, heads)
    moved = [
        (at, one._replace(place=place))
        for at, (one, place) in enumerate(zip(heads, places, strict=True))
        if isinstance(place, bytes) and place != one.place
    ]
    if not moved:
        return places
    found = await look_at(store, [(Address.unpack(one.partition, one.place), one.idh) for _, one in moved])
    over = [item for item, what in zip(moved, found, strict=True) if not waits_for(item[1].lane, what)]
    # Ask after the look: a head that was retried and failed meanwhile is elsewhere, so its old place shows nothing.
    for (at, one), place in zip(over, await _places(store, [one for _, one in over]), strict=True):
        if place == one.place:
            places[at] = None
    return places


async def _places(store: Store, heads: Sequence[Standing]) -> list[bytes | StoreError | None]:
    by_partition: dict[int, list[int]] = {}
    for at, one in enumerate(heads):
        by_partition.setdefault(one.partition, []).append(at)
    groups: list[Group] = []
    for p, some in by_partition.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HMGET", keys.ids, *(heads[at].idh for at in some))]))
    places: list[bytes | StoreError | None] = [None] * len(heads)
    for some, result in zip(by_partition.values(), await store.run(groups), strict=True):
        for number, at in enumerate(some):
            places[at] = result if isinstance(result, StoreError) else result[0][number]
    return places
