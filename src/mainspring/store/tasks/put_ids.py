"""Put tasks with caller-given ids: entries and index change in one step. See docs/internals/protocol.md#put."""

import asyncio
import time
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, cast

from ...model.errors import Conflict, MainspringError, NotConfirmed, StoreError, Unavailable
from ...model.ids import idh_of, schedule_named
from ...model.task import Handle, OnConflict, PutOutcome, TaskInfo
from ..codec import HEADER_BYTES, decode
from ..durability import SERVER, Durability, executed
from ..keys import Address, PartitionKeys, Slice, address_prefix, partition_of
from ..queue_state import find_queued
from ..redis.connection import RedisCommand
from ..redis.sender import Group
from ..store import Store
from .encode import Intake, Named
from .find import Finder, Reference
from .index import (
    MOST_AT_ONCE,
    ConflictBackoff,
    IdInLane,
    IdRow,
    Replaced,
    fields_or_failures,
    forget_lane,
    note_lanes,
    replace,
)
from .put import CROWDED, WAKE_MS, Widths, fresh_score
from .query import Found, look_at

MANY: Final = 32
"""Number of entries from which a transaction costs less than passing all of them to a script."""

SHARES_AT_ONCE: Final = 32
"""Most partitions of one such script: the server does nothing else meanwhile."""

RowsBySlice = dict[Slice, list[int]]
"""Row numbers by slice, in the order in which they are sent."""


class _Share:
    """Rows of one partition in one call."""

    __slots__ = ("first", "keys", "order", "rows")

    def __init__(self, keys: PartitionKeys, first: int, rows: Sequence[IdRow]) -> None:
        self.keys, self.first, self.rows = keys, first, rows
        self.order: RowsBySlice = {rows[0].slice: [0]}
        if len(rows) > 1:
            for i in range(1, len(rows)):
                self.order.setdefault(rows[i].slice, []).append(i)


async def put_ids(
    store: Store,
    by_partition: dict[int, list[IdRow]],
    widths: Widths,
    *,
    now_ms: int,
    durability: Durability = SERVER,
    short: dict[int, NotConfirmed] | None = None,
) -> dict[int, dict[int, Address] | StoreError]:
    """Put rows unless their id is known; return, per partition, row numbers and addresses of the known ones.

    The ids of a partition must be distinct within one call. `short` gets the partitions whose rows are stored, but not
    at the requested durability.
    """
    shares: list[_Share] = []
    for p, rows in by_partition.items():
        keys = store.keys.partitions[p]
        if len(rows) <= MOST_AT_ONCE:
            shares.append(_Share(keys, 0, rows))
        else:
            shares += [_Share(keys, at, rows[at : at + MOST_AT_ONCE]) for at in range(0, len(rows), MOST_AT_ONCE)]
    calls = _calls(shares, together=not store.servers.cluster)
    groups = [_group(store, call, now_ms, durability) for call in calls]
    answers: dict[int, dict[int, Address] | StoreError] = {p: {} for p in by_partition}
    for call, result in zip(calls, await store.run(groups, durability), strict=True):
        done = executed(result)
        for at, share in enumerate(call):
            p = share.keys.number
            so_far = answers[p]
            if done is None or isinstance(so_far, StoreError):
                answers[p] = result if isinstance(result, StoreError) else so_far
                continue
            if short is not None and isinstance(result, NotConfirmed):
                short[p] = result
            many = len(share.rows) >= MANY
            so_far.update(_known(share, done[_EXEC + len(share.order)][-1] if many else done[0][at], widths))
    return answers


def _calls(shares: list[_Share], *, together: bool) -> list[list[_Share]]:
    """Let small shares use one call if one server has all slots: a call of its own costs more than its rows."""
    if not together:
        return [[share] for share in shares]
    few = [share for share in shares if len(share.rows) < MANY]
    return [[share] for share in shares if len(share.rows) >= MANY] + [
        few[at : at + SHARES_AT_ONCE] for at in range(0, len(few), SHARES_AT_ONCE)
    ]


def _group(store: Store, call: list[_Share], now_ms: int, durability: Durability) -> Group:
    many = len(call[0].rows) >= MANY
    commands = _many(store, call[0]) if many else [_few(store, call)]
    soon_ms = now_ms + WAKE_MS
    wakes = {share.keys.wake: None for share in call for row in share.rows if row.due_ms < soon_ms}
    commands += [("SPUBLISH", wake, "1") for wake in wakes]
    if durability.confirm is not None:
        # If every id was known, nothing was written, and WAIT would confirm nothing at once.
        commands.append(("HINCRBY", call[0].keys.n, "accepted", 0))
    return call[0].keys.slot, commands


def _few(store: Store, call: list[_Share]) -> RedisCommand:
    """Return one script call with all rows."""
    args: list[Any] = [len(call)]
    names: list[str] = []
    for share in call:
        keys, rows = share.keys, share.rows
        names += (keys.n, keys.slices, keys.ids)
        if len(rows) == 1:  # usual when single puts of many callers share a call
            place = rows[0].slice
            name = place.name
            names.append(keys.entries(name))
            args += (1, name, fresh_score(place), address_prefix(place), 1, rows[0].row)
            continue
        args.append(len(share.order))
        for place, members in share.order.items():
            name = place.name
            names.append(keys.entries(name))
            args += (name, fresh_score(place), address_prefix(place), len(members))
            args += [rows[i].row for i in members]
    return store.scripts.call("put_ids", names, args)


_EXEC: Final = 3
"""Position of EXEC's reply, not counting pushes: after MULTI, ZADD and the script."""


def _many(store: Store, share: _Share) -> list[RedisCommand]:
    """Return plain appends, and a script call that carries only the ids."""
    keys, rows = share.keys, share.rows
    scores: list[Any] = []
    pushes: list[RedisCommand] = []
    names = [keys.n, keys.slices, keys.ids]
    idhs: list[bytes] = []
    args: list[Any] = []
    for place, members in share.order.items():
        name = place.name
        s = keys.entries(name)
        scores += (fresh_score(place), name)
        pushes.append(("RPUSH", s, *[rows[i].row for i in members]))
        idhs += [rows[i].idh for i in members]
        names.append(s)
        args += (name, address_prefix(place), len(members))
    return [
        ("MULTI",),
        ("ZADD", keys.slices, "NX", *scores),
        *pushes,
        store.scripts.whole("register", names, [b"".join(idhs), *args]),
        ("EXEC",),
    ]


def _known(share: _Share, reply: Any, widths: Widths) -> dict[int, Address]:
    put, taken = reply
    partition = share.keys.number
    if max(put[1::2]) + len(share.rows) > CROWDED:
        for at, (place, members) in enumerate(share.order.items()):
            widths.saw(partition, place, put[at * 2 + 1] + len(members))
    if not taken:
        return {}
    sent = [i for members in share.order.values() for i in members]
    return {
        share.first + sent[position - 1]: Address.unpack(partition, raw)
        for position, raw in zip(taken[::2], taken[1::2], strict=True)
    }


class RetryWindow:
    """How long a call retries after temporary failures: once immediately, then for `wait_s`."""

    def __init__(self, store: Store, wait_s: float) -> None:
        self._store = store
        self.wait_s = wait_s
        self._deadline = time.monotonic() + wait_s
        self._pause_s = 0.0
        self.unsure = False
        """A request was sent and its reply lost: what is stored now may be our own write."""
        self.shortfall: NotConfirmed | None = None
        """Something is stored, but not at the requested durability."""

    def level(self, asked: Durability) -> Durability:
        return asked if self.shortfall is None else SERVER

    async def after(self, failure: StoreError) -> None:
        """Wait before the next attempt, or raise the failure."""
        if not isinstance(failure, Unavailable) or (self._pause_s and time.monotonic() >= self._deadline):
            raise failure
        self.unsure = self.unsure or failure.sent
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(1.0, self._pause_s * 2 or 0.02)
        await self._store.recover()


async def ids_of_runs(store: Store, ids: Sequence[str], wait_s: float = 0.0) -> dict[int, Conflict]:
    """Return the refusals of ids that belong to runs of schedules, by number.

    Such a run is stored with its schedule, so a put would not find it: there would be two tasks with one id and one
    idempotency key, and receivers would drop one of them.
    """
    named = {i: name for i, id in enumerate(ids) if (name := schedule_named(id)) is not None}
    if not named:
        return {}
    names = sorted(set(named.values()))
    homes = [store.keys.partitions[partition_of(name, len(store.keys))] for name in names]
    groups: list[Group] = [
        (keys.slot, [("HEXISTS", keys.sched, name)]) for keys, name in zip(homes, names, strict=True)
    ]
    window = RetryWindow(store, wait_s)
    answers = await store.run(groups)
    while failure := next((one for one in answers if isinstance(one, StoreError)), None):
        await window.after(failure)
        answers = await store.run(groups)
    there = {name for name, [exists] in zip(names, cast("list[Any]", answers), strict=True) if exists}
    return {
        i: Conflict(f"id {ids[i]!r} is that of a run of schedule {name!r}; choose another")
        for i, name in named.items()
        if name in there
    }


class NamedPuts:
    """Puts tasks by id: new ones in bulk, known ones by the rule the caller chose."""

    def __init__(self, store: Store, intake: Intake, widths: Widths) -> None:
        self._store = store
        self._intake = intake
        self._widths = widths

    async def put(
        self,
        items: list[Named],
        handles: list[Handle | None],
        on_conflict: OnConflict,
        now_ms: int,
        level: Durability,
        *,
        wait_s: float = 0.0,
    ) -> None:
        """Fill in one handle per item; on failure, the handles of all stored tasks.

        After the first unconfirmed write, wait for no further confirmation: store the rest and report it unconfirmed.
        """
        # Tasks with the same id in one call are put one after another, as in separate calls.
        runs = await ids_of_runs(self._store, [item.id for item in items], wait_s)
        items, unnoted = await self._noted(items, now_ms, wait_s)
        failures: dict[int, MainspringError] = {**unnoted, **runs}
        first, *later = _rounds(items, [i for i in range(len(items)) if i not in failures])
        shortfall: NotConfirmed | None = None
        for todo in [first] if on_conflict == "keep" else [first, *later]:
            window = RetryWindow(self._store, wait_s)
            window.shortfall = shortfall
            known = await self._put_new(items, todo, handles, now_ms, window.level(level), window)
            entries = await self._look([(address, items[i].row.idh) for i, address in known], window)
            for (i, address), entry in zip(known, entries, strict=True):
                level_now = window.level(level)
                handles[i] = await self._put_known(items[i], address, entry, on_conflict, now_ms, level_now, window)
            shortfall = window.shortfall
        if on_conflict == "keep":
            _keep_first(items, handles, first, later)
        if failures:
            raise next(iter(failures.values()))
        if shortfall is not None:
            raise shortfall

    async def _noted(self, items: list[Named], now_ms: int, wait_s: float) -> tuple[list[Named], dict[int, StoreError]]:
        """Note the lanes of ids; return the items, those that an earlier version stored with their hash of then, and
        by number the failures of those whose lane could not be noted: these must not be put."""
        todo = [i for i, item in enumerate(items) if item.lane is not None]
        if not todo:
            return items, {}
        items, window = list(items), RetryWindow(self._store, wait_s)
        while failures := await self._note(items, todo, now_ms):
            todo = list(failures)
            try:
                await window.after(next(iter(failures.values())))
            except StoreError:
                return items, failures
        return items, {}

    async def _note(self, items: list[Named], todo: list[int], now_ms: int) -> dict[int, StoreError]:
        some = [(i, items[i], items[i].lane or "") for i in todo]
        notes = [IdInLane(item.id, lane, item.row.due_ms) for _, item, lane in some]
        former = [(item.partition, idh_of(item.id)) for _, item, _ in some]
        noted, known = await asyncio.gather(
            note_lanes(self._store, notes, now_ms), fields_or_failures(self._store, attrgetter("ids"), former)
        )
        failures: dict[int, StoreError] = {}
        for (i, item, lane), failure, raw in zip(some, noted, known, strict=True):
            if failure is not None:
                failures[i] = failure
            elif isinstance(raw, StoreError):
                failures[i] = raw
            elif raw is not None:
                try:
                    if await self._is_former(item, lane, Address.unpack(item.partition, raw)):
                        items[i] = _as_former(item)
                        await forget_lane(self._store, item.id, lane)
                except StoreError as error:
                    failures[i] = error
        return failures

    async def _is_former(self, item: Named, lane: str, address: Address) -> bool:
        """Return whether the task under the hash of the id alone is that of this lane, put by an earlier version."""
        idh = idh_of(item.id)
        located = await Finder(self._store).find(Reference(None, idh, item.partition, False, address))
        if located is None or located.entry.state in ("cancelled", "replaced"):
            return False
        if located.entry.body is None:  # over and gone: where a task without a lane cannot be, it had one
            return item.partition != partition_of(item.id, len(self._store.keys))
        return located.entry.body.lane == lane

    async def _put_new(
        self,
        items: list[Named],
        todo: list[int],
        handles: list[Handle | None],
        now_ms: int,
        level: Durability,
        window: RetryWindow,
    ) -> list[tuple[int, Address]]:
        """Put new tasks; return the known ones. Repeating after a lost reply is safe: it finds its own ids."""
        known: list[tuple[int, Address]] = []
        while todo:
            by_partition: dict[int, list[int]] = {}
            for i in todo:
                by_partition.setdefault(items[i].partition, []).append(i)
            rows = {p: [items[i].row for i in members] for p, members in by_partition.items()}
            short: dict[int, NotConfirmed] = {}
            answers = await put_ids(self._store, rows, self._widths, now_ms=now_ms, durability=level, short=short)
            window.shortfall = next(iter(short.values()), window.shortfall)
            todo, failure = [], None
            for p, members in by_partition.items():
                answer = answers[p]
                if isinstance(answer, StoreError):
                    failure = answer
                    todo += members
                    continue
                reached = SERVER if p in short else level
                if answer:
                    known += [(members[at], address) for at, address in answer.items()]
                    members = [i for at, i in enumerate(members) if at not in answer]
                for i in members:
                    id, past, _, row, _ = items[i]
                    handles[i] = Handle(id, row.due_ms, "created", past, reached.text)
            if failure is not None:
                await window.after(failure)
        return known

    async def _look(self, wanted: list[tuple[Address, bytes]], window: RetryWindow) -> list[Found]:
        """Look at all at once: a repeated bulk put finds every one of its ids known."""
        while True:
            try:
                return await look_at(self._store, wanted) if wanted else []
            except Unavailable as failure:
                await window.after(failure)

    async def _put_known(
        self,
        item: Named,
        current: Address | None,
        seen: Found | None,
        on_conflict: OnConflict,
        now_ms: int,
        level: Durability,
        window: RetryWindow,
    ) -> Handle:
        backoff = ConflictBackoff(f"id {item.id!r}", window.wait_s)
        while True:
            try:
                answer = await self._try_known(item, current, seen, on_conflict, now_ms, level, window)
            except Unavailable as failure:
                await window.after(failure)
                seen = None
                continue
            if isinstance(answer, Handle):
                return answer
            if answer.status == "changed":
                current = answer.address
            if answer.status == "changed" and current is not None and on_conflict == "keep":
                return await self._kept(item, current, level, window)
            seen = None
            await backoff.wait()

    async def _kept(self, item: Named, at: Address, level: Durability, window: RetryWindow) -> Handle:
        """Return the handle of a task that another caller put meanwhile, whatever state it is in by now."""
        [entry] = await self._look([(at, item.row.idh)], window)
        while entry.moved_to is not None:
            at = entry.moved_to
            [entry] = await self._look([(at, item.row.idh)], window)
        if window.unsure and _is_same(item, at, entry):
            return Handle(item.id, item.row.due_ms, "created", item.past, level.text)
        return _kept_handle(item.id, at, entry, level)

    async def _try_known(
        self,
        item: Named,
        current: Address | None,
        seen: Found | None,
        on_conflict: OnConflict,
        now_ms: int,
        level: Durability,
        window: RetryWindow,
    ) -> Handle | Replaced:
        """Make one attempt; return the handle, or why there is none yet."""
        former: Found | None = None
        if current is not None:
            entry = seen or (await look_at(self._store, [(current, item.row.idh)]))[0]
            if (
                entry.state in ("done", "finished")
                and current.slice.end_ms + self._store.shared.dedupe_window_ms < now_ms
            ):
                entry = await self._unless_queued(item, current, entry)
            if window.unsure and _is_same(item, current, entry):
                return Handle(item.id, item.row.due_ms, "created", item.past, level.text)
            handle = self._keep(item, current, entry, on_conflict, now_ms, level)
            if handle is not None:
                return handle
            former = entry if entry.state == "pending" else None
        old = None if former is None else current
        result = await self._replace(item, current, old, now_ms, level)
        window.shortfall = result.shortfall or window.shortfall
        if result.status != "ok":
            return result
        outcome: PutOutcome = "created" if old is None else "replaced"
        handle = Handle(item.id, item.row.due_ms, outcome, item.past, window.level(level).text)
        return handle if former is None or old is None else handle._instead_of(_former(item.id, old, former))

    async def _unless_queued(self, item: Named, current: Address, entry: Found) -> Found:
        """Correct the state of a handed-off task: its slice calls it done, but it may still be queued or running."""
        [place] = await find_queued(self._store, [(item.partition, item.row.idh)])
        return entry._replace(state="queued") if place is not None and place.address == current.pack() else entry

    async def _replace(
        self, item: Named, expected: Address | None, old: Address | None, now_ms: int, level: Durability
    ) -> Replaced:
        return await replace(
            self._store,
            item.row,
            partition=item.partition,
            expected=expected,
            old=old,
            now_ms=now_ms,
            durability=level,
        )

    def _keep(
        self, item: Named, at: Address, entry: Found, on_conflict: OnConflict, now_ms: int, level: Durability
    ) -> Handle | None:
        """Return the handle of the task that stays, or None if the new one replaces it."""
        if entry.state in ("cancelled", "replaced"):
            return None  # cancelled since the index was read: the put compares with the current index
        over = entry.state not in ("pending", "fired", "queued")
        if over and at.slice.end_ms + self._store.shared.dedupe_window_ms < now_ms:
            return None  # its mark has expired
        due_ms = _due_ms(at, entry)
        if on_conflict == "reject":
            raise Conflict(f"a task with id {item.id!r} exists ({entry.state}, due {due_ms} ms)")
        handle = _kept_handle(item.id, at, entry, level)
        if on_conflict == "keep":
            return handle
        by = decode(item.row.row).by
        if by is not None and (entry.body is None or entry.body.by != by):
            return handle._of_another()
        sooner = entry.state == "pending" and item.row.due_ms < due_ms
        return None if on_conflict == "replace" or sooner else handle


def _as_former(item: Named) -> Named:
    """The item with the hash of its id alone."""
    idh, row = idh_of(item.id), item.row.row
    return item._replace(row=item.row._replace(idh=idh, row=row[:5] + idh + row[HEADER_BYTES:]))


def _is_same(item: Named, at: Address, entry: Found) -> bool:
    """Return True if it is our own task. The body is not enough: the header holds the due time within the slice."""
    same_place = at.slice == item.row.slice and entry.due_ms == item.row.due_ms
    return same_place and entry.body == decode(item.row.row)


def _due_ms(at: Address, entry: Found) -> int:
    return entry.due_ms if entry.due_ms is not None else at.slice.since_ms


def _kept_handle(task_id: str, at: Address, entry: Found, level: Durability) -> Handle:
    due_ms, body = _due_ms(at, entry), entry.body
    first_ms = None if body is None else due_ms if body.original_due_ms is None else body.original_due_ms
    handle = Handle(task_id, due_ms, "kept", False, level.text)
    return handle if first_ms == due_ms else handle._first_due(first_ms)


def _former(task_id: str, at: Address, entry: Found) -> TaskInfo:
    """Return the replaced task without its payload: a bulk put may keep one of these for each of its tasks."""
    target, lane = (None, None) if entry.body is None else (entry.body.target, entry.body.lane)
    return TaskInfo(task_id, entry.state, _due_ms(at, entry), target, lane=lane)


def _rounds(items: list[Named], numbers: list[int]) -> list[list[int]]:
    """Return rounds of item numbers: the first of each id, then the second of each, and so on."""
    if len({items[i].row.idh for i in numbers}) == len(numbers):
        return [numbers]
    rounds: list[list[int]] = []
    seen: dict[tuple[int, bytes], int] = {}
    for i in numbers:
        item = items[i]
        number = seen[item.partition, item.row.idh] = seen.get((item.partition, item.row.idh), -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(i)
    return rounds


def _keep_first(items: list[Named], handles: list[Handle | None], first: list[int], later: list[list[int]]) -> None:
    """Keep the first of several tasks with one id: the others change nothing, and need no call to the server."""
    kept = {(items[i].partition, items[i].row.idh): i for i in first} if later else {}
    for i in chain.from_iterable(later):
        before = kept[items[i].partition, items[i].row.idh]
        one = handles[before]
        assert one is not None
        handles[i] = Handle(one.id, one.due_ms, "kept", False, one.durability)
