"""Time zones, and cron on their wall clocks: what happens when an hour is missing, or comes twice.

The rules come from the package `tzdata` and never from the machine: nodes with the same pins plan the same times, and
`tz_version` names the rules actually in use.
"""

from bisect import bisect_right
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Final, Literal, NamedTuple
from zoneinfo import ZoneInfo

from ..errors import InvalidInput
from .cron import Cron

# No zone has changed twice within five days since 1970, so one look in four days finds every change.
_LOOK_S: Final = 4 * 86_400
_BLOCK_S: Final = 92 * _LOOK_S
_SECOND: Final = timedelta(seconds=1)


class Segment(NamedTuple):
    """[start_s, end_s) in epoch seconds with one offset, and the offsets just before and after it.

    Where nothing changes for a year it may be cut: then `before_s` or `after_s` is the offset itself."""

    start_s: int
    end_s: int
    offset_s: int
    before_s: int
    after_s: int


class Zone:
    """An IANA zone. Threads may share it: its caches can only be computed again, with the same result."""

    __slots__ = ("_blocks", "_views", "info", "name")

    def __init__(self, name: str, info: ZoneInfo) -> None:
        self.name = name
        self.info = info
        self._blocks: dict[int, list[tuple[int, int]]] = {}
        self._views: dict[int, tuple[list[int], list[Segment]]] = {}

    def segment(self, at_s: int) -> Segment:
        """Return the stretch of constant offset around an instant."""
        number = at_s // _BLOCK_S
        starts, segments = self._views.get(number) or self._view(number)
        return segments[bisect_right(starts, at_s) - 1]

    def changes(self, from_s: int, end_s: int) -> Iterator[Segment]:
        """Yield the segments that begin in [from_s, end_s) with another offset than before."""
        segment = self.segment(from_s)
        while segment.end_s < end_s:
            segment = self.segment(segment.end_s)
            if segment.before_s != segment.offset_s:
                yield segment

    def local_s(self, at_s: int) -> int:
        """Return the wall clock at an instant, counted as if it were UTC."""
        return at_s + self.segment(at_s).offset_s

    def datetime(self, at_ms: int) -> datetime:
        """Return the instant as an aware datetime of this zone."""
        seconds, ms = divmod(at_ms, 1000)
        return datetime.fromtimestamp(seconds, self.info).replace(microsecond=ms * 1000)

    def _view(self, number: int) -> tuple[list[int], list[Segment]]:
        """Return one block with both neighbours, so that an overlap across the edge of a block is seen whole."""
        runs: list[tuple[int, int]] = []
        for start_s, offset_s in self._block(number - 1) + self._block(number) + self._block(number + 1):
            if not runs or runs[-1][1] != offset_s:
                runs.append((start_s, offset_s))
        ends = [start_s for start_s, _ in runs[1:]] + [(number + 2) * _BLOCK_S]
        offsets = [offset_s for _, offset_s in runs]
        neighbours = zip(runs, ends, [offsets[0], *offsets], [*offsets[1:], offsets[-1]], strict=False)
        segments = [Segment(start, end, offset, before, after) for (start, offset), end, before, after in neighbours]
        view = ([segment.start_s for segment in segments], segments)
        self._views[number] = view
        return view

    def _block(self, number: int) -> list[tuple[int, int]]:
        """Return (start, offset) of each run in a block; the first start is the block's own."""
        known = self._blocks.get(number)
        if known is not None:
            return known
        start_s = number * _BLOCK_S
        offset_s = self._offset(start_s)
        runs = [(start_s, offset_s)]
        for look_s in range(start_s + _LOOK_S, start_s + _BLOCK_S + 1, _LOOK_S):
            seen_s = self._offset(look_s)
            if seen_s != offset_s:
                change_s = self._change(look_s - _LOOK_S, look_s)
                if change_s < start_s + _BLOCK_S:
                    runs.append((change_s, seen_s))
                offset_s = seen_s
        self._blocks[number] = runs
        return runs

    def _change(self, low_s: int, high_s: int) -> int:
        """Return the first second with the later offset; the two bounds differ."""
        before_s = self._offset(low_s)
        while high_s - low_s > 1:
            middle_s = (low_s + high_s) // 2
            if self._offset(middle_s) == before_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s

    def _offset(self, at_s: int) -> int:
        offset = datetime.fromtimestamp(at_s, self.info).utcoffset()
        return offset // _SECOND if offset else 0


@cache
def zone(name: str) -> Zone:
    """Return the zone of that IANA name."""
    if name not in zone_names():
        raise InvalidInput(f"zone {name!r} is not in the time zone database {tz_version()}{_suggestion(name)}")
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return Zone(name, ZoneInfo.from_file(file, key=name))


def _suggestion(name: str) -> str:
    from difflib import get_close_matches  # only for an error: it is slow to load

    near = [known for known in zone_names() if known.lower() == name.lower()]
    near = near or get_close_matches(name, sorted(zone_names()), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ", e.g. Europe/Paris"


@cache
def zone_names() -> frozenset[str]:
    """Return every name in the database, links included."""
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="ascii").split())


@cache
def tz_version() -> str:
    """Return the release of the time zone database in use, such as 2026a."""
    from tzdata import IANA_VERSION

    return str(IANA_VERSION)


# Cron on the wall clock of a zone. A zone is a sequence of segments with one offset each; within a segment the next run
# is arithmetic. Between two segments:
#
# - Hours with a wildcard or a step run on absolute time: they match the wall clock of every real second, so a skipped
#   hour adds no run, and a repeated hour counts twice.
# - Fixed hours promise a run on that day: a time in a gap runs once at the first valid instant (`shift`) or not at all
#   (`skip`); a time in an overlap runs the first time, the second time, or both times.

Gap = Literal["shift", "skip"]
Overlap = Literal["first", "second", "both"]

_REACH_S: Final = 50 * 366 * 86_400
"""How far to search. February 29 on a given weekday can be 40 years away."""
_LAST_S: Final = 7_900 * 366 * 86_400
"""Calendars end with the year 9999."""


def next_in_zone(cron: Cron, zone: Zone, after_s: int, gap: Gap = "shift", overlap: Overlap = "first") -> int | None:
    """Return the first run strictly later than `after_s`, in epoch seconds and never before 1970.

    Return None if there is none for fifty years."""
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
    """Return how many runs are in [from_s, end_s): those that `next_in_zone` finds one after the other."""
    at_s, count = max(from_s, 0), 0
    while at_s < end_s:
        segment = zone.segment(at_s)
        low_s, high_s = at_s + segment.offset_s, segment.end_s + segment.offset_s
        if not cron.absolute:
            low_s, high_s = _window(segment, at_s, overlap)
            if gap == "shift" and at_s == segment.start_s and planned_in_gap(cron, segment) is not None:
                low_s, count = low_s + 1, count + 1  # a run planned for this same second is the same run
        high_s = min(high_s, end_s + segment.offset_s)
        if low_s < high_s:
            count += cron.count_local(low_s, high_s)
        at_s = segment.end_s
    return count


def _window(segment: Segment, at_s: int, overlap: Overlap) -> tuple[int, int]:
    """Return the local seconds of a segment from `at_s` on, without an overlap that belongs to its neighbour."""
    from_s, end_s = at_s + segment.offset_s, segment.end_s + segment.offset_s
    if overlap == "first":
        from_s = max(from_s, segment.start_s + segment.before_s)
    elif overlap == "second":
        end_s = min(end_s, segment.end_s + segment.after_s)
    return from_s, end_s


def planned_in_gap(cron: Cron, segment: Segment) -> int | None:
    """Return the first planned local second that is skipped at the start of a segment."""
    return _first(cron, segment.start_s + segment.before_s, segment.start_s + segment.offset_s)


def planned_in_overlap(cron: Cron, segment: Segment) -> int | None:
    """Return the first planned local second that repeats at the start of a segment."""
    return _first(cron, segment.start_s + segment.offset_s, segment.start_s + segment.before_s)


def _first(cron: Cron, from_s: int, end_s: int) -> int | None:
    return cron.next_local(from_s, end_s) if from_s < end_s else None
