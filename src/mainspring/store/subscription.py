"""Sharded pub/sub that heals itself: lost connections, moved slots and failovers lead to a new subscription.

Messages are hints, never data: whatever was published while the connection was away is gone, which is
why `on_connect` is called after every subscription, so that the caller can look for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import hiredis

from mainspring.model.errors import StoreError, Unavailable
from mainspring.store.topology import key_slot
from mainspring.store.wire import Command, Connection

if TYPE_CHECKING:
    from mainspring.store.links import Link

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
# A silent peer is found out after two of these: a lost cable closes no connection.
_PING_S = 5.0


class Subscription:
    """Keeps `channels` subscribed until closed."""

    def __init__(
        self,
        channels: Sequence[str],
        on_message: Callable[[str], None],
        on_connect: Callable[[], None],
        *,
        route: Callable[[str], Link],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._channels = tuple(channels)
        self._on_message = on_message
        self._on_connect = on_connect
        self._route = route
        self._refresh = refresh
        self._listeners: dict[Link, _Listener] = {}
        self._task = asyncio.create_task(self._run(), name="mainspring-subscription")

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        delay_s = _FIRST_DELAY_S
        try:
            while True:
                if await self._listen():
                    delay_s = _FIRST_DELAY_S
                    await _first_end(self._listeners.values())
                # Spread, so that a server that comes back is not met by all nodes in one instant.
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(delay_s * 2, _LONGEST_DELAY_S)
                with contextlib.suppress(StoreError):
                    await self._refresh()
        finally:
            for listener in self._listeners.values():
                listener.close()

    async def _listen(self) -> bool:
        """Subscribe to what is not heard now, each server by itself; False while one of them is away."""
        wanted, whole = self._by_link()
        for link, listener in list(self._listeners.items()):
            if listener.over or set(wanted.get(link, ())) != listener.channels:
                del self._listeners[link]
                listener.close()
        missing = [link for link in wanted if link not in self._listeners]
        answers = await asyncio.gather(*(self._join(link, wanted[link]) for link in missing))
        if any(answers):
            self._on_connect()
        return whole and all(answers)

    async def _join(self, link: Link, channels: Sequence[str]) -> bool:
        try:
            listener = _Listener(await link.dedicated(), channels, self._on_message)
        except StoreError:
            return False  # the server is away; the caller polls meanwhile
        try:
            await listener.subscribed()
        except StoreError:
            listener.close()
            return False
        except BaseException:
            listener.close()
            raise
        self._listeners[link] = listener
        return True

    def _by_link(self) -> tuple[dict[Link, list[str]], bool]:
        """Channels by server, and whether every channel has one."""
        groups: dict[Link, list[str]] = defaultdict(list)
        whole = True
        for channel in self._channels:
            try:
                groups[self._route(channel)].append(channel)
            except StoreError:
                whole = False
        return groups, whole


async def _first_end(listeners: Iterable[_Listener]) -> None:
    tasks = [asyncio.ensure_future(listener.ended()) for listener in listeners]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Listener:
    """The channels that live on one server, on one connection."""

    def __init__(self, connection: Connection, channels: Sequence[str], on_message: Callable[[str], None]) -> None:
        self._connection = connection
        self._on_message = on_message
        self.channels = frozenset(channels)
        self._missing = set(channels)
        self._ready = asyncio.Event()
        self._over = asyncio.Event()
        self._heard = False
        connection.listen(self._take, self._over.set)
        connection.send(_commands(channels))

    async def subscribed(self) -> None:
        """Returns when the server confirmed every channel; Unavailable if it did not."""
        over = asyncio.ensure_future(self._over.wait())
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({over, ready}, timeout=_PING_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            ready.cancel()
            await asyncio.gather(over, ready, return_exceptions=True)
        if self._over.is_set() or not self._ready.is_set():
            raise Unavailable(f"{self._connection.address}: subscription was not confirmed", sent=True)

    async def ended(self) -> None:
        """Returns when the connection broke, fell silent, or a channel left this server."""
        while not self._over.is_set():
            self._heard = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PING_S):
                    await self._over.wait()
                    return
            if not self._heard:
                self._connection.send([("PING",)])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PING_S):
                        await self._over.wait()
                        return
                if not self._heard:
                    self._over.set()
                    return

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def close(self) -> None:
        self._connection.close()

    def _take(self, reply: Any) -> None:
        self._heard = True
        if isinstance(reply, hiredis.ReplyError):  # MOVED, NOPERM, ...
            self._over.set()
            return
        match reply:
            case [b"smessage", channel, _]:
                self._on_message(channel.decode())
            case [b"ssubscribe", channel, _]:
                self._missing.discard(channel.decode())
                if not self._missing:
                    self._ready.set()
            case [b"sunsubscribe", *_]:  # the slot moved away
                self._over.set()


def _commands(channels: Sequence[str]) -> list[Command]:
    # One command per slot: a cluster refuses channels of several slots in one.
    slots: dict[int, list[str]] = defaultdict(list)
    for channel in channels:
        slots[key_slot(channel.encode())].append(channel)
    return [("SSUBSCRIBE", *group) for group in slots.values()]
