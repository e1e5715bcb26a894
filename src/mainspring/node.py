"""One process of Mainspring: server, store, engine and client, started and stopped as one."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from . import __version__
from .client import Client
from .cluster.membership import Membership
from .cluster.seat import Seat
from .config import Config
from .embedding import Embedding
from .engine.engine import Engine
from .engine.loop import Loop
from .engine_settings import engine_options
from .model.errors import ConfigError, Unavailable
from .node_process import Face, run_until_signal
from .node_sinks import all_sinks, builtin_sinks, kafka_options
from .schedule_trail import FiledSchedules
from .schedule_watch import ScheduleWatch
from .siblings import Siblings
from .sinks.base import Sink, prepare
from .store.checks import check_server
from .store.links import LinkOptions, Links
from .store.members import About
from .store.store import Store
from .store.url import safe_url

__all__ = ["Face", "Node", "all_sinks", "builtin_sinks", "kafka_options"]

log = logging.getLogger("mainspring.node")

WATCH_S: Final = 0.25
LOOK_S: Final = 1.0
"""How often a node without an engine asks for the server's time."""


class Node:
    """Composes one process from its roles."""

    def __init__(self, config: Config, sinks: Mapping[str, Sink] | None = None) -> None:
        self.config = config
        self.roles: tuple[str, ...] = tuple(role for role in config.roles if role == "scheduler")
        self.embedding = Embedding(config.data_dir) if config.redis_url is None else None
        self._sinks = all_sinks(config) if sinks is None else sinks
        self._store: Store | None = None
        self._client: Client | None = None
        self.engine: Engine | None = None
        self.seat: Seat | None = None
        self._lookout: Loop | None = None
        self._watcher: asyncio.Task[BaseException] | None = None
        self.ended = asyncio.Event()
        """Somebody asked it to end, or a part of it is broken."""
        self._schedules: tuple[ScheduleWatch, Loop] | None = None
        self.reloads_on_hangup = False
        """SIGHUP applies the file of schedules again, and does not stop the node."""
        self.failure: BaseException | None = None
        self.siblings: Siblings | None = None
        """The other processes of one `serve --processes N`."""
        self.checks: list[Callable[[Store], Awaitable[None]]] = []
        """Asked once the store is open; one that raises ConfigError ends the start."""

    # -- what others may ask -----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Started, and not stopping."""
        return self._client is not None and self.failure is None

    @property
    def healthy(self) -> bool:
        """Ready, and every role's last step went well."""
        return self.ready and self._roles_are_well

    @property
    def _roles_are_well(self) -> bool:
        if self._lookout is not None:
            return not self._lookout.failures
        well = self.engine is not None and self.engine.healthy
        return well and self.seat is not None and not self.seat.loop.failures

    @property
    def client(self) -> Client | None:
        """A client on the node's own connections; None while the node is not ready."""
        return self._client

    @property
    def where(self) -> str:
        """The place of the data, in words and without secrets."""
        if self.embedding is not None:
            return self.embedding.where
        return safe_url(self.config.redis_url or "")

    @property
    def server_url(self) -> str | None:
        """Of the server, with its secrets; None while an embedded one is not there."""
        if self.embedding is None:
            return self.config.redis_url
        return None if self.embedding.server is None else self.embedding.server.url

    async def reachable(self) -> bool:
        """True when the server answers now."""
        return self._store is not None and await self._store.reachable()

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        url = config.redis_url if self.embedding is None else await self.embedding.start()
        assert url is not None
        # Before anything is written: a replica would refuse it in words of its own.
        await _check_servers(url, config.links)
        store = await Store.open(url, namespace=config.namespace, partitions=config.partitions, options=config.links)
        self._store = store
        for check in self.checks:
            await check(store)
        if "scheduler" in config.roles:
            await self._start_engine(store)
        else:
            self._lookout = Loop("server", self._look)
            self._lookout.start()
        window = f"{config.dedupe_window_s}s"
        self._client = Client.over(store, dedupe_window=window, timezone=config.timezone)
        if config.schedules is not None:
            filed = FiledSchedules(store, config.timezone, config.schedules, kept=config.audit_entries)
            watch = ScheduleWatch(filed, config.schedules, config)
            self._schedules = (watch, Loop("schedules", watch.step))
            self._schedules[1].start()
        self._watcher = asyncio.create_task(self._watch(), name="mainspring-watch")
        self._watcher.add_done_callback(self._watch_ended)

    async def _start_engine(self, store: Store) -> None:
        name = self.config.node_id or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.engine = engine = Engine(store, self._sinks, engine_options(self.config, name))
        self.seat = seat = Seat(store, self._membership(store, engine, name), engine.called)
        await seat.start()
        for sink in self._sinks.values():
            prepare(sink)
        engine.ownership_changed = seat.loop.wake
        await engine.start()

    async def _look(self) -> float:
        """Without an engine nobody calls the server all the time: its clock would drift, its absence go unseen."""
        if not await self.reachable():
            if self._store is not None:
                await self._store.recover()  # another may be primary by now
            raise Unavailable("the server does not answer", sent=False)
        return LOOK_S

    def _membership(self, store: Store, engine: Engine, name: str) -> Membership:
        started_ms = store.clock.now_ms()

        def describe() -> About:
            return About(
                host=socket.gethostname(),
                pid=os.getpid(),
                roles=self.roles,
                version=__version__,
                concurrency=self.config.concurrency,
                started_ms=started_ms,
                owned=tuple(sorted(engine.owned)),
                waiting=tuple(sorted(engine.keeper.waiting)),
                look_ahead=engine.lookahead.held,
                in_flight=engine.deliveries.in_flight,
                lag_ms=engine.lag_ms,
                delivered=engine.deliveries.delivered,
                catch_up="" if self.config.catch_up_rate is None else f"{self.config.catch_up_rate.per_s:g}/s",
                catch_up_after_ms=round(self.config.catch_up_after_s * 1000),
            )

        return Membership(store, name, lease_s=self.config.lease_s, describe=describe, follow=engine.follow)

    def apply_schedules(self) -> None:
        """Apply the file of schedules again, soon."""
        if self._schedules is not None:
            watch, loop = self._schedules
            watch.again()
            loop.wake()

    async def stop(self) -> None:
        """Finish what is in flight, hand over, close. The embedded server ends last: all others need it.

        All of it is closed even if a part fails, or if who waited gives up: a program that ends in the middle of it.
        """
        async with contextlib.AsyncExitStack() as ends:
            if self.embedding is not None:
                ends.push_async_callback(self.embedding.stop)
            if self._store is not None:
                ends.push_async_callback(self._store.aclose)
            for sink in self._sinks.values():
                ends.push_async_callback(sink.aclose)
            await self._stop_roles()
        self._store = None

    async def _stop_roles(self) -> None:
        schedules, self._schedules = self._schedules, None
        if schedules is not None:
            await schedules[1].stop()
        self._client = None
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait([watcher])
        lookout, self._lookout = self._lookout, None
        if lookout is not None:
            await lookout.stop()
        seat, self.seat = self.seat, None
        if seat is not None and seat.joined:
            await seat.withdraw()
        if self.engine is not None:
            await self.engine.stop()
            self.engine = None
        if seat is not None and seat.joined:
            await seat.stop()

    async def _watch(self) -> BaseException:
        """Bring a dead embedded server back; return the error that broke a role."""
        while (crash := self._crashed) is None:
            if self.embedding is not None:
                await self.embedding.heal(self._roles_are_well)
            await asyncio.sleep(WATCH_S)
        return crash

    @property
    def _crashed(self) -> BaseException | None:
        loops = (
            self.seat.loop if self.seat is not None else None,
            self._lookout,
            self._schedules[1] if self._schedules is not None else None,
        )
        found = (loop.crashed for loop in loops if loop is not None)
        broken = self.engine.crashed if self.engine is not None else None
        return broken or next((error for error in found if error is not None), None)

    def _watch_ended(self, watcher: asyncio.Task[BaseException]) -> None:
        if not watcher.cancelled():  # a watch that is broken itself is no better than a broken engine
            self.fail(watcher.exception() or watcher.result())

    def fail(self, error: BaseException) -> None:
        """End the node with exit code 1: a part of it is broken, and it must not pretend to be well."""
        self.failure = error
        self.ended.set()

    async def run_until_signal(self, face: Face | None = None, started: Callable[[], None] = lambda: None) -> int:
        """Start, run until SIGTERM, SIGINT or SIGHUP, stop; return the exit code. A second signal ends at once."""
        return await run_until_signal(self, face, started)


async def _check_servers(url: str, options: LinkOptions) -> None:
    """Say what is not as it should be; refuse what cannot work."""
    wrong = []
    async with contextlib.aclosing(await Links.connect(url, options)) as links:
        for link in links.all():
            for check in await check_server(link):
                if check.status == "error":
                    wrong.append(f"{check.name}: {check.message}")
                elif check.status != "ok":
                    log.warning("server %s, %s: %s", link.address, check.name, check.message)
    if wrong:
        raise ConfigError("this server cannot be used: " + "; ".join(wrong))
