"""Schedules under faults: each planned time is written down as accepted, and has to run like any other task."""

from typing import Final

from ...client import Client
from ...model.ids import idempotency_key
from ...model.occurrence import occurrence_id
from ...model.schedule_input import define
from ..events import Accepted
from .recorder import Journal, now_us

SCHEDULES: Final = 50
EVERY_MS: Final = 1_000
AHEAD_MS: Final = 2_000
"""The first run: all schedules are added by then."""


class Recurring:
    """Many schedules at a cadence of one second. They may overlap, and nothing that was missed is left out."""

    def __init__(self, client: Client, journal: Journal, target: str) -> None:
        self._client, self._journal, self._target = client, journal, target
        self.open: dict[str, Accepted] = {}
        """What must be delivered, by key."""

    async def add(self, until_us: int) -> None:
        """Add them before anything fails, with their planned times up to an end."""
        first_ms = (now_us() // 1_000_000 + 1) * 1_000 + AHEAD_MS
        last_ms = until_us // 1_000
        names = [f"schedule {number}" for number in range(SCHEDULES)]
        wanted = [
            define(
                name, every=f"{EVERY_MS}ms", start=first_ms, end=last_ms, target=self._target, payload={"task": name},
                overlap="allow", misfire="all(1000)", grace="1h",
            )
            for name in names
        ]  # fmt: skip
        await self._client.schedules.add_many(wanted)
        for name in names:
            for planned_ms in range(first_ms, last_ms + 1, EVERY_MS):
                self._expect(occurrence_id(name, planned_ms), planned_ms)

    def _expect(self, task: str, planned_ms: int) -> None:
        key = idempotency_key(self._client.store.keys.namespace, task, planned_ms)
        accepted = self.open[key] = Accepted(now_us(), task, key, planned_ms)
        self._journal.add(accepted)
