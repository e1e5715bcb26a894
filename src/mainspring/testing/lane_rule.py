"""The rule of lanes: one at a time, the earlier due first among those that were known."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from .events import UNSURE, Accepted, Begun, Cancelled, Event, Finished


class _Lane:
    """One lane as it was at a moment of the past."""

    __slots__ = ("over", "started", "under_way", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[int, str, int]] = []
        """Accepted and not finished, with the time of the answer: the earliest due on top."""
        self.over: set[str] = set()
        self.started: set[str] = set()
        """Begun before: its next attempt, or its repeat after a fault, goes first whatever came meanwhile."""
        self.under_way: Begun | None = None

    def accept(self, event: Accepted, *, first: bool, waited_for: bool) -> None:
        if event.instead is not None and event.instead != event.key:
            self.over.add(event.instead)  # also when it is unsure: the former one may be gone
        if not waited_for or (first and event.key in self.over):
            return  # nobody can say that it is there; or the answer came after the end
        self.over.discard(event.key)
        heapq.heappush(self.waiting, (event.due_ms, event.key, event.at_us))

    def end(self, event: Finished | Cancelled) -> None:
        match event:
            case Finished():
                if self.under_way is not None and self.under_way.key == event.key:
                    self.under_way = None
                if event.ending != "retry":
                    self.over.add(event.key)
            case Cancelled(answer="cancelled") | Cancelled(answer="unsure"):
                self.over.add(event.key)

    def earlier(self, due_ms: int, known_us: int) -> tuple[int, str] | None:
        """The first of those that are due before this time and were known at that moment."""
        while self.waiting and self.waiting[0][1] in self.over:
            heapq.heappop(self.waiting)
        if not self.waiting or self.waiting[0][0] >= due_ms:
            return None
        open_ = (one for one in self.waiting if one[0] < due_ms and one[1] not in self.over and one[2] <= known_us)
        return next(((due, key) for due, key, _ in sorted(open_)), None)


Broken = tuple[Begun, str]
"""The begin that broke the rule, and how."""


def lanes_broken(
    events: Sequence[Event], first: Mapping[str, Accepted], excused: Callable[[Accepted], bool]
) -> Iterator[Broken]:
    """Every begin out of turn. `first` has the first acceptance of each key; excused ones are waited for by nobody."""
    lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
    leaving = _leaving(events)
    for event in events:
        while leaving and leaving[-1][0] <= event.at_us:
            _, key = leaving.pop()
            gone = first.get(key)
            if gone is not None and gone.lane is not None:
                lanes[gone.lane].over.add(key)
        if not isinstance(event, (Accepted, Begun, Finished, Cancelled)):
            continue
        known = first.get(event.key)
        if known is None or known.lane is None:
            continue
        lane = lanes[known.lane]
        match event:
            case Begun():
                yield from _begin(lane, event, known.due_ms)
            case Accepted():
                lane.accept(event, first=event is known, waited_for=event.sure and not excused(event))
            case _:
                lane.end(event)


def _leaving(events: Sequence[Event]) -> list[tuple[int, str]]:
    """From when on a task may be gone because its caller asked for it, the latest first."""
    asked = []
    for event in events:
        if isinstance(event, Accepted) and event.asked_us and event.instead not in (None, event.key):
            asked.append((event.asked_us, str(event.instead)))
        elif isinstance(event, Cancelled) and event.asked_us and event.answer in ("cancelled", UNSURE):
            asked.append((event.asked_us, event.key))
    return sorted(asked, reverse=True)


def _begin(lane: _Lane, begun: Begun, due_ms: int) -> Iterator[Broken]:
    other = lane.under_way
    again = begun.key in lane.started
    lane.started.add(begun.key)
    elsewhere = other is not None and other.key != begun.key
    if again and not begun.token and (elsewhere or begun.key in lane.over):
        # A worker that stood still goes on with what another one has ended long since, and may be broken off without a
        # word: whether that may be is a question of repeats, and the lane is where it is.
        return
    # What a former owner had under way when it went is not under way any more.
    if other is not None and elsewhere and other.token == begun.token:
        yield begun, f"began while {other.task} of its lane was under way"
    lane.under_way = begun
    head = lane.earlier(due_ms, begun.queued_us or begun.at_us)
    if head is not None and head[1] != begun.key and not again:
        yield begun, f"due {due_ms} ms, overtook {head[1]} due {head[0]} ms"
