"""The writes of an owner: begin, commit, drop. Every call carries the owner's token.

See docs/internals/protocol.md.
"""

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from ...model.errors import StoreError
from ...model.ids import IDH_BYTES
from ...model.run import Run
from ..job_queue import announce
from ..keys import Address, PartitionKeys, Slice, address_prefix
from ..records import KeptResult
from ..redis.connection import RedisCommand
from ..redis.sender import Group
from ..runs import runs_call
from ..store import Store
from ..tasks.put import fresh_score

WriteStatus = Literal["ok", "fenced", "rolledback", "early", "stale", "more", "refused"]


COUNTS: Final = Struct(">HHHHHIH")
"""Counts of a tick's section: small, large, commits, proofs, known, finished, occurrences."""
_COUNTS: Final = COUNTS.pack
_WHERE: Final = Struct(">HHI").pack
_NUMBERS: Final = Struct(">H").iter_unpack
OCCURRENCE_ARGS: Final = 5
"""Values that describe one occurrence to the server."""
WHOLE: Final = -1
"""Offset of a whole bitmap: the bytes replace the stored ones."""


class Touch(NamedTuple):
    """The bytes of one slice's fired and done bitmaps that change, and the proof that it is that slice."""

    name: str
    keys: tuple[str, str, str, str]
    g: str
    m: int
    """Index of the row whose header is the proof; -1 when all rows were proven by an earlier call."""
    header: bytes
    f_at: int
    """First byte of `f`; WHOLE if `f` is the whole bitmap."""
    f: bytes
    d_at: int
    d: bytes


MOST_TOUCHES: Final = 1_000
"""Limit of slices and sections per call: Lua can unpack only some thousand values at once."""


UNREAD: Final = -1
"""Cursor of a member that is not a slice, and is never read."""


class Known(NamedTuple):
    """A slice as far as it was read; lets the server check that nothing unread comes before a lane's task."""

    name: str | bytes
    entries: str
    g: str
    cursor: int


class NextOccurrence(msgspec.Struct, frozen=True, gc=False):
    """Changes to a schedule's chain when an occurrence of it begins, or is skipped."""

    name: str
    claim: bytes
    """Start of the chain that is advanced; if it differs, the schedule was edited, or this was done before."""
    value: bytes
    """The new chain."""
    slice: Slice | None
    """Slice in which the following occurrence is put; None if there is no further one."""
    row: bytes
    skipped: tuple[str, int, bytes] | None
    """For an occurrence that does not run: the key of x, its index, and the hash of its id."""


class Section(NamedTuple):
    """Commits and begins of one partition in a tick."""

    partition: int
    token: bytes
    seq: int
    max_due_ms: int | None
    finished: int
    touches: list[Touch]
    known: list[Known]
    occurrences: Sequence[NextOccurrence] = ()


ChainClaim = tuple[str, bytes]
"""A schedule, and the start of its chain as an owner knows it."""


class TickReply(NamedTuple):
    status: WriteStatus
    x: list[bytes]
    """Cancelled bits, per touched slice, of the byte range whose fired bits were set."""
    left_alone: frozenset[ChainClaim] = frozenset()
    """Chains of schedules that were edited, or had advanced before: another call has noted what did not run."""


async def tick(store: Store, sections: Sequence[Section]) -> list[TickReply | StoreError]:
    """Commit and begin for many partitions: one call per server, or in a cluster one per partition."""
    chunks = [[i] for i in range(len(sections))] if store.servers.cluster else _chunks(sections)
    groups = [_tick_group(store, [sections[i] for i in chunk]) for chunk in chunks]
    answers: list[TickReply | StoreError] = []
    newest_us = 0
    for chunk, result in zip(chunks, await store.run(groups), strict=True):
        if isinstance(result, StoreError):
            answers += [result] * len(chunk)
            continue
        [reply] = result
        newest_us = max(newest_us, reply[0])
        for i, row in zip(chunk, reply[1:], strict=True):
            answers.append(_tick_reply(sections[i], cast("WriteStatus", row[0].decode()), row[1:]))
    if newest_us:
        # All answers wait for the slowest server, so the time in an early one is old by now. Sampled last, it would set
        # the clock back behind begins of this same call, and tasks that expired before them would be delivered.
        store.clock.sample(newest_us)
    return answers


def _tick_reply(section: Section, status: WriteStatus, x: list[bytes]) -> TickReply:
    if status != "ok":
        return TickReply(status, [])
    if not section.occurrences:
        return TickReply(status, _x_by_touch(section, x))
    *x, numbers = x
    left_alone = [section.occurrences[number] for (number,) in _NUMBERS(numbers)]
    return TickReply(status, _x_by_touch(section, x), frozenset((one.name, one.claim) for one in left_alone))


def _chunks(sections: Sequence[Section]) -> list[list[int]]:
    chunks: list[list[int]] = []
    touches = MOST_TOUCHES
    for i, section in enumerate(sections):
        if touches + len(section.touches) > MOST_TOUCHES:
            chunks.append([])
            touches = 0
        chunks[-1].append(i)
        touches += len(section.touches) + 1
    return chunks


def _tick_group(store: Store, sections: list[Section]) -> Group:
    fences: list[str] = []
    small_x: list[str] = []
    small_f: list[str] = []
    keys: list[str] = []
    latest = max((one.max_due_ms for one in sections if one.max_due_ms is not None), default="")
    args: list[Any] = [len(sections), 0, latest]
    for section in sections:
        names = store.keys.partitions[section.partition]
        fences.append(names.fence)
        args += (b"%b:%d" % (section.token, section.seq - 1), b"%b:%d" % (section.token, section.seq))
        touches = section.touches
        if (
            len(touches) == 1
            and touches[0].f_at == WHOLE
            and touches[0].m < 0
            and not touches[0].d
            and not section.known
            and not section.occurrences
        ):
            # The common section, without extra work.
            [touch] = touches
            small_x.append(touch.keys[3])
            small_f.append(touch.keys[1])
            args += ("", touch.f)
        else:
            _add_section(names, section, small_x, small_f, keys, args)
    args[1] = len(small_x)
    slot = store.keys.partitions[sections[0].partition].slot
    return slot, [store.scripts.call("tick", [*fences, *small_x, *small_f, *keys], args)]


def _add_section(
    names: PartitionKeys,
    section: Section,
    small_x: list[str],
    small_f: list[str],
    keys: list[str],
    args: list[Any],
) -> None:
    """Add a section to the lists in the order of tick.lua: by the operation on a slice, not slice by slice."""
    touches, known = section.touches, section.known
    small = [touch for touch in touches if touch.f and touch.f_at == WHOLE]
    large = [touch for touch in touches if touch.f and touch.f_at != WHOLE]
    commits = [touch for touch in touches if touch.d]
    proofs = [touch for touch in touches if touch.m >= 0]
    occurrences = section.occurrences
    args.append(
        _COUNTS(len(small), len(large), len(commits), len(proofs), len(known), section.finished, len(occurrences))
    )
    for touch in small:
        small_x.append(touch.keys[3])
        small_f.append(touch.keys[1])
        args.append(touch.f)
    for touch in large:
        keys += (touch.keys[1], touch.keys[3])
        args += (touch.f_at, touch.f)
    for touch in commits:
        keys.append(touch.keys[2])
        args += (touch.d_at, touch.d)
    if section.finished:
        keys.append(names.n)
    if proofs or known:
        keys.append(names.slices)
    for touch in proofs:
        keys.append(touch.keys[0])
        args += (touch.name, touch.g, touch.m, touch.header)
    if known:
        args.append(section.max_due_ms or 0)
    for name, entries, g, cursor in known:
        keys.append(entries)
        args += (name, g, cursor)
    if occurrences:
        _add_occurrences(names, occurrences, keys, args)


def _add_occurrences(
    names: PartitionKeys, occurrences: Sequence[NextOccurrence], keys: list[str], args: list[Any]
) -> None:
    wanted = (one.slice for one in occurrences if one.slice is not None)
    places = {place: number for number, place in enumerate(dict.fromkeys(wanted), 1)}
    skips: dict[str, int] = {}
    rows: list[Any] = []
    for one in occurrences:
        place, skipped = one.slice, one.skipped
        number = 0 if place is None else places[place]
        if skipped is None:
            where = _WHERE(number, 0, 0)
        else:
            x, index, idh = skipped
            where = _WHERE(number, skips.setdefault(x, len(skips) + 1), index) + idh
        rows += (one.name, one.claim, one.value, one.row, where)
    keys += (names.next, names.ids, names.n, names.slices)
    keys += (names.entries(place.name) for place in places)
    keys += skips
    args += (len(places), len(skips))
    for place in places:
        args += (place.name, fresh_score(place), address_prefix(place))
    args += rows


def _x_by_touch(section: Section, x: list[bytes]) -> list[bytes]:
    """Return the answers in the order of the touches; the script lists small slices first."""
    if len(section.touches) == 1:
        return x or [b""]
    small = iter(x)
    by_touch = {id(touch): next(small) for touch in section.touches if touch.f and touch.f_at == WHOLE}
    by_touch |= {id(touch): next(small) for touch in section.touches if touch.f and touch.f_at != WHOLE}
    return [by_touch.get(id(touch), b"") for touch in section.touches]


MOST_TASKS: Final = 1_000
"""Most tasks for workers in one call: Lua can unpack only some thousand values at once."""

MOST_BYTES: Final = 4 << 20
"""Maximum bytes of a call, give or take one task: the server answers no other call while it reads."""

BUSY: Final = b""
"""Answer for a task that has to wait: another task with its id is in a queue."""


class NewPlace(NamedTuple):
    """A retry: the entry to append, its slice, and the (packed) address of the failed attempt."""

    idh: bytes
    slice: Slice
    row: bytes
    old: bytes
    left: str = ""
    """Name of the slice it leaves a mark in; None for a task that no handle knows by its place."""
    mark: bytes = b""


class Moves(NamedTuple):
    """Held tasks of one slice that were not begun, and the hold slice in which they are to wait."""

    keys: tuple[str, str, str, str]
    head: bytes
    """Common prefix of the packed addresses of all entries of that slice."""
    f_at: int
    f: bytes
    """The fired bits of the slice, with those of these tasks set; f_at is WHOLE if it is the whole bitmap."""
    slice: Slice
    rows: list[bytes | int]
    """In turn: index in the old slice, mark that is left there (or nothing), and entry for the hold slice."""


class Death(NamedTuple):
    idh: bytes
    record: bytes
    at_ms: int


class Commit(NamedTuple):
    """Outcomes of one partition that need more than a done bit."""

    partition: int
    token: bytes
    seq: int
    finished: int
    replaced: int
    touches: list[Touch]
    retries: list[NewPlace]
    deaths: list[Death]
    holds: list[tuple[str, bytes]]
    """(lane, idh of the head whose retry it waits for and, packed, since when); an empty text frees the lane."""
    moves: Sequence[Moves] = ()
    records: Sequence[tuple[str, bytes]] = ()
    """(name of a hold slice, record of its hold); an empty record forgets it."""
    answers: Sequence[KeptResult] = ()
    """Responses of receivers: stored in the same step, so that a task that is done has its response."""
    runs: Sequence[Run] = ()
    """What the history keeps of these attempts, written in the same step."""
    queues: Mapping[str, Sequence[bytes]] = {}
    """Tasks for workers. Queue -> records: the packed address a task comes from, then its entry."""
    acks: Sequence[bytes] = ()
    """Packed addresses of tasks whose workers' acks are settled by this call, and removed."""


class CommitReply(NamedTuple):
    status: WriteStatus
    answers: Mapping[int, bytes] = {}
    """For some tasks for workers, by position among all records: BUSY, or how an earlier run had ended."""
    listening: int | None = None
    """Workers that were called; None if none was."""


async def commit(store: Store, work: Commit) -> WriteStatus:
    """Make one commit."""
    [reply] = await commit_all(store, [work])
    if isinstance(reply, StoreError):
        raise reply
    return reply.status


async def commit_all(store: Store, works: Sequence[Commit], listening: int = 1) -> list[CommitReply | StoreError]:
    """Make one commit per partition, all in one trip per server. Each worker learns how many are `listening`."""
    replies: list[CommitReply | StoreError] = []
    results = await store.run([_commit_group(store, work, listening) for work in works])
    for work, result in zip(works, results, strict=True):
        if isinstance(result, StoreError):
            replies.append(result)
            continue
        now_us, status, flat = result[0]
        store.clock.sample(now_us)
        answers = {position - 1: answer for position, answer in zip(flat[::2], flat[1::2], strict=True)}
        called = result[1] if work.queues and isinstance(result[1], int) else None  # it may lack the right to publish
        replies.append(CommitReply(cast("WriteStatus", status.decode()), answers, called))
    return replies


def _commit_group(store: Store, work: Commit, listening: int) -> Group:
    names = store.keys.partitions[work.partition]
    wanted = [retry.slice for retry in work.retries] + [moves.slice for moves in work.moves]
    places = {place: number for number, place in enumerate(dict.fromkeys(wanted), 1)}
    keys = [names.fence, names.n, names.slices, names.dead, names.dead_times, names.held, names.ids, names.holds]
    run_keys, runs = runs_call(store, names, work.runs)
    args: list[Any] = [
        work.token, work.seq, work.finished, work.replaced, len(work.touches), len(places),
        len(work.retries), len(work.deaths), len(work.holds), len(work.moves), len(work.records),
        len(work.answers), runs, len(work.queues), sum(map(len, work.queues.values())), len(work.acks),
    ]  # fmt: skip
    for touch in work.touches:
        s, _, d, _ = touch.keys
        keys += (s, d)
        args += (touch.name, touch.g, touch.m, touch.header, touch.d_at, touch.d)
    if work.queues:
        _add_queues(names, work.queues, keys, args)
    for place in places:
        keys.append(names.entries(place.name))
        args += (place.name, fresh_score(place))
    touched = {touch.name: number for number, touch in enumerate(work.touches, 1)}
    for idh, place, row, old, left, mark in work.retries:
        args += (places[place], idh, address_prefix(place), row, old, touched.get(left, 0) if mark else 0, mark)
    for death in work.deaths:
        args += death
    for hold in work.holds:
        args += hold
    _add_moves(work.moves, places, keys, args)
    for record in work.records:
        args += record
    for answer in work.answers:
        keys.append(names.result(answer.idh))
        args += (answer.ttl_ms, answer.data)
    keys += (names.acks, *run_keys)
    args += work.acks
    call: RedisCommand = store.scripts.call("commit", keys, args)
    # Not within the script: see `put`, whose wake-up follows its transaction for the same reason.
    return names.slot, [call, announce(names, work.queues, listening)] if work.queues else [call]


def _add_queues(names: PartitionKeys, queues: Mapping[str, Sequence[bytes]], keys: list[str], args: list[Any]) -> None:
    keys += (names.queued, names.acks, names.queues, *map(names.queue, queues))
    for queue, records in queues.items():
        args += (queue, len(records))
    for records in queues.values():
        args += records


def _add_moves(all_moves: Sequence[Moves], places: dict[Slice, int], keys: list[str], args: list[Any]) -> None:
    for (s, f, _, x), head, f_at, bits, place, rows in all_moves:
        keys += (s, f, x)
        args += (places[place], address_prefix(place), head, f_at, bits, len(rows) // 3, *rows)


class FinishedSlice(NamedTuple):
    """A slice that its owner believes to be done."""

    partition: int
    token: bytes
    slice: Slice
    g: float
    record: bytes = b""
    """Record of a hold slice's hold, kept as long as the ids of its tasks are."""


async def drop(store: Store, slices: Sequence[FinishedSlice]) -> list[WriteStatus | StoreError]:
    groups: list[Group] = []
    for part, token, place, g, record in slices:
        names = store.keys.partitions[part]
        keys = [names.own, names.slices, *names.slice_keys(place.name), names.holds]
        call: RedisCommand = store.scripts.call("drop", keys, [token, place.name, repr(g), place.over_ms, record])
        groups.append((names.slot, [call]))
    return [
        result if isinstance(result, StoreError) else cast("WriteStatus", result[0][1].decode())
        for result in await store.run(groups)
    ]


AT_ONCE: Final = 1_000


class Acks(NamedTuple):
    acks: dict[bytes, tuple[bytes, bytes]]
    """Packed address -> idh, and how the task ended (see `queue_end.decode_ack`)."""
    cursor: int
    """The next cursor; 0 at the end."""


async def read_acks(store: Store, cursors: Mapping[int, int]) -> list[Acks | StoreError]:
    """Read some acks of each partition, from its cursor: entries that no node awaits must not hide the others."""
    groups: list[Group] = []
    for p, cursor in cursors.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HSCAN", keys.acks, cursor, "COUNT", AT_ONCE)]))
    answers: list[Acks | StoreError] = []
    for result in await store.run(groups):
        if isinstance(result, StoreError):
            answers.append(result)
            continue
        cursor, flat = result[0]
        found = {
            address: (value[:IDH_BYTES], value[IDH_BYTES:])
            for address, value in zip(flat[::2], flat[1::2], strict=True)
        }
        answers.append(Acks(found, int(cursor)))
    return answers


async def sweep_acks(store: Store, partition: int) -> None:
    """Remove some acks whose slices are gone, of tasks that no owner awaited: they were cancelled while they ran. Until
    then such an ack does no harm: no other task gets its address."""
    [answer] = await read_acks(store, {partition: 0})
    if isinstance(answer, StoreError):
        raise answer
    if not answer.acks:
        return
    keys = store.keys.partitions[partition]
    places = {raw: Address.unpack(partition, raw) for raw in answer.acks}
    asked: list[RedisCommand] = [("ZSCORE", keys.slices, place.slice.name) for place in places.values()]
    scores = await store.run_one(keys.slot, asked)
    # No two slices ever have the same incarnation: a slice that is gone now stays gone.
    gone = [
        raw for (raw, place), score in zip(places.items(), scores, strict=True)
        if score is None or float(score) != place.score
    ]  # fmt: skip
    if gone:
        await store.run_one(keys.slot, [("HDEL", keys.acks, *gone)])
