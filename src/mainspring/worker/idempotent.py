"""`@idempotent`: a handler that runs once for a task, however often the task is delivered.

What it promises, and what it cannot:

- After a run that returned, every further delivery of the same task answers with what that run returned, and the
  function is not called. That holds for as long as the record is kept.
- After a run that raised, the next attempt runs the function again: that is what retries are for.
- A process that dies in the middle leaves the record "begun". Nobody can know how far it came. The next delivery runs
  the function again, or, with `unsure="dead"`, ends as a dead letter that says so. Where the effect lies in a database
  of your own, write `current().idempotency_key` in the same transaction: only that closes the gap.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

from ..model.errors import InvalidInput, StoreError
from ..model.outcome import Dead, Retry
from ..model.times import Delay, delay_ms
from .context import CURRENT, Context
from .memory import Memory, Record, keepable

P = ParamSpec("P")
R = TypeVar("R")
Unsure = Literal["run", "dead"]

log = logging.getLogger("mainspring.worker")


@overload
def idempotent(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def idempotent(*, keep: Delay = "7d", unsure: Unsure = "run") -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def idempotent(function: Callable[..., Any] | None = None, /, *, keep: Delay = "7d", unsure: Unsure = "run") -> Any:
    """Run the handler once for each idempotency key; under `@scheduler.handler(…)`, above the function.

    With settings or without: `@idempotent(keep="1d")`, `@idempotent`.
    Called outside of a worker the function is just called. Answers are kept as msgpack: dataclasses come back as dicts.
    """
    keep_ms = delay_ms(keep, field="keep")
    if keep_ms <= 0 or unsure not in ("run", "dead"):
        raise InvalidInput("idempotent: keep must be longer than nothing, unsure one of run, dead")

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        once = _Once(keep_ms, unsure)
        if inspect.iscoroutinefunction(function):
            return cast("Callable[P, R]", once.in_loop(function))
        return once.in_thread(function)

    return wrap if function is None else wrap(function)


class _Once:
    def __init__(self, keep_ms: int, unsure: Unsure) -> None:
        self._keep_ms = keep_ms
        self._unsure = unsure

    def in_loop(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            context, memory = _where()
            if memory is None or context is None:
                return await function(*args, **kwargs)
            record = await memory.begin(context.job, self._keep_ms)
            if record is not None and self._known(context, record):
                return record.value
            try:
                value = await function(*args, **kwargs)
            except BaseException:
                with contextlib.suppress(StoreError):  # what it raised says more than that
                    await memory.forget(context.job)
                raise
            with self._containing(context):
                await self._keep(memory, context, value)
            return value

        return call

    def in_thread(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            context, memory = _where()
            if memory is None or context is None:
                return function(*args, **kwargs)
            record = memory.wait(memory.begin(context.job, self._keep_ms))
            if record is not None and self._known(context, record):
                return cast("R", record.value)
            try:
                value = function(*args, **kwargs)
            except BaseException:
                with contextlib.suppress(StoreError, TimeoutError):
                    memory.wait(memory.forget(context.job))
                raise
            with self._containing(context):
                memory.wait(self._keep(memory, context, value))
            return value

        return call

    def _known(self, context: Context, record: Record) -> bool:
        """True if it has run already. One that was begun and never ended is run again, or given up."""
        if record.done:
            context.log("has run already (attempt %d); its answer stands", record.attempt)
            return True
        if self._unsure == "dead":
            reason = f"attempt {record.attempt} was begun and never ended; nobody knows how far it came"
            raise Dead(reason, brief=reason)
        context.log("attempt %d was begun and never ended; it runs again", record.attempt)
        return False

    @contextlib.contextmanager
    def _containing(self, context: Context) -> Iterator[None]:
        """It has run. That the server could not be told so must not fail the run: it would run once more for that."""
        try:
            yield
        except (StoreError, TimeoutError) as error:
            log.warning("%s: that it has run could not be kept (%s); it counts only if the end of this run is told",
                        context.id, error, extra={"task": context.id})  # fmt: skip

    async def _keep(self, memory: Memory, context: Context, value: Any) -> None:
        if isinstance(value, (Retry, Dead)):
            await memory.forget(context.job)
            return
        if (reason := keepable(value)) is not None:
            log.warning("%s: its answer cannot be kept (%s); a repeat will answer None", context.id, reason)
            value = None
        await memory.end(context.job, value, self._keep_ms)


def _where() -> tuple[Context | None, Memory | None]:
    context = CURRENT.get(None)
    return context, None if context is None else context.memory
