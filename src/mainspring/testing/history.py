"""What happened, written down by any number of processes, and the proof that it was allowed to happen.

    history = History("main")
    history.accepted("order-42", due_ms, at_us, lane="user-7")
    history.begun("order-42", delivery.idempotency_key, 1, at_us, partition=3, token=token)
    …
    assert check(history) == []

Times are the server's clock in microseconds: of a begin the moment the server wrote it, of an answer to a caller
the moment it was received. A put that was never answered is accepted with `sure=False`: it may have happened.
One acceptance of a task is named by its idempotency key; a reschedule or a replace is a new one.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

import msgspec

from ..model.ids import idempotency_key

Ending = Literal["done", "retry", "dead"]
Rule = Literal["early", "lost", "phantom", "cancelled", "superseded", "fenced", "lane", "repeated", "key"]


class Accepted(msgspec.Struct, frozen=True, gc=False, tag="accepted", tag_field="event", omit_defaults=True):
    at_us: int
    task: str
    key: str
    due_ms: int
    lane: str | None = None
    sure: bool = True
    instead: str | None = None
    """Key of the acceptance whose place this one takes: a reschedule or a replace."""


class Begun(msgspec.Struct, frozen=True, gc=False, tag="begun", tag_field="event"):
    at_us: int
    task: str
    key: str
    attempt: int
    partition: int
    token: str


class Finished(msgspec.Struct, frozen=True, gc=False, tag="finished", tag_field="event"):
    at_us: int
    task: str
    key: str
    attempt: int
    ending: Ending
    partition: int
    token: str


class Cancelled(msgspec.Struct, frozen=True, gc=False, tag="cancelled", tag_field="event"):
    at_us: int
    task: str
    key: str
    answer: str


class Fault(msgspec.Struct, frozen=True, gc=False, tag="fault", tag_field="event"):
    """Something failed from `at_us` to `until_us`: a lost reply, a killed node, a server that was away."""

    at_us: int
    until_us: int
    what: str = ""


class Left(msgspec.Struct, frozen=True, gc=False, tag="left", tag_field="event"):
    """How the store describes a task when all is over."""

    at_us: int
    task: str
    state: str


Event = Accepted | Begun | Finished | Cancelled | Fault | Left

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Event).decode


class History:
    """Events of one namespace, in any order."""

    def __init__(self, namespace: str = "main", events: Iterable[Event] = ()) -> None:
        self.namespace = namespace
        self.events: list[Event] = list(events)

    def key(self, task: str, due_ms: int) -> str:
        return idempotency_key(self.namespace, task, due_ms)

    def accepted(self, task: str, due_ms: int, at_us: int, *, lane: str | None = None, sure: bool = True) -> None:
        self.events.append(Accepted(at_us, task, self.key(task, due_ms), due_ms, lane, sure))

    def replaced(
        self, task: str, old_due_ms: int, due_ms: int, at_us: int, *, lane: str | None = None, sure: bool = True
    ) -> None:
        """The task stands at another time, or another one has its id."""
        old, new = self.key(task, old_due_ms), self.key(task, due_ms)
        self.events.append(Accepted(at_us, task, new, due_ms, lane, sure, old))

    rescheduled = replaced

    def begun(self, task: str, key: str, attempt: int, at_us: int, *, partition: int, token: str) -> None:
        self.events.append(Begun(at_us, task, key, attempt, partition, token))

    def finished(
        self, task: str, key: str, attempt: int, ending: Ending, at_us: int, *, partition: int, token: str
    ) -> None:
        self.events.append(Finished(at_us, task, key, attempt, ending, partition, token))

    def cancelled(self, task: str, due_ms: int, answer: str, at_us: int) -> None:
        self.events.append(Cancelled(at_us, task, self.key(task, due_ms), answer))

    def fault(self, start_us: int, end_us: int, what: str = "") -> None:
        self.events.append(Fault(start_us, end_us, what))

    def left(self, task: str, state: str, at_us: int) -> None:
        """The state at the end, as the store tells it."""
        self.events.append(Left(at_us, task, state))

    # -- several processes ---------------------------------------------------------------------------------

    def merge(self, *others: "History") -> Self:
        for other in others:
            self.events += other.events
        return self

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            file.writelines(_encode(event) + b"\n" for event in self.events)

    @classmethod
    def load(cls, *paths: Path, namespace: str = "main") -> "History":
        history = cls(namespace)
        for path in paths:
            with path.open("rb") as file:
                history.events += map(_decode, file)
        return history


class Violation(NamedTuple):
    """An invariant that did not hold."""

    rule: Rule
    task: str
    at_us: int
    message: str


class _Life:
    """Everything that is known of one acceptance."""

    __slots__ = ("accepted", "again", "begins", "cancelled", "done", "retried", "superseded")

    def __init__(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.again: list[int] = []
        """When the same id was accepted for the same time once more, after it had ended."""
        self.begins: list[Begun] = []
        self.retried: set[int] = set()
        self.done = False
        self.cancelled: int | None = None
        self.superseded: Accepted | None = None

    def anew_since(self, at_us: int) -> bool:
        return bool(self.again) and self.again[-1] >= at_us


# At one instant: what ends comes before what begins, and what was accepted then need not be known to it.
_ORDER: Final[dict[type, int]] = {Finished: 0, Cancelled: 1, Begun: 2, Accepted: 3, Fault: 4, Left: 5}


def check(history: History) -> list[Violation]:
    """Every way in which the history breaks an invariant of DESIGN; empty for a good one."""
    events = sorted(history.events, key=lambda event: (event.at_us, _ORDER[type(event)]))
    lives, found = _lives(events)
    found += _phantoms(events, lives)
    faults = _Faults(events)
    for key, life in lives.items():
        found += _early(life)
        found += _after_the_end(life)
        found += _repeats(key, life, faults)
    found += _lost(events, lives)
    found += _fenced(events)
    found += _lanes(events, lives)
    return found


def _lives(events: list[Event]) -> tuple[dict[str, _Life], list[Violation]]:
    lives: dict[str, _Life] = {}
    found: list[Violation] = []
    for event in events:
        if isinstance(event, Accepted):
            life = lives.get(event.key)
            if life is None:
                lives[event.key] = _Life(event)
            elif life.accepted.task != event.task:
                text = f"shares its key {event.key} with {life.accepted.task}"
                found.append(Violation("key", event.task, event.at_us, text))
            else:
                life.again.append(event.at_us)
    for event in events:
        if isinstance(event, Accepted):
            former = lives.get(event.instead) if event.instead not in (None, event.key) else None
            if former is not None and event.sure:
                former.superseded = event
        elif isinstance(event, (Begun, Finished, Cancelled)) and event.key in lives:
            _add(lives[event.key], event)
    return lives, found


def _add(life: _Life, event: Begun | Finished | Cancelled) -> None:
    match event:
        case Begun():
            life.begins.append(event)
        case Finished(ending="retry"):
            life.retried.add(event.attempt)
        case Finished():
            life.done = True
        case Cancelled(answer="cancelled") if life.cancelled is None:
            life.cancelled = event.at_us


def _phantoms(events: list[Event], lives: dict[str, _Life]) -> Iterator[Violation]:
    """Delivered, but nobody put it; or put by somebody, and delivered with a key of another."""
    tasks = {life.accepted.task for life in lives.values()}
    for event in events:
        if not isinstance(event, Begun):
            continue
        life = lives.get(event.key)
        if event.task not in tasks:
            yield Violation("phantom", event.task, event.at_us, "was delivered and never accepted")
        elif life is None or life.accepted.task != event.task:
            yield Violation("key", event.task, event.at_us, f"was delivered with the key {event.key}")


def _early(life: _Life) -> Iterator[Violation]:
    due_us = life.accepted.due_ms * 1000
    for begun in life.begins:
        if begun.at_us < due_us:
            text = f"began {due_us - begun.at_us} us before its time"
            yield Violation("early", begun.task, begun.at_us, text)


def _after_the_end(life: _Life) -> Iterator[Violation]:
    """Begun although it was cancelled or replaced. Attempts that failed before that are in order."""
    for rule, ended_us in (
        ("cancelled", life.cancelled),
        ("superseded", life.superseded.at_us if life.superseded is not None else None),
    ):
        if ended_us is None or life.anew_since(ended_us):
            continue
        for begun in life.begins:
            if begun.at_us > ended_us or begun.attempt not in life.retried:
                text = f"began at {begun.at_us} us, attempt {begun.attempt}; the answer came at {ended_us} us"
                yield Violation("cancelled" if rule == "cancelled" else "superseded", begun.task, begun.at_us, text)


class _Faults:
    """Finds a fault in a span of time."""

    def __init__(self, events: list[Event]) -> None:
        self._spans: list[tuple[int, int]] = []
        for event in events:
            if isinstance(event, Fault):
                start, end = event.at_us, event.until_us
                if self._spans and start <= self._spans[-1][1]:
                    start, end = self._spans[-1][0], max(self._spans.pop()[1], end)
                self._spans.append((start, end))

    def between(self, start_us: int, end_us: int) -> bool:
        at = bisect_right(self._spans, (end_us, 1 << 63)) - 1
        return at >= 0 and self._spans[at][1] >= start_us


def _repeats(key: str, life: _Life, faults: _Faults) -> Iterator[Violation]:
    """The same attempt twice, or one after success: only where something failed in between."""
    for former, begun in zip(life.begins, life.begins[1:], strict=False):
        failed = begun.attempt > former.attempt and former.attempt in life.retried
        if failed or life.anew_since(former.at_us) or faults.between(former.at_us, begun.at_us):
            continue
        text = f"{key}: attempt {begun.attempt} after attempt {former.attempt} with no fault in between"
        yield Violation("repeated", begun.task, begun.at_us, text)


_ALIVE: Final = frozenset({"pending", "fired", "done", "cancelled", "replaced", "dead", "finished"})


def _lost(events: list[Event], lives: dict[str, _Life]) -> Iterator[Violation]:
    left = {event.task: event.state for event in events if isinstance(event, Left)}
    for life in lives.values():
        accepted = life.accepted
        settled = life.done or life.cancelled is not None or life.superseded is not None
        if accepted.sure and not settled and left.get(accepted.task) not in _ALIVE:
            yield Violation("lost", accepted.task, accepted.at_us, f"due {accepted.due_ms} ms, and never heard of")


def _fenced(events: list[Event]) -> Iterator[Violation]:
    """Epochs of the writes of a partition only grow, and one epoch is one owner."""
    newest: dict[int, tuple[int, str, int]] = {}
    for event in events:
        if isinstance(event, (Begun, Finished)):
            epoch = int(event.token.partition(".")[0])
            highest, token, since_us = newest.get(event.partition, (-1, "", 0))
            if epoch > highest:
                newest[event.partition] = (epoch, event.token, event.at_us)
            elif event.token != token and event.at_us > since_us:
                text = f"partition {event.partition}: a write of {event.token} while {token} has it"
                yield Violation("fenced", event.task, event.at_us, text)


class _Lane:
    """One lane as it was at a moment of the past."""

    __slots__ = ("over", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str]] = []
        """Accepted and not finished: the earliest due on top."""
        self.over: set[str] = set()
        self.under_way: Begun | None = None

    def follow(self, event: Accepted | Finished | Cancelled) -> None:
        match event:
            case Finished():
                if self.under_way is not None and self.under_way.key == event.key:
                    self.under_way = None
                if event.ending != "retry":
                    self.over.add(event.key)
            case Cancelled(answer="cancelled"):
                self.over.add(event.key)
            case Accepted(sure=True):
                self.over.discard(event.key)
                heapq.heappush(self.waiting, (event.due_ms, event.key))
                if event.instead is not None and event.instead != event.key:
                    self.over.add(event.instead)

    def head(self) -> tuple[int, str] | None:
        while self.waiting and self.waiting[0][1] in self.over:
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


def _lanes(events: list[Event], lives: dict[str, _Life]) -> Iterator[Violation]:
    """One at a time, the earlier due first among those that were known; a failing head is still the head."""
    lanes: dict[str, _Lane] = {}
    for event in events:
        if isinstance(event, (Fault, Left)) or event.key not in lives:
            continue
        name = lives[event.key].accepted.lane
        if name is None:
            continue
        lane = lanes.setdefault(name, _Lane())
        if isinstance(event, Begun):
            yield from _begin_in_lane(lane, event, lives[event.key].accepted.due_ms)
        else:
            lane.follow(event)


def _begin_in_lane(lane: _Lane, begun: Begun, due_ms: int) -> Iterator[Violation]:
    other = lane.under_way
    # What a former owner had under way when it went is not under way any more.
    if other is not None and other.key != begun.key and other.token == begun.token:
        yield Violation("lane", begun.task, begun.at_us, f"began while {other.task} of its lane was under way")
    lane.under_way = begun
    head = lane.head()
    if head is not None and head[0] < due_ms and head[1] != begun.key:
        yield Violation("lane", begun.task, begun.at_us, f"due {due_ms} ms, overtook {head[1]} due {head[0]} ms")
