"""arq: jobs in a sorted set by their time, run as coroutines on one loop.

Polls every 10 ms instead of every 500, because its lateness depends on that; 100 concurrent jobs, no results, no log
lines. Enqueueing a job takes several round trips.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.worker import Worker, func

DISTRIBUTION: Final = "arq"
AT_ONCE: Final = 50
JOBS: Final = 100
POLL_S: Final = 0.01


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        async def run(_: dict[str, Any], number: int) -> None:
            note(number)

        self._function = func(run, name="note", keep_result=0)
        self._settings = RedisSettings.from_dsn(url)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._pool: ArqRedis | None = None

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        self._loop.run_until_complete(self._schedule(first, dues_ms, 1))

    def at_once(self, first: int, dues_ms: Sequence[int]) -> None:
        self._loop.run_until_complete(self._schedule(first, dues_ms, AT_ONCE))

    async def _schedule(self, first: int, dues_ms: Sequence[int], calls: int) -> None:
        pool = self._pool = self._pool or await create_pool(self._settings)
        rest = iter(enumerate(dues_ms, first))

        async def some() -> None:
            for number, due_ms in rest:
                await pool.enqueue_job("note", number, _defer_until=datetime.fromtimestamp(due_ms / 1000, UTC))

        await asyncio.gather(*(some() for _ in range(calls)))

    def consume(self) -> None:
        Worker(
            functions=[self._function],
            redis_settings=self._settings,
            max_jobs=JOBS,
            poll_delay=POLL_S,
            log_results=False,
            handle_signals=False,
        ).run()
