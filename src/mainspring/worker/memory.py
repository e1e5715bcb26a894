"""What has run for which task, kept on the server; asked from coroutines and from threads."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from ..model.job import Job
from ..store import once

if TYPE_CHECKING:
    from ..store.store import Store

T = TypeVar("T")
PATIENCE_S: Final = 30.0


class Record(msgspec.Struct, array_like=True, frozen=True):
    """`done` is False from the first line of the handler until its answer is kept."""

    done: bool
    attempt: int
    value: Any = None
    """What it answered; until then the claim of the run that has begun."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Record).decode


class Memory:
    """Made within the event loop of a worker."""

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()

    async def begin(self, job: Job, keep_ms: int) -> Record | None:
        """Note that a run begins; the record of an earlier one, if there is any."""
        found = await once.begin(self._store, job, _mark(job), keep_ms)
        return None if found is None else _decode(found)

    async def end(self, job: Job, value: Any, keep_ms: int) -> None:
        await once.end(self._store, job, _encode(Record(True, job.body.attempt, value)), keep_ms)

    async def forget(self, job: Job) -> None:
        """The run has failed: the next attempt shall find nothing of it."""
        await once.forget(self._store, job, _mark(job))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """For threads: do it in the worker's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


def _mark(job: Job) -> bytes:
    return _encode(Record(False, job.body.attempt, job.claim))


def keepable(value: Any) -> str | None:
    """Why a value cannot be kept; None if it can."""
    try:
        _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return None
