"""One process of Mainspring: server, store, engine, sinks, client and a file of schedules, run as one."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from .. import __version__
from ..client.client import Client
from ..client.schedules import AddOutcome, OnExisting, Schedules
from ..cluster import Membership, Seat
from ..config.config import Config
from ..engine.engine import Engine, EngineOptions
from ..engine.flow import FlowOptions
from ..engine.lookahead import Reach
from ..model.audit import Change, View, changes, of_schedule
from ..model.errors import ConfigError, Conflict, InvalidInput, StoreError, Unavailable
from ..model.notice import NOTIFY
from ..model.schedule.definition import Definition
from ..model.schedule.view import ScheduleView
from ..model.shared_settings import DEFAULTS, SharedSettings
from ..model.targets.named import SCHEME, Targets
from ..model.targets.webhook import Webhook
from ..roles import Loop
from ..sinks.base import NamedSink, Sink, missing, plugin_sinks, prepare
from ..sinks.http import HttpOptions, HttpSink
from ..sinks.kafka import kafka_sink
from ..sinks.kafka_options import KafkaOptions
from ..sinks.log import LogSink, NullSink
from ..store import access
from ..store.members import About
from ..store.notices import Notices
from ..store.redis.servers import LinkOptions, Servers
from ..store.redis.url import safe_url
from ..store.server_checks import check_server
from ..store.store import Store
from ..store.tasks.dead_letters import DeadLetterLimits
from .notifier import WATCHDOG, Forwarder, NoticeOptions, Notifier, NotifySink
from .process import Frontend, run_until_signal
from .schedule_file import carry_out, plan, read_file
from .schedule_lint import findings_of
from .supervisor import Embedding, ProcessMetrics

schedules_log = logging.getLogger("mainspring.schedules")

log = logging.getLogger("mainspring.node")


def all_sinks(config: Config) -> Mapping[str, Sink]:
    """Return built-in sinks and those of installed plug-ins; named targets may use either."""
    return builtin_sinks(config, plugin_sinks(config))


def http_sink(config: Config) -> HttpSink:
    return HttpSink(
        HttpOptions(
            config.http_timeout_s,
            config.http_concurrency,
            config.http_reach,
            room=config.concurrency,
            result_ttl_s=config.http_result_ttl_s,
            rate=config.http_rate,
            max_timeout_s=config.max_timeout_s,
        )
    )


def builtin_sinks(config: Config, others: Mapping[str, Sink] | None = None) -> Mapping[str, Sink]:
    """Return a sink for every built-in kind of target. Each opens its resources at its first delivery."""
    http = http_sink(config)
    sinks: dict[str, Sink] = {**(others or {}), "log": LogSink(), "null": NullSink(), "http": http, "https": http}
    sinks["kafka"] = kafka_sink(kafka_options(config))
    sinks[NOTIFY] = NotifySink(config.notify, http, config.namespace)
    watchdog = {} if config.watchdog_url is None else {WATCHDOG: Webhook(config.watchdog_url)}
    return sinks | {"target": NamedSink(Targets({**config.targets, **watchdog}), sinks)}


def kafka_options(config: Config) -> KafkaOptions | None:
    if config.kafka_url is None:
        return None
    return KafkaOptions(
        config.kafka_url,
        config.kafka,
        create_topics=config.kafka_create_topics,
        topics=_kafka_topics(config),
        partitions=config.kafka_topic_partitions,
        replication=config.kafka_topic_replication,
    )


def _kafka_topics(config: Config) -> tuple[str, ...]:
    """Return the Kafka topics in the settings, as the target of ticks or in named targets."""
    addresses = (config.tick_target, *(spec.address for spec in config.targets.values()))
    return tuple({one.removeprefix("kafka:"): None for one in addresses if one.startswith("kafka:")})


def engine_options(config: Config, name: str) -> EngineOptions:
    return EngineOptions(
        node=name,
        lease_s=config.lease_s,
        concurrency=config.concurrency,
        reach=Reach(config.look_ahead, config.look_ahead_bytes, int(config.horizon_s * 1000)),
        retry=config.retry,
        target_retries=config.targets.retries(),
        lane_policy=config.lane_policy,
        target_lanes=config.targets.lane_policies(),
        queue_lanes=config.queue.lane_policies(),
        error_handler=config.error_handler,
        log_redact=config.log_redact,
        flow=FlowOptions(
            config.breaker,
            config.targets.breakers(),
            {**config.targets.limits(), **config.queue.rates()},
            config.catch_up_rate,
            int(config.catch_up_after_s * 1000),
        ),
        command_queues={name: command.queue for name, command in config.commands.items()},
        dead_letters=DeadLetterLimits(round(config.dead_letters_max_age_s * 1000), config.dead_letters_max),
        history=config.history_rules,
        audit_entries=config.audit_entries,
        shutdown_timeout_s=config.shutdown_timeout_s,
    )


class FiledSchedules(Schedules):
    """Schedules written by the file watch: each change is audited, with the file as its author."""

    def __init__(self, store: Store, timezone: str, file: Path, *, kept: int) -> None:
        super().__init__(lambda: store, timezone)
        self._audit_store = store
        self._author = f"{file.name} (serve --schedules)"
        self._audit_entries = kept

    async def add_many(
        self, definitions: Iterable[Definition], *, on_conflict: OnExisting = "reject"
    ) -> list[tuple[ScheduleView, AddOutcome]]:
        wanted = list(definitions)
        before = await self.get_many([one.name for one in wanted])
        added = await super().add_many(wanted, on_conflict=on_conflict)
        for view, outcome in added:
            if outcome != "kept":  # by another node with the same file, for example
                what = "schedule.add" if outcome == "created" else "schedule.edit"
                await self._record_audit(what, view.name, of_schedule(before.get(view.name)), of_schedule(view))
        return added

    async def remove(self, name: str) -> bool:
        before = await self.get(name)
        removed = await super().remove(name)
        if removed:
            await self._record_audit("schedule.remove", name, of_schedule(before), None)
        return removed

    async def _record_audit(self, what: str, name: str, before: View, after: View) -> None:
        change = Change(self._author, what, name, socket.gethostname(), "", *changes(before, after))
        try:
            await access.record_change(self._audit_store, change, kept=self._audit_entries)
        except StoreError as error:  # the change is stored, and the file's other schedules must follow
            schedules_log.error("%s: %s could not be recorded in the audit trail: %s", name, what, error)


FILE_LOOK_S: Final = 2.0
REST_S: Final = 0.2
"""Seconds without changes after which a changed file is read."""
_MOST_RESTS: Final = 50

Stamp = tuple[int, int, int]
"""Value that differs if the file has changed."""


class ScheduleWatch:
    """One role of a node; several nodes may watch the same file."""

    def __init__(self, schedules: Schedules, path: Path, config: Config) -> None:
        self._schedules = schedules
        self._path = path
        self._config = config
        self._seen: Stamp | None = None

    def again(self) -> None:
        """Apply the file with the next step, whether or not it has changed."""
        self._seen = None

    async def step(self) -> float:
        seen = self._stamp()
        if seen != self._seen:
            if self._seen is not None:
                seen = await self._until_stable(seen)
            if await self._apply():
                self._seen = seen  # only now, so that a failed attempt is repeated
        return FILE_LOOK_S

    async def _until_stable(self, seen: Stamp) -> Stamp:
        """Wait until the file stops changing: a half-written file would remove the schedules of its other half."""
        for _ in range(_MOST_RESTS):
            await asyncio.sleep(REST_S)
            now = self._stamp()
            if now == seen:
                break
            seen = now
        return seen

    def _stamp(self) -> Stamp:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        # A symlink to another file may keep time and size: some systems give all files the same time.
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    async def _apply(self) -> bool:
        """Apply the file; return False if it has to be retried."""
        try:
            source, wanted = read_file(self._path, timezone=self._schedules.timezone)
            steps = await plan(self._schedules, wanted, source, prune=True)
            await carry_out(self._schedules, steps)
        except InvalidInput as error:
            # Keep the current schedules: a typo in the file must not stop them.
            schedules_log.error("schedules are not applied: %s", error)
            return True
        except Conflict as error:  # another writer keeps changing the same schedules
            schedules_log.warning("schedules are not applied yet: %s", error)
            return False
        changed = [step for step in steps if step.action not in ("same", "over")]
        for step in steps:
            if step.action == "over":
                schedules_log.warning("%s: %s", self._path, step.lines()[0].removeprefix("! "))
        schedules_log.info("%s: %d schedules, %d changed", self._path, len(wanted), len(changed))
        for step in changed:
            schedules_log.info("%s", "; ".join(line.strip() for line in step.lines(public=True)))
            if step.definition is not None:
                await self._warn(step.definition)
        return True

    async def _warn(self, definition: Definition) -> None:
        """Search in a thread: some schedules take long to evaluate, and the node must keep firing meanwhile."""
        now_ms = time.time_ns() // 1_000_000
        for finding in await asyncio.to_thread(findings_of, definition, now_ms, self._config):
            schedules_log.warning("schedule %r: %s [%s]", definition.name, finding.message, finding.code)


WATCH_S: Final = 0.25
LOOK_S: Final = 1.0
"""Seconds between requests for the server's time on a node without an engine."""


class Node:
    """Composes one process from its roles."""

    def __init__(self, config: Config, sinks: Mapping[str, Sink] | None = None) -> None:
        self.config = config
        self.roles: tuple[str, ...] = tuple(role for role in config.roles if role == "scheduler")
        self.embedding = Embedding(config.data_dir, config.embedded_memory_bytes) if config.redis_url is None else None
        self._sinks = all_sinks(config) if sinks is None else sinks
        self._store: Store | None = None
        self._client: Client | None = None
        self.engine: Engine | None = None
        self.seat: Seat | None = None
        self._lookout: Loop | None = None
        self._notifier: Loop | None = None
        self._watcher: asyncio.Task[BaseException] | None = None
        self.ended = asyncio.Event()
        """Set when the node was asked to end, or a part of it crashed."""
        self._schedules: tuple[ScheduleWatch, Loop] | None = None
        self.reloads_on_hangup = False
        """SIGHUP applies the file of schedules again instead of stopping the node."""
        self.failure: BaseException | None = None
        self.process_metrics: ProcessMetrics | None = None
        """The other processes of one `serve --processes N`."""
        self.checks: list[Callable[[Store], Awaitable[None]]] = []
        """Checks to make once the store is open; one that raises ConfigError ends the start."""

    # -- state -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True if the node is started and not stopping."""
        return self._client is not None and self.failure is None

    @property
    def healthy(self) -> bool:
        """True if the node is ready and the last step of every role succeeded."""
        return self.ready and self._roles_are_healthy

    @property
    def _roles_are_healthy(self) -> bool:
        if self._lookout is not None:
            return not self._lookout.failures
        well = self.engine is not None and self.engine.healthy
        return well and self.seat is not None and not self.seat.loop.failures

    @property
    def client(self) -> Client | None:
        """A client with connections apart from the engine's; None while the node is not ready."""
        return self._client

    @property
    def where(self) -> str:
        """The place of the data, in words and without secrets."""
        if self.embedding is not None:
            return self.embedding.where
        return safe_url(self.config.redis_url or "")

    @property
    def server_url(self) -> str | None:
        """URL of the server, with its secrets; None while the embedded one is not running."""
        if self.embedding is None:
            return self.config.redis_url
        return None if self.embedding.server is None else self.embedding.server.url

    async def outage(self) -> str | None:
        """Say why the server takes no writes now; None if it does."""
        return "the node is starting or stopping" if self._store is None else await self._store.outage()

    # -- start and stop ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, register the node, and start to fire what comes due. Raises ConfigError and StoreError."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        url = config.redis_url if self.embedding is None else await self.embedding.start()
        assert url is not None
        # Check before anything is written: a replica would refuse it with a message of its own.
        await _check_servers(url, config.links)
        # A node that fires writes its settings for all; one that only takes requests follows them.
        defaults = DEFAULTS if "scheduler" in config.roles else {}
        store = await Store.open(
            url,
            namespace=config.namespace,
            partitions=config.partitions,
            options=config.links,
            shared=SharedSettings(config.shared, fills=defaults | config.shared),
        )
        self._store = store
        for check in self.checks:
            await check(store)
        if "scheduler" in config.roles:
            await self._start_engine(store)
        else:
            self._lookout = Loop("server", self._probe_server)
            self._lookout.start()
        self._client = Client.over(store.for_requests(), timezone=config.timezone)
        if config.schedules is not None:
            filed = FiledSchedules(store, config.timezone, config.schedules, kept=config.audit_entries)
            watch = ScheduleWatch(filed, config.schedules, config)
            self._schedules = (watch, Loop("schedules", watch.step))
            self._schedules[1].start()
        self._watcher = asyncio.create_task(self._watch(), name="mainspring-watch")
        self._watcher.add_done_callback(self._watch_ended)

    async def _start_engine(self, store: Store) -> None:
        name = self.config.node_id or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        options = replace(engine_options(self.config, name), queue_lanes=store.shared.queue_lanes)
        self.engine = engine = Engine(store, self._sinks, options)
        self.seat = seat = Seat(store, self._membership(store, engine, name), engine.called)
        await seat.start()
        notices = Notices(store)
        for sink in self._sinks.values():
            prepare(sink)
            if isinstance(sink, NotifySink):
                sink.notices = notices
        engine.ownership_changed = seat.loop.wake
        await engine.start()
        config = self.config
        if told := NoticeOptions(config.notify.of(config.namespace), config.beats, config.watchdog_url is not None):
            notifier = Notifier(
                engine.store, told, engine.owned, lambda: engine.flow.unavailable, lambda: seat.membership.leads
            )
            self._notifier = Loop("notifier", notifier.step)
            self._notifier.start()
        if config.history_target is not None:
            engine.loops.forward.start(Forwarder(engine.store, engine.owned, config.history_target).step)

    async def _probe_server(self) -> float:
        """Ping the server: without an engine no other call would correct the clock, or notice an outage."""
        store = self._store
        if store is not None:
            if (outage := await store.outage()) is not None:
                await store.recover()  # another server may be primary by now
                raise Unavailable(outage, sent=False)
            await store.sample_clock()
            await store.keep_format()
        return LOOK_S

    def _membership(self, store: Store, engine: Engine, name: str) -> Membership:
        started_ms = store.clock.now_ms()
        # Left out are targets that are only names: the scheme behind them is in the list.
        schemes = sorted(self._sinks.keys() - {SCHEME})
        lacks = tuple(one for one in schemes if missing(self._sinks, f"{one}:") is not None)

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
                lacks=lacks,
                http_reach=self.config.http_reach,
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

        Everything is closed even if a part fails, or if the caller is cancelled in the middle.
        """
        async with contextlib.AsyncExitStack() as closing:
            if self.embedding is not None:
                closing.push_async_callback(self.embedding.stop)
            if self._store is not None:
                closing.push_async_callback(self._store.aclose)
            for sink in self._sinks.values():
                closing.push_async_callback(sink.aclose)
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
        loops = (self._lookout, self._notifier)
        self._lookout = self._notifier = None
        for loop in loops:
            if loop is not None:
                await loop.stop()
        seat, self.seat = self.seat, None
        if seat is not None and seat.joined:
            await seat.withdraw()
        if self.engine is not None:
            await self.engine.stop()
            self.engine = None
        if seat is not None and seat.joined:
            await seat.stop()

    async def _watch(self) -> BaseException:
        """Restart a dead embedded server; return the error that broke a role."""
        while (crash := self._crashed) is None:
            if self.embedding is not None:
                await self.embedding.heal(self._roles_are_healthy)
            await asyncio.sleep(WATCH_S)
        return crash

    @property
    def _crashed(self) -> BaseException | None:
        loops = (
            self.seat.loop if self.seat is not None else None,
            self._lookout,
            self._notifier,
            self._schedules[1] if self._schedules is not None else None,
        )
        found = (loop.crashed for loop in loops if loop is not None)
        engine_crash = self.engine.crashed if self.engine is not None else None
        return engine_crash or next((error for error in found if error is not None), None)

    def _watch_ended(self, watcher: asyncio.Task[BaseException]) -> None:
        if not watcher.cancelled():  # a crashed watch is as bad as a crashed engine
            self.fail(watcher.exception() or watcher.result())

    def fail(self, error: BaseException) -> None:
        """End the node with exit code 1: a part of it crashed, and it must not report itself as healthy."""
        self.failure = error
        self.ended.set()

    async def run_until_signal(
        self, frontend: Frontend | None = None, started: Callable[[], None] = lambda: None
    ) -> int:
        """Start, run until SIGTERM, SIGINT or SIGHUP, stop; return the exit code. A second signal ends at once."""
        return await run_until_signal(self, frontend, started)


async def _check_servers(url: str, options: LinkOptions) -> None:
    """Log problems of the servers; refuse those that cannot work."""
    wrong = []
    async with contextlib.aclosing(await Servers.connect(url, options)) as servers:
        for primary in servers.all():
            for check in await check_server(primary):
                if check.status == "error":
                    wrong.append(f"{check.name}: {check.message}")
                elif check.status != "ok":
                    log.warning("server %s, %s: %s", primary.address, check.name, check.message)
    if wrong:
        raise ConfigError("this server cannot be used: " + "; ".join(wrong))
