"""Short histories: small accidents on a real server, with real engines, told step by step and checked at the end.

    found = await play("late-put-before-drop", url, "some-namespace")
    assert found == []                    # and with a planted bug: not []

Time stands still but for what a scenario says, so each runs in a fraction of a second and the same way every time.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from mainspring.testing.history import Violation

from .failures import FAILURES
from .holds import HOLDS
from .owners import OWNERS
from .queues import QUEUES
from .schedules import SCHEDULES
from .slices import SLICES
from .tasks import TASKS
from .world import World

Scenario = Callable[[World], Awaitable[None]]

SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.__name__.replace("_", "-"): scenario
    for scenario in (*TASKS, *FAILURES, *HOLDS, *OWNERS, *SLICES, *QUEUES, *SCHEDULES)
}


PARTITIONS: Final[dict[str, int]] = {"tick-of-which-one-partition-is-fenced": 2}
"""Scenarios in which several partitions share a call; the others have one."""


async def play(name: str, url: str, namespace: str) -> list[Violation]:
    """Run one scenario in an empty namespace; returns what the checker and the books have to say."""
    async with World(url, namespace, PARTITIONS.get(name, 1)) as world:
        await SCENARIOS[name](world)
        return await world.findings()
