"""Notices on the server: boxes in which they wait, episodes between two runs, and beats that are watched."""

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec

from ..model.delivery import Response
from ..model.errors import StoreError
from ..model.ids import idh_of
from ..model.notice import KINDS, BeatState, Episode, Expected, Notice, NoticeKind, Taken
from ..model.run import RunRecord
from ..model.task import Handle, OnConflict, Task
from .durability import SERVER
from .redis.connection import Arg, RedisCommand
from .redis.sender import Group
from .runs import RunRef, read_run, unpack
from .store import Store
from .tasks.encode import Intake
from .tasks.put import Widths
from .tasks.put_ids import NamedPuts

log = logging.getLogger("mainspring.notices")

DIGEST_AFTER_MS: Final = 5_000
"""Wait between the first notice and its digest, so that what fails together is told together."""
DIGEST_EVERY_MS: Final = 60_000
"""Shortest time between two digests of a channel."""
UNSENT_MS: Final = 600_000
"""A window whose digest has not begun after this time was cancelled: a new one is opened."""
KNOWN_MS: Final = 3_600_000
"""How long a box knows the ids of its notices."""
MOST_KEPT: Final = 500
"""Notices that a box keeps; more are only counted."""
FORGOTTEN_MS: Final = 7 * 86_400_000
"""Age at which the notices of a digest that died are dropped."""
AT_ONCE: Final = 200


class Notes(NamedTuple):
    """The episodes of one partition, or of the namespace, as they were read."""

    cursor: bytes
    """How far the runs were read; changed with every write."""
    episodes: Mapping[str, Episode]


class AskedRuns(NamedTuple):
    """What to read of a partition."""

    partition: int
    cursor: bytes
    successes: bool
    """Whether runs that did not fail matter too."""

    def from_moment_of(self, first: "RecordedRuns") -> "AskedRuns":
        """Ask for all runs from the millisecond of this entry on, but for none again."""
        start = max(_place(self.cursor), (first.at[0] - 1, _LAST_SEQ))
        return AskedRuns(self.partition, b"%d-%d" % start, True)


class RecordedRuns(NamedTuple):
    """Some runs that were recorded together."""

    at: tuple[int, int]
    partition: int
    failed: bool
    data: bytes

    @property
    def cursor(self) -> bytes:
        return b"%d-%d" % self.at

    def records(self) -> list[tuple[str, RunRecord]]:
        """Return the runs with their ids; none if they cannot be read, as those of a later version."""
        ms, seq = self.at
        try:
            records = _records.decode(unpack(self.data))
        except (msgspec.MsgspecError, zlib.error) as error:
            log.warning("runs of entry %d-%d cannot be read and are not told of: %s", ms, seq, error)
            return []
        return [
            (RunRef(ms, seq, self.partition, position * 2 + self.failed).text, record)
            for position, record in enumerate(records)
        ]


def in_order(entries: Iterable[RecordedRuns]) -> Iterator[tuple[str, RunRecord]]:
    """Yield runs with their ids. What was recorded together was not recorded in the order in which it ended."""
    for _, some in groupby(entries, key=lambda one: one.at[0]):
        runs = [run for entry in some for run in entry.records()]
        yield from sorted(runs, key=lambda run: (run[1].ended_ms, not run[1].failed))


def _merged(partition: int, streams: Sequence[Sequence[Any]]) -> list[RecordedRuns]:
    """Return the entries of several streams in the order in which they were recorded, as far as all were read."""
    read: list[RecordedRuns] = []
    ends: list[tuple[int, int]] = []
    for number, rows in enumerate(streams):
        entries = [RecordedRuns(_place(row[0]), partition, number == 0, row[1][1]) for row in rows]
        read += entries
        if len(entries) == ENTRIES_AT_ONCE:
            ends.append(entries[-1].at)
    end = min(ends, default=None)
    return sorted(one for one in read if end is None or one.at <= end)


def _place(entry: bytes) -> tuple[int, int]:
    ms, _, seq = entry.partition(b"-")
    return int(ms), int(seq)


_LAST_SEQ: Final = (1 << 64) - 1
ENTRIES_AT_ONCE: Final = 16
"""Entries of a stream that are read at once; each has up to 64 runs."""
_records: Final = msgspec.msgpack.Decoder(list[RunRecord])


class Notices:
    """What the notifier, and the sinks of notices and beats, need of a namespace."""

    def __init__(self, store: Store) -> None:
        self._store = store
        widths = Widths()
        # Without the shared settings: a small max_payload_bytes is for what callers put, and must not stop notices.
        self._intake = Intake(store.keys, widths)
        self._named = NamedPuts(store, self._intake, widths)

    def now_ms(self) -> int:
        return self._store.clock.now_ms()

    async def put(self, tasks: Sequence[Task], on_conflict: OnConflict = "keep") -> None:
        """Put tasks that have ids. Repeating a call changes nothing."""
        if not tasks:
            return
        now_ms = await self._store.fresh_ms()
        items = list(self._intake.take(tasks, now_ms).named.values())
        handles: list[Handle | None] = [None] * len(items)
        await self._named.put(items, handles, on_conflict, now_ms, SERVER)

    # -- boxes ---------------------------------------------------------------------------------------------------

    async def add(self, channel: str, notices: Sequence[tuple[str, Notice]]) -> int:
        """Put notices with their ids into the box, those that it has not had; return when its digest is due."""
        keys, due_ms = self._store.keys, 0
        for first in range(0, len(notices), AT_ONCE):
            args: list[Arg] = [DIGEST_AFTER_MS, DIGEST_EVERY_MS, KNOWN_MS, UNSENT_MS, MOST_KEPT]
            for id_, notice in notices[first : first + AT_ONCE]:
                args += (idh_of(id_), notice.kind, msgspec.msgpack.encode(notice))
            due_ms = await self._call("notice_add", [keys.box(channel), keys.box_seen(channel)], args)
        return due_ms

    async def take(self, channel: str, window_ms: int) -> Taken:
        """Return the notices of the digest that is due at `window_ms`; later ones go to the next."""
        box = self._store.keys.box(channel)
        now_us, flat = await self._call("notice_take", [box], [window_ms])
        fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        old = [name for name in fields if 0 < _window_of(name) < now_us // 1000 - FORGOTTEN_MS]
        if old:
            await self._store.run_one(self._store.keys.slot, [("HDEL", box, *old)])
        counts: dict[NoticeKind, int] = {}
        for kind in KINDS:
            if count := int(fields.get(f"{window_ms}+{kind}".encode(), b"0")):
                counts[kind] = count
        head = f"{window_ms}=".encode()
        kept = [_notice.decode(raw) for name, raw in fields.items() if name.startswith(head)]
        mine = [name for name in fields if _window_of(name) == window_ms]
        return Taken(counts, sorted(kept, key=lambda one: (one.at_ms, one.subject)), mine)

    async def sent(self, channel: str, taken: Taken) -> None:
        """Remove what `take` returned, and nothing else."""
        if taken.fields:
            await self._store.run_one(self._store.keys.slot, [("HDEL", self._store.keys.box(channel), *taken.fields)])

    # -- beats -------------------------------------------------------------------------------------------------------

    async def read_beat(self, name: str) -> bytes | None:
        [raw] = await self._store.run_one(self._store.keys.slot, [("HGET", self._store.keys.watched, name)])
        return None if raw is None else bytes(raw)

    async def write_beat(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace the state of a beat; return False if it has changed since it was read."""
        return bool(await self._call("note", [self._store.keys.watched], [name, before or b"", after]))

    # -- episodes --------------------------------------------------------------------------------------------------

    async def read_notes(self, partition: int | None) -> Notes:
        """Return the open episodes of a partition; of None, those that concern no single partition.

        Runs that were recorded before anybody wanted notices are passed over.
        """
        key, slot = self._notes_of(partition)
        [flat] = await self._store.run_one(slot, [("HGETALL", key)])
        fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        cursor = fields.pop(_CURSOR, b"")
        if partition is not None and not cursor:
            [last] = await self._store.run_one(slot, [("HGET", self._store.keys.partitions[partition].runs_n, "last")])
            cursor = last or b"0-0"
            if not await self.write_notes(partition, b"", cursor, {}):
                return await self.read_notes(partition)
        return Notes(cursor, {name.decode(): _episode.decode(raw) for name, raw in fields.items()})

    async def write_notes(
        self, partition: int | None, before: bytes, after: bytes, changed: Mapping[str, Episode | None]
    ) -> bool:
        """Store changed episodes with a new cursor; return False if another node has written since they were read."""
        key, slot = self._notes_of(partition)
        args: list[Arg] = [_CURSOR, before, after]
        for name, episode in changed.items():
            args += (name, b"" if episode is None else msgspec.msgpack.encode(episode))
        [reply] = await self._store.run_one(slot, [self._store.scripts.call("note", [key], args)])
        return bool(reply)

    async def new_runs(self, asked: Sequence[AskedRuns]) -> list[list[RecordedRuns] | StoreError]:
        """Return what was recorded after the cursors, oldest first: at most a portion of each partition."""
        groups: list[Group] = []
        for one in asked:
            keys = self._store.keys.partitions[one.partition]
            streams = (keys.failed_runs, keys.runs) if one.successes else (keys.failed_runs,)
            reads: list[RedisCommand] = [
                ("XRANGE", stream, b"(" + one.cursor, "+", "COUNT", ENTRIES_AT_ONCE) for stream in streams
            ]
            # In one step: an entry that comes between two reads would be passed over in the stream that was read first.
            groups.append((keys.slot, [("MULTI",), *reads, ("EXEC",)]))
        found: list[list[RecordedRuns] | StoreError] = []
        for one, result in zip(asked, await self._store.run(groups), strict=True):
            found.append(result if isinstance(result, StoreError) else _merged(one.partition, result[-1]))
        return found

    async def response_of(self, run_id: str) -> Response | None:
        """Return what the receiver of a run answered, if that is still kept."""
        found = await read_run(self._store, run_id)
        return None if found is None or found.details is None else found.details.response

    def _notes_of(self, partition: int | None) -> tuple[str, int]:
        keys = self._store.keys
        if partition is None:
            return keys.notes, keys.slot
        return keys.partitions[partition].notes, keys.partitions[partition].slot

    async def _call(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        [reply] = await self._store.run_one(self._store.keys.slot, [self._store.scripts.call(name, keys, args)])
        return reply


MOST_BEATS: Final = 10_000
"""Beats that a namespace watches: each is a task that returns for ever."""
_UNWATCHED_MS: Final = 86_400_000
"""A deadline that passed this long ago has no task any more: it was cancelled."""


async def read_expected(store: Store, name: str) -> Expected | None:
    """Return when a beat is expected; None if nobody has said so."""
    [raw] = await store.run_one(store.keys.slot, [("HGET", store.keys.watched, name)])
    return None if raw is None else _beat.decode(raw).expected


async def has_room(store: Store, name: str) -> bool:
    """Return whether a beat can be watched: it is already, or there are not too many.

    Forget some of those that are not watched any more if there are too many.
    """
    watched, slot = store.keys.watched, store.keys.slot
    known, count = await store.run_one(slot, [("HEXISTS", watched, name), ("HLEN", watched)])
    if known or count < MOST_BEATS:
        return True
    [some] = await store.run_one(slot, [("HRANDFIELD", watched, 100, "WITHVALUES")])
    before_ms = store.clock.now_ms() - _UNWATCHED_MS
    pairs = zip(some[::2], some[1::2], strict=True)
    gone = [one for one, raw in pairs if _beat.decode(raw).deadline_ms < before_ms]
    if gone:
        await store.run_one(slot, [("HDEL", watched, *gone)])
    return bool(gone)


_CURSOR: Final = b"@"
"""Field of the cursor; the names of episodes begin with a channel, which cannot have this name."""
_notice: Final = msgspec.msgpack.Decoder(Notice)
_episode: Final = msgspec.msgpack.Decoder(Episode)
_beat: Final = msgspec.msgpack.Decoder(BeatState)


def _window_of(field: bytes) -> int:
    """Return the window that a field of a box belongs to; 0 for the others."""
    digits = field.partition(b"+")[0].partition(b"=")[0]
    return int(digits) if digits.isdigit() else 0
