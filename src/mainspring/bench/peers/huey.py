"""Huey: tasks in a sorted set by time; a scheduler thread moves due tasks every second, its shortest interval.

Eight threads on a blocking pop, no results, no periodic tasks.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from huey import RedisHuey

DISTRIBUTION: Final = "huey"
THREADS: Final = 8


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        self._huey = RedisHuey("bench", url=url, results=False)
        self._task = self._huey.task(name="note")(note)

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        for number, due_ms in enumerate(dues_ms, first):
            self._task.schedule((number,), eta=datetime.fromtimestamp(due_ms / 1000, UTC))

    def consume(self) -> None:
        self._huey.create_consumer(workers=THREADS, periodic=False, scheduler_interval=1).run()
