"""One batch on its way through the queue of a host, and how fast such queues move."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ..model.delivery import Delivery
from ..model.outcome import Outcome, Retry

_MEASURE_S: Final = 1.0
_UNANSWERED: Final = Retry("no outcome was noted")

Send = Callable[[Delivery], Awaitable[Outcome]]


class Load:
    """One batch: `next` to `end` is still to be begun."""

    __slots__ = ("_left", "batch", "end", "finished", "next", "outcomes", "send")

    def __init__(self, batch: Sequence[Delivery], send: Send) -> None:
        self.batch = batch
        self.send = send
        self.outcomes: list[Outcome] = [_UNANSWERED] * len(batch)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.next = 0
        self.end = self._left = len(batch)

    def settle(self, at: int, outcome: Outcome) -> None:
        self.outcomes[at] = outcome
        self._finish(1)

    def leave_out(self, first: int, put_off: Callable[[], Retry]) -> None:
        """Everything from `first` on is not begun."""
        left_out, self.end = self.end - first, first
        for at in range(first, first + left_out):
            self.outcomes[at] = put_off()
        self._finish(left_out)

    def fail(self, error: BaseException) -> None:
        if self.finished.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.finished.cancel()
        else:
            self.finished.set_exception(error)

    def _finish(self, count: int) -> None:
        self._left -= count
        if self._left == 0 and not self.finished.done():
            self.finished.set_result(None)


class Pulse:
    """How many a second are taken, measured over the last second or so of work."""

    def __init__(self, first_guess: float) -> None:
        self._rate = first_guess
        self._since = time.monotonic()
        self._beats = 0

    def beat(self) -> None:
        self._beats += 1
        self._measure()

    def rate(self) -> float:
        self._measure()
        return max(self._rate, 0.1)

    def _measure(self) -> None:
        elapsed = time.monotonic() - self._since
        if elapsed >= _MEASURE_S:
            self._rate = (self._rate + self._beats / elapsed) / 2
            self._since += elapsed
            self._beats = 0
