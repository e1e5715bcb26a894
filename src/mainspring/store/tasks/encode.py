"""Turn tasks into entries: every check happens here, before anything is written."""

import os
import random
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from itertools import compress
from struct import iter_unpack
from typing import Any, Final, NamedTuple, cast

import msgspec

from ...model.delivery import Body
from ...model.errors import InvalidInput
from ...model.ids import IDH_BYTES, check_id, check_name, idh_in_lane, idh_of
from ...model.limits import HORIZON_MS
from ...model.retry import policy_line
from ...model.shared_settings import SharedSettings
from ...model.targets.names import check_target
from ...model.task import NULL, Task, encode_payload, to_json
from ...model.text import plain
from ...model.times import EARLIEST_MS, check_horizon, delay_ms, expiry_ms, instant_ms, timeout_ms
from ..codec import INDEXED, LANE, bin_head, entry, short_head
from ..keys import HOUR_MS, SECOND_MS, Keyspace, Slice, partition_of
from .index import IdRow
from .put import PutRows, Widths

# Generated ids: random bytes, chosen so that the tasks of one call land where they cost least.
#
# A transaction, and later a tick, costs per partition it touches. So a call is cut into stretches of neighbouring
# tasks; each stretch goes to one partition, the next stretch to the next partition. The next call starts one partition
# further, however many stretches there were: otherwise calls of one size would bring the same times to the same
# partitions. The partition is still the crc16 of the id, so readers need not know about stretches.
#
# An id of a stretch is a number followed by its own crc16, mixed with four random bytes, and twelve bytes that the
# whole stretch shares. Such a number adds nothing to the crc16 of the id, so the random and shared bytes alone decide
# the partition. The distinct bytes come first: of a cancelled task only the first four bytes of its id are kept.

STRETCH: Final = 256
"""Tasks of one call that share a partition: at this size the cost per partition is small compared to that per task."""

GATHERED: Final = 32
"""Number of large calls that fill the same slices. With more, slices would get too long under heavy load."""

_OWN: Final = 4
_CHOSEN: Final = 2
_POLYNOMIAL: Final = 0x1021


class Stretch(NamedTuple):
    """Ids of one partition: each is one of `heads` followed by `tail`."""

    partition: int
    heads: Sequence[bytes]
    tail: bytes


class GeneratedIds:
    """Generates ids for tasks without one."""

    def __init__(self, partitions: int, *, gathered: bool = False) -> None:
        """With `gathered`, several large calls in a row use the same partitions for the same times."""
        self._partitions = partitions
        self._gathered = gathered
        self._large = 0
        """Large calls so far: those that filled every partition."""
        self._next = random.randrange(partitions)
        self._spare_bits = (65536 // partitions).bit_length() - 1
        """At least 2 to this power of the crc16 values lead to one partition."""

    def draw(self, count: int) -> Iterator[Stretch]:
        """Yield `count` ids, in stretches of about the same length."""
        stretches = -(-count // STRETCH)
        partition = self._begin(stretches)
        while count:
            size = -(-count // stretches)
            yield self._single() if count == stretches == 1 else self._stretch(partition, size)
            partition = (partition + 1) % self._partitions
            count -= size
            stretches -= 1

    def each(self, count: int) -> Iterator[bytes]:
        """Yield `count` ids one by one."""
        return (head + stretch.tail for stretch in self.draw(count) for head in stretch.heads)

    def _begin(self, stretches: int) -> int:
        if self._gathered and stretches >= self._partitions:
            begin, self._large = self._large // GATHERED % self._partitions, self._large + 1
            return begin
        self._next = (self._next + 1) % self._partitions
        return self._next

    def _single(self) -> Stretch:
        """Return one id: a single task needs no neighbours, so the id is fully random."""
        idh = os.urandom(IDH_BYTES)
        return Stretch(crc_hqx(idh, 0) % self._partitions, (idh[:_OWN],), idh[_OWN:])

    def _stretch(self, partition: int, size: int) -> Stretch:
        free = os.urandom(IDH_BYTES - _CHOSEN)
        crc = partition + self._partitions * random.getrandbits(self._spare_bits)
        chosen = crc_hqx(free, 0) ^ _register_before(crc)
        return Stretch(partition, _mixed(free[:_OWN], size), free[_OWN:] + chosen.to_bytes(_CHOSEN, "big"))


def _mixed(with_: bytes, size: int) -> list[bytes]:
    """Return the first numbers, each XORed with these bytes, computed in one step."""
    together = int.from_bytes(_NUMBERS[: _OWN * size]) ^ int.from_bytes(with_ * size)
    return [head for (head,) in iter_unpack(f"{_OWN}s", together.to_bytes(_OWN * size))]


@cache
def _register_before(crc: int) -> int:
    """Return the register of crc16, XORed with the chosen bytes, that ends as `crc`: its steps in reverse."""
    for _ in range(8 * _CHOSEN):
        crc = (crc ^ _POLYNOMIAL) >> 1 | 0x8000 if crc & 1 else crc >> 1
    return crc


def _with_crc(number: bytes) -> bytes:
    return number + crc_hqx(number, 0).to_bytes(_CHOSEN, "big")


_NUMBERS: Final = b"".join(_with_crc(number.to_bytes(_OWN - _CHOSEN)) for number in range(STRETCH))


# The common tasks of a call, encoded column by column: a third of the cost of encoding them one by one.
#
# A task is common if it has no lane and no rules of its own, is not overdue, has a known target, and has a short id or
# none.

FEW: Final = 4
"""Fewer tasks than this are encoded faster one by one."""

_BYTES: Final = (bytes, bytearray, memoryview)
_THREE_FIELDS: Final = b"\x93"


class Bounds(NamedTuple):
    """Limits for common tasks of a call."""

    first_ms: int
    last_ms: int
    heads: Mapping[str, bytes]
    """By target: the bytes of its entries before the payload."""
    max_payload_bytes: int


class TaskColumns(NamedTuple):
    numbers: Sequence[int]
    """Numbers of the tasks within the call; a range if they are all of them."""
    dues_ms: list[int]
    leads: list[bytes]
    """The bytes between id and payload."""
    payloads: list[bytes]

    def numbers_of(self, some: Sequence[int]) -> Sequence[int]:
        """Return the numbers, within the call, of these rows of the columns."""
        return some if isinstance(self.numbers, range) else [self.numbers[at] for at in some]

    def by_width(self, far_ms: int) -> "list[tuple[int, TaskColumns]]":
        """Split the columns by width of slice: seconds, and hours from `far_ms` on."""
        if max(self.dues_ms) < far_ms:
            return [(SECOND_MS, self)]
        if min(self.dues_ms) >= far_ms:
            return [(HOUR_MS, self)]
        far = [due_ms >= far_ms for due_ms in self.dues_ms]
        return [(SECOND_MS, self._only([not is_far for is_far in far])), (HOUR_MS, self._only(far))]

    def _only(self, chosen: Sequence[bool]) -> "TaskColumns":
        return TaskColumns(
            list(compress(self.numbers, chosen)),
            list(compress(self.dues_ms, chosen)),
            list(compress(self.leads, chosen)),
            list(compress(self.payloads, chosen)),
        )

    def by_time(self, width_ms: int) -> list[Sequence[int]]:
        """Return the rows of the columns by time slice, earliest slice first."""
        spans = [due_ms // width_ms for due_ms in self.dues_ms]
        if min(spans) == max(spans):
            return [range(len(spans))]
        found: defaultdict[int, list[int]] = defaultdict(list)
        for at, span in enumerate(spans):
            found[span].append(at)
        return [found[span] for span in sorted(found)]


class SortedOut(NamedTuple):
    """The tasks of a call by how they are encoded."""

    plain: TaskColumns | None
    named: TaskColumns | None
    """Those with ids."""
    others: Sequence[int]
    """Numbers of the tasks that are uncommon or invalid."""


def sort_out(tasks: Sequence[Task], bounds: Bounds) -> SortedOut:
    everyone = range(len(tasks))
    if len(tasks) < FEW:
        return SortedOut(None, None, everyone)
    ids = [task.id for task in tasks]
    if ids.count(None) == len(ids):
        if (plain := _columns(tasks, everyone, bounds)) is not None:
            return SortedOut(plain, None, ())
    elif all(map(_is_short, ids)) and (named := _columns(tasks, everyone, bounds, named=True)) is not None:
        return SortedOut(None, named, ())
    usual = [number for number in everyone if _are_usual((tasks[number],), bounds)]
    without, short = [ids[number] is None for number in usual], [_is_short(ids[number]) for number in usual]
    plain = _some(tasks, list(compress(usual, without)), bounds)
    named = _some(tasks, list(compress(usual, short)), bounds, named=True)
    taken = {number for some in (plain, named) if some is not None for number in some.numbers}
    return SortedOut(plain, named, [number for number in everyone if number not in taken])


def _some(tasks: Sequence[Task], numbers: Sequence[int], bounds: Bounds, *, named: bool = False) -> TaskColumns | None:
    return _columns([tasks[number] for number in numbers], numbers, bounds, named=named) if numbers else None


def _columns(
    tasks: Sequence[Task], numbers: Sequence[int], bounds: Bounds, *, named: bool = False
) -> TaskColumns | None:
    """Return columns; None if a task is uncommon or invalid."""
    if not tasks or not _are_usual(tasks, bounds):
        return None
    payloads = _payloads([task.payload for task in tasks], bounds.max_payload_bytes)
    if payloads is None:
        return None
    targets, sizes = [task.target for task in tasks], list(map(len, payloads))
    heads = {target: bounds.heads[target] for target in set(targets)}
    if named:
        heads = {target: _THREE_FIELDS + head[1:] for target, head in heads.items()}
    if len(heads) == 1:
        [head] = heads.values()
        by_size = {size: head + bin_head(size) for size in set(sizes)}
        leads = list(map(by_size.__getitem__, sizes))
    else:
        leads = [heads[target] + bin_head(size) for target, size in zip(targets, sizes, strict=True)]
    return TaskColumns(numbers, cast("list[int]", [task.at for task in tasks]), leads, payloads)


def _are_usual(tasks: Sequence[Task], bounds: Bounds) -> bool:
    """Return whether all tasks are common, apart from ids and payloads."""
    count = len(tasks)
    times, targets = [task.at for task in tasks], [task.target for task in tasks]
    return (
        [task.lane for task in tasks].count(None) == count
        and [task.after for task in tasks].count(None) == count
        and [task.expires for task in tasks].count(None) == count
        and [task.retry for task in tasks].count(None) == count
        and [task.retries for task in tasks].count(None) == count
        and [task.timeout for task in tasks].count(None) == count
        and [task.by for task in tasks].count(None) == count
        and set(map(type, times)) == {int}
        and bounds.first_ms <= min(cast("list[int]", times))
        and max(cast("list[int]", times)) <= bounds.last_ms
        and set(map(type, targets)) == {str}
        and bounds.heads.keys() >= set(targets)
    )


def _is_short(id: object) -> bool:
    """Return whether an id is a short text: a longer one may look like a generated id and needs the full check."""
    return type(id) is str and 0 < len(id) < 2 * IDH_BYTES and id.isascii()


def _payloads(payloads: Sequence[Any], most: int) -> list[bytes] | None:
    """Return the payloads as stored; None if one is the caller's own bytes, or invalid."""
    if any(issubclass(kind, _BYTES) for kind in set(map(type, payloads))):
        return None
    try:
        written = list(map(to_json, payloads))
        if NULL in b"".join(written):
            _check(payload for payload, text in zip(payloads, written, strict=True) if NULL in text)
    except (TypeError, ValueError, OverflowError, RecursionError, InvalidInput):
        return None
    return written if max(map(len, written)) <= most else None


def _check(payloads: Iterable[Any]) -> None:
    """Raise InvalidInput for a number that JSON cannot express."""
    for payload in payloads:
        encode_payload(payload)


_MOST_TARGETS: Final = 10_000
_TEXTS: Final = (str, type(None))


class _Offsets:
    """Computes offset and flags of entries in a slice that is too wide for a table."""

    def __init__(self, flags: int) -> None:
        self._flags = flags

    def __getitem__(self, offset_ms: int) -> bytes:
        return (offset_ms << 8 | self._flags).to_bytes(5, "big")


def _offsets(flags: int) -> dict[int, _Offsets | tuple[bytes, ...]]:
    """Return offsets by width of slice."""
    wide = _Offsets(flags)
    return {HOUR_MS: wide, SECOND_MS: tuple(wide[ms] for ms in range(SECOND_MS))}


_OFFSETS: Final = _offsets(0)
"""Offsets of entries without ids."""
_NAMED_OFFSETS: Final = _offsets(INDEXED)
"""Offsets of entries with ids."""
_FIXSTR: Final = tuple(bytes((0xA0 | size,)) for size in range(2 * IDH_BYTES))
"""The msgpack header of a text of less than 32 bytes."""


class Named(NamedTuple):
    """A task with a caller-given id."""

    id: str
    past: bool
    partition: int
    row: IdRow
    lane: str | None = None


_new: Final = tuple.__new__
"""Makes a named tuple without the overhead of its constructor."""


class SliceRun(NamedTuple):
    """Tasks without ids in consecutive rows of a slice."""

    partition: int
    place: Slice
    first: int
    """Position of the first of them among the rows for that slice."""
    numbers: Sequence[int]
    """Their numbers within the call."""
    due_ms: int | None = None
    """Due time of a single task that may be put at a later time than it asked for."""


class Batch:
    """Entries ready to write, and the handle of each task."""

    def __init__(self, size: int, now_ms: int) -> None:
        self.size = size
        self.now_ms = now_ms
        self.targets: set[str] = set()
        self.rows = PutRows()
        self.runs: list[SliceRun] = []
        self.named: dict[int, Named] = {}
        """Tasks with ids, by their numbers in the call."""


class Intake:
    """Checks and encodes tasks for one namespace."""

    def __init__(self, keys: Keyspace, widths: Widths, shared: SharedSettings | None = None) -> None:
        self._partitions = len(keys)
        self._widths = widths
        self._shared = shared or SharedSettings()
        self._heads: dict[str, bytes] = {}
        # Far-ahead slices get few tasks and each slice costs memory, so gather them. Slices of the next seconds get
        # many: spread those, so that every node has its share.
        self._ids = {SECOND_MS: GeneratedIds(self._partitions), HOUR_MS: GeneratedIds(self._partitions, gathered=True)}
        self._other_ids = GeneratedIds(self._partitions)

    def take(self, tasks: Sequence[Task], now_ms: int) -> Batch:
        """Encode all tasks, or raise for the first invalid one; nothing is written in either case."""
        batch = Batch(len(tasks), now_ms)
        batch.targets = {task.target for task in tasks if type(task.target) is str}
        self._meet(batch.targets)
        bounds = Bounds(now_ms - now_ms % SECOND_MS, now_ms + HORIZON_MS, self._heads, self._shared.max_payload_bytes)
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

    def _take_plain(self, batch: Batch, tasks: Sequence[Task], usual: TaskColumns, width_ms: int) -> None:
        """Encode the tasks of one slice together, so that it gets many rows at once; each stretch has one partition."""
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
                else:  # use finer slices instead of a crowded one
                    for number, head in zip(usual.numbers_of(some), heads, strict=True):
                        task = tasks[number]
                        self._take_slowly(batch, number, task, cast("int", task.at), head + stretch.tail)
                at += len(some)
                used += len(some)

    def _take_named(self, batch: Batch, tasks: Sequence[Task], usual: TaskColumns, width_ms: int) -> None:
        # Local names: each attribute access would cost as much as the work itself.
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
            named[number] = _new(
                Named, (task_id, due_ms < now_ms, partition, _new(IdRow, (idh, place, row, due_ms)), None)
            )

    def _take_slowly(self, batch: Batch, number: int, task: Task, due_ms: int, idh: bytes = b"") -> None:
        """Encode any task with all its fields; `idh` is for one without an id."""
        now_ms = batch.now_ms
        if type(task.target) is not str or type(task.id) not in _TEXTS or type(task.lane) not in _TEXTS:
            # Subclasses of `str`, such as enums, count as their text.
            names = {"target": plain(task.target), "id": plain(task.id), "lane": plain(task.lane)}
            task = msgspec.structs.replace(task, **names)
        if task.at is not None and task.after is not None:
            raise InvalidInput("both at and after are given; give one of them")
        if not EARLIEST_MS <= due_ms <= now_ms + HORIZON_MS:
            check_horizon(due_ms, now_ms)
        self._head(task.target)
        payload, raw = encode_payload(task.payload, self._shared.max_payload_bytes)
        if task.id is not None:
            batch.named[number] = self._named(task, due_ms, now_ms, payload, raw)
            return
        partition = self.partition_for(idh, task.lane)
        place, row = self._full(task, idh, None, partition, due_ms, now_ms, payload, raw)
        batch.runs.append(SliceRun(partition, place, batch.rows.add(partition, place, row), (number,), due_ms))

    def partition_for(self, idh: bytes, lane: str | None) -> int:
        """Return the partition of a task without a caller-given id."""
        if lane is not None:
            return partition_of(check_name(lane, "lane"), self._partitions)
        return crc_hqx(idh, 0) % self._partitions

    def _due_ms(self, task: Task, now_ms: int) -> int:
        if task.at is None:
            return now_ms if task.after is None else now_ms + delay_ms(task.after)
        return instant_ms(task.at)

    def _meet(self, targets: set[str]) -> None:
        """Prepare the entry heads of targets; an invalid target is reported later, together with its task."""
        for target in targets - self._heads.keys():
            with suppress(InvalidInput):
                self._head(target)

    def _head(self, target: str) -> None:
        """Check a target and cache its first bytes for its next task."""
        check_target(target)
        if target not in self._heads:
            if len(self._heads) >= _MOST_TARGETS:
                self._heads.clear()
            self._heads[target] = short_head(target)

    def _named(self, task: Task, due_ms: int, now_ms: int, payload: bytes, raw: bool) -> Named:
        task_id = check_id(task.id)
        lane = None if task.lane is None else check_name(task.lane, "lane")
        idh = idh_of(task_id) if lane is None else idh_in_lane(idh_of(task_id), lane)
        partition = partition_of(task_id if lane is None else lane, self._partitions)
        place, row = self._full(task, idh, task_id, partition, due_ms, now_ms, payload, raw)
        return Named(task_id, due_ms < now_ms, partition, IdRow(idh, place, row, due_ms), lane)

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
            retry=policy_line(task.retries, task.retry),
            timeout_ms=None if task.timeout is None else timeout_ms(task.timeout),
            lane_in_key=task.lane is not None,
            by=task.by,
        )
        return self.encode(body, idh, partition, due_ms, now_ms)

    def encode(
        self, body: Body, idh: bytes, partition: int, due_ms: int, now_ms: int, *, indexed: bool | None = None
    ) -> tuple[Slice, bytes]:
        """Return the slice and the entry of a task. An overdue task goes first in the current slice."""
        place = self._widths.place(partition, max(due_ms, now_ms), now_ms)
        offset = due_ms - place.start_ms
        late = offset < 0
        indexed = body.id is not None if indexed is None else indexed
        flags = (INDEXED if indexed else 0) | (LANE if body.lane is not None else 0)
        stored = msgspec.structs.replace(body, due_ms=due_ms) if late else body
        return place, entry(0 if late else offset, flags, idh, stored)


def _append(
    batch: Batch, usual: TaskColumns, some: Sequence[int], place: Slice, stretch: Stretch, heads: Sequence[bytes]
) -> None:
    """Add rows to one slice."""
    rows = batch.rows.list_for(stretch.partition, place)
    batch.runs.append(SliceRun(stretch.partition, place, len(rows), usual.numbers_of(some)))
    batch.rows.size += len(some)
    # Local names: each attribute access would cost as much as the work itself.
    (_, dues_ms, leads, payloads), start_ms, tail = usual, place.start_ms, stretch.tail
    offsets = _OFFSETS[place.width_ms]
    rows += [
        b"".join((offsets[dues_ms[at] - start_ms], head, tail, leads[at], payloads[at]))
        for at, head in zip(some, heads, strict=True)
    ]
