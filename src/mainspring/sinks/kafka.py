"""`kafka:<topic>`: one message per task, done when all in-sync replicas have it."""

import logging
from binascii import hexlify
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from ..model.delivery import DONE, Dead, Delivery, DeliveryColumns, Outcome, Retry
from ..model.errors import ConfigError
from ..model.targets.names import NEEDS_KAFKA
from .base import Sink
from .kafka_options import KafkaOptions

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

    from .kafka_client import FailedMessages

log = logging.getLogger("mainspring.kafka")


# A task as a Kafka message. Value, key and headers are bytes: encoding them in the library would make a message a
# tenth more expensive. Headers are a dict because the library reads it faster than a list of tuples.

KafkaHeaders = dict[str, str | bytes | None]
KafkaMessage = tuple[bytes, bytes, KafkaHeaders]

_IDH_BYTES: Final = 16


def messages_of(chunk: Sequence[Delivery]) -> Iterator[KafkaMessage]:
    """Yield value, key and headers of each. The headers are valid until the next message: the library copies them."""
    prefix = chunk[0].namespace.encode() + b"/"
    columns = type(chunk[0]).columns(chunk)
    if columns is None:
        return (_message_of(one, prefix) for one in chunk)
    return _side_by_side(chunk, columns, prefix)


def identity_of(one: Delivery) -> tuple[bytes, bytes]:
    """Return key and value, by which reports tell messages apart."""
    return (one.id if one.lane is None else one.lane).encode(), one.body.payload


def _side_by_side(chunk: Sequence[Delivery], columns: DeliveryColumns, prefix: bytes) -> Iterator[KafkaMessage]:
    """Make the same messages as `_message_of` at half the cost. Neighbours are mostly due in the same millisecond."""
    ids = hexlify(columns.idhs, b"/", _IDH_BYTES).split(b"/")
    headers: KafkaHeaders = {"idempotency-key": b"", "id": b"", "due": b"", "attempt": b"1"}
    written_ms, ending = -1, b""
    for one, id, due_ms in zip(chunk, ids, columns.dues_ms, strict=True):
        if due_ms != written_ms:
            written_ms, headers["due"], ending = due_ms, b"%d" % due_ms, b"/%d" % due_ms
        headers["idempotency-key"] = prefix + id + ending
        headers["id"] = id
        yield one.body.payload, id, headers


def _message_of(one: Delivery, prefix: bytes) -> KafkaMessage:
    body, due = one.body, b"%d" % one.original_due_ms
    if body.id is None and not body.lane_in_key:
        # Hexadecimal digits need no quoting, which would cost as much as all of this.
        id = hexlify(one.idh)
        idempotency_key = b"".join((prefix, id, b"/", due))
    else:
        id, idempotency_key = one.id.encode(), one.idempotency_key.encode()
    key = id if body.lane is None else body.lane.encode()
    attempt = b"1" if body.attempt == 1 else b"%d" % body.attempt
    return body.payload, key, {"idempotency-key": idempotency_key, "id": id, "due": due, "attempt": attempt}


NOT_CONFIGURED: Final = "this node has no Kafka broker; set kafka_url (MAINSPRING_KAFKA_URL, --kafka-url)"
AWAY_MS: Final = 2_000
"""Wait after which tasks that found no broker are tried again."""


def kafka_sink(options: KafkaOptions | None) -> Sink:
    """Return the sink for these options, or one that reports what is missing (options or library)."""
    if options is not None and find_spec("confluent_kafka") is None:
        log.error("%s; tasks for Kafka wait until a node has it", NEEDS_KAFKA)
        return UnknownKafka(NEEDS_KAFKA)
    return UnknownKafka() if options is None else KafkaSink(options)


class UnknownKafka:
    """Replaces the sink if no broker is configured or the library is missing: its tasks are held."""

    def __init__(self, needs: str | None = None) -> None:
        self._needs = needs

    def missing(self, target: str) -> str | None:
        del target
        return self._needs

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        return [Retry(self._needs or NOT_CONFIGURED)] * len(batch)

    async def aclose(self) -> None:
        """Do nothing: no resources are open."""


class KafkaSink:
    """Delivers to Kafka through one idempotent producer with acks=all."""

    def __init__(self, options: KafkaOptions) -> None:
        _check_library(options)
        from .kafka_client import BatchProducer, Topics

        properties = options.for_library()
        self._topics = Topics(options)
        self._batch_producer = BatchProducer(properties)
        self._singly = BatchProducer({**properties, "batch.num.messages": "1"})

    @property
    def queued(self) -> int:
        """Messages in the library without a report. Bounded by queue.buffering.max.messages."""
        return self._batch_producer.queued + self._singly.queued

    @property
    def producers_made(self) -> int:
        return self._batch_producer.carriers_made

    def prepare(self) -> None:
        """Connect: a new producer takes half a second to get its identity from the broker."""
        self._batch_producer.prepare()
        self._topics.prepare()

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        topic = batch[0].target.partition(":")[2]
        refusal = await self._topics.refusal(topic)
        if refusal is not None:
            return [refusal] * len(batch)
        failures = await self._batch_producer.send(topic, batch)
        if not failures:
            return [DONE] * len(batch)
        return await self._judged(topic, batch, failures)

    async def aclose(self) -> None:
        await self._batch_producer.aclose()
        await self._singly.aclose()
        await self._topics.aclose()

    async def _judged(self, topic: str, batch: Sequence[Delivery], failures: "FailedMessages") -> Sequence[Outcome]:
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
        """Send messages one by one: a broker refuses a whole request that is too large for its topic."""
        from confluent_kafka import KafkaError

        large = [
            one
            for one, error in zip(batch, errors, strict=True)
            if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE
        ]
        failures = await self._singly.send(topic, large)
        if len(failures) < len(large):
            log.warning(
                "Kafka refused %d messages for %s as too large together; they were sent one by one, which is slow. "
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
            # Something else ended the producer: its tasks have not failed.
            return Retry("the Kafka producer was replaced before it acknowledged the message", untried=True)
        case _:
            return Retry(f"Kafka: {error.str()}")


def _check_library(options: KafkaOptions) -> None:
    """Refuse, before anything runs, settings that the library refuses."""
    try:
        from confluent_kafka import KafkaException, Producer
    except ImportError:
        raise ConfigError(f"kafka_url is set. {NEEDS_KAFKA}") from None
    # Leave out the servers: this producer only validates the settings and must not connect.
    properties = {**options.for_library(), "log_level": "0"}
    del properties["bootstrap.servers"]
    try:
        Producer(properties).close()
    except KafkaException as caught:
        raise ConfigError(f"[kafka]: {caught.args[0].str()}") from None
