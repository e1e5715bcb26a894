"""`/v1/tasks`: put, look at, list, cancel, move and explain tasks."""

import base64
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec

from ..model.audit_views import of_task
from ..model.choice import ListedState, QueueState
from ..model.errors import NotConfirmed, NotFound
from ..model.explain import Explanation
from ..model.task import Count, Handle, OnConflict, Task, TaskInfo
from ..store.durable import check_durability
from ..store.ended import in_index
from .asgi import Answer, answer
from .call import Call, no_such
from .idempotency import once
from .new_task import Moment, PostedTask, Put, due_ms_of, task_of
from .problems import Problem
from .reading import when
from .replaced import told
from .results import Ended, NotOver
from .routes import Route
from .spaces import kept_in


class OneTask(msgspec.Struct, frozen=True):
    """`lane`, where the task has one and its id is the caller's: it is then found at once."""

    lane: str | None = None


class ListTasks(msgspec.Struct, frozen=True):
    """`target` may end in `*`. Times are ISO 8601 or epoch milliseconds."""

    state: ListedState | QueueState = "pending"
    target: str | None = None
    lane: str | None = None
    due_after: str | None = None
    due_before: str | None = None
    limit: int = 50
    cursor: str | None = None


class TaskList(msgspec.Struct):
    """Tasks in due order, those in queues in none; `next` is the cursor of the next page, null at the end."""

    tasks: list[TaskInfo]
    next: str | None


class CountTasks(msgspec.Struct, frozen=True):
    """Without times all that are pending are counted."""

    due_after: str | None = None
    due_before: str | None = None


class Cancelled(msgspec.Struct):
    """`cancelling`: a worker runs it. It is told, and stops it if it is not done before."""

    id: str
    outcome: Literal["cancelled", "cancelling"]


class NewTime(msgspec.Struct, forbid_unknown_fields=True):
    """`at` or `after`."""

    at: Moment | None = None
    after: str | None = None


# -- create ----------------------------------------------------------------------------------------------------


async def put_task(call: Call) -> Answer:
    posted: PostedTask = call.body
    check_durability(posted.durability)

    async def work(task_id: str | None, repeated: bool) -> Answer:
        task = task_of(posted, call.client.store.clock.now_ms(), task_id=task_id)
        call.check_target(task.target)
        # A rule is for the caller's own ids: one that we made is known already only if this is the same request.
        on_conflict = "keep" if posted.id is None else posted.on_conflict
        handle = await _put(call, task, on_conflict, posted.durability)
        # Our own put, whose answer was lost: it is told as it was the first time.
        created = handle.outcome == "created" or (repeated and posted.id is None)
        body = Put.of(handle)
        if created:
            body.outcome = "created"
        return answer(body, 201 if created else 200, (b"location", b"/v1/tasks/" + quote(handle.id, safe="").encode()))

    return await once(call, work)


async def _put(call: Call, task: Task, on_conflict: OnConflict, durability: str) -> Handle:
    if call.may_reach_all or task.id is None:
        return await told(call, task, call.put_into.put(task, on_conflict, durability))
    # What a key may not see it may not replace either, nor be told of it as its own.
    if on_conflict != "keep":
        await call.check_not_others(task.id, task.lane)
    try:
        handle = await told(call, task, call.put_into.put(task, on_conflict, durability))
    except NotConfirmed as error:
        if kept_in(error) is not None:
            await call.check_not_others(task.id, task.lane)
        raise
    if handle.outcome == "kept":
        await call.check_not_others(task.id, task.lane)
    return handle


# -- look ------------------------------------------------------------------------------------------------------


async def get_task(call: Call) -> Answer:
    return answer(view(await _known(call)))


async def _known(call: Call) -> TaskInfo:
    return _seen(call, await call.client.get(call.params["id"], lane=call.query.lane))


async def _there(call: Call) -> TaskInfo:
    """One that could still be changed: not what is only remembered of an id."""
    return _seen(call, await in_index(call.client.store, call.params["id"], call.query.lane))


def _seen(call: Call, info: TaskInfo) -> TaskInfo:
    if info.state == "unknown":
        raise no_such("task", info.id)
    call.check_seen(info.target, "task", info.id)
    return info


def view(info: TaskInfo) -> dict[str, Any]:
    """Bytes that are no JSON are told in base64, under a name of their own."""
    fields = msgspec.structs.asdict(info)
    if isinstance(info.payload, bytes):
        fields["payload_base64"] = base64.b64encode(fields.pop("payload")).decode()
    return fields


async def list_tasks(call: Call) -> Answer:
    query: ListTasks = call.query
    page = await call.client.list(
        after=when(query.due_after, "due_after"),
        before=when(query.due_before, "due_before"),
        state=query.state,
        target=query.target,
        lane=query.lane,
        allowed=call.key.targets,
        limit=query.limit,
        cursor=query.cursor,
    )
    return answer({"tasks": [view(one) for one in page.tasks], "next": page.next})


async def count_tasks(call: Call) -> Answer:
    call.check_unbound()
    query: CountTasks = call.query
    after, before = when(query.due_after, "due_after"), when(query.due_before, "due_before")
    return answer(await call.client.count(after=after, before=before))


async def explain_task(call: Call) -> Answer:
    task_id = call.params["id"]
    found = await call.client.explain(task_id, lane=call.query.lane)
    if found.code == "unknown":
        raise no_such("task", task_id)
    call.check_seen(found.target, "task", task_id)
    return answer(found)


async def result_of_task(call: Call) -> Answer:
    task_id = call.params["id"]
    try:
        result = await call.client.find_result(task_id, lane=call.query.lane)
    except NotFound:
        if not call.may_reach_all:
            await _known(call)  # of what goes elsewhere it is not even said that it is over
        raise
    if result is None:
        return answer(NotOver(task_id, (await _known(call)).state), 202)
    if not call.may_reach_all:
        call.check_seen(result.target or (await _known(call)).target, "task", task_id)
    return answer(result.as_dict())


# -- change ----------------------------------------------------------------------------------------------------


async def cancel_task(call: Call) -> Answer:
    before = await _there(call)
    task_id = call.params["id"]
    outcome = await call.client.cancel(task_id, lane=call.query.lane)
    if outcome == "unknown":
        raise no_such("task", task_id)
    if outcome == "too late":
        raise Problem("too-late", f"the task {task_id[:300]!r} has begun, or is over: {before.state}")
    await call.audit("task.cancel", task_id, of_task(before), {"state": outcome})
    return answer(Cancelled(task_id, outcome), 202 if outcome == "cancelling" else 200)


async def reschedule_task(call: Call) -> Answer:
    wanted: NewTime = call.body
    task_id = call.params["id"]
    if (wanted.at is None) == (wanted.after is None):
        raise Problem("invalid", "give either at or after")
    before = await _there(call)
    try:
        due_ms = due_ms_of(wanted.at, wanted.after, call.client.store.clock.now_ms())
    except OverflowError:
        raise Problem("invalid", "the time lies outside of the calendar") from None
    handle = await call.client.reschedule(task_id, at=due_ms, lane=call.query.lane)
    await call.audit("task.reschedule", task_id, of_task(before), {"id": handle.id, "due_ms": handle.due_ms})
    return answer(Put.of(handle))


_ID: Final = "/v1/tasks/{id}"
ROUTES: Final = (
    Route(
        "POST", "/v1/tasks", put_task, "submit", "Put one task.", body=PostedTask, answers={200: Put, 201: Put},
        problems=("conflict", "idempotency", "too-large", "content-type", "not-confirmed", "out-of-memory"),
    ),
    Route("GET", "/v1/tasks", list_tasks, "read", "List tasks.", query=ListTasks, answers={200: TaskList}),
    Route(
        "GET", "/v1/tasks:count", count_tasks, "read", "Count pending tasks.", query=CountTasks, answers={200: Count}
    ),
    Route(
        "GET", _ID, get_task, "read", "Look at one task.", query=OneTask, answers={200: TaskInfo},
        problems=("not-found",),
    ),
    Route(
        "DELETE", _ID, cancel_task, "operate", "Cancel a task before it fires.", query=OneTask,
        answers={200: Cancelled, 202: Cancelled}, problems=("not-found", "too-late"),
    ),
    Route(
        "POST", f"{_ID}/reschedule", reschedule_task, "operate", "Move a pending task to another time.",
        query=OneTask, body=NewTime, answers={200: Put},
        problems=("not-found", "conflict", "too-large", "content-type", "out-of-memory"),
    ),
    Route(
        "GET", f"{_ID}/explain", explain_task, "read", "Say why a task has not run.", query=OneTask,
        answers={200: Explanation}, problems=("not-found",),
    ),
    Route(
        "GET", f"{_ID}/result", result_of_task, "read", "Say how a task ended, as long as that is kept.", query=OneTask,
        answers={200: Ended, 202: NotOver}, problems=("not-found",),
    ),
)  # fmt: skip
