"""The consumer: reads the topic from its current end on and records which ticks arrived, and how late."""

import gc
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Final, cast

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from .plan import ConsumerOrder, Journal, numbers_of
from .processes import Inside

MOST: Final = 10_000
FEW: Final = 100
"""Up to this many messages at a time there is time to parse them."""
UNREAD: Final = 2_500_000
"""Messages that may wait to be parsed (some 250 MB): the schedulers under load need the processor more."""
WAIT_S: Final = 0.05
GATHER_S: Final = 0.002
"""Pause after the first message: others follow at once, and waking up for each would cost more than reading it."""
FETCH_WAIT_MS: Final = 20
ASK_S: Final = 30.0


class Reader:
    """Counts ticks and how late each arrived; `now_ms` by this machine's clock.

    Messages are kept as they are and parsed when few arrive: on the measured machine, parsing costs as much as a
    scheduler's part of a tick.
    """

    def __init__(self, ids: int, came: Journal) -> None:
        self._ids = ids
        self._came = came
        self._unread: deque[tuple[float, list[bytes]]] = deque()
        self._waiting = 0
        self.early = 0
        self.foreign = 0
        self.late_ms = array("f")
        self._arrivals: list[tuple[float, int]] = []
        """When messages arrived together, and how many."""

    @property
    def count(self) -> int:
        return self._came.count + self._waiting

    def take(self, values: list[bytes], now_ms: float) -> None:
        self._unread.append((now_ms, values))
        self._waiting += len(values)
        if self._waiting > UNREAD:
            self.read_some()

    def read_some(self) -> bool:
        """Parse the oldest unread messages; return False when none is left."""
        if not self._unread:
            return False
        now_ms, values = self._unread.popleft()
        self._waiting -= len(values)
        numbers = [number for number in numbers_of(values, self._ids) if number is not None]
        self.foreign += len(values) - len(numbers)
        if numbers:
            self._arrivals.append((now_ms, len(numbers)))
        self._came.add_all(numbers)
        late_ms = [now_ms - number // self._ids for number in numbers]
        self.early += sum(late < 0 for late in late_ms)
        self.late_ms.extend(late_ms)
        return True

    def per_s(self, ramp_ms: float) -> float:
        """Return ticks per second without the ramps at the start and end, or with them if nothing lies between."""
        if not self._arrivals:
            return 0.0
        first_ms, last_ms = self._arrivals[0][0], self._arrivals[-1][0]
        if last_ms - first_ms > 2 * ramp_ms:
            first_ms, last_ms = first_ms + ramp_ms, last_ms - ramp_ms
        count = sum(count for at_ms, count in self._arrivals if first_ms < at_ms <= last_ms)
        return count * 1000 / max(1.0, last_ms - first_ms)

    def late_by(self, share: float) -> float | None:
        ordered = sorted(self.late_ms)
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) if ordered else None


def assigned(order: ConsumerOrder) -> Consumer:
    """Return a consumer of every partition from its current end on: older messages do not belong to this demo."""
    consumer = Consumer(
        {
            **order.properties,
            "fetch.min.bytes": order.fetch_bytes,
            "group.id": "mainspring-demo",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,  # no later consumer resumes from this one's offset
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "log_level": 0,
        }
    )
    found = consumer.list_topics(order.topic, timeout=ASK_S).topics[order.topic]
    if found.error is not None:
        raise KafkaException(found.error)
    places = [TopicPartition(order.topic, number) for number in found.partitions]
    for place in places:
        _, place.offset = consumer.get_watermark_offsets(place, timeout=ASK_S)
    consumer.assign(places)
    return consumer


def arrived(consumer: Consumer) -> list[Message]:
    """Return the messages that arrive soon after the first; none after a while.

    The library waits until it has as many as were asked for. So ask for one first, and then for the rest.
    """
    messages = consumer.consume(1, WAIT_S)
    return messages + consumer.consume(MOST, GATHER_S) if messages else messages


def values_of(messages: list[Message]) -> list[bytes]:
    """Return the values without the library's own notices. Checked in bulk: one by one cost a fifth of a message."""
    values = list(map(Message.value, messages))
    if None not in values and not any(map(Message.error, messages)):
        return cast("list[bytes]", values)
    return [message.value() or b"" for message in messages if message.error() is None]


def main() -> None:
    inside = Inside()
    order: ConsumerOrder = inside.order(ConsumerOrder)
    came = Journal(Path(order.came))
    reader = Reader(order.ids, came)
    try:
        consumer = assigned(order)
    except KafkaException as error:
        raise SystemExit(f"the topic {order.topic} cannot be read: {error}") from None
    inside.total = lambda: reader.count
    inside.ready()
    gc.disable()  # no cycles form here, and every collection would walk over all messages kept so far
    while not inside.stopped:
        messages = arrived(consumer)
        if messages:
            now_ms = time.time() * 1000
            reader.take(values_of(messages), now_ms)
        if len(messages) < FEW:
            reader.read_some()
    consumer.close()
    while reader.read_some():
        pass
    came.close()
    inside.report(
        consumed=reader.count,
        foreign=reader.foreign,
        early=reader.early,
        per_s=reader.per_s(order.within_ms),
        p50_ms=reader.late_by(0.5),
        p99_ms=reader.late_by(0.99),
    )


if __name__ == "__main__":
    main()
