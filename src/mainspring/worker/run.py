"""One job in the hands of this worker, from taken to ended."""

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any, Final, Literal

from ..model.job import Job
from ..model.outcome import DONE, Dead, Done, Outcome, Retry
from ..model.result import Output
from ..model.texts import told
from .arguments import WrongArguments
from .context import Context
from .memory import Memory
from .work import Outputs, Work

Stop = Literal["timeout", "expired", "cancelled", "lost", "stopping"]
"""Why a run is told to end before it is done."""

_REASONS: Final = {"timeout": "timed out after {:g} s", "expired": "its expiry passed while it ran"}


class Run:
    """Started once, over once. What a handler does after that is nobody's business."""

    __slots__ = (
        "context",
        "deadline",
        "job",
        "outcome",
        "output",
        "over",
        "started",
        "stopped",
        "taken",
        "task",
        "timeout_s",
        "value",
        "work",
    )

    def __init__(self, job: Job, work: Work, namespace: str, taken: float, memory: Memory | None = None) -> None:
        self.job = job
        self.taken = taken
        self.work = work
        self.context = Context(namespace, job, memory)
        self.started = 0.0
        own_ms = job.body.timeout_ms
        self.timeout_s = work.timeout_s if own_ms is None else own_ms / 1000
        """The task's own goes before its handler's."""
        self.deadline = inf
        self.stopped: Stop | None = None
        self.task: asyncio.Task[None] | None = None
        """Where a coroutine runs now."""
        self.over = False
        self.outcome: Outcome = DONE
        self.value: Any = None
        self.output: Output | None = None

    def start(self, now_ms: Callable[[], int]) -> dict[str, Any]:
        """Arguments for the function; from here on its time counts."""
        self.started = started = time.monotonic()
        if self.timeout_s is not None:
            self.deadline = started + self.timeout_s
        if self.job.body.expires_ms is not None:
            self.deadline = min(self.deadline, started + (self.job.body.expires_ms - now_ms()) / 1000)
        return self.work.read(self.context)

    def answered(self, value: Any) -> None:
        """The function returned."""
        if isinstance(value, Output):
            self.output = value
            if self.stopped is not None:
                # Told to end, it did: that it said so with 0 does not mean that its work is done.
                self.outcome = self.late()
        elif isinstance(value, (Done, Retry, Dead)):
            self.outcome = value
        else:
            self.value = value

    def failed(self, error: BaseException) -> None:
        """The function raised; of one that was told to stop, only that counts."""
        if isinstance(error, Outputs):
            self.output = error.output
        if self.stopped is not None:
            self.outcome = self.late()
        elif isinstance(error, Outputs):
            self.outcome = Retry(str(error))
        elif isinstance(error, (Retry, Dead)):
            self.outcome = error
        elif isinstance(error, WrongArguments):
            self.outcome = Dead(str(error))
        else:
            self.outcome = Retry(told(error), error=error)

    def late(self) -> Retry | Dead:
        """The outcome of a run that was stopped."""
        why = self.stopped or "timeout"
        reason = _REASONS.get(why, why).format(self.timeout_s or 0)
        if why == "expired":
            return Dead(reason)
        return Retry(reason, error=TimeoutError(reason) if why == "timeout" else None)
