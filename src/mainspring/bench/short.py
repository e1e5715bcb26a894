"""`bench all`: every bench in short, in a few minutes. Figures for publication come from the long ones."""

from typing import Any

from ..testing.servers import missing
from .compare import compare
from .ground import Where
from .growth import growth
from .idle import idle
from .lateness import Steady, compare_lateness
from .life import Progress
from .load import Shape
from .sparse import sparse


async def all_in_short(where: Where, tasks: int, progress: Progress) -> dict[str, Any]:
    spread_s = 2.0
    results: dict[str, Any] = {
        "compare": await compare(where, Shape(tasks, spread_s=spread_s), 1, progress),
        "compare --ids": await compare(where, Shape(tasks, ids=True, spread_s=spread_s), 1, progress),
        "compare --ids --cancel 0.95": await compare(
            where, Shape(tasks, ids=True, cancel=0.95, spread_s=spread_s), 1, progress
        ),
        "lateness --compare": await compare_lateness(where, Steady(10_000, 5.0), progress),
        "growth": await growth(where, 500_000, min(tasks, 100_000), 1, progress),
        "idle": await idle(where, 5.0, progress),
    }
    if where.url is None and missing("redis") is None:
        where = Where(server="redis")  # the promise on memory is made for Redis 7.0
    results["sparse"] = await sparse(where, 10 * tasks, 48, progress)
    return results
