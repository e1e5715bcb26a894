"""Check the history of a run: prove that everything that happened was allowed.

    history = History("main")
    history.accepted("order-42", due_ms, at_us, lane="user-7")
    history.begun("order-42", delivery.idempotency_key, 1, at_us, partition=3, token=token)
    …
    assert check(history) == []


Times are the server's clock in microseconds. A begin or a write has the moment at which the server did it; an answer to
a caller has the moment at which it was received. The idempotency key names one acceptance of a task; a reschedule or a
replace is a new acceptance.
"""

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

import msgspec

from ..model.ids import idempotency_key

FinishedAs = Literal["done", "retry", "dead"]
UNSURE: Final = "unsure"
"""Answer of a cancel or replace whose reply was lost: it may have ended the task."""


class AcceptedEvent(msgspec.Struct, frozen=True, gc=False, tag="accepted", tag_field="event", omit_defaults=True):
    at_us: int
    task: str
    key: str
    due_ms: int
    lane: str | None = None
    sure: bool = True
    """False if the put was never answered, and so may or may not have happened."""
    instead: str | None = None
    """Key of the acceptance that this one replaces: a reschedule or a replace."""
    expires_ms: int | None = None
    twice: bool = False
    """An old copy of its put may have reached the server long after the answer: not an owner's fault."""
    level: str = "server"
    """The promised durability."""
    asked_us: int = 0
    """When the put was sent, if known: it took effect between then and the answer."""


class BegunEvent(msgspec.Struct, frozen=True, gc=False, tag="begun", tag_field="event", omit_defaults=True):
    at_us: int
    task: str
    key: str
    attempt: int
    partition: int
    token: str
    node: str = ""
    sent_us: int = 0
    """When it was handed to its target, by the node's estimate of the server's clock; 0 if not recorded."""
    queued_us: int = 0
    """For a worker's run: when the task entered its queue. Tasks that were put later have their turn later."""


class FinishedEvent(msgspec.Struct, frozen=True, gc=False, tag="finished", tag_field="event"):
    """End of an attempt. An empty token: the target has the task, which says nothing about the server."""

    at_us: int
    task: str
    key: str
    attempt: int
    ending: FinishedAs
    partition: int
    token: str


class CancelledEvent(msgspec.Struct, frozen=True, gc=False, tag="cancelled", tag_field="event", omit_defaults=True):
    at_us: int
    task: str
    key: str
    answer: str
    asked_us: int = 0


class WroteEvent(msgspec.Struct, frozen=True, gc=False, tag="wrote", tag_field="event", omit_defaults=True):
    """A write by an owner that took effect on the server."""

    at_us: int
    partition: int
    token: str
    what: str
    settled: int = 0
    """Deliveries that are no longer in flight: finished, or waiting for their retry."""


class FaultEvent(msgspec.Struct, frozen=True, gc=False, tag="fault", tag_field="event", omit_defaults=True):
    """A failure from `at_us` to `until_us`: a lost reply, a killed node, an unavailable server."""

    at_us: int
    until_us: int
    what: str = ""
    node: str | None = None
    """The affected node, or None for all."""
    loses: bool = False
    """The servers forgot writes that they had acknowledged in this time, except those confirmed by replicas."""


class HealedEvent(msgspec.Struct, frozen=True, gc=False, tag="healed", tag_field="event"):
    """From here on nothing is broken: everything due has to be delivered within this time."""

    at_us: int
    within_us: int


class StallEvent(msgspec.Struct, frozen=True, gc=False, tag="stall", tag_field="event"):
    """The recorder measured that it got no CPU time in this span, so it could not receive deliveries."""

    at_us: int
    until_us: int


class LeftEvent(msgspec.Struct, frozen=True, gc=False, tag="left", tag_field="event"):
    """State of a task in the store at the end of the run."""

    at_us: int
    task: str
    state: str


Event = (
    AcceptedEvent
    | BegunEvent
    | FinishedEvent
    | CancelledEvent
    | WroteEvent
    | FaultEvent
    | HealedEvent
    | StallEvent
    | LeftEvent
)

encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Event).decode


class History:
    """Events of one namespace, in any order."""

    def __init__(self, namespace: str = "main", events: Iterable[Event] = ()) -> None:
        self.namespace = namespace
        self.events: list[Event] = list(events)
        self._lanes: dict[str, str | None] = {}

    def key(self, task: str, due_ms: int) -> str:
        """Return the idempotency key of a task, in the lane it was accepted for."""
        return idempotency_key(self.namespace, task, due_ms, self._lanes.get(task))

    def accepted(self, task: str, due_ms: int, at_us: int, *, lane: str | None = None, sure: bool = True) -> None:
        self._lanes[task] = lane
        self.events.append(AcceptedEvent(at_us, task, self.key(task, due_ms), due_ms, lane, sure))

    def replaced(
        self, task: str, old_due_ms: int, due_ms: int, at_us: int, *, lane: str | None = None, sure: bool = True
    ) -> None:
        """Record that the task moved to another time, or that another task took its id."""
        old, new = self.key(task, old_due_ms), self.key(task, due_ms)
        self.events.append(AcceptedEvent(at_us, task, new, due_ms, lane, sure, old))

    rescheduled = replaced

    def begun(
        self, task: str, key: str, attempt: int, at_us: int, *, partition: int, token: str, node: str = ""
    ) -> None:
        self.events.append(BegunEvent(at_us, task, key, attempt, partition, token, node))

    def finished(
        self, task: str, key: str, attempt: int, ending: FinishedAs, at_us: int, *, partition: int, token: str
    ) -> None:
        self.events.append(FinishedEvent(at_us, task, key, attempt, ending, partition, token))

    def cancelled(self, task: str, due_ms: int, answer: str, at_us: int) -> None:
        self.events.append(CancelledEvent(at_us, task, self.key(task, due_ms), answer))

    def wrote(self, at_us: int, what: str, *, partition: int, token: str, settled: int = 0) -> None:
        self.events.append(WroteEvent(at_us, partition, token, what, settled))

    def fault(
        self, start_us: int, end_us: int, what: str = "", *, node: str | None = None, loses: bool = False
    ) -> None:
        self.events.append(FaultEvent(start_us, end_us, what, node, loses))

    def healed(self, at_us: int, within_us: int) -> None:
        self.events.append(HealedEvent(at_us, within_us))

    def stalled(self, start_us: int, end_us: int) -> None:
        self.events.append(StallEvent(start_us, end_us))

    def left(self, task: str, state: str, at_us: int) -> None:
        """Record the state of a task at the end, as the store reports it."""
        self.events.append(LeftEvent(at_us, task, state))

    # -- several processes ---------------------------------------------------------------------------------

    def merge(self, *others: "History") -> Self:
        for other in others:
            self.events += other.events
        return self

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            file.writelines(encode(event) + b"\n" for event in self.events)

    @classmethod
    def load(cls, *paths: Path, namespace: str = "main") -> "History":
        history = cls(namespace)
        for path in paths:
            with path.open("rb") as file:
                history.events += map(_decode, file)
        return history


Clash = tuple[AcceptedEvent, str]
"""An acceptance whose key belongs to another task, and a description of the clash."""


class Life:
    """Everything known about one acceptance."""

    __slots__ = (
        "accepted", "again", "begins", "cancelled", "died", "done_us", "doubted", "failed_us", "retried", "superseded"
    )  # fmt: skip

    def __init__(self, accepted: AcceptedEvent) -> None:
        self.accepted = accepted
        self.again: list[int] = []
        """When the same id was accepted again for the same time, after the task had ended."""
        self.begins: list[BegunEvent] = []
        self.retried: set[int] = set()
        self.failed_us = 0
        """When the last failed attempt before it was done failed."""
        self.done_us: int | None = None
        self.died = False
        self.cancelled: int | None = None
        self.superseded: AcceptedEvent | None = None
        self.doubted = False
        """A call that would have ended it was never answered."""

    def again_since(self, at_us: int) -> bool:
        return bool(self.again) and self.again[-1] >= at_us

    @property
    def ended(self) -> bool:
        """Whether the task ended by its delivery or by its caller, or may have ended."""
        return self.done_us is not None or self.doubted or self.cancelled is not None


Lives = dict[str, Life]


def lives_of(events: list[Event]) -> tuple[Lives, list[Clash]]:
    """Return the life of each acceptance by key, and the acceptances whose key belongs to another task."""
    lives: Lives = {}
    found: list[Clash] = []
    for event in events:
        if isinstance(event, AcceptedEvent):
            life = lives.get(event.key)
            if life is None:
                lives[event.key] = Life(event)
            elif life.accepted.task != event.task:
                text = f"shares its key {event.key} with {life.accepted.task}"
                found.append((event, text))
            else:
                life.again.append(event.at_us)
    for event in events:
        if isinstance(event, AcceptedEvent):
            former = lives.get(event.instead) if event.instead not in (None, event.key) else None
            if former is not None and event.sure:
                former.superseded = event
            elif former is not None:
                former.doubted = True
        elif isinstance(event, (BegunEvent, FinishedEvent, CancelledEvent)) and event.key in lives:
            _add(lives[event.key], event)
    return lives, found


def _add(life: Life, event: BegunEvent | FinishedEvent | CancelledEvent) -> None:
    match event:
        case BegunEvent():
            life.begins.append(event)
        case FinishedEvent(ending="retry"):
            life.retried.add(event.attempt)
            if life.done_us is None:
                life.failed_us = event.at_us
        case FinishedEvent(ending=ending):
            life.done_us, life.died = life.done_us or event.at_us, ending == "dead"
        case CancelledEvent(answer="cancelled") if life.cancelled is None:
            life.cancelled = event.at_us
        case CancelledEvent(answer="unsure"):
            life.doubted = True


class Faults:
    """Finds faults in a span of time."""

    def __init__(self, events: list[Event]) -> None:
        self._spans: dict[str | None, list[tuple[int, int]]] = {}
        self._lossy: list[tuple[int, int]] = []
        for event in events:
            if isinstance(event, FaultEvent):
                _widen(self._spans.setdefault(event.node, []), event)
                if event.loses:
                    _widen(self._lossy, event)

    def between(self, start_us: int, end_us: int, node: str = "") -> bool:
        """Return whether something failed for all nodes, or for this one."""
        return any(_overlaps(self._spans.get(whom, []), start_us, end_us) for whom in (None, node))

    def lossy(self, start_us: int, end_us: int) -> bool:
        """Return whether answers given in this time may have been forgotten."""
        return _overlaps(self._lossy, start_us, end_us)

    def forgave(self, accepted: AcceptedEvent) -> bool:
        """Return whether the task was promised only the server's own durability while the server lost writes."""
        return accepted.level == "server" and self.lossy(accepted.at_us, accepted.at_us)


class Stalls:
    """The parts of a time span in which the machine gave the recorder no CPU time."""

    def __init__(self, stalls: Iterable[StallEvent]) -> None:
        self._spans: list[tuple[int, int]] = []
        for stall in stalls:
            _widen(self._spans, stall)

    def between(self, start_us: int, end_us: int) -> int:
        """Return the stalled microseconds in a span; overlapping stalls count once."""
        return sum(max(0, min(end_us, last) - max(start_us, first)) for first, last in self._spans)


def _widen(spans: list[tuple[int, int]], fault: FaultEvent | StallEvent) -> None:
    start, end = fault.at_us, fault.until_us
    if spans and start <= spans[-1][1]:
        start, end = spans[-1][0], max(spans.pop()[1], end)
    spans.append((start, end))


def _overlaps(spans: list[tuple[int, int]], start_us: int, end_us: int) -> bool:
    at = bisect_right(spans, (end_us, 1 << 63)) - 1
    return at >= 0 and spans[at][1] >= start_us


class _Lane:
    """A lane as it was at a moment of the past."""

    __slots__ = ("over", "started", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str, int]] = []
        """Accepted and unfinished tasks, with the time of the answer; the next in turn on top."""
        self.over: set[str] = set()
        self.started: set[str] = set()
        """Begun before: the next attempt, or a repeat after a fault, goes first whatever was accepted since."""
        self.under_way: BegunEvent | None = None

    def accept(self, event: AcceptedEvent, *, first: bool, waited_for: bool) -> None:
        if event.instead is not None and event.instead != event.key:
            self.over.add(event.instead)  # also if unsure: the former task may be gone
        if not waited_for or (first and event.key in self.over):
            return  # the lane need not wait: the put is uncertain, or its answer came after the task's end
        self.over.discard(event.key)
        # A put that is overdue when it reaches the server counts from then, which is before its answer.
        heapq.heappush(self.waiting, (max(event.due_ms, event.at_us // 1000), event.key, event.at_us))

    def end(self, event: FinishedEvent | CancelledEvent) -> None:
        match event:
            case FinishedEvent():
                if self.under_way is not None and self.under_way.key == event.key:
                    self.under_way = None
                if event.ending != "retry":
                    self.over.add(event.key)
            case CancelledEvent(answer="cancelled") | CancelledEvent(answer="unsure"):
                self.over.add(event.key)

    def earlier(self, due_ms: int, known_us: int) -> tuple[int, str] | None:
        """Return the first task that is due before this time and was known at that moment."""
        while self.waiting and self.waiting[0][1] in self.over:
            heapq.heappop(self.waiting)
        if not self.waiting or self.waiting[0][0] >= due_ms:
            return None
        open_ = (one for one in self.waiting if one[0] < due_ms and one[1] not in self.over and one[2] <= known_us)
        return next(((due, key) for due, key, _ in sorted(open_)), None)


Broken = tuple[BegunEvent, str]
"""The begin that broke the rule, and how."""


def lanes_broken(
    events: Sequence[Event], first: Mapping[str, AcceptedEvent], excused: Callable[[AcceptedEvent], bool]
) -> Iterator[Broken]:
    """Yield every begin out of turn. `first` has the first acceptance of each key; excused ones hold up no lane."""
    lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
    leaving = _leaving(events)
    for event in events:
        while leaving and leaving[-1][0] <= event.at_us:
            _, key = leaving.pop()
            gone = first.get(key)
            if gone is not None and gone.lane is not None:
                lanes[gone.lane].over.add(key)
        if not isinstance(event, (AcceptedEvent, BegunEvent, FinishedEvent, CancelledEvent)):
            continue
        known = first.get(event.key)
        if known is None or known.lane is None:
            continue
        lane = lanes[known.lane]
        match event:
            case BegunEvent():
                yield from _begin(lane, event, known.due_ms)
            case AcceptedEvent():
                lane.accept(event, first=event is known, waited_for=event.sure and not excused(event))
            case _:
                lane.end(event)


def _leaving(events: Sequence[Event]) -> list[tuple[int, str]]:
    """Return from when a task may be gone because its caller asked for it, latest first."""
    asked = []
    for event in events:
        if isinstance(event, AcceptedEvent) and event.asked_us and event.instead not in (None, event.key):
            asked.append((event.asked_us, str(event.instead)))
        elif isinstance(event, CancelledEvent) and event.asked_us and event.answer in ("cancelled", UNSURE):
            asked.append((event.asked_us, event.key))
    return sorted(asked, reverse=True)


def _begin(lane: _Lane, begun: BegunEvent, due_ms: int) -> Iterator[Broken]:
    other = lane.under_way
    again = begun.key in lane.started
    lane.started.add(begun.key)
    elsewhere = other is not None and other.key != begun.key
    if again and not begun.token and (elsewhere or begun.key in lane.over):
        # A worker that stalled may continue a task that another one ended long since, and may be interrupted without
        # a report. Whether that is allowed is a question of repeats; it does not change the state of the lane.
        return
    # Tasks that a former owner had in flight when it ended are not in flight any more.
    if other is not None and elsewhere and other.token == begun.token:
        yield begun, f"began while {other.task} of its lane was under way"
    lane.under_way = begun
    head = lane.earlier(due_ms, begun.queued_us or begun.at_us)
    if head is not None and head[1] != begun.key and not again:
        yield begun, f"due {due_ms} ms, overtook {head[1]} due {head[0]} ms"


_OPEN: Final = frozenset({"pending", "fired", "queued", "running"})


class DeliveryWait(NamedTuple):
    """How long one task took to be delivered once nothing hindered it."""

    accepted: AcceptedEvent
    since_us: int
    """When it was due and known, all was healed, and neither it nor a task before it in its lane had to retry."""
    spent_us: int | None
    """Time until its target had the task; None if it never did."""
    stalled_us: int
    """Part of that time in which the machine gave the recorder no CPU time, as measured."""
    within_us: int

    @property
    def allowed_us(self) -> int:
        return self.within_us + self.stalled_us

    @property
    def rank(self) -> float:
        return float("inf") if self.spent_us is None else float(self.spent_us - self.stalled_us)


def waits(events: list[Event], lives: Lives, faults: Faults) -> Iterator[DeliveryWait]:
    """Yield the wait of every task that had to be delivered by the last `HealedEvent`; events in order of time."""
    healed = next((event for event in reversed(events) if isinstance(event, HealedEvent)), None)
    if healed is None:
        return
    stalls = Stalls(event for event in events if isinstance(event, StallEvent) and event.until_us > healed.at_us)
    failed = _failed_in_lanes(events, lives)
    left = {event.task: event for event in events if isinstance(event, LeftEvent)}
    for life in lives.values():
        accepted = life.accepted
        if _awaited(life) and not faults.forgave(accepted):
            since_us = max(healed.at_us, accepted.at_us, accepted.due_ms * 1000, _failed_us(life, failed))
            wait = _wait(life, since_us, healed.within_us, stalls)
            last = left.get(accepted.task)
            if last is None or (last.state in _OPEN and last.at_us > wait.since_us + wait.allowed_us):
                yield wait


def _failed_in_lanes(events: list[Event], lives: Lives) -> dict[str, list[int]]:
    """Return, by lane, when attempts failed: a failing head holds its lane until it is retried."""
    failed: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, FinishedEvent) and event.ending == "retry" and event.key in lives:
            lane = lives[event.key].accepted.lane
            if lane is not None:
                failed[lane].append(event.at_us)
    return failed


def _failed_us(life: Life, failed: dict[str, list[int]]) -> int:
    """Return the last failure that the task had to wait for: its own, or one in its lane."""
    lane = life.accepted.lane
    if lane is None or life.done_us is None:
        return life.failed_us
    before = bisect_right(failed.get(lane, []), life.done_us)
    return failed[lane][before - 1] if before else 0


def _awaited(life: Life) -> bool:
    ended = life.doubted or life.cancelled is not None or life.superseded is not None
    return life.accepted.sure and not ended


def _wait(life: Life, since_us: int, within_us: int, stalls: Stalls) -> DeliveryWait:
    """Return the wait; only stalls while the task had to be delivered count."""
    last_us = since_us + within_us if life.done_us is None else max(since_us, life.done_us)
    spent_us = None if life.done_us is None else last_us - since_us
    return DeliveryWait(life.accepted, since_us, spent_us, stalls.between(since_us, last_us), within_us)


Rule = Literal[
    "early", "late", "lost", "phantom", "cancelled", "superseded", "expired", "fenced",
    "lane", "repeated", "excess", "key", "books",
]  # fmt: skip


class Violation(NamedTuple):
    """An invariant that did not hold."""

    rule: Rule
    task: str
    at_us: int
    message: str


# At the same instant ends sort before begins, and a begin need not know of a task accepted then.
_ORDER: Final[dict[type, int]] = {
    FinishedEvent: 0, CancelledEvent: 1, BegunEvent: 2, AcceptedEvent: 3, WroteEvent: 4,
    FaultEvent: 5, HealedEvent: 6, StallEvent: 7, LeftEvent: 8,
}  # fmt: skip


def check(history: History) -> list[Violation]:
    """Return every violation of an invariant of the design; empty for a good history."""
    events = _in_order(history)
    lives, clashes = lives_of(events)
    found = [Violation("key", event.task, event.at_us, text) for event, text in clashes]
    faults = Faults(events)
    found += _phantoms(events, lives)
    for key, life in lives.items():
        found += _out_of_time(life)
        found += _after_the_end(life, faults)
        found += _repeats(key, life, faults)
    found += _excess(events, lives, faults)
    found += (lost for lost, promised in _lost(events, lives, faults) if promised)
    found += _late(waits(events, lives, faults))
    found += _fenced(events, faults)
    found += _sent_too_late(events)
    found += _lanes(events, lives, faults)
    return found


def unpromised(history: History) -> list[Violation]:
    """Return the tasks that are gone at a durability that does not protect from what happened: reported, not hidden."""
    events = _in_order(history)
    lives, _ = lives_of(events)
    return [lost for lost, promised in _lost(events, lives, Faults(events)) if not promised]


def slowest(history: History) -> DeliveryWait | None:
    """Return the slowest wait among the tasks due after healing; a task that was never delivered comes first."""
    events = _in_order(history)
    lives, _ = lives_of(events)
    return max(waits(events, lives, Faults(events)), key=lambda wait: wait.rank, default=None)


def _in_order(history: History) -> list[Event]:
    return sorted(history.events, key=lambda event: (event.at_us, _ORDER[type(event)]))


def _phantoms(events: list[Event], lives: Lives) -> Iterator[Violation]:
    """Yield deliveries of tasks that were never accepted, or with the key of another task."""
    tasks = {life.accepted.task for life in lives.values()}
    for event in events:
        if not isinstance(event, BegunEvent):
            continue
        life = lives.get(event.key)
        if event.task not in tasks:
            yield Violation("phantom", event.task, event.at_us, "was delivered and never accepted")
        elif life is None or life.accepted.task != event.task:
            yield Violation("key", event.task, event.at_us, f"was delivered with the key {event.key}")


def _out_of_time(life: Life) -> Iterator[Violation]:
    due_us, expires_ms = life.accepted.due_ms * 1000, life.accepted.expires_ms
    for begun in life.begins:
        if begun.at_us < due_us:
            text = f"began {due_us - begun.at_us} us before its time"
            yield Violation("early", begun.task, begun.at_us, text)
        if expires_ms is not None and begun.at_us // 1000 > expires_ms:
            text = f"began {begun.at_us // 1000 - expires_ms} ms after it had expired"
            yield Violation("expired", begun.task, begun.at_us, text)


def _after_the_end(life: Life, faults: Faults) -> Iterator[Violation]:
    """Yield begins after a cancel or a replace. Attempts after earlier failures are allowed up to the answer."""
    superseded_us = life.superseded.at_us if life.superseded is not None else None
    ends: tuple[tuple[Rule, int | None], ...] = (("cancelled", life.cancelled), ("superseded", superseded_us))
    for rule, ended_us in ends:
        if ended_us is None or life.accepted.twice or life.again_since(ended_us) or faults.lossy(ended_us, ended_us):
            continue
        for begun in life.begins:
            if begun.at_us > ended_us or begun.attempt not in life.retried:
                text = f"began at {begun.at_us} us, attempt {begun.attempt}; the answer came at {ended_us} us"
                yield Violation(rule, begun.task, begun.at_us, text)


def _repeats(key: str, life: Life, faults: Faults) -> Iterator[Violation]:
    """Yield an attempt made twice, or one after success, without a failure in between that affects its first holder."""
    for former, begun in zip(life.begins, life.begins[1:], strict=False):
        failed = begun.attempt > former.attempt and former.attempt in life.retried
        if failed or life.accepted.twice or life.again_since(former.at_us):
            continue
        # Among workers the later one may have failed: it can have stalled before it began.
        failing = (former.node,) if begun.token else (former.node, begun.node)
        if not any(faults.between(former.at_us, begun.at_us, node) for node in failing):
            text = f"{key}: attempt {begun.attempt} after attempt {former.attempt} with no fault in between"
            yield Violation("repeated", begun.task, begun.at_us, text)


_Reign = tuple[int, str]
"""Partition and token: the tenure of one owner."""


def _excess(events: list[Event], lives: Lives, faults: Faults) -> Iterator[Violation]:
    """Yield owners of whose deliveries more were repeated than they had left unsettled on the server."""
    settled: Counter[_Reign] = Counter()
    for event in events:
        if isinstance(event, WroteEvent):
            settled[event.partition, event.token] += event.settled
    if not settled:
        return  # the writes of the servers were not recorded
    delivered: Counter[_Reign] = Counter()
    repeated: defaultdict[_Reign, list[BegunEvent]] = defaultdict(list)
    for life in lives.values():
        before: dict[int, BegunEvent] = {}
        for begun in life.begins:
            former = before.get(begun.attempt)
            before[begun.attempt] = begun
            delivered[begun.partition, begun.token] += 1
            if former is None or life.accepted.twice or life.again_since(former.at_us):
                continue
            if not faults.lossy(former.at_us, begun.at_us):
                repeated[former.partition, former.token].append(begun)
    for reign, again in repeated.items():
        in_flight = delivered[reign] - settled[reign]
        if len(again) > in_flight:
            text = (
                f"partition {reign[0]}: {len(again)} delivered again after {reign[1]} had at most {in_flight} in flight"
            )
            yield Violation("excess", again[-1].task, again[-1].at_us, text)


_ALIVE: Final = frozenset(
    {"pending", "fired", "queued", "running", "done", "cancelled", "replaced", "dead", "finished"}
)
_SAID_DONE: Final = frozenset({"done", "finished"})


def _lost(events: list[Event], lives: Lives, faults: Faults) -> Iterator[tuple[Violation, bool]]:
    """Yield the tasks that are gone, and whether their durability promised otherwise."""
    left = {event.task: event.state for event in events if isinstance(event, LeftEvent)}
    # If targets record what they received, a task that the store calls done is not enough.
    answered = any(isinstance(event, FinishedEvent) and not event.token for event in events)
    alive = _ALIVE - _SAID_DONE if answered else _ALIVE
    lived = Counter(life.accepted.task for life in lives.values())
    for life in lives.values():
        accepted, state, next_ = life.accepted, left.get(life.accepted.task), life.superseded
        # A replace that the servers forgot leaves the task where it was.
        replaced = next_ is not None and (lives[next_.key].ended or not faults.lossy(next_.at_us, next_.at_us))
        if accepted.sure and not life.ended and not replaced and state not in alive:
            heard = "never heard of" if state not in _SAID_DONE else f"{state} in the store, but no target had it"
            text = f"due {accepted.due_ms} ms, level {accepted.level}, and {heard}"
            yield Violation("lost", accepted.task, accepted.at_us, text), not faults.forgave(accepted)
        elif life.died and state in _SAID_DONE and lived[accepted.task] == 1 and not life.again:
            yield Violation("lost", accepted.task, accepted.at_us, "died, and left no dead letter"), True


def _late(waited: Iterator[DeliveryWait]) -> Iterator[Violation]:
    """Yield tasks that were not delivered in time although everything had been working for long enough."""
    for wait in waited:
        if wait.spent_us is None or wait.spent_us > wait.allowed_us:
            how = "never" if wait.spent_us is None else f"{(wait.spent_us - wait.allowed_us) // 1000} ms too late"
            text = f"due {wait.accepted.due_ms} ms, delivered {how}"
            yield Violation("late", wait.accepted.task, wait.since_us + wait.allowed_us, text)


def _fenced(events: list[Event], faults: Faults) -> Iterator[Violation]:
    """Yield writes with an old epoch: the epochs of a partition only grow, and each epoch has one owner."""
    newest: dict[int, tuple[int, str, int]] = {}
    for event in events:
        if not isinstance(event, (BegunEvent, FinishedEvent, WroteEvent)) or not event.token:
            continue
        epoch = _epoch(event.token)
        highest, token, since_us = newest.get(event.partition, (-1, "", 0))
        if epoch > highest:
            newest[event.partition] = (epoch, event.token, event.at_us)
        elif event.token != token and event.at_us > since_us and not faults.lossy(since_us, event.at_us):
            text = f"partition {event.partition}: a write of {event.token} while {token} owns it"
            task = event.what if isinstance(event, WroteEvent) else event.task
            yield Violation("fenced", task, event.at_us, text)


def _sent_too_late(events: list[Event]) -> Iterator[Violation]:
    """Yield deliveries sent by an owner after its successor had written: the owner did not check its lease."""
    since: dict[_Reign, int] = {}
    for event in events:
        if isinstance(event, (BegunEvent, WroteEvent)) and event.token:
            since.setdefault((event.partition, event.token), event.at_us)
    for event in events:
        if not isinstance(event, BegunEvent) or not event.sent_us:
            continue
        for (partition, token), since_us in since.items():
            if partition == event.partition and _epoch(token) > _epoch(event.token) and since_us < event.sent_us:
                text = f"partition {partition}: sent under {event.token} at {event.sent_us} us, but {token} owned it"
                yield Violation("fenced", event.task, event.sent_us, text)
                break


def _epoch(token: str) -> int:
    return int(token.partition(".")[0])


def _lanes(events: list[Event], lives: Lives, faults: Faults) -> Iterator[Violation]:
    """Yield begins out of turn in a lane. A failing head is still the head; lanes need not wait for lost tasks."""
    first = {key: life.accepted for key, life in lives.items()}
    for begun, text in lanes_broken(events, first, faults.forgave):
        yield Violation("lane", begun.task, begun.at_us, text)
