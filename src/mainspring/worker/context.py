"""What a handler may know of the task it runs for."""

import logging
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from ..model.errors import MainspringError
from ..model.ids import idempotency_key
from ..model.job import Job
from ..model.texts import clean
from .memory import Memory

log = logging.getLogger("mainspring.handler")

MOST_LINES: Final = 200
LINE_CHARS: Final = 1_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Context:
    """One run of one task. A handler gets it by a parameter annotated `Context`, or from `current()`."""

    __slots__ = ("_job", "_lines", "_namespace", "cancelled", "memory")

    def __init__(self, namespace: str, job: Job, memory: Memory | None = None) -> None:
        self._namespace = namespace
        self.memory = memory
        """Where `@idempotent` keeps what has run; None where no server is at hand."""
        self._job = job
        self._lines: list[str] | None = None
        self.cancelled = False
        """Nobody wants the result any more: cancelled, out of time, or the worker stops. Ask in long loops."""

    @property
    def job(self) -> Job:
        return self._job

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at this task, and for no other task."""
        return idempotency_key(self._namespace, self._job.id, self._job.original_due_ms)

    @property
    def attempt(self) -> int:
        """1 for the first."""
        return self._job.body.attempt

    @property
    def target(self) -> str:
        return self._job.body.target

    @property
    def queue(self) -> str:
        return self._job.queue

    @property
    def lane(self) -> str | None:
        return self._job.body.lane

    @property
    def due(self) -> datetime:
        return _EPOCH + timedelta(milliseconds=self._job.due_ms)

    @property
    def original_due(self) -> datetime:
        """When the first attempt was due."""
        return _EPOCH + timedelta(milliseconds=self._job.original_due_ms)

    @property
    def errors(self) -> tuple[str, ...]:
        """Why the attempts before this one failed."""
        return self._job.body.errors

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines or ())

    def log(self, message: str, *args: Any) -> None:
        """Write a line to the log, and keep it with the end of this run (the first 200 of them)."""
        text = clean(str(message % args if args else message))
        log.info("%s: %s", self._job.id, text, extra={"task": self._job.id})
        if self._lines is None:
            self._lines = []
        if len(self._lines) < MOST_LINES:
            self._lines.append(text[:LINE_CHARS])


CURRENT: Final[ContextVar[Context]] = ContextVar("mainspring_context")


def current() -> Context:
    """The context of the run this code is part of, in coroutines and in threads."""
    try:
        return CURRENT.get()
    except LookupError:
        raise MainspringError("no task is being run here: current() is for handlers and what they call") from None
