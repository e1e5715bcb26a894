"""Looks where the ids of a partition lead."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from .keys import ADDRESS_BYTES, R_UNIT, WIDTHS_MS, Address, PartitionKeys, Slice
from .store import Store
from .verify_report import Finding, Repair

IDS_A_PAGE: Final = 256
_PROBLEMS: Final = {
    "nothing": "leads to a place where no task stands",
    "another": "leads to the place of another task",
    "renewed": "leads to an earlier incarnation of the slice its task stands in",
    "unreadable": "leads nowhere: it holds no address",
}

Pair = tuple[bytes, bytes]
"""An id's hash and its address, as the index holds them."""


async def check_index(store: Store, keys: PartitionKeys) -> AsyncIterator[Finding]:
    """Every id of the partition, page by page."""
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.ids, cursor, "COUNT", IDS_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        # A small hash comes whole, however few were asked for.
        for at in range(0, len(pairs), IDS_A_PAGE):
            for pair, fault in await _faults(store, keys, pairs[at : at + IDS_A_PAGE]):
                repair = partial(_repair, store, keys, pair)
                yield Finding("orphan-index", keys.number, f"{keys.ids} {pair[0].hex()}", _PROBLEMS[fault], repair)
        if not cursor:
            return


def _place_of(keys: PartitionKeys, raw: bytes) -> Slice | None:
    if len(raw) != ADDRESS_BYTES or raw[0] >= len(WIDTHS_MS):
        return None
    address = Address.unpack(keys.number, raw)
    return address.slice if address.r < R_UNIT and address.slice.is_well_formed else None


async def _faults(store: Store, keys: PartitionKeys, pairs: Sequence[Pair]) -> list[tuple[Pair, str]]:
    """Id and slice are looked at in one step, so that a task on the move is not taken for a lost one."""
    faults: list[tuple[Pair, str]] = []
    numbers: dict[Slice, int] = {}
    looked_at: list[Pair] = []
    rows: list[bytes | int] = []
    for pair in pairs:
        place = _place_of(keys, pair[1])
        if place is None:
            faults.append((pair, "unreadable"))
        else:
            looked_at.append(pair)
            rows += (*pair, numbers.setdefault(place, len(numbers) + 1))
    if looked_at:
        call_keys = [keys.slices, keys.ids, *(keys.entries(place.name) for place in numbers)]
        ends = [value for place in numbers for value in (place.name, place.over_ms)]
        args = [len(numbers), len(looked_at), *ends, *rows]
        reply = await store.call(keys.number, "verify_ids", call_keys, args)
        for position, fault in zip(reply[::2], reply[1::2], strict=True):
            faults.append((looked_at[position - 1], fault.decode()))
    return faults


async def _repair(store: Store, keys: PartitionKeys, pair: Pair) -> Repair:
    place = _place_of(keys, pair[1])
    name, end_ms = ("", 0) if place is None else (place.name, place.over_ms)
    args = [*pair, name, end_ms]
    reply = await store.call(keys.number, "repair_id", [keys.slices, keys.ids, keys.entries(name)], args)
    match reply:
        case b"moved":
            return Repair(True, "leads to its task again")
        case b"removed":
            return Repair(True, "removed; the id is free")
        case _:
            return Repair(True, "it has changed by now, and is fine")
