"""Schedules on the server: read them, write them, look after their chains. See docs/wire-format.md."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

from ..model.chain import Link
from ..model.errors import StoreError
from ..model.occurrence import occurrence_id
from ..model.schedule import Definition, pack_definition, unpack_definition
from .index import look_up, look_up_packed
from .keys import Address, PartitionKeys, Slice, address_prefix, partition_of
from .put import WAKE_MS, fresh_score
from .query import look_at
from .queue_state import find_queued
from .schedule_rows import OccurrenceRow
from .store import Group, Store
from .wire import Command

REVISIONS_KEPT: Final = 20
REMOVED_KEPT_MS: Final = 30 * 86_400_000
"""So long the revisions of a removed schedule are kept: its name goes on counting from the last generation."""
_POINTER: Final = bytes(4)
"""No definition has generation 0."""
NO_LONGER: Final = frozenset({"done", "dead", "cancelled", "replaced", "finished", "unknown"})
"""States of a task that is over."""

Written = Literal["ok", "changed", "moved", "taken"]


class Seen(NamedTuple):
    """A schedule as it stands: what the next write of it is compared with."""

    definition: Definition | None
    link: Link | None
    generation: int
    """Of the definition, or of the last revision of one that was removed; 0: the name is new."""
    partition: int
    """Where it lives: the partition of its lane, or of its name where it has none."""
    pointed: bytes = b""
    """What the partition of its name holds where it lives in another."""


class Change(NamedTuple):
    """What one write of a schedule does."""

    name: str
    seen: Seen
    definition: Definition | None
    """None removes it."""
    link: Link | None
    row: OccurrenceRow | None
    keep: bool = False
    """The definition stays as it is: only the chain is planted anew."""


def point_to(lane: str) -> bytes:
    """Stands in the place of a definition: look in the partition of this lane."""
    return _POINTER + lane.encode()


def is_pointer(raw: bytes) -> bool:
    return raw.startswith(_POINTER)


def _read(partition: int, definition: bytes | None, link: bytes | None, revision: bytes | None = None) -> Seen:
    found = None if definition is None else unpack_definition(definition)
    generation = int.from_bytes(revision[:4], "big") if revision is not None else 0
    if found is not None:
        generation = found.generation
    return Seen(found, None if link is None else Link.unpack(link), generation, partition)


async def fetch(store: Store, partition: int, names: Sequence[str]) -> list[Seen]:
    """For the owner: definitions and chains, in order."""
    keys = store.keys.partitions[partition]
    [definitions, links] = await store.run_one(keys.slot, [("HMGET", keys.sched, *names), ("HMGET", keys.next, *names)])
    return [
        _read(partition, None if raw is not None and is_pointer(raw) else raw, link)
        for raw, link in zip(definitions, links, strict=True)
    ]


async def see(store: Store, names: Sequence[str]) -> list[Seen]:
    """For writers: also the generation to go on from."""
    found = await see_at(store, [(partition_of(name, len(store.keys)), name) for name in names])
    moved = [i for i, one in enumerate(found) if one.pointed]
    if moved:
        lanes = [found[i].pointed[len(_POINTER) :].decode() for i in moved]
        others = [(partition_of(lane, len(store.keys)), names[i]) for lane, i in zip(lanes, moved, strict=True)]
        for i, one in zip(moved, await see_at(store, others), strict=True):
            found[i] = one._replace(pointed=found[i].pointed)
    return found


async def see_at(store: Store, wanted: Sequence[tuple[int, str]]) -> list[Seen]:
    """What these partitions hold of these names."""
    groups: list[Group] = []
    for partition, name in wanted:
        keys = store.keys.partitions[partition]
        commands: list[Command] = [
            ("HGET", keys.sched, name), ("HGET", keys.next, name), ("LINDEX", keys.revisions(name), 0),
        ]  # fmt: skip
        groups.append((keys.slot, commands))
    found = []
    for (partition, _), result in zip(wanted, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            raise result
        if result[0] is not None and is_pointer(result[0]):
            found.append(Seen(None, None, 0, partition, result[0]))
        else:
            found.append(_read(partition, *result))
    return found


async def point(store: Store, name: str, seen: bytes, new: bytes) -> bool:
    """Change what the partition of a name says of where it lives; False when somebody else did."""
    keys = store.keys.partitions[partition_of(name, len(store.keys))]
    return bool(await store.call(keys.number, "schedule_point", [keys.sched], [name, seen, new]))


async def revisions(store: Store, partitions: Iterable[int], name: str) -> list[Definition]:
    """Former definitions that these partitions keep, the newest first."""
    groups: list[Group] = []
    for partition in partitions:
        keys = store.keys.partitions[partition]
        groups.append((keys.slot, [("LRANGE", keys.revisions(name), 0, REVISIONS_KEPT - 1)]))
    found = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            raise result
        found += [unpack_definition(raw) for raw in result[0]]
    return sorted(found, key=lambda one: one.at_ms, reverse=True)


async def page(store: Store, partition: int, cursor: int, count: int = 200) -> tuple[int, list[Seen]]:
    """Some schedules of a partition, in no order; the next cursor is 0 at the end."""
    keys = store.keys.partitions[partition]
    [reply] = await store.run_one(keys.slot, [("HSCAN", keys.sched, cursor, "COUNT", count)])
    names = reply[1][::2]
    if not names:
        return int(reply[0]), []
    [links] = await store.run_one(keys.slot, [("HMGET", keys.next, *names)])
    rows = zip(reply[1][1::2], links, strict=True)
    return int(reply[0]), [_read(partition, raw, link) for raw, link in rows if not is_pointer(raw)]


async def write(store: Store, changes: Sequence[Change]) -> list[Written | StoreError]:
    """Each change in one step; `changed` and `moved` mean that nothing was written and to look again."""
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
        commands: list[Command] = [_call(store, keys, change, at)]
        if change.row is not None and change.row.due_ms < now_ms + WAKE_MS:
            commands.append(("SPUBLISH", keys.wake, "1"))
        groups.append((keys.slot, commands))
    return [result if isinstance(result, StoreError) else result[0][0].decode() for result in await store.run(groups)]


def _call(store: Store, keys: PartitionKeys, change: Change, at: bytes | None) -> Command:
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
    return store.scripts.call("schedule_put" if seen.definition is not None else "schedule_add", names, args)


async def over(store: Store, partition: int, idhs: Sequence[bytes]) -> list[str | None]:
    """How runs ended, by the hashes of their ids: the state of the task, None while it is not over."""
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
    """The id of the run that this planned one has to wait for; None when there is none that is not over."""
    [seen] = await fetch(store, partition, [name])
    definition, link = seen.definition, seen.link
    if definition is None or link is None or (link.generation, link.planned_ms) != occurrence:
        return None
    rule = definition.overlap_rule.word
    if link.state.last_is_over or rule == "allow" or (rule == "skip" and not link.state.is_behind(link.planned_ms)):
        return None
    [end] = await over(store, partition, [link.state.last])
    return occurrence_id(name, link.state.last_ms) if end is None else None


async def note_ends(store: Store, partition: int, links: Iterable[tuple[str, Link]]) -> None:
    """Write what chains remember of runs that ended; a chain that has moved on since knows it already."""
    keys = store.keys.partitions[partition]
    args: list[Any] = []
    for name, link in links:
        args += (name, link.pack())
    await store.call(partition, "schedule_note", [keys.next], args)
