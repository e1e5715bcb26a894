"""How handlers' tasks reach the server: clients that are opened when the first task is put."""

import asyncio
import os
import threading
import weakref
from typing import TYPE_CHECKING, TypedDict

from .config import Config

if TYPE_CHECKING:
    from .client import Client
    from .store.embedded import EmbeddedServer
    from .store.link import LinkOptions
    from .sync import SyncClient


class _Options(TypedDict):
    namespace: str
    partitions: int | None
    dedupe_window: str
    options: "LinkOptions"
    timezone: str


def _options(config: Config) -> _Options:
    """What the settings say to every client."""
    return {
        "namespace": config.namespace,
        "partitions": config.partitions,
        "dedupe_window": f"{config.dedupe_window_s}s",
        "options": config.links,
        "timezone": config.timezone,
    }


_ALL: "weakref.WeakSet[Connections]" = weakref.WeakSet()


class Connections:
    """One client for all threads, and one for each event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        _ALL.add(self)
        self._opening = threading.Lock()
        self._sync: tuple[int, SyncClient] | None = None
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = weakref.WeakKeyDictionary()
        self._lent: weakref.WeakSet[Client] = weakref.WeakSet()
        self._embedded: EmbeddedServer | None = None
        self._url_of_node: str | None = None

    def renew_locks(self) -> None:
        """In the child of a fork: a thread of the parent that held one is not there to give it back."""
        self._opening = threading.Lock()

    def sync_client(self) -> "SyncClient":
        """One for all threads of this process."""
        from .sync import SyncClient

        with self._opening:
            if self._sync is None or self._sync[0] != os.getpid():
                self._sync = (os.getpid(), SyncClient(self._url(), **_options(self.config)))
            return self._sync[1]

    async def client(self) -> "Client":
        """One for each event loop; within a worker it is the worker's own."""
        from .client import Client

        loop = asyncio.get_running_loop()
        with self._opening:
            known = self._async.get(loop)
        if known is None:
            url = await asyncio.to_thread(self._locked_url)
            made = Client(url, **_options(self.config))
            with self._opening:
                known = self._async.setdefault(loop, made)
        await known.open()
        return known

    def lend(self, client: "Client") -> None:
        """Use this client in the running event loop; whoever lends it closes it."""
        with self._opening:
            self._async[asyncio.get_running_loop()] = client
            self._lent.add(client)

    def _locked_url(self) -> str:
        with self._opening:
            return self._url()

    def _url(self) -> str:
        url = self.config.redis_url or self._url_of_node
        if url is not None:
            return url
        from .store import embedded

        if self._embedded is None:
            self._embedded = embedded.start(self.config.data_dir)
        return self._embedded.url

    def close(self) -> None:
        """Close what `put` has opened."""
        with self._opening:
            known, self._sync = self._sync, None
            embedded, self._embedded = self._embedded, None
        if known is not None and known[0] == os.getpid():
            known[1].close()
        if embedded is not None:
            embedded.stop()

    async def aclose(self) -> None:
        """Close what `aput` has opened in this event loop, and everything else."""
        with self._opening:
            client = self._async.pop(asyncio.get_running_loop(), None)
        if client is not None and client not in self._lent:
            await client.aclose()
        await asyncio.to_thread(self.close)


def _renew_locks_in_a_forked_child() -> None:
    for one in list(_ALL):
        one.renew_locks()


os.register_at_fork(after_in_child=_renew_locks_in_a_forked_child)
