"""Mainspring: a node process that hands over due tasks, and a worker process that runs them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import uvloop

from mainspring import Client, Config, Scheduler, Task
from mainspring.node.node import Node
from mainspring.scheduler.worker_process import Workplace

DISTRIBUTION: Final = "mainspring"
QUEUE: Final = "bench"


class Peer:
    def __init__(self, url: str, note: Callable[[int], None]) -> None:
        self._config = Config(redis_url=url)
        self._scheduler = Scheduler(self._config)

        async def run(number: int) -> None:
            note(number)

        self._handler = self._scheduler.handler(queue=QUEUE, name="note")(run)
        self._loop = uvloop.new_event_loop()
        self._client: Client | None = None

    def schedule(self, first: int, dues_ms: Sequence[int]) -> None:
        self._loop.run_until_complete(self._schedule(first, dues_ms))

    async def _schedule(self, first: int, dues_ms: Sequence[int]) -> None:
        if self._client is None:
            self._client = await self._scheduler.client()
        tasks = (
            Task(f"queue:{QUEUE}/note", {"number": number}, due_ms) for number, due_ms in enumerate(dues_ms, first)
        )
        await self._client.put_many(tasks)

    def node(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Node(self._config).run_until_signal())

    def consume(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._work())

    async def _work(self) -> None:
        await Workplace(self._scheduler).run_until_signal()
