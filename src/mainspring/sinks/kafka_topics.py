"""Which topics there are; those that are missing are created, if the node is told to."""

import asyncio
import logging
import re
import time
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from ..model.outcome import Dead, Retry
from .kafka_options import KafkaOptions

log = logging.getLogger("mainspring.kafka")
library_log = logging.getLogger("mainspring.kafka.library")

ASK_S: Final = 10.0
MISSING_S: Final = 1.0
"""So long a missing topic is not asked for again: there may be many tasks for it."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_AWAY: Final = (
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError.REQUEST_TIMED_OUT,
)

Refusal = Dead | Retry


class Topics:
    """Asks once for each topic. Asking does not create it, whatever the broker's own settings are."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._admin: AdminClient | None = None
        self._known: set[str] = set()
        self._asking: dict[str, asyncio.Task[Refusal | None]] = {}
        self._missing: dict[str, tuple[float, Refusal]] = {}

    async def refusal(self, topic: str) -> Refusal | None:
        """Why nothing can be sent to this topic now; None when it is there."""
        if topic in self._known:
            return None
        if not _NAME.fullmatch(topic) or topic in (".", ".."):
            return Dead(f"{topic[:250]!r} is no name of a Kafka topic; use 1 to 249 of A-Z a-z 0-9 . _ -")
        until, refusal = self._missing.get(topic, (0.0, None))
        if time.monotonic() < until:
            return refusal
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.create_task(self._look(topic))
            asking.add_done_callback(lambda _: self._asking.pop(topic, None))
        # Shielded: others wait for the same answer.
        return await asyncio.shield(asking)

    def forget(self, topic: str) -> None:
        """It was there, and it is not any more."""
        self._known.discard(topic)

    async def aclose(self) -> None:
        for asking in self._asking.values():
            asking.cancel()
        self._admin = None

    async def _look(self, topic: str) -> Refusal | None:
        error = await self._error_of(self._client().describe_topics(TopicCollection([topic]), request_timeout=ASK_S))
        if error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            error = await self._create(topic)
        refusal = self._judged(topic, error)
        if refusal is None:
            self._known.add(topic)
            self._missing.pop(topic, None)
        else:
            self._missing[topic] = (time.monotonic() + MISSING_S, refusal)
        return refusal

    async def _create(self, topic: str) -> KafkaError | None:
        options = self._options
        if not options.create_topics:
            return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        wanted = NewTopic(topic, options.partitions or -1, options.replication or -1)
        error = await self._error_of(self._client().create_topics([wanted], request_timeout=ASK_S))
        if error is not None and error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return None  # another node was first
        if error is None:
            log.info("created the Kafka topic %s", topic)
        return error

    def _judged(self, topic: str, error: KafkaError | None) -> Refusal | None:
        if error is None:
            return None
        if error.code() in _AWAY:
            return Retry(f"Kafka does not answer: {error.str()}", untried=True)
        if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return Retry(
                f"the Kafka topic {topic!r} does not exist; create it, or set kafka_create_topics on the nodes"
            )
        return Retry(f"the Kafka topic {topic!r} cannot be used: {error.str()}")

    async def _error_of(self, futures: "dict[str, Future[Any]]") -> KafkaError | None:
        [future] = futures.values()
        try:
            await asyncio.wrap_future(future)
        except KafkaException as caught:
            error: KafkaError = caught.args[0]
            return error
        return None

    def _client(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient({**self._options.for_admin()}, logger=library_log)
        return self._admin
