"""`bench growth`: does a task cost the server more when millions of others are pending?"""

from statistics import median
from typing import Final

import msgspec

from ..client import Client
from ..store.store import Store
from . import backlog
from .cycle import Slices
from .ground import Ground, Where, ground
from .life import Progress, live
from .load import Shape

STEPS: Final = (50_000, 500_000, 5_000_000)


class Row(msgspec.Struct, frozen=True):
    """Cost of putting and firing a task while so many others are pending in the same namespace."""

    pending: int
    server_cpu_us_per_task: float
    put_server_us: float
    fire_server_us: float
    lost: int
    duplicated: int
    early: int

    @property
    def sound(self) -> bool:
        return not (self.lost or self.duplicated or self.early)


async def growth(where: Where, most: int, tasks: int, rounds: int, progress: Progress) -> list[Row]:
    shape = Shape(tasks, spread_s=2.0)
    steps = [step for step in STEPS if step <= most] or [most]
    rows: list[Row] = []
    async with ground(where) as place:
        store = await Store.open(place.url, namespace=place.namespace)
        try:
            pending = 0
            for step in steps:
                await _fill(store, range(pending, step), progress)
                pending = step
                rows.append(await _measure(place, store, shape, pending, rounds, progress))
        finally:
            await store.aclose()
    return rows


async def _fill(store: Store, numbers: range, progress: Progress) -> None:
    def told(done: int) -> None:
        progress(f"adding up to {numbers.stop:,} pending tasks", done, len(numbers))

    await backlog.add(Client.over(store), numbers, backlog.mixed, progress=told)


async def _measure(place: Ground, store: Store, shape: Shape, pending: int, rounds: int, progress: Progress) -> Row:
    def told(what: str, done: int, total: int) -> None:
        progress(f"{pending:,} pending: {what}", done, total)

    lives = [await live(place, Slices(store), shape, told) for _ in range(rounds)]
    return Row(
        pending,
        median(one.server_cpu_us_per_task for one in lives),
        median(one.put_server_us for one in lives),
        median(one.fire_server_us for one in lives),
        sum(one.lost for one in lives),
        sum(one.duplicated for one in lives),
        sum(one.early for one in lives),
    )
