"""`/v1/runs`, `/v1/stats`: the history of runs, counts over time, and the log of a running job."""

import asyncio
from typing import Any, Final, Literal

import msgspec

from ..client.runs import RunLog, RunStats
from ..model.run import KeptRun
from ..store.runs import is_run_id
from .asgi import GUARDED, Answer, AsgiSend, Problem, Sendable, answer, when
from .routes import Call, Route, no_such
from .tasks import Answered, Printed

LOOK_S: Final = 0.5
"""Seconds between looks at the log of a running job."""

LONGEST_FOLLOW_S: Final = 3_600.0
"""Then the response ends, and the caller may follow again."""


class ListRuns(msgspec.Struct, frozen=True):
    """`target` may end in `*`; `id` is a task's. Times are ISO 8601 or epoch milliseconds."""

    schedule: str | None = None
    target: str | None = None
    queue: str | None = None
    id: str | None = None
    lane: str | None = None
    worker: str | None = None
    outcome: str | None = None
    ended_after: str | None = None
    ended_before: str | None = None
    limit: int = 50
    cursor: str | None = None


class RunView(msgspec.Struct):
    """One attempt at a task, or a planned run that did not take place. Details only if one run is asked for."""

    id: str
    at_ms: int
    task: str
    lane: str | None
    schedule: str | None
    planned_ms: int | None
    target: str
    queue: str | None
    worker: str
    attempt: int
    due_ms: int
    started_ms: int | None
    ended_ms: int
    outcome: str
    code: int | str | None
    reason: str
    next_ms: int | None
    sent_bytes: int
    answer_bytes: int
    response: Answered | None = None
    output: Printed | None = None
    log: list[str] | None = None
    traceback: str | None = None


class RunList(msgspec.Struct):
    """Newest first; `next` is the cursor of the next page, null at the end."""

    runs: list[RunView]
    next: str | None


class ChooseStats(msgspec.Struct, frozen=True):
    """All runs, or those of one schedule, target or queue."""

    schedule: str | None = None
    target: str | None = None
    queue: str | None = None
    start: str | None = None
    end: str | None = None
    step: Literal["minute", "hour"] = "hour"


class FollowLog(msgspec.Struct, frozen=True):
    """With `follow` the response is plain text, and lasts until the run has ended."""

    lane: str | None = None
    cursor: str | None = None
    follow: bool = False


async def list_runs(call: Call) -> Answer:
    query: ListRuns = call.query
    filters: dict[str, Any] = {name: getattr(query, name) for name in ListRuns.__struct_fields__}
    for name in ("ended_after", "ended_before"):
        filters[name] = when(filters[name], name)
    page = await call.client.runs(**filters)
    seen = [run.as_dict() for run in page.runs if call.key.sees(run.record.target)]
    return answer({"runs": seen, "next": page.next})


async def get_run(call: Call) -> Answer:
    return answer((await _run(call)).as_dict())


async def _run(call: Call) -> KeptRun:
    run = await call.client.run(call.params["id"])
    if run is None:
        raise no_such("run", call.params["id"])
    call.check_seen(run.record.target, "run", call.params["id"])
    return run


async def run_stats(call: Call) -> Answer:
    query: ChooseStats = call.query
    if not call.may_reach_all and (query.target is None or not call.key.sees(query.target)):
        raise Problem("forbidden", "this key is bound to targets; name one of them as target")
    found = await call.client.run_stats(
        schedule=query.schedule, target=query.target, queue=query.queue,
        start=when(query.start, "start"), end=when(query.end, "end"), step=query.step,
    )  # fmt: skip
    return answer(found)


async def run_log(call: Call) -> Sendable:
    query: FollowLog = call.query
    if not call.may_reach_all:
        await _check_log(call, query)
    log = await call.client.run_log(call.params["id"], lane=query.lane, cursor=query.cursor)
    if not query.follow:
        return answer(log)
    return _Following(call, log)


async def _check_log(call: Call, query: FollowLog) -> None:
    """Refuse a bound key the log of a task or a run that it may not see."""
    task_id = call.params["id"]
    if is_run_id(task_id, len(call.client.store.keys)):
        await _run(call)
        return
    page = await call.client.runs(id=task_id, lane=query.lane, limit=1)
    info = await call.client.get(task_id, lane=query.lane)
    call.check_seen(page.runs[0].record.target if page.runs else info.target, "run", task_id)


class _Following:
    """A response that sends what a run writes, until it is over."""

    def __init__(self, call: Call, log: RunLog) -> None:
        self._call = call
        self._log = log

    async def send(self, send: AsgiSend) -> None:
        call, log = self._call, self._log
        headers = [(b"content-type", b"text/plain; charset=utf-8"), *GUARDED]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(self._hung_up())
        loop = asyncio.get_running_loop()
        until = loop.time() + LONGEST_FOLLOW_S
        try:
            while not log.over and not gone.done() and loop.time() < until:
                if log.text:
                    await send({"type": "http.response.body", "body": log.text.encode(), "more_body": True})
                else:
                    await asyncio.wait([gone], timeout=LOOK_S)
                log = await call.client.run_log(call.params["id"], lane=call.query.lane, cursor=log.next)
            await send({"type": "http.response.body", "body": log.text.encode()})
        finally:
            gone.cancel()

    async def _hung_up(self) -> None:
        while (await self._call.receive())["type"] != "http.disconnect":
            pass


_ID: Final = "/v1/runs/{id}"
ROUTES: Final = (
    Route("GET", "/v1/runs", list_runs, "read", "List runs.", query=ListRuns, answers={200: RunList}),
    Route("GET", _ID, get_run, "read", "Show one run.", answers={200: RunView}, problems=("not-found",)),
    Route(
        "GET", f"{_ID}/log", run_log, "read", "Read or follow the log of a run.", query=FollowLog,
        answers={200: RunLog}, media=("text/plain",), problems=("not-found", "ambiguous"),
    ),
    Route("GET", "/v1/stats", run_stats, "read", "Count runs over time.", query=ChooseStats, answers={200: RunStats}),
)  # fmt: skip
