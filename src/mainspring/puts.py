"""The calls of a client that store tasks in bulk: batch after batch, the next made ready while one is written."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, cast

from .bulk import BATCH, BATCH_BYTES, Tally, batches, checked, handles_of, payload_bytes
from .model.errors import InvalidInput, MainspringError, NotConfirmed
from .model.task import Handle, OnConflict, PutSummary, Task
from .store.durable import SERVER, Durability, check_durability
from .store.find import Finder
from .store.intake import Batch, Intake
from .store.named import NamedPuts
from .store.put import Places, Widths, put_rows
from .store.store import Store

Progress = Callable[[int], None]
"""Called with the number of tasks stored so far."""

Parts = tuple[Store, Intake, NamedPuts, Finder]
"""What an open client works with."""

_CONFLICTS: Final = ("keep", "replace", "earliest", "reject")


class Puts:
    """How Client stores tasks."""

    _wait_s: float
    _widths: Widths

    @abstractmethod
    def _ready(self) -> Parts: ...

    async def put_many(
        self,
        tasks: Iterable[Task] | AsyncIterable[Task],
        *,
        on_conflict: OnConflict = "keep",
        durability: str = "server",
        progress: Progress | None = None,
        handles: bool = False,
    ) -> PutSummary:
        """Schedule any number of tasks in bulk. A wrong task stops the call; batches before it are stored.

        An error says how many are `stored` all the same, and has their handles: where `handles` are asked for those of
        all, else those of the last batch (at most 16,384 tasks), which is the only one that can be stored in part.
        """
        if on_conflict not in _CONFLICTS:
            raise InvalidInput(f"on_conflict {on_conflict!r}: use one of {', '.join(_CONFLICTS)}")
        if progress is not None and not callable(progress):
            raise InvalidInput(f"progress is a {type(progress).__name__}; give a function that takes the number stored")
        level = check_durability(durability)
        tally = Tally(level, handles)
        try:
            await self._put_all(tasks, on_conflict, tally, progress or _silent)
        except MainspringError as error:
            tally.tell(error)
            raise
        return tally.summary()

    async def _put_all(
        self, tasks: Iterable[Task] | AsyncIterable[Task], on_conflict: OnConflict, tally: Tally, report: Progress
    ) -> None:
        store, _, _, _ = self._ready()
        if isinstance(tasks, list) and _is_one_batch(tasks):
            if tasks:
                await store.fresh_ms()
                await self._prepare(tasks, on_conflict, tally)()
            report(tally.accepted)
            return
        writing: asyncio.Task[None] | None = None
        try:
            async for some in batches(tasks):
                await store.fresh_ms()
                # The next batch is made ready while the server works on this one.
                write = self._prepare(some, on_conflict, tally)
                if writing is not None:
                    await writing
                    report(tally.accepted)
                writing = asyncio.create_task(write())
                await asyncio.sleep(0)
        finally:
            if writing is not None:
                await writing
        report(tally.accepted)

    def _prepare(
        self, tasks: Sequence[Task], on_conflict: OnConflict, tally: Tally
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Check and encode a batch; what is returned writes it."""
        store, intake, _, _ = self._ready()
        now_ms = store.clock.now_ms()
        batch = intake.take(tasks, now_ms)

        async def write() -> None:
            places: Places = {}
            named: list[Handle | None] = []
            short: set[int] = set()
            try:
                await self._write(batch, on_conflict, now_ms, tally.level, places, named, short)
            except MainspringError:
                tally.last = handles_of(batch, places, named, tally.level, short)
                raise
            tally.add(batch, places, cast("list[Handle]", named))

        return write

    async def _write(
        self,
        batch: Batch,
        on_conflict: OnConflict,
        now_ms: int,
        level: Durability,
        places: Places,
        handles: list[Handle | None],
        short: set[int],
    ) -> None:
        store, _, named, _ = self._ready()
        with_ids = list(batch.named.values())
        handles += [None] * len(with_ids)
        shortfall: NotConfirmed | None = None
        if batch.rows.size:
            try:
                await put_rows(
                    store, batch.rows, self._widths, places, now_ms=now_ms, wait_s=self._wait_s, durability=level,
                    short=short,
                )  # fmt: skip
            except NotConfirmed as error:
                shortfall, level = error, SERVER  # the others are stored as well, without another wait
        if with_ids:
            await named.put(with_ids, handles, on_conflict, now_ms, level, wait_s=self._wait_s)
        if shortfall is not None:
            raise shortfall


def _is_one_batch(tasks: list[Task]) -> bool:
    return len(tasks) <= BATCH and (not tasks or payload_bytes(checked(tasks)) <= BATCH_BYTES)


def _silent(stored: int) -> None:
    """Nobody wants to know."""
