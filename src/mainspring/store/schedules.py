"""Schedules on the server: read them, write them, look after their chains. See docs/wire-format.md."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from ..model.clock import steady_s
from ..model.delivery import Body
from ..model.errors import StoreError
from ..model.ids import idh_of, occurrence_id, schedule_of
from ..model.run import Run, passed_run
from ..model.schedule.chain import ChainMemory, ChainState, after_loss, from_here, link_to
from ..model.schedule.definition import Definition, pack_definition, unpack_definition
from .codec import INDEXED, LANE, SCHEDULED, entry
from .keys import HOUR_MS, SECOND_MS, Address, PartitionKeys, Slice, address_prefix, partition_of
from .queue_state import find_queued
from .redis.connection import RedisCommand
from .redis.sender import Group
from .runs import runs_call
from .store import Store
from .tasks.cancel import last_cancelled
from .tasks.index import look_up, look_up_packed
from .tasks.put import WAKE_MS, fresh_score
from .tasks.query import look_at


class OccurrenceRow(NamedTuple):
    idh: bytes
    slice: Slice
    row: bytes
    due_ms: int


class Sketch(msgspec.Struct, frozen=True, gc=False):
    """An occurrence prepared ahead, complete but for its time of put, so that beginning the previous one is quick."""

    idh: bytes
    due_ms: int
    body: Body
    flags: int
    tail: bytes
    """The entry without its offset, if it is put in time."""

    def put(self, now_ms: int) -> tuple[Slice, bytes]:
        due_ms = self.due_ms
        if due_ms < now_ms - now_ms % SECOND_MS:
            # Overdue: put it first in the current slice; the entry says when it was due.
            place = Slice.at(now_ms, SECOND_MS)
            return place, entry(0, self.flags, self.idh, _overdue(self.body, due_ms))
        # The owner reads an hour slice whole when its hour comes: nothing may be written to it after that.
        place = Slice.at(due_ms, HOUR_MS if due_ms - now_ms >= HOUR_MS else SECOND_MS)
        return place, (due_ms - place.start_ms).to_bytes(4, "big") + self.tail


def _overdue(body: Body, due_ms: int) -> Body:
    return Body(
        body.target, body.payload, body.id, body.lane, due_ms, None, 1, body.expires_ms, body.raw, (), body.retry,
        body.occurrence, body.timeout_ms,
    )  # fmt: skip


def body_of(definition: Definition, task_id: str, planned_ms: int) -> Body:
    return Body(
        definition.target, definition.payload, task_id, definition.lane, None, None, 1, None, definition.raw, (),
        definition.retry, (definition.generation, planned_ms), definition.timeout_ms,
    )  # fmt: skip


def sketch(definition: Definition, planned_ms: int, *, due_ms: int | None = None) -> Sketch:
    """Return the sketch of the chain's planned occurrence."""
    return _sketch(definition, occurrence_id(definition.name, planned_ms), planned_ms, SCHEDULED, due_ms)


def sketch_apart(definition: Definition, task_id: str, planned_ms: int, due_ms: int) -> Sketch:
    """Return the sketch of a run outside the chain: triggered by hand, or a backfill."""
    return _sketch(definition, task_id, planned_ms, 0, due_ms)


def _sketch(definition: Definition, task_id: str, planned_ms: int, mark: int, due_ms: int | None) -> Sketch:
    body = body_of(definition, task_id, planned_ms)
    flags = INDEXED | mark | (LANE if body.lane is not None else 0)
    idh = idh_of(task_id)
    due_ms = definition.due_ms(planned_ms) if due_ms is None else due_ms
    return Sketch(idh, due_ms, body, flags, entry(0, flags, idh, body)[4:])


def row_of(definition: Definition, link: ChainState, now_ms: int) -> OccurrenceRow | None:
    """Return the entry of a chain's planned occurrence; None if there is none."""
    if not link.planned_ms:
        return None
    made = sketch(definition, link.planned_ms)
    place, row = made.put(now_ms)
    return OccurrenceRow(made.idh, place, row, made.due_ms)


REVISIONS_KEPT: Final = 20
REMOVED_KEPT_MS: Final = 30 * 86_400_000
"""How long revisions of a removed schedule are kept: a new one of that name continues from its generation."""
_POINTER: Final = bytes(4)
"""Marks a pointer: no definition has generation 0."""
NO_LONGER: Final = frozenset({"done", "dead", "cancelled", "replaced", "finished", "unknown"})
"""States of a task that is over."""

Written = Literal["ok", "changed", "moved", "taken"]


class Seen(NamedTuple):
    """A schedule as it was read: the next write is compared with this state."""

    definition: Definition | None
    link: ChainState | None
    generation: int
    """Generation of the definition, or of the last revision of a removed one; 0: the name is new."""
    partition: int
    """Partition of the schedule: of its lane, or of its name if it has no lane."""
    pointed: bytes = b""
    """Pointer in the partition of its name, if the schedule is in another partition."""


class ScheduleWrite(NamedTuple):
    """One write of a schedule."""

    name: str
    seen: Seen
    definition: Definition | None
    """None removes it."""
    link: ChainState | None
    row: OccurrenceRow | None
    keep: bool = False
    """Keep the definition; only put the next occurrence once more."""


def point_to(lane: str) -> bytes:
    """Return a pointer, stored instead of a definition: the schedule is in the partition of this lane."""
    return _POINTER + lane.encode()


def is_pointer(raw: bytes) -> bool:
    return raw.startswith(_POINTER)


def _read(partition: int, definition: bytes | None, link: bytes | None, revision: bytes | None = None) -> Seen:
    found = None if definition is None else unpack_definition(definition)
    generation = int.from_bytes(revision[:4], "big") if revision is not None else 0
    if found is not None:
        generation = found.generation
    return Seen(found, None if link is None else ChainState.unpack(link), generation, partition)


async def fetch(store: Store, partition: int, names: Sequence[str]) -> list[Seen]:
    """Return definitions and chains in order, for the owner of the partition."""
    keys = store.keys.partitions[partition]
    [definitions, links] = await store.run_one(keys.slot, [("HMGET", keys.sched, *names), ("HMGET", keys.next, *names)])
    return [
        _read(partition, None if raw is not None and is_pointer(raw) else raw, link)
        for raw, link in zip(definitions, links, strict=True)
    ]


async def see(store: Store, names: Sequence[str]) -> list[Seen]:
    """Return schedules for a writer, with the generation to continue from."""
    found = await see_at(store, [(partition_of(name, len(store.keys)), name) for name in names])
    moved = [i for i, one in enumerate(found) if one.pointed]
    if moved:
        lanes = [found[i].pointed[len(_POINTER) :].decode() for i in moved]
        others = [(partition_of(lane, len(store.keys)), names[i]) for lane, i in zip(lanes, moved, strict=True)]
        for i, one in zip(moved, await see_at(store, others), strict=True):
            found[i] = one._replace(pointed=found[i].pointed)
    return found


async def see_at(store: Store, wanted: Sequence[tuple[int, str]]) -> list[Seen]:
    """Return the schedules of these names in these partitions."""
    groups: list[Group] = []
    for partition, name in wanted:
        keys = store.keys.partitions[partition]
        commands: list[RedisCommand] = [
            ("HGET", keys.sched, name), ("HGET", keys.next, name), ("LINDEX", keys.revisions(name), 0),
        ]  # fmt: skip
        groups.append((keys.slot, commands))
    found = []
    for (partition, _), result in zip(wanted, await store.run_all(groups), strict=True):
        if result[0] is not None and is_pointer(result[0]):
            found.append(Seen(None, None, 0, partition, result[0]))
        else:
            found.append(_read(partition, *result))
    return found


async def point(store: Store, name: str, seen: bytes, new: bytes) -> bool:
    """Replace the pointer in the partition of a name; return False if another caller has changed it."""
    keys = store.keys.partitions[partition_of(name, len(store.keys))]
    return bool(await store.call(keys.number, "schedule_point", [keys.sched], [name, seen, new]))


async def revisions(store: Store, partitions: Iterable[int], name: str) -> list[Definition]:
    """Return former definitions stored in these partitions, newest first."""
    groups: list[Group] = []
    for partition in partitions:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("LRANGE", keys.revisions(name), 0, REVISIONS_KEPT - 1)]))
    found = []
    for [raws] in await store.run_all(groups):
        found += [unpack_definition(raw) for raw in raws]
    return sorted(found, key=lambda one: one.at_ms, reverse=True)


_SCANNED: Final = 32
"""Schedules read at once: each may have the largest payload."""


async def page(store: Store, partition: int, cursor: int, count: int) -> tuple[int, list[Seen]]:
    """Return about `count` schedules of a partition, but not many, unordered, and the next cursor (0 at the end)."""
    keys = store.keys.partitions[partition]
    [reply] = await store.run_one(keys.slot, [("HSCAN", keys.sched, cursor, "COUNT", min(count, _SCANNED))])
    names = reply[1][::2]
    if not names:
        return int(reply[0]), []
    [links] = await store.run_one(keys.slot, [("HMGET", keys.next, *names)])
    rows = zip(reply[1][1::2], links, strict=True)
    return int(reply[0]), [_read(partition, raw, link) for raw, link in rows if not is_pointer(raw)]


async def write(store: Store, changes: Sequence[ScheduleWrite]) -> list[Written | StoreError]:
    """Apply each change in one step; `changed` and `moved` mean that nothing was written: read again."""
    planned = [
        (change.seen.partition, change.seen.link.idh)
        for change in changes
        if change.seen.link is not None and change.seen.link.planned_ms
    ]
    found = iter(await look_up_packed(store, planned) if planned else ())
    groups: list[Group] = []
    now_ms = store.clock.now_ms()
    for change in changes:
        keys = store.keys.partitions[change.seen.partition]
        link = change.seen.link
        at = next(found) if link is not None and link.planned_ms else None
        commands: list[RedisCommand] = [_call(store, keys, change, at)]
        if change.row is not None and change.row.due_ms < now_ms + WAKE_MS:
            commands.append(("SPUBLISH", keys.wake, "1"))
        groups.append((keys.slot, commands))
    return [result if isinstance(result, StoreError) else result[0][0].decode() for result in await store.run(groups)]


def _call(store: Store, keys: PartitionKeys, change: ScheduleWrite, at: bytes | None) -> RedisCommand:
    name, seen, definition, link, row, keep = change
    old = Address.unpack(keys.number, at) if at is not None else None
    old_place = old.slice if old is not None else Slice(1000, 0)
    s, f, _, x = keys.slice_keys(old_place.name)
    place = row.slice if row is not None else Slice(1000, 0)
    planned = seen.link is not None and seen.link.planned_ms
    names = [
        keys.n, keys.slices, keys.ids, keys.sched, keys.next, keys.revisions(name), keys.entries(place.name), s, f, x,
    ]  # fmt: skip
    args: list[Any] = [
        name,
        "live" if seen.definition is not None else "gone",
        seen.generation,
        seen.link.claim if seen.link is not None else "",
        "=" if keep else "" if definition is None else pack_definition(definition),
        REVISIONS_KEPT,
        REMOVED_KEPT_MS,
        seen.link.idh if planned and seen.link is not None else "",
        at or "",
        old_place.name,
        repr(old.score) if old is not None else 0,
        old.index if old is not None else 0,
        link.pack() if link is not None else "",
        *((row.idh, place.name, fresh_score(place), address_prefix(place), row.row) if row is not None else [""] * 5),
    ]
    # Planned times that this change passes over: those of a pause that ends here, for example.
    passed = link.state.not_run_since(seen.link.state) if link is not None and seen.link is not None else ()
    runs = [Run(passed_run(definition, slot, store.clock.now_ms())) for slot in passed if definition is not None]
    run_keys, raw = runs_call(store, keys, runs)
    script = "schedule_put" if seen.definition is not None else "schedule_add"
    return store.scripts.call(script, [*names, *run_keys], [*args, raw])


async def over(store: Store, partition: int, idhs: Sequence[bytes]) -> list[str | None]:
    """Return how runs ended, by the hashes of their ids: the state of the task, or None while it is not over."""
    addresses = await look_up(store, [(partition, idh) for idh in idhs])
    there = [(address, idh) for address, idh in zip(addresses, idhs, strict=True) if address is not None]
    found = iter(await look_at(store, there) if there else ())
    queued = await find_queued(store, [(partition, idh) for idh in idhs])
    states: list[str | None] = []
    for address, place in zip(addresses, queued, strict=True):
        state = next(found).state if address is not None else "unknown"
        states.append(state if state in NO_LONGER and place is None else None)
    return states


async def run_before(store: Store, partition: int, name: str, occurrence: tuple[int, int]) -> str | None:
    """Return the id of the run that this planned one has to wait for; None if every earlier run is over."""
    [seen] = await fetch(store, partition, [name])
    definition, link = seen.definition, seen.link
    if definition is None or link is None or (link.generation, link.planned_ms) != occurrence:
        return None
    rule = definition.overlap_rule.word
    if link.state.last_is_over or rule == "allow" or (rule == "skip" and not link.state.is_behind(link.planned_ms)):
        return None
    [end] = await over(store, partition, [link.state.last])
    return occurrence_id(name, link.state.last_ms) if end is None else None


async def note_ends(store: Store, partition: int, links: Iterable[tuple[str, ChainState]]) -> None:
    """Record the ends of runs in their chains; a chain that has advanced since has recorded them already."""
    keys = store.keys.partitions[partition]
    args: list[Any] = []
    for name, link in links:
        args += (name, link.pack())
    await store.call(partition, "schedule_note", [keys.next], args)


T = TypeVar("T")
W = TypeVar("W")


def may_be_long(definition: Definition | None) -> bool:
    """Return whether searching for times may be slow. With excluded times it may take half a second to find the next
    one or that there is none. With several specs, missed times can only be counted one by one."""
    return definition is not None and (bool(definition.exclude) or len(definition.specs) > 1)


async def searched(definitions: Iterable[Definition | None], search: Callable[[], T]) -> T:
    """Run a search for times of these schedules, in a thread if it may be slow.

    Most searches are quick, and a thread would cost more: very many schedules may be due in the same second."""
    if any(map(may_be_long, definitions)):
        return await asyncio.to_thread(search)
    return search()


def found_in_time(work: Sequence[W], search: Callable[[W], T], limit_s: float) -> list[T]:
    """Search items in order until the time limit; at least one."""
    found, until = [], steady_s() + limit_s
    for one in work:
        found.append(search(one))
        if steady_s() >= until:
            break
    return found


AT_ONCE: Final = 500
_TRIES: Final = 8


class Doubtful(NamedTuple):
    """A chain whose planned occurrence may be missing."""

    name: str
    link: ChainState


async def check(store: Store, partition: int, cursor: int, *, overdue_ms: int) -> tuple[int, list[Doubtful]]:
    """Check some chains; return the next cursor (0 at the end) and the doubtful ones."""
    keys = store.keys.partitions[partition]
    reply = await store.call(partition, "schedule_check", [keys.next, keys.ids], [cursor, AT_ONCE, overdue_ms])
    raws = reply[1]
    found = []
    for name, raw in zip(raws[::2], raws[1::2], strict=True):
        try:
            found.append(Doubtful(name.decode(), ChainState.unpack(raw)))
        except (msgspec.DecodeError, ValueError):
            continue  # `mainspring verify` reports it
    return int(reply[0]), found


async def still_planned(store: Store, partition: int, links: Sequence[ChainState]) -> list[tuple[bool, str]]:
    """Return for each chain whether its planned occurrence waits in its slice, and the occurrence's state."""
    addresses = await look_up(store, [(partition, link.idh) for link in links])
    there = [(at, link.idh) for at, link in zip(addresses, links, strict=True) if at is not None]
    found = iter(await look_at(store, there) if there else ())
    states = [next(found).state if address is not None else "unknown" for address in addresses]
    if "unknown" in states:  # the index forgets a cancelled id at once
        cancelled = await last_cancelled(store, [partition])
        gone = [state == "unknown" and link.idh in cancelled for state, link in zip(states, links, strict=True)]
        states = ["cancelled" if is_gone else state for is_gone, state in zip(gone, states, strict=True)]
    return [(state == "pending", state) for state in states]


async def with_called_off(store: Store, seen: Sequence[Seen]) -> list[Seen]:
    """Add cancellations of planned occurrences that no check has found yet, for callers that write schedules: an edit
    must not put a cancelled occurrence again."""
    planned = [
        (i, one.partition, one.link)
        for i, one in enumerate(seen)
        if one.definition is not None and one.link is not None and one.link.planned_ms
    ]
    found = list(seen)
    addresses = await look_up(store, [(partition, link.idh) for _, partition, link in planned]) if planned else []
    missing = [one for one, address in zip(planned, addresses, strict=True) if address is None]
    if missing:  # the index forgets a cancelled id at once
        cancelled = await last_cancelled(store, {partition for _, partition, _ in missing})
        for i, _, link in missing:
            if link.idh in cancelled:
                state = link.state.called_off(link.planned_ms, "cancelled")
                found[i] = found[i]._replace(link=msgspec.structs.replace(link, state=state))
    return found


def reason_of(state: str) -> str:
    """Return why a planned occurrence in this state did not run."""
    return "cancelled" if state == "cancelled" else "lost"


async def schedule_again(store: Store, partition: int, name: str, claim: bytes | None, why: str) -> Written:
    """Put the missing next occurrence of a chain that is at this claim (None: it has no state)."""
    [seen] = await see_at(store, [(partition, name)])
    definition = seen.definition
    if definition is None or (None if seen.link is None else seen.link.claim) != claim:
        return "changed"
    now_ms = store.clock.now_ms()
    next_ms, memory = await searched((definition,), lambda: _onward(definition, seen.link, now_ms, reason_of(why)))
    for _ in range(_TRIES):
        new = link_to(definition, next_ms, memory)
        written = await _write(store, ScheduleWrite(name, seen, definition, new, row_of(definition, new, now_ms), True))
        if written != "taken" or next_ms is None:
            return written
        [(waits, _)] = await still_planned(store, partition, [new])
        if waits:  # it exists, but the chain did not record it
            return await _write(store, ScheduleWrite(name, seen, definition, new, None, True))
        # that one ran already
        next_ms = await searched((definition,), partial(definition.slots.after, next_ms))
    return "taken"


async def plan_past_cancelled(store: Store, ids: Iterable[str]) -> None:
    """Plan the next run of each schedule whose planned run is among these cancelled tasks.

    Otherwise the schedule would stall until its owner checks for missing runs, and miss the runs due by then.
    """
    runs = {one: schedule_of(one) for one in ids if "@" in one and one.endswith("Z")}
    if not runs:
        return
    count = len(store.keys)
    seen = await see_at(store, [(partition_of(name, count), name) for name in runs.values()])
    for (task_id, name), one in zip(runs.items(), seen, strict=True):
        if one.definition is not None and one.link is not None and one.link.idh == idh_of(task_id):
            await schedule_again(store, one.partition, name, one.link.claim, "cancelled")


def _onward(
    definition: Definition, link: ChainState | None, now_ms: int, reason: str
) -> tuple[int | None, ChainMemory]:
    if link is None:
        return from_here(definition, definition.at_ms, now_ms, ChainMemory())
    return after_loss(definition, link, now_ms, reason)


async def _write(store: Store, change: ScheduleWrite) -> Written:
    [written] = await write(store, [change])
    if isinstance(written, StoreError):
        raise written
    return written
