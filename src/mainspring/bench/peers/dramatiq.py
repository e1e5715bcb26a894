"""Dramatiq: delayed messages are in a separate queue; the worker holds some thousands of them in memory.

Eight threads, its default; they poll an empty queue every 10 ms instead of every 1,000, because its lateness depends on
that.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import dramatiq
from dramatiq.brokers.redis import RedisBroker

DISTRIBUTION: Final = "dramatiq"
THREADS: Final = 8
IDLE_MS: Final = 10


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        self._broker = RedisBroker(url=url)
        self._actor = dramatiq.actor(note, actor_name="note", broker=self._broker)

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        for number, due_ms in enumerate(dues_ms, first):
            # Rounded up: Dramatiq's delays are whole milliseconds, counted from now.
            delay_ms = max(0, int(due_ms - time.time() * 1000) + 1)
            self._broker.enqueue(self._actor.message(number), delay=delay_ms)

    def consume(self) -> None:
        dramatiq.Worker(self._broker, worker_threads=THREADS, worker_timeout=IDLE_MS).start()
        threading.Event().wait()
