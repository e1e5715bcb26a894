"""Notices on the server: boxes in which they wait, episodes between two runs, and beats that are watched."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ..model.ids import idh_of
from ..model.notice import KINDS, Episode, Notice, NoticeKind, Taken
from ..model.task import Handle, OnConflict, Task
from .durability import SERVER
from .redis.connection import Arg
from .store import Store
from .tasks.encode import Intake
from .tasks.put import Widths
from .tasks.put_ids import NamedPuts

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


class Notices:
    """What the notifier, and the sinks of notices and beats, need of a namespace."""

    def __init__(self, store: Store) -> None:
        self._store = store
        widths = Widths()
        self._intake = Intake(store.keys, widths, store.shared)
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
        """Return the open episodes of a partition; of None, those that concern no single partition."""
        key, slot = self._notes_of(partition)
        [flat] = await self._store.run_one(slot, [("HGETALL", key)])
        fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))
        cursor = fields.pop(_CURSOR, b"")
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

    def _notes_of(self, partition: int | None) -> tuple[str, int]:
        keys = self._store.keys
        if partition is None:
            return keys.notes, keys.slot
        return keys.partitions[partition].notes, keys.partitions[partition].slot

    async def _call(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        [reply] = await self._store.run_one(self._store.keys.slot, [self._store.scripts.call(name, keys, args)])
        return reply


async def is_watched(store: Store, name: str) -> bool:
    """Return whether it is known when a beat is expected."""
    [found] = await store.run_one(store.keys.slot, [("HEXISTS", store.keys.watched, name)])
    return bool(found)


_CURSOR: Final = b"@"
"""Field of the cursor; the names of episodes begin with a channel, which cannot have this name."""
_notice: Final = msgspec.msgpack.Decoder(Notice)
_episode: Final = msgspec.msgpack.Decoder(Episode)


def _window_of(field: bytes) -> int:
    """Return the window that a field of a box belongs to; 0 for the others."""
    digits = field.partition(b"+")[0].partition(b"=")[0]
    return int(digits) if digits.isdigit() else 0
