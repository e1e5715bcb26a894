"""A peer of the simplest kind, to try the bench itself: one sorted set, polled. See mainspring.bench.peers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis

DISTRIBUTION = "redis"


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        self._redis = Redis.from_url(url)
        self._note = note

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        for number, due_ms in enumerate(dues_ms, first):
            self._redis.zadd("tasks", {str(number): due_ms})

    def in_bulk(self, first: int, dues_ms: Sequence[int]) -> None:
        self._redis.zadd("tasks", {str(number): due_ms for number, due_ms in enumerate(dues_ms, first)})

    def consume(self) -> None:
        while True:
            due: Any = self._redis.zrangebyscore("tasks", 0, time.time_ns() // 1_000_000)
            for number in due:
                self._note(int(number))
            if due:
                self._redis.zrem("tasks", *due)
            time.sleep(0.005)
