"""Explain why a task has not run: how it ended, or else what it waits for."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ...model.dead_letter import DeadLetter
from ...model.delivery import DROPPED, EXPIRED, EXPIRED_RUNNING, Body
from ...model.explain import UNKNOWN, Explanation, ReasonCode, moment, span
from ...model.ids import schedule_of
from ...model.lane import NO_SINK, PARKED, HoldRecord, Pause, Pauses
from ...model.targets.names import HANDED_OFF
from ...model.task import State, pattern_fits
from ...model.workers import why_no_worker
from ..codec import HEADER_BYTES, LANE, decode_head, is_cut, is_tombstone
from ..keys import Address, PartitionKeys, r_of
from ..lanes import read_pauses
from ..limits import SlotCount, running_slots
from ..members import About, ClusterView, Holding, live_workers, look
from ..owner.holds import record_of, waits_for
from ..owner.read import slices_in
from ..schedules import run_before
from ..store import Store
from .dead_letters import KeptDeadLetter, how_it_ended
from .find import Finder, Located, Reference
from .index import look_up
from .pages import AT_ONCE_BYTES, heads
from .query import Found, look_at

_SLICES_READ: Final = 64
_ROWS_AT_ONCE: Final = 1_000
_ROWS_READ: Final = 50_000
"""Rows searched for the task ahead in a lane; in a longer backlog none is named."""


class LaneHead(NamedTuple):
    """The task a lane waits for."""

    id: str
    state: State
    due_ms: int | None
    body: Body | None


async def head_before(store: Store, lane: str, idh: bytes, address: Address, place_ms: int) -> LaneHead | None:
    """Return the task that the one at `place_ms` has to wait for; None if it is its turn."""
    keys = store.keys.partitions[address.partition]
    [held] = await store.run_one(keys.slot, [("HGET", keys.held, lane)])
    if held is not None and held[:16] == idh:
        return None
    if held is not None and (head := await _retrying(store, lane, address.partition, held[:16])) is not None:
        return head
    return await _earlier(store, keys, lane, idh, (place_ms, address.index))


async def _retrying(store: Store, lane: str, partition: int, idh: bytes) -> LaneHead | None:
    """Return the failed head; None if its id belongs to another lane by now, which the owner has not yet learned."""
    [address] = await look_up(store, [(partition, idh)])
    if address is None:
        return LaneHead(idh.hex(), "unknown", None, None)
    [found] = await look_at(store, [(address, idh)])
    if found.body is not None and not waits_for(lane, found):
        return None
    task_id = found.body.id if found.body is not None and found.body.id else f"{idh.hex()}~{address.text()}"
    return LaneHead(task_id, found.state, found.due_ms, found.body)


async def _earlier(
    store: Store, keys: PartitionKeys, lane: str, idh: bytes, before: tuple[int, int]
) -> LaneHead | None:
    """Return the lane's task that is under way, or else the first one due earlier."""
    first: tuple[tuple[int, int], LaneHead] | None = None
    async for where, address, row, fired in _unsettled(store, keys, before[0]):
        body = _of_lane(row, lane)
        if body is None or row[5:HEADER_BYTES] == idh:
            continue
        if is_cut(row):  # due time and number of failures are in the rest of the body
            body = (await look_at(store, [(address, row[5:HEADER_BYTES])]))[0].body or body
        due_ms = where[0] if body.due_ms is None else body.due_ms
        task_id = body.id or f"{row[5:HEADER_BYTES].hex()}~{address.text()}"
        if fired:
            return LaneHead(task_id, "fired", due_ms, body)
        if where < min(before, first[0] if first is not None else before):
            first = where, LaneHead(task_id, "pending", due_ms, body)
    return None if first is None else first[1]


def _of_lane(row: bytes, lane: str) -> Body | None:
    if len(row) < HEADER_BYTES or not row[4] & LANE or is_tombstone(row):
        return None
    try:
        body = decode_head(row)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return body if body.lane == lane else None


async def _unsettled(
    store: Store, keys: PartitionKeys, until_ms: int
) -> AsyncIterator[tuple[tuple[int, int], Address, bytes, bool]]:
    """Yield (time and index, address, entry, fired) of rows neither done nor cancelled, slice by slice."""
    high = f"({until_ms // 1000 + 1}"
    command = ("ZRANGE", keys.slices, "-inf", high, "BYSCORE", "LIMIT", 0, _SLICES_READ, "WITHSCORES")
    [listed] = await store.run_one(keys.slot, [command])
    rows_left = _ROWS_READ
    for place, score in slices_in(keys, listed):
        first, length = 0, 1
        while first < length and rows_left > 0:
            window = heads(store, keys.number, place, first, _ROWS_AT_ONCE, AT_ONCE_BYTES, content=True)
            (length, *rows), fired, done, gone, _ = await store.run_one(*window)
            if not rows:
                break
            for at, row in enumerate(rows, first & 7):
                if not _bit(done, at) and not _bit(gone, at):
                    index = first - (first & 7) + at
                    where = place.from_ms + int.from_bytes(row[:4], "big"), index
                    address = Address(keys.number, place, r_of(score), index)
                    yield where, address, row, _bit(fired, at)
            first, rows_left = first + len(rows), rows_left - len(rows)


def _bit(bits: bytes | None, index: int) -> bool:
    return bits is not None and index >> 3 < len(bits) and bool(bits[index >> 3] & (0x80 >> (index & 7)))


async def over(store: Store, task_id: str, reference: Reference, located: Located | None) -> Explanation:
    now_ms = await store.sample_clock()
    state, kept, _ = await how_it_ended(store, reference, located)
    if kept is not None:
        return _dead(task_id, now_ms, kept)
    body = None if located is None else located.entry.body
    code, text = _ENDS.get(state, _ENDS["unknown"])
    if state == "finished" and reference.address is None:
        # A cancelled task leaves no mark in the index.
        code, text = _ENDS["done"]
    return Explanation(
        id=task_id,
        code=code,
        text=text,
        state=state,
        now_ms=now_ms,
        due_ms=None if located is None else located.entry.due_ms,
        partition=None if located is None else located.address.partition,
        target=None if body is None else body.target,
        lane=None if body is None else body.lane,
        attempt=None if body is None else body.attempt,
        errors=() if body is None else body.errors,
    )


_ENDS: Final[dict[str, tuple[ReasonCode, str]]] = {
    "done": ("done", "It was delivered."),
    "finished": ("finished", "It is over and its slice is gone: it was delivered, unless it was cancelled before."),
    "cancelled": ("cancelled", "It was cancelled and will not fire."),
    "replaced": ("replaced", "It was moved many times since this id was given out; ask with the id of the last move."),
    "dead": ("dead", "It was given up; its dead letter has been replayed or dropped just now."),
    "unknown": ("unknown", UNKNOWN),
}


def _dead(task_id: str, now_ms: int, kept: KeptDeadLetter) -> Explanation:
    dead_letter = kept.dead_letter
    code, text = _how_it_died(dead_letter, now_ms)
    return Explanation(
        id=task_id,
        code=code,
        text=text,
        state="dead",
        now_ms=now_ms,
        due_ms=dead_letter.due_ms,
        partition=kept.place[1],
        target=dead_letter.target or None,
        lane=dead_letter.lane,
        attempt=dead_letter.attempts,
        errors=dead_letter.errors,
        reason=dead_letter.reason,
        died_ms=dead_letter.died_ms,
    )


def _how_it_died(dead_letter: DeadLetter, now_ms: int) -> tuple[ReasonCode, str]:
    ago = f"{span(max(0, now_ms - dead_letter.died_ms))} ago"
    if dead_letter.reason == EXPIRED_RUNNING:
        return "expired", f"A worker was running it when it expired, {ago}; replay it to run it once more."
    if dead_letter.reason == EXPIRED:
        return (
            "expired",
            f"It was not delivered in time and was recorded as expired {ago}; replay it to deliver it late.",
        )
    if dead_letter.reason.startswith(DROPPED):
        return "dead", f"It was {dead_letter.reason}, {ago}; replay it to deliver it anyway."
    after = f"after {dead_letter.attempts} attempt{'s' if dead_letter.attempts != 1 else ''}"
    return "dead", f"It was given up {ago} {after}: {dead_letter.reason}; fix the cause, then replay it."


PROMPT_MS: Final = 1_000
"""A task overdue by less than this is about to fire."""


class Facts(NamedTuple):
    """Facts about a task that is not finished."""

    id: str
    now_ms: int
    located: Located
    view: ClusterView
    holding: Holding
    head: LaneHead | None
    hold: HoldRecord | None = None
    """The hold of the slice that it is in."""
    pause: Pause | None = None
    """The pause that holds this task; for a queued task, the one that stops its workers."""
    slots: SlotCount | None = None
    """Concurrency slots of its queue, if it has a limit."""
    run_before: str | None = None
    """The run of the same schedule that it waits for."""
    no_worker: str | None = None
    """Why no live worker can run it; None if one can, or if a worker has it already."""

    @property
    def entry(self) -> Found:
        return self.located.entry

    @property
    def late_ms(self) -> int:
        """Milliseconds since the task came due; negative before."""
        return self.now_ms - (self.entry.due_ms or self.located.address.slice.since_ms)

    @property
    def owner(self) -> str | None:
        """The node that owns the partition; owners are named `<node>/<process>`."""
        return self.holding.owner.rpartition("/")[0] or self.holding.owner or None

    @property
    def lag_ms(self) -> int | None:
        return None if self.about_owner is None else self.about_owner.lag_ms

    @property
    def about_owner(self) -> About | None:
        member = self.view.members.get(self.owner or "")
        return None if member is None else member.about


Reason = Callable[[Facts], tuple[ReasonCode, str] | None]


def _unreadable(facts: Facts) -> tuple[ReasonCode, str] | None:
    if facts.entry.body is not None:
        return None
    return "unreadable", "Its entry cannot be read; the owner of its partition moves it to the dead letters."


def _in_queue(facts: Facts) -> tuple[ReasonCode, str] | None:
    place = facts.entry.queued
    if place is None:
        return None
    ago = span(max(0, facts.now_ms - place.since_ms))
    if place.worker is None and facts.slots is not None and facts.slots.all_in_use:
        most = f"its concurrency limit of {facts.slots.most} on all workers is reached"
        return "rate-limited", f"It has been in queue {place.queue} for {ago}: {most}."
    if place.worker is None and facts.no_worker is not None:
        return "no-worker", f"It has been in queue {place.queue} for {ago}: {_ended(facts.no_worker)}"
    if place.worker is None:
        return "queued", f"It has been in queue {place.queue} for {ago}, and no worker has taken it yet."
    stops = "; it was cancelled, and its worker has been asked to stop" if place.cancelling else ""
    return "running", f"Worker {place.worker} has been running it for {ago}{stops}."


def _ended(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def _expired(facts: Facts) -> tuple[ReasonCode, str] | None:
    expires_ms = facts.entry.body.expires_ms if facts.entry.body is not None else None
    if facts.entry.state not in ("pending", "queued") or expires_ms is None or expires_ms >= facts.now_ms:
        return None
    who = "its owner" if facts.entry.state == "pending" else "the next worker that takes it"
    ago = span(facts.now_ms - expires_ms)
    return "expired", f"It expired {ago} ago and is not delivered any more; {who} moves it to the dead letters."


def _ahead(facts: Facts) -> tuple[ReasonCode, str] | None:
    """Answer if the due time of the task, or of its next attempt, has not come."""
    body, due_ms = facts.entry.body, facts.entry.due_ms
    if facts.entry.state != "pending" or facts.late_ms >= 0 or body is None or due_ms is None:
        return None
    when = f"in {span(-facts.late_ms)} ({moment(due_ms)})"
    no_node = "" if facts.view.members or facts.owner else "; no node is running now"
    if body.attempt == 1:
        return "not-due", f"It is not due yet: it comes due {when}{no_node}."
    error = f"; the last error was: {body.errors[-1]}" if body.errors else ""
    failed = "once" if body.attempt == 2 else f"{body.attempt - 1} times"
    if body.expires_ms is not None and body.expires_ms < due_ms:
        return (
            "retry",
            f"It failed {failed}, and expires {when}, before another attempt{error}{no_node}.",
        )
    return "retry", f"It failed {failed}; attempt {body.attempt} comes {when}{error}{no_node}."


def _ownerless(facts: Facts) -> tuple[ReasonCode, str] | None:
    if facts.owner is not None:
        return None
    begun = facts.entry.state == "fired"
    what = "It was begun and not finished" if begun else f"It has been due for {span(facts.late_ms)}"
    then = "delivers it again" if begun else "fires it"
    if not facts.view.members:
        return "no-node", f"{what}, and no node is running; start one: mainspring serve."
    planned = facts.view.owners[facts.located.address.partition]
    after = f"; by the plan node {planned} takes it and {then}" if planned else f"; the next owner {then}"
    return "no-owner", f"{what}, and its partition {facts.located.address.partition} has no owner{after}."


def _under_way(facts: Facts) -> tuple[ReasonCode, str] | None:
    if facts.entry.state != "fired" or facts.entry.due_ms is None:
        return None
    since = f"started at {moment(facts.entry.due_ms)} or later"
    return "fired", f"Node {facts.owner} is delivering it, {since}, and has not finished."


def _held(facts: Facts) -> tuple[ReasonCode, str] | None:
    """Answer if its receiver is failing, limited, or slow; attempts are not used up meanwhile."""
    hold = facts.hold
    if hold is None or hold.code not in _HELD or facts.entry.state != "pending":
        return None
    held = f"It has been held since {moment(hold.since_ms)}"
    return _HELD[hold.code], f"{held}: {hold.reason}{_probed(hold, facts.now_ms)}."


def _probed(hold: HoldRecord, now_ms: int) -> str:
    """Say when an open breaker is tried again."""
    if hold.until_ms is None:
        return ""
    when = f"is sent in {span(hold.until_ms - now_ms)}" if hold.until_ms > now_ms else "is due"
    return f"; the next probe {when} ({moment(hold.until_ms)})"


_HELD: Final[dict[str, ReasonCode]] = {
    "breaker": "breaker",
    "rate-limited": "rate-limited",
    "catch-up": "catch-up",
    "slow": "slow",
    NO_SINK: "no-sink",
}


def _paused_queue(facts: Facts) -> tuple[ReasonCode, str] | None:
    """Answer if the task is due and its queue is paused."""
    if facts.entry.state != "queued" or facts.pause is None:
        return None
    return "paused", f"It waits in its queue, which is paused: {_paused_by(facts.pause)}."


def _paused(facts: Facts) -> tuple[ReasonCode, str] | None:
    if facts.entry.state != "pending" or facts.pause is None:
        return None
    after = "it is dropped" if facts.pause.mode == "drop" else "it is delivered afterwards"
    return "paused", f"It has been due for {span(facts.late_ms)} and is paused: {_paused_by(facts.pause)}; {after}."


def _paused_by(pause: Pause) -> str:
    by = f" by {pause.by}" if pause.by else ""
    until = "until someone resumes it" if pause.until_ms is None else f"until {moment(pause.until_ms)}"
    why = f" ({pause.reason})" if pause.reason else ""
    return f"{pause.scope.text}, since {moment(pause.since_ms)}{by}{why}, {until}"


def _parked(facts: Facts) -> tuple[ReasonCode, str] | None:
    hold, body = facts.hold, facts.entry.body
    if hold is None or hold.cause != PARKED or body is None or body.lane is None:
        return None
    then = f"retry its head, skip it or resume the lane: mainspring lane show {body.lane}"
    if facts.head is None and body.attempt > 1:
        return "parked", f"It failed ({hold.reason}), and its lane {body.lane} is parked until someone acts; {then}."
    if facts.head is None:
        return None
    return "parked", f"Its lane {body.lane} is parked behind {facts.head.id}, which failed ({hold.reason}); {then}."


def _coming_back(facts: Facts) -> tuple[ReasonCode, str] | None:
    """Answer if it was held and its hold has ended."""
    hold = facts.hold
    if hold is None or facts.entry.state != "pending":
        return None
    return "held", f"It was held from {moment(hold.since_ms)} on and is being released now."


def _behind_head(facts: Facts) -> tuple[ReasonCode, str] | None:
    head = facts.head
    if head is None:
        return None
    lane = facts.entry.body.lane if facts.entry.body is not None else None
    return "behind-head", f"It waits in lane {lane} behind {head.id}, which {_doing(head, facts.now_ms)}."


def _doing(head: LaneHead, now_ms: int) -> str:
    if head.state == "fired":
        return "is being delivered"
    if head.state != "pending" or head.due_ms is None:
        return "failed and has not been retried" if head.state == "unknown" else f"is {head.state}"
    ahead = f"in {span(head.due_ms - now_ms)}" if head.due_ms > now_ms else "now"
    if head.body is not None and head.body.attempt > 1:
        error = f" ({head.body.errors[-1]})" if head.body.errors else ""
        return f"failed{error} and will be retried, attempt {head.body.attempt}, {ahead}"
    return f"comes first and is due {ahead}"


def _run_before(facts: Facts) -> tuple[ReasonCode, str] | None:
    if facts.run_before is None:
        return None
    return "run-before", f"It is a run of a schedule and waits for the run before it, {facts.run_before}, to end."


def _overdue(facts: Facts) -> tuple[ReasonCode, str]:
    late = span(facts.late_ms)
    if facts.late_ms < PROMPT_MS:
        return "due", f"It has been due for {late}; node {facts.owner} is about to fire it."
    about = facts.about_owner
    if about is not None and about.catch_up and facts.late_ms > about.catch_up_after_ms:
        rate = f"node {facts.owner} releases overdue tasks at {about.catch_up}"
        return "catch-up", f"It has been due for {late}, and {rate}: it waits its turn."
    lag = "" if facts.lag_ms is None else f" (it reports being {span(facts.lag_ms)} behind)"
    return "owner-behind", f"It has been due for {late}, and node {facts.owner} has not reached it yet{lag}."


_NOT_OVER: Final = frozenset({"pending", "fired", "queued", "running"})

REASONS: Final[tuple[Reason, ...]] = (
    _unreadable, _expired, _paused_queue, _in_queue, _ahead, _ownerless, _under_way, _paused, _parked, _held,
    _behind_head, _coming_back, _run_before, _overdue,
)  # fmt: skip
"""Reasons why a task that is not over may wait, in order of precedence: the first function that answers gives the
reason, and the last always answers. To add a reason, write such a function, insert it at its precedence, and name its
code in `model.explain`."""


async def explain(
    store: Store, finder: Finder, task_id: str, reference: Reference, allowed: Sequence[str] | None = None
) -> Explanation:
    """`allowed` are target patterns; queues and handlers that match none of them are not named."""
    located = await finder.find(reference)
    if located is None or located.entry.state not in _NOT_OVER:
        return await over(store, task_id, reference, located)
    view, holdings = await look(store)
    head = None
    body, address = located.entry.body, located.address
    now_ms = await store.fresh_ms()
    if body is not None and body.lane is not None and located.entry.state == "pending":
        # A task that was overdue when it was put is placed at the time of the put, not at its due time.
        place_ms = max(located.entry.due_ms or 0, 0 if address.slice.is_hold else address.slice.start_ms)
        head = await head_before(store, body.lane, located.idh, address, place_ms) if place_ms <= now_ms else None
    hold = await record_of(store, address.partition, address.slice) if address.slice.is_hold else None
    pause = None if body is None else await _pause_of(store, located.entry, body, hold, now_ms)
    waiting = located.entry.queued if located.entry.state == "queued" else None
    slots = None if waiting is None else await running_slots(store, waiting.queue, now_ms)
    before = None
    if body is not None and body.occurrence is not None and located.entry.state == "pending":
        before = await run_before(store, address.partition, schedule_of(task_id), body.occurrence)
    no_worker = await _unrunnable(store, located.entry, allowed)
    facts = Facts(
        task_id, now_ms, located, view, holdings[address.partition], head, hold, pause, slots, before, no_worker
    )
    code, text = next(answer for reason in REASONS if (answer := reason(facts)) is not None)
    if no_worker is not None and located.entry.state == "pending":
        # It has not reached its queue yet: better to report this now than when it is late.
        text = f"{text.removesuffix('.')}; {_ended(no_worker)}"
    if code != "no-sink" and (lacking := _owner_lacks(facts)) is not None:
        text = f"{text.removesuffix('.')}; {lacking}."
    return _explanation(facts, code, text)


def _owner_lacks(facts: Facts) -> str | None:
    """Say that the owner of a waiting task cannot deliver it."""
    body, about = facts.entry.body, facts.about_owner
    scheme = "" if body is None else body.target.partition(":")[0]
    if about is None or scheme not in about.lacks or facts.entry.state != "pending":
        return None
    return f"node {facts.owner}, which owns its partition, cannot deliver to {scheme}: for want of a package"


async def _unrunnable(store: Store, entry: Found, allowed: Sequence[str] | None) -> str | None:
    """Say why no worker can run a waiting task; None if one can."""
    place, body = entry.queued, entry.body
    if body is None or entry.state not in ("pending", "queued") or body.target.partition(":")[0] not in HANDED_OFF:
        return None

    def may_name(target: str) -> bool:
        return allowed is None or any(pattern_fits(pattern, target) for pattern in allowed)

    return why_no_worker(body.target, None if place is None else place.queue, await live_workers(store), may_name)


async def _pause_of(store: Store, entry: Found, body: Body, hold: HoldRecord | None, now_ms: int) -> Pause | None:
    """Return the pause of the task, or of the one before it in its lane; for a queued task only its queue's pause."""
    pauses = Pauses(await read_pauses(store), now_ms)
    if entry.queued is not None:
        return pauses.of_queue(entry.queued.queue)
    before = None if hold is None else pauses.by_scope.get(hold.cause.removeprefix("pause:"))
    return pauses.of_task(body.target, body.lane) or before


def _explanation(facts: Facts, code: ReasonCode, text: str) -> Explanation:
    entry, body, head = facts.entry, facts.entry.body, facts.head
    fields: dict[str, Any] = {}
    if body is not None:
        fields = {"target": body.target, "lane": body.lane, "attempt": body.attempt, "errors": body.errors}
    if entry.queued is not None:
        place = entry.queued
        fields |= {"queue": place.queue, "worker": place.worker, "since_ms": place.since_ms}
    if head is not None:
        fields |= {"head_id": head.id, "head_state": head.state, "head_due_ms": head.due_ms}
    why = facts.pause if code == "paused" else facts.hold if code in ("parked", "held", *_HELD.values()) else None
    if why is not None:
        fields |= {"since_ms": why.since_ms, "reason": why.reason or None, "until_ms": why.until_ms}
        fields["by"] = fields["who"] = why.who or None
    return Explanation(
        id=facts.id,
        code=code,
        text=text,
        state=entry.state,
        now_ms=facts.now_ms,
        due_ms=entry.due_ms,
        wait_ms=-facts.late_ms,
        partition=facts.located.address.partition,
        owner=facts.owner,
        planned=facts.view.owners[facts.located.address.partition] or None,
        nodes=len(facts.view.members),
        lag_ms=facts.lag_ms,
        **fields,
    )
