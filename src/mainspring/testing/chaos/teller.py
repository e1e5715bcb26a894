"""The way of a process under test to the recorder."""

import asyncio
import contextlib
import time
from collections import deque
from typing import Final

from .recorder import Message, Stalled, frame, pack, read_frame

_WATCH_S: Final = 0.05
# As they were when the process began: a fault sets its clocks.
_real_time, _real_monotonic = time.time, time.monotonic


class Teller:
    """Tells things in order; answers come in the same order."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._waiting: deque[asyncio.Future[bytes]] = deque()

    async def open(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        self._listener = asyncio.create_task(self._listen(reader))

    async def tell(self, message: Message, *, answered: bool) -> bytes:
        assert self._writer is not None
        self._writer.write(frame(pack(message)))
        if not answered:
            await self._writer.drain()
            return b""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        await self._writer.drain()
        return await answer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the run is over
            while True:
                data = await read_frame(reader)
                answer = self._waiting.popleft()
                if not answer.done():  # it is, when nobody waits for it any more
                    answer.set_result(data)

    async def aclose(self) -> None:
        if self._writer is not None and self._listener is not None:
            self._listener.cancel()
            self._writer.close()


async def watch_stalls(teller: Teller, node: str, limit_s: float) -> None:
    """Tell when this process got no time for long enough to matter."""
    while True:
        before = _real_monotonic()
        await asyncio.sleep(_WATCH_S)
        gap_s = _real_monotonic() - before
        if gap_s > limit_s:
            until_us = int(_real_time() * 1e6)
            await teller.tell(Stalled(node, until_us - int(gap_s * 1e6), until_us), answered=False)
