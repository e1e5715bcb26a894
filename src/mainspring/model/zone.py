"""Time zones as runs of one constant offset, so that a calendar search is plain arithmetic within each.

The rules come from the package `tzdata` and never from the machine: nodes with the same pins plan the same times, and
`tz_version` names the rules that are really used."""

from bisect import bisect_right
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from .errors import InvalidInput

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
    """An IANA zone. Safe to share among threads: what it remembers can only be computed again, the same."""

    __slots__ = ("_blocks", "_views", "info", "name")

    def __init__(self, name: str, info: ZoneInfo) -> None:
        self.name = name
        self.info = info
        self._blocks: dict[int, list[tuple[int, int]]] = {}
        self._views: dict[int, tuple[list[int], list[Segment]]] = {}

    def segment(self, at_s: int) -> Segment:
        """The run of constant offset around an instant."""
        number = at_s // _BLOCK_S
        starts, segments = self._views.get(number) or self._view(number)
        return segments[bisect_right(starts, at_s) - 1]

    def changes(self, from_s: int, end_s: int) -> Iterator[Segment]:
        """The segments that begin in [from_s, end_s) with another offset than before."""
        segment = self.segment(from_s)
        while segment.end_s < end_s:
            segment = self.segment(segment.end_s)
            if segment.before_s != segment.offset_s:
                yield segment

    def local_s(self, at_s: int) -> int:
        """The wall clock at an instant, counted as if it were UTC."""
        return at_s + self.segment(at_s).offset_s

    def datetime(self, at_ms: int) -> datetime:
        """The instant as an aware datetime of this zone."""
        seconds, ms = divmod(at_ms, 1000)
        return datetime.fromtimestamp(seconds, self.info).replace(microsecond=ms * 1000)

    def _view(self, number: int) -> tuple[list[int], list[Segment]]:
        """One block with both neighbours: an overlap that reaches over the edge of a block is still seen whole."""
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
        """(start, offset) of each run in a block; the first start is the block's own."""
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
        """The first second with the later offset; the two bounds differ."""
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
    """The zone of that IANA name."""
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
    """Every name the database knows, links included."""
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="ascii").split())


@cache
def tz_version() -> str:
    """The release of the time zone database in use, such as 2026a."""
    from tzdata import IANA_VERSION

    return str(IANA_VERSION)
