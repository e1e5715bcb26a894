"""Tasks that have ended: pages of dead letters, dropping and replaying them, and how a task ended."""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

import msgspec

from ...model.dead_letter import DeadFilter, DeadLetter, DeadPage, Replayed
from ...model.delivery import Body
from ...model.errors import Ambiguous, Conflict, StoreError, Unavailable
from ...model.ids import IDH_BYTES, idh_in_lane, idh_of
from ...model.task import State, TaskInfo
from ..keys import ADDRESS_BYTES, Address, Slice, address_prefix
from ..queue_state import find_queued
from ..redis.connection import Arg, RedisCommand
from ..redis.sender import Group
from ..store import Store
from .cancel import last_cancelled
from .encode import Intake
from .find import Finder, Located, Reference, resolve
from .index import look_up_packed
from .pages import PAGE_BYTES
from .put import WAKE_MS, Widths, fresh_score
from .put_ids import RetryWindow
from .query import describe, look_at

AT_ONCE: Final = 100
"""Dead letters read in one step: few, because each may carry 64 KiB."""

SEARCHED_AT_MOST: Final = 10_000
"""Dead letters scanned for one page. If few match, the page is short and has a cursor."""

_STRETCH: Final = 128
"""Dead-letter places read from a partition at once."""

_decode: Final = msgspec.msgpack.Decoder(DeadLetter).decode

DeadLetterPlace = tuple[int, int, bytes]
"""Sort key of a dead letter: time of death in ms, partition, idh."""


class KeptDeadLetter(NamedTuple):
    """A dead letter and its place."""

    place: DeadLetterPlace
    dead_letter: DeadLetter


# -- in order ------------------------------------------------------------------------------------------------


class _Merged:
    """Merges the dead-letter places of all partitions in order, with at most one stretch of each in memory."""

    def __init__(self, store: Store, where: DeadFilter, after: DeadLetterPlace | None, *, newest_first: bool) -> None:
        self._store = store
        self._newest_first = newest_first
        self._end_ms = where.from_ms if newest_first else where.to_ms
        start_ms = where.to_ms if newest_first else where.from_ms
        self._from = [_start(p, start_ms, after, newest_first) for p in range(len(store.keys))]
        self._read: list[list[DeadLetterPlace]] = [[] for _ in self._from]
        self._open = set(range(len(self._from)))
        self._ready: deque[DeadLetterPlace] = deque()

    async def more(self) -> bool:
        while not self._ready and (self._open or any(self._read)):
            await self._refill()
            self._settle()
        return bool(self._ready)

    async def take(self, count: int) -> list[DeadLetterPlace]:
        taken: list[DeadLetterPlace] = []
        while len(taken) < count and await self.more():
            taken.append(self._ready.popleft())
        return taken

    async def _refill(self) -> None:
        """Read more from the partitions whose places are used up."""
        empty = [p for p in self._open if not self._read[p]]
        groups: list[Group] = []
        for p in empty:
            keys = self._store.keys.partitions[p]
            order = "newest" if self._newest_first else "oldest"
            call = self._store.scripts.call(
                "dead_page", [keys.dead_times], [order, *self._from[p], self._end_ms, _STRETCH]
            )
            groups.append((keys.slot, [call]))
        for p, [reply] in zip(empty, await self._store.run_all(groups) if groups else [], strict=True):
            found = [(int(float(reply[i + 1])), p, reply[i]) for i in range(0, len(reply), 2)]
            if len(found) < _STRETCH:
                self._open.discard(p)
            if found:
                self._read[p] = found[::-1] if self._newest_first else found
                self._from[p] = (self._read[p][-1][0], self._read[p][-1][2])

    def _settle(self) -> None:
        """Release places up to the nearest of the last ones read: nothing unread can come before it."""
        lasts = [self._read[p][-1] for p in self._open]
        everything = [place for read in self._read for place in read]
        everything.sort(reverse=self._newest_first)
        if lasts:
            edge = max(lasts) if self._newest_first else min(lasts)
            everything = [place for place in everything if (place >= edge if self._newest_first else place <= edge)]
            self._read = [
                [place for place in read if (place < edge if self._newest_first else place > edge)]
                for read in self._read
            ]
        else:
            self._read = [[] for _ in self._read]
        self._ready.extend(everything)


def _start(partition: int, start_ms: int, after: DeadLetterPlace | None, newest_first: bool) -> tuple[int, bytes]:
    """Return (time, idh) from which a partition is read: dead letters of the same time are ordered by partition."""
    if after is None:
        return start_ms, b""
    time_ms, at, idh = after
    begin = (time_ms, idh) if partition == at else (time_ms + (partition < at), b"")
    limit = min if newest_first else max
    return limit(begin, (start_ms, b""))


async def walk(store: Store, where: DeadFilter, *, newest_first: bool = False) -> AsyncIterator[list[KeptDeadLetter]]:
    """Yield all matching dead letters in batches. Any that exist during the whole walk are yielded exactly once."""
    merged = _Merged(store, where, None, newest_first=newest_first)
    while places := await merged.take(AT_ONCE):
        fitting = [one for one in await _read(store, places) if one is not None and where.fits(one.dead_letter)]
        if fitting:
            yield fitting


async def page(store: Store, where: DeadFilter, *, after: DeadLetterPlace | None, limit: int) -> DeadPage:
    """Return matching dead letters, newest first. A page of large ones may be short and still have a cursor."""
    merged = _Merged(store, where, after, newest_first=True)
    dead_letters: list[DeadLetter] = []
    searched, size, last, left = 0, 0, after, False
    while len(dead_letters) < limit and searched < SEARCHED_AT_MOST and size < PAGE_BYTES:
        places = await merged.take(AT_ONCE if where.by_content else min(AT_ONCE, limit - len(dead_letters)))
        if not places:
            break
        for place, one in zip(places, await _read(store, places), strict=True):
            if len(dead_letters) == limit or size >= PAGE_BYTES:
                left = True
                break
            last, searched = place, searched + 1
            if one is not None and where.fits(one.dead_letter):
                dead_letters.append(one.dead_letter)
                size += len(one.dead_letter.payload)
    left = left or await merged.more()
    return DeadPage(dead_letters, _text(last) if left and last is not None else None)


async def count(store: Store, from_ms: int, to_ms: int) -> int:
    """Count the dead letters with a death in [from_ms, to_ms), without reading them."""
    groups: list[Group] = [
        (keys.slot, [("ZCOUNT", keys.dead_times, from_ms, f"({to_ms}")]) for keys in store.keys.partitions
    ]
    total = 0
    for [count] in await store.run_all(groups):
        total += int(count)
    return total


async def list_dead(store: Store, *, limit: int = 100) -> list[DeadLetter]:
    """Return the newest dead letters of all partitions."""
    return (await page(store, DeadFilter(), after=None, limit=limit)).letters


def _text(place: DeadLetterPlace) -> str:
    return f"{place[0]}.{place[1]}.{place[2].hex()}"


def parse_place(text: str) -> DeadLetterPlace:
    """Parse a cursor; raise ValueError if it is malformed."""
    time_ms, partition, idh = text.split(".")
    place = int(time_ms), int(partition), bytes.fromhex(idh)
    if not 0 <= place[0] < 1 << 48 or not 0 <= place[1] < 1 << 16 or len(place[2]) != IDH_BYTES:
        raise ValueError(text)
    return place


# -- single dead letters ---------------------------------------------------------------------------------------


async def _read(store: Store, places: Sequence[DeadLetterPlace]) -> list[KeptDeadLetter | None]:
    """Read dead letters; None for one that is gone."""
    by_partition: dict[int, list[int]] = {}
    for i, (_, p, _) in enumerate(places):
        by_partition.setdefault(p, []).append(i)
    groups: list[Group] = []
    for p, numbers in by_partition.items():
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("HMGET", keys.dead, *[places[i][2] for i in numbers])]))
    found: list[KeptDeadLetter | None] = [None] * len(places)
    for numbers, result in zip(by_partition.values(), await store.run_all(groups), strict=True):
        for i, record in zip(numbers, result[0], strict=True):
            if record is not None:
                found[i] = KeptDeadLetter(places[i], _dead_letter(places[i], record))
    return found


async def find_dead_letter(store: Store, reference: Reference) -> KeptDeadLetter | None:
    """Return the dead letter of an id, from its partition or, if a lane may have chosen another, from any. Ambiguous if
    several have it."""
    spots = reference.spots(len(store.keys))
    groups: list[Group] = []
    for p, idh, _ in spots:
        keys = store.keys.partitions[p]
        groups.append((keys.slot, [("ZSCORE", keys.dead_times, idh), ("HGET", keys.dead, idh)]))
    found: list[KeptDeadLetter] = []
    for (p, idh, _), result in zip(spots, await store.run_all(groups), strict=True):
        score, record = result
        if score is not None and record is not None:
            place = (int(float(score)), p, idh)
            kept = KeptDeadLetter(place, _dead_letter(place, record))
            found += [kept] if reference.fits(kept.dead_letter.lane) or kept.dead_letter.damaged else []
    if len(found) > 1 and reference.lane is None:
        raise Ambiguous(found[0].dead_letter.id, sorted(kept.dead_letter.lane or "" for kept in found))
    return found[0] if found else None


def _dead_letter(place: DeadLetterPlace, record: bytes) -> DeadLetter:
    """Return the decoded dead letter. An unreadable one is returned as such: it must not fail a page."""
    try:
        return _decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = f"the dead letter itself cannot be read: {error}"
        return DeadLetter(id=place[2].hex(), reason=reason, died_ms=place[0], due_ms=0, entry=record)


async def drop(store: Store, dead_letters: Sequence[KeptDeadLetter], *, wait_s: float = 0.0) -> list[bool]:
    """Drop dead letters; return False for one that was gone, or had died again, before."""
    dropped = [False] * len(dead_letters)
    unsure: set[int] = set()
    todo, window = list(range(len(dead_letters))), RetryWindow(store, wait_s)
    while todo:
        by_partition: dict[int, list[int]] = {}
        for i in todo:
            by_partition.setdefault(dead_letters[i].place[1], []).append(i)
        groups = [_drop_call(store, p, [dead_letters[i].place for i in some]) for p, some in by_partition.items()]
        todo, failure = [], None
        for numbers, result in zip(by_partition.values(), await store.run(groups), strict=True):
            if isinstance(result, StoreError):
                failure = result
                todo += numbers
                unsure |= set(numbers if isinstance(result, Unavailable) and result.sent else ())
                continue
            for i, answer in zip(numbers, result[0], strict=True):
                # After a lost reply it was most likely our own call that removed it.
                dropped[i] = answer == 1 or i in unsure
        if failure is not None:
            await window.after(failure)
    return dropped


class DeadLetterLimits(NamedTuple):
    """When the oldest dead letters are dropped; 0 means no limit."""

    max_age_ms: int = 0
    most: int = 0
    """Most dead letters of the namespace. Each partition keeps its share, so a few lanes may lose theirs earlier."""


class Expired(NamedTuple):
    """Dead letters dropped by one call."""

    for_age: int
    for_number: int


async def expire(store: Store, partitions: Sequence[int], limits: DeadLetterLimits) -> list[Expired | StoreError]:
    """Drop the oldest dead letters past the limits, at most `AT_ONCE` per partition."""
    share = -(-limits.most // len(store.keys))
    groups: list[Group] = []
    for p in partitions:
        keys = store.keys.partitions[p]
        args = [limits.max_age_ms, share, AT_ONCE]
        groups.append((keys.slot, [store.scripts.call("dead_expire", [keys.dead, keys.dead_times], args)]))
    return [one if isinstance(one, StoreError) else Expired(*one[0]) for one in await store.run(groups)]


def _drop_call(store: Store, partition: int, places: Sequence[DeadLetterPlace]) -> Group:
    keys = store.keys.partitions[partition]
    args: list[Arg] = [len(places)]
    for died_ms, _, idh in places:
        args += (idh, died_ms)
    return keys.slot, [store.scripts.call("dead_drop", [keys.dead, keys.dead_times], args)]


_TRIES: Final = 8
_DAMAGED: Final = (
    "its entry cannot be read, so there is nothing to deliver; inspect its bytes, put the task again, then drop it"
)
_LIVE: Final = "a task with this id is pending or under way; cancel it, or wait until it is over"
_GONE: Final = "it was replayed or dropped meanwhile, or its task died again since it was read"


class _Wish(NamedTuple):
    """A dead letter and the entry to put for it: both are fixed before the first attempt."""

    number: int
    kept: KeptDeadLetter
    slice: Slice
    row: bytes
    due_ms: int


class _Attempt:
    """State of one replay so far."""

    def __init__(self, wish: _Wish, indexed: bytes) -> None:
        self.wish = wish
        self.first_indexed = self.indexed = indexed
        """The address in the index when the dead letter was read, then the latest one known."""
        self.unsure = False
        """True if a call was sent and its reply lost."""
        self.tries = 0


class Replayer:
    """Puts the tasks of dead letters again, some at a time."""

    def __init__(self, store: Store, intake: Intake, widths: Widths, *, wait_s: float = 0.0) -> None:
        self._store = store
        self._intake = intake
        self._widths = widths
        self._wait_s = wait_s

    async def replay(
        self, dead_letters: Sequence[KeptDeadLetter], dues_ms: Sequence[int], *, new_key: bool = False
    ) -> list[Replayed]:
        """Replay; return one answer per dead letter, in order. Callers bound the number: one call takes a partition."""
        answers: list[Replayed | None] = [_if_damaged(kept.dead_letter) for kept in dead_letters]
        now_ms = self._store.clock.now_ms()
        wishes = [
            self._wish(i, kept, due_ms, now_ms, new_key)
            for i, (kept, due_ms) in enumerate(zip(dead_letters, dues_ms, strict=True))
            if answers[i] is None
        ]
        for number, answer in await self._fulfil(wishes, now_ms):
            answers[number] = answer
        return [answer for answer in answers if answer is not None]

    async def rehearse(self, dead_letters: Sequence[KeptDeadLetter], dues_ms: Sequence[int]) -> list[Replayed]:
        """Return what `replay` would answer now; write nothing."""
        wanted = [(kept.place[1], kept.place[2]) for kept in dead_letters]
        raws = await look_up_packed(self._store, wanted)
        known = [
            (i, (Address.unpack(dead_letters[i].place[1], raw), dead_letters[i].place[2]))
            for i, raw in enumerate(raws)
            if raw is not None
        ]
        found = await look_at(self._store, [one for _, one in known]) if known else []
        live = {i for (i, _), entry in zip(known, found, strict=True) if entry.state in ("pending", "fired")}
        live |= {i for i, place in enumerate(await find_queued(self._store, wanted)) if place is not None}
        answers = []
        for i, (kept, due_ms) in enumerate(zip(dead_letters, dues_ms, strict=True)):
            conflict = Replayed(kept.dead_letter.id, "conflict", None, _LIVE) if i in live else None
            answers.append(
                _if_damaged(kept.dead_letter) or conflict or Replayed(kept.dead_letter.id, "replayed", due_ms)
            )
        return answers

    def _wish(self, number: int, kept: KeptDeadLetter, due_ms: int, now_ms: int, new_key: bool) -> _Wish:
        dead_letter, (_, partition, idh) = kept.dead_letter, kept.place
        body = Body(
            dead_letter.target,
            dead_letter.payload,
            None if _is_generated(kept) else dead_letter.id,
            dead_letter.lane,
            original_due_ms=None if new_key else dead_letter.due_ms,
            raw=dead_letter.raw,
            retry=dead_letter.retry,
            timeout_ms=dead_letter.timeout_ms,
            lane_in_key=dead_letter.lane_in_key,
        )
        place, row = self._intake.encode(body, idh, partition, due_ms, now_ms, indexed=True)
        return _Wish(number, kept, place, row, due_ms)

    async def _fulfil(self, wishes: list[_Wish], now_ms: int) -> list[tuple[int, Replayed]]:
        raws = await look_up_packed(self._store, [(one.kept.place[1], one.kept.place[2]) for one in wishes])
        todo = [_Attempt(wish, raw or b"") for wish, raw in zip(wishes, raws, strict=True)]
        window = RetryWindow(self._store, self._wait_s)
        answers: list[tuple[int, Replayed]] = []
        while todo:
            by_partition: dict[int, list[_Attempt]] = {}
            for attempt in todo:
                by_partition.setdefault(attempt.wish.kept.place[1], []).append(attempt)
            groups = [_call(self._store, p, attempts, now_ms) for p, attempts in by_partition.items()]
            todo, failure = [], None
            for attempts, result in zip(by_partition.values(), await self._store.run(groups), strict=True):
                if isinstance(result, StoreError):
                    failure = result
                    todo += attempts
                    _doubt(attempts, result)
                    continue
                todo += self._learn(attempts, result[0], answers)
            if failure is not None:
                await window.after(failure)
        return answers

    def _learn(
        self, attempts: list[_Attempt], reply: list[bytes | int], answers: list[tuple[int, Replayed]]
    ) -> list[_Attempt]:
        """Record the answers; return the attempts to repeat."""
        again = []
        for attempt, status, answer in zip(attempts, reply[::2], reply[1::2], strict=True):
            wish = attempt.wish
            replayed = Replayed(wish.kept.dead_letter.id, "replayed", wish.due_ms)
            if status == b"ok":
                assert isinstance(answer, int)
                self._widths.saw(wish.kept.place[1], wish.slice, answer + 1)
                answers.append((wish.number, replayed))
            elif status == b"live":
                answers.append((wish.number, Replayed(replayed.id, "conflict", None, _LIVE)))
            elif status == b"changed":
                assert isinstance(answer, bytes)
                attempt.indexed, attempt.tries = answer, attempt.tries + 1
                if attempt.tries == _TRIES:
                    raise Conflict(f"id {replayed.id!r} keeps changing; try again")
                again.append(attempt)
            elif attempt.unsure and answer != attempt.first_indexed:
                # The dead letter is gone and the index has a new address: our call was applied and its reply lost.
                answers.append((wish.number, replayed))
            else:
                answers.append((wish.number, Replayed(replayed.id, "gone", None, _GONE)))
        return again


def _if_damaged(dead_letter: DeadLetter) -> Replayed | None:
    return Replayed(dead_letter.id, "damaged", None, _DAMAGED) if dead_letter.damaged else None


def _doubt(attempts: list[_Attempt], failure: StoreError) -> None:
    for attempt in attempts:
        attempt.unsure = attempt.unsure or (isinstance(failure, Unavailable) and failure.sent)


def _is_generated(kept: KeptDeadLetter) -> bool:
    """Return whether the task had a generated id: its dead letter then has the 16 bytes of it in hex."""
    idh, lane = idh_of(kept.dead_letter.id), kept.dead_letter.lane
    return kept.place[2] != idh and (lane is None or kept.place[2] != idh_in_lane(idh, lane))


def _handle_of(attempt: _Attempt) -> bytes:
    """Return the address in the task's handle: where it died, if its id was generated."""
    dead_letter = attempt.wish.kept.dead_letter
    if not _is_generated(attempt.wish.kept):
        return b""
    return attempt.indexed or (dead_letter.place if len(dead_letter.place) == ADDRESS_BYTES else b"")


def _call(store: Store, partition: int, attempts: list[_Attempt], now_ms: int) -> Group:
    keys = store.keys.partitions[partition]
    places = list(dict.fromkeys(attempt.wish.slice for attempt in attempts))
    handles = [_handle_of(attempt) for attempt in attempts]
    stood = [attempt.indexed or handle for attempt, handle in zip(attempts, handles, strict=True)]
    known = [Address.unpack(partition, address).slice if address else None for address in stood]
    olds = list(dict.fromkeys(place for place in known if place is not None))
    names = [keys.n, keys.slices, keys.ids, keys.dead, keys.dead_times, keys.queued]
    names += (keys.entries(one.name) for one in places)
    for old in olds:
        s, _, d, x = keys.slice_keys(old.name)
        names += (s, d, x)
    args: list[Arg] = [len(places), len(olds), len(attempts)]
    for place in places:
        args += (place.name, fresh_score(place), address_prefix(place))
    args += (old.name for old in olds)
    for attempt, handle, old_place in zip(attempts, handles, known, strict=True):
        wish = attempt.wish
        died_ms, _, idh = wish.kept.place
        number = 0 if old_place is None else olds.index(old_place) + 1
        args += (idh, died_ms, places.index(wish.slice) + 1, wish.row, attempt.indexed, number, handle)
    commands: list[RedisCommand] = [store.scripts.call("dead_replay", names, args)]
    if any(attempt.wish.due_ms < now_ms + WAKE_MS for attempt in attempts):
        commands.append(("SPUBLISH", keys.wake, "1"))
    return keys.slot, commands


class EndedTask(NamedTuple):
    state: State
    kept: KeptDeadLetter | None = None
    """Its dead letter."""
    cancelled_ms: int | None = None


async def find_live(store: Store, task_id: str, lane: str | None) -> TaskInfo:
    """Return the task that has this id now; "unknown" if the id is free, whatever records of earlier tasks exist."""
    located = await Finder(store).find(await resolve(store, task_id, lane))
    return TaskInfo(task_id, "unknown") if located is None else describe(task_id, located.entry)


async def cancelled_ms(store: Store, reference: Reference) -> int | None:
    """Return when the id was last cancelled; None if no such record is stored."""
    spots = reference.spots_of_records(len(store.keys))
    off_ms = await last_cancelled(store, {spot.partition for spot in spots})
    return max((off_ms[spot.idh] for spot in spots if spot.idh in off_ms), default=None)


async def how_it_ended(store: Store, reference: Reference, located: Located | None) -> EndedTask:
    state: State = "unknown" if located is None else located.entry.state
    kept = await find_dead_letter(store, reference) if state in ("unknown", "dead") else None
    # A task that was moved and then cancelled is in neither its old place nor the index.
    forgotten = state == "unknown" if reference.address is None else state == "finished"
    off_ms = await cancelled_ms(store, reference) if forgotten else None
    if kept is not None and (off_ms is None or off_ms < kept.dead_letter.died_ms):
        # The index forgets an id some time after its end; the dead letter stays.
        return EndedTask("dead", kept)
    if off_ms is not None:
        return EndedTask("cancelled", cancelled_ms=off_ms)
    if located is None and reference.address is not None:
        # Moves were already followed as far as they go.
        [entry] = await look_at(store, [(reference.address, reference.idh)])
        return EndedTask(entry.state)
    return EndedTask(state)


async def info_of(store: Store, task_id: str, reference: Reference, located: Located | None) -> TaskInfo:
    """Return what is known about a task, also a finished one: the same as `explain` reports."""
    left = ("dead",) if reference.address is None else ("dead", "finished")
    if located is not None and located.entry.state not in left:
        return describe(task_id, located.entry)
    ended = await how_it_ended(store, reference, located)
    if ended.kept is None:
        return TaskInfo(task_id, ended.state, since_ms=ended.cancelled_ms)
    dead_letter = ended.kept.dead_letter
    return TaskInfo(
        task_id, "dead", dead_letter.due_ms, dead_letter.target or None, lane=dead_letter.lane,
        attempt=dead_letter.attempts, errors=dead_letter.errors,
    )  # fmt: skip
