"""What is counted in the history of a run."""

from collections import Counter

import msgspec

from ..events import Accepted, Begun, Event, Fault
from .load import UNKNOWN_KEY
from .recorder import STALL


def with_keys(events: list[Event]) -> list[Event]:
    """A put without an id that was never answered gets the key with which its task was first delivered."""
    keys: dict[str, str] = {}
    for event in events:
        if isinstance(event, Begun):
            keys.setdefault(event.task, event.key)
    return [
        msgspec.structs.replace(event, key=keys.get(event.task, event.key))
        if isinstance(event, Accepted) and event.key.startswith(UNKNOWN_KEY)
        else event
        for event in events
    ]


def unplanned(events: list[Event]) -> int:
    """Stalls that nobody caused: not those of nodes that were stopped on purpose."""
    faults = [event for event in events if isinstance(event, Fault)]
    stopped = [one for one in faults if one.what.startswith("stop ")]
    return sum(
        one.what == STALL
        and not any(stop.node == one.node and stop.at_us <= one.until_us <= stop.until_us for stop in stopped)
        for one in faults
    )


def duplicates(events: list[Event]) -> int:
    return sum(count - 1 for count in _begins(events).values())


def twice_begun(events: list[Event]) -> set[str]:
    """Keys of which an attempt was delivered more than once."""
    return {key for (key, _), count in _begins(events).items() if count > 1}


def _begins(events: list[Event]) -> Counter[tuple[str, int]]:
    return Counter((event.key, event.attempt) for event in events if isinstance(event, Begun))
