"""Lists what is in the queues: handed over and waiting, or in the hands of workers. In no order."""

import re
from typing import Final

import msgspec

from ..model.choice import QueueFilter
from ..model.errors import StoreError
from ..model.task import Page, State, TaskInfo
from .codec import HEADER_BYTES, decode
from .keys import ADDRESS_BYTES, Address
from .query import SEARCHED_AT_MOST, Found, describe
from .queue_state import Queued
from .store import Group, Store

_PLACE: Final = re.compile(r"q(\d{1,4})\.(\d{1,20})")
Place = tuple[int, int]
"""A partition, and how far its hash was scanned."""


def parse_place(text: str) -> Place:
    """A cursor; ValueError for what is none."""
    match = _PLACE.fullmatch(text)
    if match is None or int(match[2]) >= 1 << 64:
        raise ValueError(text)
    return int(match[1]), int(match[2])


async def page(store: Store, where: QueueFilter, *, after: Place | None, limit: int) -> Page:
    """`limit` tasks or some more: what was scanned together is told together."""
    partition, cursor = after or (0, 0)
    found: list[TaskInfo] = []
    searched = 0
    while partition < len(store.keys) and len(found) < limit and searched < SEARCHED_AT_MOST:
        keys = store.keys.partitions[partition]
        [[raw_cursor, rows]] = await store.run_one(keys.slot, [("HSCAN", keys.queued, cursor, "COUNT", limit)])
        places = {idh: Queued.parse(raw) for idh, raw in zip(rows[::2], rows[1::2], strict=True)}
        wanted = {idh: place for idh, place in places.items() if where.in_state(running=place.worker is not None)}
        found += [one for one in await _read(store, partition, wanted) if where.fits(one)]
        searched += len(places)
        cursor = int(raw_cursor)
        partition += not cursor
    return Page(found, f"q{partition}.{cursor}" if partition < len(store.keys) else None)


async def _read(store: Store, partition: int, places: dict[bytes, Queued]) -> list[TaskInfo]:
    keys = store.keys.partitions[partition]
    groups: list[Group] = [
        (keys.slot, [("XRANGE", keys.queue(place.queue), place.entry, place.entry)]) for place in places.values()
    ]
    told = []
    for (idh, place), result in zip(places.items(), await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        [rows] = result
        if rows:  # else it has left its queue since
            told.append(_told(partition, idh, place, rows[0][1][1][ADDRESS_BYTES:]))
    return told


def _told(partition: int, idh: bytes, place: Queued, row: bytes) -> TaskInfo:
    address = Address.unpack(partition, place.address)
    due_ms = address.slice.start_ms + int.from_bytes(row[:4], "big")
    state: State = "queued" if place.worker is None else "running"
    try:
        body = decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return describe(idh.hex(), Found(state, None, due_ms, queued=place))
    task_id = body.id or f"{row[5:HEADER_BYTES].hex()}~{address.text()}"
    return describe(task_id, Found(state, body, due_ms if body.due_ms is None else body.due_ms, queued=place))
