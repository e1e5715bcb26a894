"""A client whose calls go to a node's HTTP API: what commands ask of `Client`, by the same names."""

import base64
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from mainspring.cli.remote import Answered, Api, TooLate, moment_of
from mainspring.cli.remote_dead import RemoteLetters
from mainspring.cli.remote_schedules import RemoteSchedules
from mainspring.model.choice import ListedState, QueueState
from mainspring.model.errors import NotFound
from mainspring.model.explain import UNKNOWN, Explanation
from mainspring.model.lane import LaneAnswer, LaneInfo
from mainspring.model.pause import Mode, Pause, Scope
from mainspring.model.result import Result
from mainspring.model.retry import RetryPolicy
from mainspring.model.retry_text import retry_line
from mainspring.model.task import CancelOutcome, Count, Handle, OnConflict, Page, TaskInfo
from mainspring.model.times import Delay, When

_TASKS: Final = "/v1/tasks"
_LANES: Final = "/v1/lanes"
_PAUSES: Final = "/v1/pauses"
_REFUSALS: Final[dict[str, LaneAnswer]] = {"no head": "no head", "gone": "gone"}


class RemoteClient(RemoteLetters):
    """Tasks, lanes and pauses over HTTP; who did it is told by the API key, not by the caller."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self.schedules = RemoteSchedules(api)

    # -- tasks ---------------------------------------------------------------------------------------------

    async def put(
        self,
        target: str,
        payload: Any = None,
        *,
        at: When | None = None,
        after: Delay | None = None,
        id: str | None = None,
        lane: str | None = None,
        expires: When | Delay | None = None,
        retry: RetryPolicy | str | None = None,
        timeout: Delay | None = None,  # noqa: ASYNC109  # of the attempts, not of this call
        on_conflict: OnConflict = "keep",
        durability: str = "server",
    ) -> Handle:
        told = self.api.post(
            _TASKS, target=target, payload=payload, at=moment_of(at), after=after, id=id, lane=lane, expires=expires,
            retry=None if retry is None else retry_line(retry), timeout=timeout, on_conflict=on_conflict,
            durability=durability,
        )  # fmt: skip
        return msgspec.convert(told, Handle)

    async def get(self, id: str, *, lane: str | None = None) -> TaskInfo:
        try:
            return _task(self.api.get(_TASKS, id, lane=lane))
        except NotFound:
            return TaskInfo(id, "unknown")

    async def explain(self, id: str, *, lane: str | None = None) -> Explanation:
        try:
            return msgspec.convert(self.api.get(_TASKS, id, "explain", lane=lane), Explanation)
        except NotFound:
            now_ms = time.time_ns() // 1_000_000
            return Explanation(id=id, code="unknown", text=UNKNOWN, state="unknown", now_ms=now_ms)

    async def find_result(self, id: str, *, lane: str | None = None) -> Result | None:
        told = self.api.get(_TASKS, id, "result", lane=lane)
        return Result.from_dict(told) if "ending" in told else None

    async def cancel_many(self, ids: Iterable[str], *, lane: str | None = None) -> list[CancelOutcome]:
        wanted = list(ids)
        outcomes = {id: self._cancel(id, lane) for id in dict.fromkeys(wanted)}  # one that is given twice is one
        return [outcomes[id] for id in wanted]

    def _cancel(self, id: str, lane: str | None) -> CancelOutcome:
        try:
            outcome: CancelOutcome = self.api.delete(_TASKS, id, lane=lane)["outcome"]
        except NotFound:
            return "unknown"
        except TooLate:
            return "too late"
        return outcome

    async def reschedule(
        self, id: str, *, at: When | None = None, after: Delay | None = None, lane: str | None = None
    ) -> Handle:
        told = self.api.post(_TASKS, id, "reschedule", query={"lane": lane}, at=moment_of(at), after=after)
        return msgspec.convert(told, Handle)

    async def list(
        self,
        *,
        after: When | None = None,
        before: When | None = None,
        state: ListedState | QueueState = "pending",
        target: str | None = None,
        lane: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        told = self.api.get(
            _TASKS, due_after=moment_of(after), due_before=moment_of(before), state=state, target=target, lane=lane,
            limit=limit, cursor=cursor,
        )  # fmt: skip
        return Page([_task(one) for one in told["tasks"]], told["next"])

    async def count(self, *, after: When | None = None, before: When | None = None) -> Count:
        told = self.api.get(f"{_TASKS}:count", due_after=moment_of(after), due_before=moment_of(before))
        return msgspec.convert(told, Count)

    # -- lanes ---------------------------------------------------------------------------------------------

    async def lanes(self) -> Sequence[LaneInfo]:
        found: list[LaneInfo] = []
        cursor: str | None = None
        while True:
            told = self.api.get(_LANES, limit=1000, cursor=cursor)
            found += msgspec.convert(told["lanes"], type=list[LaneInfo])
            cursor = told["next"]
            if cursor is None:
                return found

    async def lane(self, lane: str) -> LaneInfo:
        return msgspec.convert(self.api.get(_LANES, lane), LaneInfo)

    async def lane_retry_head(self, lane: str) -> LaneAnswer:
        return self._lane(lane, "retry-head")

    async def lane_skip_head(self, lane: str, *, reason: str = "skipped by hand") -> LaneAnswer:
        return self._lane(lane, "skip-head", reason=reason)

    async def lane_resume(self, lane: str) -> LaneAnswer:
        return self._lane(lane, "resume")

    def _lane(self, lane: str, what: str, **body: Any) -> LaneAnswer:
        try:
            self.api.post(_LANES, lane, what, **body)
        except TooLate:
            return "too late"
        except Answered as refused:
            if refused.answer not in _REFUSALS:
                raise
            return _REFUSALS[refused.answer]
        return "ok"

    # -- pauses --------------------------------------------------------------------------------------------

    async def pause(
        self,
        *,
        target: str | None = None,
        queue: str | None = None,
        lane: str | None = None,
        mode: Mode = "hold",
        reason: str = "",
        who: str = "",
        until: When | None = None,
        for_: Delay | None = None,
    ) -> Pause:
        del who  # the API knows who calls
        scope = _scope(target, queue, lane) | {"for": for_}
        return _pause(self.api.post(_PAUSES, **scope, mode=mode, reason=reason, until=moment_of(until)))

    async def resume(self, *, target: str | None = None, queue: str | None = None, lane: str | None = None) -> bool:
        scope: dict[str, Any] = {"all": "true"} if target is queue is lane is None else _scope(target, queue, lane)
        try:
            self.api.delete(_PAUSES, **scope)
        except NotFound:
            return False
        return True

    async def pauses(self) -> Sequence[Pause]:
        return [_pause(one) for one in self.api.get(_PAUSES)["pauses"]]


def _task(told: dict[str, Any]) -> TaskInfo:
    """Bytes that are no JSON travel under a name of their own."""
    if "payload_base64" in told:
        told = told | {"payload": base64.b64decode(told["payload_base64"])}
    return msgspec.convert(told, TaskInfo)


def _scope(target: str | None, queue: str | None, lane: str | None) -> dict[str, Any]:
    if target is queue is lane is None:
        return {"all": True}
    return {"target": target, "queue": queue, "lane": lane}


def _pause(told: dict[str, Any]) -> Pause:
    return Pause(**(told | {"scope": Scope.parse(told["scope"])}))
