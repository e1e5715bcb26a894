"""The end of a run: the outcome of its attempt, the verdict on its task, and the record for the history.

    said = await sink.deliver(batch)                # Done, Retry or Dead: model/delivery.py
    verdict = judge(said, body, ...)                # what happens to the task
    record = RunRecord.of(task, verdict, said, ...) # a fact that never changes
    failures.report(record.failure(said, key))      # for the error handler
    rules.keeps(record)                             # whether the history has it

A node and a worker share all of this, so that a policy means the same wherever a task runs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, Self, get_args

import msgspec
from msgspec import structs

from .delivery import DROPPED, UNREADABLE, Body, Dead, Done, Failure, Fate, Outcome, Response, Retry, has_expired
from .errors import InvalidInput
from .ids import bare_idh, idh_of, occurrence_id, schedule_of
from .job import Output
from .lane import LanePolicy
from .limits import MAX_ERROR_CHARS
from .retry import GiveUp, RetryPolicy, decide, in_time_ms
from .targets.names import shown_target
from .task import fits_one, pattern_fits

if TYPE_CHECKING:
    from .schedule.chain import NotRun
    from .schedule.definition import Definition

UNTRIED_WAIT_MS: Final = 1_000
"""Wait after an attempt that did not reach its receiver, if no other was asked for."""

TaskEnd = Literal["done", "retry", "dead", "parked", "expired", "dropped", "cancelled"]
"""What happens to a task after an attempt. `parked`: it waits at the head of its stalled lane."""

NotRunEnd = Literal["lost", "skipped", "missed", "paused", "excluded"]
"""Ends without a finished attempt. `lost`: the node or worker died. The others: a planned run of a schedule did not
take place (overlap, outage, pause, excluded day)."""

RunEnd = Literal[TaskEnd, "timeout", NotRunEnd]
"""`timeout`: a retry or a death because the attempt took too long; `next_ms` says whether another attempt follows."""

LOST: Final = "the node or worker that had it died, or lost its lease; it went out again"
"""Reason of an attempt whose end is unknown."""

PASSED_ENDS: Final[Mapping[str, NotRunEnd | Literal["cancelled"]]] = {
    "missed": "missed", "overlap": "skipped", "paused": "paused", "excluded": "excluded", "cancelled": "cancelled",
    "lost": "lost",
}  # fmt: skip
"""The end in the record of a planned time that did not run, by the reason that schedules count."""

FAILED_ENDS: Final[frozenset[RunEnd]] = frozenset({"retry", "dead", "timeout", "parked", "expired", "lost", "missed"})
"""Ends that count as failures."""


class Verdict(NamedTuple):
    """What becomes of a task after an attempt."""

    end: TaskEnd
    reason: str = ""
    wait_ms: int = 0
    """Wait before the next attempt."""
    counted: bool = True
    """False if the receiver was not contacted: the attempt does not count."""

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
    """Decide what happens to a task whose due attempt had the outcome `said`.

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


class Attempted(Protocol):
    """A task in the hands of a node or a worker."""

    @property
    def idh(self) -> bytes: ...
    @property
    def body(self) -> Body: ...
    @property
    def original_due_ms(self) -> int: ...


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

    @classmethod
    def of(
        cls,
        task: Attempted,
        verdict: Verdict,
        said: Outcome,
        began_ms: int,
        now_ms: int,
        by: str,
        *,
        code: int | None = None,
        queue: str | None = None,
        answer_bytes: int = 0,
    ) -> Self:
        """Return the record of an attempt that has ended. `code` is the exit code, if it was a command."""
        body, end = task.body, verdict.end
        return cls(
            task.idh,
            "timeout" if end in ("retry", "dead") and isinstance(error_of(said), TimeoutError) else end,
            body.attempt,
            task.original_due_ms,
            began_ms,
            now_ms,
            body.target,
            by,
            verdict.reason,
            code_of(said) if code is None else code,
            now_ms + verdict.wait_ms if end == "retry" else None,
            body.id,
            body.lane,
            queue,
            None if body.occurrence is None else body.occurrence[1],
            len(body.payload),
            answer_bytes,
        )

    def as_lost(self) -> Self:
        """Return the record of the same attempt by a node or worker that died."""
        return structs.replace(
            self, end="lost", began_ms=0, by="", reason=LOST, code=None, next_ms=None, answer_bytes=0
        )

    def failure(self, said: Retry | Dead, idempotency_key: str) -> Failure:
        """Return the report of this failed attempt for the error handler."""
        fate: Fate = "parked" if self.end == "parked" else "dead" if self.next_ms is None else "retry"
        return Failure(
            id=self.task_id,
            target=self.target or UNREADABLE,
            attempt=self.attempt,
            error=self.reason,
            brief=said.brief or "",
            outcome=fate,
            next_at_ms=self.next_ms,
            lane=self.lane,
            original_due_ms=self.due_ms,
            idempotency_key=idempotency_key,
            response=said.response,
            exception=said.error,
        )

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
        """True if its end counts as a failure."""
        return self.end in FAILED_ENDS


def passed_run(definition: "Definition", slot: "NotRun", now_ms: int, by: str = "") -> RunRecord:
    """Return the record of planned times that did not run for the same reason."""
    task_id = occurrence_id(definition.name, slot.to_ms)
    reason = slot.reason if slot.count == 1 else f"{slot.reason}: {slot.count} planned times"
    end = PASSED_ENDS.get(slot.reason, "skipped")
    return RunRecord(
        idh_of(task_id), end, 0, slot.from_ms, 0, now_ms, definition.target, by, reason,
        id=task_id, planned_ms=slot.to_ms,
    )  # fmt: skip


class RunDetails(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Details of a run beside its record. They have their own budget and expiry."""

    response: Response | None = None
    """The webhook's response."""
    output: Output | None = None
    """Output of a command."""
    log: tuple[str, ...] = ()
    """Lines that the handler logged."""
    traceback: str = ""

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Bytes of its parts: response, standard output, standard error, log, traceback."""
        response, output, log = self.response, self.output, self.log
        body = 0 if response is None else len(response.body)
        out, err = (0, 0) if output is None else (len(output.stdout), len(output.stderr))
        return body, out, err, sum(map(len, log)) if log else 0, len(self.traceback)


class Run(NamedTuple):
    """A record to be written, with its details if it has any."""

    record: RunRecord
    details: RunDetails | None = None


def code_of(said: Outcome) -> int | str | None:
    """Return the status of the response, or the type of the exception, behind an outcome."""
    if said.response is not None:
        return said.response.status
    return None if isinstance(said, Done) or said.error is None else type(said.error).__name__


def error_of(said: Outcome) -> BaseException | None:
    """Return the exception behind an outcome."""
    return said.error if isinstance(said, Retry | Dead) else None


# -- what is kept ----------------------------------------------------------------------------------------------

HistoryRule = Literal["all", "failures", "off"]
"""Runs to keep: all, only failures, or none."""

_KEPT_WHOLE: Final = frozenset({"http", "https", "queue", "command", "notify"})
"""Schemes whose runs are all kept unless a rule says otherwise: webhooks, handlers, commands, notices."""
_RULE_KEY: Final = re.compile(r"(?:schedule|queue|target):.+|(?!schedule:|target:)[a-z][a-z0-9+.-]*:", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HistoryRules:
    """Which runs are kept. The nearest rule applies: that of the schedule, the queue, the named target, or the scheme.

    Without a rule, all runs of schedules, handlers, commands, webhooks and notices are kept; for other targets only
    failures.
    """

    rules: Mapping[str, HistoryRule] = field(default_factory=dict)
    """By `schedule:<name>`, `queue:<name>`, `target:<name>`, or by the scheme of targets, `kafka:`."""
    schemes: Mapping[str, str] = field(default_factory=dict)
    """Scheme of the address behind each named target. Only nodes need it."""

    def __hash__(self) -> int:
        return hash(frozenset(self.rules.items()))

    def __str__(self) -> str:
        return ",".join(f"{key}={rule}" for key, rule in self.rules.items())

    @classmethod
    def read(cls, value: object) -> "HistoryRules":
        """Read a table, or a text such as `schedule:nightly=off,kafka:=all`."""
        if isinstance(value, str):
            pairs = (pair.strip().rpartition("=") for pair in value.split(",") if pair.strip())
            value = {key: rule for key, _, rule in pairs}
        if not isinstance(value, Mapping):
            raise InvalidInput('expected a table such as { "queue:mail" = "failures" }')
        for key, rule in value.items():
            if not isinstance(key, str) or not _RULE_KEY.fullmatch(key):
                raise InvalidInput(
                    f"history of {key!r}: name a schedule:<name>, queue:<name> or target:<name>, or a scheme such as"
                    " kafka:"
                )
            if rule not in get_args(HistoryRule):
                raise InvalidInput(f"history of {key} is {rule!r}; use all, failures or off")
        return cls(dict(value))

    def rule(self, target: str, queue: str | None = None, schedule: str | None = None) -> HistoryRule:
        """Return the rule for runs of this target, queue (for jobs) and schedule (for its runs)."""
        scheme, _, name = target.partition(":")
        rules = self.rules
        if rules:
            keys = (f"schedule:{schedule}", f"queue:{queue}", target if scheme == "target" else "")
            for key in keys:
                if key in rules:
                    return rules[key]
        if scheme == "target":
            scheme = self.schemes.get(name, scheme)
        usual: HistoryRule = "all" if schedule is not None or scheme in _KEPT_WHOLE else "failures"
        return rules.get(f"{scheme}:", usual)

    def keeps_all(self, body: Body, queue: str | None = None) -> bool:
        """Return whether all runs of a task are kept. If not, a run that succeeds needs no record."""
        schedule = None if body.occurrence is None or body.id is None else schedule_of(body.id)
        return self.rule(body.target, queue, schedule) == "all"

    def keeps(self, record: RunRecord) -> bool:
        """Return whether this run is kept."""
        rule = self.rule(record.target, record.queue, record.schedule)
        return rule == "all" or (rule == "failures" and record.failed)


# -- what is read ----------------------------------------------------------------------------------------------


class RunFilter(msgspec.Struct, frozen=True, gc=False):
    """Selects runs that match every given field."""

    schedule: str | None = None
    target: str | None = None
    """The whole target, or its beginning and `*`."""
    queue: str | None = None
    by: str | None = None
    """The node or worker."""
    allowed: tuple[str, ...] | None = None
    """Patterns, at least one of which the target must match."""
    ends: frozenset[RunEnd] | None = None
    from_ms: int = 0
    """When a run was recorded, included: within milliseconds of its end."""
    to_ms: int = 1 << 45
    """Not included."""
    idhs: frozenset[bytes] | None = None
    """Hashes that the id of one task may have."""

    def fits(self, record: RunRecord) -> bool:
        """Return whether a record matches. The caller compares its time."""
        return (
            (self.idhs is None or record.idh in self.idhs)
            and (self.ends is None or record.end in self.ends)
            and (self.schedule is None or record.schedule == self.schedule)
            and (self.queue is None or record.queue == self.queue)
            and (self.by is None or record.by == self.by)
            and (self.target is None or pattern_fits(self.target, record.target))
            and (self.allowed is None or fits_one(self.allowed, record.target))
        )


_SHOWN: Final = (
    "task_id", "lane", "schedule", "planned_ms", "target", "queue", "by", "attempt", "due_ms", "began_ms", "ended_ms",
    "end", "code", "reason", "next_ms", "sent_bytes", "answer_bytes",
)  # fmt: skip
"""What JSON says of a record, in this order."""
_NAMES: Final = {"task_id": "task", "by": "worker", "began_ms": "started_ms", "end": "outcome"}
"""Names in JSON that differ from those of the record."""


class KeptRun(NamedTuple):
    """A run in the history."""

    id: str
    """Names the run for as long as it is kept."""
    at_ms: int
    """When it was recorded."""
    record: RunRecord
    details: RunDetails | None = None
    """None in lists, and if the run has none or they were dropped."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        record, details = self.record, self.details
        shown: dict[str, Any] = {"id": self.id, "at_ms": self.at_ms}
        shown |= {_NAMES.get(name, name): getattr(record, name) for name in _SHOWN}
        shown |= {"target": shown_target(record.target), "started_ms": record.began_ms or None}
        if details is None:
            return shown
        return shown | {
            "response": None if details.response is None else details.response.as_dict(),
            "output": None if details.output is None else details.output.as_dict(),
            "log": list(details.log),
            "traceback": details.traceback,
        }

    @classmethod
    def from_dict(cls, answer: dict[str, Any]) -> "KeptRun":
        """Read a run as the HTTP API sends it."""
        task: str = answer["task"]
        stored: dict[str, Any] = {
            name: answer[_NAMES.get(name, name)] for name in _SHOWN if name in RunRecord.__struct_fields__
        }
        idh = bare_idh(task)
        stored |= {"idh": idh or idh_of(task), "id": None if idh else task, "began_ms": answer["started_ms"] or 0}
        record = RunRecord(**stored)
        if answer.get("log") is None:
            return cls(answer["id"], answer["at_ms"], record)
        response, output = answer["response"], answer["output"]
        details = RunDetails(
            None if response is None else Response.from_dict(response),
            None if output is None else Output.from_dict(output),
            tuple(answer["log"]),
            answer["traceback"],
        )
        return cls(answer["id"], answer["at_ms"], record, details)


class RunsPage(NamedTuple):
    """Runs, newest first. A page may be short and still name a next one: its work is bounded."""

    runs: list[KeptRun]
    next: str | None


class RunCounts(msgspec.Struct, frozen=True):
    """Runs of one minute or hour."""

    at_ms: int
    ok: int = 0
    failed: int = 0
    retried: int = 0
    skipped: int = 0
    """Runs that were cancelled or dropped, or did not take place."""
    durations: tuple[int, ...] = (0,) * 12
    """Runs by duration: less than 1 ms, 4 ms, 16 ms and so on; the last bucket has all longer ones."""
    latenesses: tuple[int, ...] = (0,) * 12
    """First attempts by lateness, in the same steps."""
    duration_ms: int = 0
    """Sum of all durations."""
    lateness_ms: int = 0

    @property
    def runs(self) -> int:
        """Number of all runs."""
        return self.ok + self.failed + self.retried + self.skipped


BUCKETS: Final = 12
"""Buckets of a histogram of durations; each is four times as wide as the one before."""


def bucket_of(ms: int) -> int:
    """Return the bucket of a duration: 0 for less than 1 ms, 1 for less than 4, 2 for less than 16 and so on."""
    return 0 if ms <= 0 else min(BUCKETS - 1, (ms.bit_length() + 1) // 2)


class HistoryState(msgspec.Struct, frozen=True):
    """How much history a namespace keeps, and since when it is complete. Times are 0 if nothing was dropped yet."""

    bytes: int
    details_bytes: int
    oldest_ms: int
    """Runs recorded after this are all kept."""
    oldest_failed_ms: int
    """The same for failures, which have a budget of their own."""
    oldest_details_ms: int
    written: int
    dropped: int
    """Runs that could not be written."""


class RunStats(msgspec.Struct, frozen=True):
    """Counts of runs over time, and how much history there is."""

    stats: list[RunCounts]
    """One for each minute or hour, oldest first."""
    history: HistoryState


class RunLog(msgspec.Struct, frozen=True):
    """A part of what a run has written so far."""

    text: str
    next: str
    """Pass it as `cursor` to get the next part."""
    over: bool
    """True if no further part follows."""
