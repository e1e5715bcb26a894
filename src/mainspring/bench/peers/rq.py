"""RQ: jobs in a registry by time (whole seconds); a scheduler process moves due jobs every second.

The worker runs jobs in its own process (a fork per job costs several times as much) and keeps no results. The producer
sends jobs one by one, or in pipelines.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from redis import Redis
from rq import Queue, SimpleWorker

DISTRIBUTION: Final = "rq"
CHUNK: Final = 500

_notes: list[Callable[[int], None]] = []


def run(number: int) -> None:
    """Run a task. A module-level function, because a job names its function by import path."""
    _notes[-1](number)


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        _notes.append(note)
        self._redis = Redis.from_url(url)
        self._queue = Queue("bench", connection=self._redis)

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        for number, due_ms in enumerate(dues_ms, first):
            when = datetime.fromtimestamp(due_ms / 1000, UTC)
            self._queue.enqueue_at(when, f"{__name__}.run", number, result_ttl=0)

    def in_bulk(self, first: int, dues_ms: Sequence[int]) -> None:
        for start in range(0, len(dues_ms), CHUNK):
            with self._redis.pipeline() as pipe:
                for number, due_ms in enumerate(dues_ms[start : start + CHUNK], first + start):
                    when = datetime.fromtimestamp(due_ms / 1000, UTC)
                    self._queue.enqueue_at(when, f"{__name__}.run", number, result_ttl=0, pipeline=pipe)
                pipe.execute()

    def consume(self) -> None:
        worker = SimpleWorker([self._queue], connection=self._redis)
        worker.work(with_scheduler=True, logging_level="ERROR")
