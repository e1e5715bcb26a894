"""A schedule as stored: what runs, when, and how edge cases are handled. Immutable: an edit makes a new one."""

import hashlib
import re
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from ..errors import InvalidInput
from ..ids import check_name, check_schedule_name, instant_text
from ..limits import HORIZON_MS
from ..retry import RetryPolicy, check_against
from ..targets.names import check_target
from ..targets.webhook import TIMEOUT_S, is_web
from .recurrence import PlannedTimes, slots_of

# Jitter: small shifts that keep schedules from starting all at once. Every node computes the same shift, also after a
# restart. A run keeps its planned time as its identity; only its start moves.


def jitter_ms(name: str, planned_ms: int, width_ms: int) -> int:
    """Return a delay in [0, width_ms), different for every run of a schedule."""
    return _place(f"{name}@{planned_ms}", width_ms)


def spread_ms(name: str, width_ms: int) -> int:
    """Return a delay in [0, width_ms), the same for every run of a schedule: its runs stay evenly spaced."""
    return _place(name, width_ms)


def _place(seed: str, width_ms: int) -> int:
    if width_ms < 0:
        raise InvalidInput(f"the width is {width_ms} ms; it must not be negative")
    if width_ms == 0:
        return 0
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "big") % width_ms


OverlapRule = Literal["skip", "buffer_one", "buffer_all", "allow"]
MisfireRule = Literal["coalesce", "skip", "all"]
PauseMode = Literal["drop", "hold"]

MOST_KEPT: Final = 1_000
"""Limit of the runs that `buffer_all` and `all` may keep."""
MOST_SPECS: Final = 32
MOST_RUNS: Final = (1 << 53) - 1
"""Largest whole number that every JSON reader reads exactly."""
_KEPT_BY_DEFAULT: Final = 100
_RULE: Final = re.compile(r"([a-z_]+)(?:\((\d{1,6})\))?")
_SAMPLE: Final = 20


class CountedRule(NamedTuple):
    word: str
    most: int


@lru_cache(maxsize=256)
def read_rule(text: str, field: str, words: tuple[str, ...], counted: str) -> CountedRule:
    """Read a rule such as `skip`, or with a count where one is allowed: `buffer_all(10)`."""
    match = _RULE.fullmatch(text)
    if match is None or match[1] not in words or (match[2] and match[1] != counted):
        raise InvalidInput(f"{field} is {text!r}; use {', '.join(words)} or {counted}(<maximum>)")
    most = int(match[2]) if match[2] else _KEPT_BY_DEFAULT
    if not 1 <= most <= MOST_KEPT:
        raise InvalidInput(f"{field} is {text!r}; the number must lie between 1 and {MOST_KEPT}")
    return CountedRule(match[1], most)


class SchedulePause(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A pause of a schedule. `drop` skips the runs planned meanwhile; with `hold` the misfire rule decides."""

    at_ms: int
    mode: PauseMode = "drop"
    until_ms: int | None = None
    reason: str = ""
    by: str = ""
    due_ms: int | None = None
    """The first planned time in the pause, if that is earlier: it was due, and had not begun."""

    @property
    def first_ms(self) -> int:
        """The first planned time that falls into the pause is at or after this."""
        return self.at_ms + 1 if self.due_ms is None else self.due_ms


class Definition(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Everything a person decided about a schedule. All instants are epoch milliseconds."""

    name: str
    specs: tuple[str, ...]
    """Cron lines, aliases, `@every 30s`, `@after-end 30s`; the schedule runs when any of them matches."""
    target: str
    payload: bytes = b"null"
    raw: bool = False
    """The payload is the caller's bytes; otherwise it is JSON."""
    zone: str = "UTC"
    exclude: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    max_runs: int | None = None
    gap: str = "shift"
    dst_overlap: str = "first"
    lane: str | None = None
    retry: str | None = None
    timeout_ms: int | None = None
    misfire: str = "coalesce"
    grace_ms: int = 60_000
    overlap: str = "skip"
    jitter_ms: int = 0
    spread_ms: int = 0
    anchor_ms: int | None = None
    """Start of intervals if there is no `start_ms`: when the schedule was first added."""
    paused: SchedulePause | None = None
    note: str = ""
    source: str = ""
    """The manager of the schedule: a file that is applied repeatedly may remove only its own schedules."""
    declared: str = ""
    """Digest of the definition that a program declared when it wrote the schedule; edits do not change it."""
    pinned: bool = False
    """Programs that declare the schedule leave it as it is."""
    generation: int = 1
    by: str = ""
    at_ms: int = 0
    """When this revision was written."""
    tz_version: str = ""

    @property
    def times(self) -> tuple[str, ...]:
        """When it runs, for people: the specs, or its one time if start and end are the same."""
        if self.start_ms is None or self.start_ms != self.end_ms:
            return self.specs
        return (f"once at {instant_text(self.start_ms)}",)

    @property
    def overlap_rule(self) -> CountedRule:
        """The overlap rule, read."""
        return read_rule(self.overlap, "overlap", get_args(OverlapRule), "buffer_all")

    @property
    def misfire_rule(self) -> CountedRule:
        """The misfire rule, read."""
        return read_rule(self.misfire, "misfire", get_args(MisfireRule), "all")

    @property
    def slots(self) -> PlannedTimes:
        """Its planned times."""
        return slots_of(self)

    def paused_at(self, now_ms: int) -> bool:
        """Whether a pause is in force at this time."""
        pause = self.paused
        return pause is not None and (pause.until_ms is None or now_ms < pause.until_ms)

    def due_ms(self, planned_ms: int) -> int:
        """Return when a planned run starts: at its time, or a little later if starts are spread."""
        due_ms = planned_ms
        if self.jitter_ms:
            due_ms += jitter_ms(self.name, planned_ms, self.jitter_ms)
        if self.spread_ms:
            due_ms += spread_ms(self.name, self.spread_ms)
        if self.paused is not None and self.paused.until_ms is not None:
            return max(due_ms, self.paused.until_ms)
        return due_ms

    def next_runs(self, after_ms: int, count: int = 3, *, runs: int = 0) -> list[int]:
        """Return the next planned times, as far as they are known."""
        found: list[int] = []
        at_ms: int | None = after_ms
        while len(found) < count and (self.max_runs is None or runs + len(found) < self.max_runs):
            at_ms = self.slots.after(at_ms) if at_ms is not None else None
            if at_ms is None:
                break
            found.append(at_ms)
        return found


def check_definition(definition: Definition, now_ms: int) -> Definition:
    """Refuse a definition that could not work, with the reason."""
    check_schedule_name(definition.name)
    check_target(definition.target)
    if definition.lane is not None:
        check_name(definition.lane, "lane")
    check_specs(definition)
    _ = definition.overlap_rule, definition.misfire_rule
    for field in ("jitter_ms", "spread_ms", "grace_ms"):
        value = getattr(definition, field)
        if not 0 <= value <= HORIZON_MS:
            raise InvalidInput(f"{field} is {value}; it must lie between 0 and ten years")
    if definition.max_runs is not None and not 1 <= definition.max_runs <= MOST_RUNS:
        raise InvalidInput(f"max_runs is {definition.max_runs}; leave it out, or give 1 to {MOST_RUNS}")
    if definition.timeout_ms is not None and definition.timeout_ms < 1:
        raise InvalidInput(f"timeout is {definition.timeout_ms} ms; it must be at least 1")
    first_ms = definition.slots.after(now_ms)
    if first_ms is None:
        runs = msgspec.structs.replace(definition, exclude=()).slots.after(now_ms) is not None
        why = "its exclusions leave none of its runs" if runs else "its end has passed"
        raise InvalidInput(f"schedule {definition.name!r} would never run from now on: {why}")
    if first_ms > now_ms + HORIZON_MS:
        raise InvalidInput(f"schedule {definition.name!r} would run only in more than ten years")
    _check_worst_case(definition, now_ms)
    return definition


def check_specs(definition: Definition) -> None:
    if not 1 <= len(definition.specs) <= MOST_SPECS:
        raise InvalidInput(f"schedule {definition.name!r}: give 1 to {MOST_SPECS} specs, such as '0 9 * * MON-FRI'")


def check_runs_left(definition: Definition, runs: int) -> Definition:
    """Refuse a schedule that would be finished as soon as it is written; `runs` is the number of runs so far."""
    if _ran_out(definition, runs):
        raise InvalidInput(
            f"schedule {definition.name!r} would never run again: it has run {runs} times, and max_runs is"
            f" {definition.max_runs}; give a larger max_runs or none, or remove it and add it again"
        )
    return definition


def _ran_out(definition: Definition, runs: int) -> bool:
    return definition.max_runs is not None and runs >= definition.max_runs


def _check_worst_case(definition: Definition, now_ms: int) -> None:
    """Refuse a run that with all its retries may last longer than the interval, unless runs may overlap or wait.

    Only the schedule's own fields count, so that the result is the same wherever it is written. `node/schedule_lint.py`
    reports the effect of settings.
    """
    if definition.retry is None or definition.overlap != "skip" or definition.slots.recurrence.waits_for_end:
        return
    interval_ms = shortest_interval_ms(definition, now_ms)
    if interval_ms is not None:
        check_against(RetryPolicy.parse(definition.retry), interval_ms, _attempt_ms(definition))


def _attempt_ms(definition: Definition) -> int:
    """Return how long one attempt may take: the default timeout for a webhook without one, 0 if unknown."""
    usual_ms = round(TIMEOUT_S * 1000) if is_web(definition.target) else 0
    return definition.timeout_ms or usual_ms


def shortest_interval_ms(definition: Definition, now_ms: int) -> int | None:
    """Return the shortest interval between the next runs; None if there are fewer than two."""
    runs = definition.next_runs(now_ms, _SAMPLE)
    return min((later - earlier for earlier, later in pairwise(runs)), default=None)


def is_over(definition: Definition, now_ms: int, runs: int = 0) -> bool:
    """Return whether no run is left, because its end has passed or all runs were made. This is not an error."""
    return (definition.end_ms is not None and definition.end_ms <= now_ms) or _ran_out(definition, runs)


BOOKKEEPING: Final = frozenset({"generation", "by", "at_ms", "tz_version", "note", "source", "anchor_ms", "declared"})
"""Fields whose change does not make another schedule."""


PEOPLES: Final = frozenset({"paused", "pinned"})
"""What people set on a schedule in the store, beside what it says: a new definition leaves it alone."""


def same_schedule(one: Definition, other: Definition) -> bool:
    """Return whether two definitions run the same at the same times."""
    return not changes(one, other)


def changes(old: Definition, new: Definition) -> dict[str, tuple[Any, Any]]:
    """Return the changes of an edit: field -> (before, after)."""
    return {
        field: (getattr(old, field), getattr(new, field))
        for field in Definition.__struct_fields__
        if field not in BOOKKEEPING and getattr(old, field) != getattr(new, field)
    }


def digest_of(definition: Definition) -> str:
    """Return a digest that is equal for definitions that run the same at the same times, paused, pinned or not."""
    values = [getattr(definition, field) for field in _MEANT]
    return blake2b(_encode(values), digest_size=8).hexdigest()


_MEANT: Final = tuple(sorted(set(Definition.__struct_fields__) - BOOKKEEPING - PEOPLES))
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Definition).decode


def pack_definition(definition: Definition) -> bytes:
    """Return the generation in four bytes, which scripts compare, followed by the definition."""
    return definition.generation.to_bytes(4, "big") + _encode(definition)


def unpack_definition(raw: bytes) -> Definition:
    return _decode(raw[4:])
