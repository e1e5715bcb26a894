"""What the demo stands on: Kafka with the topic, and a server for the tasks; given, or started here for a while."""

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..model.errors import MainspringError
from ..sinks.kafka import NEEDS
from ..sinks.kafka_options import KafkaOptions, Properties
from ..store import embedded
from ..testing.kafka import broker, missing_kafka
from .plan import TOPIC

TOPIC_PARTITIONS: Final = 2
"""Every one more cuts what a scheduler sends at a time into smaller requests; see docs/decisions/0022."""
FULL_BATCHES: Final = Properties({"linger.ms": "20"})
"""Some milliseconds for fewer and larger requests: the broker has to share two cores with everybody else, and a request
costs it as much as a hundred messages."""
FULL_FETCH_BYTES: Final = 262_144
WARM_S: Final = 4.0
WARM_TOPIC: Final = "warm-up"
ASK_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Where:
    """None: an embedded one is started."""

    kafka_url: str | None = None
    redis_url: str | None = None
    in_bulk: bool = False
    """Tens of thousands a second: larger requests, and messages pass through the broker beforehand, for a Java program
    is slow in its first seconds."""


@dataclass(frozen=True, slots=True)
class Stage:
    kafka: KafkaOptions
    fetch_bytes: int
    """The consumer waits for so many, or for some milliseconds."""
    redis_url: str
    namespace: str
    folder: Path
    pids: dict[str, int]
    """Of what was started here."""


@contextlib.asynccontextmanager
async def stage(where: Where) -> AsyncIterator[Stage]:
    """With a namespace of its own, so that tasks of others are safe on a server that is given."""
    if find_spec("confluent_kafka") is None:
        raise MainspringError(NEEDS)
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
        yield Stage(options, fetch_bytes, redis_url, f"demo-{secrets.token_hex(4)}", folder, pids)


async def provision(options: KafkaOptions, topic: str) -> None:
    """The topic is there before anything is posted; one that exists is taken as it is."""
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
    """Messages like those of tasks, written and read for a while on a topic of their own."""
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
