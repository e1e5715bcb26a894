"""The Kafka library: one producer, its topics, sending batches and reading delivery reports."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from ..model.clock import TimeSlice
from ..model.delivery import Dead, Delivery, Retry
from .kafka import messages_of
from .kafka_options import KafkaOptions

log = logging.getLogger("mainspring.kafka")

library_log = logging.getLogger("mainspring.kafka.library")


FIRST_POLL_S: Final = 0.001
SLOWEST_POLL_S: Final = 0.02
"""Seconds between fetches of reports while some are missing: the library cannot wake an event loop."""

IDLE_POLL_S: Final = 2.0
"""Seconds between fetches while none are missing, for other events of the library."""

REPORTS: Final = {"delivery.report.only.error": True}
"""Report failures only: making a message object and calling back costs three times as much as releasing a receipt."""


class Carrier:
    """Owns the producer and fetches its reports.

    The library works in threads of its own. Fetching reports does not block, so it is done on the event loop: a thread
    would have to take the interpreter lock from the loop for every single report.
    """

    def __init__(self, properties: Mapping[str, str], away: Callable[[], None]) -> None:
        self.broken: KafkaError | None = None
        """Why it will never send again: the broker no longer knows its identity."""
        self._away = away
        self._wake = asyncio.Event()
        self._retired = False
        self.producer = Producer({**properties, **REPORTS, "error_cb": self._on_error, "logger": library_log})
        self._serving = asyncio.create_task(self._serve(), name="mainspring-kafka")

    @property
    def queued(self) -> int:
        """Messages in the library without a report."""
        return len(self.producer)

    def wake(self) -> None:
        """Fetch reports soon: a message was handed over."""
        self._wake.set()

    def retire(self) -> None:
        """Take no more messages. Those in the library are reported as failed, and then it closes."""
        if not self._retired:
            self._retired = True
            self.producer.purge(blocking=False)
            self._wake.set()

    async def ended(self) -> None:
        await asyncio.wait([self._serving])

    async def _serve(self) -> None:
        wait_s = FIRST_POLL_S
        while self.queued or not self._retired:
            served = self._fetch()
            if self.broken is not None:
                self.retire()
            if self.queued:
                wait_s = FIRST_POLL_S if served else min(wait_s * 2, SLOWEST_POLL_S)
                await asyncio.sleep(wait_s)
            elif not self._retired:
                wait_s = FIRST_POLL_S
                await self._rest()
        # Closing joins the library's threads: do not block the loop.
        await asyncio.get_running_loop().run_in_executor(None, self.producer.close)

    def _fetch(self) -> int:
        """Fetch reports; return their number. One report may cover thousands of messages."""
        try:
            return self.producer.poll(0)
        except KafkaException as caught:  # how the library reports a fatal error
            self._on_error(caught.args[0])
            return 1

    async def _rest(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(IDLE_POLL_S):
                await self._wake.wait()
        except TimeoutError:
            return

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.broken = self.broken or error
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._away()
        else:
            log.info("Kafka: %s", error.str())


ASK_S: Final = 10.0
MISSING_S: Final = 1.0
"""Seconds before a missing topic is checked again: there may be many tasks for it."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_AWAY: Final = (
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError.REQUEST_TIMED_OUT,
)

Refusal = Dead | Retry


class Topics:
    """Checks each topic once. Checking does not create a topic, whatever the broker's settings are."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._admin: AdminClient | None = None
        self._known: set[str] = set()
        self._asking: dict[str, asyncio.Task[Refusal | None]] = {}
        self._missing: dict[str, tuple[float, Refusal]] = {}

    async def refusal(self, topic: str) -> Refusal | None:
        """Return why nothing can be sent to this topic now; None if it exists."""
        if topic in self._known:
            return None
        if not _NAME.fullmatch(topic) or topic in (".", ".."):
            return Dead(f"{topic[:250]!r} is not a valid name of a Kafka topic; use 1 to 249 of A-Z a-z 0-9 . _ -")
        until, refusal = self._missing.get(topic, (0.0, None))
        if time.monotonic() < until:
            return refusal
        # Shielded: other deliveries wait for the same answer.
        return await asyncio.shield(self._ask(topic))

    def prepare(self) -> None:
        """Begin to create the topics in the settings, if `create_topics` is set."""
        for topic in self._options.topics if self._options.create_topics else ():
            if _NAME.fullmatch(topic):
                self._ask(topic)

    def _ask(self, topic: str) -> "asyncio.Task[Refusal | None]":
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.create_task(self._look(topic))
            asking.add_done_callback(lambda _: self._asking.pop(topic, None))
        return asking

    def forget(self, topic: str) -> None:
        """Forget a topic that no longer exists."""
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
            return None  # another node created it first
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


CHUNK_TASKS: Final = 512
"""Messages handed to the library at a time: about 1 ms."""

TIME_SLICE_S: Final = 0.003
"""Seconds spent on handing over messages before yielding to the loop."""

ROOM_S: Final = 0.005
"""Seconds between checks of a full queue."""


FailedMessages = Mapping[tuple[bytes, bytes], KafkaError]
"""Errors of undelivered messages, by key and value: reports have no headers, and a task's id may equal the lane of
another. Two messages that agree in both fail together: a repeat does no harm."""


class Receipt:
    """Tracks one batch: the library holds a reference for each message until the message's outcome is known.

    The library calls it for failed messages and only drops its reference for the others, which costs a third of a call.
    So when the last reference is gone, every message was acknowledged or has failed. A reference kept anywhere else
    would make its batch wait forever.
    """

    __slots__ = ("_done", "_failures")

    def __init__(self, failures: dict[tuple[bytes, bytes], KafkaError], done: "asyncio.Future[None]") -> None:
        self._failures = failures
        self._done = done

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.refuse(message.key() or b"", message.value() or b"", error)

    def refuse(self, key: bytes, value: bytes, error: KafkaError) -> None:
        """Record an undelivered message. The library may not even have accepted it."""
        self._failures[key, value] = error

    def __del__(self) -> None:
        if not self._done.done():  # done already if the node gave up on this delivery
            self._done.set_result(None)


class BatchProducer:
    """Sends batches in order of arrival; several may be on the wire at once."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = properties
        self._carrier: Carrier | None = None
        self._turn = asyncio.Lock()
        self._time_slice = TimeSlice(TIME_SLICE_S)
        self._away = False
        self.carriers_made = 0

    @property
    def queued(self) -> int:
        """Messages in the library without a report."""
        return self._carrier.queued if self._carrier is not None else 0

    def prepare(self) -> None:
        """Connect before there is anything to send."""
        self._working()

    async def send(self, topic: str, batch: Sequence[Delivery]) -> FailedMessages:
        """Send a batch; return when every message was acknowledged or has failed for good."""
        failures: dict[tuple[bytes, bytes], KafkaError] = {}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._turn:
            await self._hand_over(topic, batch, Receipt(failures, done))
        await done
        if self._away and not failures:
            log.warning("Kafka answers again")
            self._away = False
        return failures

    async def aclose(self) -> None:
        """Drop messages whose deliveries were given up: the next owner delivers them."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.retire()
            await carrier.ended()

    async def _hand_over(self, topic: str, batch: Sequence[Delivery], receipt: Receipt) -> None:
        at, time_slice = 0, self._time_slice
        time_slice.begin()
        while at < len(batch):
            chunk = batch[at : at + CHUNK_TASKS]
            carrier = self._working()
            taken = _produce(carrier, topic, chunk, receipt)
            at += taken
            carrier.wake()
            if taken < len(chunk):
                # A full queue is not an error: later batches wait here, and the engine limits how many tasks begin.
                await asyncio.sleep(ROOM_S)
            elif at < len(batch) and time_slice.over:
                time_slice.end()
                await asyncio.sleep(0)
                time_slice.begin()

    def _working(self) -> Carrier:
        if self._carrier is not None and self._carrier.broken is not None:
            log.error("the Kafka producer has failed (%s); making a new one", self._carrier.broken.str())
            self._carrier.retire()
            self._carrier = None
        if self._carrier is None:
            self._carrier = Carrier(self._properties, self._note_away)
            self.carriers_made += 1
        return self._carrier

    def _note_away(self) -> None:
        if not self._away:
            log.warning("no Kafka broker can be reached; tasks for Kafka are held")
        self._away = True


def _produce(carrier: Carrier, topic: str, chunk: Sequence[Delivery], receipt: Receipt) -> int:
    """Hand messages over; return how many were accepted: fewer than all if the queue is full or the producer broke."""
    produce = carrier.producer.produce
    for number, (value, key, headers) in enumerate(messages_of(chunk)):
        try:
            # By position: eight arguments by name cost a fifth of the call.
            produce(topic, value, key, -1, receipt, receipt, 0, headers)
        except BufferError:
            return number
        except KafkaException as caught:
            error: KafkaError = caught.args[0]
            if error.fatal() or error.code() == KafkaError._FATAL:
                carrier.broken = carrier.broken or error
                return number
            receipt.refuse(key, value, error)
    return len(chunk)
