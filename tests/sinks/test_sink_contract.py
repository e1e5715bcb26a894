"""Our own sinks keep the promises of every sink."""

import asyncio
import base64
import contextlib
import json
import os
import select
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import pytest

from mainspring.model.delivery import DONE
from mainspring.sinks.http import HttpOptions, HttpSink
from mainspring.sinks.kafka import KafkaSink
from mainspring.sinks.kafka_options import KafkaOptions, Properties
from mainspring.sinks.log import LogSink
from mainspring.testing.kafka import Broker
from mainspring.testing.sink_contract import Arrived, Receiver, SinkContract
from tests.support.web_receiver import Answer, Request, receiving

POISON = b'"poison"'


# -- webhooks ----------------------------------------------------------------------------------------------------


class Website(Receiver):
    """Answers 200, 503 while it is out of order, 400 to what it does not like."""

    def __init__(self) -> None:
        self._got: list[Arrived] = []
        self._well, self._open = True, threading.Event()
        self._open.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Website"]:
        with receiving(self._answer) as web:
            self.target = web.url
            yield self
            self._open.set()

    def _answer(self, request: Request) -> Answer:
        self._open.wait(60)
        if not self._well:
            return Answer(503)
        if request.body == POISON:
            return Answer(400)
        self._got.append(_of_request(request))
        return Answer()

    def sink(self) -> HttpSink:
        return HttpSink(HttpOptions(allow=("127.0.0.0/8",)))

    async def arrived(self) -> Sequence[Arrived]:
        return list(self._got)

    async def fail(self) -> None:
        self._well = False

    async def mend(self) -> None:
        self._well = True

    async def hold(self) -> bool:
        self._open.clear()
        return True

    async def release(self) -> None:
        self._open.set()

    def poison(self) -> bytes:
        return POISON


def _of_request(request: Request) -> Arrived:
    told = request.headers
    due = datetime.fromisoformat(told["mainspring-due"])
    id, attempt = unquote(told["mainspring-id"]), int(told["mainspring-attempt"])
    return Arrived(request.body, id, told["idempotency-key"], round(due.timestamp() * 1000), attempt)


class TestHttpSink(SinkContract):
    @asynccontextmanager
    async def receiver(self) -> AsyncIterator[Receiver]:
        async with Website().running() as website:
            yield website


# -- log: --------------------------------------------------------------------------------------------------------


class Pipe(Receiver):
    """Standard output with a reader; held, it is full and not read."""

    target = "log:"
    told = frozenset()  # lines are payloads as they are, and nothing else

    def __init__(self) -> None:
        read_fd, self._fd = os.pipe()
        self._lines = bytearray()
        self._may_read = threading.Event()
        self._may_read.set()
        self._start(read_fd)

    def _start(self, read_fd: int) -> None:
        self._stop_fd, self._wake_fd = os.pipe()
        self._reader = threading.Thread(target=self._read, args=(read_fd, self._stop_fd), daemon=True)
        self._reader.start()

    def _read(self, read_fd: int, stop_fd: int) -> None:
        while True:
            self._may_read.wait(60)
            ready, _, _ = select.select([read_fd, stop_fd], [], [])
            if self._may_read.is_set() and read_fd in ready:
                self._lines += os.read(read_fd, 1 << 16)
            elif stop_fd in ready:
                break
        os.close(read_fd)

    def _end(self) -> None:
        """The output is read to its end, then the reader is gone."""
        if not self._reader.is_alive():
            return
        self._may_read.set()
        os.write(self._wake_fd, b"x")
        self._reader.join(60)
        os.close(self._stop_fd)
        os.close(self._wake_fd)

    def sink(self) -> LogSink:
        return LogSink(self._fd)

    async def arrived(self) -> Sequence[Arrived]:
        # What is done is in the pipe: reading it to its end must show it.
        await self.fail()
        await self.mend()
        return [Arrived(_payload(line)) for line in bytes(self._lines).splitlines() if line]

    async def fail(self) -> None:
        await asyncio.to_thread(self._end)

    async def mend(self) -> None:
        read_fd, write_fd = os.pipe()
        os.dup2(write_fd, self._fd)
        os.close(write_fd)
        self._start(read_fd)

    async def hold(self) -> bool:
        self._may_read.clear()
        os.set_blocking(self._fd, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self._fd, b"\n" * 4096)
        os.set_blocking(self._fd, True)
        return True

    async def release(self) -> None:
        self._may_read.set()

    def close(self) -> None:
        self._end()
        os.close(self._fd)


def _payload(line: bytes) -> bytes:
    value = json.loads(line)
    return base64.b64decode(value["base64"]) if isinstance(value, dict) and "base64" in value else line


class TestLogSink(SinkContract):
    @asynccontextmanager
    async def receiver(self) -> AsyncIterator[Receiver]:
        with contextlib.closing(Pipe()) as pipe:
            yield pipe


# -- Kafka -------------------------------------------------------------------------------------------------------


class Topic(Receiver):
    """One topic of a real broker, which is paused to be away."""

    big_bytes = 256 * 1024

    def __init__(self, kafka: Broker) -> None:
        self._kafka, self._name = kafka, f"t{uuid4().hex[:8]}"
        self.target = f"kafka:{self._name}"

    def sink(self) -> KafkaSink:
        # What is not acknowledged by then comes back: two minutes unless told otherwise. A busy broker takes its time.
        properties = Properties({"message.timeout.ms": 15_000})
        return KafkaSink(KafkaOptions(self._kafka.url, properties, create_topics=True, partitions=2))

    async def arrived(self) -> Sequence[Arrived]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Arrived]:
        from confluent_kafka import Consumer, TopicPartition

        reader = Consumer({"bootstrap.servers": self._kafka.servers, "group.id": "g", "log_level": 0})
        try:
            ends = {number: self._end_of(reader, number) for number in range(2)}
            reader.assign([TopicPartition(self._name, number, 0) for number in ends])
            got: list[Any] = []
            while len(got) < sum(ends.values()):
                got += reader.consume(100, timeout=1)
        finally:
            reader.close()
        return [_of_message(message) for message in got]

    def _end_of(self, reader: Any, number: int) -> int:
        from confluent_kafka import TopicPartition

        return int(reader.get_watermark_offsets(TopicPartition(self._name, number), timeout=60)[1])

    async def fail(self) -> None:
        await self._make_known()
        self._kafka.pause()

    async def _make_known(self) -> None:
        """The topic is there and known: a sink that never saw it could not say what is wrong but that."""
        first = self.sink()
        assert await first.deliver([self.delivery(1_000_000, b'"first"')]) == [DONE]
        await first.aclose()

    async def mend(self) -> None:
        self._kafka.resume()

    async def hold(self) -> bool:
        self._kafka.pause()
        return True

    async def release(self) -> None:
        self._kafka.resume()

    def poison(self) -> bytes:
        return b"x" * 2_000_000


def _of_message(message: Any) -> Arrived:
    told = dict(message.headers())
    id, key = told["id"].decode(), told["idempotency-key"].decode()
    return Arrived(message.value(), id, key, int(told["due"]), int(told["attempt"]))


@pytest.mark.timeout(300)
class TestKafkaSink(SinkContract):
    @pytest.fixture(autouse=True)
    def _on_a_broker(self, kafka: Broker) -> None:
        self.kafka = kafka

    @asynccontextmanager
    async def receiver(self) -> AsyncIterator[Receiver]:
        try:
            yield Topic(self.kafka)
        finally:
            self.kafka.resume()
            await asyncio.to_thread(self.kafka.wait_well)
