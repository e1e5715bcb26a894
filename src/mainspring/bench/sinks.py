"""`bench sinks`: the throughput of a real target through the engine, compared with the same library in a plain loop."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ..client.client import Client
from ..model.errors import InvalidInput, MainspringError
from ..model.run import HistoryRules
from ..model.targets.names import NEEDS_KAFKA as KAFKA_NEEDS
from ..model.targets.webhook import NEEDS as HTTP_NEEDS
from ..model.task import Task
from ..sinks.http import HttpOptions, HttpSink
from ..sinks.kafka import KafkaSink
from ..sinks.kafka_options import KafkaOptions
from ..store.store import Store
from ..testing.kafka import broker, missing_kafka
from ..worker.context import current
from ..worker.handler import Handler, Registry
from ..worker.worker import WorkerOptions, working
from .cycle import DEFAULT_HISTORY, drain, until_done
from .environment import ServerChoice, counterpart, open_environment
from .fleet import BenchFailed, fleet
from .lifecycle import BenchProgress
from .timer import bare_timer, percentile

if TYPE_CHECKING:
    from confluent_kafka import Producer


class SinkFigures(msgspec.Struct, frozen=True):
    """Medians over the rounds. `bare`: the same library, headers, payload and concurrency in a plain loop."""

    tasks: int
    tasks_per_s: float
    bare_per_s: float
    ratio: float
    lost: int

    @property
    def sound(self) -> bool:
        return self.lost == 0


CONCURRENCY: Final = 64
WEBHOOK_PAYLOAD: Final = {"order": 42, "filler": "x" * 24}
_BODY: Final = b'{"order":42,"filler":"' + b"x" * 24 + b'"}'


async def http(where: ServerChoice, tasks: int, rounds: int, progress: BenchProgress) -> SinkFigures:
    """Measure in turns, so that other load on the machine affects both alike."""
    through: list[float] = []
    bare: list[float] = []
    lost = 0
    async with counterpart("mainspring.bench.bare_servers", "receiver") as receiver:
        url = f"{receiver}/hook"
        for number in range(rounds):
            progress(f"http, bare, round {number + 1}", 0, tasks)
            bare.append(await _bare_requests(url, tasks))
            per_s, missing = await through_webhooks(where, url, tasks, progress)
            through.append(per_s)
            lost += missing
    ours, plain = statistics.median(through), statistics.median(bare)
    return SinkFigures(tasks, round(ours), round(plain), round(ours / plain, 3), lost)


async def through_webhooks(
    where: ServerChoice, url: str, tasks: int, progress: BenchProgress, history: HistoryRules = DEFAULT_HISTORY
) -> tuple[float, int]:
    sink = HttpSink(HttpOptions(concurrency=CONCURRENCY, allow=("127.0.0.1",)))
    try:
        return await drain(where, url, WEBHOOK_PAYLOAD, tasks, {"http": sink}, progress, history)
    finally:
        await sink.aclose()


async def _bare_requests(url: str, tasks: int) -> float:
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise MainspringError(HTTP_NEEDS) from None
    numbers = iter(range(tasks))
    connector = aiohttp.TCPConnector(limit=0)
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=15)) as session:

        async def work() -> None:
            for number in numbers:
                headers = {
                    "User-Agent": "Mainspring",
                    "Content-Type": "application/json",
                    "Idempotency-Key": f"bench/{number:032x}/1700000000000",
                    "Mainspring-Id": f"{number:032x}",
                    "Mainspring-Due": "2023-11-14T22:13:20.000Z",
                    "Mainspring-Attempt": "1",
                }
                async with session.post(url, data=_BODY, headers=headers, allow_redirects=False) as answer:
                    answer.raise_for_status()
                    await answer.read()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return tasks / (time.perf_counter() - began)


MORE: Final = 15
"""Multiple of `tasks` that Kafka gets: a smaller number would be done before anything is warm."""

PARTITIONS: Final = 2
TOPIC: Final = "bench"
KAFKA_PAYLOAD: Final = {"order": 42, "filler": "x" * 24}
_VALUE: Final = b'{"order":42,"filler":"' + b"x" * 24 + b'"}'


async def kafka(where: ServerChoice, tasks: int, rounds: int, progress: BenchProgress) -> SinkFigures:
    """Measure in turns, so that other load on the machine affects both alike. The first round only warms up."""
    tasks *= MORE
    through: list[float] = []
    bare: list[float] = []
    lost = 0
    progress("kafka, starting a broker", 0, 1)
    async with bench_broker() as options:
        for number in range(rounds + 1):
            progress(f"kafka, bare, round {number}", 0, tasks)
            bare.append(_bare_produce(options, tasks))
            per_s, missing = await through_kafka(where, options, tasks, progress)
            through.append(per_s)
            lost += missing
    ours, plain = statistics.median(through[1:]), statistics.median(bare[1:])
    return SinkFigures(tasks, round(ours), round(plain), round(ours / plain, 3), lost)


async def through_kafka(
    where: ServerChoice,
    options: KafkaOptions,
    tasks: int,
    progress: BenchProgress,
    history: HistoryRules = DEFAULT_HISTORY,
) -> tuple[float, int]:
    sink = KafkaSink(options)
    sink.prepare()  # as a node that starts does
    try:
        return await drain(where, f"kafka:{TOPIC}", KAFKA_PAYLOAD, tasks, {"kafka": sink}, progress, history)
    finally:
        await sink.aclose()


def _bare_produce(options: KafkaOptions, tasks: int) -> float:
    """Produce with the library at its best: a queue that is never full, no callbacks, one flush at the end."""
    from confluent_kafka import Producer

    producer = Producer({**options.for_library(), "queue.buffering.max.messages": 2 * tasks, "log_level": 0})
    producer.list_topics(TOPIC, timeout=30)  # connect first, as the sink is connected when it is measured
    began = time.perf_counter()
    _produce_all(producer, tasks)
    if producer.flush(120):
        raise MainspringError("the broker did not take all messages of the plain loop within two minutes")
    return tasks / (time.perf_counter() - began)


def _produce_all(producer: "Producer", tasks: int) -> None:
    for number in range(tasks):
        id = f"{number:032x}"
        producer.produce(
            TOPIC,
            value=_VALUE,
            key=id,
            headers=[
                ("idempotency-key", f"bench/{id}/1700000000000"),
                ("id", id),
                ("due", b"1700000000000"),
                ("attempt", b"1"),
            ],
        )


@contextlib.asynccontextmanager
async def bench_broker() -> AsyncIterator[KafkaOptions]:
    try:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic
    except ModuleNotFoundError:
        raise MainspringError(KAFKA_NEEDS) from None
    if reason := missing_kafka():
        raise MainspringError(f"no Kafka broker can be started here: {reason}")
    with broker() as made:  # with Java's quick compiler: the other one occupies a core for the whole benchmark
        options = KafkaOptions(made.url)
        admin = AdminClient({**options.for_admin(), "log_level": 0})
        [created] = admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values()
        try:
            await asyncio.wrap_future(created)
        except KafkaException as error:
            raise MainspringError(f"cannot create a topic: {error}") from None
        yield options


QUEUE: Final = "bench"
PUT_US: Final = 30
"""Time allowed per put: all tasks are due at one moment, and no task may be due before the last is put."""

STEADY_RATE: Final = 500
WARM_UP_S: Final = 1.0
STEADY_S: Final = 4.0
"""Only tasks due after the warm-up count: a new node and a new worker are slower with their first tasks."""
JOB_PAYLOAD: Final = {"order": 42}


class QueueFigures(msgspec.Struct, frozen=True):
    """From due to acknowledged for tasks due at one moment, and how late handlers begin at a steady rate. Medians of
    the rounds."""

    tasks: int
    tasks_per_s: float
    p50_ms: float
    p99_ms: float
    timer_p99_ms: float
    """Lateness of a bare timer in the same seconds: the least that is possible on this machine."""
    rate: int
    lost: int

    @property
    def sound(self) -> bool:
        return self.lost == 0


class _Round(NamedTuple):
    per_s: float
    p50_ms: float
    p99_ms: float
    timer_p99_ms: float
    lost: int


async def queue(where: ServerChoice, tasks: int, rounds: int, progress: BenchProgress) -> QueueFigures:
    found: list[_Round] = []
    for number in range(rounds):
        async with open_environment(where) as place:
            store = await Store.open(place.url, namespace=place.namespace)
            try:
                found.append(await _round(store, place.url, tasks, progress))
            finally:
                await store.aclose()
        progress(f"queue, round {number + 1}", tasks, tasks)
    per_s, p50_ms, p99_ms, timer_p99_ms, _ = (statistics.median(column) for column in zip(*found, strict=True))
    return QueueFigures(
        tasks,
        round(per_s),
        round(p50_ms, 2),
        round(p99_ms, 2),
        round(timer_p99_ms, 2),
        STEADY_RATE,
        sum(one.lost for one in found),
    )


async def _round(store: Store, url: str, tasks: int, progress: BenchProgress) -> _Round:
    late: list[float] = []
    steady_ms = 0

    async def nothing(order: int) -> int:
        return order

    async def noted(order: int) -> int:
        due_ms = current().job.due_ms
        if due_ms >= steady_ms:
            late.append(store.clock.now_ms() - due_ms)
        return order

    registry = Registry([Handler(nothing, queue=QUEUE), Handler(noted, queue=QUEUE)])
    async with fleet(store, url, 5.0) as nodes:
        await nodes.add()
        await nodes.settled()
        async with working(store, registry, WorkerOptions("bench", {QUEUE: 1})):
            steady = round(STEADY_RATE * (WARM_UP_S + STEADY_S))
            async with bare_timer(STEADY_RATE) as timer:
                first_ms = store.clock.now_ms() + 1000
                steady_ms = first_ms + round(WARM_UP_S * 1000)
                await put_jobs(store, "noted", [first_ms + i * 1000 // STEADY_RATE for i in range(steady)])
                _, noted_count = await until_done(store, steady, time.perf_counter(), progress, what="queue, steady")
            due_ms = store.clock.now_ms() + 2000 + tasks * PUT_US // 1000
            await put_jobs(store, "nothing", [due_ms] * tasks)
            await asyncio.sleep(max(0, due_ms - store.clock.now_ms()) / 1000)
            began = time.perf_counter()
            took_s, done = await until_done(store, steady + tasks, began, progress, what="queue")
    if not late:
        raise BenchFailed("no handler was run at the steady rate")
    return _Round(
        (done - noted_count) / took_s,
        percentile(late, 0.5),
        percentile(late, 0.99),
        percentile(timer.ms, 0.99),
        steady + tasks - done,
    )


async def put_jobs(store: Store, handler: str, due_ms: list[int]) -> None:
    await Client.over(store).put_many(Task(f"queue:{QUEUE}/{handler}", JOB_PAYLOAD, at) for at in due_ms)


Part = Callable[[ServerChoice, int, int, BenchProgress], Awaitable[msgspec.Struct]]
"""Takes the server, the number of tasks, the number of rounds, and the progress callback."""

PARTS: Final[dict[str, Part]] = {"kafka": kafka, "http": http, "queue": queue}


async def sinks(
    where: ServerChoice, only: Sequence[str], tasks: int, rounds: int, progress: BenchProgress
) -> dict[str, msgspec.Struct]:
    """Measure each kind, or only those named."""
    if unknown := set(only) - set(PARTS):
        raise InvalidInput(f"--only {', '.join(sorted(unknown))}: unknown; give {', '.join(PARTS)}")
    return {name: await part(where, tasks, rounds, progress) for name, part in PARTS.items() if name in (only or PARTS)}
