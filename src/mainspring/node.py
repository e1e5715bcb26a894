"""One process of Mainspring: server, store, engine and client, started and stopped as one."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from . import __version__
from .client import Client
from .cluster.membership import Membership
from .cluster.seat import Seat
from .config import Config
from .embedding import Embedding
from .engine.engine import Engine, EngineOptions
from .engine.lookahead import Reach
from .engine.loop import Loop
from .engine.valves import FlowOptions
from .model.errors import ConfigError, StoreError, Unavailable
from .schedule_trail import FiledSchedules
from .schedule_watch import ScheduleWatch
from .siblings import Siblings
from .signals import STOPPING, stop_in_time, stop_signals
from .sinks.base import Sink, prepare
from .sinks.http import HttpOptions, HttpSink
from .sinks.kafka import kafka_sink
from .sinks.kafka_options import KafkaOptions
from .sinks.log import LogSink
from .sinks.named import NamedSink
from .sinks.null import NullSink
from .sinks.plugins import plugin_sinks
from .store.checks import check_server
from .store.links import LinkOptions, Links
from .store.members import About
from .store.store import Store
from .store.url import safe_url

log = logging.getLogger("mainspring.node")

WATCH_S: Final = 0.25
REACH_S: Final = 2.0
"""How long a probe waits for the server's answer."""
LOOK_S: Final = 1.0
"""How often a node without an engine asks for the server's time."""


class Face(Protocol):
    """What a process shows besides the node: the HTTP API. It stops first, so that nothing new comes in."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


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
        self._ended = asyncio.Event()
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
        if self._store is None:
            return False
        try:
            async with asyncio.timeout(REACH_S):
                await self._store.sample_clock()
        except (StoreError, TimeoutError):
            return False
        return True

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
            watch = ScheduleWatch(filed, config.schedules)
            self._schedules = (watch, Loop("schedules", watch.step))
            self._schedules[1].start()
        self._watcher = asyncio.create_task(self._watch(), name="mainspring-watch")
        self._watcher.add_done_callback(self._watch_ended)

    async def _start_engine(self, store: Store) -> None:
        name = self.config.node_id or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.engine = engine = Engine(store, self._sinks, _engine_options(self.config, name))
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
        self._ended.set()

    # -- as a process ----------------------------------------------------------------------------------------

    async def run_until_signal(self, face: Face | None = None, started: Callable[[], None] = lambda: None) -> int:
        """Start, run until SIGTERM, SIGINT or SIGHUP, stop; return the exit code. A second signal ends at once."""
        with contextlib.ExitStack() as heard:
            stopping: Sequence[signal.Signals] = STOPPING
            if self.reloads_on_hangup:
                stopping = tuple(number for number in STOPPING if number is not signal.SIGHUP)
                heard.enter_context(_heard(signal.SIGHUP, self.apply_schedules))
            heard.enter_context(stop_signals(self._ended.set, numbers=stopping))
            try:
                if face is not None:
                    self.roles = (*self.roles, *(role for role in self.config.roles if role == "api"))
                    await face.start()
                if await self._started_unless_ended():
                    started()
                    await self._ended.wait()
            finally:
                log.info("stopping")
                with stop_in_time(self.config.shutdown_timeout_s):
                    await _one_after_the_other(face.stop if face is not None else None, self.stop)
        if isinstance(self.failure, ConfigError):  # it hung for longer than its lease, and another has its id now
            log.error("the node cannot go on: %s", self.failure)
            return 2
        if self.failure is not None:
            log.error(
                "a part of the node broke down, which is a bug: %r. The tasks are safe on the server", self.failure,
                exc_info=self.failure,
            )  # fmt: skip
            return 1
        return 0

    async def _started_unless_ended(self) -> bool:
        """A signal during a long start (a big AOF is loaded) ends it."""
        start = asyncio.create_task(self.start())
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait([start, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not start.done():
            start.cancel()
            await asyncio.wait([start])
            return False
        await start
        return not self._ended.is_set()


def all_sinks(config: Config) -> Mapping[str, Sink]:
    """Ours and those of installed plug-ins, which may stand behind named targets too."""
    return builtin_sinks(config, plugin_sinks(config))


def builtin_sinks(config: Config, others: Mapping[str, Sink] | None = None) -> Mapping[str, Sink]:
    """Every kind of target we have. What a sink needs, it opens at its first delivery."""
    http = HttpSink(
        HttpOptions(
            config.http_timeout_s,
            config.http_concurrency,
            config.http_reach,
            room=config.concurrency,
            result_ttl_s=config.http_result_ttl_s,
            rate=config.http_rate,
        )
    )
    sinks: dict[str, Sink] = {**(others or {}), "log": LogSink(), "null": NullSink(), "http": http, "https": http}
    sinks["kafka"] = kafka_sink(kafka_options(config))
    return sinks | {"target": NamedSink(config.targets, sinks)}


def kafka_options(config: Config) -> KafkaOptions | None:
    if config.kafka_url is None:
        return None
    return KafkaOptions(
        config.kafka_url,
        config.kafka,
        create_topics=config.kafka_create_topics,
        partitions=config.kafka_topic_partitions,
        replication=config.kafka_topic_replication,
    )


@contextlib.contextmanager
def _heard(number: signal.Signals, call: Callable[[], None]) -> Iterator[None]:
    """Within the block the signal calls this, and does nothing else."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


async def _one_after_the_other(*steps: Callable[[], Awaitable[None]] | None) -> None:
    """Every step runs, also after one that failed."""
    async with contextlib.AsyncExitStack() as stack:
        for step in reversed(steps):
            if step is not None:
                stack.push_async_callback(step)


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


def _engine_options(config: Config, name: str) -> EngineOptions:
    return EngineOptions(
        node=name,
        lease_s=config.lease_s,
        concurrency=config.concurrency,
        reach=Reach(tasks=config.look_ahead, horizon_ms=int(config.horizon_s * 1000)),
        retry=config.retry,
        target_retries=config.targets.retries(),
        lane_policy=config.lane_policy,
        target_lanes=config.targets.lane_policies(),
        error_handler=config.error_handler,
        flow=FlowOptions(
            config.breaker,
            config.targets.breakers(),
            {**config.targets.limits(), **config.queue.rates()},
            config.catch_up_rate,
            int(config.catch_up_after_s * 1000),
        ),
        command_queues={name: command.queue for name, command in config.commands.items()},
        dedupe_window_s=config.dedupe_window_s,
        shutdown_timeout_s=config.shutdown_timeout_s,
    )
