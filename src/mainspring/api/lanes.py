"""`/v1/lanes` and `/v1/pauses`: stalled lanes, pausing and resuming."""

import re
from typing import Final, Literal

import msgspec

from ..model.audit import changes, of_lane, of_pause
from ..model.lane import LaneAnswer, LaneInfo, Mode, Pause, Scope
from ..model.task import pattern_fits
from ..store.lanes import read_lanes, read_pause
from .asgi import Answer, Problem, answer
from .routes import Call, Route
from .schedules import instant
from .tasks import Moment

_PLACE: Final = re.compile(r"(\d{1,15})\.(.*)", re.DOTALL)


class LaneQuery(msgspec.Struct, frozen=True):
    limit: int = 50
    cursor: str | None = None


class LaneList(msgspec.Struct):
    """Longest wait first; `next` is the cursor of the next page, null at the end."""

    lanes: list[LaneInfo]
    next: str | None


class LaneDone(msgspec.Struct):
    lane: str
    answer: Literal["ok"]


class Skip(msgspec.Struct, forbid_unknown_fields=True):
    """`reason` is kept with the dead letter."""

    reason: str = "skipped by hand"


class NewPause(msgspec.Struct, forbid_unknown_fields=True, rename={"for_": "for"}):
    """What to pause: `target` (may end in `*`), `queue`, `lane`, or `all`. It ends at `until`,
    after `for`, or when it is resumed. `drop` sends tasks that come due meanwhile to the dead letters."""

    target: str | None = None
    queue: str | None = None
    lane: str | None = None
    all: bool = False
    mode: Mode = "hold"
    reason: str = ""
    until: Moment | None = None
    for_: str | None = None


class PauseQuery(msgspec.Struct, frozen=True):
    """The pause to end: exactly what was paused."""

    target: str | None = None
    queue: str | None = None
    lane: str | None = None
    all: bool = False


class Paused(msgspec.Struct):
    """A pause: its scope, author, reason, beginning and end. `who` is the old name of `by`."""

    scope: str
    mode: Mode
    reason: str
    by: str
    who: str
    since_ms: int
    until_ms: int | None

    @classmethod
    def of(cls, pause: Pause) -> "Paused":
        return cls(pause.scope.text, pause.mode, pause.reason, pause.by, pause.by, pause.since_ms, pause.until_ms)


class PauseList(msgspec.Struct):
    pauses: list[Paused]


class Resumed(msgspec.Struct):
    scope: str
    outcome: Literal["resumed"]


# -- lanes -----------------------------------------------------------------------------------------------------


async def list_lanes(call: Call) -> Answer:
    call.check_unbound()
    query: LaneQuery = call.query
    if not 1 <= query.limit <= 1000:
        raise Problem("invalid", f"limit is {query.limit}; it must lie between 1 and 1000")
    behind = (-1, "") if query.cursor is None else _lane_place(query.cursor)
    page, more = await read_lanes(call.client.store, after=behind, limit=query.limit)
    return answer(LaneList(page, f"{page[-1].since_ms or 0}.{page[-1].lane}" if more else None))


def _lane_place(cursor: str) -> tuple[int, str]:
    """Sort key of a stalled lane: when it stalled, then its name."""
    match = _PLACE.fullmatch(cursor)
    if match is None:
        raise Problem("invalid", f"cursor {cursor[:80]!r} is not one that a list returned")
    return int(match[1]), match[2]


async def get_lane(call: Call) -> Answer:
    call.check_unbound()
    return answer(await call.client.lane(call.params["lane"]))


async def retry_lane_head(call: Call) -> Answer:
    before = await _lane(call)
    return await _lane_answer(call, "lane.retry-head", before, await call.client.lane_retry_head(before.lane))


async def skip_lane_head(call: Call) -> Answer:
    before = await _lane(call)
    done = await call.client.lane_skip_head(before.lane, reason=call.body.reason[:500])
    return await _lane_answer(call, "lane.skip-head", before, done)


async def resume_lane(call: Call) -> Answer:
    before = await _lane(call)
    return await _lane_answer(call, "lane.resume", before, await call.client.lane_resume(before.lane))


async def _lane(call: Call) -> LaneInfo:
    call.check_unbound()
    return await call.client.lane(call.params["lane"])


async def _lane_answer(call: Call, what: str, before: LaneInfo, done: LaneAnswer) -> Answer:
    if done == "too late":
        raise Problem("too-late", "the lane's head is being delivered right now; look again in a moment")
    if done != "ok":
        refused = Problem("conflict", _WHY[done])
        refused.members = {"answer": done}  # tells programs the two apart; the detail is for people
        raise refused
    await call.audit(what, before.lane, of_lane(before), None)
    return answer(LaneDone(before.lane, "ok"))


_WHY: Final = {
    "no head": "the lane waits for no failed task",
    "gone": "the lane's head has ended; the lane resumes by itself",
}


# -- pauses ----------------------------------------------------------------------------------------------------


async def list_pauses(call: Call) -> Answer:
    found = [one for one in await call.client.pauses() if call.may_reach_all or _within(call, one.scope.name)]
    return answer(PauseList([Paused.of(one) for one in found]))


async def add_pause(call: Call) -> Answer:
    wanted: NewPause = call.body
    _check_scope(call, wanted)
    until_ms = None if wanted.until is None else instant(wanted.until, "until")
    before = await read_pause(call.client.store, Scope.of(wanted.target, wanted.queue, wanted.lane))
    made = await call.client.pause(
        target=wanted.target,
        queue=wanted.queue,
        lane=wanted.lane,
        mode=wanted.mode,
        reason=wanted.reason,
        by=call.who[:500],
        until=until_ms,
        for_=wanted.for_,
    )
    await call.audit("pause.add", made.scope.text, *changes(of_pause(before), of_pause(made)))
    return answer(Paused.of(made), 201)


async def remove_pause(call: Call) -> Answer:
    query: PauseQuery = call.query
    _check_scope(call, query)
    named = {name: value for name in ("target", "queue", "lane") if (value := getattr(query, name)) is not None}
    scope = Scope.of(**named)
    before = await read_pause(call.client.store, scope)
    if not await call.client.resume(**named):
        raise Problem("not-found", f"nothing is paused as {scope.text[:200]!r}")
    await call.audit("pause.remove", scope.text, of_pause(before) or {"state": "paused"}, {"state": "resumed"})
    return answer(Resumed(scope.text, "resumed"))


def _check_scope(call: Call, wanted: NewPause | PauseQuery) -> None:
    names = (wanted.target, wanted.queue, wanted.lane)
    if sum(name is not None for name in names) + wanted.all != 1:
        raise Problem("invalid", 'name what to pause: one of "target", "queue", "lane", or "all": true')
    if not call.may_reach_all and (wanted.target is None or not _within(call, wanted.target)):
        raise Problem("forbidden", "this key is limited to certain targets and can pause only those")


def _within(call: Call, target: str) -> bool:
    return any(pattern_fits(pattern, target) for pattern in call.key.targets or ())


_LANE: Final = "/v1/lanes/{lane}"
_BODY: Final = ("too-large", "content-type")
ROUTES: Final = (
    Route(
        "GET", "/v1/lanes", list_lanes, "read", "List stalled lanes.", query=LaneQuery, answers={200: LaneList}
    ),
    Route("GET", _LANE, get_lane, "read", "Show one lane.", answers={200: LaneInfo}),
    Route(
        "POST", f"{_LANE}/retry-head", retry_lane_head, "operate", "Retry the failed head of a lane now.",
        answers={200: LaneDone}, problems=("conflict", "too-late", "out-of-memory"),
    ),
    Route(
        "POST", f"{_LANE}/skip-head", skip_lane_head, "operate", "Give up the failed head of a lane.", body=Skip,
        answers={200: LaneDone}, problems=("conflict", "too-late", *_BODY),
    ),
    Route(
        "POST", f"{_LANE}/resume", resume_lane, "operate", "Resume a parked or paused lane.",
        answers={200: LaneDone}, problems=("conflict", "too-late", "out-of-memory"),
    ),
    Route("GET", "/v1/pauses", list_pauses, "read", "List the pauses.", answers={200: PauseList}),
    Route(
        "POST", "/v1/pauses", add_pause, "operate", "Pause everything, a target, a queue, or a lane.",
        body=NewPause, answers={201: Paused}, problems=("out-of-memory", *_BODY),
    ),
    Route("DELETE", "/v1/pauses", remove_pause, "operate", "End a pause.", query=PauseQuery, answers={200: Resumed}),
)  # fmt: skip
