"""One primary server: a main connection that is opened on demand, and extra ones for who must wait.

Nothing here repeats a command; `links` says what the caller does instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import hiredis

from mainspring.model.errors import StoreError, Unavailable
from mainspring.model.metrics import Histogram
from mainspring.store.credentials import CredentialProvider, signed
from mainspring.store.subscription import Subscription
from mainspring.store.url import Endpoint
from mainspring.store.wire import Command, Connection

Redirect = Literal["moved", "ask", "tryagain", "clusterdown", "readonly", "loading", "masterdown", "noscript", "oom"]
_REDIRECTS = frozenset(
    {"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "NOSCRIPT", "OOM"}
)
T = TypeVar("T")

# How long a call waits for a server that could not be reached before. The attempt itself goes on for longer, beside
# it: a server that hangs must not hold up, call after call, those who have work for other servers too.
_AWAY_WAIT_S = 0.25


def redirect_of(error: hiredis.ReplyError) -> Redirect | None:
    """What an error reply asks for, by its first word; None for every other error."""
    word = str(error).partition(" ")[0]
    return cast("Redirect", word.lower()) if word in _REDIRECTS else None


@dataclass(frozen=True, slots=True)
class LinkOptions:
    connect_timeout_s: float = 3.0
    timeout_s: float = 10.0
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_name: str = "mainspring"
    credentials: CredentialProvider | None = field(default=None, repr=False)
    """Asked for user and password at every connect, in place of those in the URL."""


class Shared(Generic[T]):
    """Work that runs once for all who ask for it while it runs."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        task = self._task
        if task is None:
            task = self._task = asyncio.create_task(self._work())
            task.add_done_callback(self._finished)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # ended by cancel() below, not because our caller was cancelled
                raise Unavailable("the connection was closed", sent=False) from None
            raise

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finished(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # seen, even when every caller was cancelled meanwhile


class Topology(Protocol):
    """What a link must know of its surroundings: where channels live, and how to learn that anew."""

    def for_channel(self, channel: str) -> Link: ...

    async def refresh(self) -> None: ...

    def keep(self, subscription: Subscription) -> None:
        """Closes the subscription with everything else; it may outlive the link it was asked of."""


class Link:
    """One primary: a main connection, opened when needed and again after it broke, and extra ones."""

    def __init__(self, endpoint: Endpoint, options: LinkOptions, topology: Topology) -> None:
        self.address = endpoint.address
        self.endpoint = endpoint
        self._options = options
        self._topology = topology
        self._main: Connection | None = None
        self._opened: Shared[Connection] = Shared(self._open_main)
        self._extra: set[Connection] = set()
        self._away = False
        self._closed = False
        self.latency = Histogram()
        """From sending to the last reply, of what goes over the main connection."""

    @property
    def timeout_s(self) -> float:
        return self._options.timeout_s

    async def pipeline(self, commands: Sequence[Command], *, timeout_s: float | None = None) -> list[Any]:
        """Sends on the main connection. One attempt to open it, none to send again."""
        main = self._main
        if main is None or main.closed:
            main = await self._reach()
        began_s = time.perf_counter()
        try:
            return await main.pipeline(commands, timeout_s=self._options.timeout_s if timeout_s is None else timeout_s)
        finally:
            self.latency.observe(time.perf_counter() - began_s)

    async def dedicated(self) -> Connection:
        """A connection of the caller's own, for WAIT, blocking commands and pub/sub; close it after use."""
        connection = await self._open()
        self._extra = {extra for extra in self._extra if not extra.closed} | {connection}
        return connection

    async def subscribe(
        self, channels: Sequence[str], on_message: Callable[[str], None], on_connect: Callable[[], None]
    ) -> Subscription:
        """Keeps sharded channels subscribed, wherever their slots move, until the result is closed."""
        topology = self._topology
        subscription = Subscription(
            channels, on_message, on_connect, route=topology.for_channel, refresh=topology.refresh
        )
        topology.keep(subscription)
        return subscription

    @property
    def idle(self) -> bool:
        """True while nothing waits for a reply of this server."""
        connections = [self._main, *self._extra]
        return all(one is None or one.closed or one.idle for one in connections)

    def close(self) -> None:
        self._closed = True
        self._opened.cancel()
        for connection in (self._main, *self._extra):
            if connection is not None:
                connection.close()

    async def _reach(self) -> Connection:
        if not self._away:
            return await self._opened()
        try:
            async with asyncio.timeout(_AWAY_WAIT_S):
                return await self._opened()
        except TimeoutError:
            raise Unavailable(f"{self.address}: cannot connect: it did not answer before either", sent=False) from None

    async def _open_main(self) -> Connection:
        try:
            self._main = await self._open()
        except StoreError:
            self._away = True
            raise
        self._away = False
        return self._main

    async def _open(self) -> Connection:
        self._check_open()
        options = self._options
        timeout_s = options.connect_timeout_s
        endpoint = await signed(self.endpoint, options.credentials, within_s=timeout_s)
        connection = await Connection.open(endpoint, connect_timeout_s=timeout_s, client_name=options.client_name)
        try:
            self._check_open()  # again: it may have been closed while connecting
        except Unavailable:
            connection.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self.address}: the link is closed", sent=False)
