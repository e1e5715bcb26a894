"""Who stands before a task in its lane."""

from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import msgspec

from ..model.delivery import Body
from ..model.task import State
from .codec import HEADER_BYTES, LANE, decode, is_tomb
from .failed_heads import waits_for
from .index import look_up
from .keys import Address, PartitionKeys, r_of
from .listing import slices_in
from .query import look_at
from .store import Store

_SLICES_READ: Final = 64
_ROWS_AT_ONCE: Final = 1_000
_ROWS_READ: Final = 50_000
"""In a long backlog the one before it may stand further back: then none is named."""


class Head(NamedTuple):
    """The task a lane waits for."""

    id: str
    state: State
    due_ms: int | None
    body: Body | None


async def head_before(store: Store, lane: str, idh: bytes, address: Address, place_ms: int) -> Head | None:
    """The task that this one, which stands at `place_ms`, has to wait for; None when it is its turn."""
    keys = store.keys.partitions[address.partition]
    [held] = await store.run_one(keys.slot, [("HGET", keys.held, lane)])
    if held is not None and held[:16] == idh:
        return None
    if held is not None and (head := await _retrying(store, lane, address.partition, held[:16])) is not None:
        return head
    return await _earlier(store, keys, lane, idh, (place_ms, address.index))


async def _retrying(store: Store, lane: str, partition: int, idh: bytes) -> Head | None:
    """The failed head; None where its id is another lane's by now, and the owner has not heard of it yet."""
    [address] = await look_up(store, [(partition, idh)])
    if address is None:
        return Head(idh.hex(), "unknown", None, None)
    [found] = await look_at(store, [(address, idh)])
    if found.body is not None and not waits_for(lane, found):
        return None
    task_id = found.body.id if found.body is not None and found.body.id else f"{idh.hex()}~{address.text()}"
    return Head(task_id, found.state, found.due_ms, found.body)


async def _earlier(store: Store, keys: PartitionKeys, lane: str, idh: bytes, before: tuple[int, int]) -> Head | None:
    """The one of the lane that is under way; else the first that is due before."""
    first: tuple[tuple[int, int], Head] | None = None
    async for where, address, row, fired in _unsettled(store, keys, before[0]):
        body = _of_lane(row, lane)
        if body is None or row[5:HEADER_BYTES] == idh:
            continue
        due_ms = where[0] if body.due_ms is None else body.due_ms
        task_id = body.id or f"{row[5:HEADER_BYTES].hex()}~{address.text()}"
        if fired:
            return Head(task_id, "fired", due_ms, body)
        if where < min(before, first[0] if first is not None else before):
            first = where, Head(task_id, "pending", due_ms, body)
    return None if first is None else first[1]


def _of_lane(row: bytes, lane: str) -> Body | None:
    if len(row) < HEADER_BYTES or not row[4] & LANE or is_tomb(row):
        return None
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return body if body.lane == lane else None


async def _unsettled(
    store: Store, keys: PartitionKeys, until_ms: int
) -> AsyncIterator[tuple[tuple[int, int], Address, bytes, bool]]:
    """(time and index, address, entry, fired) of what is neither done nor cancelled, slice by slice."""
    high = f"({until_ms // 1000 + 1}"
    command = ("ZRANGE", keys.slices, "-inf", high, "BYSCORE", "LIMIT", 0, _SLICES_READ, "WITHSCORES")
    [listed] = await store.run_one(keys.slot, [command])
    rows_left = _ROWS_READ
    for place, score in slices_in(keys, listed):
        s, f, d, x = keys.slice_keys(place.name)
        first, rows = 0, [b""]
        while rows and rows_left > 0:
            last = first + _ROWS_AT_ONCE - 1
            rows, fired, done, gone = await store.run_one(
                keys.slot, [("LRANGE", s, first, last), ("GET", f), ("GET", d), ("GET", x)]
            )
            for index, row in enumerate(rows, first):
                if not _bit(done, index) and not _bit(gone, index):
                    where = place.from_ms + int.from_bytes(row[:4], "big"), index
                    address = Address(keys.number, place, r_of(score), index)
                    yield where, address, row, _bit(fired, index)
            first, rows_left = first + len(rows), rows_left - len(rows)


def _bit(bits: bytes | None, index: int) -> bool:
    return bits is not None and index >> 3 < len(bits) and bool(bits[index >> 3] & (0x80 >> (index & 7)))
