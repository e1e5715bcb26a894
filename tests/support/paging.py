"""All pages of a list, one after the other."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from mainspring.client.client import Client
from mainspring.model.task import TaskInfo
from mainspring.store.redis.connection import RedisCommand
from mainspring.testing.faults import NetworkFaults, calls


async def pages(client: Client, **options: Any) -> AsyncIterator[list[TaskInfo]]:
    page = await client.list(**options)
    yield page.tasks
    while page.next is not None:
        page = await client.list(**options, cursor=page.next)
        yield page.tasks


async def payloads(client: Client, **options: Any) -> list[Any]:
    return [task.payload async for some in pages(client, **options) for task in some]


class SliceRead(NamedTuple):
    """The reads of one slice for a page."""

    key: str
    first: int
    rows: int


def reads_in(commands: Sequence[RedisCommand]) -> list[SliceRead]:
    asks = calls("heads")
    return [SliceRead(str(one[3]), int(one[4]), int(one[5])) for one in commands if asks([one])]


def reads(road: NetworkFaults) -> list[SliceRead]:
    return [read for _, commands in road.trips for read in reads_in(commands)]
