"""Turns tasks into entries: every check happens here, before anything is written."""

import os
from binascii import crc_hqx
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..model.delivery import Body
from ..model.errors import InvalidInput
from ..model.ids import IDH_BYTES, check_id, check_name, idh_of
from ..model.limits import HORIZON_MS, MAX_PAYLOAD_BYTES
from ..model.targets import check_target
from ..model.task import Task
from ..model.times import check_horizon, delay_ms, instant_ms
from .codec import INDEXED, LANE, bin_head, encode_payload, entry, short_head
from .index import IdRow
from .keys import SECOND_MS, Keyspace, Slice, partition_of
from .put import Rows, Widths

_MOST_TARGETS: Final = 10_000


class Plain(NamedTuple):
    """A task without a caller-given id, on its way."""

    idh: bytes
    due_ms: int
    past: bool
    where: tuple[int, Slice, int]


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


class Intake:
    """Checks and encodes tasks for one namespace."""

    def __init__(self, keys: Keyspace, widths: Widths, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._partitions = len(keys)
        self._widths = widths
        self._max_payload_bytes = max_payload_bytes
        self._heads: dict[str, bytes] = {}

    def take(self, tasks: Sequence[Task], now_ms: int) -> Batch:
        """Encode all or raise for the first that is wrong; nothing is written in either case."""
        batch = Batch()
        random = os.urandom(IDH_BYTES * len(tasks))
        items, add, place_of = batch.items, batch.rows.add, self._widths.place
        latest = now_ms + HORIZON_MS
        this_second = now_ms - now_ms % SECOND_MS
        for i, task in enumerate(tasks):
            due_ms = self._due_ms(task, now_ms)
            if not 0 <= due_ms <= latest:
                check_horizon(due_ms, now_ms)
            head = self._heads.get(task.target) or self._head(task.target)
            payload, raw = encode_payload(task.payload, self._max_payload_bytes)
            if task.id is not None:
                items.append(self._named(task, due_ms, now_ms, payload, raw))
                continue
            idh = random[i * IDH_BYTES : (i + 1) * IDH_BYTES]
            if task.lane is None and task.expires is None and not raw and due_ms >= this_second:
                partition = crc_hqx(idh, 0) % self._partitions
                place = place_of(partition, due_ms, now_ms)
                offset = (due_ms - place.start_ms).to_bytes(4, "big")
                row = b"%b\0%b%b%b%b" % (offset, idh, head, bin_head(len(payload)), payload)
            else:
                partition = self.partition_for(idh, task.lane)
                place, row = self._full(task, idh, None, partition, due_ms, now_ms, payload, raw)
            items.append(Plain(idh, due_ms, due_ms < now_ms, add(partition, place, row, due_ms)))
        return batch

    def partition_for(self, idh: bytes, lane: str | None) -> int:
        """The partition of a task without a caller-given id."""
        if lane is not None:
            return partition_of(check_name(lane, "lane"), self._partitions)
        return crc_hqx(idh, 0) % self._partitions

    def _due_ms(self, task: Task, now_ms: int) -> int:
        at = task.at
        if at is None:
            return now_ms if task.after is None else now_ms + delay_ms(task.after)
        if task.after is not None:
            raise InvalidInput("both at and after are given; say one of them")
        return at if type(at) is int else instant_ms(at)

    def _head(self, target: str) -> bytes:
        check_target(target)
        if len(self._heads) >= _MOST_TARGETS:
            self._heads.clear()
        head = self._heads[target] = short_head(target)
        return head

    def _named(self, task: Task, due_ms: int, now_ms: int, payload: bytes, raw: bool) -> Named:
        task_id = check_id(task.id)
        idh = idh_of(task_id)
        name = task_id if task.lane is None else check_name(task.lane, "lane")
        partition = partition_of(name, self._partitions)
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
            self._expires_ms(task, due_ms, now_ms),
            raw,
        )
        return self.encode(body, idh, partition, due_ms, now_ms)

    def encode(
        self, body: Body, idh: bytes, partition: int, due_ms: int, now_ms: int, *, indexed: bool | None = None
    ) -> tuple[Slice, bytes]:
        """The slice and the entry of a task. One that is overdue goes into the current slice, first in it."""
        place = self._widths.place(partition, max(due_ms, now_ms), now_ms)
        offset = due_ms - place.start_ms
        late = offset < 0
        flags = (INDEXED if (body.id is not None if indexed is None else indexed) else 0) | (
            LANE if body.lane is not None else 0
        )
        stored = Body(
            body.target,
            body.payload,
            body.id,
            body.lane,
            due_ms if late else None,
            None,
            1,
            body.expires_ms,
            body.raw,
        )
        return place, entry(0 if late else offset, flags, idh, stored)

    def _expires_ms(self, task: Task, due_ms: int, now_ms: int) -> int | None:
        expires = task.expires
        if expires is None:
            return None
        if isinstance(expires, str) and not expires[:4].isdigit():
            expires_ms = due_ms + delay_ms(expires, field="expires")
        elif isinstance(expires, (int, float, str)) or hasattr(expires, "utcoffset"):
            expires_ms = instant_ms(expires, field="expires")  # type: ignore[arg-type]
        else:
            expires_ms = due_ms + delay_ms(expires, field="expires")  # type: ignore[arg-type]
        if expires_ms < due_ms:
            raise InvalidInput("expires lies before the due time: the task could never be delivered")
        check_horizon(expires_ms, now_ms + HORIZON_MS, field="expires")
        return expires_ms
