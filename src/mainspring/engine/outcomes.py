"""Outcomes of deliveries: retries, dead letters and what commit writes, counted for `/metrics`."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from ..model.clock import Clock
from ..model.dead_letter import DeadLetter
from ..model.delivery import (
    DONE,
    DROPPED,
    UNREADABLE,
    Body,
    Dead,
    Failure,
    Fate,
    Outcome,
    Response,
    Retry,
    has_expired,
    was_sent,
)
from ..model.ids import idh_of
from ..model.lane import LanePolicies, LanePolicy
from ..model.limits import MAX_ERROR_CHARS, MAX_ERRORS_KEPT
from ..model.metrics import SECONDS, Histogram
from ..model.retry import Policies, in_time_ms
from ..model.run import (
    DELIVERED,
    HistoryRules,
    Run,
    RunDetails,
    RunRecord,
    Verdict,
    error_of,
    judge,
    parked,
    passed_run,
)
from ..model.schedule.chain import NotRun
from ..model.schedule.definition import Definition
from ..model.targets.names import HANDED_OFF
from ..model.text import trace_of
from ..roles import Failures
from ..store.codec import INDEXED, LANE, SCHEDULED, entry
from ..store.keys import SECOND_MS, Slice
from ..store.owner.fire import Death, NewPlace
from ..store.owner.holds import FailedHead
from .due import Damaged
from .flight import Flight, FlightGroup
from .holds import row_of
from .partition import LaneHold, Partition, Settled
from .slice import LiveSlice

TO_WORKERS: Final = tuple(f"{scheme}:" for scheme in sorted(HANDED_OFF))
"""Beginnings of targets whose tasks workers run."""
_KEY: Final = attrgetter("key")
_ROW: Final = attrgetter("row")
_BOUNDS_MS: Final = tuple(int(seconds * 1000) for seconds in SECONDS)
"""Lateness is a whole number of milliseconds, so a bound of 2.5 ms equals one of 2."""


class Meters:
    """Counts by kind of target: the word before the colon."""

    def __init__(self) -> None:
        self.fired: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()
        self.dead: Counter[str] = Counter()
        self.expired: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        """Tasks that were no longer wanted and not delivered, by reason."""
        self.lateness: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds from due to begin."""
        self.delivery: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds from begin to done, per task."""
        self.sink: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds per call of a sink, which may carry thousands of tasks."""

    def expect(self, kinds: Collection[str]) -> None:
        """Report 0 for rare events: a counter that first appears as 1 shows no increase and raises no alert."""
        for counts in (self.dead, self.expired):
            counts.update(dict.fromkeys(kinds, 0))

    def settled(self, kind: str, took_s: float, done: int) -> None:
        """Record that one call of a sink is over."""
        took_s = max(0.0, took_s)
        self.sink[kind].observe(took_s)
        if done:
            self.delivery[kind].observe(took_s, done)
            self.delivered[kind] += done

    def buried(self, kind: str, reason: str) -> None:
        """Record that a task is over without having been delivered."""
        if has_expired(reason):
            self.expired[kind] += 1
        elif reason.startswith(DROPPED):
            self.skipped["paused"] += 1
        else:
            self.dead[kind] += 1

    def began_late(self, kind: str, live: LiveSlice, flights: Sequence[Flight], began_ms: int) -> None:
        """Record the lateness of tasks of one slice, in the order in which they left it."""
        histogram = self.lateness[kind]
        since_ms = began_ms - live.from_ms
        if len(flights) > 1 and live.slice.end_ms <= began_ms:
            # A slice that was overdue as a whole may have left in any order: the bounds of its time bound the lateness.
            if bisect_left(_BOUNDS_MS, since_ms) == bisect_left(_BOUNDS_MS, since_ms - live.slice.width_ms):
                _add(histogram, flights[0], flights[-1], len(flights), since_ms)
                return
            _add_unsorted(histogram, flights, since_ms, live.slice.width_ms)
            return
        if live.has_lanes or live.has_schedules:
            flights = sorted(flights, key=_KEY)  # tasks of lanes leave when it is their turn
        _add_run(histogram, flights, since_ms)


def _add_unsorted(histogram: Histogram, flights: Sequence[Flight], since_ms: int, width_ms: int) -> None:
    """Count, for each bound, the flights that are later; any order. Sorting them would cost more.

    An entry begins with its offset, so rows compare with the bytes of an offset as their offsets do.
    """
    rows = list(map(_ROW, flights))
    counted, since_offset = 0, 0
    for bound_ms in reversed(_BOUNDS_MS):
        offset = since_ms - bound_ms
        if 0 < offset < width_ms:
            later = sum(map(offset.to_bytes(4, "big").__gt__, rows))
            _observe(histogram, since_ms - (since_offset + offset - 1) / 2, later - counted)
            counted, since_offset = later, offset
    _observe(histogram, since_ms - (since_offset + width_ms - 1) / 2, len(rows) - counted)


def _add_run(histogram: Histogram, flights: Sequence[Flight], since_ms: int) -> None:
    """Count, for each bound, the flights that are later; their offsets rise, so their lateness falls."""
    start = 0
    latest = bisect_left(_BOUNDS_MS, since_ms - _offset(flights[0]))
    soonest = bisect_left(_BOUNDS_MS, since_ms - _offset(flights[-1]))
    for at in range(latest - 1, soonest - 1, -1):
        # Later than the bound means due before (since - bound), more than the first flight's offset: never negative.
        stop = bisect_left(flights, (since_ms - _BOUNDS_MS[at]).to_bytes(4, "big"), start, key=_ROW)
        if stop > start:
            _add(histogram, flights[start], flights[stop - 1], stop - start, since_ms)
        start = stop
    if start < len(flights):
        _add(histogram, flights[start], flights[-1], len(flights) - start, since_ms)


def _add(histogram: Histogram, first: Flight, last: Flight, count: int, since_ms: int) -> None:
    """Add `count` flights of one bucket; their sum is estimated from the first and the last."""
    _observe(histogram, since_ms - (_offset(first) + _offset(last)) / 2, count)


def _offset(flight: Flight) -> int:
    return int.from_bytes(flight.row[:4], "big")


def _observe(histogram: Histogram, late_ms: float, count: int) -> None:
    if count:
        histogram.observe(max(0.0, late_ms) / 1000, count)


def _failed_once_more(flight: Flight, reason: str) -> Body:
    errors = (*flight.body.errors, reason)[-MAX_ERRORS_KEPT:]
    return replace(flight.body, attempt=flight.body.attempt + 1, errors=errors)


def _leaving(flight: Flight, place: Slice, row: bytes) -> NewPlace:
    return NewPlace(flight.idh, place, row, flight.address, flight.live.name, flight.mark)


def _kind(flight: Flight) -> str:
    return flight.body.target.partition(":")[0]


class Outcomes:
    """Turns outcomes into retries and dead letters by the retry policies."""

    def __init__(
        self,
        policies: Policies,
        clock: Clock,
        failures: Failures,
        lanes: LanePolicies | None = None,
        history: HistoryRules | None = None,
        node: str = "",
    ) -> None:
        self._policies = policies
        self._history = history or HistoryRules()
        self._node = node
        self._clock = clock
        self._failures = failures
        self._lanes = lanes or LanePolicies(LanePolicy())
        self.meters = Meters()

    # -- history ----------------------------------------------------------------------------------------

    def keeps_successes(self, target: str) -> bool:
        """Return whether the history keeps deliveries to this target that succeeded."""
        return self._history.rule(target) == "all"

    def runs(self, flight: Flight, verdict: Verdict, said: Outcome, began_ms: int) -> tuple[Run, ...]:
        """Return what the history keeps of an attempt."""
        response, trace = said.response, trace_of(error_of(said))
        began_ms = 0 if verdict.end in ("expired", "dropped") else began_ms
        answer_bytes = 0 if response is None else len(response.body)
        record = RunRecord.of(
            flight, verdict, said, began_ms, self._clock.now_ms(), self._node, answer_bytes=answer_bytes
        )
        details = RunDetails(response, traceback=trace) if response is not None or trace else None
        return (Run(record, details),) if self._history.keeps(record) else ()

    def lost(self, group: FlightGroup) -> tuple[Run, ...]:
        """Return what the history keeps of a former owner's attempts. Flights for workers ran nowhere yet."""
        now_ms = self._clock.now_ms()
        return self._kept(
            RunRecord.of(flight, DELIVERED, DONE, 0, now_ms, "").as_lost()
            for flight in group.flights
            if group.live.to_redo(flight.index) and not flight.body.target.startswith(TO_WORKERS)
        )

    def _kept(self, records: Iterable[RunRecord]) -> tuple[Run, ...]:
        return tuple(Run(one) for one in records if self._history.keeps(one))

    def passed(self, definition: Definition, slot: NotRun) -> tuple[Run, ...]:
        """Return what the history keeps of planned times that did not run."""
        return self._kept([passed_run(definition, slot, self._clock.now_ms(), self._node)])

    # -- verdicts ---------------------------------------------------------------------------------------

    def failed(self, partition: Partition, flight: Flight, said: Retry | Dead, began_ms: int) -> Settled:
        """Return what commit has to write for a failed delivery, by the retry policy."""
        now_ms = self._clock.now_ms()
        lane = None if flight.body.lane is None else self._lanes.of(flight.body.target)
        policy, since_ms = self._policies.of(flight.body), self._since_ms(partition, flight, now_ms)
        verdict = judge(said, flight.body, flight.original_due_ms, now_ms, policy, lane, since_ms)
        if verdict.counted:
            self._report(flight, verdict, said, now_ms)
        settled = self._carry_out(partition, flight, verdict, trace_of(said.error), said.response)
        return settled._replace(runs=self.runs(flight, verdict, said, began_ms)) if verdict.counted else settled

    def ended_by_worker(self, partition: Partition, flight: Flight, verdict: Verdict, traceback: str) -> Settled:
        """Return what commit has to write for a task of a lane that a worker has ended, and reported."""
        if verdict.end in ("done", "cancelled"):  # the mark of a cancelled task is already set, and counted
            return Settled(flight.live, flight.index, delivered=verdict.end == "done")
        if flight.body.lane is not None:
            now_ms, lane = self._clock.now_ms(), self._lanes.of(flight.body.target)
            judged = parked(verdict, verdict.reason, lane, now_ms, self._since_ms(partition, flight, now_ms))
            if judged.end == "parked" and lane.on_failure == "block":
                # The worker reported a retry: only the owner knows that the lane has been blocked for too long.
                self._report(flight, judged, Retry(judged.reason, brief="its run on a worker failed"), now_ms)
            verdict = judged
        return self._carry_out(partition, flight, verdict, traceback)

    def _since_ms(self, partition: Partition, flight: Flight, now_ms: int) -> int:
        """Return when the head of a lane first failed: untried postponements before that do not count."""
        lane = flight.body.lane
        return now_ms if lane is None or flight.attempt == 1 else partition.lanes.since.get(lane, 0) or now_ms

    def _carry_out(
        self, partition: Partition, flight: Flight, verdict: Verdict, traceback: str, response: Response | None = None
    ) -> Settled:
        match verdict.end:
            case "retry" if not verdict.counted:
                return self._place_again(partition, flight, verdict.wait_ms, flight.body)
            case "retry":
                return self._retry_later(partition, flight, verdict.wait_ms, verdict.reason)
            case "parked":
                return self._park(partition, flight, verdict.reason)
            case _:
                return self._bury(flight, verdict.reason, response, traceback)

    def _park(self, partition: Partition, flight: Flight, reason: str) -> Settled:
        """Move the head first into the lane's hold slice, where it waits with the others."""
        lane, now_ms = flight.body.lane, self._clock.now_ms()
        assert lane is not None
        self.meters.retried[_kind(flight)] += 1
        body = _failed_once_more(flight, reason)
        hold = partition.hold_policy.park(lane, reason, now_ms)
        body = replace(body, due_ms=flight.due_ms, original_due_ms=flight.original_due_ms)
        row = row_of(hold.place, flight, body)
        held = self._hold_lane(partition, lane, flight.idh, now_ms, parked=True)
        retry = _leaving(flight, hold.place, row)
        return Settled(flight.live, flight.index, is_over=False, retry=retry, hold=held)

    def _report(self, flight: Flight, verdict: Verdict, said: Retry | Dead, now_ms: int) -> None:
        fates: dict[str, Fate] = {"retry": "retry", "parked": "parked"}
        failure = Failure(
            id=flight.id,
            target=flight.target,
            attempt=flight.attempt,
            error=verdict.reason,
            brief=said.brief or "",
            outcome=fates.get(verdict.end, "dead"),
            next_at_ms=now_ms + verdict.wait_ms if verdict.end == "retry" else None,
            lane=flight.lane,
            original_due_ms=flight.original_due_ms,
            idempotency_key=flight.idempotency_key,
            response=said.response,
            exception=said.error,
        )
        self._failures.report(failure)

    def _retry_later(self, partition: Partition, flight: Flight, wait_ms: int, reason: str) -> Settled:
        """Place a retry. Its lane may continue meanwhile."""
        self.meters.retried[_kind(flight)] += 1
        if flight.attempt == 1 and flight.body.lane is not None:
            partition.lanes.since.pop(flight.body.lane, None)
        skips = flight.body.lane is not None and self._lanes.of(flight.body.target).on_failure == "skip"
        return self._place_again(partition, flight, wait_ms, _failed_once_more(flight, reason), skips=skips)

    def _place_again(
        self, partition: Partition, flight: Flight, wait_ms: int, body: Body, *, skips: bool = False
    ) -> Settled:
        now_ms = self._clock.now_ms()
        due_ms = now_ms + in_time_ms(wait_ms, body.expires_ms, now_ms)
        place = Slice.at(due_ms, SECOND_MS)
        body = replace(body, due_ms=None, original_due_ms=flight.original_due_ms)
        # Flag the retry of a schedule's run too: the run ends when its last attempt does.
        flags = INDEXED | (LANE if body.lane is not None else 0) | (flight.row[4] & SCHEDULED)
        row = entry(due_ms - place.start_ms, flags, flight.idh, body)
        held = None
        if body.lane is not None and not skips:
            held = self._hold_lane(partition, body.lane, flight.idh, due_ms)
        retry = _leaving(flight, place, row)
        return Settled(flight.live, flight.index, is_over=skips, retry=retry, hold=held)

    def _hold_lane(
        self, partition: Partition, lane: str, idh: bytes, until_ms: int, *, parked: bool = False
    ) -> LaneHold:
        """Make the lane wait for this task. Recorded on the server too, for a new owner."""
        now_ms = self._clock.now_ms()
        partition.hold_policy.head_stands(lane, inside=parked)
        head = FailedHead(idh, partition.lanes.since.get(lane, 0) or now_ms)
        partition.lanes.hold(lane, idh, since_ms=head.since_ms, until_ms=until_ms)
        partition.hold_policy.spill_lanes(now_ms)
        return lane, head.pack()

    def _bury(self, flight: Flight, reason: str, response: Response | None = None, traceback: str = "") -> Settled:
        now_ms = self._clock.now_ms()
        body, due_ms = flight.body, flight.original_due_ms
        sent = was_sent(reason)
        letter = DeadLetter.of(body, flight.id, reason, now_ms, due_ms, flight.address, sent=sent, traceback=traceback)
        death = Death(flight.idh, letter.answered(response).encode(), now_ms)
        self.meters.buried(_kind(flight), reason)
        return Settled(flight.live, flight.index, death=death)

    def bury_damaged(self, damaged: Damaged) -> Settled:
        """Bury an unreadable entry with its bytes, so that a person can examine them."""
        now_ms = self._clock.now_ms()
        # Its own bytes cannot be trusted to be unique; its place is.
        idh = idh_of(f"{damaged.live.name}/{damaged.live.g_text}/{damaged.index}")
        letter = DeadLetter(
            id=idh.hex(),
            reason=f"the entry cannot be read: {damaged.reason}"[:MAX_ERROR_CHARS],
            died_ms=now_ms,
            due_ms=damaged.live.slice.since_ms,
            entry=damaged.row,
        )
        failure = Failure(
            id=letter.id,
            target=UNREADABLE,
            attempt=1,
            error=letter.reason,
            outcome="dead",
            original_due_ms=letter.due_ms,
            idempotency_key="",
        )
        self._failures.report(failure)
        self.meters.buried("unreadable", letter.reason)
        return Settled(damaged.live, damaged.index, fired=False, death=Death(idh, letter.encode(), now_ms))
