"""Kafka from the first put to the topic, on a real broker, read back by kcat."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from mainspring import Client, Task
from mainspring.config.config import Config
from mainspring.model.delivery import DONE, Body, Dead, Delivery, GivenDelivery, Outcome, Retry
from mainspring.model.errors import ConfigError
from mainspring.model.ids import idh_of
from mainspring.node.node import Node, builtin_sinks
from mainspring.sinks.kafka import KafkaSink
from mainspring.sinks.kafka_options import KafkaOptions, Properties
from mainspring.store.store import Store
from mainspring.testing.balance import Balance, balance
from mainspring.testing.kafka import Broker
from tests.support.kafka_topics import Received, paused, read_topic, read_values, topics_of

pytestmark = pytest.mark.timeout(300)
WAIT_S = 90


@pytest.fixture
def topic(kafka: Broker) -> str:
    return made_topic(kafka)


def made_topic(kafka: Broker, **config: str) -> str:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    name = f"t{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    wanted = NewTopic(name, 4, 1, config={key.replace("_", "."): value for key, value in config.items()})
    admin.create_topics([wanted])[name].result(60)
    return name


@asynccontextmanager
async def sinking(kafka: Broker, properties: dict[str, object] | None = None, **more: Any) -> AsyncIterator[KafkaSink]:
    sink = KafkaSink(KafkaOptions(kafka.url, Properties(properties), **more))
    try:
        yield sink
    finally:
        await sink.aclose()


def delivery(topic: str, id: str, payload: bytes = b'"x"', lane: str | None = None, attempt: int = 1) -> Delivery:
    body = Body(f"kafka:{topic}", payload, id, lane, attempt=attempt)
    return GivenDelivery(body, namespace="main", idh=idh_of(id), due_ms=1_800_000_000_123)


def some(topic: str, count: int) -> list[Delivery]:
    return [delivery(topic, f"task-{number}") for number in range(count)]


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # the broker is another process: there is only polling
            await asyncio.sleep(0.02)


async def until_settled(store: Store, count: int) -> Balance:
    async with asyncio.timeout(WAIT_S):
        while True:
            books = await balance(store)
            if books.done + books.dead == count:
                return books
            await asyncio.sleep(0.1)


class World:
    """A node with a broker, and a client beside it."""

    def __init__(self, node: Node, client: Client, sink: KafkaSink) -> None:
        self.node, self.client, self.sink = node, client, sink

    @property
    def in_flight(self) -> int:
        assert self.node.engine is not None
        return self.node.engine.deliveries.in_flight

    @property
    def delivered(self) -> int:
        assert self.node.engine is not None
        return self.node.engine.deliveries.delivered


@pytest.fixture
def world(mainspring_url: str, mainspring_namespace: str, kafka: Broker) -> Callable[..., Any]:
    """Starts a node on the broker; settings may be added."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[World]:
        config = Config(
            **{"redis_url": mainspring_url, "namespace": mainspring_namespace, "kafka_url": kafka.url, **settings}
        )
        sinks = builtin_sinks(config)
        sink, node = sinks["kafka"], Node(config, sinks)
        assert isinstance(sink, KafkaSink)
        async with Client(mainspring_url, namespace=mainspring_namespace) as client:
            await node.start()
            try:
                yield World(node, client, sink)
            finally:
                await node.stop()

    return start


# -- what arrives ------------------------------------------------------------------------------------------------


async def test_a_task_arrives_with_key_headers_and_value_byte_for_byte(
    world: Callable[..., Any], kafka: Broker, topic: str, mainspring_namespace: str
) -> None:
    async with world() as running:
        given = await running.client.put(
            f"kafka:{topic}", {"item": "user1234"}, after="0.5s", id="a/b, c", lane="user1234"
        )
        plain = await running.client.put(f"kafka:{topic}", [1, "é"], after="0.1s")
        await until_settled(running.client.store, 2)
    by_id = {one.headers["id"]: one for one in read_topic(kafka.servers, topic)}
    assert set(by_id) == {"a/b, c", plain.id.partition("~")[0]}
    lane, bare = by_id["a/b, c"], by_id[plain.id.partition("~")[0]]
    assert (lane.key, lane.value) == ("user1234", '{"item":"user1234"}')
    assert lane.headers == {
        "idempotency-key": f"{mainspring_namespace}/user1234/a%2Fb%2C%20c/{given.due_ms}",
        "id": "a/b, c",
        "due": str(given.due_ms),
        "attempt": "1",
    }
    assert (bare.key, bare.value) == (bare.headers["id"], '[1,"é"]')
    assert bare.headers["idempotency-key"] == f"{mainspring_namespace}/{bare.key}/{plain.due_ms}"


async def test_raw_bytes_arrive_as_they_were_given(world: Callable[..., Any], kafka: Broker, topic: str) -> None:
    payload = bytes(range(256)) * 4
    async with world() as running:
        await running.client.put(f"kafka:{topic}", payload)
        await until_settled(running.client.store, 1)
    assert read_values(kafka.servers, topic) == payload


async def test_messages_arrive_once_and_never_before_they_are_due(
    world: Callable[..., Any], kafka: Broker, topic: str
) -> None:
    async with world() as running:
        start_ms = time.time_ns() // 1_000_000 + 500
        tasks = [Task(f"kafka:{topic}", number, at=start_ms + number) for number in range(2_000)]
        await running.client.put_many(tasks)
        await until_settled(running.client.store, 2_000)
    received = read_topic(kafka.servers, topic)
    assert sorted(int(one.value) for one in received) == list(range(2_000))
    assert [one for one in received if one.at_ms < int(one.headers["due"])] == []
    assert len({one.partition for one in received}) == 4


async def test_the_attempt_is_a_header_of_its_own_and_the_key_stays_the_same(kafka: Broker, topic: str) -> None:
    async with sinking(kafka) as sink:
        for attempt in (1, 2, 12):
            assert await sink.deliver([delivery(topic, "one", attempt=attempt)]) == [DONE]
    received = read_topic(kafka.servers, topic)
    assert sorted(int(one.headers["attempt"]) for one in received) == [1, 2, 12]
    assert len({one.headers["idempotency-key"] for one in received}) == 1


# -- topics ------------------------------------------------------------------------------------------------------


async def test_an_unknown_topic_is_reported_and_not_created_even_if_the_broker_would(kafka: Broker) -> None:
    name = f"missing{uuid4().hex[:6]}"
    async with sinking(kafka) as sink:
        [outcome] = await sink.deliver(some(name, 1))
    assert isinstance(outcome, Retry)
    assert name in outcome.reason
    assert "kafka_create_topics" in outcome.reason
    assert name not in topics_of(kafka.servers)


async def test_topics_that_the_settings_name_are_created_at_the_start(kafka: Broker) -> None:
    from confluent_kafka.admin import AdminClient

    name = f"t{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    async with sinking(kafka, create_topics=True, partitions=2, replication=1, topics=(name,)) as sink:
        sink.prepare()
        await until(lambda: name in admin.list_topics(timeout=WAIT_S).topics, "the topic")


async def test_a_missing_topic_is_created_if_the_settings_say_so(kafka: Broker) -> None:
    name = f"made{uuid4().hex[:6]}"
    async with sinking(kafka, create_topics=True, partitions=3, replication=1) as sink:
        assert await sink.deliver(some(name, 5)) == [DONE] * 5
    assert topics_of(kafka.servers)[name] == 3
    assert len(read_topic(kafka.servers, name)) == 5


async def test_a_name_no_topic_can_have_ends_with_the_dead_letters(kafka: Broker) -> None:
    async with sinking(kafka, create_topics=True) as sink:
        [outcome] = await sink.deliver(some("no such topic", 1))
    assert isinstance(outcome, Dead)


# -- sizes -------------------------------------------------------------------------------------------------------


async def test_one_message_too_large_dies_and_those_beside_it_arrive(kafka: Broker) -> None:
    """The broker refuses the whole request; only the one that is too large for itself is to blame."""
    topic = made_topic(kafka, max_message_bytes="2000")
    batch = [*some(topic, 50), delivery(topic, "large", b"x" * 5_000), delivery(topic, "last")]
    async with sinking(kafka, {"linger.ms": 50}) as sink:
        outcomes = await sink.deliver(batch)
    assert [one.id for one, outcome in zip(batch, outcomes, strict=True) if outcome != DONE] == ["large"]
    assert isinstance(outcomes[50], Dead)
    assert "max.message.bytes" in outcomes[50].reason
    assert {one.headers["id"] for one in read_topic(kafka.servers, topic)} == {one.id for one in batch} - {"large"}


async def test_one_of_many_plain_tasks_too_large_dies_and_all_others_arrive(
    world: Callable[..., Any], kafka: Broker
) -> None:
    """Plain tasks become messages many at a time: a failure among them is still of one."""
    topic = made_topic(kafka, max_message_bytes="20000")
    async with world() as running:
        tasks = [Task(f"kafka:{topic}", "x" * 30_000 if number == 700 else number) for number in range(1_500)]
        await running.client.put_many(tasks)
        books = await until_settled(running.client.store, len(tasks))
    assert (books.done, books.dead) == (len(tasks) - 1, 1)
    assert {int(one.value) for one in read_topic(kafka.servers, topic)} == set(range(1_500)) - {700}


async def test_a_message_larger_than_the_library_takes_dies(kafka: Broker, topic: str) -> None:
    async with sinking(kafka, {"message.max.bytes": 1_500}) as sink:
        outcomes = await sink.deliver([delivery(topic, "large", b"x" * 3_000), delivery(topic, "small")])
    assert isinstance(outcomes[0], Dead)
    assert outcomes[1] == DONE


async def test_a_failure_belongs_to_its_own_task_although_another_has_the_same_key(kafka: Broker, topic: str) -> None:
    batch = [delivery(topic, "same", b"x" * 3_000), delivery(topic, "other", b"y", lane="same")]
    async with sinking(kafka, {"message.max.bytes": 1_500}) as sink:
        outcomes = await sink.deliver(batch)
    assert isinstance(outcomes[0], Dead)
    assert outcomes[1] == DONE
    assert [(one.key, one.headers["id"]) for one in read_topic(kafka.servers, topic)] == [("same", "other")]


# -- trouble -----------------------------------------------------------------------------------------------------


def repeated_otherwise(received: list[Received]) -> list[str]:
    """Ids that arrived under two keys: receivers could not recognise these repeats."""
    keys: dict[str, set[str]] = {}
    for one in received:
        keys.setdefault(one.headers["id"], set()).add(one.headers["idempotency-key"])
    return [id for id, seen in keys.items() if len(seen) > 1]


async def test_a_broker_killed_under_load_loses_nothing(world: Callable[..., Any], kafka: Broker, topic: str) -> None:
    count = 8_000
    async with world() as running:
        start_ms = time.time_ns() // 1_000_000
        tasks = (Task(f"kafka:{topic}", number, at=start_ms + number // 2) for number in range(count))
        await running.client.put_many(tasks)
        await until(lambda: running.delivered > 2_000, "the load is under way")
        kafka.kill()
        at_kill = running.delivered
        await until(lambda: running.in_flight > 0, "tasks wait for the broker")
        await asyncio.to_thread(kafka.start)
        books = await until_settled(running.client.store, count)
    assert at_kill < count
    assert (books.done, books.dead) == (count, 0)
    received = read_topic(kafka.servers, topic)
    assert {int(one.value) for one in received} == set(range(count))
    assert repeated_otherwise(received) == []


async def test_memory_is_bounded_while_the_broker_is_unavailable(
    world: Callable[..., Any], kafka: Broker, topic: str
) -> None:
    count, room, queue = 5_000, 1_000, 300
    in_flight = room * 3 // 4  # the last quarter is kept for other receivers
    properties = Properties({"queue.buffering.max.messages": queue})
    async with world(concurrency=room, kafka=properties) as running:
        await running.client.put(f"kafka:{topic}", -1)
        await until_settled(running.client.store, 1)
        with paused(kafka):
            await running.client.put_many(Task(f"kafka:{topic}", number) for number in range(count))
            await until(
                lambda: running.in_flight == in_flight and running.sink.queued == queue, "all bounds are reached"
            )
            assert running.delivered == 1
        books = await until_settled(running.client.store, count + 1)
    assert books.dead == 0
    assert {int(one.value) for one in read_topic(kafka.servers, topic)} == set(range(-1, count))


async def test_a_node_that_starts_has_its_producer_before_the_first_task(
    world: Callable[..., Any], kafka: Broker, topic: str
) -> None:
    async with world() as running:
        assert running.sink.producers_made == 1
        await running.client.put(f"kafka:{topic}", 1)
        await until_settled(running.client.store, 1)
        assert running.sink.producers_made == 1
    assert [int(one.value) for one in read_topic(kafka.servers, topic)] == [1]


async def test_a_request_that_waits_too_long_comes_back_without_a_lost_attempt(kafka: Broker, topic: str) -> None:
    async with sinking(kafka, {"message.timeout.ms": 1_000}) as sink:
        # To reach the broker for the first time may itself take longer than that.
        while await sink.deliver(some(topic, 1)) != [DONE]:
            assert sink.producers_made == 1
        with paused(kafka):
            outcomes = await sink.deliver(some(topic, 3))
        assert [type(outcome) for outcome in outcomes] == [Retry] * 3
        assert all(isinstance(outcome, Retry) and outcome.untried for outcome in outcomes)


async def test_a_producer_that_lost_its_identity_is_replaced(kafka: Broker) -> None:
    """Told to leave no gaps, the library takes a refused message for the end: that producer never sends again."""
    topic = made_topic(kafka, max_message_bytes="2000")
    async with sinking(kafka, {"enable.gapless.guarantee": True}) as sink:
        assert await sink.deliver(some(topic, 1)) == [DONE]
        [outcome] = await sink.deliver([delivery(topic, "large", b"x" * 5_000)])
        assert isinstance(outcome, Dead)
        assert await sink.deliver(some(topic, 1)) == [DONE]
        assert sink.producers_made == 2


async def broken_under_load(sink: KafkaSink, narrow: str, wide: str) -> list[Outcome]:
    """Return the fates of the messages beside the one at which the producer breaks."""
    breaking = asyncio.create_task(sink.deliver([delivery(narrow, "large", b"x" * 5_000)]))
    beside = []
    while not breaking.done():
        beside.append(asyncio.create_task(sink.deliver(some(wide, 50))))
        await asyncio.sleep(0)
    return [outcome for one in beside for outcome in await one]


async def test_messages_of_a_broken_producer_come_back_without_a_lost_attempt(kafka: Broker) -> None:
    narrow, wide = made_topic(kafka, max_message_bytes="2000"), made_topic(kafka)
    async with sinking(kafka, {"enable.gapless.guarantee": True}) as sink:
        for topic in (narrow, wide):
            assert await sink.deliver(some(topic, 1)) == [DONE]
        failed: list[Outcome] = []
        while not failed:  # until some were with the producer when it broke
            failed = [outcome for outcome in await broken_under_load(sink, narrow, wide) if outcome != DONE]
        assert all(isinstance(outcome, Retry) and outcome.untried for outcome in failed), failed[0]
        assert await sink.deliver(some(wide, 1)) == [DONE]


async def test_a_stop_waits_for_the_broker_to_have_everything(
    world: Callable[..., Any], kafka: Broker, topic: str
) -> None:
    async with world() as running:
        await running.client.put_many(Task(f"kafka:{topic}", number) for number in range(5_000))
        await until(lambda: running.in_flight > 0, "some are on their way")
        await running.node.stop()
        books = await balance(running.client.store)
        assert books.fired == 0
        assert len(read_topic(kafka.servers, topic)) == books.done


# -- settings ----------------------------------------------------------------------------------------------------


def test_a_property_the_library_does_not_know_is_refused_at_once(kafka: Broker) -> None:
    with pytest.raises(ConfigError, match=r"\[kafka\].*no\.such\.property"):
        KafkaSink(KafkaOptions(kafka.url, Properties({"no.such.property": 1})))
