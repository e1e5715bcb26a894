"""Three brokers, some of which are lost: with two in sync writes continue, with one they wait."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from mainspring import Client, Task
from mainspring.config.config import Config
from mainspring.node.node import Node
from mainspring.store.store import Store
from mainspring.testing.balance import balance
from mainspring.testing.kafka import Brokers, brokers
from tests.support.kafka_topics import need_kafka, read_topic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WAIT_S = 120
TOPIC = "orders"


@pytest.fixture
def kafka() -> Iterator[Brokers]:
    need_kafka()
    with brokers(3) as started:
        yield started


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Node]:
    node = Node(config)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def until_done(store: Store, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await balance(store)).done < count:  # noqa: ASYNC110  # only the server knows
            await asyncio.sleep(0.1)


async def until_in_flight(node: Node, count: int) -> None:
    assert node.engine is not None
    async with asyncio.timeout(WAIT_S):
        while node.engine.deliveries.in_flight < count:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.02)


async def test_writes_succeed_without_one_of_three_and_wait_without_two(
    kafka: Brokers, mainspring_url: str, mainspring_namespace: str
) -> None:
    config = Config(
        redis_url=mainspring_url,
        namespace=mainspring_namespace,
        kafka_url=kafka.url,
        kafka_create_topics=True,
        kafka_topic_partitions=6,
        kafka_topic_replication=3,
    )
    async with Client(mainspring_url, namespace=mainspring_namespace) as client, running(config) as node:

        async def put(first: int, last: int) -> None:
            await client.put_many(Task(f"kafka:{TOPIC}", number) for number in range(first, last))

        await put(0, 500)
        await until_done(client.store, 500)

        kafka[0].kill()
        await put(500, 1_500)
        await until_done(client.store, 1_500)

        kafka[1].kill()
        await put(1_500, 2_000)
        await until_in_flight(node, 500)
        held = await balance(client.store)
        assert (held.done, held.dead) == (1_500, 0)  # one replica is not enough: nothing counts as delivered

        kafka[0].launch()
        await until_done(client.store, 2_000)
        kafka[0].wait_ready(2)
    received = read_topic(f"{kafka[0].servers},{kafka[2].servers}", TOPIC)
    assert {int(one.value) for one in received} == set(range(2_000))
    keys = {(one.headers["id"], one.headers["idempotency-key"]) for one in received}
    assert len(keys) == 2_000
