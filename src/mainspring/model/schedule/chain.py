"""The chain of a schedule: one planned occurrence at a time, and how the chain advances. Pure: the time is passed in.

The step that begins an occurrence also puts the following one. This module decides what that step writes."""

from struct import Struct
from typing import Final

import msgspec
from msgspec.structs import replace

from ..ids import IDH_BYTES, idh_of, occurrence_id
from .definition import Definition, SchedulePause
from .zone import tz_version

NOT_RUN_KEPT: Final = 10
RUNS_KEPT: Final = 5
CUTS_KEPT: Final = 100
_HEAD: Final = Struct(f">IQ{IDH_BYTES}s")
_CLAIM: Final = Struct(">IQ")
NOBODY: Final = bytes(IDH_BYTES)


class NotRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive planned times that did not run, and why: missed, overlap, paused, cancelled, lost."""

    from_ms: int
    to_ms: int
    count: int
    reason: str
    runs: int = 0
    """Number of runs before. Times skipped for the same reason without a run in between join this entry."""


class PastRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished run."""

    planned_ms: int
    began_ms: int
    ended_ms: int | None
    outcome: str


class ChainMemory(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, rename={
    "last": "l", "last_ms": "p", "began_ms": "b", "runs": "n", "not_run": "m", "recent": "r", "history": "h",
    "cuts": "c", "rested_ms": "e", "behind_ms": "u",
}):  # fmt: skip
    """The history that a chain stores about itself."""

    last: bytes = b""
    """Hash of the id of the last run; empty if there was none."""
    last_ms: int = 0
    began_ms: int = 0
    runs: int = 0
    not_run: dict[str, int] = {}
    recent: tuple[NotRun, ...] = ()
    history: tuple[PastRun, ...] = ()
    cuts: tuple[tuple[int, int], ...] = ()
    """(after, until] ranges of planned times that are already counted and are skipped in their turn: they exceeded the
    buffer, or were cancelled early."""
    rested_ms: int = 0
    """End of the last pause that ended by itself and whose planned times are counted."""
    behind_ms: int = 0
    """Planned times up to here came due before the previous run began, which was held up: they wait for their turn
    whatever the overlap rule, because nothing ran when they came due."""

    @property
    def last_is_over(self) -> bool:
        return not self.last or (bool(self.history) and self.history[-1].planned_ms == self.last_ms)

    def is_behind(self, planned_ms: int) -> bool:
        return planned_ms <= self.behind_ms

    def with_run(self, run: PastRun) -> "ChainMemory":
        """Note how the last run ended; repeating it changes nothing."""
        if self.history and self.history[-1].planned_ms >= run.planned_ms:
            return self
        return replace(self, history=(*self.history, run)[-RUNS_KEPT:])

    def called_off(self, planned_ms: int, reason: str) -> "ChainMemory":
        """Note a planned time that does not run, and that no edit or pause brings back."""
        state = self.without(NotRun(planned_ms, planned_ms, 1, reason))
        return replace(state, cuts=(*state.cuts, (planned_ms - 1, planned_ms))[-CUTS_KEPT:])

    def passing_by(self, after_ms: int, until_ms: int) -> "ChainMemory":
        """Skip planned times that a backfill has put, without counting them as not run."""
        kept = (cut for cut in self.cuts if not after_ms <= cut[0] <= cut[1] <= until_ms)
        return replace(self, cuts=(*kept, (after_ms, until_ms))[-CUTS_KEPT:])

    def cut_over(self, planned_ms: int) -> tuple[int, int] | None:
        return next((cut for cut in self.cuts if cut[0] < planned_ms <= cut[1]), None)

    def with_cuts_from(self, from_ms: int) -> "ChainMemory":
        """Drop cuts that end before this time: no planned time can fall into them any more."""
        if not self.cuts:
            return self  # nearly always
        kept = tuple(cut for cut in self.cuts if cut[1] >= from_ms)
        return self if len(kept) == len(self.cuts) else replace(self, cuts=kept)

    def not_run_since(self, before: "ChainMemory") -> list[NotRun]:
        """Return the planned times that were noted as not run since an earlier state, without counts noted before."""
        if self.recent is before.recent:
            return []
        known = {(slot.from_ms, slot.reason, slot.runs): slot.count for slot in before.recent}
        fresh = []
        for slot in self.recent:
            count = slot.count - known.get((slot.from_ms, slot.reason, slot.runs), 0)
            if count > 0:
                fresh.append(replace(slot, count=count))
        return fresh

    def without(self, slot: NotRun) -> "ChainMemory":
        """Note planned times that do not run."""
        if slot.count < 1:
            return self
        counts = {**self.not_run, slot.reason: self.not_run.get(slot.reason, 0) + slot.count}
        recent = list(self.recent)
        if recent and recent[-1].reason == slot.reason and recent[-1].runs == self.runs:
            before = recent.pop()
            slot = NotRun(before.from_ms, slot.to_ms, before.count + slot.count, slot.reason)
        recent.append(replace(slot, runs=self.runs))
        return replace(self, not_run=counts, recent=tuple(recent[-NOT_RUN_KEPT:]))


class ChainState(msgspec.Struct, frozen=True, gc=False):
    """State of a chain: its planned occurrence (`planned_ms` 0: none), and its memory."""

    generation: int
    planned_ms: int
    idh: bytes
    state: ChainMemory

    @property
    def claim(self) -> bytes:
        """The 12 bytes by which scripts check that the chain is unchanged before an occurrence advances it."""
        return _CLAIM.pack(self.generation, self.planned_ms)

    def pack(self) -> bytes:
        return _HEAD.pack(self.generation, self.planned_ms, self.idh) + _encode(self.state)

    @classmethod
    def unpack(cls, raw: bytes) -> "ChainState":
        generation, planned_ms, idh = _HEAD.unpack(raw[: _HEAD.size])
        return cls(generation, planned_ms, idh, _decode(raw[_HEAD.size :]))


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(ChainMemory).decode


def link_to(definition: Definition, planned_ms: int | None, state: ChainMemory) -> ChainState:
    """Return the chain with this occurrence planned; None plans no further one."""
    if planned_ms is None:
        return ChainState(definition.generation, 0, NOBODY, state)
    return ChainState(definition.generation, planned_ms, idh_of(occurrence_id(definition.name, planned_ms)), state)


HELD_UP_MS: Final = 1000
"""How late a run begins that was held up: then those due before it have their turn. The milliseconds of any begin hold
up nothing: with an interval of 1 ms, each would be a run that keeps the next one waiting."""


# -- advancing the chain --------------------------------------------------------------------------------------------


def after_begin(
    definition: Definition, link: ChainState, now_ms: int, *, waited: bool = False
) -> tuple[int | None, ChainMemory]:
    """Return the next planned time after this begins. `waited`: it waited until the previous run was over."""
    state = _after_rest(definition, link)
    state = replace(state, last=link.idh, last_ms=link.planned_ms, began_ms=now_ms, runs=state.runs + 1)
    state = state.with_cuts_from(link.planned_ms)
    next_ms = _uncut(definition, state, link.planned_ms)
    if waited and next_ms is not None and next_ms <= now_ms:
        next_ms, state = _after_wait(definition, state, next_ms, now_ms)
    elif not state.is_behind(link.planned_ms):  # once: later times may find a run in progress
        is_late = (
            now_ms >= definition.due_ms(link.planned_ms) + HELD_UP_MS
            and next_ms is not None
            and next_ms <= now_ms
            and definition.due_ms(next_ms) <= now_ms
        )
        if is_late or state.behind_ms:
            state = replace(state, behind_ms=now_ms if is_late else 0)
    if definition.max_runs is not None and state.runs >= definition.max_runs:
        return None, state
    return next_ms, _left_out(definition, state, link.planned_ms, next_ms)


def _left_out(definition: Definition, state: ChainMemory, after_ms: int, next_ms: int | None) -> ChainMemory:
    """Note the planned times that were excluded between two that were not."""
    if not definition.exclude or next_ms is None:
        return state
    slots = replace(definition, exclude=()).slots
    first_ms = slots.after(after_ms)
    if first_ms is None or first_ms >= next_ms:
        return state
    last_ms = slots.newest(first_ms, next_ms - 1) or first_ms
    count = slots.count(first_ms, last_ms) - definition.slots.count(first_ms, last_ms)
    return state.without(NotRun(first_ms, last_ms, count, "excluded"))


def _uncut(definition: Definition, state: ChainMemory, after_ms: int) -> int | None:
    """Return the first planned time that is not cut."""
    next_ms = definition.slots.after(after_ms)
    while state.cuts and next_ms is not None and (cut := state.cut_over(next_ms)) is not None:
        next_ms = definition.slots.after(cut[1])
    return next_ms


def _count(definition: Definition, state: ChainMemory, from_ms: int, to_ms: int) -> int:
    """Return the number of planned times in [from_ms, to_ms] that are not counted yet."""
    count = definition.slots.count(from_ms, to_ms) if from_ms <= to_ms else 0
    for low_ms, high_ms in state.cuts:
        first_ms, last_ms = max(from_ms, low_ms + 1), min(to_ms, high_ms)
        count -= definition.slots.count(first_ms, last_ms) if first_ms <= last_ms else 0
    return max(0, count)


def _after_wait(
    definition: Definition, state: ChainMemory, next_ms: int, now_ms: int
) -> tuple[int | None, ChainMemory]:
    """Handle times that passed during the wait: as many as the rule allows wait in turn, the rest is skipped."""
    rule = definition.overlap_rule
    kept = rule.most - 1 if rule.word == "buffer_all" else 0
    last_ms, at_ms = None, _uncut(definition, state, next_ms - 1)
    while kept and at_ms is not None and at_ms <= now_ms:
        last_ms, at_ms, kept = at_ms, _uncut(definition, state, at_ms), kept - 1
    if at_ms is None or at_ms > now_ms:
        return next_ms, state
    left_out = NotRun(at_ms, now_ms, _count(definition, state, at_ms, now_ms), "overlap")
    state = state.without(left_out)
    if last_ms is None:
        return _uncut(definition, state, now_ms), state.with_cuts_from(now_ms + 1)
    cuts = tuple(cut for cut in state.cuts if cut[1] > next_ms)
    return next_ms, replace(state, cuts=(*cuts, (last_ms, now_ms)))


def overlapped_until(definition: Definition, link: ChainState) -> int | None:
    """Return when the previous run ended, if it was in progress when this came due and the rule is to skip."""
    state = link.state
    if definition.overlap_rule.word != "skip" or not state.history or not state.last_is_over:
        return None
    ended_ms = state.history[-1].ended_ms
    if ended_ms is None or definition.slots.one_by_one or state.is_behind(link.planned_ms):
        return None
    return ended_ms if definition.due_ms(link.planned_ms) < ended_ms else None


def after_overlap(definition: Definition, link: ChainState, until_ms: int) -> tuple[int | None, ChainMemory]:
    """Skip this occurrence and all others that came due by `until_ms`: the previous run lasted at least until then.

    Skipping one at a time, a schedule with very frequent times would fall behind.
    """
    state, planned_ms = _after_rest(definition, link), link.planned_ms
    next_ms = _uncut(definition, state, planned_ms)
    until_ms -= definition.jitter_ms + definition.spread_ms  # a time that may come due later is kept
    if next_ms is None or next_ms > until_ms or definition.slots.one_by_one:
        return next_ms, state.without(NotRun(planned_ms, planned_ms, 1, "overlap"))
    left_out = NotRun(planned_ms, until_ms, _count(definition, state, planned_ms, until_ms), "overlap")
    return _uncut(definition, state, until_ms), state.without(left_out)


def after_misfire(definition: Definition, link: ChainState, now_ms: int) -> tuple[int | None, ChainMemory] | None:
    """Return the plan to use instead if the occurrence was missed because no node ran; None to run it."""
    rule, planned_ms, state = definition.misfire_rule, link.planned_ms, link.state
    if definition.slots.one_by_one:
        if rule.word != "skip":
            return None  # no other time was planned
        missed = NotRun(planned_ms, planned_ms, 1, "missed")
        return _uncut(definition, state, now_ms), _after_rest(definition, link).without(missed)
    if rule.word == "skip":
        next_ms = _uncut(definition, state, max(planned_ms, now_ms - definition.grace_ms) - 1)
        if next_ms == planned_ms:
            return None  # not late
        until_ms = now_ms if next_ms is None else min(now_ms, next_ms - 1)
    else:
        next_ms = _kept_of_missed(definition, state, planned_ms, now_ms, 1 if rule.word == "coalesce" else rule.most)
        if next_ms is None or next_ms <= planned_ms:
            return None
        until_ms = next_ms - 1
    missed = NotRun(planned_ms, until_ms, max(1, _count(definition, state, planned_ms, until_ms)), "missed")
    return next_ms, _after_rest(definition, link).without(missed)


def _kept_of_missed(definition: Definition, state: ChainMemory, planned_ms: int, now_ms: int, kept: int) -> int | None:
    """Return the first of the newest `kept` missed times that is not cut."""
    if kept > 1:
        next_ms = definition.slots.last(kept, planned_ms, now_ms)
        return None if next_ms is None else _uncut(definition, state, next_ms - 1)
    next_ms = definition.slots.newest(planned_ms, now_ms)
    while next_ms is not None and (cut := state.cut_over(next_ms)) is not None:
        next_ms = definition.slots.newest(planned_ms, cut[0])
    return next_ms


def after_loss(definition: Definition, link: ChainState, now_ms: int, reason: str) -> tuple[int | None, ChainMemory]:
    """Continue a chain after a planned occurrence that is missing."""
    state = link.state if definition.paused_at(now_ms) else _after_rest(definition, link)
    state = state.called_off(link.planned_ms, reason)
    next_ms = _uncut(definition, state, link.planned_ms)
    # The cancelled one was waiting for the previous run: those behind it wait in its place.
    if reason == "cancelled" and next_ms is not None and not state.last_is_over and definition.overlap != "allow":
        return next_ms, state
    return from_here(definition, link.planned_ms, now_ms, state)


def _after_rest(definition: Definition, link: ChainState) -> ChainMemory:
    """Count, once, the runs that fell into a pause that ended before this occurrence."""
    pause, state = definition.paused, link.state
    if pause is None or pause.until_ms is None or pause.until_ms <= state.rested_ms:
        return state
    from_ms, to_ms = max(pause.first_ms, state.last_ms + 1), min(pause.until_ms, link.planned_ms) - 1
    count = _count(definition, state, from_ms, to_ms)
    state = state.without(NotRun(from_ms, to_ms, count, "paused" if pause.mode == "drop" else "missed"))
    return replace(state, rested_ms=pause.until_ms)


def from_here(definition: Definition, after_ms: int, now_ms: int, state: ChainMemory) -> tuple[int | None, ChainMemory]:
    """Resume a schedule that was stopped; apply the misfire policy to the occurrences in between."""
    next_ms = _uncut(definition, state, after_ms)
    if next_ms is None or next_ms > now_ms:
        return next_ms, state
    link = link_to(definition, next_ms, state)
    return after_misfire(definition, link, now_ms) or (next_ms, state)


def moved_by_rules(definition: Definition, link: ChainState) -> tuple[int | None, ChainMemory] | None:
    """Return the plan to use instead if the zone's rules have changed since this was planned; None to run it.

    Run at its old time, it would run again at the new one if that is later. If the new time has passed, it runs now."""
    slots, state, planned_ms = definition.slots, link.state, link.planned_ms
    if definition.tz_version == tz_version() or definition.zone == "UTC" or slots.recurrence.waits_for_end:
        return None
    if slots.after(planned_ms - 1) == planned_ms:
        return None
    settled_ms = max(state.last_ms, state.recent[-1].to_ms if state.recent else 0, definition.at_ms)
    if slots.newest(settled_ms + 1, planned_ms - 1) is not None:
        return None
    return _uncut(definition, state, planned_ms), state


def moved_by_end(definition: Definition, link: ChainState) -> int | None:
    """Return the later time of this occurrence if its delay counts from a last run that ended later."""
    state = link.state
    recurrence = definition.slots.recurrence
    if not recurrence.waits_for_end or not state.last_is_over or not state.history:
        return None
    ended_ms = state.history[-1].ended_ms
    if ended_ms is None:
        return None
    true_ms = recurrence.next_after(state.last_ms, ended_ms=ended_ms)
    return true_ms if true_ms is not None and true_ms > link.planned_ms else None


def first_of(
    definition: Definition, old: Definition | None, link: ChainState | None, now_ms: int
) -> tuple[int | None, ChainMemory]:
    """Return the first occurrence of a new generation, and the memory it takes over from the previous one."""
    state = ChainMemory() if link is None else link.state
    if old is not None and link is not None and link.planned_ms and not old.paused_at(now_ms):
        state = _after_rest(old, link)
    same_times = old is not None and old.slots is definition.slots
    state = state.with_cuts_from(_not_behind(old, link, now_ms)) if same_times else replace(state, cuts=())
    if definition.max_runs is not None and state.runs >= definition.max_runs:
        return None, state
    if definition.paused is not None and definition.paused_at(now_ms):
        return _first_after_pause(definition, definition.paused, state), state
    if old is not None and old.paused is not None and definition.paused is None and old.paused_at(now_ms):
        return _resumed(definition, old.paused, now_ms, state)
    if old is not None and link is not None and 0 < link.planned_ms <= now_ms:  # overdue: no node was running
        if same_times:
            return from_here(definition, link.planned_ms - 1, now_ms, state)
        missed = _count(old, link.state, link.planned_ms, now_ms)
        state = state.without(NotRun(link.planned_ms, now_ms, missed, "missed"))
    if definition.slots.recurrence.waits_for_end and link is not None:
        return _still_counting(definition, link if same_times else None, state, now_ms), state
    return _uncut(definition, state, now_ms), state


def _still_counting(definition: Definition, link: ChainState | None, state: ChainMemory, now_ms: int) -> int | None:
    """Keep counting a delay across an edit. `link` is the chain if its times are still the same."""
    if link is not None and link.planned_ms > now_ms:
        is_cut = state.cut_over(link.planned_ms) is not None
        return _uncut(definition, state, link.planned_ms) if is_cut else link.planned_ms
    ended_ms = state.history[-1].ended_ms if state.history and state.last_is_over else None
    return definition.slots.recurrence.next_after(now_ms, ended_ms=ended_ms)


def _not_behind(old: Definition | None, link: ChainState | None, now_ms: int) -> int:
    """Return the time from which planned times may still be counted or planned."""
    places_ms = [now_ms + 1]
    if link is not None and link.planned_ms:
        places_ms.append(link.planned_ms)
    if old is not None and old.paused is not None:
        places_ms.append(old.paused.first_ms)
    return min(places_ms)


def _first_after_pause(definition: Definition, pause: SchedulePause, state: ChainMemory) -> int | None:
    """Return the first planned time after a pause; the misfire rule decides which held-back times run at its end."""
    if pause.until_ms is None:
        return None
    if pause.mode == "hold":
        return from_here(definition, pause.first_ms - 1, pause.until_ms, ChainMemory(cuts=state.cuts))[0]
    return _uncut(definition, state, pause.until_ms - 1)


def _resumed(
    definition: Definition, pause: SchedulePause, now_ms: int, state: ChainMemory
) -> tuple[int | None, ChainMemory]:
    until_ms = now_ms if pause.until_ms is None else min(now_ms, pause.until_ms)
    if pause.mode == "hold":
        return from_here(definition, pause.first_ms - 1, now_ms, state)
    rested = NotRun(pause.first_ms, until_ms, _count(definition, state, pause.first_ms, until_ms), "paused")
    return _uncut(definition, state, now_ms), state.without(rested)
