"""How a run ended: what the receiver said, what is decided about the task, and the record of what happened.

    said = await sink.deliver(batch)                # Done, Retry or Dead: model/delivery.py
    verdict = judge(said, body, ...)                # what becomes of the task
    record = RunRecord(...)                         # a fact that never changes

A node and a worker share `judge`, so that a policy means the same wherever a task runs.
"""

from typing import Final, Literal, NamedTuple

import msgspec

from .delivery import DROPPED, Body, Dead, Done, Outcome, Response, Retry, has_expired
from .ids import schedule_of
from .job import Output
from .lane import LanePolicy
from .limits import MAX_ERROR_CHARS
from .retry import GiveUp, RetryPolicy, decide, in_time_ms

UNTRIED_WAIT_MS: Final = 1_000
"""Wait after an attempt that did not reach its receiver, if no other was asked for."""

TaskEnd = Literal["done", "retry", "dead", "parked", "expired", "dropped", "cancelled"]
"""What becomes of a task after an attempt. `parked`: it waits at the head of its stalled lane."""

NotRunEnd = Literal["lost", "skipped", "missed", "paused", "excluded"]
"""Ends that nobody decided about a finished attempt. `lost`: the node or worker died; the others: a planned run of a
schedule did not take place (overlap, outage, pause, excluded day)."""

RunEnd = TaskEnd | NotRunEnd

FAILED_ENDS: Final = frozenset({"retry", "dead", "parked", "expired", "lost", "missed"})
"""Ends that count as failures."""


class Verdict(NamedTuple):
    """What becomes of a task after an attempt."""

    end: TaskEnd
    reason: str = ""
    wait_ms: int = 0
    """Wait before the next attempt."""
    counted: bool = True
    """False if the receiver was not asked: the attempt does not count."""

    @property
    def is_over(self) -> bool:
        """True if no further attempt follows. The head of a parked lane waits for a person."""
        return self.end not in ("retry", "parked")


DELIVERED: Final = Verdict("done")
STOPPED: Final = Verdict("cancelled", "cancelled while it ran")
"""The task was cancelled while it ran, and has stopped."""


def judge(
    said: Outcome,
    body: Body,
    original_due_ms: int,
    now_ms: int,
    policy: RetryPolicy,
    lane: LanePolicy | None,
    since_ms: int,
) -> Verdict:
    """Decide what becomes of a task whose due attempt was answered with `said`.

    `lane` is the policy of its lane, if it has one, and `since_ms` is when the lane's head first failed.
    """
    if isinstance(said, Done):
        return DELIVERED
    if isinstance(said, Retry) and said.untried:
        wait_ms = in_time_ms(said.after_ms or UNTRIED_WAIT_MS, body.expires_ms, now_ms)
        return Verdict("retry", said.reason[:MAX_ERROR_CHARS], wait_ms, counted=False)
    decision = decide(policy, body.attempt, said, original_due_ms, now_ms, body.expires_ms)
    if isinstance(decision, GiveUp):
        verdict = buried(decision.reason)
    else:
        verdict = Verdict("retry", said.reason[:MAX_ERROR_CHARS], decision.ms)
    return verdict if lane is None else parked(verdict, said.reason, lane, now_ms, since_ms)


def buried(reason: str) -> Verdict:
    """Return the verdict on a task that gets no further attempt."""
    end: TaskEnd = "expired" if has_expired(reason) else "dropped" if reason.startswith(DROPPED) else "dead"
    return Verdict(end, reason[:MAX_ERROR_CHARS])


def parked(verdict: Verdict, reason: str, lane: LanePolicy, now_ms: int, since_ms: int) -> Verdict:
    """Return the verdict on the failed head of a lane, which its policy may park until someone acts."""
    if verdict.end not in ("retry", "dead") or not verdict.counted:
        return verdict
    blocked_too_long = (
        lane.on_failure == "block"
        and verdict.end == "retry"
        and now_ms + verdict.wait_ms > since_ms + lane.max_block_ms
    )
    if lane.on_failure == "park" or blocked_too_long:
        return verdict._replace(end="parked", reason=reason[:MAX_ERROR_CHARS])
    return verdict


class RunRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One attempt at one task, or one planned run that did not take place."""

    idh: bytes
    end: RunEnd
    attempt: int
    due_ms: int
    """When the first attempt was due: with the namespace, the id and the lane it gives the idempotency key."""
    began_ms: int
    """0 if it did not begin."""
    ended_ms: int
    target: str
    by: str
    """The node that delivered it, or the worker that ran it."""
    reason: str = ""
    code: int | str | None = None
    """Status of the response, exit code, or type of the exception."""
    next_ms: int | None = None
    """When the next attempt is due."""
    id: str | None = None
    """The caller's id; None for a generated one."""
    lane: str | None = None
    queue: str | None = None
    planned_ms: int | None = None
    """Planned time of a schedule's run; the id begins with the schedule's name."""
    sent_bytes: int = 0
    answer_bytes: int = 0

    @property
    def task_id(self) -> str:
        """The task's id: the caller's, or 32 hex digits."""
        return self.id or self.idh.hex()

    @property
    def schedule(self) -> str | None:
        """The schedule whose run it is."""
        return schedule_of(self.id) if self.planned_ms is not None and self.id is not None else None

    @property
    def failed(self) -> bool:
        return self.end in FAILED_ENDS


class RunDetails(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a run left behind besides its record. It has a budget and an expiry of its own."""

    response: Response | None = None
    """The webhook's response."""
    output: Output | None = None
    """Output of a command."""
    log: tuple[str, ...] = ()
    """Lines that the handler logged."""
    traceback: str = ""


class Run(NamedTuple):
    """A record to be written, with its details if it has any."""

    record: RunRecord
    details: RunDetails | None = None


def code_of(said: Outcome) -> int | str | None:
    """Return the status of the response, or the type of the exception, behind an outcome."""
    if said.response is not None:
        return said.response.status
    error: BaseException | None = said.error if isinstance(said, Retry | Dead) else None
    return None if error is None else type(error).__name__
