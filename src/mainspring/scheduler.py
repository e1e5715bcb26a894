"""What an application declares: its handlers and commands, and where their tasks are kept."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from .config import Config
from .function import Function
from .model.command import Command
from .model.command_table import read_command
from .model.retry import RetryPolicy
from .model.times import Delay
from .worker.arguments import Codec
from .worker.command import CommandWork
from .worker.handler import Handler
from .worker.registry import Registry

if TYPE_CHECKING:
    from .client import Client
    from .store.embedded import EmbeddedServer
    from .sync import SyncClient

P = ParamSpec("P")
R = TypeVar("R")


class Scheduler:
    """Handlers by name, and clients that are opened when the first task is put.

    Making one opens nothing, so a module that declares handlers can be imported anywhere.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.registry = Registry(CommandWork(name, one) for name, one in self.config.commands.items())
        self._lock = threading.Lock()
        self._sync: tuple[int, SyncClient] | None = None
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = weakref.WeakKeyDictionary()
        self._lent: weakref.WeakSet[Client] = weakref.WeakSet()
        self._embedded: EmbeddedServer | None = None

    def configure(self, settings: Config) -> None:
        """Settings of this process, where they are not the defaults, go before those in code."""
        default = Config()
        given = {one.name: getattr(settings, one.name) for one in fields(Config)}
        changed = {name: value for name, value in given.items() if value != getattr(default, name)}
        self.config = replace(self.config, **changed)
        for name, command in settings.commands.items():
            if self.registry.find(f"command:{name}") is None:
                self.registry.add(CommandWork(name, command))

    # -- declaring ---------------------------------------------------------------------------------------

    def handler(
        self,
        *,
        queue: str = "default",
        name: str | None = None,
        retries: int | None = None,
        retry: RetryPolicy | None = None,
        timeout: Delay | None = None,
        result_ttl: Delay = "0s",
        codec: Codec = "json",
    ) -> Callable[[Callable[P, R]], Function[P, R]]:
        """Make a function a handler: `@scheduler.handler(queue="mail", retries=5, timeout="30s")`."""

        def declare(function: Callable[P, R]) -> Function[P, R]:
            handler = Handler(
                function,
                queue=queue,
                name=name,
                retries=retries,
                retry=retry,
                timeout=timeout,
                result_ttl=result_ttl,
                codec=codec,
            )
            self.registry.add(handler)
            return Function(function, handler, self)

        return declare

    def command(self, name: str, argv: Sequence[str], **settings: Any) -> Command:
        """Name a program that workers may start, with the settings of a `[commands.<name>]` table."""
        command = read_command({"argv": argv if isinstance(argv, str) else list(argv), **settings})
        self.registry.add(CommandWork(name, command))
        return command

    @property
    def commands(self) -> Mapping[str, Command]:
        return {work.name: work.command for work in self.registry if isinstance(work, CommandWork)}

    # -- putting -----------------------------------------------------------------------------------------

    def sync_client(self) -> "SyncClient":
        """One for all threads of this process."""
        from .sync import SyncClient

        with self._lock:
            if self._sync is None or self._sync[0] != os.getpid():
                config = self.config
                client = SyncClient(self._url(), namespace=config.namespace, partitions=config.partitions)
                self._sync = (os.getpid(), client)
            return self._sync[1]

    async def client(self) -> "Client":
        """One for each event loop; within a worker it is the worker's own."""
        from .client import Client

        loop = asyncio.get_running_loop()
        known = self._async.get(loop)
        if known is None:
            url = await asyncio.to_thread(self._url)
            made = Client(url, namespace=self.config.namespace, partitions=self.config.partitions)
            known = self._async.setdefault(loop, made)
        await known.open()
        return known

    def lend(self, client: "Client") -> None:
        """Use this client in the running event loop; whoever lends it closes it."""
        self._async[asyncio.get_running_loop()] = client
        self._lent.add(client)

    def _url(self) -> str:
        if self.config.redis_url is not None:
            return self.config.redis_url
        from .store import embedded

        if self._embedded is None:
            self._embedded = embedded.start(self.config.data_dir)
        return self._embedded.url

    # -- closing -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close what `put` has opened."""
        with self._lock:
            known, self._sync = self._sync, None
        if known is not None and known[0] == os.getpid():
            known[1].close()
        if self._embedded is not None:
            self._embedded.stop()
            self._embedded = None

    async def aclose(self) -> None:
        """Close what `aput` has opened in this event loop, and everything else."""
        client = self._async.pop(asyncio.get_running_loop(), None)
        if client is not None and client not in self._lent:
            await client.aclose()
        await asyncio.to_thread(self.close)
