"""Celery: tasks with an eta. Its worker fetches them at once and keeps them in memory until they are due.

The pool uses threads, not processes: for tasks that do next to nothing it is the fastest. No results, gossip, mingling,
heartbeats or remote control; the producer keeps one connection. The prefetch is unlimited: with a limit, fetching
delayed tasks is very slow.

Its loop fires ten delayed tasks per turn, and turns once a second when nothing else happens: thousands of tasks due at
one moment take minutes if no others arrive. The bench shows its better cases: a worker that starts with a backlog, and
a steady load.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from celery import Celery

DISTRIBUTION: Final = "celery"
THREADS: Final = 8


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        self._app = Celery("bench", broker=url)
        self._app.conf.update(
            task_ignore_result=True,
            worker_prefetch_multiplier=0,
            worker_enable_remote_control=False,
            worker_hijack_root_logger=False,
            broker_connection_retry_on_startup=True,
            broker_transport_options={"visibility_timeout": 3600},
        )
        self._task = self._app.task(note, name="note")

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        with self._app.producer_or_acquire() as producer:
            for number, due_ms in enumerate(dues_ms, first):
                eta = datetime.fromtimestamp(due_ms / 1000, UTC)
                self._task.apply_async((number,), eta=eta, producer=producer)

    def consume(self) -> None:
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=ERROR")
        self._app.worker_main(["worker", "--pool=threads", f"--concurrency={THREADS}", *quiet])
