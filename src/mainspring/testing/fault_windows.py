"""When something was broken on purpose, for whom, and what that excuses; and when the machine itself stood still."""

from bisect import bisect_right
from collections.abc import Iterable

from .events import Accepted, Event, Fault, Stall


class Faults:
    """Finds a fault in a span of time."""

    def __init__(self, events: list[Event]) -> None:
        self._spans: dict[str | None, list[tuple[int, int]]] = {}
        self._lossy: list[tuple[int, int]] = []
        for event in events:
            if isinstance(event, Fault):
                _widen(self._spans.setdefault(event.node, []), event)
                if event.loses:
                    _widen(self._lossy, event)

    def between(self, start_us: int, end_us: int, node: str = "") -> bool:
        """Something failed for everybody, or for this node."""
        return any(_overlaps(self._spans.get(whom, []), start_us, end_us) for whom in (None, node))

    def lossy(self, start_us: int, end_us: int) -> bool:
        """Answers given in this time may have been forgotten."""
        return _overlaps(self._lossy, start_us, end_us)

    def forgave(self, accepted: Accepted) -> bool:
        """It was promised only what the server itself could give, and that was not enough."""
        return accepted.level == "server" and self.lossy(accepted.at_us, accepted.at_us)


class Stalls:
    """How much of a span of time the machine gave to nobody."""

    def __init__(self, stalls: Iterable[Stall]) -> None:
        self._spans: list[tuple[int, int]] = []
        for stall in stalls:
            _widen(self._spans, stall)

    def between(self, start_us: int, end_us: int) -> int:
        """Microseconds; what several measured at once counts once."""
        return sum(max(0, min(end_us, last) - max(start_us, first)) for first, last in self._spans)


def _widen(spans: list[tuple[int, int]], fault: Fault | Stall) -> None:
    start, end = fault.at_us, fault.until_us
    if spans and start <= spans[-1][1]:
        start, end = spans[-1][0], max(spans.pop()[1], end)
    spans.append((start, end))


def _overlaps(spans: list[tuple[int, int]], start_us: int, end_us: int) -> bool:
    at = bisect_right(spans, (end_us, 1 << 63)) - 1
    return at >= 0 and spans[at][1] >= start_us
