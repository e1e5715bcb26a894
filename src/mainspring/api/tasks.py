"""`/v1/tasks`: put, get, list, cancel, move and explain tasks. Every check before the write is made here."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, cast
from urllib.parse import quote

import msgspec

from ..model.audit import of_replaced, of_task
from ..model.errors import Conflict, InvalidInput, MainspringError, NotConfirmed, NotFound, PayloadTooLarge, StoreError
from ..model.explain import Explanation
from ..model.ids import check_id, check_name
from ..model.job import Ending
from ..model.limits import MAX_PAYLOAD_BYTES
from ..model.retry import policy_line
from ..model.targets.names import check_target
from ..model.task import Count, Handle, ListedState, OnConflict, PutOutcome, QueueState, Task, TaskInfo
from ..model.times import check_horizon, delay_ms, expiry_ms, instant_ms, timeout_ms
from ..store import records
from ..store.durability import check_durability
from ..store.records import Claim, KeptAnswer
from ..store.store import Store
from ..store.tasks.dead_letters import find_live
from .asgi import Answer, Problem, answer, when
from .auth import check_lane
from .routes import Call, Route, no_such
from .spaces import kept_in

NO_PAYLOAD: Final = msgspec.Raw(b"null")
_DIGITS: Final = bytes.maketrans(b"123456789E-", b"000000000e+")
_LONG: Final = b"0" * 18
_LARGE: Final = re.compile(rb"0e\+?000").search
"""Matches numbers that may be out of range, once all digits, signs and exponents are written alike."""
Moment = int | float | str
"""Epoch milliseconds, or ISO 8601 with an offset."""


class NewTask(Task, frozen=True, forbid_unknown_fields=True, gc=False):
    """`at` or `after` says when; neither means now. With an `id`, repeated posts are one task."""

    # A Task itself, so that a batch line that needs no conversion is used as it is.

    target: str
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: NO_PAYLOAD)
    at: Moment | None = None
    after: str | None = None
    id: str | None = None
    lane: str | None = None
    expires: Moment | None = None
    retry: str | None = None
    timeout: str | None = None


class PostedTask(NewTask, frozen=True, forbid_unknown_fields=True, gc=False):
    """A single task sets for itself what lines of a batch share."""

    on_conflict: OnConflict = "keep"
    durability: str = "server"


class Put(msgspec.Struct, omit_defaults=True):
    """Outcome of a posted task; `id` finds it again."""

    id: str
    due_ms: int
    outcome: PutOutcome
    past: bool = False
    durability: str = "server"

    @classmethod
    def of(cls, handle: Handle) -> "Put":
        return cls(handle.id, handle.due_ms, handle.outcome, handle.past, handle.durability)


def task_of(new: NewTask, now_ms: int, *, task_id: str | None = None) -> Task:
    """Return the task with times in milliseconds; raise InvalidInput if it is wrong. `task_id` is its default id."""
    check_target(new.target)
    payload = bytes(new.payload)
    check_payload(payload)
    if new.id is not None:
        task_id = check_id(new.id)
    if new.lane is not None:
        check_name(new.lane, "lane")
    try:
        due_ms = due_ms_of(new.at, new.after, now_ms)
        expires_ms = None if new.expires is None else expiry_ms(new.expires, due_ms)
    except OverflowError:
        raise InvalidInput("a time lies outside of the calendar") from None
    retry = policy_line(new.retries, new.retry)
    if new.timeout is not None:
        timeout_ms(new.timeout)
    return Task(new.target, msgspec.Raw(payload), due_ms, None, task_id, new.lane, expires_ms, retry, new.timeout)


def check_payload(payload: bytes) -> None:
    """Check what decoding skips: the size, the encoding, and numbers that could not be read back."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(f"payload has {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
    if is_simple(payload):
        return
    try:
        msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"payload: {error}") from None


def is_simple(text: bytes) -> bool:
    """Return whether JSON has no number that is too large and no invalid byte: skipping it then checks the rest."""
    if not text.isascii():
        return False
    alike = text.translate(_DIGITS)
    return _LONG not in alike and _LARGE(alike) is None


def due_ms_of(at: Moment | None, after: str | None, now_ms: int) -> int:
    if at is not None and after is not None:
        raise InvalidInput("both at and after are given; give one of them")
    due_ms = instant_ms(at) if at is not None else now_ms + (0 if after is None else delay_ms(after))
    check_horizon(due_ms, now_ms)
    return due_ms


class Answered(msgspec.Struct):
    """A response, cut to what its target keeps; the body is in base64 if it is not text."""

    status: int
    headers: list[tuple[str, str]]
    duration_ms: int
    body: str | None = None
    body_base64: str | None = None


class Printed(msgspec.Struct):
    """Output of a command: its end, in base64 if it is not text, and the number of bytes written."""

    exit_code: int | None
    stdout_bytes: int
    stderr_bytes: int
    stdout: str | None = None
    stdout_base64: str | None = None
    stderr: str | None = None
    stderr_base64: str | None = None


class Ended(msgspec.Struct):
    """How a task ended: `value` of a handler, `output` of a command, `response` of a webhook."""

    ending: Ending
    value: Any
    reason: str
    attempt: int
    worker: str
    target: str
    due_ms: int
    started_ms: int
    ended_ms: int
    log: list[str]
    output: Printed | None
    response: Answered | None


class NotOver(msgspec.Struct):
    """The task waits or runs; there is no result yet."""

    id: str
    state: str


def weight_of(task: Task) -> tuple[int, int]:
    """Return the due time and payload bytes of a checked task, as quotas count them."""
    return cast("int", task.at), len(task.payload)


async def put_counted(call: Call, task: Task, put: Callable[[], Awaitable[Handle]]) -> Handle:
    """Put a task within the key's quota. Record a replaced task in the audit trail before the response."""
    quotas, store = call.app.quotas, call.client.store
    await quotas.check(call.key, store, len(task.payload))
    try:
        handle = await put()
    except NotConfirmed as error:
        if kept_in(error) is None:
            quotas.add(call.key, store, [weight_of(task)])
        for stored in error.handles or ():
            if stored is not None and stored.id == task.id:  # not a task of another caller in the same write
                await _audit_replaced(call, task, stored)
        raise
    if handle.outcome != "kept":
        quotas.add(call.key, store, [weight_of(task)])
    await _audit_replaced(call, task, handle)
    return handle


async def _audit_replaced(call: Call, task: Task, handle: Handle) -> None:
    views = of_replaced(handle, task.target, task.lane)
    if views is not None:
        await call.audit("task.replace", handle.id, *views)


MAX_KEY_CHARS: Final = 255
_REPLAYED: Final = (b"idempotency-replayed", b"true")

KeyedWork = Callable[[str | None, KeptAnswer | None], Awaitable[Answer]]
"""Takes an id for requests without one (the same every time), and the claim of an earlier request that may have run."""


async def once(call: Call, work: KeyedWork) -> Answer:
    """Do the work, unless the same caller's same key already has a response."""
    given = call.headers.get(b"idempotency-key")
    if given is None:
        return await work(None, None)
    store = call.client.store
    window_ms = int(call.node.config.idempotency_window_s * 1000)
    place = Claim.of(store, call.key.id, checked_key(given))
    fingerprint = _fingerprint(call)
    known = await records.claim_request(store, place, fingerprint, window_ms=window_ms)
    if known is not None and known.fingerprint != fingerprint:
        raise Problem("idempotency", "this Idempotency-Key was used with another request; use a new one")
    if known is not None and known.answered:
        return Answer(known.status, known.body, headers=(*_location(known.location), _REPLAYED))
    try:
        found = await work(f"idem-{place.hashed[:40]}", known)
    except (Problem, MainspringError) as error:
        if known is None and not _may_have_run(error):
            await _forget(store, place)
        raise
    location = dict(found.headers).get(b"location", b"")
    await records.keep_answer(
        store, place, KeptAnswer(fingerprint, found.status, found.body, location), window_ms=window_ms
    )
    return found


def checked_key(given: bytes) -> str:
    text = given.decode("latin-1")
    if not 1 <= len(text) <= MAX_KEY_CHARS or not text.isascii() or not text.isprintable():
        raise Problem("invalid", f"Idempotency-Key: use 1 to {MAX_KEY_CHARS} printable ASCII characters")
    return text


def _fingerprint(call: Call) -> bytes:
    hashed = hashlib.sha256()
    for part in (call.method, call.path, call.query_string, call.namespace.encode(), call.raw_body):
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.digest()


def _location(kept: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"location", kept),) if kept else ()


def _may_have_run(error: Problem | MainspringError) -> bool:
    return isinstance(error, StoreError) or (isinstance(error, Problem) and error.status >= 500)


async def _forget(store: Store, place: Claim) -> None:
    try:
        await records.release_request(store, place)
    except StoreError:
        return  # it stays claimed for the same request only, which is harmless


class OneTask(msgspec.Struct, frozen=True):
    """`lane`, if the task has one and its id is the caller's: it is then found at once. An empty lane means the task
    without a lane."""

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
    """Tasks in due order, unordered in queues; `next` is the cursor of the next page, null at the end."""

    tasks: list[TaskInfo]
    next: str | None


class CountTasks(msgspec.Struct, frozen=True):
    """Without times, all pending tasks are counted."""

    due_after: str | None = None
    due_before: str | None = None


class Cancelled(msgspec.Struct):
    """`cancelling`: a worker is running the task and has been asked to stop."""

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

    async def work(task_id: str | None, earlier: KeptAnswer | None) -> Answer:
        task = task_of(posted, call.client.store.clock.now_ms(), task_id=task_id)
        call.check_target(task.target)
        check_lane(call.key, task.lane)
        if posted.timeout is not None:
            call.node.config.check_timeout(task.target, timeout_ms(posted.timeout))
        if earlier is not None and records.ids_may_be_forgotten(call.client.store, earlier.claimed_ms):
            await _check_still_known(call, task)
        # The rule applies to caller's ids: a generated id is known only if this is the same request.
        on_conflict = "keep" if posted.id is None else posted.on_conflict
        handle = await _put(call, call.signed(task), on_conflict, posted.durability)
        call.check_changeable(handle)
        # Our own put, whose response was lost: report it as the first time.
        created = handle.outcome == "created" or (earlier is not None and posted.id is None)
        body = Put.of(handle)
        if created:
            body.outcome = "created"
        return answer(body, 201 if created else 200, (b"location", b"/v1/tasks/" + quote(handle.id, safe="").encode()))

    return await once(call, work)


async def _check_still_known(call: Call, task: Task) -> None:
    """Refuse to repeat a put whose response was lost if its task, if stored, may be over and its id forgotten."""
    assert task.id is not None
    if (await call.client.get(task.id, lane=task.lane or "")).state == "unknown":
        raise in_doubt(task)


def in_doubt(task: Task) -> Problem:
    return Problem(
        "conflict",
        f"this was sent before with the same Idempotency-Key and its response lost: it may have been stored as task"
        f" {task.id!r}. Check, then decide, and send it with another key",
    )


async def _put(call: Call, task: Task, on_conflict: OnConflict, durability: str) -> Handle:
    def put() -> Awaitable[Handle]:
        return call.put_into.put(task, on_conflict, durability)

    if call.may_reach_all or task.id is None:
        return await put_counted(call, task, put)
    # A key cannot replace, or learn about, a task that it may not see.
    if on_conflict != "keep":
        await call.check_not_others(task.id, task.lane)
    try:
        handle = await put_counted(call, task, put)
    except Conflict:
        raise Conflict(f"the id {task.id!r} is taken") from None
    except NotConfirmed as error:
        if kept_in(error) is not None:
            await call.check_not_others(task.id, task.lane)
        raise
    if handle.outcome == "kept":
        await call.check_not_others(task.id, task.lane)
    return handle


# -- read ------------------------------------------------------------------------------------------------------


async def get_task(call: Call) -> Answer:
    return answer(view(await _known(call)))


async def _known(call: Call) -> TaskInfo:
    task_id = call.params["id"]

    async def look(lane: str | None) -> str | None:
        return (await call.client.get(task_id, lane=lane)).target

    return _seen(call, await call.client.get(task_id, lane=await call.lane_seen(call.query.lane, "task", look)))


async def _there(call: Call) -> TaskInfo:
    """Return a task that can still be changed; a mere record of its id does not count."""
    return _seen(call, await find_live(call.client.store, call.params["id"], await _lane(call)))


async def _lane(call: Call) -> str | None:
    """Return the lane of the task."""
    task_id = call.params["id"]

    async def look(lane: str | None) -> str | None:
        return (await find_live(call.client.store, task_id, lane)).target

    return await call.lane_seen(call.query.lane, "task", look)


def _seen(call: Call, info: TaskInfo) -> TaskInfo:
    if info.state == "unknown":
        raise no_such("task", info.id)
    call.check_seen(info.target, "task", info.id)
    return info


def view(info: TaskInfo) -> dict[str, Any]:
    """Return a task as JSON fields. Payloads that are not JSON are returned as `payload_base64`."""
    fields = msgspec.structs.asdict(info)
    if isinstance(info.payload, bytes):
        fields["payload_base64"] = base64.b64encode(fields.pop("payload")).decode()
    return fields


async def list_tasks(call: Call) -> Answer:
    query: ListTasks = call.query
    page = await call.client.list(
        due_after=when(query.due_after, "due_after"),
        due_before=when(query.due_before, "due_before"),
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
    due_after, due_before = when(query.due_after, "due_after"), when(query.due_before, "due_before")
    return answer(await call.client.count(due_after=due_after, due_before=due_before))


async def explain_task(call: Call) -> Answer:
    task_id = call.params["id"]
    found = await call.client.explain(task_id, lane=await _lane(call), allowed=call.key.targets)
    if found.code == "unknown":
        raise no_such("task", task_id)
    call.check_seen(found.target, "task", task_id)
    return answer(found)


async def result_of_task(call: Call) -> Answer:
    task_id = call.params["id"]
    try:
        result = await call.client.find_result(task_id, lane=await _lane(call))
    except NotFound:
        if not call.may_reach_all:
            await _known(call)  # reveal nothing about tasks this key may not see
        raise
    if result is None:
        return answer(NotOver(task_id, (await _known(call)).state), 202)
    if not call.may_reach_all:
        call.check_seen(result.target or (await _known(call)).target, "task", task_id)
    return answer(result.as_dict())


# -- change ----------------------------------------------------------------------------------------------------


async def cancel_task(call: Call) -> Answer:
    task_id, lane = call.params["id"], await _lane(call)
    before = await find_live(call.client.store, task_id, lane)
    if before.state != "unknown" or not call.may_reach_all:
        _seen(call, before)
    # A task that is not there any more may have been cancelled before: that is answered as the first time.
    outcome = await call.client.cancel(task_id, lane=lane)
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
    handle = await call.client.reschedule(task_id, at=due_ms, lane=await _lane(call))
    await call.audit("task.reschedule", task_id, of_task(before), {"id": handle.id, "due_ms": handle.due_ms})
    return answer(Put.of(handle))


_ID: Final = "/v1/tasks/{id}"
ROUTES: Final = (
    Route(
        "POST", "/v1/tasks", put_task, "submit", "Put one task.", body=PostedTask, answers={200: Put, 201: Put},
        problems=("conflict", "idempotency", "too-large", "content-type", "quota", "not-confirmed", "out-of-memory"),
    ),
    Route("GET", "/v1/tasks", list_tasks, "read", "List tasks.", query=ListTasks, answers={200: TaskList}),
    Route(
        "GET", "/v1/tasks:count", count_tasks, "read", "Count pending tasks.", query=CountTasks, answers={200: Count}
    ),
    Route(
        "GET", _ID, get_task, "read", "Show one task.", query=OneTask, answers={200: TaskInfo},
        problems=("not-found", "ambiguous"),
    ),
    Route(
        "DELETE", _ID, cancel_task, "operate", "Cancel a task before it fires.", query=OneTask,
        answers={200: Cancelled, 202: Cancelled}, problems=("not-found", "ambiguous", "too-late"),
    ),
    Route(
        "POST", f"{_ID}/reschedule", reschedule_task, "operate", "Move a pending task to another time.",
        query=OneTask, body=NewTime, answers={200: Put},
        problems=("not-found", "ambiguous", "conflict", "too-large", "content-type", "out-of-memory"),
    ),
    Route(
        "GET", f"{_ID}/explain", explain_task, "read", "Say why a task has not run.", query=OneTask,
        answers={200: Explanation}, problems=("not-found", "ambiguous"),
    ),
    Route(
        "GET", f"{_ID}/result", result_of_task, "read", "Say how a task ended.", query=OneTask,
        answers={200: Ended, 202: NotOver}, problems=("not-found", "ambiguous"),
    ),
)  # fmt: skip
