"""Looks at the records of held work: can an owner read them?"""

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from ..model.hold import HoldRecord
from .keys import PartitionKeys
from .listing import slice_named
from .store import Store
from .verify_keys import shown
from .verify_report import Finding, Repair

RECORDS_A_PAGE: Final = 256


async def check_holds(store: Store, keys: PartitionKeys) -> AsyncIterator[Finding]:
    """A record without a slice is no fault: all that was to be moved there may have been cancelled. Nor is a slice
    without a record: its next owner opens it."""
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.holds, cursor, "COUNT", RECORDS_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        for name, raw in zip(flat[::2], flat[1::2], strict=True):
            problem = _problem_of(name, raw)
            if problem is not None:
                repair = partial(_remove, store, keys, name)
                yield Finding("hold-record", keys.number, f"{keys.holds} {shown(name)}", problem, repair)
        if not cursor:
            return


def _problem_of(name: bytes, raw: bytes) -> str | None:
    place = slice_named(name)
    if place is None or not place.is_hold:
        return "stands for no hold slice: no owner can read that name"
    if HoldRecord.decode(raw) is None:
        return "cannot be read: nobody can say why these tasks wait, and whether their lane is parked"
    return None


async def _remove(store: Store, keys: PartitionKeys, name: bytes) -> Repair:
    await store.run_one(keys.slot, [("HDEL", keys.holds, name)])
    return Repair(True, "removed; the next owner of the partition lets out what waits there, if nothing holds it up")
