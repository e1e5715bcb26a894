"""`bench growth`: does a task cost the server more when millions of others are pending?

Each number of pending tasks has a private server of its own, and the servers take turns: whatever else the
machine does meanwhile hits all numbers alike. A given server holds one number after the other.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from ..client import Client
from ..store.store import Store
from . import backlog
from .cycle import Slices
from .ground import Ground, Where, ground
from .life import Figures, Progress, live
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


@dataclass(slots=True)
class _Stand:
    """One number of pending tasks, and what was measured there."""

    pending: int
    place: Ground
    store: Store
    lives: list[Figures] = field(default_factory=list)

    async def fill(self, progress: Progress) -> None:
        def told(done: int) -> None:
            progress(f"adding {self.pending:,} pending tasks", done, self.pending)

        await backlog.add(Client.over(self.store), range(self.pending), backlog.mixed, progress=told)

    async def measure(self, shape: Shape, progress: Progress) -> None:
        def told(what: str, done: int, total: int) -> None:
            progress(f"{self.pending:,} pending: {what}", done, total)

        self.lives.append(await live(self.place, Slices(self.store), shape, told))

    def row(self) -> Row:
        lives = self.lives
        return Row(
            self.pending,
            median(one.server_cpu_us_per_task for one in lives),
            median(one.put_server_us for one in lives),
            median(one.fire_server_us for one in lives),
            sum(one.lost for one in lives),
            sum(one.duplicated for one in lives),
            sum(one.early for one in lives),
        )


async def growth(where: Where, most: int, tasks: int, rounds: int, progress: Progress) -> list[Row]:
    shape = Shape(tasks, spread_s=2.0)
    steps = [step for step in STEPS if step <= most] or [most]
    if where.url is None:
        return await _side_by_side(where, steps, shape, rounds, progress)
    return [row for step in steps for row in await _side_by_side(where, [step], shape, rounds, progress)]


async def _side_by_side(where: Where, steps: Sequence[int], shape: Shape, rounds: int, progress: Progress) -> list[Row]:
    async with contextlib.AsyncExitStack() as stack:
        stands = []
        for step in steps:
            place = await stack.enter_async_context(ground(where))
            store = await Store.open(place.url, namespace=place.namespace)
            stack.push_async_callback(store.aclose)
            stands.append(_Stand(step, place, store))
            await stands[-1].fill(progress)
        for _ in range(rounds):
            for stand in stands:
                await stand.measure(shape, progress)
        return [stand.row() for stand in stands]
