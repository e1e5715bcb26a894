"""Looks for the times of schedules where a search may be long: in a thread, so that the event loop goes on."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ..model.clock import steady_s
from ..model.schedule import Definition

T = TypeVar("T")
W = TypeVar("W")


def may_be_long(definition: Definition | None) -> bool:
    """Where times are excluded it may take half a second to find the next one, or that there is none; and of several
    specs together those that were missed can only be counted one by one."""
    return definition is not None and (bool(definition.exclude) or len(definition.specs) > 1)


async def searched(definitions: Iterable[Definition | None], search: Callable[[], T]) -> T:
    """What the search for times of these schedules finds.

    Of most it is found at once, and a thread would cost more: very many may be due in the same second."""
    if any(map(may_be_long, definitions)):
        return await asyncio.to_thread(search)
    return search()


def found_in_time(work: Sequence[W], search: Callable[[W], T], limit_s: float) -> list[T]:
    """What is found of the first of these, as far as the time goes; of one at the least."""
    found, until = [], steady_s() + limit_s
    for one in work:
        found.append(search(one))
        if steady_s() >= until:
            break
    return found
