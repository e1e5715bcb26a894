"""The way to Kafka: batches in, reports out."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message

from ..model.delivery import Delivery
from ..model.stint import Stint
from .kafka_carrier import Carrier
from .kafka_message import messages_of

log = logging.getLogger("mainspring.kafka")

CHUNK_TASKS: Final = 512
"""Messages handed to the library in one go: about 1 ms."""

STINT_S: Final = 0.003
"""So long messages are handed over before others have their turn on the loop."""

ROOM_S: Final = 0.005
"""How often a full queue is looked at again."""


Failures = Mapping[tuple[bytes, bytes], KafkaError]
"""What was not delivered, by the key and the value of its message: reports have no headers, and a task's id may be the
lane of another. Two that are the same in both fail together: a repeat does no harm."""


class Receipt:
    """What the library holds of a batch on its way: once for each message, until it knows what became of that one.

    It calls it for messages that have failed. Of the others it only lets go, which costs a third of a call; so when
    nobody holds the receipt any more, every message has been acknowledged or has failed. Whoever kept it elsewhere
    would have its batch wait for ever.
    """

    __slots__ = ("_done", "_failures")

    def __init__(self, failures: dict[tuple[bytes, bytes], KafkaError], done: "asyncio.Future[None]") -> None:
        self._failures = failures
        self._done = done

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.refuse(message.key() or b"", message.value() or b"", error)

    def refuse(self, key: bytes, value: bytes, error: KafkaError) -> None:
        """One is not delivered. The library may not even have taken it."""
        self._failures[key, value] = error

    def __del__(self) -> None:
        if not self._done.done():  # it is, when the node gave up on this delivery
            self._done.set_result(None)


class Line:
    """Hands batches over in the order they come; they are on the wire together."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = properties
        self._carrier: Carrier | None = None
        self._turn = asyncio.Lock()
        self._stint = Stint(STINT_S)
        self._away = False
        self.carriers_made = 0

    @property
    def queued(self) -> int:
        """Messages that are with the library and not yet reported."""
        return self._carrier.queued if self._carrier is not None else 0

    def prepare(self) -> None:
        """Connect before there is anything to send."""
        self._working()

    async def send(self, topic: str, batch: Sequence[Delivery]) -> Failures:
        """Returns when the broker has acknowledged every message, or it has failed for good."""
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
        """What nobody waits for any more is dropped: the next owner delivers it."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.retire()
            await carrier.ended()

    async def _hand_over(self, topic: str, batch: Sequence[Delivery], receipt: Receipt) -> None:
        at, stint = 0, self._stint
        stint.begin()
        while at < len(batch):
            chunk = batch[at : at + CHUNK_TASKS]
            carrier = self._working()
            taken = _produce(carrier, topic, chunk, receipt)
            at += taken
            carrier.wake()
            if taken < len(chunk):
                # A full queue is no error: those behind wait here, and the engine begins no more than it may.
                await asyncio.sleep(ROOM_S)
            elif at < len(batch) and stint.over:
                stint.step_aside()
                await asyncio.sleep(0)
                stint.begin()

    def _working(self) -> Carrier:
        if self._carrier is not None and self._carrier.broken is not None:
            log.error("the Kafka producer cannot go on (%s): making a new one", self._carrier.broken.str())
            self._carrier.retire()
            self._carrier = None
        if self._carrier is None:
            self._carrier = Carrier(self._properties, self._note_away)
            self.carriers_made += 1
        return self._carrier

    def _note_away(self) -> None:
        if not self._away:
            log.warning("no Kafka broker can be reached: tasks for Kafka are held back")
        self._away = True


def _produce(carrier: Carrier, topic: str, chunk: Sequence[Delivery], receipt: Receipt) -> int:
    """How many were taken; fewer than all when the queue is full or the producer broke."""
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
