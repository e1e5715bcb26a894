"""Outcomes of deliveries: retries, dead letters and what commit writes, counted for `/metrics`."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    Done,
    Outcome,
    Response,
    Retry,
    has_expired,
    was_sent,
)
from ..model.ids import idh_of
from ..model.job import Result
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
from ..store.records import KeptResult
from ..store.runs import RUNS_AN_ENTRY
from .due import Damaged
from .flight import Flight, FlightGroup
from .holds import LaneHold, row_of
from .partition import Partition, Settled
from .slice import LiveSlice

TO_WORKERS: Final = tuple(f"{scheme}:" for scheme in sorted(HANDED_OFF))
"""Beginnings of targets whose tasks workers run."""
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
        """Tasks that were no longer wanted and planned times that did not run, by reason."""
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
        """Record the lateness of tasks that left one slice together: for each bound, count those that are later.

        An entry begins with its offset, so rows compare with the bytes of an offset as their offsets do. The sum is
        estimated from the range of each bucket.
        """
        histogram, since_ms = self.lateness[kind], began_ms - live.from_ms
        rows = list(map(_ROW, flights))
        # A slice that was overdue as a whole may have left in any order; sorting it would cost more than counting.
        in_order = len(rows) == 1 or began_ms < live.slice.end_ms
        if live.has_lanes or live.has_schedules:
            in_order = True
            rows.sort()  # such tasks leave when it is their turn
        first, last = (_offset(rows[0]), _offset(rows[-1])) if in_order else (0, live.slice.width_ms - 1)
        counted = 0
        for bound_ms in reversed(_BOUNDS_MS):
            offset = since_ms - bound_ms
            if first < offset <= last:
                bound = offset.to_bytes(4, "big")
                later = bisect_left(rows, bound) if in_order else sum(map(bound.__gt__, rows))
                _observe(histogram, since_ms - (first + offset - 1) / 2, later - counted)
                counted, first = later, offset
        _observe(histogram, since_ms - (first + last) / 2, len(rows) - counted)


def _offset(row: bytes) -> int:
    return int.from_bytes(row[:4], "big")


def _observe(histogram: Histogram, late_ms: float, count: int) -> None:
    if count:
        histogram.observe(max(0.0, late_ms) / 1000, count)


def _failed_once_more(flight: Flight, reason: str) -> Body:
    errors = (*flight.body.errors, reason)[-MAX_ERRORS_KEPT:]
    return replace(flight.body, attempt=flight.body.attempt + 1, errors=errors)


def _leaving(flight: Flight, place: Slice, row: bytes) -> NewPlace:
    return NewPlace(flight.idh, place, row, flight.address, flight.live.name, flight.mark)


def _details(said: Outcome) -> RunDetails | None:
    trace = trace_of(error_of(said))
    return RunDetails(said.response, traceback=trace) if said.response is not None or trace else None


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

    def _record(self, flight: Flight, verdict: Verdict, said: Outcome, sent_ms: int, now_ms: int) -> RunRecord:
        began_ms = 0 if verdict.end in ("expired", "dropped") else sent_ms
        record = RunRecord.of(flight, verdict, said, began_ms, now_ms, self._node)
        if said.response is None:
            return record
        # It ended with its answer, and not with the slowest of its batch.
        ended_ms = min(now_ms, sent_ms + said.response.duration_ms)
        return replace(record, ended_ms=ended_ms, answer_bytes=len(said.response.body))

    def lost(self, group: FlightGroup) -> tuple[Run, ...]:
        """Return what the history keeps of a former owner's attempts. Flights for workers have not run yet."""
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

    def done(
        self, group: FlightGroup, said: Sequence[Outcome], sent_ms: Sequence[int]
    ) -> Iterator[tuple[Settled, Sequence[Flight]]]:
        """Return what commit has to write for deliveries that succeeded: most need their done bits only."""
        live, flights, now_ms = group.live, group.flights, self._clock.now_ms()
        all_kept = not live.has_schedules and self._history.keeps_all(flights[0].body)
        if not (said or all_kept or live.has_schedules):
            yield Settled(live, group.indexes, delivered=True), flights
            return
        said = said or [DONE] * len(flights)
        for first in range(0, len(flights), RUNS_AN_ENTRY):
            last = first + RUNS_AN_ENTRY
            answers, runs = [], []
            for flight, one, at_ms in zip(flights[first:last], said[first:last], sent_ms[first:last], strict=True):
                if isinstance(one, Done) and (answer := self._answer(flight, one, at_ms)) is not None:
                    answers.append(answer)
                if all_kept or (live.has_schedules and self._history.keeps_all(flight.body)):
                    runs.append(Run(self._record(flight, DELIVERED, one, at_ms, now_ms), _details(one)))
            settled = Settled(live, group.indexes[first:last], delivered=True, answers=tuple(answers), runs=tuple(runs))
            yield settled, flights[first:last]

    def _answer(self, flight: Flight, outcome: Done, sent_ms: int) -> KeptResult | None:
        """Return the receiver's response as the stored result that callers wait for."""
        if not outcome.keep_ms or outcome.response is None:
            return None
        result = Result(
            "done",
            attempt=flight.attempt,
            worker=self._node,
            target=flight.target,
            due_ms=flight.original_due_ms,
            started_ms=sent_ms,
            ended_ms=sent_ms + outcome.response.duration_ms,
            response=outcome.response,
        )
        return KeptResult(flight.live.partition, flight.idh, result.encode(), outcome.keep_ms)

    def failed(self, partition: Partition, flight: Flight, said: Retry | Dead, sent_ms: int) -> Settled:
        """Return what commit has to write for a failed delivery, by the retry policy."""
        now_ms = self._clock.now_ms()
        lane = None if flight.body.lane is None else self._lanes.of(flight.body.target)
        policy, since_ms = self._policies.of(flight.body), self._since_ms(partition, flight, now_ms)
        verdict = judge(said, flight.body, flight.original_due_ms, now_ms, policy, lane, since_ms)
        settled = self._carry_out(partition, flight, verdict, trace_of(said.error), said.response)
        if not verdict.counted:
            return settled
        record = self._record(flight, verdict, said, sent_ms, now_ms)
        self._failures.report(record.failure(said, flight.idempotency_key))
        return settled._replace(runs=(Run(record, _details(said)),)) if self._history.keeps(record) else settled

    def ended_by_worker(self, partition: Partition, flight: Flight, verdict: Verdict, traceback: str) -> Settled:
        """Return what commit has to write for a task of a lane that a worker has ended, and reported."""
        if verdict.end in ("done", "cancelled"):  # the mark of a cancelled task is already set, and counted
            return Settled(flight.live, (flight.index,), delivered=verdict.end == "done")
        if flight.body.lane is not None:
            now_ms, lane = self._clock.now_ms(), self._lanes.of(flight.body.target)
            judged = parked(verdict, verdict.reason, lane, now_ms, self._since_ms(partition, flight, now_ms))
            if judged.end == "parked" and lane.on_failure == "block":
                # The worker reported a retry: only the owner knows that the lane has been blocked for too long.
                said = Retry(judged.reason, brief="its run on a worker failed")
                self._failures.report(
                    self._record(flight, judged, said, 0, now_ms).failure(said, flight.idempotency_key)
                )
            verdict = judged
        return self._carry_out(partition, flight, verdict, traceback)

    def _since_ms(self, partition: Partition, flight: Flight, now_ms: int) -> int:
        """Return when the head of a lane first failed: untried postponements before that do not count."""
        lane = flight.body.lane
        return now_ms if lane is None or flight.attempt == 1 else partition.failing_since_ms(lane, now_ms)

    def _carry_out(
        self, partition: Partition, flight: Flight, verdict: Verdict, traceback: str, response: Response | None = None
    ) -> Settled:
        match verdict.end:
            case "retry":
                return self._retry(partition, flight, verdict)
            case "parked":
                return self._park(partition, flight, verdict.reason)
            case _:
                return self._bury(flight, verdict.reason, response, traceback)

    def _retry(self, partition: Partition, flight: Flight, verdict: Verdict) -> Settled:
        """Place the task again. If that counts as an attempt, its lane may continue meanwhile."""
        now_ms, body, skips = self._clock.now_ms(), flight.body, False
        if verdict.counted:
            self.meters.retried[_kind(flight)] += 1
            body = _failed_once_more(flight, verdict.reason)
            skips = body.lane is not None and self._lanes.of(body.target).on_failure == "skip"
        due_ms = int(now_ms + in_time_ms(verdict.wait_ms, body.expires_ms, now_ms))  # a sink's time may be no number
        place = Slice.at(due_ms, SECOND_MS)
        body = replace(body, due_ms=None, original_due_ms=flight.original_due_ms)
        # Flag the retry of a schedule's run too: the run ends when its last attempt does.
        flags = INDEXED | (LANE if body.lane is not None else 0) | (flight.row[4] & SCHEDULED)
        row = entry(due_ms - place.start_ms, flags, flight.idh, body)
        holds: tuple[LaneHold, ...] = ()
        if body.lane is not None and not skips:
            first = verdict.counted and flight.attempt == 1
            holds = (partition.hold_lane(body.lane, flight.idh, due_ms, now_ms, first=first),)
        retry = _leaving(flight, place, row)
        return Settled(flight.live, (flight.index,), is_over=skips, retry=retry, holds=holds)

    def _park(self, partition: Partition, flight: Flight, reason: str) -> Settled:
        """Move the head first into the lane's hold slice, where it waits with the others."""
        lane, now_ms = flight.body.lane, self._clock.now_ms()
        assert lane is not None
        self.meters.retried[_kind(flight)] += 1
        body = _failed_once_more(flight, reason)
        place = partition.park_lane(lane, reason, now_ms)
        body = replace(body, due_ms=flight.due_ms, original_due_ms=flight.original_due_ms)
        held = partition.hold_lane(lane, flight.idh, now_ms, now_ms, parked=True)
        retry = _leaving(flight, place, row_of(place, flight, body))
        return Settled(flight.live, (flight.index,), is_over=False, retry=retry, holds=(held,))

    def _bury(self, flight: Flight, reason: str, response: Response | None = None, traceback: str = "") -> Settled:
        now_ms = self._clock.now_ms()
        body, due_ms = flight.body, flight.original_due_ms
        sent = was_sent(reason)
        dead_letter = DeadLetter.of(
            body, flight.id, reason, now_ms, due_ms, flight.address, sent=sent, traceback=traceback
        )
        death = Death(flight.idh, dead_letter.answered(response).encode(), now_ms)
        self.meters.buried(_kind(flight), reason)
        return Settled(flight.live, (flight.index,), death=death)

    def bury_damaged(self, damaged: Damaged) -> Settled:
        """Bury an unreadable entry with its bytes, so that a person can examine them."""
        now_ms, due_ms = self._clock.now_ms(), damaged.live.slice.since_ms
        reason = f"the entry cannot be read: {damaged.reason}"[:MAX_ERROR_CHARS]
        # Its own bytes cannot be trusted to be unique; its place is.
        idh = idh_of(f"{damaged.live.name}/{damaged.live.g_text}/{damaged.row_index}")
        dead_letter = DeadLetter(id=idh.hex(), reason=reason, died_ms=now_ms, due_ms=due_ms, entry=damaged.row)
        record = RunRecord(idh, "dead", 1, due_ms, 0, now_ms, UNREADABLE, self._node, reason)
        self._failures.report(record.failure(Dead(reason), ""))
        self.meters.buried("unreadable", reason)
        return Settled(damaged.live, (damaged.row_index,), fired=False, death=Death(idh, dead_letter.encode(), now_ms))
