"""The embedded server as a part of a node: started with it, brought back when it dies, ended with it."""

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Final

from .model.errors import EmbeddedError
from .store import embedded

log = logging.getLogger("mainspring.node")

LOOK_AGAIN_S: Final = 5.0


class Embedding:
    """One data folder's server. Its address stays the same over restarts, so connections find it again."""

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._server: embedded.EmbeddedServer | None = None
        self._looked_at = 0.0

    @property
    def where(self) -> str:
        return str((self._data_dir or embedded.default_data_dir()).expanduser().absolute())

    @property
    def server(self) -> embedded.EmbeddedServer | None:
        return self._server

    async def start(self) -> str:
        """Start the server or share the one that runs; return its URL."""
        self._server = await self._in_thread()
        if not self._server.owned:
            log.info("sharing the server that another process runs on %s", self.where)
        return self._server.url

    async def heal(self, well: bool) -> None:
        """Bring the server back if it is gone; also one that belonged to another process, which then is ours."""
        server = self._server
        if server is None or not self._suspicious(server, well):
            return
        try:
            found = await self._in_thread()
        except EmbeddedError as error:
            log.error("the embedded server cannot be brought back: %s", error)
            return
        if found.pid == server.pid:
            return  # it lives; what ails the engine is something else
        log.warning("the embedded server was gone (process %d); it runs again (%d)", server.pid, found.pid)
        self._server = found
        await asyncio.to_thread(server.stop)  # collects its watcher

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)

    def _suspicious(self, server: embedded.EmbeddedServer, well: bool) -> bool:
        if not _runs(server.pid):
            return True
        # A process id says little (it may be a zombie, or a stranger's by now): an ailing engine is a reason
        # to look closer, though not all the time.
        if well or time.monotonic() < self._looked_at + LOOK_AGAIN_S:
            return False
        self._looked_at = time.monotonic()
        return True

    async def _in_thread(self) -> embedded.EmbeddedServer:
        """In a thread, because it blocks while data is loaded. When we are cancelled, so is its result."""
        start = asyncio.create_task(asyncio.to_thread(embedded.start, self._data_dir))
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            with contextlib.suppress(EmbeddedError):
                await asyncio.to_thread((await start).stop)
            raise


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
