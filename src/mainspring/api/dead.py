"""`/v1/dead`: tasks that were given up. Look at them, replay them, drop them."""

import asyncio
from typing import Any, Final, Literal

import msgspec

from ..client.dead_letters import FARTHEST_AHEAD_MS
from ..model.audit import of_dead_letter, of_dead_letters
from ..model.dead_letter import DeadLetter, Replayed, ReplaySummary
from ..model.task import pattern_fits
from ..model.times import instant_ms
from .asgi import Answer, Problem, answer, when
from .routes import Call, Route, no_such
from .tasks import Answered, Moment, OneTask, due_ms_of

MANY_S: Final = 30.0
"""Time limit of one replay or drop request. The response says whether dead letters remain."""


class ListDead(msgspec.Struct, frozen=True):
    """`target` may end in `*`; `reason` is part of the reason. Times are ISO 8601 or epoch milliseconds."""

    target: str | None = None
    lane: str | None = None
    reason: str | None = None
    died_after: str | None = None
    died_before: str | None = None
    limit: int = 50
    cursor: str | None = None


class DeadLetterView(msgspec.Struct):
    """Why a task died, every error on the way, and the task itself."""

    id: str
    reason: str
    died_ms: int
    due_ms: int
    damaged: bool
    target: str | None = None
    lane: str | None = None
    attempts: int | None = None
    errors: list[str] | None = None
    traceback: str | None = None
    """Traceback of the exception that the last attempt raised."""
    retry: str | None = None
    timeout_ms: int | None = None
    idempotency_key: str | None = None
    payload: Any = None
    response: Answered | None = None
    """Response of the webhook to the last attempt."""


class DeadLetterList(msgspec.Struct):
    """Newest first; `next` is the cursor of the next page, null at the end."""

    letters: list[DeadLetterView]
    next: str | None


class Replay(msgspec.Struct, forbid_unknown_fields=True):
    """`at` or `after`; neither means now. `new_key` gives the task another idempotency key than before."""

    at: Moment | None = None
    after: str | None = None
    new_key: bool = False
    dry_run: bool = False


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    """Selects the dead letters that match every given field; `all` selects all if none is given."""

    target: str | None = None
    lane: str | None = None
    reason: str | None = None
    died_after: str | None = None
    died_before: str | None = None
    all: bool = False
    dry_run: bool = False


class ReplayMany(Choice, forbid_unknown_fields=True):
    """With a `rate`, at most this many become due per second."""

    at: Moment | None = None
    after: str | None = None
    rate: float | None = None
    new_key: bool = False


class ManyReplayed(msgspec.Struct):
    """`complete` is false if time ran out: send the request again for the rest, with this `died_before`.
    Otherwise tasks that died again meanwhile are replayed again too."""

    replayed: int
    conflict: int
    damaged: int
    gone: int
    dry_run: bool
    complete: bool
    died_before: int
    problems: list[Replayed]


class ManyDropped(msgspec.Struct):
    dropped: int
    dry_run: bool
    complete: bool


class Dropped(msgspec.Struct):
    id: str
    outcome: Literal["dropped"]


async def list_dead(call: Call) -> Answer:
    query: ListDead = call.query
    page = await call.client.dead.list(
        limit=query.limit,
        cursor=query.cursor,
        target=query.target,
        lane=query.lane,
        reason=query.reason,
        died_after=when(query.died_after, "died_after"),
        died_before=when(query.died_before, "died_before"),
    )
    seen = [one.as_dict(call.namespace) for one in page.letters if call.key.sees(one.target)]
    return answer({"letters": seen, "next": page.next})


async def get_dead(call: Call) -> Answer:
    return answer((await _dead_letter(call)).as_dict(call.namespace))


async def _dead_letter(call: Call) -> DeadLetter:
    task_id = call.params["id"]
    dead_letter = await call.client.dead.get(task_id, lane=await _lane(call))
    if dead_letter is None:
        raise no_such("dead letter", task_id)
    call.check_seen(dead_letter.target, "dead letter", task_id)
    return dead_letter


async def _lane(call: Call) -> str | None:
    """Return the lane of the dead letter."""

    async def look(lane: str | None) -> str | None:
        dead_letter = await call.client.dead.get(call.params["id"], lane=lane)
        return None if dead_letter is None else dead_letter.target

    return await call.lane_seen(call.query.lane, "dead letter", look)


async def replay_dead(call: Call) -> Answer:
    wanted: Replay = call.body
    dead_letter = await _dead_letter(call)
    replayed = await call.client.dead.replay(
        call.params["id"],
        lane=await _lane(call),
        at=_due_ms(call, wanted.at, wanted.after),
        new_key=wanted.new_key,
        dry_run=wanted.dry_run,
    )
    match replayed.outcome:
        case "conflict" | "damaged":
            raise Problem("conflict", f"{replayed.outcome}: {replayed.note}")
        case "gone" | "unknown":
            raise no_such("dead letter", call.params["id"])
    if not wanted.dry_run:
        await call.audit("dead.replay", dead_letter.id, of_dead_letter(dead_letter), {"due_ms": replayed.due_ms})
    return answer(replayed)


async def drop_dead(call: Call) -> Answer:
    dead_letter = await _dead_letter(call)
    if await call.client.dead.drop(call.params["id"], lane=await _lane(call)) == "unknown":
        raise no_such("dead letter", call.params["id"])
    await call.audit("dead.drop", dead_letter.id, of_dead_letter(dead_letter), None)
    return answer(Dropped(dead_letter.id, "dropped"))


# -- bulk operations -------------------------------------------------------------------------------------------


async def replay_many_dead(call: Call) -> Answer:
    wanted: ReplayMany = call.body
    filters = _filters(call, wanted)
    summary = ReplaySummary(wanted.dry_run)
    complete = True
    so_far_ms = await call.client.store.sample_clock() + 1
    if filters["died_before"] is not None:
        so_far_ms = min(so_far_ms, instant_ms(filters["died_before"]))

    def progress(so_far: ReplaySummary) -> None:
        nonlocal summary
        summary = so_far

    try:
        async with asyncio.timeout(MANY_S):
            summary = await call.client.dead.replay_many(
                **filters,
                at=_due_ms(call, wanted.at, wanted.after),
                rate=wanted.rate,
                new_key=wanted.new_key,
                dry_run=wanted.dry_run,
                progress=progress,
            )
    except TimeoutError:
        complete = False
        if wanted.rate is not None:
            # Dead letters replayed so far are due first: the next request starts at this moment and keeps the rate.
            await asyncio.sleep(FARTHEST_AHEAD_MS / 1000)
    finally:
        await _audit_many(call, "dead.replay", replayed=summary.replayed)
    shown = {"replayed", "conflict", "damaged", "gone", "dry_run", "problems"}
    return answer({name: getattr(summary, name) for name in shown} | {"complete": complete, "died_before": so_far_ms})


async def drop_many_dead(call: Call) -> Answer:
    wanted: Choice = call.body
    filters = _filters(call, wanted)
    count, complete = 0, True

    def progress(so_far: int) -> None:
        nonlocal count
        count = so_far

    try:
        async with asyncio.timeout(MANY_S):
            count = await call.client.dead.drop_many(**filters, dry_run=wanted.dry_run, progress=progress)
    except TimeoutError:
        complete = False
    finally:
        await _audit_many(call, "dead.drop", dropped=count)
    return answer(ManyDropped(count, wanted.dry_run, complete))


async def _audit_many(call: Call, what: str, **counted: int) -> None:
    """Record the changes, even on an error: a server that became full midway has made some of them."""
    if not call.body.dry_run and any(counted.values()):
        await call.audit(what, "many", _chosen(call.body), counted)


def _filters(call: Call, wanted: Choice) -> dict[str, Any]:
    chosen = {"target": wanted.target, "lane": wanted.lane, "reason": wanted.reason}
    times = {name: when(getattr(wanted, name), name) for name in ("died_after", "died_before")}
    if not wanted.all and all(value is None for value in (*chosen.values(), *times.values())):
        raise Problem("invalid", 'name the dead letters: a filter such as "target", or "all": true')
    bound = call.key.targets
    if bound is not None and (wanted.target is None or not any(pattern_fits(one, wanted.target) for one in bound)):
        raise Problem("forbidden", f"this key is bound to targets; name one of them: {', '.join(bound)}")
    return chosen | times


def _due_ms(call: Call, at: Moment | None, after: str | None) -> int | None:
    if at is None and after is None:
        return None
    try:
        return due_ms_of(at, after, call.client.store.clock.now_ms())
    except OverflowError:
        raise Problem("invalid", "the time lies outside of the calendar") from None


def _chosen(wanted: Choice) -> dict[str, str]:
    names = ("target", "lane", "reason", "died_after", "died_before")
    return of_dead_letters(**{name: getattr(wanted, name) for name in names})


_ID: Final = "/v1/dead/{id}"
_BODY: Final = ("too-large", "content-type")
ROUTES: Final = (
    Route("GET", "/v1/dead", list_dead, "read", "List dead letters.", query=ListDead, answers={200: DeadLetterList}),
    Route(
        "GET", _ID, get_dead, "read", "Show one dead letter.", query=OneTask, answers={200: DeadLetterView},
        problems=("not-found", "ambiguous"),
    ),
    Route(
        "POST", f"{_ID}/replay", replay_dead, "operate", "Deliver a dead letter again.", query=OneTask, body=Replay,
        answers={200: Replayed}, problems=("not-found", "ambiguous", "conflict", "out-of-memory", *_BODY),
    ),
    Route(
        "DELETE", _ID, drop_dead, "operate", "Drop a dead letter.", query=OneTask, answers={200: Dropped},
        problems=("not-found", "ambiguous"),
    ),
    Route(
        "POST", "/v1/dead:replay", replay_many_dead, "operate", "Deliver all matching dead letters again.",
        body=ReplayMany, answers={200: ManyReplayed}, problems=("out-of-memory", *_BODY),
    ),
    Route(
        "POST", "/v1/dead:drop", drop_many_dead, "operate", "Drop all matching dead letters.", body=Choice,
        answers={200: ManyDropped}, problems=_BODY,
    ),
)  # fmt: skip
