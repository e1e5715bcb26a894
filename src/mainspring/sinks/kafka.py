"""`kafka:<topic>`, one message per task, done when all in-sync replicas have it."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..model.delivery import Delivery
from ..model.errors import ConfigError
from ..model.outcome import DONE, Dead, Outcome, Retry
from .base import Sink
from .kafka_message import identity_of
from .kafka_options import KafkaOptions

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

    from .kafka_line import Failures

log = logging.getLogger("mainspring.kafka")

NOT_CONFIGURED: Final = "this node does not know a Kafka broker; set kafka_url (MAINSPRING_KAFKA_URL, --kafka-url)"
NEEDS: Final = "Kafka needs the package confluent-kafka: pip install 'mainspring[kafka]'"
AWAY_MS: Final = 2_000
"""Tasks that waited in vain for a broker come back after this time."""


def kafka_sink(options: KafkaOptions | None) -> Sink:
    """The sink for these options; without any, one that says what is missing."""
    return UnknownKafka() if options is None else KafkaSink(options)


class UnknownKafka:
    """Stands in where no broker is configured."""

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [Retry(NOT_CONFIGURED)] * len(batch)

    async def aclose(self) -> None:
        """Nothing is held open."""


class KafkaSink:
    """Delivers to Kafka through one idempotent producer with acks=all."""

    def __init__(self, options: KafkaOptions) -> None:
        _check_library(options)
        from .kafka_line import Line
        from .kafka_topics import Topics

        properties = options.for_library()
        self._topics = Topics(options)
        self._line = Line(properties)
        self._singly = Line({**properties, "batch.num.messages": "1"})

    @property
    def queued(self) -> int:
        """Messages that are with the library and not yet reported. Bounded by queue.buffering.max.messages."""
        return self._line.queued + self._singly.queued

    @property
    def producers_made(self) -> int:
        return self._line.carriers_made

    def prepare(self) -> None:
        """The library takes half a second until a new producer has its identity from the broker."""
        self._line.prepare()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        topic = batch[0].target.partition(":")[2]
        refusal = await self._topics.refusal(topic)
        if refusal is not None:
            return [refusal] * len(batch)
        failures = await self._line.send(topic, batch)
        if not failures:
            return [DONE] * len(batch)
        return await self._judged(topic, batch, failures)

    async def aclose(self) -> None:
        await self._line.aclose()
        await self._singly.aclose()
        await self._topics.aclose()

    async def _judged(self, topic: str, batch: Sequence[Delivery], failures: "Failures") -> Sequence[Outcome]:
        from confluent_kafka import KafkaError

        errors = [failures.get(identity_of(one)) for one in batch]
        if KafkaError.UNKNOWN_TOPIC_OR_PART in (code := {error.code() for error in errors if error is not None}):
            self._topics.forget(topic)
        if KafkaError.MSG_SIZE_TOO_LARGE in code:
            errors = await self._sent_singly(topic, batch, errors)
        return [_outcome(error) for error in errors]

    async def _sent_singly(
        self, topic: str, batch: Sequence[Delivery], errors: "Sequence[KafkaError | None]"
    ) -> "list[KafkaError | None]":
        """A broker refuses a whole request when its topic takes only small ones: each message has its own try."""
        from confluent_kafka import KafkaError

        large = [
            one
            for one, error in zip(batch, errors, strict=True)
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE
        ]
        failures = await self._singly.send(topic, large)
        if len(failures) < len(large):
            log.warning(
                "Kafka refused %d messages for %s as too large together: they went one by one, which is slow. "
                "Lower batch.size in [kafka] below the topic's max.message.bytes", len(large), topic,
            )  # fmt: skip
        again = {id(one): failures.get(identity_of(one)) for one in large}
        return [again.get(id(one), error) for one, error in zip(batch, errors, strict=True)]


def _outcome(error: "KafkaError | None") -> Outcome:
    from confluent_kafka import KafkaError

    if error is None:
        return DONE
    match error.code():
        case KafkaError.MSG_SIZE_TOO_LARGE:
            return Dead(
                "the message is larger than Kafka takes: raise the topic's max.message.bytes, "
                "and message.max.bytes in [kafka] if that is smaller"
            )
        case KafkaError._MSG_TIMED_OUT:
            return Retry("Kafka did not acknowledge it in time (message.timeout.ms)", AWAY_MS, untried=True)
        case KafkaError._PURGE_QUEUE | KafkaError._PURGE_INFLIGHT | KafkaError._FATAL:
            # Something else ended the producer: that is no failure of the tasks it had.
            return Retry("the Kafka producer had to be made anew before it was acknowledged", untried=True)
        case _:
            return Retry(f"Kafka: {error.str()}")


def _check_library(options: KafkaOptions) -> None:
    """Refuse settings that the library refuses, before anything runs."""
    try:
        from confluent_kafka import KafkaException, Producer
    except ImportError:
        raise ConfigError(f"kafka_url is set. {NEEDS}") from None
    # Without servers: this one is to read its settings, not to connect.
    properties = {**options.for_library(), "log_level": "0"}
    del properties["bootstrap.servers"]
    try:
        Producer(properties).close()
    except KafkaException as caught:
        raise ConfigError(f"[kafka]: {caught.args[0].str()}") from None
