"""Looks for the times of schedules where a search may be long: in a thread, so that the event loop goes on."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..model.schedule import Definition

T = TypeVar("T")


async def searched(definitions: Iterable[Definition | None], search: Callable[[], T]) -> T:
    """What the search for times of these schedules finds.

    Where times are excluded it may take half a second to find the next one, or that there is none. Of all others it is
    found at once, and a thread would cost more: very many may be due in the same second."""
    if any(one is not None and one.exclude for one in definitions):
        return await asyncio.to_thread(search)
    return search()
