"""Names to addresses, by the system's resolver, in threads of their own: a slow name server holds up nothing else.

The system's resolver cannot be stopped: a name whose server is dead keeps its thread for up to a minute, whoever has
given up waiting. So a name has one thread at most, and names that did not answer the last time leave some to others.
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_THREADS: Final = 64
_UNPROVEN: Final = 48
"""Threads for names that are new, or did not answer when they were asked last."""

_REMEMBERED: Final = 4096
_PATIENCE_S: Final = 10.0


class SystemLookup:
    """`getaddrinfo`, bounded in time and in number."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._asking: dict[str, asyncio.Future[list[str]]] = {}
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._unproven = asyncio.Semaphore(_UNPROVEN)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if host not in self._asking and host not in self._answered:
                    await self._unproven.acquire()
                    if not self._ask(host, port, self._unproven):
                        self._unproven.release()
                else:
                    self._ask(host, port)
                return await asyncio.shield(self._asking[host])
        except TimeoutError:
            self._answered.pop(host, None)
            raise OSError(socket.EAI_AGAIN, f"no answer within {_PATIENCE_S:.0f} s") from None

    def _ask(self, host: str, port: int, permit: asyncio.Semaphore | None = None) -> bool:
        """False when somebody else asks already: all who want to know wait for the same answer."""
        if host in self._asking:
            return False
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "mainspring-dns")

        def answered(asked: "asyncio.Future[list[str]]") -> None:
            del self._asking[host]
            self._answered.pop(host, None)
            if permit is not None:
                permit.release()
            if not asked.cancelled() and asked.exception() is None:
                self._answered[host] = None
                if len(self._answered) > _REMEMBERED:
                    self._answered.popitem(last=False)

        asking = asyncio.get_running_loop().run_in_executor(self._threads, _addresses, host, port)
        self._asking[host] = asking
        asking.add_done_callback(answered)
        return True

    def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
