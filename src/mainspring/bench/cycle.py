"""`bench cycle`: the whole life of N tasks through the client and the real engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from ..client import Client
from ..engine.engine import Engine
from ..model.task import Handle
from ..store.store import Group, Store
from .ground import Ground, Where, ground
from .life import Figures, Progress, live
from .load import Load, Shape
from .tally import Tally

_DROP_S: Final = 10.0


class Slices:
    """Mainspring itself."""

    grace_ms = 3_100
    """A slice may be dropped two seconds after its end, and it ends up to a second after its last task."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client = Client.over(store)
        self._load: Load | None = None
        self._handles: list[Handle] = []

    async def put(self, load: Load, progress: Callable[[int], None]) -> None:
        self._load = load
        wanted = load.shape.cancel > 0 and not load.shape.ids
        summary = await self._client.put_many(load.stream(), progress=progress, handles=wanted)
        self._handles = summary.handles or []

    async def cancel(self) -> int:
        load, handles = self._load, self._handles
        assert load is not None
        numbers = (number for number in range(load.tasks) if load.cancelled(number))
        ids = (handles[number].id if handles else load.id(number) for number in numbers)
        outcomes = await self._client.cancel_many(ids)
        self._handles = []
        return outcomes.count("cancelled")

    async def fire(self, tally: Tally) -> None:
        engine = Engine(self._store, {"null": tally})
        await engine.start()
        try:
            whole = await tally.wait()
            if engine.crashed is not None:
                raise engine.crashed
            if whole:
                await self._until_dropped()
        finally:
            await engine.stop()

    async def _until_dropped(self) -> None:
        """Dropping the slices is part of what a task costs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DROP_S):
                while True:
                    if not await self._overdue_slices():
                        break
                    await asyncio.sleep(0.1)

    async def _overdue_slices(self) -> int:
        now_s = self._store.clock.now_ms() // 1000
        groups: list[Group] = [
            (keys.slot, [("ZCOUNT", keys.slices, "-inf", now_s)]) for keys in self._store.keys.partitions
        ]
        return sum(result[0] for result in await self._store.run(groups) if isinstance(result, list))


@contextlib.asynccontextmanager
async def slices(place: Ground) -> AsyncIterator[Slices]:
    store = await Store.open(place.url, namespace=place.namespace)
    try:
        yield Slices(store)
    finally:
        await store.aclose()


async def cycle(where: Where, shape: Shape, progress: Progress) -> Figures:
    async with ground(where) as place, slices(place) as design:
        return await live(place, design, shape, progress)
