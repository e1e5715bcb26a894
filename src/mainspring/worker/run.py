"""One job in the hands of this worker, from taken to ended."""

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from math import inf
from typing import Any, Final, Literal

from ..model.clock import steady_s
from ..model.errors import InvalidInput
from ..model.job import Job
from ..model.outcome import (
    DONE,
    DROPPED,
    EXPIRED,
    EXPIRED_RUNNING,
    Dead,
    Done,
    Outcome,
    Retry,
    as_ours,
    has_expired,
)
from ..model.result import Output
from ..model.texts import told
from ..model.wordless import placed
from .arguments import WrongArguments
from .context import Context
from .memory import Memory
from .work import Outputs, Work

Stop = Literal["timeout", "expired", "cancelled", "lost", "stale", "stopping"]
"""Why a run is told to end before it is done."""

_REASONS: Final = {"timeout": "timed out after {:g} s", "expired": EXPIRED_RUNNING}


_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple})


def _never_ran(value: Any) -> bool:
    """Work that was only made, and not done: what a function returned that should have been awaited or walked over."""
    if inspect.iscoroutine(value):
        value.close()  # else Python complains at the collection
    return inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value)


def end_if_forked(pid: int) -> None:
    """A handler that forks and lets the child come back would make a second worker on the same connections."""
    if os.getpid() != pid:
        os._exit(1)


class _TooLate(Exception):
    """It was told to end, or its expiry or its lease has passed, while it waited here for its turn."""


class Run:
    """Started once, over once. What a handler does after that is nobody's business."""

    __slots__ = (
        "begin_by",
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

    def __init__(
        self, job: Job, work: Work, namespace: str, taken: float, memory: Memory | None = None, *, begin_by: float = inf
    ) -> None:
        self.job = job
        self.taken = taken
        self.begin_by = begin_by
        """Until then (by `steady_s`) nobody else can have it, whatever became of this process since it asked for it."""
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
        if self.stopped is not None:
            # Asked once `started` is set, as who stops it asks for that once `stopped` is: one of both sees the other.
            # Else it would run although it is over, with nobody who counts it.
            raise _TooLate
        if steady_s() > self.begin_by:
            # This process, or the machine, stood still. Another may have run it to its end by now, and the next of its
            # lane may run.
            self.stopped = "stale"
            raise _TooLate
        if self.timeout_s is not None:
            self.deadline = started + self.timeout_s
        if self.job.body.expires_ms is not None:
            left_ms = self.job.body.expires_ms - now_ms()
            if left_ms < 0:
                raise _TooLate
            self.deadline = min(self.deadline, started + left_ms / 1000)
        return self.work.read(self.context)

    def answered(self, value: Any) -> None:
        """The function returned."""
        if isinstance(value, Output):
            self.output = value
            if self.stopped is not None:
                # Told to end, it did: that it said so with 0 does not mean that its work is done.
                self.outcome = self.late()
        elif self.stopped in ("timeout", "expired"):
            self.outcome = self.late()  # it was told to end, and has swallowed that
        elif isinstance(value, Done):
            self.outcome = value
        elif isinstance(value, (Retry, Dead)):
            self._said(value, f"{type(value).__name__}, returned by its handler")
        elif type(value) not in _PLAIN and _never_ran(value):
            kind = type(value).__name__
            self.failed(TypeError(f"the handler returned a {kind}, which nobody runs; declare it with async def"))
        else:
            self.value = value

    def failed(self, error: BaseException) -> None:
        """The function raised; of one that was told to stop, only that counts."""
        if isinstance(error, Outputs):
            self.output = error.output
        if self.stopped is not None:
            self.outcome = self.late()
        elif isinstance(error, _TooLate):
            self.outcome = Dead(EXPIRED)
        elif isinstance(error, Outputs):
            self.outcome = Retry(str(error), brief=error.brief)
        elif isinstance(error, (Retry, Dead)):
            self._said(error, placed(error))
        elif isinstance(error, WrongArguments):
            self.outcome = Dead(str(error), brief=f"its payload does not fit {self.job.body.target}")
        else:
            self.outcome = Retry(told(error), error=error, brief=placed(error))

    def _said(self, outcome: Retry | Dead, brief: str) -> None:
        """The handler has decided."""
        try:
            self.outcome = made = as_ours(outcome)
        except InvalidInput as error:
            self.outcome = Retry(told(error), error=error, brief=brief)
        else:
            made.brief = brief if made.brief is None else made.brief
            if has_expired(made.reason) or made.reason.startswith(DROPPED):
                made.reason = f"its handler says: {made.reason}"  # the bare words mean that it was not even run

    def late(self) -> Retry | Dead:
        """The outcome of a run that was stopped."""
        why = self.stopped or "timeout"
        reason = _REASONS.get(why, why).format(self.timeout_s or 0)
        if why == "expired":
            return Dead(reason)
        return Retry(reason, error=TimeoutError(reason) if why == "timeout" else None)
