"""A bad peer, to try the bench itself: runs everything as soon as it is there, and twice."""

import time
from collections.abc import Callable, Sequence

from redis import Redis

DISTRIBUTION = "redis"


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        self._redis = Redis.from_url(url)
        self._note = note

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        self._redis.rpush("tasks", *range(first, first + len(dues_ms)))

    def consume(self) -> None:
        while True:
            for number in self._redis.lpop("tasks", 1000) or ():
                self._note(int(number))
                self._note(int(number))
            time.sleep(0.005)
