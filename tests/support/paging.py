"""All pages of a list, one after the other."""

from collections.abc import AsyncIterator
from typing import Any

from mainspring.client.client import Client
from mainspring.model.task import TaskInfo


async def pages(client: Client, **options: Any) -> AsyncIterator[list[TaskInfo]]:
    page = await client.list(**options)
    yield page.tasks
    while page.next is not None:
        page = await client.list(**options, cursor=page.next)
        yield page.tasks


async def payloads(client: Client, **options: Any) -> list[Any]:
    return [task.payload async for some in pages(client, **options) for task in some]
