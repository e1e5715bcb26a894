"""Waiting for what a task came to."""

import asyncio
import math
from abc import abstractmethod
from typing import Any, Final

from .model.dead import DeadLetter
from .model.errors import InvalidInput, MainspringError, NotFound, StoreError, TaskFailed, Unavailable
from .model.result import Result
from .model.task import TaskInfo
from .model.times import Delay, delay_ms
from .store.ended import cancelled_ms, in_index
from .store.find import Reference
from .store.named import Patience
from .store.results import read_result
from .store.store import Store

FIRST_PAUSE_S: Final = 0.005
LONGEST_PAUSE_S: Final = 0.25
LOOK_EVERY: Final = 8
"""After so many questions for the result, look whether there will ever be one."""

_OVER: Final = frozenset({"done", "finished", "cancelled", "replaced", "dead", "unknown"})


_BEFORE_IT_RAN: Final = "cancelled before it ran"


class Results:
    """What Client can do with results."""

    _wait_s: float

    @property
    @abstractmethod
    def store(self) -> Store: ...

    @abstractmethod
    def _reference(self, id: str, lane: str | None) -> Reference: ...

    @abstractmethod
    async def dead_get(self, id: str, *, lane: str | None = None) -> DeadLetter | None: ...

    async def result(
        self,
        id: str,
        *,
        lane: str | None = None,
        timeout: float | Delay | None = None,  # noqa: ASYNC109  # as everybody expects of a result
    ) -> Any:
        """What the handler returned, the command printed or the webhook was answered, when it is done.

        Waits for it, seconds as a number or a text such as "30s".
        TaskFailed if the task died or was cancelled, TimeoutError if it is not over in time. A server that is away is
        waited for until then; without a timeout as long as a put would wait for it.
        """
        result = await self.run_result(id, lane=lane, timeout=timeout)
        if result.ending != "done":
            raise TaskFailed(id, result)
        if result.reason:
            raise MainspringError(f"task {id!r} is done, but {result.reason}")
        return next((one for one in (result.output, result.response) if one is not None), result.value)

    async def run_result(
        self,
        id: str,
        *,
        lane: str | None = None,
        timeout: float | Delay | None = None,  # noqa: ASYNC109
    ) -> Result:
        """How the task ended: its value, log lines, a command's output, a webhook's answer.

        Waits like `result`; any ending will do. NotFound where nothing is kept of it.
        """
        reference, most_s = self._reference(id, lane), _seconds(timeout)
        outage = _Outage(self.store, self._wait_s if most_s is None else math.inf)
        try:
            async with asyncio.timeout(most_s):
                return await self._wait(id, lane, reference, outage)
        except TimeoutError:
            raise TimeoutError(f"task {id!r} is not over after {timeout}{outage.told}") from None

    async def find_result(self, id: str, *, lane: str | None = None) -> Result | None:
        """What `run_result` would give, without waiting: None while the task is not over."""
        return await self._over(id, lane, self._reference(id, lane))

    async def _wait(self, id: str, lane: str | None, reference: Reference, outage: "_Outage") -> Result:
        pause_s, asked = FIRST_PAUSE_S, 0
        while True:
            asked += 1
            try:
                look = asked % LOOK_EVERY == 0 or await read_result(self.store, reference) is not None
                if look and (over := await self._over(id, lane, reference)) is not None:
                    return over
            except Unavailable as failure:
                await outage.goes_on(failure)
                continue
            outage.ends()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)

    async def _over(self, id: str, lane: str | None, reference: Reference) -> Result | None:
        """The end of a task; None while it is not over. What is kept of an earlier one of its id does not count."""
        # Not `get`: what is noted of a cancelled id may be of an earlier task, and a result of a later one.
        info = await in_index(self.store, id, lane)
        if info.state not in _OVER:
            return None
        # Only now: it may have ended between the two questions.
        found = await read_result(self.store, reference)
        letter = None if info.state == "done" else await self.dead_get(id, lane=lane)
        # The index forgets a cancelled id at once, so that it can be used again.
        off_ms = await cancelled_ms(self.store, reference) if info.state == "unknown" else None
        if off_ms is not None and _is_older(found, letter, off_ms):
            return Result("cancelled", reason=_BEFORE_IT_RAN)
        if letter is not None and not _tells_more(found, letter):
            return Result(
                "dead", reason=letter.reason, attempt=letter.attempts, target=letter.target, due_ms=letter.due_ms,
                response=letter.response,
            )  # fmt: skip
        if info.state == "cancelled" and (found is None or found.ending != "cancelled" or not _is_of(found, info)):
            return Result("cancelled", reason=_BEFORE_IT_RAN)
        if found is not None and _is_of(found, info):
            return found
        if info.state == "unknown":
            raise NotFound(f"there is no task {id!r}")
        raise NotFound(
            f"task {id!r} is {info.state} and left no result: its handler or target keeps none (set result_ttl), or "
            "it is past"
        )


class _Outage:
    """The server is away while somebody waits. Each time that it goes it is waited for anew, for `wait_s`."""

    def __init__(self, store: Store, wait_s: float) -> None:
        self._store = store
        self._wait_s = wait_s
        self._patience: Patience | None = None
        self._failure: StoreError | None = None

    async def goes_on(self, failure: StoreError) -> None:
        """Wait before the next question, or raise the failure."""
        self._failure = failure
        self._patience = self._patience or Patience(self._store, self._wait_s)
        await self._patience.after(failure)

    def ends(self) -> None:
        self._patience = self._failure = None

    @property
    def told(self) -> str:
        return "" if self._failure is None else f", and the server is away: {self._failure}"


def _is_older(found: Result | None, letter: DeadLetter | None, off_ms: int) -> bool:
    """Whether all that is kept under an id is of tasks before the one that was cancelled then."""
    if found is not None and (found.ending == "cancelled" or found.ended_ms > off_ms):
        return False
    return letter is None or letter.died_ms <= off_ms


def _tells_more(found: Result | None, letter: DeadLetter) -> bool:
    """Whether it is of the same death, or of a later run."""
    if found is None:
        return False
    return found.ended_ms >= letter.died_ms or (found.ending == "dead" and found.due_ms in (0, letter.due_ms))


def _is_of(found: Result, info: TaskInfo) -> bool:
    """Whether it is the end of this very task, as far as that is known."""
    return not (found.due_ms and info.due_ms is not None and info.attempt == 1 and found.due_ms != info.due_ms)


def _seconds(timeout: float | Delay | None) -> float | None:
    if timeout is None or (isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout >= 0):
        return timeout
    if isinstance(timeout, (bool, int, float)):
        raise InvalidInput(f"timeout is {timeout!r}; give seconds, a text such as '30s', or None to wait for ever")
    return delay_ms(timeout, field="timeout") / 1000
