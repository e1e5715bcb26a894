"""Tasks that only stand there: what is pending while something else is measured."""

from collections.abc import Callable, Iterator
from typing import Final

from ..client import Client
from ..model.task import Task
from .load import TARGET, payload_texts

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
YEAR_MS: Final = 365 * DAY_MS

_STRIDE: Final = 2_654_435_761
"""Odd and large: consecutive numbers fall all over the range."""


def over_a_year(now_ms: int, number: int) -> int:
    return now_ms + 2 * HOUR_MS + number * _STRIDE % YEAR_MS


_RANGES: Final = ((10 * MINUTE_MS, HOUR_MS), (HOUR_MS, DAY_MS), (DAY_MS, 30 * DAY_MS), (DAY_MS, YEAR_MS))


def mixed(now_ms: int, number: int) -> int:
    """A quarter each within the hour, the day, the month and the year."""
    low, high = _RANGES[number % 4]
    return now_ms + low + number * _STRIDE % (high - low)


async def add(
    client: Client,
    numbers: range,
    due_ms: Callable[[int, int], int],
    *,
    payload_bytes: int = 48,
    progress: Callable[[int], None],
) -> None:
    now_ms = client.store.clock.now_ms()

    def tasks() -> Iterator[Task]:
        texts = payload_texts(numbers.start, numbers.stop, payload_bytes)
        for number, text in zip(numbers, texts, strict=True):
            yield Task(TARGET, text, due_ms(now_ms, number))

    await client.put_many(tasks(), progress=progress)
