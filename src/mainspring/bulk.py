"""Bulk puts: the tasks in batches, and what became of each."""

from collections.abc import AsyncIterable, AsyncIterator, Container, Iterable
from itertools import islice
from typing import Final, cast

from .model.errors import InvalidInput, MainspringError
from .model.payload import to_json
from .model.task import Handle, PutSummary, Task
from .store.codec import HEADER_BYTES
from .store.durable import SERVER, Durability
from .store.intake import Batch
from .store.put import AddressTexts, Places

BATCH: Final = 16_384
"""Tasks that travel together in a bulk put: the more, the more of them share a slice, which costs the server less.
To make them ready keeps the loop for about 20 ms."""

BATCH_BYTES: Final = 8 * 1024 * 1024
"""And their payloads take no more than this, about: more would keep the loop and the connection for long."""

_AT_ONCE: Final = 256
_LOOKED_AT: Final = 32
"""Of so many tasks that are taken at once one is looked at."""


class Tally:
    """What a bulk put came to so far."""

    def __init__(self, level: Durability, handles: bool) -> None:
        self.level = level
        self.handles: list[Handle] | None = [] if handles else None
        self.accepted = 0
        self.last: list[Handle | None] = []
        """Of a batch that was not written whole. Kept here: calls that wait for one connection share its error."""
        self._counts = {"created": 0, "kept": 0, "replaced": 0}

    def add(self, batch: Batch, places: Places, named: list[Handle]) -> None:
        self._counts["created"] += batch.rows.size
        for handle in named:
            self._counts[handle.outcome] += 1
        self.accepted += batch.rows.size + len(named)
        if self.handles is not None:
            self.handles += cast("list[Handle]", handles_of(batch, places, named, self.level))

    def tell(self, error: MainspringError) -> None:
        """Say with an error what is stored all the same."""
        error.stored = self.accepted + sum(handle is not None for handle in self.last)
        error.handles = [*(self.handles or ()), *self.last]

    def summary(self) -> PutSummary:
        counts = self._counts
        return PutSummary(
            self.accepted,
            counts["created"],
            counts["kept"],
            counts["replaced"],
            self.level.text,
            self.handles,
        )


def handles_of(
    batch: Batch, places: Places, named: Iterable[Handle | None], level: Durability, short: Container[int] = ()
) -> list[Handle | None]:
    """One for each task, in the order given; None for those that were not written.

    In the partitions `short` it is as safe as the server is, whatever was asked for.
    """
    found: list[Handle | None] = [None] * batch.size
    for number, handle in zip(batch.named, named, strict=True):
        found[number] = handle
    addresses = AddressTexts(places)
    for partition, place, first, numbers, due_ms in batch.runs:
        if (partition, place) not in places:
            continue
        reached = SERVER if partition in short else level
        rows = batch.rows.groups[partition][place]
        for index, number in enumerate(numbers, first):
            row = rows[index]
            at_ms = place.start_ms + int.from_bytes(row[:4], "big") if due_ms is None else due_ms
            task_id = f"{row[5:HEADER_BYTES].hex()}~{addresses.of(partition, place, index)}"
            found[number] = Handle(task_id, at_ms, "created", at_ms < batch.now_ms, reached.text)
    return found


async def batches(tasks: Iterable[Task] | AsyncIterable[Task]) -> AsyncIterator[list[Task]]:
    batch: list[Task] = []
    size = 0
    async for some in _by_few(tasks):
        batch += checked(some)
        size += payload_bytes(some)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


async def _by_few(tasks: Iterable[Task] | AsyncIterable[Task]) -> AsyncIterator[list[Task]]:
    if isinstance(tasks, Iterable):
        rest = iter(tasks)
        while some := list(islice(rest, _AT_ONCE)):
            yield some
        return
    if not isinstance(tasks, AsyncIterable):
        raise InvalidInput(f"put_many takes an iterable of Task objects; this is a {type(tasks).__name__}")
    some = []
    async for task in tasks:
        some.append(task)
        if len(some) == _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def payload_bytes(tasks: list[Task]) -> int:
    """What their payloads take, by the look of some."""
    some = tasks[::_LOOKED_AT]
    return sum(map(_payload_bytes, some)) * len(tasks) // len(some)


def _payload_bytes(task: Task) -> int:
    payload = task.payload
    if isinstance(payload, str | bytes | bytearray | memoryview):
        return len(payload)
    try:
        return len(to_json(payload))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0  # wrong, which is told where it is encoded


def checked(tasks: list[Task]) -> list[Task]:
    strange = set(map(type, tasks)) - {Task}
    for kind in strange:
        if not issubclass(kind, Task):
            raise InvalidInput(f"put_many takes Task objects; this is a {kind.__name__}")
    return tasks
