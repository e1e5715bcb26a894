"""`log:`, one line per task on standard output: for a first try."""

import sys
from collections.abc import Sequence
from typing import IO

import msgspec

from ..model.delivery import Delivery
from ..model.outcome import DONE, Outcome


class LogSink:
    """Writes `{"id", "due", "attempt", "payload"}` as JSON lines."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout

    async def deliver(self, batch: Sequence[Delivery]) -> Sequence[Outcome]:
        lines = [
            msgspec.json.encode(
                {
                    "id": one.id,
                    "due_ms": one.due_ms,
                    "attempt": one.attempt,
                    "payload": one.value(),
                }
            ).decode()
            for one in batch
        ]
        self._stream.write("\n".join(lines) + "\n")
        self._stream.flush()
        return [DONE] * len(batch)

    async def aclose(self) -> None:
        """Nothing is held open."""
