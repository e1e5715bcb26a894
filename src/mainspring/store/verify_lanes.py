"""Looks at the lanes that wait for a failed head: is that head still somewhere?"""

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from ..model.ids import IDH_BYTES
from .codec import FORWARD, HEADER_BYTES, TOMB_BYTES
from .index import look_up
from .keys import Address, PartitionKeys
from .listing import slice_named
from .query import look_at
from .store import Store
from .verify_count import list_live
from .verify_keys import shown
from .verify_report import Finding, Repair

LANES_A_PAGE: Final = 256
ROWS_A_CHUNK: Final = 1_000

Suspect = tuple[bytes, bytes, Address | None]
"""Lane, the head it waits for as the lane has it (idh first), and where the index has that head."""


async def check_lanes(store: Store, keys: PartitionKeys) -> AsyncIterator[Finding]:
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.held, cursor, "COUNT", LANES_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        suspects = await _not_indexed(store, keys, list(zip(flat[::2], flat[1::2], strict=True)))
        # Twice: a head that is moved while the slices are searched may slip from a place not yet searched to one
        # that was. It cannot do so unseen both times, for every move is written in the index.
        for _ in range(2):
            if suspects:
                suspects = await _nowhere(store, keys, suspects)
        for suspect in suspects:
            idh = suspect[1][:IDH_BYTES].hex()
            problem = f"waits for the task {idh}, which is nowhere: nothing of the lane will fire"
            where = f"{keys.held} {shown(suspect[0])}"
            yield Finding("held-lane", keys.number, where, problem, partial(_free, store, keys, suspect))
        if not cursor:
            return


async def _not_indexed(store: Store, keys: PartitionKeys, held: list[tuple[bytes, bytes]]) -> list[Suspect]:
    """Lanes whose head the index does not show pending or under way, as it does nearly always."""
    addresses = await look_up(store, [(keys.number, head[:IDH_BYTES]) for _, head in held])
    known = [
        (address, head[:IDH_BYTES]) for (_, head), address in zip(held, addresses, strict=True) if address is not None
    ]
    states = {idh: found.state for (_, idh), found in zip(known, await look_at(store, known), strict=True)}
    return [
        (lane, head, address)
        for (lane, head), address in zip(held, addresses, strict=True)
        if states.get(head[:IDH_BYTES]) not in ("pending", "fired")
    ]


async def _nowhere(store: Store, keys: PartitionKeys, suspects: list[Suspect]) -> list[Suspect]:
    """Those whose head stands in no slice, is waited for all the same, and has got no new place meanwhile."""
    there = await _search(store, keys, {head[:IDH_BYTES] for _, head, _ in suspects})
    missing = [(lane, head) for lane, head, _ in suspects if head[:IDH_BYTES] not in there]
    if not missing:
        return []
    [held] = await store.run_one(keys.slot, [("HMGET", keys.held, *(lane for lane, _ in missing))])
    still = [pair for pair, head in zip(missing, held, strict=True) if head == pair[1]]
    return await _not_indexed(store, keys, still)


async def _search(store: Store, keys: PartitionKeys, wanted: set[bytes]) -> set[bytes]:
    """Which of these tasks stand somewhere, unfinished: waiting, under way, or cancelled and not yet met by the owner.

    A cancelled head is no fault: the owner frees the lane when it reads what is left of it.
    """
    stubs = {idh[:TOMB_BYTES]: idh for idh in wanted}
    there: set[bytes] = set()
    for name in await list_live(store, keys):
        place = slice_named(name)
        if place is None:
            continue
        s, _, d, _ = keys.slice_keys(place.name)
        first, rows = 0, [b""]
        while rows:
            rows, done = await store.run_one(
                keys.slot, [("LRANGE", s, first, first + ROWS_A_CHUNK - 1), ("GETRANGE", d, first >> 3, -1)]
            )
            for index, row in enumerate(rows):
                idh = _task_of(row, stubs)
                if idh in wanted and not _is_set(done, index):
                    there.add(idh)
            first += len(rows)
            if len(rows) < ROWS_A_CHUNK:
                break
    return there


def _task_of(row: bytes, stubs: dict[bytes, bytes]) -> bytes:
    if len(row) == TOMB_BYTES:
        return stubs.get(row, b"")
    if len(row) < HEADER_BYTES or row[4] & FORWARD:
        return b""
    return row[5:HEADER_BYTES]


def _is_set(bits: bytes, index: int) -> bool:
    return index >> 3 < len(bits) and bits[index >> 3] & (0x80 >> (index & 7)) != 0


async def _free(store: Store, keys: PartitionKeys, suspect: Suspect) -> Repair:
    lane, head, address = suspect
    args = [lane, head, head[:IDH_BYTES], address.pack() if address is not None else ""]
    reply = await store.call(keys.number, "repair_lane", [keys.held, keys.ids, keys.own, keys.fence], args)
    if reply != b"ok":
        return Repair(True, "it waits for another task by now")
    return Repair(True, "the lane goes on; the owner of the partition reads everything again")
