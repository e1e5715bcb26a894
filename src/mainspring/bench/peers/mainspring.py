"""Mainspring: a node process that hands over due tasks, and a worker process that runs them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import uvloop

from mainspring import Config, Scheduler, Task
from mainspring.node.node import Node
from mainspring.scheduler.worker_process import Workplace

DISTRIBUTION: Final = "mainspring"
QUEUE: Final = "bench"
AT_ONCE: Final = 50


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        self._config = Config(redis_url=url)
        self._scheduler = Scheduler(self._config)

        async def run(number: int) -> None:
            note(number)

        self._handler = self._scheduler.handler(queue=QUEUE, name="note")(run)
        self._loop = uvloop.new_event_loop()

    def one_by_one(self, first: int, dues_ms: Sequence[int]) -> None:
        self._loop.run_until_complete(self._each(first, dues_ms, 1))

    def at_once(self, first: int, dues_ms: Sequence[int]) -> None:
        self._loop.run_until_complete(self._each(first, dues_ms, AT_ONCE))

    def in_bulk(self, first: int, dues_ms: Sequence[int]) -> None:
        self._loop.run_until_complete(self._bulk(first, dues_ms))

    async def _each(self, first: int, dues_ms: Sequence[int], calls: int) -> None:
        rest = iter(enumerate(dues_ms, first))

        async def some() -> None:
            for number, due_ms in rest:
                await self._handler.at(due_ms).aput(number=number)

        await asyncio.gather(*(some() for _ in range(calls)))

    async def _bulk(self, first: int, dues_ms: Sequence[int]) -> None:
        client = await self._scheduler.client()
        tasks = (
            Task(f"queue:{QUEUE}/note", {"number": number}, due_ms) for number, due_ms in enumerate(dues_ms, first)
        )
        await client.put_many(tasks)

    def node(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Node(self._config).run_until_signal())

    def consume(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._work())

    async def _work(self) -> None:
        await Workplace(self._scheduler).run_until_signal()
