"""`/v1/runs`, `/v1/stats`: the history of runs, counts over time, and the log of a running job."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Literal

import msgspec

from ..client.runs import LIVE
from ..model.errors import StoreError
from ..model.run import RunLog, RunStats
from ..model.targets.names import receiver_of
from ..store.runs import is_run_id
from ..store.tasks.dead_letters import find_live
from .asgi import GUARDED, Answer, AsgiSend, Problem, Sendable, answer, when
from .auth import Slots, client_of
from .routes import Call, Route, no_such
from .tasks import Answered, Printed

LOOK_S: Final = 0.5
"""Seconds between reads of a running job's log."""

LONGEST_FOLLOW_S: Final = 3_600.0
"""Longest response; afterwards the caller may follow again."""
AT_ONCE: Final = 128
"""Most logs that one process sends to followers at a time: each costs a connection, and some reads a second."""
AT_ONCE_OF_ONE: Final = 32
"""Most of them for one client."""


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
    times = {name: when(getattr(query, name), name) for name in ("ended_after", "ended_before")}
    page = await call.client.runs(**msgspec.structs.asdict(query) | times, allowed=call.key.targets)
    return answer({"runs": [run.as_dict() for run in page.runs], "next": page.next})


async def get_run(call: Call) -> Answer:
    run = await call.client.run(call.params["id"])
    if run is None:
        raise no_such("run", call.params["id"])
    call.check_seen(run.record.target, "run", call.params["id"])
    return answer(run.as_dict())


async def run_stats(call: Call) -> Answer:
    query: ChooseStats = call.query
    if call.key.targets is not None:
        _check_counted(call.key.targets, call, query.target)
    times = {name: when(getattr(query, name), name) for name in ("start", "end")}
    return answer(await call.client.run_stats(**msgspec.structs.asdict(query) | times))


def _check_counted(patterns: Sequence[str], call: Call, target: str | None) -> None:
    """Refuse counts that cover runs which a bound key may not see: webhooks are counted by their host."""
    if target is None or not call.key.sees(target):
        raise Problem("forbidden", "this key is bound to targets; name one of them as target")
    if target.startswith("http") and f"{receiver_of(target)}/*" not in patterns:
        raise Problem("forbidden", "webhooks are counted by their host, of which this key may see only a part")


async def run_log(call: Call) -> Sendable:
    query: FollowLog = call.query
    lane = query.lane if call.may_reach_all else await _seen_lane(call, query.lane)
    with ExitStack() as place:
        if query.follow:
            place.enter_context(call.app.followers.slot(client_of(call.key, call.address)))
        log = await call.client.run_log(call.params["id"], lane=lane, cursor=query.cursor)
        return _Following(call, lane, log, place.pop_all()) if query.follow else answer(log)


async def _seen_lane(call: Call, lane: str | None) -> str | None:
    """Return the lane of the log that a bound key asks for; refuse logs of tasks and runs that the key may not see."""
    task_id = call.params["id"]
    if lane is None and is_run_id(task_id, len(call.client.store.keys)):
        run = await call.client.run(task_id)
        if run is not None:
            call.check_seen(run.record.target, "run", task_id)
            return None

    async def target_in(one: str | None) -> str | None:
        return (await _newest(call, task_id, one))[0]

    lane = await call.lane_seen(lane, "run", target_in)
    target, found_in = await _newest(call, task_id, lane)
    call.check_seen(target, "run", task_id)
    # Only this lane: the log of another caller's task with the same id may still be there.
    return found_in or ""


async def _newest(call: Call, task_id: str, lane: str | None) -> tuple[str | None, str | None]:
    """Return target and lane of the task that has an id now, or of the last task that had it."""
    live = await find_live(call.client.store, task_id, lane)
    if live.state not in LIVE:
        page = await call.client.runs(id=task_id, lane=lane, limit=1)
        if page.runs:
            return page.runs[0].record.target, page.runs[0].record.lane
    return live.target, live.lane


class Followers(Slots):
    """The responses that are following a log."""

    def __init__(self) -> None:
        super().__init__(AT_ONCE, AT_ONCE_OF_ONE, "logs are being followed")
        self.waiting: set[asyncio.Task[None]] = set()
        """Wait until the client of a response disconnects."""

    def end(self) -> None:
        """End all responses: the process stops."""
        for one in self.waiting:
            one.cancel()


class _Following:
    """A response that sends the output of a run until the run is over."""

    def __init__(self, call: Call, lane: str | None, log: RunLog, place: ExitStack) -> None:
        self._call = call
        self._lane = lane
        self._log = log
        self._place = place

    async def send(self, send: AsgiSend) -> None:
        with self._place:
            headers = [(b"content-type", b"text/plain; charset=utf-8"), *GUARDED]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            # The head goes with the first piece: a client must not wait for it until the run has written something.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            gone = asyncio.create_task(self._hung_up())
            self._call.app.followers.waiting.add(gone)
            try:
                await self._send_all(send, gone)
            finally:
                self._call.app.followers.waiting.discard(gone)
                gone.cancel()

    async def _send_all(self, send: AsgiSend, gone: asyncio.Task[None]) -> None:
        call, log = self._call, self._log
        app, loop = call.app, asyncio.get_running_loop()
        until = loop.time() + LONGEST_FOLLOW_S
        while True:
            if log.text:
                await send({"type": "http.response.body", "body": log.text.encode(), "more_body": True})
            elif not log.over:
                await asyncio.wait([gone], timeout=LOOK_S)
            if log.over or gone.done() or loop.time() > until:
                break
            try:
                if not await app.authenticator.still_admits(app.spaces.home.client.store, call.key):
                    break
                log = await call.client.run_log(call.params["id"], lane=self._lane, cursor=log.next)
            except StoreError:  # it may be back before the run is over
                log = RunLog("", log.next, False)
        await send({"type": "http.response.body", "body": b""})

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
