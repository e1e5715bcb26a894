"""Ids, lanes and targets of a subclass of `str`, as enums and some libraries give them, count as what they say."""

from enum import Enum
from typing import Any

import pytest

from mainspring.client.client import Client
from mainspring.model.task import Task
from mainspring.testing.ticker import Ticker


class Text(str):
    __slots__ = ()


class Named(str, Enum):  # noqa: UP042 - that is the point
    """Its `str()` is another text than its value."""

    IT = "log:it"


ODD = [Text("log:it"), Named.IT]


@pytest.mark.parametrize("odd", ODD, ids=["subclass", "enum"])
@pytest.mark.parametrize("field", ["target", "id", "lane"])
@pytest.mark.parametrize("more", [{}, {"expires": "1h"}, {"id": "other"}], ids=["plain", "with expiry", "with an id"])
async def test_a_subclass_of_text_is_taken_as_plain_text(
    client: Client, field: str, odd: str, more: dict[str, Any]
) -> None:
    given = {"target": "log:", "after": "1m", **more, field: odd}
    handle = await client.put(given.pop("target"), **given)
    assert type(handle.id) is str
    task = await client.get(handle.id, lane=given.get("lane"))
    assert task.state == "pending"
    assert getattr(task, field) == "log:it"
    assert await client.cancel(handle.id, lane=given.get("lane")) == "cancelled"


async def test_a_subclass_of_text_makes_the_same_task(ticker: Ticker) -> None:
    client = ticker.client
    await client.put_many(Task("log:", n, after="1s", id=id) for n, id in enumerate(["log:it", *ODD]))
    assert (await client.count()).pending == 1
    assert (await client.get(Text("log:it"))).state == "pending"
    assert len(await ticker.advance(seconds=5)) == 1


async def test_schedules_take_subclasses_of_text_too(client: Client) -> None:
    await client.schedules.add(Text("nightly"), cron="0 3 * * *", target=Named.IT, lane=Text("lane"))
    view = await client.schedules.get("nightly")
    assert view is not None
    found = view.definition
    assert (found.name, found.target, found.lane) == ("nightly", "log:it", "lane")
