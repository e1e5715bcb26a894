"""The report of a verification: counters, findings, and repairs."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

KINDS: Final = {
    "unbalanced": "the counters do not match the tasks in the slices",
    "orphan-list": "entries that are in no live slice",
    "orphan-bitmap": "bits of a slice that does not exist",
    "orphan-index": "an id that does not lead to its task",
    "empty-slice": "a live slice without entries",
    "bad-slice": "a live slice with an impossible name or score",
    "stray-bits": "bits past the end of a slice's entries",
    "held-lane": "a lane that waits for a task which does not exist",
    "queue-entry": "an entry of a queue's stream that is not among the queued tasks",
    "queue-place": "a queued task whose entry is gone from its stream",
    "queue-count": "the counters of queued tasks do not match their number",
    "schedule-chain": "a schedule without its next occurrence, or a chain without its schedule",
    "hold-record": "a record of held work that cannot be read",
    "dead-letter": "a dead letter without its time, or a time without its dead letter",
    "unknown-key": "a key of the namespace that no part of Mainspring writes",
    "wrong-type": "a key that holds the wrong type of value",
    "not-proven": "a partition that changed faster than it could be read",
}
MOST_REPORTED: Final = 10_000
"""Findings of one kind that are listed; all are counted."""


class TaskCounters(NamedTuple):
    """Task counters: accepted = pending + fired + queued + done + cancelled + replaced + dead, at every moment."""

    accepted: int = 0
    pending: int = 0
    fired: int = 0
    queued: int = 0
    done: int = 0
    cancelled: int = 0
    replaced: int = 0
    dead: int = 0
    retried: int = 0
    """Not part of the sum: a retry is the same task in another place."""
    spilled: int = 0
    """Tasks moved into a hold slice; not part of the sum."""

    @property
    def missing(self) -> int:
        """Accepted tasks that are nowhere; negative: tasks that were never accepted."""
        settled = self.done + self.cancelled + self.replaced + self.dead
        return self.accepted - self.pending - self.fired - self.queued - settled

    @classmethod
    def sum(cls, counters: "list[TaskCounters]") -> "TaskCounters":
        return cls(*map(sum, zip(*counters, strict=True))) if counters else cls()


class Repair(NamedTuple):
    done: bool
    text: str
    """What was repaired, or why nothing was."""


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """A problem in the stored data, and how to repair it."""

    kind: str
    partition: int | None
    where: str
    """The key, lane or id with the problem."""
    problem: str
    repair: Callable[[], Awaitable[Repair]] | None = None
    """Check again and repair, in one atomic step on the server."""
    advice: str = ""
    """Why there is no automatic repair, and what an operator can do."""


class ReportedFinding(NamedTuple):
    finding: VerifyFinding
    repair: Repair | None


class Report:
    """Collects findings, and repairs them if asked to."""

    def __init__(self, namespace: str, partitions: int, *, repair: bool) -> None:
        self.namespace = namespace
        self.partitions = partitions
        self.slices = 0
        self.counters: dict[int, TaskCounters] = {}
        """Counters of each partition that could be read."""
        self.found: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()
        self.reported: list[ReportedFinding] = []
        self._repair = repair

    async def take(self, finding: VerifyFinding) -> None:
        repair = None
        if self._repair:
            repair = await finding.repair() if finding.repair is not None else Repair(False, finding.advice)
        self.found[finding.kind] += 1
        self.repaired[finding.kind] += repair is not None and repair.done
        if self.found[finding.kind] <= MOST_REPORTED:
            self.reported.append(ReportedFinding(finding, repair))

    @property
    def total(self) -> TaskCounters:
        return TaskCounters.sum(list(self.counters.values()))

    @property
    def left(self) -> int:
        """Number of findings that were not repaired."""
        return self.found.total() - self.repaired.total()

    def as_dict(self) -> dict[str, Any]:
        total = self.total
        return {
            "namespace": self.namespace,
            "partitions": self.partitions,
            "slices": self.slices,
            "books": total._asdict() | {"missing": total.missing},
            "uneven": {str(p): one._asdict() | {"missing": one.missing} for p, one in self.uneven.items()},
            "found": dict(self.found),
            "repaired": {kind: count for kind, count in self.repaired.items() if count},
            "left": self.left,
            "findings": [_as_row(one) for one in self.reported],
        }

    @property
    def uneven(self) -> dict[int, TaskCounters]:
        return {p: one for p, one in self.counters.items() if one.missing}


def _as_row(reported: ReportedFinding) -> dict[str, Any]:
    finding, repair = reported
    row: dict[str, Any] = {
        "kind": finding.kind,
        "partition": finding.partition,
        "where": finding.where,
        "problem": finding.problem,
    }
    if finding.advice:
        row["advice"] = finding.advice
    if repair is not None:
        row |= {"repaired": repair.done, "repair": repair.text}
    return row
