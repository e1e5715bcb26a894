"""What a verification says: the books, the findings, and what was done about them."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

KINDS: Final = {
    "unbalanced": "the counters do not add up to what the slices hold",
    "orphan-list": "entries that stand in no live slice",
    "orphan-bitmap": "bits of a slice that does not exist",
    "orphan-index": "an id that does not lead to its task",
    "empty-slice": "a live slice without entries",
    "bad-slice": "a live slice whose name or score cannot be true",
    "stray-bits": "bits past the end of a slice's entries",
    "held-lane": "a lane that waits for a task which is nowhere",
    "queue-entry": "an entry of a queue's stream that is not among the queued tasks",
    "queue-place": "a queued task whose entry is gone from its stream",
    "queue-count": "the counters of queued tasks do not say how many there are",
    "schedule-chain": "a schedule without its next occurrence, or a chain without its schedule",
    "hold-record": "a record of held work that nobody can read",
    "dead-letter": "a dead letter without its time, or a time without its letter",
    "unknown-key": "a key of the namespace that no part of Mainspring writes",
    "wrong-type": "a key that holds another type of value than it should",
    "not-proven": "a partition that changed faster than it could be read",
}
MOST_TOLD: Final = 10_000
"""Findings of one kind that are told one by one; all are counted."""


class Books(NamedTuple):
    """accepted = pending + fired + queued + done + cancelled + replaced + dead, at every moment."""

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
    """Nor is this: moved into a hold slice."""

    @property
    def missing(self) -> int:
        """Accepted tasks that are nowhere; negative: tasks that nobody accepted."""
        settled = self.done + self.cancelled + self.replaced + self.dead
        return self.accepted - self.pending - self.fired - self.queued - settled

    @classmethod
    def sum(cls, books: "list[Books]") -> "Books":
        return cls(*map(sum, zip(*books, strict=True))) if books else cls()


class Repair(NamedTuple):
    done: bool
    text: str
    """What was done, or why it was not."""


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """Something that is not as it should be, and how it can be set right."""

    kind: str
    partition: int | None
    where: str
    """The key, lane or id it is about."""
    problem: str
    repair: Callable[[], Awaitable[Repair]] | None = None
    """Checks again and repairs, in one step of the server."""
    advice: str = ""
    """Why there is no repair, and what a person can do."""


class Told(NamedTuple):
    finding: VerifyFinding
    repair: Repair | None


class Report:
    """Collects findings, and repairs them if it is asked to."""

    def __init__(self, namespace: str, partitions: int, *, repair: bool) -> None:
        self.namespace = namespace
        self.partitions = partitions
        self.slices = 0
        self.books: dict[int, Books] = {}
        """Of the partitions that could be read."""
        self.found: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()
        self.told: list[Told] = []
        self._repair = repair

    async def take(self, finding: VerifyFinding) -> None:
        repair = None
        if self._repair:
            repair = await finding.repair() if finding.repair is not None else Repair(False, finding.advice)
        self.found[finding.kind] += 1
        self.repaired[finding.kind] += repair is not None and repair.done
        if self.found[finding.kind] <= MOST_TOLD:
            self.told.append(Told(finding, repair))

    @property
    def total(self) -> Books:
        return Books.sum(list(self.books.values()))

    @property
    def left(self) -> int:
        """Findings that are still there."""
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
            "findings": [_told_as_dict(one) for one in self.told],
        }

    @property
    def uneven(self) -> dict[int, Books]:
        return {p: one for p, one in self.books.items() if one.missing}


def _told_as_dict(told: Told) -> dict[str, Any]:
    finding, repair = told
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
