"""The demo itself: starts servers and processes, reports rates every second, and reconciles the counts at the end."""

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from ..bench.environment import clear_namespace
from ..config.config import Config
from ..config.settings import PREFIX
from ..model.errors import MainspringError
from ..model.targets.names import NEEDS_KAFKA
from ..node.process import stop_signals
from ..node.supervisor import child_command, tie
from ..sinks.kafka_options import KafkaOptions, Properties
from ..store import embedded
from ..store.redis.sender import Group
from ..store.store import Store
from ..testing.kafka import broker, missing_kafka
from .generator import GeneratorOrder
from .plan import TOPIC, ConsumerOrder, DemoPlan, compare
from .processes import DemoProcess, SideFailed, Usage, Usages, beside, last_words

START_S: Final = 60.0


class SchedulerProcess:
    """A scheduler of the demo, in its own process."""

    def __init__(self, name: str, url: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.url = url
        self.process = process
        self.log = log

    async def ready(self, line: socket.socket) -> None:
        """Wait until the scheduler reports that it works."""
        try:
            async with asyncio.timeout(START_S):
                word = await asyncio.get_running_loop().sock_recv(line, 1)
        except (TimeoutError, ConnectionError):
            word = b""
        if not word:
            raise SideFailed(f"{self.name} did not start: {last_words(self.log)}")

    async def end(self) -> None:
        """Stop the scheduler cleanly: deliveries in flight finish, and partitions are handed back."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        await self.process.wait()


@contextlib.asynccontextmanager
async def schedulers(count: int, config: Config, folder: Path) -> AsyncIterator[list[SchedulerProcess]]:
    """Start `count` schedulers and wait until all are ready."""
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(_scheduler(number, config, folder)) for number in range(1, count + 1)]
        for one, line in made:
            await one.ready(line)
        yield [one for one, _ in made]


@contextlib.asynccontextmanager
async def _scheduler(
    number: int, config: Config, folder: Path
) -> AsyncIterator[tuple[SchedulerProcess, socket.socket]]:
    name = f"scheduler-{number}"
    log = folder / f"{name}.log"
    ours, theirs = tie()
    with ours:
        # From then on only the child has both sockets open: when it dies, connections are refused and do not hang.
        with theirs, socket.create_server(("127.0.0.1", 0), backlog=2048) as listener, log.open("wb") as output:
            port = listener.getsockname()[1]
            fds = (listener.fileno(), theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                *child_command(), "--listen-fd", str(fds[0]), "--parent-fd", str(fds[1]),
                pass_fds=fds,
                env=_environ(config) | {PREFIX + "NODE_ID": name},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )  # fmt: skip
        one = SchedulerProcess(name, f"http://127.0.0.1:{port}", process, log)
        try:
            yield one, ours
        finally:
            await one.end()


def _environ(config: Config) -> dict[str, str]:
    """Return settings as environment variables, because the URL may hold a password; leave out the user's settings."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != "REDIS_URL"}
    return rest | config.to_environ()


TOPIC_PARTITIONS: Final = 2
"""Few: each further partition splits what a scheduler sends into smaller requests; see docs/decisions/0022."""
FULL_BATCHES: Final = Properties({"linger.ms": "20"})
"""Wait some milliseconds for fewer and larger requests: the broker shares two cores with all other processes, and a
request costs it as much as a hundred messages."""
FULL_FETCH_BYTES: Final = 262_144
WARM_S: Final = 4.0
WARM_TOPIC: Final = "warm-up"
ASK_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class DemoServers:
    """The servers to use; None starts an embedded one."""

    kafka_url: str | None = None
    redis_url: str | None = None
    in_bulk: bool = False
    """For tens of thousands per second: larger requests, and a warm-up of the broker, because a Java program is slow in
    its first seconds."""


@dataclass(frozen=True, slots=True)
class DemoStage:
    kafka: KafkaOptions
    fetch_bytes: int
    """Bytes for which the consumer's fetch waits, for some milliseconds at most."""
    redis_url: str
    namespace: str
    folder: Path
    pids: dict[str, int]
    """Processes of the servers that were started here."""


@contextlib.asynccontextmanager
async def stage(where: DemoServers) -> AsyncIterator[DemoStage]:
    """Provide servers and a fresh namespace, so that existing tasks on a given server are safe."""
    if find_spec("confluent_kafka") is None:
        raise MainspringError(NEEDS_KAFKA)
    pids: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mainspring-demo-")))
        redis_url = where.redis_url
        if redis_url is None:
            server = stack.enter_context(embedded.start(folder / "data"))
            pids["server"], redis_url = server.pid, server.url
        kafka_url = where.kafka_url
        if kafka_url is None:
            if reason := missing_kafka():
                raise MainspringError(f"no Kafka broker can be started here: {reason}. Name one with --kafka URL")
            made = stack.enter_context(broker())
            pids["broker"], kafka_url = made.pid, made.url
        options = KafkaOptions(kafka_url, FULL_BATCHES if where.in_bulk else Properties())
        await provision(options, TOPIC)
        if where.in_bulk:
            await provision(options, WARM_TOPIC)
            await asyncio.to_thread(warm_up, options, WARM_S)
        fetch_bytes = FULL_FETCH_BYTES if where.in_bulk else 1
        yield DemoStage(options, fetch_bytes, redis_url, f"demo-{secrets.token_hex(4)}", folder, pids)


async def provision(options: KafkaOptions, topic: str) -> None:
    """Create the topic before anything is posted; use an existing one as it is."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({**options.for_admin(), "log_level": 0})
    wanted = NewTopic(topic, TOPIC_PARTITIONS, -1)
    [created] = admin.create_topics([wanted], request_timeout=ASK_S).values()
    try:
        await asyncio.wrap_future(created)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise MainspringError(f"the topic {topic} cannot be created: {error.args[0].str()}") from None


def warm_up(options: KafkaOptions, seconds: float) -> None:
    """Write and read messages like those of tasks for a while, on a separate topic."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    producer = Producer({**options.for_library(), "log_level": 0})
    consumer = Consumer({**options.for_admin(), "group.id": "warm-up", "enable.auto.commit": False, "log_level": 0})
    consumer.assign([TopicPartition(WARM_TOPIC, number, 0) for number in range(TOPIC_PARTITIONS)])
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for number in range(500 if len(producer) < 10_000 else 0):
            producer.produce(WARM_TOPIC, bytes(60), str(number), headers=[("idempotency-key", str(number))])
        producer.poll(0)
        consumer.consume(1_000, 0.005)
    producer.flush(ASK_S)
    consumer.close()


SECOND_S: Final = 1.0
GIVE_UP_S: Final = 60.0
"""Seconds after the last due time without progress after which ticks count as missing."""

SETTLE_S: Final = 10.0


class Second(msgspec.Struct, frozen=True):
    """Counts of one second."""

    generated: int
    scheduled: int
    consumed: int
    pending: int


class Reconciliation(msgspec.Struct, frozen=True):
    sent: int
    accepted: int
    replaced: int
    fired: int
    consumed: int
    missing: int
    duplicated: int
    early: int
    p50_ms: float | None
    p99_ms: float | None
    pending: int
    """Ticks that were not due yet when the demo ended."""
    refused: int
    seconds: float
    """Seconds during which ticks were posted."""
    consumed_per_s: float
    """Ticks per second while the rate was steady. Ticks are due after their post: the rate ramps up and down."""
    processes: list[Usage]

    @property
    def sound(self) -> bool:
        return not (self.missing or self.early or self.refused)


class Parts(msgspec.Struct):
    """The running demo, for an observer."""

    schedulers: list[SchedulerProcess]
    generator: DemoProcess
    consumer: DemoProcess


class Demo:
    def __init__(
        self, plan: DemoPlan, place: DemoStage, store: Store, parts: Parts, report: Callable[[Second], None]
    ) -> None:
        self._plan = plan
        self._place = place
        self._store = store
        self._parts = parts
        self._report = report
        self._stopping = asyncio.Event()
        self.usages = Usages()
        self._before = Second(0, 0, 0, 0)

    def stop(self) -> None:
        """Post no more ticks, and do not wait for those that are not due yet."""
        self._stopping.set()
        self._parts.generator.stop()

    async def play(self) -> Reconciliation:
        generator, consumer = self._parts.generator, self._parts.consumer
        while not generator.ended.is_set():
            await self._second()
        made = await generator.finished()
        self.usages.add_usage("generator", generator.usage)
        if made["refused"]:
            raise MainspringError(f"{made['refused']} ticks were refused, the first with: {made['first_refusal']}")
        await self._until_drained()
        counters = await self._until_consumed()
        self.usages.look()
        consumer.stop()
        return self._added_up(made, await consumer.finished(), counters)

    async def _second(self) -> int:
        """Wait for the rest of a second and report what happened in it; return the number pending."""
        await self._wait()
        self._parts.consumer.check()
        self.usages.look()
        counters = await self._read_counters()
        now = Second(self._parts.generator.total, counters["accepted"], self._parts.consumer.total, _pending(counters))
        past, self._before = self._before, now
        rates = (now.generated - past.generated, now.scheduled - past.scheduled, now.consumed - past.consumed)
        self._report(Second(*rates, now.pending))
        return now.pending

    async def _wait(self) -> None:
        """Wait one second, or less if the demo is stopped; later waits are full seconds again."""
        ended, stopping = self._parts.generator.ended, self._stopping
        if ended.is_set() and stopping.is_set():
            await asyncio.sleep(SECOND_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECOND_S):
                await ended.wait()
                await stopping.wait()

    async def _until_drained(self) -> None:
        deadline = time.monotonic() + self._plan.within_ms / 1000 + GIVE_UP_S
        while not self._stopping.is_set() and time.monotonic() < deadline:
            if not await self._second():
                return

    async def _until_consumed(self) -> dict[str, int]:
        """Wait until the consumer has read everything that is marked done; it may be a moment behind. Return the
        counters as they were before the wait: after a stop ticks keep firing, and the consumer need not catch up."""
        counters = await self._read_counters()
        seen_at = time.monotonic()
        while self._parts.consumer.total < counters["done"] and time.monotonic() < seen_at + SETTLE_S:
            before = self._before.consumed
            await self._second()
            if self._before.consumed > before:
                seen_at = time.monotonic()
        return counters

    async def _read_counters(self) -> dict[str, int]:
        """Return the server's own counters, summed over all partitions."""
        names = ("accepted", "done", "cancelled", "replaced", "dead")
        groups: list[Group] = [(one.slot, [("HMGET", one.n, *names)]) for one in self._store.keys.partitions]
        total = dict.fromkeys(names, 0)
        for result in await self._store.run(groups):
            if isinstance(result, Exception):
                raise result
            for name, value in zip(names, result[0], strict=True):
                total[name] += int(value or 0)
        return total

    def _added_up(self, made: dict[str, Any], came: dict[str, Any], counters: dict[str, int]) -> Reconciliation:
        folder, pending = self._place.folder, _pending(counters)
        found = compare(folder / "sent", folder / "came", self._plan.ids)
        missing = found.missing
        if self._plan.replace or pending:
            # Only the server knows which tick of an item was the last, and which are not due yet.
            consumed = came["consumed"] - found.duplicated - found.unexpected
            missing = max(0, counters["accepted"] - counters["replaced"] - pending - consumed)
        return Reconciliation(
            sent=made["sent"],
            accepted=counters["accepted"],
            replaced=counters["replaced"],
            fired=counters["done"],
            consumed=came["consumed"],
            missing=missing,
            duplicated=found.duplicated,
            early=came["early"],
            p50_ms=came["p50_ms"],
            p99_ms=came["p99_ms"],
            pending=pending,
            refused=made["refused"],
            seconds=round(made["seconds"], 2),
            consumed_per_s=came["per_s"],
            processes=self.usages.all(),
        )


def _pending(counters: dict[str, int]) -> int:
    return counters["accepted"] - counters["done"] - counters["cancelled"] - counters["replaced"] - counters["dead"]


async def ticks(
    plan: DemoPlan,
    where: DemoServers,
    report: Callable[[Second], None],
    *,
    started: Callable[[Parts], None] | None = None,
) -> Reconciliation:
    """Run the whole demo. `started` receives its parts once ticks are being posted."""
    async with stage(where) as place, _store(place) as store, _parts(plan, place) as parts:
        demo = Demo(plan, place, store, parts, report)
        _watch(demo.usages, place, parts)
        if started is not None:
            started(parts)
        with stop_signals(demo.stop):
            return await demo.play()


@contextlib.asynccontextmanager
async def _store(place: DemoStage) -> AsyncIterator[Store]:
    store = await Store.open(place.redis_url, namespace=place.namespace)
    try:
        yield store
    finally:
        if "server" not in place.pids:  # the user's server, which outlives the demo
            await clear_namespace(store.servers, place.namespace)
        await store.aclose()


@contextlib.asynccontextmanager
async def _parts(plan: DemoPlan, place: DemoStage) -> AsyncIterator[Parts]:
    config = Config(
        redis_url=place.redis_url,
        namespace=place.namespace,
        kafka_url=place.kafka.url,
        kafka=place.kafka.properties,
        tick_target=plan.target,
        lease_s=plan.lease_s,
        log_level="warning",
    )
    folder = place.folder
    async with contextlib.AsyncExitStack() as stack:
        reading = ConsumerOrder(
            place.kafka.for_admin(), place.fetch_bytes, TOPIC, plan.ids, plan.within_ms, str(folder / "came")
        )
        consumer = await stack.enter_async_context(beside("consumer", "mainspring.demo.consumer", reading, folder))
        running = await stack.enter_async_context(schedulers(plan.schedulers, config, folder))
        await consumer.ready()
        urls = [one.url for one in running]
        posting = GeneratorOrder(plan, urls, place.redis_url, place.namespace, str(folder / "sent"))
        generator = await stack.enter_async_context(beside("generator", "mainspring.demo.generator", posting, folder))
        await generator.ready()
        yield Parts(running, generator, consumer)


def _watch(usages: Usages, place: DemoStage, parts: Parts) -> None:
    for name, pid in _processes(place, parts):
        usages.watch(name, pid)


def _processes(place: DemoStage, parts: Parts) -> Iterator[tuple[str, int]]:
    yield "generator", parts.generator.process.pid
    for one in parts.schedulers:
        yield one.name, one.process.pid
    yield "consumer", parts.consumer.process.pid
    yield from place.pids.items()
