"""The calls of one tick that begin and commit, and their answers."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Final, Self

from ..model.errors import StoreError
from ..store import fire
from ..store.store import Store
from .begun import Begun
from .partition import Partition

PLANTS_A_CALL: Final = 1_000
"""Begins of schedules after which a call is sent while the next is made."""

Work = list[tuple[Partition, Begun]]
Answers = list[fire.Answer | StoreError]


class Calls:
    """The begins of a tick. As a rule one call; where many schedules begin, several, each sent as soon as it is made:
    the server plants the following occurrences of some while the node makes the call for the next ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: Work = []
        self._plants = 0
        self._under_way: deque[tuple[Work, asyncio.Task[Answers]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        # Only when the loop is stopped: what was not answered is repeated before the end.
        for _, call in self._under_way:
            call.cancel()

    async def add(self, partition: Partition, begun: Begun) -> None:
        self._open.append((partition, begun))
        self._plants += len(begun.section.plants)
        if self._plants >= PLANTS_A_CALL:
            self._send()
            await asyncio.sleep(0)  # the bytes leave now, not when the next call is made

    async def answered(self) -> tuple[Work, Answers] | None:
        """The next call and what the server says to it; None when all were answered."""
        if self._open and self._under_way:
            self._send()
        if self._under_way:
            work, call = self._under_way[0]
            answers = await call
            self._under_way.popleft()
            return work, answers
        work = self._open
        answers = await self._call() if work else []
        self._open = []
        return (work, answers) if work else None

    def _send(self) -> None:
        self._under_way.append((self._open, asyncio.create_task(self._call())))
        self._open, self._plants = [], 0

    def _call(self) -> Coroutine[None, None, Answers]:
        return fire.tick(self._store, [begun.section for _, begun in self._open])
