"""A task put by plain commands, as a program in another language would: nothing of ours is used to write it."""

import os
import struct
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from mainspring.client.client import Client
from mainspring.engine.engine import Engine
from mainspring.model.clock import ManualClock
from mainspring.model.delivery import DONE, Delivery, Outcome
from mainspring.store.store import Store
from mainspring.testing.servers import Kind, Server, standalone
from mainspring.testing.ticker import turn

NAMESPACE, PARTITIONS = "abroad", 4


class Recorder:
    def __init__(self) -> None:
        self.got: list[Delivery] = []

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        self.got += batch
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Nothing is held open."""


@pytest.fixture
def server(kind: Kind) -> Iterator[Server]:
    with standalone(kind) as started:
        yield started


@pytest.fixture
def stranger(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as connection:
        yield connection


@pytest.fixture
async def store(server: Server) -> AsyncIterator[Store]:
    made = await Store.open(server.url, namespace=NAMESPACE, partitions=PARTITIONS, clock=ManualClock())
    yield made
    await made.aclose()


def crc16(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def tag_of(partition: int) -> str:
    salt = 0
    low = partition * 16384 // PARTITIONS
    width = (partition + 1) * 16384 // PARTITIONS - low
    while True:
        tag = f"{NAMESPACE}:{partition}.{salt}"
        slot = crc16(tag.encode()) % 16384
        if low <= slot < low + max(width // 8, min(width, 32)):
            return tag
        salt += 1


def put_by_hand(stranger: redis.Redis, idh: bytes, due_ms: int, payload: bytes, *, flags: int = 0) -> str:
    """The transaction of docs/wire-format.md; returns the id under which clients find the task."""
    partition = crc16(idh) % PARTITIONS
    tag = tag_of(partition)
    start_ms = due_ms - due_ms % 1000
    slice_ = f"1000.{start_ms}"
    body = b"\x92\xa5null:\xc4" + bytes([len(payload)]) + payload
    entry = struct.pack(">IB", due_ms - start_ms, flags) + idh + body
    score = start_ms // 1000 + int.from_bytes(os.urandom(3), "big") % 2**20 / 2**20
    pipe = stranger.pipeline(transaction=True)
    pipe.zadd(f"{{{tag}}}:slices", {slice_: score}, nx=True)
    pipe.zscore(f"{{{tag}}}:slices", slice_)
    pipe.rpush(f"{{{tag}}}:s:{slice_}", entry)
    pipe.hincrby(f"{{{tag}}}:n", "accepted", 1)
    _, stored, length, *_ = pipe.execute()
    stranger.spublish(f"{{{tag}}}:wake", "1")
    r = round(float(stored) % 1 * 2**20)
    return f"{idh.hex()}~{'.'.join(map(base36, (partition, 1000, start_ms, r, length - 1)))}"


def base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return (base36(number // 36) if number >= 36 else "") + digits[number % 36]


def engine_of(store: Store) -> tuple[Engine, Recorder]:
    sink = Recorder()
    return Engine(store, {"null": sink}), sink


async def test_a_task_written_by_hand_fires_at_its_time(store: Store, stranger: redis.Redis) -> None:
    engine, sink = engine_of(store)
    clock = store.clock
    assert isinstance(clock, ManualClock)
    due_ms = clock.now_ms() + 1_234
    idhs = [os.urandom(16) for _ in range(20)]
    ids = [put_by_hand(stranger, idh, due_ms, b'{"n":%d}' % n) for n, idh in enumerate(idhs)]
    client = Client.over(store)
    for n, task_id in enumerate(ids):
        info = await client.get(task_id)
        assert (info.state, info.due_ms, info.payload) == ("pending", due_ms, {"n": n})
    clock.set(due_ms - 1)
    await turn(engine)
    assert sink.got == []
    clock.set(due_ms)
    await turn(engine)
    assert sorted((one.idh, one.value()["n"]) for one in sink.got) == sorted(zip(idhs, range(20), strict=True))
    assert {one.idempotency_key for one in sink.got} == {f"{NAMESPACE}/{idh.hex()}/{due_ms}" for idh in idhs}
    assert [(await client.get(task_id)).state for task_id in ids] == ["done"] * 20


async def test_a_task_written_by_hand_can_be_cancelled(store: Store, stranger: redis.Redis) -> None:
    engine, sink = engine_of(store)
    clock = store.clock
    assert isinstance(clock, ManualClock)
    task_id = put_by_hand(stranger, os.urandom(16), clock.now_ms() + 500, b"null")
    client = Client.over(store)
    assert await client.cancel(task_id) == "cancelled"
    clock.advance(seconds=1)
    await turn(engine)
    assert sink.got == []


async def test_a_task_sent_again_by_hand_is_one_task(store: Store, stranger: redis.Redis) -> None:
    engine, sink = engine_of(store)
    clock = store.clock
    assert isinstance(clock, ManualClock)
    idh, due_ms = os.urandom(16), clock.now_ms() + 500
    put_by_hand(stranger, idh, due_ms, b"null")
    put_by_hand(stranger, idh, due_ms, b"null", flags=4)
    clock.advance(seconds=1)
    await turn(engine)
    assert [one.idh for one in sink.got] == [idh]
    assert (await Client.over(store).count()).pending == 0
