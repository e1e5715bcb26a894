"""Kafka: into a real broker on this machine, beside a plain produce loop with the same settings."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from ..model.errors import MainspringError
from ..sinks.kafka import NEEDS, KafkaSink
from ..sinks.kafka_options import KafkaOptions
from ..testing.kafka import broker, missing_kafka
from .drain import drain
from .ground import Where
from .life import Progress
from .sink_figures import SinkFigures

if TYPE_CHECKING:
    from confluent_kafka import Producer

MORE: Final = 15
"""So many times the tasks that other kinds are measured with: these would be over before anything is warm."""

PARTITIONS: Final = 2
TOPIC: Final = "bench"
PAYLOAD: Final = {"order": 42, "filler": "x" * 24}
_VALUE: Final = b'{"order":42,"filler":"' + b"x" * 24 + b'"}'


async def kafka(where: Where, tasks: int, rounds: int, progress: Progress) -> SinkFigures:
    """Turn and turn about, so that what else the machine does falls on both. The first round only warms up."""
    tasks *= MORE
    through: list[float] = []
    bare: list[float] = []
    lost = 0
    progress("kafka, starting a broker", 0, 1)
    async with _broker() as options:
        for number in range(rounds + 1):
            progress(f"kafka, bare, round {number}", 0, tasks)
            bare.append(_bare(options, tasks))
            per_s, missing = await _through(where, options, tasks, progress)
            through.append(per_s)
            lost += missing
    ours, plain = statistics.median(through[1:]), statistics.median(bare[1:])
    return SinkFigures(tasks, round(ours), round(plain), round(ours / plain, 3), lost)


async def _through(where: Where, options: KafkaOptions, tasks: int, progress: Progress) -> tuple[float, int]:
    sink = KafkaSink(options)
    sink.prepare()  # as a node that starts does
    try:
        return await drain(where, f"kafka:{TOPIC}", PAYLOAD, tasks, {"kafka": sink}, progress)
    finally:
        await sink.aclose()


def _bare(options: KafkaOptions, tasks: int) -> float:
    """The library at its best: a queue that is never full, nothing asked of single messages, one flush at the end."""
    from confluent_kafka import Producer

    producer = Producer({**options.for_library(), "queue.buffering.max.messages": 2 * tasks, "log_level": 0})
    producer.list_topics(TOPIC, timeout=30)  # connected, as the sink is when it is measured
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
async def _broker() -> AsyncIterator[KafkaOptions]:
    try:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic
    except ModuleNotFoundError:
        raise MainspringError(NEEDS) from None
    if reason := missing_kafka():
        raise MainspringError(f"no Kafka broker can be started here: {reason}")
    with broker() as made:  # with Java's quick compiler: the other one takes a core for as long as this lasts
        options = KafkaOptions(made.url)
        admin = AdminClient({**options.for_admin(), "log_level": 0})
        [created] = admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values()
        try:
            await asyncio.wrap_future(created)
        except KafkaException as error:
            raise MainspringError(f"cannot create a topic: {error}") from None
        yield options
