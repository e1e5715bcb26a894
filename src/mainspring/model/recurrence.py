"""When a schedule runs: the union of its specs in its zone, within its bounds, without what is excluded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from .cron import Cron
from .day_plan import Spec
from .errors import InvalidInput
from .exclusion import Exclusion, LeftOut, exclusion
from .interval import AfterEnd, Every
from .zone import Segment, zone
from .zoned_cron import Gap, Overlap, next_in_zone, planned_in_gap

_MAX_SKIPS: Final = 50_000
"""Steps over what is excluded, mostly whole days, before the search gives up: about half a second of work. Several
specs, and hundreds of exclusions, cost more at each of them, and get fewer."""
_EXCLUSIONS_LIKE_A_SPEC: Final = 100


def spec(text: str, name: str = "") -> Cron | Every:
    """Read a cron line, an alias, or `@every 30s`."""
    if text.strip()[:6].lower() == "@every":
        return Every.parse(text)
    return Cron.parse(text, name)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """All instants are epoch milliseconds. Both bounds belong to the time in which it runs."""

    specs: tuple[Spec, ...]
    zone: str = "UTC"
    gap: Gap = "shift"
    overlap: Overlap = "first"
    exclude: tuple[Exclusion, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    max_runs: int | None = None
    _left_out: LeftOut = field(default=LeftOut((), ()), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.specs:
            raise InvalidInput("a schedule needs at least one spec, such as '0 9 * * MON-FRI' or '@every 30s'")
        zone(self.zone)
        if self.exclude:
            object.__setattr__(self, "_left_out", LeftOut(self.exclude, self.specs, self.start_ms))
        for name, value, known in (("gap", self.gap, get_args(Gap)), ("overlap", self.overlap, get_args(Overlap))):
            if value not in known:
                raise InvalidInput(f"{name} is {value!r}; use {', '.join(known)}")
        if self.max_runs is not None and self.max_runs < 1:
            raise InvalidInput(f"max_runs is {self.max_runs}; leave it out, or give at least 1")
        if self.start_ms is not None and self.end_ms is not None and self.end_ms < self.start_ms:
            raise InvalidInput(f"the end ({self.end_ms} ms) lies before the start ({self.start_ms} ms)")

    @classmethod
    def parse(
        cls, specs: str | Sequence[str | Spec], *, name: str = "", zone: str = "UTC", gap: Gap = "shift",
        overlap: Overlap = "first", exclude: Sequence[str | Exclusion] = (), start_ms: int | None = None,
        end_ms: int | None = None, max_runs: int | None = None,
    ) -> "Recurrence":  # fmt: skip
        """From texts as people write them; `name` is the schedule's and decides where H falls."""
        given = [specs] if isinstance(specs, str) else specs
        read = tuple(spec(one, name) if isinstance(one, str) else one for one in given)
        left_out = tuple(exclusion(one, name) if isinstance(one, str) else one for one in exclude)
        return cls(read, zone, gap, overlap, left_out, start_ms, end_ms, max_runs)

    @property
    def waits_for_end(self) -> bool:
        """Whether the next time is known only when a run has ended."""
        return any(isinstance(one, AfterEnd) for one in self.specs)

    def next_after(self, after_ms: int, *, runs: int = 0, ended_ms: int | None = None) -> int | None:
        """The first run strictly later than `after_ms`; None when there is none.

        `runs` were made so far, for `max_runs`; `ended_ms` is the end of the last one, for a fixed delay."""
        if self.max_runs is not None and runs >= self.max_runs:
            return None
        if self.start_ms is not None:
            after_ms = max(after_ms, self.start_ms - 1)
        for _ in range(_MAX_SKIPS // (len(self.specs) + len(self.exclude) // _EXCLUSIONS_LIKE_A_SPEC)):
            next_ms = self._planned_after(after_ms, ended_ms)
            if next_ms is None or (self.end_ms is not None and next_ms > self.end_ms):
                return None
            until_ms = self._excluded_until(next_ms) if self.exclude else None
            if until_ms is None:
                return next_ms
            after_ms = until_ms - 1
        return None

    def between(self, from_ms: int, until_ms: int, limit: int = 1_000, *, runs: int = 0) -> list[int]:
        """The first `limit` runs in [from_ms, until_ms)."""
        found: list[int] = []
        next_ms = self.next_after(from_ms - 1, runs=runs)
        while next_ms is not None and next_ms < until_ms and len(found) < limit:
            found.append(next_ms)
            next_ms = self.next_after(next_ms, runs=runs + len(found))
        return found

    def _planned_after(self, after_ms: int, ended_ms: int | None) -> int | None:
        found: int | None = None
        for one in self.specs:
            if isinstance(one, Cron):
                at_s = next_in_zone(one, zone(self.zone), after_ms // 1000, self.gap, self.overlap)
                next_ms = None if at_s is None else at_s * 1000
            elif isinstance(one, Every):
                next_ms = one.next_after(after_ms, self.start_ms)
            else:
                next_ms = one.next_after(after_ms, ended_ms)
            if next_ms is not None and (found is None or next_ms < found):
                found = next_ms
        return found

    def _excluded_until(self, at_ms: int) -> int | None:
        """When the exclusion over this instant ends, or the zone's offset changes and it must be asked anew."""
        segment = zone(self.zone).segment(at_ms // 1000)
        local_s = at_ms // 1000 + segment.offset_s
        end_s = self._left_out.end_of(local_s, segment.offset_s)
        if at_ms == segment.start_s * 1000 and self._stands_in(segment, excluded=end_s is not None):
            return None if self._keeps_in_gap(segment) else at_ms + 1
        return None if end_s is None else min(end_s - segment.offset_s, segment.end_s) * 1000

    def _stands_in(self, segment: Segment, *, excluded: bool) -> bool:
        """A run at the start of a segment is there only for times that were jumped over."""
        if self.gap != "shift" or segment.before_s >= segment.offset_s:
            return False
        local_s = segment.start_s + segment.offset_s
        return excluded or not any(
            one.next_local(local_s, local_s + 1) is not None
            if isinstance(one, Cron)
            else isinstance(one, Every)
            and one.next_after(segment.start_s * 1000 - 1, self.start_ms) == segment.start_s * 1000
            for one in self.specs
        )

    def _keeps_in_gap(self, segment: Segment) -> bool:
        """Whether one of the times that were jumped over is not excluded: on them it is asked, not on when they run."""
        end_s = segment.start_s + segment.offset_s
        for line in self.specs:
            if isinstance(line, Cron) and not line.absolute:
                at_s = planned_in_gap(line, segment)
                while at_s is not None:
                    over_s = self._left_out.end_of(at_s, segment.before_s)
                    if over_s is None:
                        return True
                    at_s = line.next_local(over_s, end_s) if over_s < end_s else None
        return False
