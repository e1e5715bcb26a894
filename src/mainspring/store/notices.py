"""Notices on the server: boxes in which notices wait, episodes between two runs, and watched beats."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from ..model.delivery import Response
from ..model.errors import Conflict, StoreError
from ..model.ids import idh_of
from ..model.notice import KINDS, ONE_PLACE, Beat, Episode, Expected, Notice, NoticeKind, Taken
from ..model.run import RunRecord
from ..model.task import Handle, OnConflict, Task
from .durability import SERVER
from .redis.connection import Arg, RedisCommand
from .redis.sender import Group
from .runs import EntryId, RecordedRuns, entry_id, read_run
from .store import Store
from .tasks.encode import Intake
from .tasks.put import Widths
from .tasks.put_ids import NamedPuts

DIGEST_AFTER_MS: Final = 5_000
"""Quiet time after the last notice before a digest is sent, so that failures at the same time go into one message."""
DIGEST_LATER_MS: Final = 25_000
"""Longest further wait for that quiet time: a storm that lasts a minute must not hide its first failures."""
DIGEST_EVERY_MS: Final = 60_000
"""Shortest time between two digests of a channel."""
UNSENT_MS: Final = 600_000
"""A window whose digest has not begun after this time was cancelled: a new one is opened."""
KNOWN_MS: Final = 3_600_000
"""How long a box remembers the ids of its notices."""
MOST_KEPT: Final = 500
"""Notices that a box keeps; further ones are only counted."""
MOST_BEATS: Final = 10_000
"""Most beats watched in a namespace."""
FORGOTTEN_MS: Final = 7 * 86_400_000
"""Age at which the notices of a digest that died are dropped."""
AT_ONCE: Final = 200


EVERYWHERE: Final = -1
"""Stands for all partitions."""


class Notes(NamedTuple):
    """The episodes of a namespace, and how far the runs of each partition were followed, as last read."""

    version: bytes = b""
    """Changed with every write."""
    places: Mapping[int, EntryId] = {}
    episodes: Mapping[str, Episode] = {}

    def failing_since(self) -> dict[int, int]:
        """Return the start of the oldest failing episode that runs of a partition, or of `EVERYWHERE`, can end."""
        since: dict[int, int] = {}
        for key, one in self.episodes.items():
            if one.of_runs:
                narrow = key.split("|", 2)[2].startswith(ONE_PLACE)
                at = int(one.began.partition(".")[0], 36) if narrow else EVERYWHERE
                since[at] = min(one.since_ms, since.get(at, one.since_ms))
        return since


class AskedRuns(NamedTuple):
    """Which runs of a partition to read."""

    partition: int
    after: EntryId
    successes_ms: int | None
    """Also read runs that did not fail, from this time on; None reads failures only."""


def in_order(entries: Iterable[RecordedRuns]) -> Iterator[tuple[str, RunRecord]]:
    """Yield runs with their ids, ordered by their ends within a millisecond: they are not recorded in that order."""
    for _, some in groupby(entries, key=lambda one: one.at[0]):
        runs = [run for entry in some for run in entry.records()]
        yield from sorted(runs, key=lambda run: (run[1].ended_ms, not run[1].failed))


def _merged(partition: int, streams: Sequence[Sequence[Any]], before_ms: int) -> list[RecordedRuns]:
    """Merge the entries of several streams in the order in which they were recorded, up to where all were read.

    Leave out a millisecond that is not over or not read completely: the order of its runs is known only when all are
    there, and a node that reads them again after a crash must see the same order.
    """
    found = [[RecordedRuns.of(partition, number == 0, row) for row in rows] for number, rows in enumerate(streams)]
    end = min((entries[-1].at for entries in found if len(entries) == ENTRIES_AT_ONCE), default=(before_ms, 0))
    known = sorted(one for entries in found for one in entries if one.at <= end and one.at[0] < before_ms)
    return [one for one in known if one.at[0] < end[0]] or known


SETTLED_MS: Final = 50
"""Runs are followed at this age: by then no further ones are recorded in the same millisecond, even if clocks
differ."""
ENTRIES_AT_ONCE: Final = 16
"""Entries of a stream read at once; each has up to 64 runs."""


class Notices:
    """Storage of the notifier and of the sink for notices, in one namespace."""

    def __init__(self, store: Store) -> None:
        self._store = store
        widths = Widths()
        # Without the shared settings: a small max_payload_bytes limits callers, and must not stop notices.
        self._intake = Intake(store.keys, widths)
        self._named = NamedPuts(store, self._intake, widths)

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
        """Put notices that are new to the box into it; return when its digest is due."""
        keys, due_ms = self._store.keys, 0
        for first in range(0, len(notices), AT_ONCE):
            args: list[Arg] = [DIGEST_AFTER_MS, DIGEST_EVERY_MS, KNOWN_MS, UNSENT_MS, MOST_KEPT]
            for id_, notice in notices[first : first + AT_ONCE]:
                args += (idh_of(id_), notice.kind, msgspec.msgpack.encode(notice))
            due_ms = await self._call("notice_add", [keys.box(channel), keys.box_seen(channel)], args)
        return due_ms

    async def take(self, channel: str, window_ms: int) -> Taken | int:
        """Return the notices of the digest that is due at `window_ms`; later ones go into the next digest.

        If more notices are still coming, return the milliseconds to wait.
        """
        box, seen = self._store.keys.box(channel), self._store.keys.box_seen(channel)
        args = [window_ms, DIGEST_AFTER_MS, DIGEST_LATER_MS, DIGEST_EVERY_MS]
        now_us, wait_ms, flat = await self._call("notice_take", [box, seen], args)
        if wait_ms:
            return int(wait_ms)
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
        # Breakers first: they explain the failures around them.
        return Taken(counts, sorted(kept, key=lambda one: (one.kind != "breaker", one.at_ms, one.subject)), mine)

    async def sent(self, channel: str, taken: Taken) -> None:
        """Remove the notices that `take` returned, and no others."""
        if taken.fields:
            await self._store.run_one(self._store.keys.slot, [("HDEL", self._store.keys.box(channel), *taken.fields)])

    # -- beats -------------------------------------------------------------------------------------------------------

    async def beats(self) -> dict[str, Beat]:
        """Return the watched beats by name."""
        [flat] = await self._store.run_one(self._store.keys.slot, [("HGETALL", self._store.keys.watched)])
        beats = [_beat.decode(raw) for name, raw in zip(flat[::2], flat[1::2], strict=True) if name != _VERSION]
        return {one.name: one for one in sorted(beats, key=attrgetter("name"))}

    async def read_beat(self, name: str) -> Beat | None:
        [raw] = await self._store.run_one(self._store.keys.slot, [("HGET", self._store.keys.watched, name)])
        return None if raw is None else _beat.decode(raw)

    async def beat(self, name: str, expected: Expected | None, *, came: bool) -> Beat | None:
        """Note that a beat came, or only when it is expected. Return None if it never got an expectation. Raises
        Conflict."""
        keys = self._store.keys
        while True:
            [raw, known] = await self._store.run_one(keys.slot, [("HGET", keys.watched, name), ("HLEN", keys.watched)])
            before = None if raw is None else _beat.decode(raw)
            expected = expected or (None if before is None else before.expected)
            if expected is None:
                return None
            if before is None and known > MOST_BEATS:
                raise Conflict(f"{MOST_BEATS:,} beats are watched already; remove those that are no longer sent")
            now_ms = await self._store.fresh_ms()
            last_ms = now_ms if came else 0 if before is None else before.last_ms
            after = Beat(name, expected, expected.deadline_ms(now_ms), last_ms)
            if await self._note(keys.watched, [name, raw or b"", msgspec.msgpack.encode(after)]):
                return after

    async def remove_beat(self, name: str) -> bool:
        """Stop watching a beat; return False if it was not watched."""
        [gone] = await self._store.run_one(self._store.keys.slot, [("HDEL", self._store.keys.watched, name)])
        return bool(gone)

    # -- episodes --------------------------------------------------------------------------------------------------

    async def read_notes(self, known: Notes) -> Notes:
        """Return the open episodes; the known ones if none was written since."""
        key, slot = self._store.keys.notes, self._store.keys.slot
        [version] = await self._store.run_one(slot, [("HGET", key, _VERSION)])
        if known.version == (version or b""):
            return known
        [flat] = await self._store.run_one(slot, [("HGETALL", key)])
        fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        version, places, episodes = fields.pop(_VERSION, b""), {}, {}
        for name, raw in fields.items():
            if name.startswith(_PARTITION):
                places[int(name[1:])] = entry_id(raw)
            else:
                episodes[name.decode()] = _episode.decode(raw)
        return Notes(version, places, episodes)

    async def write_notes(
        self, notes: Notes, changed: Mapping[str, Episode | None], partition: int = EVERYWHERE, place: EntryId = (0, 0)
    ) -> Notes | None:
        """Store changed episodes and how far a partition was followed. Return what is stored now.

        Return None if another node has changed one of them since they were read: then nothing is stored.
        """
        episodes, places, args = dict(notes.episodes), dict(notes.places), list[Arg]()
        if partition != EVERYWHERE:
            before = places.get(partition)
            args += (b"@%d" % partition, b"" if before is None else b"%d-%d" % before, b"%d-%d" % place)
            places[partition] = place
        for name, after in changed.items():
            args += (name, _raw(episodes.pop(name, None)), _raw(after))
            if after is not None:
                episodes[name] = after
        version = await self._note(self._store.keys.notes, args)
        if not version:
            return None
        # Other nodes may have written other fields meanwhile: then the next read finds another version.
        mine = b"%d" % (int(notes.version or b"0") + 1)
        return Notes(mine, places, episodes) if version == int(mine) else Notes()

    async def ends_of(self, partitions: Sequence[int]) -> list[EntryId | StoreError]:
        """Return the last entry of each partition's runs: those after it are followed."""
        keys = [self._store.keys.partitions[number] for number in partitions]
        groups: list[Group] = [(one.slot, [("HGET", one.runs_n, "last")]) for one in keys]
        found = await self._store.run(groups)
        return [one if isinstance(one, StoreError) else entry_id(one[0] or b"0-0") for one in found]

    async def new_runs(self, asked: Sequence[AskedRuns]) -> list[list[RecordedRuns] | StoreError]:
        """Return runs recorded after an entry, oldest first: at most a portion of each partition."""
        groups: list[Group] = []
        for one in asked:
            keys = self._store.keys.partitions[one.partition]
            after = b"(%d-%d" % one.after
            reads: list[RedisCommand] = [("XRANGE", keys.failed_runs, after, "+", "COUNT", ENTRIES_AT_ONCE)]
            if one.successes_ms is not None:
                start = after if one.after[0] >= one.successes_ms else b"%d-0" % one.successes_ms
                reads.append(("XRANGE", keys.runs, start, "+", "COUNT", ENTRIES_AT_ONCE))
            # In one step: an entry added between two reads would be skipped in the stream that was read first.
            groups.append((keys.slot, [("MULTI",), *reads, ("EXEC",)]))
        before_ms = self._store.clock.now_ms() - SETTLED_MS
        return [
            result if isinstance(result, StoreError) else _merged(one.partition, result[-1], before_ms)
            for one, result in zip(asked, await self._store.run(groups), strict=True)
        ]

    async def response_of(self, run_id: str) -> Response | None:
        """Return the response of a run's receiver, if it is still kept."""
        found = await read_run(self._store, run_id)
        return None if found is None or found.details is None else found.details.response

    async def _note(self, key: str, args: Sequence[Arg]) -> int:
        return int(await self._call("note", [key], args))

    async def _call(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        [reply] = await self._store.run_one(self._store.keys.slot, [self._store.scripts.call(name, keys, args)])
        return reply


def _raw(episode: Episode | None) -> bytes:
    return b"" if episode is None else msgspec.msgpack.encode(episode)


_VERSION: Final = b""
"""Field that counts the writes of a hash. No beat and no episode has an empty name."""
_PARTITION: Final = b"@"
"""Prefix of the field with a partition's place. Names of episodes begin with a channel, which cannot begin with it."""
_beat: Final = msgspec.msgpack.Decoder(Beat)
_notice: Final = msgspec.msgpack.Decoder(Notice)
_episode: Final = msgspec.msgpack.Decoder(Episode)


def _window_of(field: bytes) -> int:
    """Return the window that a field of a box belongs to; 0 for a field without one."""
    digits = field.partition(b"+")[0].partition(b"=")[0]
    return int(digits) if digits.isdigit() else 0
