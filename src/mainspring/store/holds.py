"""What a new owner learns of held work: lanes that wait for their head, and hold slices. See docs/lanes.md."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..model.errors import StoreError
from ..model.hold import HoldRecord
from .index import look_up
from .keys import HOLDS_FROM_S, Slice
from .listing import slice_named
from .store import Group, Store


class Head(NamedTuple):
    """The failed task a lane waits for."""

    idh: bytes
    since_ms: int
    """When it failed for the first time; 0 where nobody wrote it down."""

    @classmethod
    def unpack(cls, raw: bytes) -> "Head":
        return cls(raw[:16], int.from_bytes(raw[16:24], "big"))

    def pack(self) -> bytes:
        return self.idh + self.since_ms.to_bytes(8, "big")


class Inherited(NamedTuple):
    heads: dict[str, Head]
    slices: dict[Slice, HoldRecord | None]
    """Hold slices with tasks in them; None where the record is lost."""
    ended: dict[str, int]
    """Names of hold slices that are gone, and since when."""
    heads_inside: set[str]
    """Lanes whose failed head stands in a hold slice too."""


async def inherit(store: Store, partition: int) -> Inherited:
    """All of it, the latest holds first."""
    keys = store.keys.partitions[partition]
    held, records, names = await store.run_one(
        keys.slot,
        [
            ("HGETALL", keys.held),
            ("HGETALL", keys.holds),
            ("ZRANGE", keys.slices, HOLDS_FROM_S, "+inf", "BYSCORE"),
        ],
    )
    heads = {held[i].decode(): Head.unpack(held[i + 1]) for i in range(0, len(held), 2)}
    known = {records[i].decode(errors="replace"): HoldRecord.decode(records[i + 1]) for i in range(0, len(records), 2)}
    places = [_hold_slice(name.decode(errors="replace")) for name in reversed(names)]
    slices = {place: known.pop(place.name, None) for place in places if place is not None}
    ended = {name: record.ended_ms if record else 0 for name, record in known.items() if _hold_slice(name)}
    waiting = [record.lane for record in slices.values() if record is not None and record.lane in heads]
    found = await look_up(store, [(partition, heads[lane].idh) for lane in waiting if lane is not None])
    inside = {lane for lane, at in zip(waiting, found, strict=True) if lane and at is not None and at.slice.is_hold}
    return Inherited(heads, slices, ended, inside)


async def record_of(store: Store, partition: int, place: Slice) -> HoldRecord | None:
    """What is known of the hold to which a slice belongs."""
    keys = store.keys.partitions[partition]
    [raw] = await store.run_one(keys.slot, [("HGET", keys.holds, place.name)])
    return None if raw is None else HoldRecord.decode(raw)


def _hold_slice(name: str) -> Slice | None:
    """None for what is no hold slice's name: `mainspring verify` tells of it."""
    place = slice_named(name.encode())
    return place if place is not None and place.is_hold else None


async def scores(store: Store, wanted: Mapping[int, Sequence[Slice]]) -> dict[int, list[float | None] | StoreError]:
    """The incarnations of hold slices, by partition; None for one that does not exist (any more)."""
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
    """Of hold slices that are gone, with the times when they went, those whose records are forgotten now."""
    oldest = sorted(ended, key=lambda one: one[1])
    args = [value for one in oldest for value in one]
    keys = store.keys.partitions[partition]
    return oldest[: await store.call(partition, "forget_holds", [keys.holds], [window_ms, *args])]
