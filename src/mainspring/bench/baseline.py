"""`bench baseline`: the same life through the hand-written sorted-set design."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from ..store.link import LinkOptions
from ..store.links import Links
from ..store.wire import Arg
from .ground import Ground, Where, ground
from .life import Figures, Progress, live
from .load import TARGET, Load, Shape
from .sorted_set import BATCH, Entry, SortedSetQueue, random_ids
from .tally import STALL_S, Tally


class SortedSet:
    """Puts, cancels and fires a load in batches of 1,000."""

    grace_ms = 100

    def __init__(self, queue: SortedSetQueue) -> None:
        self._queue = queue
        self._cancelled_ids: list[Arg] = []

    async def put(self, load: Load, progress: Callable[[int], None]) -> None:
        self._cancelled_ids = []
        writing: asyncio.Task[None] | None = None
        for first in range(0, load.tasks, BATCH):
            last = min(first + BATCH, load.tasks)
            ids, entries = _batch(load, first, last)
            if load.shape.cancel:
                self._cancelled_ids += [id_ for n, id_ in enumerate(ids, first) if load.cancelled(n)]
            # As in Client.put_many, the next batch is made ready while the server works on this one.
            if writing is not None:
                await writing
            writing = asyncio.create_task(self._queue.put(ids, entries))
            await asyncio.sleep(0)
            progress(last)
        if writing is not None:
            await writing

    async def cancel(self) -> int:
        ids = self._cancelled_ids
        count = 0
        for first in range(0, len(ids), BATCH):
            count += await self._queue.cancel(ids[first : first + BATCH])
        return count

    async def fire(self, tally: Tally) -> None:
        await self._claim_all(tally)
        if not tally.complete.is_set():
            tally.completed_at = time.perf_counter()

    async def _claim_all(self, tally: Tally) -> None:
        """One claim after the other, as our own engine ticks; each carries the acks of the one before."""
        claimed: list[bytes] = []
        last_at = time.monotonic()
        while not tally.complete.is_set() and time.monotonic() - last_at < STALL_S:
            claimed, payloads = await self._queue.claim(claimed)
            if payloads:
                tally.take(payloads)
                last_at = time.monotonic()
            else:
                await asyncio.sleep(0.01)
        await self._queue.finish(claimed)


def _batch(load: Load, first: int, last: int) -> tuple[Sequence[Arg], list[Entry]]:
    named = load.shape.ids
    ids: Sequence[Arg] = list(map(load.id, range(first, last))) if named else random_ids(last - first)
    entries = [
        Entry(TARGET, b'"%b"' % text.encode(), load.due_ms(number))
        for number, text in enumerate(load.texts(first, last), first)
    ]
    return ids, entries


@contextlib.asynccontextmanager
async def sorted_set_queue(url: str, namespace: str) -> AsyncIterator[SortedSetQueue]:
    links = await Links.connect(url, LinkOptions())
    try:
        queue = SortedSetQueue(links, namespace)
        await queue.open()
        yield queue
    finally:
        await links.aclose()


@contextlib.asynccontextmanager
async def sorted_set(place: Ground) -> AsyncIterator[SortedSet]:
    async with sorted_set_queue(place.url, place.namespace) as queue:
        yield SortedSet(queue)


async def baseline(where: Where, shape: Shape, progress: Progress) -> Figures:
    async with ground(where) as place, sorted_set(place) as design:
        return await live(place, design, shape, progress)
