"""Looks at the live slices of a partition: can an owner read them, have they entries, do their bits fit?"""

from collections.abc import AsyncIterator
from functools import partial

from .keys import PartitionKeys, r_of, score_of
from .store import Store
from .verify_count import Reading, SliceCount
from .verify_keys import remove_remains, set_score, shown
from .verify_report import Finding, Repair


async def check_slices(store: Store, keys: PartitionKeys, reading: Reading) -> AsyncIterator[Finding]:
    for name, _ in reading.nameless:
        problem = "stands among the live slices, but no owner can read that name"
        yield Finding("bad-slice", keys.number, shown(name), problem, partial(_remove_name, store, keys, name))
    for one in reading.slices:
        finding = _fault_of(store, keys, one)
        if finding is not None:
            yield finding


def _fault_of(store: Store, keys: PartitionKeys, one: SliceCount) -> Finding | None:
    place = one.slice
    s = keys.entries(place.name)
    if one.length == 0:
        problem = "a live slice without entries: what stood there is gone"
        return Finding(
            "empty-slice", keys.number, s, problem, partial(remove_remains, store, keys, place, repr(one.score))
        )
    right = score_of(place.start_ms, r_of(one.score))
    if one.score != right:
        problem = f"has the score {one.score!r}, which is not of its time: it would fire at the wrong one"
        return Finding("bad-slice", keys.number, s, problem, partial(set_score, store, keys, place, one.score, right))
    if one.stray:
        problem = f"bits past the end of its {one.length} entries: new tasks there would look finished"
        return Finding("stray-bits", keys.number, s, problem, partial(_cut_bits, store, keys, one))
    return None


async def _remove_name(store: Store, keys: PartitionKeys, name: bytes) -> Repair:
    await store.run_one(keys.slot, [("ZREM", keys.slices, name)])
    return Repair(True, "removed from the live slices; a list of that name, if there is one, stays as it is")


async def _cut_bits(store: Store, keys: PartitionKeys, one: SliceCount) -> Repair:
    s, *bitmaps = keys.slice_keys(one.slice.name)
    call_keys = [keys.slices, s, keys.n, keys.own, keys.fence, *bitmaps]
    reply = await store.call(keys.number, "repair_bits", call_keys, [one.slice.name, repr(one.score)])
    if not isinstance(reply, int) or reply == 0:
        return Repair(True, "they are gone by now")
    return Repair(True, f"cut off in {reply} bitmaps; the owner of the partition reads everything again")
