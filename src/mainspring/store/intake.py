"""Turns tasks into entries: every check happens here, before anything is written."""

from binascii import crc_hqx
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from ..model.delivery import Body
from ..model.errors import InvalidInput
from ..model.ids import IDH_BYTES, check_id, check_name, idh_of
from ..model.limits import HORIZON_MS, MAX_PAYLOAD_BYTES
from ..model.payload import NULL, encode_payload, to_json
from ..model.retry_text import retry_line
from ..model.targets import check_target
from ..model.task import Task
from ..model.texts import plain
from ..model.times import check_horizon, delay_ms, expiry_ms, instant_ms, timeout_ms
from .codec import BIN8, INDEXED, LANE, bin_head, entry, short_head
from .generated import GeneratedIds
from .index import IdRow
from .keys import HOUR_MS, SECOND_MS, Keyspace, Slice, partition_of
from .put import Rows, Widths

_MOST_TARGETS: Final = 10_000
_BYTES: Final = (bytes, bytearray, memoryview)
_TEXTS: Final = (str, type(None))
_OFFSETS: Final = tuple(ms.to_bytes(4, "big") + b"\0" for ms in range(SECOND_MS))
"""Offset and flags of a plain entry."""
_NAMED_OFFSETS: Final = tuple(ms.to_bytes(4, "big") + bytes((INDEXED,)) for ms in range(SECOND_MS))
"""The same of one with an id."""
_THREE_FIELDS: Final = b"\x93"
_FIXSTR: Final = tuple(bytes((0xA0 | size,)) for size in range(2 * IDH_BYTES))
"""The msgpack header of a text of less than 32 bytes."""


class Plain(NamedTuple):
    """A task without a caller-given id, on its way."""

    idh: bytes
    due_ms: int
    past: bool
    where: tuple[int, Slice, int]


_new: Final = tuple.__new__
"""Makes a named tuple without the call in between."""


class Named(NamedTuple):
    """A task with a caller-given id, on its way."""

    id: str
    past: bool
    partition: int
    row: IdRow


class Batch:
    """Entries ready to be written, and what stands for each task in the order given."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.items: list[Plain | Named] = []
        self.idhs = b""
        """Those drawn for tasks without ids, in the order of the tasks; what stands there for others means nothing."""


PlainLists = dict[int, tuple[list[bytes], Slice]]
"""By second and partition in one number: the rows gathered there, and their slice."""


_each_idh: Final[Callable[[bytes], Iterator[tuple[bytes]]]] = Struct(f"{IDH_BYTES}s").iter_unpack


class Intake:
    """Checks and encodes tasks for one namespace."""

    def __init__(self, keys: Keyspace, widths: Widths, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._partitions = len(keys)
        self._widths = widths
        self._max_payload_bytes = max_payload_bytes
        self._heads: dict[str, bytes] = {}
        self._generated = GeneratedIds(self._partitions)

    def take(self, tasks: Sequence[Task], now_ms: int, *, items: bool = True) -> Batch:
        """Encode all or raise for the first that is wrong; nothing is written in either case.

        Without `items` tasks that carry no id leave no trace in the batch but their rows.
        """
        batch = Batch()
        batch.idhs = self._draw(tasks)
        partitions, most = self._partitions, self._max_payload_bytes
        # A common task: no id, no lane, due within the hour. Its row is made right here, without a call.
        first, last = now_ms - now_ms % SECOND_MS, now_ms + HOUR_MS
        plain_lists: PlainLists = {}
        places: dict[int, Slice] = {}
        target, head, made = None, None, 0
        for task, (idh,) in zip(tasks, _each_idh(batch.idhs), strict=True):
            due_ms = task.at
            if type(due_ms) is not int:
                due_ms = self._due_ms(task, now_ms)
            payload = task.payload
            if head is None or type(task.target) is not str or task.target != target:
                target = task.target
                head = self._head_of(target)
            named = task.id is not None
            if (
                head is None
                or task.lane is not None
                or task.expires is not None
                or task.retry is not None
                or task.timeout is not None
                or task.after is not None
                or not first <= due_ms < last
                or (type(payload) is not dict and type(payload) is not str and isinstance(payload, _BYTES))
            ):
                self._take_slowly(batch, task, idh, due_ms, now_ms, items)
                continue
            try:
                data = to_json(payload)
            except (TypeError, ValueError, OverflowError, RecursionError):
                data = encode_payload(payload)[0]
            size = len(data)
            # `find`, for `in` takes twice as long; a text holds no numbers.
            if size > most or (type(payload) is not str and data.find(NULL) >= 0):
                encode_payload(payload, most)  # says what is wrong, if anything is
            if named:
                self._take_named(batch, task, head, due_ms, now_ms, data, places)
                continue
            second, offset = divmod(due_ms, SECOND_MS)
            partition = crc_hqx(idh, 0) % partitions
            number = second * partitions + partition
            known = plain_lists.get(number) or self._list_of_second(batch, plain_lists, number, due_ms, now_ms)
            if known is None:
                self._take_slowly(batch, task, idh, due_ms, now_ms, items)
                continue
            rows, place = known
            rows.append(b"".join((_OFFSETS[offset], idh, head, BIN8[size] if size < 256 else bin_head(size), data)))
            made += 1
            if items:
                where = (partition, place, len(rows) - 1)
                batch.items.append(_new(Plain, (idh, due_ms, due_ms < now_ms, where)))
        batch.rows.size += made
        return batch

    def _list_of_second(
        self, batch: Batch, lists: PlainLists, number: int, due_ms: int, now_ms: int
    ) -> tuple[list[bytes], Slice] | None:
        """Where the rows of a second and a partition are gathered; None where that second is cut finer."""
        partition = number % self._partitions
        place = self._widths.place(partition, due_ms, now_ms)
        if place.width_ms == SECOND_MS:
            lists[number] = (batch.rows.list_for(partition, place), place)
        return lists.get(number)

    def _head_of(self, target: object) -> bytes | None:
        """What stands before the payload in entries for a target that was met before."""
        return self._heads.get(target) if type(target) is str else None

    def _draw(self, tasks: Sequence[Task]) -> bytes:
        """Ids for those that carry none. All times that are not plain milliseconds count as one."""
        if tasks[0].id is not None and all(task.id is not None for task in tasks):
            return bytes(IDH_BYTES * len(tasks))  # nobody needs one
        return self._generated.draw_by_second([at if type(at := task.at) is int else 0 for task in tasks])

    def _take_named(
        self,
        batch: Batch,
        task: Task,
        head: bytes,
        due_ms: int,
        now_ms: int,
        data: bytes,
        places: dict[int, Slice],
    ) -> None:
        """A common task with an id: put together from bytes, as plain ones are. `places` are those found before."""
        task_id = task.id
        # A longer id may have the form of a generated one: that is looked at with more care.
        if type(task_id) is not str or not 0 < len(task_id) < 2 * IDH_BYTES or not task_id.isascii():
            self._take_slowly(batch, task, b"", due_ms, now_ms, True)
            return
        name = task_id.encode()
        second, offset = divmod(due_ms, SECOND_MS)
        partition = crc_hqx(name, 0) % self._partitions
        place = places.get(second * self._partitions + partition)
        if place is None:
            place = self._widths.place(partition, due_ms, now_ms)
            if place.width_ms != SECOND_MS:
                self._take_slowly(batch, task, b"", due_ms, now_ms, True)
                return
            places[second * self._partitions + partition] = place
        size = len(data)
        idh = blake2b(name, digest_size=IDH_BYTES).digest()
        row = b"".join(
            (
                _NAMED_OFFSETS[offset],
                idh,
                _THREE_FIELDS,
                head[1:],
                BIN8[size] if size < 256 else bin_head(size),
                data,
                _FIXSTR[len(name)],
                name,
            )
        )
        with_id = _new(IdRow, (idh, place, row, due_ms))
        batch.items.append(_new(Named, (task_id, due_ms < now_ms, partition, with_id)))

    def _take_slowly(self, batch: Batch, task: Task, idh: bytes, due_ms: int, now_ms: int, items: bool) -> None:
        """Any task, with everything it may carry."""
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
            batch.items.append(self._named(task, due_ms, now_ms, payload, raw))
            return
        partition = self.partition_for(idh, task.lane)
        place, row = self._full(task, idh, None, partition, due_ms, now_ms, payload, raw)
        where = batch.rows.add(partition, place, row)
        if items:
            batch.items.append(Plain(idh, due_ms, due_ms < now_ms, where))

    def partition_for(self, idh: bytes, lane: str | None) -> int:
        """The partition of a task without a caller-given id."""
        if lane is not None:
            return partition_of(check_name(lane, "lane"), self._partitions)
        return crc_hqx(idh, 0) % self._partitions

    def _due_ms(self, task: Task, now_ms: int) -> int:
        if task.at is None:
            return now_ms if task.after is None else now_ms + delay_ms(task.after)
        return instant_ms(task.at)

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
