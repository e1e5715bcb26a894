"""Batches of bulk puts: bounded by number and by what their payloads take."""

from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from mainspring.client.client import BATCH, BATCH_BYTES, batches
from mainspring.model.errors import InvalidInput
from mainspring.model.task import Task

LARGE = 60_000
TASKS = 2_000

Kinds = dict[str, Callable[[int], object]]
KINDS: Kinds = {
    "text": lambda size: "x" * size,
    "bytes": bytes,
    "JSON": lambda size: {"text": ["x" * (size - 13)]},
}


async def streamed(tasks: Iterable[Task]) -> AsyncIterator[Task]:
    for task in tasks:
        yield task


def tasks(payloads: Iterable[object]) -> list[Task]:
    return [Task("log:", payload, at=10**12) for payload in payloads]


@pytest.mark.parametrize("source", [list, iter, streamed])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_batch_of_large_payloads_is_cut_by_their_bytes(
    source: Callable[[list[Task]], Iterable[Task] | AsyncIterator[Task]], kind: str
) -> None:
    given = tasks([KINDS[kind](LARGE)] * TASKS)
    found = [batch async for batch in batches(source(given))]
    assert [task for batch in found for task in batch] == given
    assert all(BATCH_BYTES / 2 < len(batch) * LARGE < BATCH_BYTES * 2.5 for batch in found[:-1])
    assert len(found) > 5


@pytest.mark.parametrize("source", [list, iter, streamed])
async def test_small_tasks_fill_batches(
    source: Callable[[list[Task]], Iterable[Task] | AsyncIterator[Task]],
) -> None:
    given = tasks(range(2 * BATCH + 5))
    assert [len(batch) async for batch in batches(source(given))] == [BATCH, BATCH, 5]


async def test_payloads_that_grow_on_the_way_are_noticed() -> None:
    given = tasks([1] * 8_000 + ["x" * LARGE] * TASKS)
    found = [batch async for batch in batches(given)]
    most = max(sum(len(task.payload) for task in batch if task.payload != 1) for batch in found)
    assert most < BATCH_BYTES * 2.5
    assert sum(map(len, found)) == len(given)


async def test_a_payload_of_unknown_size_does_not_end_a_batch() -> None:
    given = tasks([{1, 2}, object(), float("nan")])
    assert [batch async for batch in batches(given)] == [given]


async def test_an_item_that_is_no_task_is_refused_after_the_tasks_before_it() -> None:
    given = batches([*tasks(range(BATCH)), 5])  # type: ignore[list-item]
    assert len(await anext(given)) == BATCH
    with pytest.raises(InvalidInput, match="takes Task objects; this is of type int"):
        await anext(given)
