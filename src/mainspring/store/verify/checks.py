"""The checks of `mainspring verify`, and how they run: every accepted task is somewhere; repairs on request."""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from ...model.dead_letter import DeadLetter
from ...model.ids import IDH_BYTES
from ...model.lane import HoldRecord
from ...model.schedule.chain import ChainState
from ...model.schedule.definition import unpack_definition
from ..codec import FORWARD, HEADER_BYTES, TOMBSTONE_BYTES
from ..keys import ADDRESS_BYTES, R_UNIT, WIDTHS_MS, Address, PartitionKeys, Slice, r_of, score_of
from ..owner.read import slice_named
from ..schedules import is_pointer, schedule_again, still_planned
from ..store import Store
from ..tasks.index import look_up
from ..tasks.query import look_at
from .keys import (
    MOST_AT_ONCE,
    TRIES,
    PartitionReading,
    SliceCount,
    check_keys,
    check_types,
    list_live,
    read_partition,
    remove_remains,
    set_score,
    shown,
)
from .report import Repair, Report, VerifyFinding


async def check_counters(store: Store, keys: PartitionKeys, reading: PartitionReading) -> AsyncIterator[VerifyFinding]:
    if not reading.exact:
        problem = f"its {len(reading.slices)} slices changed faster than they could be read"
        advice = f"verify again in a calmer moment; more than {MOST_AT_ONCE} slices are not read in one step"
        yield VerifyFinding("not-proven", keys.number, keys.slices, problem, advice=advice)
    elif reading.garbled or reading.counters.missing:
        yield VerifyFinding("unbalanced", keys.number, keys.n, problem_of(reading), partial(_set_right, store, keys))


def problem_of(reading: PartitionReading) -> str:
    problems = [f"the counter {name} holds {value!r}, which is not a number" for name, value in reading.garbled.items()]
    missing = reading.counters.missing
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
        if not reading.garbled and not reading.counters.missing:
            return Repair(True, "the counters add up now")
        accepted = reading.counters.accepted - reading.counters.missing
        reply = await store.call(keys.number, "repair_counters", [keys.n], [reading.repairs, -reading.counters.missing])
        if reply == b"ok":
            return Repair(True, f"accepted set from {reading.counters.accepted} to {accepted} ({problem_of(reading)})")
    return Repair(False, "the partition keeps changing; verify again in a calmer moment")


async def check_slices(store: Store, keys: PartitionKeys, reading: PartitionReading) -> AsyncIterator[VerifyFinding]:
    for name, _ in reading.nameless:
        problem = "is among the live slices, but is not the name of a slice"
        yield VerifyFinding("bad-slice", keys.number, shown(name), problem, partial(_remove_name, store, keys, name))
    for one in reading.slices:
        finding = _fault_of(store, keys, one)
        if finding is not None:
            yield finding


def _fault_of(store: Store, keys: PartitionKeys, one: SliceCount) -> VerifyFinding | None:
    place = one.slice
    s = keys.entries(place.name)
    if one.length == 0:
        problem = "a live slice without entries: its entries are gone"
        return VerifyFinding(
            "empty-slice", keys.number, s, problem, partial(remove_remains, store, keys, place, repr(one.score))
        )
    right = score_of(place.start_ms, r_of(one.score))
    if one.score != right:
        problem = f"has the score {one.score!r}, which does not match its time: it would fire at the wrong time"
        return VerifyFinding(
            "bad-slice", keys.number, s, problem, partial(set_score, store, keys, place, one.score, right)
        )
    if one.stray:
        problem = f"bits past the end of its {one.length} entries: new tasks there would look finished"
        return VerifyFinding("stray-bits", keys.number, s, problem, partial(_cut_bits, store, keys, one))
    return None


async def _remove_name(store: Store, keys: PartitionKeys, name: bytes) -> Repair:
    await store.run_one(keys.slot, [("ZREM", keys.slices, name)])
    return Repair(True, "removed from the live slices; a list of that name, if there is one, is kept")


async def _cut_bits(store: Store, keys: PartitionKeys, one: SliceCount) -> Repair:
    s, *bitmaps = keys.slice_keys(one.slice.name)
    call_keys = [keys.slices, s, keys.n, keys.own, keys.fence, *bitmaps]
    reply = await store.call(keys.number, "repair_bits", call_keys, [one.slice.name, repr(one.score)])
    if not isinstance(reply, int) or reply == 0:
        return Repair(True, "they are gone by now")
    return Repair(True, f"cut off in {reply} bitmaps; the owner of the partition reads everything again")


IDS_A_PAGE: Final = 256
_INDEX_PROBLEMS: Final = {
    "nothing": "leads to a place without a task",
    "another": "leads to the place of another task",
    "renewed": "leads to an earlier incarnation of its task's slice",
    "unreadable": "leads nowhere: its value is not an address",
}

Pair = tuple[bytes, bytes]
"""An id's hash and its address, as the index holds them."""


async def check_index(store: Store, keys: PartitionKeys) -> AsyncIterator[VerifyFinding]:
    """Check every id of the partition, page by page."""
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.ids, cursor, "COUNT", IDS_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        # The server returns a small hash whole, however few entries were requested.
        for at in range(0, len(pairs), IDS_A_PAGE):
            for pair, fault in await _faults(store, keys, pairs[at : at + IDS_A_PAGE]):
                repair = partial(_repair_id, store, keys, pair)
                yield VerifyFinding(
                    "orphan-index", keys.number, f"{keys.ids} {pair[0].hex()}", _INDEX_PROBLEMS[fault], repair
                )
        if not cursor:
            return


def _place_of(keys: PartitionKeys, raw: bytes) -> Slice | None:
    if len(raw) != ADDRESS_BYTES or raw[0] >= len(WIDTHS_MS):
        return None
    address = Address.unpack(keys.number, raw)
    return address.slice if address.r < R_UNIT and address.slice.is_well_formed else None


async def _faults(store: Store, keys: PartitionKeys, pairs: Sequence[Pair]) -> list[tuple[Pair, str]]:
    """Return the faulty pairs. One step reads both id and slice, so that a task being moved does not look lost."""
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


async def _repair_id(store: Store, keys: PartitionKeys, pair: Pair) -> Repair:
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
            return Repair(True, "it has changed by now, and is correct")


LANES_A_PAGE: Final = 256
ROWS_A_CHUNK: Final = 1_000

Suspect = tuple[bytes, bytes, Address | None]
"""Lane, the head it waits for as stored with the lane (idh first), and the head's address in the index."""


async def check_lanes(store: Store, keys: PartitionKeys) -> AsyncIterator[VerifyFinding]:
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.held, cursor, "COUNT", LANES_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        suspects = await _not_indexed(store, keys, list(zip(flat[::2], flat[1::2], strict=True)))
        # Search twice: a head that is moved during the search may slip from a place not yet searched to one that was.
        # It cannot do so unseen both times, because every move is written to the index.
        for _ in range(2):
            if suspects:
                suspects = await _nowhere(store, keys, suspects)
        for suspect in suspects:
            idh = suspect[1][:IDH_BYTES].hex()
            problem = f"waits for the task {idh}, which does not exist: no task of the lane will fire"
            where = f"{keys.held} {shown(suspect[0])}"
            yield VerifyFinding("held-lane", keys.number, where, problem, partial(_free, store, keys, suspect))
        if not cursor:
            return


async def _not_indexed(store: Store, keys: PartitionKeys, held: list[tuple[bytes, bytes]]) -> list[Suspect]:
    """Return the lanes whose head is neither pending nor in flight according to the index; it nearly always is."""
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
    """Return lanes that wait for a head that is in no slice and got no new place meanwhile."""
    there = await _search(store, keys, {head[:IDH_BYTES] for _, head, _ in suspects})
    missing = [(lane, head) for lane, head, _ in suspects if head[:IDH_BYTES] not in there]
    if not missing:
        return []
    [held] = await store.run_one(keys.slot, [("HMGET", keys.held, *(lane for lane, _ in missing))])
    still = [pair for pair, head in zip(missing, held, strict=True) if head == pair[1]]
    return await _not_indexed(store, keys, still)


async def _search(store: Store, keys: PartitionKeys, wanted: set[bytes]) -> set[bytes]:
    """Return which of these tasks exist unfinished: waiting, in flight, or cancelled but not yet read by the owner.

    A cancelled head is no fault: the owner frees the lane when it reads the tombstone.
    """
    stubs = {idh[:TOMBSTONE_BYTES]: idh for idh in wanted}
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
    if len(row) == TOMBSTONE_BYTES:
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
    return Repair(True, "the lane is free; the owner of the partition reads everything again")


RECORDS_A_PAGE: Final = 256


async def check_holds(store: Store, keys: PartitionKeys) -> AsyncIterator[VerifyFinding]:
    """Report records that cannot be used. A record without a slice is no fault: all tasks to be moved there may have
    been cancelled. Nor is a slice without a record: its next owner opens it."""
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.holds, cursor, "COUNT", RECORDS_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        for name, raw in zip(flat[::2], flat[1::2], strict=True):
            problem = _problem_of(name, raw)
            if problem is not None:
                repair = partial(_remove, store, keys, name)
                yield VerifyFinding("hold-record", keys.number, f"{keys.holds} {shown(name)}", problem, repair)
        if not cursor:
            return


def _problem_of(name: bytes, raw: bytes) -> str | None:
    place = slice_named(name)
    if place is None or not place.is_hold:
        return "is not the name of a hold slice: no owner can use it"
    if HoldRecord.decode(raw) is None:
        return "cannot be read: it is unknown why these tasks wait, and whether their lane is parked"
    return None


async def _remove(store: Store, keys: PartitionKeys, name: bytes) -> Repair:
    await store.run_one(keys.slot, [("HDEL", keys.holds, name)])
    return Repair(True, "removed; the next owner of the partition releases the tasks in it unless they are held")


DEAD_LETTERS_A_PAGE: Final = 100
"""Few, because a scan of records returns their payloads too."""

_DEAD_LETTER_PROBLEMS: Final = {
    "record": "a dead letter without its time: no list shows it",
    "time": "the time of a dead letter that does not exist",
}
_decode: Final = msgspec.msgpack.Decoder(DeadLetter).decode


async def check_dead_letters(store: Store, keys: PartitionKeys) -> AsyncIterator[VerifyFinding]:
    reported: set[bytes] = set()
    for command, key in (("HSCAN", keys.dead), ("ZSCAN", keys.dead_times)):
        cursor = 0
        while True:
            [reply] = await store.run_one(keys.slot, [(command, key, cursor, "COUNT", DEAD_LETTERS_A_PAGE)])
            cursor, idhs = int(reply[0]), reply[1][::2]
            for at in range(0, len(idhs), DEAD_LETTERS_A_PAGE):
                for idh, there in await _incomplete_dead_letters(store, keys, idhs[at : at + DEAD_LETTERS_A_PAGE]):
                    if idh not in reported:
                        reported.add(idh)
                        repair = partial(_repair_dead_letter, store, keys, idh)
                        yield VerifyFinding(
                            "dead-letter", keys.number, f"{key} {idh.hex()}", _DEAD_LETTER_PROBLEMS[there], repair
                        )
            if not cursor:
                break


async def _incomplete_dead_letters(store: Store, keys: PartitionKeys, idhs: Sequence[bytes]) -> list[tuple[bytes, str]]:
    """Return the dead letters of which only one half exists, and which half."""
    reply = await store.call(keys.number, "verify_dead", [keys.dead, keys.dead_times], [len(idhs), *idhs])
    return [(idhs[at - 1], there.decode()) for at, there in zip(reply[::2], reply[1::2], strict=True)]


async def _repair_dead_letter(store: Store, keys: PartitionKeys, idh: bytes) -> Repair:
    [record] = await store.run_one(keys.slot, [("HGET", keys.dead, idh)])
    time_ms = _died_ms(record) or store.clock.now_ms()
    reply = await store.call(keys.number, "repair_dead", [keys.dead, keys.dead_times], [idh, time_ms])
    match reply:
        case b"dated":
            return Repair(True, f"listed again, with the time {time_ms} ms")
        case b"removed":
            return Repair(True, "removed: its dead letter does not exist")
        case _:
            return Repair(True, "it has changed by now, and is correct")


def _died_ms(record: bytes | None) -> int | None:
    try:
        return _decode(record).died_ms if record is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


TASKS_A_PAGE: Final = 200
"""Few, because a page of a stream returns the payloads too."""

_QUEUE_PROBLEMS: Final = {
    "entry": "an entry of a stream that is not among the queued tasks: it can neither be found nor cancelled",
    "place": "a queued task whose entry is gone from its stream: no worker will get it",
}

QueuedTask = tuple[bytes, bytes, bytes]
"""idh, stream id, packed address."""


async def check_queues(store: Store, keys: PartitionKeys) -> AsyncIterator[VerifyFinding]:
    queues = await _names(store, keys)
    reported: set[bytes] = set()
    async for queue, tasks in _pages(store, keys, queues):
        for (idh, entry, address), there in await _incomplete_tasks(store, keys, queue, tasks):
            if idh not in reported:
                reported.add(idh)
                repair = partial(_repair_task, store, keys, queue, (idh, entry, address))
                where = f"{keys.queue(queue)} {entry.decode()}"
                yield VerifyFinding(f"queue-{there}", keys.number, where, _QUEUE_PROBLEMS[there], repair)
    queued, aside, places, entries, _ = await _count(store, keys, queues, set_right=False)
    if queued + aside != places or places != entries:
        problem = f"the counters say {queued}, and {aside} of lanes; there are {places} places and {entries} entries"
        yield VerifyFinding("queue-count", keys.number, keys.n, problem, partial(_recount, store, keys, queues))


async def _names(store: Store, keys: PartitionKeys) -> list[str]:
    names: set[bytes] = set()
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("SSCAN", keys.queues, cursor, "COUNT", TASKS_A_PAGE)])
        cursor = int(reply[0])
        names.update(reply[1])
        if not cursor:
            return sorted(name.decode() for name in names)


async def _pages(
    store: Store, keys: PartitionKeys, queues: Sequence[str]
) -> AsyncIterator[tuple[str, list[QueuedTask]]]:
    """Yield the entries of the streams, then the records of queued tasks."""
    for queue in queues:
        first = b"-"
        while True:
            [rows] = await store.run_one(keys.slot, [("XRANGE", keys.queue(queue), first, "+", "COUNT", TASKS_A_PAGE)])
            yield queue, [(row[1][1][19:35], row[0], row[1][1][:ADDRESS_BYTES]) for row in rows]
            if len(rows) < TASKS_A_PAGE:
                break
            first = b"(" + rows[-1][0]
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.queued, cursor, "COUNT", TASKS_A_PAGE)])
        cursor, flat = int(reply[0]), reply[1]
        found: dict[str, list[QueuedTask]] = {}
        for idh, place in zip(flat[::2], flat[1::2], strict=True):
            entry, queue = place[ADDRESS_BYTES:].split(b" ")[:2]
            found.setdefault(queue.decode(), []).append((idh, entry, place[:ADDRESS_BYTES]))
        for name, tasks in found.items():
            yield name, tasks
        if not cursor:
            return


async def _incomplete_tasks(
    store: Store, keys: PartitionKeys, queue: str, tasks: Sequence[QueuedTask]
) -> list[tuple[QueuedTask, str]]:
    found: list[tuple[QueuedTask, str]] = []
    for first in range(0, len(tasks), TASKS_A_PAGE):
        some = tasks[first : first + TASKS_A_PAGE]
        args = [value for idh, entry, _ in some for value in (idh, entry)]
        reply = await store.call(
            keys.number, "verify_queues", [keys.queued, keys.queue(queue)], [len(some), *args]
        )  # fmt: skip
        found += [(some[at - 1], there.decode()) for at, there in zip(reply[::2], reply[1::2], strict=True)]
    return found


async def _repair_task(store: Store, keys: PartitionKeys, queue: str, task: QueuedTask) -> Repair:
    idh, entry, address = task
    s, _, d, _ = keys.slice_keys(Address.unpack(keys.number, address).slice.name)
    names = [keys.queued, keys.queue(queue), keys.slices, s, d, keys.own, keys.fence]
    match await store.call(keys.number, "repair_queue", names, [idh, entry, queue]):
        case b"placed":
            return Repair(True, "it is among the queued tasks again")
        case b"again":
            return Repair(True, "its entry is still in its slice: the owner of the partition hands it off again")
        case b"lost":
            return Repair(True, "its entry is lost; its place is removed, and the counters no longer include it")
        case _:
            return Repair(True, "it has changed by now, and is correct")


async def _count(store: Store, keys: PartitionKeys, queues: Sequence[str], *, set_right: bool) -> list[int]:
    names = [keys.n, keys.queued, *map(keys.queue, queues)]
    counts: list[int] = await store.call(keys.number, "count_queues", names, [int(set_right), *queues])
    return counts


async def _recount(store: Store, keys: PartitionKeys, queues: Sequence[str]) -> Repair:
    counts = await _count(store, keys, queues, set_right=True)
    if counts[4]:
        return Repair(True, f"counted again: there are {counts[2]} tasks in queues")
    return Repair(False, f"there are {counts[2]} tasks in queues, too many for one step; verify again later")


A_PAGE: Final = 200
KIND: Final = "schedule-chain"


async def check_schedules(store: Store, keys: PartitionKeys) -> AsyncIterator[VerifyFinding]:
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.sched, cursor, "COUNT", A_PAGE)])
        cursor, names = int(reply[0]), reply[1][::2]
        if names:
            for finding in await _look(store, keys, names):
                yield finding
        if not cursor:
            break
    cursor = 0
    while True:
        [reply] = await store.run_one(keys.slot, [("HSCAN", keys.next, cursor, "COUNT", A_PAGE)])
        cursor, names = int(reply[0]), reply[1][::2]
        for finding in await _without_schedule(store, keys, names) if names else ():
            yield finding
        if not cursor:
            break


async def _look(store: Store, keys: PartitionKeys, names: Sequence[bytes]) -> list[VerifyFinding]:
    findings = []
    suspects = await _broken(store, keys, names)
    # Look twice: a chain that advanced between the two looks is not broken, and its new occurrence is found.
    again = await _broken(store, keys, [name for name, _, _ in suspects]) if suspects else []
    for name, link, why in again:
        if (name, link, why) not in suspects:
            continue
        where = f"{keys.sched} {name.decode(errors='replace')}"
        if why == "unreadable":
            advice = "write it again: mainspring schedule remove, then add"
            findings.append(VerifyFinding(KIND, keys.number, where, "a schedule that cannot be read", None, advice))
            continue
        problem = f"a schedule without its next occurrence ({why}): it would not run any more"
        claim = None if link is None else link.claim
        repair = partial(_repair_chain, store, keys, name.decode(), claim, why)
        findings.append(VerifyFinding(KIND, keys.number, where, problem, repair))
    return findings


async def _broken(
    store: Store, keys: PartitionKeys, names: Sequence[bytes]
) -> list[tuple[bytes, ChainState | None, str]]:
    """Return the schedules whose planned occurrence does not exist: name, chain, and the problem."""
    definitions, raws = await store.run_one(keys.slot, [("HMGET", keys.sched, *names), ("HMGET", keys.next, *names)])
    found: list[tuple[bytes, ChainState | None, str]] = []
    planned: list[tuple[bytes, ChainState]] = []
    for name, definition, raw in zip(names, definitions, raws, strict=True):
        if definition is None or is_pointer(definition):
            continue  # removed by now, or stored in the partition of its lane
        try:
            unpack_definition(definition)
            link = None if raw is None else ChainState.unpack(raw)
        except (msgspec.DecodeError, ValueError):
            found.append((name, None, "unreadable"))
            continue
        if link is None:
            found.append((name, None, "no chain"))
        elif link.planned_ms:
            planned.append((name, link))
    states = await still_planned(store, keys.number, [link for _, link in planned]) if planned else []
    found += [(name, link, why) for (name, link), (waits, why) in zip(planned, states, strict=True) if not waits]
    return found


async def _repair_chain(store: Store, keys: PartitionKeys, name: str, claim: bytes | None, why: str) -> Repair:
    written = await schedule_again(store, keys.number, name, claim, why)
    if written == "ok":
        return Repair(True, "its next occurrence is scheduled")
    changed = written == "changed"
    return Repair(changed, "it has changed by now" if changed else f"its next occurrence is not scheduled: {written}")


async def _without_schedule(store: Store, keys: PartitionKeys, names: Sequence[bytes]) -> list[VerifyFinding]:
    [definitions] = await store.run_one(keys.slot, [("HMGET", keys.sched, *names)])
    findings = []
    for name, definition in zip(names, definitions, strict=True):
        if definition is None:
            where = f"{keys.next} {name.decode(errors='replace')}"
            repair = partial(_forget, store, keys, name)
            findings.append(
                VerifyFinding(KIND, keys.number, where, "the chain of a schedule that does not exist", repair)
            )
    return findings


async def _forget(store: Store, keys: PartitionKeys, name: bytes) -> Repair:
    removed = await store.call(keys.number, "repair_schedule", [keys.sched, keys.next], [name])
    return Repair(True, "removed" if removed else "it has changed by now, and is correct")


# The whole verification: every accepted task is somewhere, nothing is orphaned; repairs on request.
#
# Nodes and clients keep running meanwhile. Values that are compared are read in one atomic step on the server, so that
# traffic is never mistaken for damage; each step reads a bounded number of slices, ids or keys. A repair checks again
# in the same step as its write, and never removes an entry.

VerifyProgress = Callable[[int, int], None]
"""Called with the number of partitions verified so far, and the total."""

CHECKS: Final = (check_index, check_lanes, check_holds, check_dead_letters, check_queues, check_schedules)
"""Checks of each partition, after those of its slices. To find a new fault, write such a function, add it here, and
name its kind in `report.KINDS`; a new key belongs in `keys`."""


async def verify(store: Store, *, repair: bool = False, progress: VerifyProgress | None = None) -> Report:
    """Verify a whole namespace; with `repair`, repair what can be repaired. `progress` is called for each partition."""
    report = Report(store.keys.namespace, len(store.keys), repair=repair)
    unreadable: set[int] = set()
    async for finding in check_types(store):
        unreadable |= _partition_of(finding)
        await report.take(finding)
    async for finding in check_keys(store, unreadable):
        if finding.kind == "wrong-type":
            unreadable |= _partition_of(finding)
        await report.take(finding)
    for keys in store.keys.partitions:
        if keys.number not in unreadable:
            await _verify_partition(store, keys, report, repair=repair)
        if progress is not None:
            progress(keys.number + 1, len(store.keys))
    return report


def _partition_of(finding: VerifyFinding) -> set[int]:
    return set() if finding.partition is None else {finding.partition}


async def _verify_partition(store: Store, keys: PartitionKeys, report: Report, *, repair: bool) -> None:
    reading = await read_partition(store, keys)
    # First, because ids lead into slices.
    async for finding in check_slices(store, keys, reading):
        await report.take(finding)
    for check in CHECKS:
        async for finding in check(store, keys):
            await report.take(finding)
    if repair:
        reading = await read_partition(store, keys)
    async for finding in check_counters(store, keys, reading):
        await report.take(finding)
        if repair:
            reading = await read_partition(store, keys)
    report.slices += len(reading.slices)
    report.counters[keys.number] = reading.counters
