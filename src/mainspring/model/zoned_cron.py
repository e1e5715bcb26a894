"""Cron on the wall clock of a zone: what happens when an hour is missing, or comes twice.

A zone is a row of segments with one offset each; within a segment the next run is arithmetic. What is left is what
happens between two segments:

- hours with a wildcard or a step run on absolute time: they match the wall clock of every real second, so nothing is
  added for an hour that was jumped over, and an hour that comes twice counts twice;
- fixed hours are a promise to run on that day: what falls into a gap runs once at the first valid instant (`shift`), or
  not at all (`skip`); what falls into an overlap runs the first time, the second time or both times."""

from typing import Final, Literal

from .cron import Cron
from .zone import Segment, Zone

Gap = Literal["shift", "skip"]
Overlap = Literal["first", "second", "both"]

_REACH_S: Final = 50 * 366 * 86_400
"""How far to look. February 29 on a given weekday can be 40 years away."""
_LAST_S: Final = 7_900 * 366 * 86_400
"""Calendars end with the year 9999."""


def next_in_zone(cron: Cron, zone: Zone, after_s: int, gap: Gap = "shift", overlap: Overlap = "first") -> int | None:
    """The first run strictly later than `after_s`, in epoch seconds and never before 1970.

    None when there is none for fifty years."""
    at_s = max(after_s, -1) + 1
    end_s = min(at_s + _REACH_S, _LAST_S)
    while at_s < end_s:
        segment = zone.segment(at_s)
        if cron.absolute:
            local_s = cron.next_local(at_s + segment.offset_s, segment.end_s + segment.offset_s)
        else:
            if gap == "shift" and at_s == segment.start_s and planned_in_gap(cron, segment) is not None:
                return at_s
            local_s = cron.next_local(*_window(segment, at_s, overlap))
        if local_s is not None:
            return local_s - segment.offset_s
        at_s = segment.end_s
    return None


def count_in_zone(
    cron: Cron, zone: Zone, from_s: int, end_s: int, gap: Gap = "shift", overlap: Overlap = "first"
) -> int:
    """How many runs lie in [from_s, end_s): those that `next_in_zone` finds one after the other."""
    at_s, count = max(from_s, 0), 0
    while at_s < end_s:
        segment = zone.segment(at_s)
        low_s, high_s = at_s + segment.offset_s, segment.end_s + segment.offset_s
        if not cron.absolute:
            low_s, high_s = _window(segment, at_s, overlap)
            if gap == "shift" and at_s == segment.start_s and planned_in_gap(cron, segment) is not None:
                low_s, count = low_s + 1, count + 1  # one that is planned for this very second is the same run
        high_s = min(high_s, end_s + segment.offset_s)
        if low_s < high_s:
            count += cron.count_local(low_s, high_s)
        at_s = segment.end_s
    return count


def _window(segment: Segment, at_s: int, overlap: Overlap) -> tuple[int, int]:
    """The local seconds of a segment from `at_s` on, without those of an overlap that belong to its neighbour."""
    from_s, end_s = at_s + segment.offset_s, segment.end_s + segment.offset_s
    if overlap == "first":
        from_s = max(from_s, segment.start_s + segment.before_s)
    elif overlap == "second":
        end_s = min(end_s, segment.end_s + segment.after_s)
    return from_s, end_s


def planned_in_gap(cron: Cron, segment: Segment) -> int | None:
    """The first planned local second that is jumped over at the start of a segment."""
    return _first(cron, segment.start_s + segment.before_s, segment.start_s + segment.offset_s)


def planned_in_overlap(cron: Cron, segment: Segment) -> int | None:
    """The first planned local second that comes again at the start of a segment."""
    return _first(cron, segment.start_s + segment.offset_s, segment.start_s + segment.before_s)


def _first(cron: Cron, from_s: int, end_s: int) -> int | None:
    return cron.next_local(from_s, end_s) if from_s < end_s else None
