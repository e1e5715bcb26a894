"""What handlers use: the context of the task they run for, and `@idempotent`, which runs a task once."""

import asyncio
import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context as Variables
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar, cast, overload

import msgspec

from ..model.delivery import Dead, Retry
from ..model.errors import InvalidInput, MainspringError, StoreError
from ..model.ids import idempotency_key
from ..model.job import Job
from ..model.text import clean, describe
from ..model.times import Delay, delay_ms
from ..store import records

if TYPE_CHECKING:
    from ..store.store import Store

handler_log = logging.getLogger("mainspring.handler")

log = logging.getLogger("mainspring.worker")


T = TypeVar("T")
LOOP_TIMEOUT_S: Final = 30.0
PUBLISH_EVERY_S: Final = 0.5
PUBLISHED_CHARS: Final = 16_384
"""Most text of a job that is published at once; of more the end."""
_MOST_TEXTS: Final = 256


class Record(msgspec.Struct, array_like=True, frozen=True):
    """Record of a run; `done` is False from when the handler begins until its return value is stored."""

    done: bool
    attempt: int
    value: Any = None
    """The handler's return value; until it has returned, the claim of the run that has begun."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Record).decode


class Memory:
    """Stores records of `@idempotent` handlers. Made within the event loop of a worker."""

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._written: weakref.WeakKeyDictionary[Context, list[str]] = weakref.WeakKeyDictionary()
        """Text of running jobs that followers have not been sent yet."""
        self._shown: weakref.WeakSet[Context] = weakref.WeakSet()
        """Running jobs of which followers have been sent something."""
        self._publishing: asyncio.Task[None] | None = None

    def publish(self, context: "Context", text: str) -> None:
        """Show followers of a running job what it has written; any thread may call it.

        A job that is over within half a second publishes nothing: its record has it all.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker ends
            # Not in the run's own variables: what publishes would keep its context alive.
            self._loop.call_soon_threadsafe(self._take, context, text[-PUBLISHED_CHARS:], context=Variables())

    def _take(self, context: "Context", text: str) -> None:
        texts = self._written.setdefault(context, [])
        texts.append(text)
        if len(texts) >= _MOST_TEXTS:  # a program may print a gigabyte in half a second
            texts[:] = ["".join(texts)[-PUBLISHED_CHARS:]]
        if self._publishing is None or self._publishing.done():
            self._publishing = self._loop.create_task(self._publish())

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            # A run that is over is gone from here.
            written = list(self._written.items())
            self._written.clear()
            if not written:
                return
            await self._send(written)

    async def _send(self, written: list[tuple["Context", list[str]]]) -> None:
        from ..store.runs import publish_logs  # here: a program that only declares handlers needs no connection

        self._shown.update(context for context, _ in written)
        logs = [(one.job.partition, one.job.idh, "".join(texts)[-PUBLISHED_CHARS:]) for one, texts in written]
        await publish_logs(self._store, logs)

    def publish_rest(self, context: "Context") -> None:
        """Show followers the end of what a job has written, if they were shown its beginning; call it in a thread."""
        if context in self._shown:
            with contextlib.suppress(StoreError, TimeoutError):
                self.wait(self._send_rest(context))

    async def _send_rest(self, context: "Context") -> None:
        # In the loop, after all that the thread has published: that is on its way there.
        if texts := self._written.pop(context, None):
            await self._send([(context, texts)])

    async def begin(self, job: Job, keep_ms: int) -> Record | None:
        """Record that a run begins; return the record of an earlier run, or None."""
        found = await records.begin_once(self._store, job, _mark(job), keep_ms)
        return None if found is None else _decode(found)

    async def end(self, job: Job, value: Any, keep_ms: int) -> None:
        await records.end_once(self._store, job, _encode(Record(True, job.body.attempt, value)), keep_ms)

    async def forget(self, job: Job) -> None:
        """Delete the record of a failed run, so that the next attempt finds none."""
        await records.forget_once(self._store, job, _mark(job))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the worker's event loop from a thread, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LOOP_TIMEOUT_S)


def _mark(job: Job) -> bytes:
    return _encode(Record(False, job.body.attempt, job.claim))


def keepable(value: Any) -> str | None:
    """Return why a value cannot be stored; None if it can."""
    try:
        _encode(value)
    except BaseException as error:  # noqa: BLE001  # attributes of the value run the application's code
        return describe(error)
    return None


MOST_LINES: Final = 200
LINE_CHARS: Final = 1_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Context:
    """One run of one task. A handler receives it in a parameter annotated `Context`, or from `current()`."""

    __slots__ = ("__weakref__", "_job", "_lines", "_namespace", "cancelled", "memory")

    def __init__(self, namespace: str, job: Job, memory: Memory | None = None) -> None:
        self._namespace = namespace
        self.memory = memory
        """Where `@idempotent` stores its records; None if no server is available."""
        self._job = job
        self._lines: list[str] | None = None
        self.cancelled = False
        """True once the result is no longer wanted: cancelled, timed out, or the worker stops. Check it in loops."""

    @property
    def job(self) -> Job:
        """The task as the worker holds it, for tools."""
        return self._job

    @property
    def namespace(self) -> str:
        """The namespace of the task."""
        return self._namespace

    @property
    def id(self) -> str:
        """The task's id: the caller's, or 32 hex digits."""
        return self._job.id

    @property
    def idempotency_key(self) -> str:
        """The key that all attempts at this task share, and no other task has."""
        return idempotency_key(self._namespace, self._job.id, self._job.original_due_ms, self._job.body.key_lane)

    @property
    def attempt(self) -> int:
        """Number of this attempt; the first is 1."""
        return self._job.body.attempt

    @property
    def target(self) -> str:
        """The task's target, such as `queue:mail/send`."""
        return self._job.body.target

    @property
    def queue(self) -> str:
        """The queue it came from."""
        return self._job.queue

    @property
    def lane(self) -> str | None:
        """The task's lane, or None."""
        return self._job.body.lane

    @property
    def due(self) -> datetime:
        """When this attempt was due, in UTC."""
        return _EPOCH + timedelta(milliseconds=self._job.due_ms)

    @property
    def original_due(self) -> datetime:
        """When the first attempt was due."""
        return _EPOCH + timedelta(milliseconds=self._job.original_due_ms)

    @property
    def errors(self) -> tuple[str, ...]:
        """Why earlier attempts failed."""
        return self._job.body.errors

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that `log` has kept so far."""
        return tuple(self._lines or ())

    def log(self, message: str, *args: Any) -> None:
        """Write a line to the log, and store it with the result of this run (the first 200 lines)."""
        text = clean(str(message % args if args else message))
        handler_log.info("%s: %s", self._job.id, text, extra={"task": self._job.id})
        if self._lines is None:
            self._lines = []
        if len(self._lines) < MOST_LINES:
            self._lines.append(text[:LINE_CHARS])
        self.publish(text[:LINE_CHARS] + "\n")

    def publish(self, text: str) -> None:
        """Show text to those who follow this run."""
        if self.memory is not None:
            self.memory.publish(self, text)


CURRENT: Final[ContextVar[Context]] = ContextVar("mainspring_context")


def current() -> Context:
    """Return the context of the run this code is part of, in coroutines and in threads."""
    try:
        return CURRENT.get()
    except LookupError:
        raise MainspringError("no task is being run here: current() is for handlers and what they call") from None


# `@idempotent` runs a handler once for a task, however often the task is delivered:
#
# - After a run that returned, every further delivery of the task returns the recorded value, and the function is not
#   called, for as long as the record is kept.
# - After a run that raised, the next attempt calls the function again: that is what retries are for.
# - A process that dies during the run leaves the record "begun", and how far it came is unknown. The next delivery
#   calls the function again or, with `unsure="dead"`, ends as a dead letter that says so. If the effect is in a
#   database of your own, write `current().idempotency_key` in the same transaction: only that closes the gap.

P = ParamSpec("P")
R = TypeVar("R")
Unsure = Literal["run", "dead"]


@overload
def idempotent(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def idempotent(*, keep: Delay = "7d", unsure: Unsure = "run") -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def idempotent(function: Callable[..., Any] | None = None, /, *, keep: Delay = "7d", unsure: Unsure = "run") -> Any:
    """Run the handler once for each idempotency key; under `@scheduler.handler(…)`, above the function.

    With settings or without: `@idempotent(keep="1d")`, `@idempotent`.
    Called outside of a worker, the function is simply called. Return values are stored as msgpack: dataclasses come
    back as dicts.
    """
    keep_ms = delay_ms(keep, field="keep")
    if keep_ms <= 0 or unsure not in ("run", "dead"):
        raise InvalidInput("idempotent: keep must be longer than zero, unsure one of run, dead")

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
                with contextlib.suppress(StoreError):  # the handler's exception matters more
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
        """Return True if the task has run already. A run that began and never ended is repeated, or given up."""
        if record.done:
            context.log("has run already (attempt %d); its recorded value is returned", record.attempt)
            return True
        if self._unsure == "dead":
            reason = f"attempt {record.attempt} began and never ended; how far it came is unknown"
            raise Dead(reason, brief=reason)
        context.log("attempt %d began and never ended; running again", record.attempt)
        return False

    @contextlib.contextmanager
    def _containing(self, context: Context) -> Iterator[None]:
        """Keep a store error from failing a run that is done: a failed run would be repeated."""
        try:
            yield
        except (StoreError, TimeoutError) as error:
            log.warning("%s: could not record that it has run (%s); it may run again unless its end is reported",
                        context.id, error, extra={"task": context.id})  # fmt: skip

    async def _keep(self, memory: Memory, context: Context, value: Any) -> None:
        if isinstance(value, (Retry, Dead)):
            await memory.forget(context.job)
            return
        if (reason := keepable(value)) is not None:
            log.warning("%s: its return value cannot be stored (%s); a repeat will return None", context.id, reason)
            value = None
        await memory.end(context.job, value, self._keep_ms)


def _where() -> tuple[Context | None, Memory | None]:
    context = CURRENT.get(None)
    return context, None if context is None else context.memory
