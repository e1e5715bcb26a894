"""`/v1/queues`: how much waits for workers, and how much they have in hand."""

from typing import Final

import msgspec

from ..model.pause import Pauses
from ..store.pauses import read_pauses
from ..store.queue_state import Depth, depths
from .asgi import Answer, answer
from .call import Call, no_such
from .routes import Route


class Queue(msgspec.Struct):
    """`oldest_ms` is when the task that waits longest was handed over; `paused` says that workers take none."""

    name: str
    ready: int
    running: int
    oldest_ms: int | None
    paused: bool


class QueueList(msgspec.Struct):
    queues: list[Queue]


async def list_queues(call: Call) -> Answer:
    return answer(QueueList(await _queues(call)))


async def get_queue(call: Call) -> Answer:
    name = call.params["name"]
    for one in await _queues(call):
        if one.name == name:
            return answer(one)
    raise no_such("queue", name)


async def _queues(call: Call) -> list[Queue]:
    store = call.client.store
    pauses = Pauses(await read_pauses(store), store.clock.now_ms())
    found = await depths(store)
    return [_told(name, depth, pauses) for name, depth in sorted(found.items()) if call.key.sees(f"queue:{name}/*")]


def _told(name: str, depth: Depth, pauses: Pauses) -> Queue:
    return Queue(name, depth.ready, depth.running, depth.oldest_ms, pauses.of_queue(name) is not None)


ROUTES: Final = (
    Route("GET", "/v1/queues", list_queues, "read", "Queues and how long they are.", answers={200: QueueList}),
    Route("GET", "/v1/queues/{name}", get_queue, "read", "One queue.", answers={200: Queue}),
)
