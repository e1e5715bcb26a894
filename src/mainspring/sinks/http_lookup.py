"""Names to addresses, by the system's resolver, in threads of their own: a slow name server holds up nothing else."""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_THREADS: Final = 16
_PATIENCE_S: Final = 10.0


class SystemLookup:
    """`getaddrinfo`, bounded in time and in number."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "mainspring-dns")
        asking = asyncio.get_running_loop().run_in_executor(self._threads, _ask, host, port)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asking
        except TimeoutError:
            raise OSError(socket.EAI_AGAIN, f"no answer within {_PATIENCE_S:.0f} s") from None

    def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)


def _ask(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
