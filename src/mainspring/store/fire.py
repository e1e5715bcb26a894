"""What an owner writes: begin, commit, drop. Every call carries the owner's token. See PROTOCOL."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

from ..model.errors import StoreError
from .keys import Slice, address_prefix, bucket_of
from .put import fresh_score
from .store import Group, Store
from .wire import Command

Status = Literal["ok", "fenced", "rolledback", "early", "stale", "more", "refused"]


class Touch(NamedTuple):
    """The bytes of the fired and done bitmaps of one slice that change, and the proof that it is that slice."""

    slice: Slice
    g: float
    m: int
    header: bytes
    f_at: int
    f: bytes
    d_at: int
    d: bytes


class Known(NamedTuple):
    """A slice as far as it was read; lets the server see that nothing stands unread before a lane's task."""

    slice: Slice
    g: float
    cursor: int


class Section(NamedTuple):
    """What one partition commits and begins in a tick."""

    partition: int
    token: bytes
    seq: int
    max_due_ms: int | None
    finished: int
    touches: list[Touch]
    known: list[Known]


class Answer(NamedTuple):
    status: Status
    x: list[bytes]
    """Cancelled bits, per touched slice, of the byte range whose fired bits were set."""


async def tick(store: Store, sections: Sequence[Section]) -> list[Answer | StoreError]:
    """Commit and begin for many partitions: one call a server, in a cluster one a partition."""
    chunks = [[i] for i in range(len(sections))] if store.links.cluster else [list(range(len(sections)))]
    groups = [_tick_group(store, [sections[i] for i in chunk]) for chunk in chunks]
    answers: list[Answer | StoreError] = []
    for chunk, result in zip(chunks, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            answers += [result] * len(chunk)
            continue
        [reply] = result
        store.clock.sample(reply[0])
        answers += [Answer(cast("Status", row[0].decode()), row[1:]) for row in reply[1:]]
    return answers


def _tick_group(store: Store, sections: list[Section]) -> Group:
    keys: list[str] = []
    args: list[Any] = [len(sections)]
    for part, token, seq, max_due_ms, finished, touches, known in sections:
        names = store.keys.partitions[part]
        keys += (names.own, names.n, names.slices)
        due = "" if max_due_ms is None else max_due_ms
        args += (token, seq, due, finished, len(touches), len(known))
        for place, g, m, header, f_at, f, d_at, d in touches:
            name = place.name
            keys += names.slice_keys(name)
            args += (name, repr(g), m, header, f_at, f, d_at, d)
        for place, g, cursor in known:
            name = place.name
            keys.append(names.entries(name))
            args += (name, repr(g), cursor)
    slot = store.keys.partitions[sections[0].partition].slot
    return slot, [store.scripts.call("tick", keys, args)]


class NewPlace(NamedTuple):
    """A retry: the entry to append and the slice it belongs to."""

    idh: bytes
    slice: Slice
    row: bytes


class Death(NamedTuple):
    idh: bytes
    record: bytes
    at_ms: int


class Commit(NamedTuple):
    """Outcomes of one partition that are more than plain success."""

    partition: int
    token: bytes
    seq: int
    finished: int
    replaced: int
    touches: list[Touch]
    retries: list[NewPlace]
    deaths: list[Death]
    holds: list[tuple[str, bytes]]
    """(lane, idh of the head whose retry it waits for); an empty idh frees the lane."""


async def commit(store: Store, work: Commit) -> Status:
    names = store.keys.partitions[work.partition]
    places = list(dict.fromkeys(retry.slice for retry in work.retries))
    buckets = list(dict.fromkeys(bucket_of(retry.idh) for retry in work.retries))
    keys = [names.own, names.n, names.slices, names.dead, names.dead_times, names.held]
    args: list[Any] = [
        work.token, work.seq, work.finished, work.replaced, len(work.touches),
        len(places), len(work.retries), len(work.deaths), len(work.holds),
    ]  # fmt: skip
    for touch in work.touches:
        s, _, d, _ = names.slice_keys(touch.slice.name)
        keys += (s, d)
        args += (touch.slice.name, repr(touch.g), touch.m, touch.header, touch.d_at, touch.d)
    for place in places:
        keys.append(names.entries(place.name))
        args += (place.name, fresh_score(place))
    keys += [names.ids(bucket) for bucket in buckets]
    for idh, place, row in work.retries:
        at, bucket = places.index(place) + 1, buckets.index(bucket_of(idh)) + 1
        args += (at, bucket, idh, address_prefix(place), row)
    for death in work.deaths:
        args += death
    for hold in work.holds:
        args += hold
    reply = await store.call(work.partition, "commit", keys, args)
    store.clock.sample(reply[0])
    return cast("Status", reply[1].decode())


class Finished(NamedTuple):
    """A slice that its owner believes to be done."""

    partition: int
    token: bytes
    slice: Slice
    g: float


async def drop(store: Store, slices: Sequence[Finished]) -> list[Status | StoreError]:
    groups: list[Group] = []
    for part, token, place, g in slices:
        names = store.keys.partitions[part]
        keys = [names.own, names.slices, *names.slice_keys(place.name)]
        call: Command = store.scripts.call("drop", keys, [token, place.name, repr(g), place.end_ms])
        groups.append((names.slot, [call]))
    return [
        result if isinstance(result, StoreError) else cast("Status", result[0][1].decode())
        for result in await store.run(groups)
    ]
