"""The way to Kafka where no broker answers: the library itself says what becomes of messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from confluent_kafka import KafkaError

from mainspring.engine.flight import Flight
from mainspring.model.delivery import Body
from mainspring.sinks.kafka import identity_of
from mainspring.sinks.kafka_client import CHUNK_TASKS, BatchProducer, FailedMessages
from tests.support.kafka_flights import flight, plain

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "enable.idempotence": "true", "acks": "all", "linger.ms": "1"}
WAIT_S = 30


@asynccontextmanager
async def line(**more: str) -> AsyncIterator[BatchProducer]:
    made = BatchProducer(NOBODY | {name.replace("_", "."): value for name, value in more.items()})
    try:
        yield made
    finally:
        await made.aclose()


def codes(batch: list[Flight], failures: FailedMessages) -> list[int]:
    return [failures[identity_of(one)].code() for one in batch]


async def until_queued(made: BatchProducer, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while made.queued < count:  # noqa: ASYNC110  # the library works in threads of its own: there is only polling
            await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, CHUNK_TASKS, 3 * CHUNK_TASKS + 1])
async def test_every_message_that_fails_is_found(count: int) -> None:
    batch = plain(count)
    async with line(message_timeout_ms="50") as made, asyncio.timeout(WAIT_S):
        failures = await made.send("t", batch)
    assert len(failures) == count
    assert set(codes(batch, failures)) == {KafkaError._MSG_TIMED_OUT}


async def test_a_full_queue_in_the_middle_of_a_chunk_holds_back_and_loses_none() -> None:
    batch, most = plain(2 * CHUNK_TASKS), CHUNK_TASKS // 3
    async with line(message_timeout_ms="50", queue_buffering_max_messages=str(most)) as made:
        sending = asyncio.create_task(made.send("t", batch))
        await until_queued(made, most)
        async with asyncio.timeout(WAIT_S):
            failures = await sending
    assert len(failures) == len(batch)
    assert set(codes(batch, failures)) == {KafkaError._MSG_TIMED_OUT}


async def test_a_message_that_the_library_refuses_is_found_between_others() -> None:
    batch, at = plain(300), 150
    batch[at] = flight(at, Body("kafka:t", b"x" * 3_000))
    async with line(message_timeout_ms="50", message_max_bytes="1500") as made, asyncio.timeout(WAIT_S):
        found = codes(batch, await made.send("t", batch))
    assert found.pop(at) == KafkaError.MSG_SIZE_TOO_LARGE
    assert set(found) == {KafkaError._MSG_TIMED_OUT}


async def test_a_batch_is_not_over_while_the_library_has_a_message_of_it() -> None:
    async with line(message_timeout_ms="300000") as made:
        sending = asyncio.create_task(made.send("t", plain(10)))
        await until_queued(made, 10)
        assert not sending.done()
        await made.aclose()  # gives up what it has
        async with asyncio.timeout(WAIT_S):
            assert set(codes(plain(10), await sending)) <= {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}


async def test_a_batch_is_over_although_others_are_not() -> None:
    async with line(message_timeout_ms="300000", message_max_bytes="1500") as made:
        waiting = asyncio.create_task(made.send("t", plain(10)))
        await until_queued(made, 10)
        large = [flight(1, Body("kafka:other", b"x" * 3_000))]
        async with asyncio.timeout(WAIT_S):
            assert codes(large, await made.send("other", large)) == [KafkaError.MSG_SIZE_TOO_LARGE]
        assert not waiting.done()
        waiting.cancel()


async def test_a_send_that_is_no_longer_awaited_is_dropped() -> None:
    async with line(message_timeout_ms="300000") as made:
        sending = asyncio.create_task(made.send("t", plain(10)))
        await until_queued(made, 10)
        sending.cancel()
        await asyncio.wait([sending])
        assert made.queued >= 10, "the library counts its own events too"
    assert made.queued == 0
