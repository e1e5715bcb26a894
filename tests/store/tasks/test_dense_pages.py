"""Pages over slices that hold very much: the same order and cursors, read little by little."""

import random

from mainspring.client.client import Client
from mainspring.model.delivery import Body
from mainspring.model.task import Task
from mainspring.store.codec import INDEXED, RESENT, entry
from mainspring.store.keys import Slice
from mainspring.store.store import Store
from mainspring.store.tasks.pages import AT_ONCE_ROWS, CHUNK_ROWS
from mainspring.store.tasks.put import fresh_score
from mainspring.testing.faults import NetworkFaults, bad_road
from tests.support.owner import HandOwner
from tests.support.paging import payloads, reads_in


def asked_for(road: NetworkFaults) -> list[int]:
    """How many entries each trip may have brought; no read asks for more than a chunk."""
    trips = []
    for _, commands in road.trips:
        reads = reads_in(commands)
        assert all(0 < read.rows <= CHUNK_ROWS for read in reads)
        trips.append(sum(read.rows for read in reads))
    assert any(trips)
    return trips


async def write(store: Store, place: Slice, rows: list[bytes]) -> HandOwner:
    owner = HandOwner(store, 0, b"")
    await owner.raw("ZADD", owner.keys.slices, fresh_score(place), place.name)
    await owner.raw("RPUSH", owner.keys.entries(place.name), *rows)
    await owner.raw("HINCRBY", owner.keys.n, "accepted", len(rows))
    return owner


def row(offset_ms: int, n: int, flags: int = 0) -> bytes:
    return entry(offset_ms, flags, n.to_bytes(16, "big"), Body("log:", b"%d" % n))


async def test_a_dense_slice_is_shown_whole_and_in_order_and_read_in_chunks(client: Client, store: Store) -> None:
    place = Slice.at(store.clock.now_ms() + 60_000, 1000)
    seed = random.Random(7)
    offsets = [seed.randrange(40) for _ in range(5 * CHUNK_ROWS + 13)]
    await write(store, place, [row(offset_ms, n) for n, offset_ms in enumerate(offsets)])
    expected = sorted(range(len(offsets)), key=lambda n: (offsets[n], n))
    with bad_road(store) as road:
        assert await payloads(client, limit=900) == expected
    assert max(asked_for(road)) <= AT_ONCE_ROWS


async def test_settled_tasks_of_any_chunk_are_left_out(client: Client, store: Store) -> None:
    place = Slice.at(store.clock.now_ms() + 60_000, 1000)
    count = 3 * CHUNK_ROWS
    owner = await write(store, place, [row(count - n & 511, n) for n in range(count)])
    gone = range(5, count, 7)
    cancelled = bytearray(count // 8)
    for n in gone:
        cancelled[n >> 3] |= 0x80 >> (n & 7)
    await owner.raw("SET", owner.keys.slice_keys(place.name)[3], bytes(cancelled))
    await owner.raw("HINCRBY", owner.keys.n, "cancelled", len(gone))
    left = [n for n in range(count) if n not in gone]
    assert await payloads(client, limit=1_000) == sorted(left, key=lambda n: (count - n & 511, n))


async def test_copies_in_different_chunks_are_one_task(client: Client, store: Store) -> None:
    """Whichever came first stands for the task, and is named by its last copy."""
    place = Slice.at(store.clock.now_ms() + 60_000, 1000)
    rows = [row(500, n) for n in range(3 * CHUNK_ROWS)]
    late, early, retried = 2 * CHUNK_ROWS + 5, CHUNK_ROWS + 9, CHUNK_ROWS + 11
    rows[3] = row(0, 77_777)
    rows[late] = row(0, 77_777, RESENT)
    rows[4] = row(1, 88_888, RESENT)
    rows[early] = row(1, 88_888)
    rows[retried] = row(2, 77_777, INDEXED)
    await write(store, place, rows)
    page = await client.list(limit=4)
    assert [task.payload for task in page.tasks] == [77_777, 88_888, 77_777, 0]
    places = [int(task.id.rsplit(".", 1)[1], 36) for task in page.tasks]
    assert places == [late, 4, retried, 0]
    assert len(await payloads(client, limit=1_000)) == len(rows) - 2


async def test_dense_and_thin_slices_are_merged_in_due_order(client: Client, store: Store) -> None:
    now_ms = store.clock.now_ms()
    due = [now_ms + 5_000 + n % 3 for n in range(6_000)] + [now_ms + 1_000 + n * 100 for n in range(100)]
    await client.put_many(Task("log:", n, at=at_ms) for n, at_ms in enumerate(due))
    with bad_road(store) as road:
        shown = [int(str(n)) for n in await payloads(client, limit=1_000)]
    assert sorted(shown) == list(range(len(due)))
    assert [due[n] for n in shown] == sorted(due)
    assert max(asked_for(road)) <= AT_ONCE_ROWS * 2
