"""`bench sinks`: what reaches a real target through the engine, beside the same library in a plain loop.

One module a kind of target, `sink_<kind>.py`, with one function that is entered below.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from ..model.errors import InvalidInput
from .ground import Where
from .life import Progress
from .sink_figures import SinkFigures
from .sink_http import http
from .sink_kafka import kafka
from .sink_queue import queue

Part = Callable[[Where, int, int, Progress], Awaitable[msgspec.Struct]]
"""Where, how many tasks, how many rounds."""

PARTS: Final[dict[str, Part]] = {"kafka": kafka, "http": http, "queue": queue}

__all__ = ["PARTS", "SinkFigures", "sinks"]


async def sinks(
    where: Where, only: Sequence[str], tasks: int, rounds: int, progress: Progress
) -> dict[str, msgspec.Struct]:
    """Measure each kind, or only those named."""
    if unknown := set(only) - set(PARTS):
        raise InvalidInput(f"--only {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return {name: await part(where, tasks, rounds, progress) for name, part in PARTS.items() if name in (only or PARTS)}
