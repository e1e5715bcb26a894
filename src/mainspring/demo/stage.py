"""What the demo stands on: Kafka with the topic, and a server for the tasks; given, or started here for a while."""

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..model.errors import MainspringError
from ..sinks.kafka import NEEDS
from ..sinks.kafka_options import KafkaOptions
from ..store import embedded
from ..testing.kafka import broker, missing_kafka
from .plan import TOPIC

TOPIC_PARTITIONS: Final = 8
ASK_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Where:
    """None: an embedded one is started."""

    kafka_url: str | None = None
    redis_url: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    kafka: KafkaOptions
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
            made = stack.enter_context(broker(jvm=""))
            pids["broker"], kafka_url = made.pid, made.url
        options = KafkaOptions(kafka_url)
        await provision(options)
        yield Stage(options, redis_url, f"demo-{secrets.token_hex(4)}", folder, pids)


async def provision(options: KafkaOptions) -> None:
    """The topic is there before anything is posted; one that exists is taken as it is."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({**options.for_admin(), "log_level": 0})
    wanted = NewTopic(TOPIC, TOPIC_PARTITIONS, -1)
    [created] = admin.create_topics([wanted], request_timeout=ASK_S).values()
    try:
        await asyncio.wrap_future(created)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise MainspringError(f"the topic {TOPIC} cannot be created: {error.args[0].str()}") from None
