"""Turns tasks into entries: every check happens here, before anything is written."""

from binascii import crc_hqx
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Final, NamedTuple, cast

import msgspec

from ..model.delivery import Body
from ..model.errors import InvalidInput
from ..model.ids import IDH_BYTES, check_id, check_name, idh_of
from ..model.limits import HORIZON_MS, MAX_PAYLOAD_BYTES
from ..model.payload import encode_payload
from ..model.retry_text import retry_line
from ..model.targets import check_target
from ..model.task import Task
from ..model.texts import plain
from ..model.times import check_horizon, delay_ms, expiry_ms, instant_ms, timeout_ms
from .codec import INDEXED, LANE, entry, short_head
from .columns import Bounds, Columns, sort_out
from .generated import GeneratedIds, Stretch
from .index import IdRow
from .keys import HOUR_MS, SECOND_MS, Keyspace, Slice, partition_of
from .put import Rows, Widths

_MOST_TARGETS: Final = 10_000
_TEXTS: Final = (str, type(None))


class _Offsets:
    """Offset and flags of an entry in a slice that is too wide for a table of them."""

    def __init__(self, flags: int) -> None:
        self._flags = flags

    def __getitem__(self, offset_ms: int) -> bytes:
        return (offset_ms << 8 | self._flags).to_bytes(5, "big")


def _offsets(flags: int) -> dict[int, _Offsets | tuple[bytes, ...]]:
    """By width of slice."""
    wide = _Offsets(flags)
    return {HOUR_MS: wide, SECOND_MS: tuple(wide[ms] for ms in range(SECOND_MS))}


_OFFSETS: Final = _offsets(0)
"""Of plain entries."""
_NAMED_OFFSETS: Final = _offsets(INDEXED)
"""Of those with ids."""
_FIXSTR: Final = tuple(bytes((0xA0 | size,)) for size in range(2 * IDH_BYTES))
"""The msgpack header of a text of less than 32 bytes."""


class Named(NamedTuple):
    """A task with a caller-given id, on its way."""

    id: str
    past: bool
    partition: int
    row: IdRow


_new: Final = tuple.__new__
"""Makes a named tuple without the call in between."""


class Run(NamedTuple):
    """Tasks without ids that stand one behind the other in a slice."""

    partition: int
    place: Slice
    first: int
    """Where among the rows for that slice the first of them stands."""
    numbers: Sequence[int]
    """Which tasks of the call they are."""
    due_ms: int | None = None
    """Of a single task that may stand at another time than its own."""


class Batch:
    """Entries ready to be written, and what stands for each task."""

    def __init__(self, size: int, now_ms: int) -> None:
        self.size = size
        self.now_ms = now_ms
        self.rows = Rows()
        self.runs: list[Run] = []
        self.named: dict[int, Named] = {}
        """Tasks with ids, by their numbers in the call."""


class Intake:
    """Checks and encodes tasks for one namespace."""

    def __init__(self, keys: Keyspace, widths: Widths, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._partitions = len(keys)
        self._widths = widths
        self._max_payload_bytes = max_payload_bytes
        self._heads: dict[str, bytes] = {}
        # Hours ahead a slice gets few tasks, and has its price in memory. Of a second's many every node has its share.
        self._ids = {SECOND_MS: GeneratedIds(self._partitions), HOUR_MS: GeneratedIds(self._partitions, gathered=True)}
        self._other_ids = GeneratedIds(self._partitions)

    def take(self, tasks: Sequence[Task], now_ms: int) -> Batch:
        """Encode all or raise for the first that is wrong; nothing is written in either case."""
        batch = Batch(len(tasks), now_ms)
        self._meet({task.target for task in tasks if type(task.target) is str})
        bounds = Bounds(now_ms - now_ms % SECOND_MS, now_ms + HORIZON_MS, self._heads, self._max_payload_bytes)
        found = sort_out(tasks, bounds)
        for number, idh in zip(found.others, self._other_ids.each(len(found.others)), strict=True):
            task = tasks[number]
            due_ms = task.at if type(task.at) is int else self._due_ms(task, now_ms)
            self._take_slowly(batch, number, task, due_ms, idh)
        far_ms = now_ms + HOUR_MS
        if found.plain is not None:
            for width_ms, usual in found.plain.by_width(far_ms):
                self._take_plain(batch, tasks, usual, width_ms)
        if found.named is not None:
            parts = found.named.by_width(far_ms)
            for width_ms, usual in parts:
                self._take_named(batch, tasks, usual, width_ms)
            if found.others or len(parts) > 1:
                batch.named = dict(sorted(batch.named.items()))
        return batch

    def _take_plain(self, batch: Batch, tasks: Sequence[Task], usual: Columns, width_ms: int) -> None:
        """Those of one slice together, so that it gets many rows at once; each stretch into one partition."""
        stretches = self._ids[width_ms].draw(len(usual.numbers))
        stretch, used = next(stretches), 0
        for rows in usual.by_time(width_ms):
            at = 0
            while at < len(rows):
                if used == len(stretch.heads):
                    stretch, used = next(stretches), 0
                some = rows[at : at + len(stretch.heads) - used]
                heads = stretch.heads[used : used + len(some)]
                place = self._widths.place(stretch.partition, usual.dues_ms[some[0]], batch.now_ms)
                if place.width_ms == width_ms:
                    _append(batch, usual, some, place, stretch, heads)
                else:  # a crowded slice is cut finer
                    for number, head in zip(usual.numbers_of(some), heads, strict=True):
                        task = tasks[number]
                        self._take_slowly(batch, number, task, cast("int", task.at), head + stretch.tail)
                at += len(some)
                used += len(some)

    def _take_named(self, batch: Batch, tasks: Sequence[Task], usual: Columns, width_ms: int) -> None:
        # Names of this function: each look into an object would cost as much as what is found there.
        places: dict[int, Slice] = {}
        named, now_ms, partitions, place_of = batch.named, batch.now_ms, self._partitions, self._widths.place
        offsets = _NAMED_OFFSETS[width_ms]
        for number, due_ms, lead, payload in zip(*usual, strict=True):
            task_id = cast("str", tasks[number].id)
            name = task_id.encode()
            span, offset = divmod(due_ms, width_ms)
            partition = crc_hqx(name, 0) % partitions
            spot = span * partitions + partition
            place = places.get(spot)
            if place is None:
                place = place_of(partition, due_ms, now_ms)
                if place.width_ms != width_ms:
                    self._take_slowly(batch, number, tasks[number], due_ms)
                    continue
                places[spot] = place
            idh = blake2b(name, digest_size=IDH_BYTES).digest()
            row = b"".join((offsets[offset], idh, lead, payload, _FIXSTR[len(name)], name))
            named[number] = _new(Named, (task_id, due_ms < now_ms, partition, _new(IdRow, (idh, place, row, due_ms))))

    def _take_slowly(self, batch: Batch, number: int, task: Task, due_ms: int, idh: bytes = b"") -> None:
        """Any task, with everything it may carry; `idh` for one without an id."""
        now_ms = batch.now_ms
        if type(task.target) is not str or type(task.id) not in _TEXTS or type(task.lane) not in _TEXTS:
            # Names of a subclass of `str` are taken for what they say.
            names = {"target": plain(task.target), "id": plain(task.id), "lane": plain(task.lane)}
            task = msgspec.structs.replace(task, **names)
        if task.at is not None and task.after is not None:
            raise InvalidInput("both at and after are given; say one of them")
        if not 0 <= due_ms <= now_ms + HORIZON_MS:
            check_horizon(due_ms, now_ms)
        self._head(task.target)
        payload, raw = encode_payload(task.payload, self._max_payload_bytes)
        if task.id is not None:
            batch.named[number] = self._named(task, due_ms, now_ms, payload, raw)
            return
        partition = self.partition_for(idh, task.lane)
        place, row = self._full(task, idh, None, partition, due_ms, now_ms, payload, raw)
        batch.runs.append(Run(partition, place, batch.rows.add(partition, place, row), (number,), due_ms))

    def partition_for(self, idh: bytes, lane: str | None) -> int:
        """The partition of a task without a caller-given id."""
        if lane is not None:
            return partition_of(check_name(lane, "lane"), self._partitions)
        return crc_hqx(idh, 0) % self._partitions

    def _due_ms(self, task: Task, now_ms: int) -> int:
        if task.at is None:
            return now_ms if task.after is None else now_ms + delay_ms(task.after)
        return instant_ms(task.at)

    def _meet(self, targets: set[str]) -> None:
        """Have the heads of targets at hand; a wrong one is told with its task."""
        for target in targets - self._heads.keys():
            with suppress(InvalidInput):
                self._head(target)

    def _head(self, target: str) -> None:
        """Check a target; its first bytes are kept, so that the next task of it is quick."""
        check_target(target)
        if target not in self._heads:
            if len(self._heads) >= _MOST_TARGETS:
                self._heads.clear()
            self._heads[target] = short_head(target)

    def _named(self, task: Task, due_ms: int, now_ms: int, payload: bytes, raw: bool) -> Named:
        task_id = check_id(task.id)
        idh = idh_of(task_id)
        partition = partition_of(task_id if task.lane is None else check_name(task.lane, "lane"), self._partitions)
        place, row = self._full(task, idh, task_id, partition, due_ms, now_ms, payload, raw)
        return Named(task_id, due_ms < now_ms, partition, IdRow(idh, place, row, due_ms))

    def _full(
        self,
        task: Task,
        idh: bytes,
        task_id: str | None,
        partition: int,
        due_ms: int,
        now_ms: int,
        payload: bytes,
        raw: bool,
    ) -> tuple[Slice, bytes]:
        body = Body(
            task.target,
            payload,
            task_id,
            task.lane,
            None,
            None,
            1,
            None if task.expires is None else expiry_ms(task.expires, due_ms),
            raw,
            retry=None if task.retry is None else retry_line(task.retry),
            timeout_ms=None if task.timeout is None else timeout_ms(task.timeout),
        )
        return self.encode(body, idh, partition, due_ms, now_ms)

    def encode(
        self, body: Body, idh: bytes, partition: int, due_ms: int, now_ms: int, *, indexed: bool | None = None
    ) -> tuple[Slice, bytes]:
        """The slice and the entry of a task. One that is overdue goes into the current slice, first in it."""
        place = self._widths.place(partition, max(due_ms, now_ms), now_ms)
        offset = due_ms - place.start_ms
        late = offset < 0
        indexed = body.id is not None if indexed is None else indexed
        flags = (INDEXED if indexed else 0) | (LANE if body.lane is not None else 0)
        stored = msgspec.structs.replace(body, due_ms=due_ms) if late else body
        return place, entry(0 if late else offset, flags, idh, stored)


def _append(
    batch: Batch, usual: Columns, some: Sequence[int], place: Slice, stretch: Stretch, heads: Sequence[bytes]
) -> None:
    """Rows of one slice."""
    rows = batch.rows.list_for(stretch.partition, place)
    batch.runs.append(Run(stretch.partition, place, len(rows), usual.numbers_of(some)))
    batch.rows.size += len(some)
    # Names of this function: each look into a column by its field would cost as much as what is found there.
    (_, dues_ms, leads, payloads), start_ms, tail = usual, place.start_ms, stretch.tail
    offsets = _OFFSETS[place.width_ms]
    rows += [
        b"".join((offsets[dues_ms[at] - start_ms], head, tail, leads[at], payloads[at]))
        for at, head in zip(some, heads, strict=True)
    ]
