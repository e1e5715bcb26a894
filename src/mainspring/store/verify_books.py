"""Compares the counters of a partition with what its slices hold."""

from collections.abc import AsyncIterator
from functools import partial

from .keys import PartitionKeys
from .store import Store
from .verify_count import MOST_AT_ONCE, TRIES, Reading, read_partition
from .verify_report import Finding, Repair


async def check_books(store: Store, keys: PartitionKeys, reading: Reading) -> AsyncIterator[Finding]:
    if not reading.exact:
        problem = f"its {len(reading.slices)} slices changed faster than they could be read"
        advice = f"verify again in a calmer moment; more than {MOST_AT_ONCE} slices are not read in one step"
        yield Finding("not-proven", keys.number, keys.slices, problem, advice=advice)
    elif reading.garbled or reading.books.missing:
        yield Finding("unbalanced", keys.number, keys.n, problem_of(reading), partial(_set_right, store, keys))


def problem_of(reading: Reading) -> str:
    problems = [f"the counter {name} holds {value!r}, no number" for name, value in reading.garbled.items()]
    missing = reading.books.missing
    if missing > 0:
        problems.append(f"accepted tasks that are nowhere: {missing}")
    elif missing < 0:
        problems.append(f"tasks that were never counted as accepted: {-missing}")
    return "; ".join(problems)


async def _set_right(store: Store, keys: PartitionKeys) -> Repair:
    for _ in range(TRIES):
        reading = await read_partition(store, keys)
        if not reading.exact:
            continue
        if not reading.garbled and not reading.books.missing:
            return Repair(True, "the books are even by now")
        accepted = reading.books.accepted - reading.books.missing
        reply = await store.call(keys.number, "repair_books", [keys.n], [reading.repairs, -reading.books.missing])
        if reply == b"ok":
            return Repair(True, f"accepted set from {reading.books.accepted} to {accepted} ({problem_of(reading)})")
    return Repair(False, "the partition keeps changing; verify again in a calmer moment")
