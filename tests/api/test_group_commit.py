"""Group commit: which requests share a write, and that none is left waiting."""

import asyncio
from collections.abc import Sequence

import pytest

from mainspring.api.spaces import AT_ONCE, CROWD, Collector
from mainspring.model.errors import InvalidInput, Unavailable
from mainspring.model.task import Handle, Task


class NetworkFaults:
    """Writes that end on request."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self._ends: list[asyncio.Future[None]] = []

    async def write(self, tasks: Sequence[Task]) -> Sequence[Handle]:
        self.sent.append(len(tasks))
        self._ends.append(asyncio.get_running_loop().create_future())
        await self._ends[-1]
        return [Handle(str(task.payload), 0) for task in tasks]

    def end(self, number: int) -> None:
        self._ends[number].set_result(None)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def task(n: int) -> Task:
    return Task("log:", n)


async def test_a_single_request_does_not_wait() -> None:
    road = NetworkFaults()
    answer = Collector(road.write).put(task(1))
    await settle()
    assert road.sent == [1]
    road.end(0)
    assert (await answer).id == "1"


async def test_while_a_write_is_on_its_way_few_wait_and_a_crowd_begins_another() -> None:
    road = NetworkFaults()
    collector = Collector(road.write)
    collector.put(task(0))
    await settle()
    answers = [collector.put(task(n)) for n in range(CROWD - 1)]
    await settle()
    assert road.sent == [1], "so few wait for the first"
    answers.append(collector.put(task(CROWD - 1)))
    await settle()
    assert road.sent == [1, CROWD]
    more = [collector.put(task(n)) for n in range(2 * CROWD)]
    await settle()
    assert len(road.sent) == AT_ONCE, "and no more than that at once"
    road.end(1)
    await settle()
    assert [(await answer).id for answer in answers] == [str(n) for n in range(CROWD)]
    assert road.sent == [1, CROWD, 2 * CROWD]
    road.end(2)
    await asyncio.gather(*more)


@pytest.mark.parametrize(
    ("size", "parts"),
    [(CROWD - 1, 1), (2 * CROWD - 1, 1), (2 * CROWD, 2), (3 * CROWD, 3), (30 * CROWD + 1, 3)],
)
async def test_a_crowd_that_comes_together_is_written_in_parts_and_none_of_them_is_small(size: int, parts: int) -> None:
    road = NetworkFaults()
    collector = Collector(road.write)
    answers = [collector.put(task(n)) for n in range(size)]
    await settle()
    assert (sum(road.sent), len(road.sent)) == (size, parts)
    assert max(road.sent) - min(road.sent) <= 1
    for number in range(parts):
        road.end(number)
    assert [(await answer).id for answer in answers] == [str(n) for n in range(size)]


async def test_a_put_that_comes_the_moment_a_write_ends_is_not_left_waiting() -> None:
    road = NetworkFaults()
    collector = Collector(road.write)
    first = collector.put(task(1))
    second: list[asyncio.Future[Handle]] = []
    first.add_done_callback(lambda _: second.append(collector.put(task(2))))
    await settle()
    road.end(0)
    await settle()
    assert road.sent == [1, 1]
    road.end(1)
    assert (await second[0]).id == "2"


async def test_a_wrong_one_fails_alone_and_an_unavailable_server_fails_all() -> None:
    async def write(tasks: Sequence[Task]) -> Sequence[Handle]:
        if any(one.payload == "wrong" for one in tasks):
            raise InvalidInput("wrong")
        if any(one.payload == "away" for one in tasks):
            raise Unavailable("away", sent=False)
        return [Handle(str(one.payload), 0) for one in tasks]

    collector = Collector(write)
    good, wrong = collector.put(Task("log:", "good")), collector.put(Task("log:", "wrong"))
    assert (await good).id == "good"
    with pytest.raises(InvalidInput):
        await wrong
    both = [collector.put(Task("log:", name)) for name in ("good", "away")]
    for one in both:
        with pytest.raises(Unavailable):
            await one
