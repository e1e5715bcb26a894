"""Turns failures into what commit writes, retries and dead letters, and shows them to the error handler."""

from typing import Final

import msgspec

from ..model.clock import Clock
from ..model.delivery import Body
from ..model.failure import UNREADABLE, Failure, Fate
from ..model.ids import idh_of
from ..model.lane_policy import LanePolicies, LanePolicy
from ..model.limits import MAX_ERROR_CHARS, MAX_ERRORS_KEPT
from ..model.outcome import DROPPED, Dead, Response, Retry, has_expired, was_sent
from ..model.policies import Policies
from ..model.retry import GiveUp, Wait, decide, in_time_ms
from ..store.codec import INDEXED, LANE, SCHEDULED, entry
from ..store.dead import DeadLetter
from ..store.fire import Death, NewPlace
from ..store.holds import Head
from ..store.keys import SECOND_MS, Slice
from .boarding import Damaged
from .failures import Failures
from .flight import Flight
from .holds import row_of
from .meters import Meters
from .partition import Partition

UNTRIED_WAIT_MS: Final = 1_000


def _failed_once_more(flight: Flight, reason: str) -> Body:
    errors = (*flight.body.errors, reason)[-MAX_ERRORS_KEPT:]
    return msgspec.structs.replace(flight.body, attempt=flight.body.attempt + 1, errors=errors)


def _leaving(flight: Flight, place: Slice, row: bytes) -> NewPlace:
    return NewPlace(flight.idh, place, row, flight.address, flight.live.name, flight.mark)


def _kind(flight: Flight) -> str:
    return flight.body.target.partition(":")[0]


class Outcomes:
    """Applies the retry policies."""

    def __init__(self, policies: Policies, clock: Clock, failures: Failures, lanes: LanePolicies | None = None) -> None:
        self._policies = policies
        self._clock = clock
        self._failures = failures
        self._lanes = lanes or LanePolicies(LanePolicy())
        self.meters = Meters()

    def apply(self, partition: Partition, flight: Flight, outcome: Retry | Dead) -> bool:
        """Queue what commit has to write. True when the task is over, and its lane may go on."""
        if isinstance(outcome, Retry) and outcome.untried:
            self._place_again(partition, flight, outcome.after_ms or UNTRIED_WAIT_MS, flight.body)
            return False
        now_ms = self._clock.now_ms()
        policy = self._policies.of(flight.body)
        verdict = decide(policy, flight.attempt, outcome, flight.original_due_ms, now_ms, flight.body.expires_ms)
        reason = outcome.reason[:MAX_ERROR_CHARS]
        if self._parks(partition, flight, outcome, verdict, now_ms):
            self._report(flight, outcome, reason, "parked")
            self._park(partition, flight, reason)
            return False
        match verdict:
            case Wait(wait_ms):
                self._report(flight, outcome, reason, "retry", now_ms + wait_ms)
                return self._retry_later(partition, flight, wait_ms, reason)
            case GiveUp(why):
                reason = why[:MAX_ERROR_CHARS]
                self._report(flight, outcome, reason, "dead")
                self._bury(partition, flight, reason, outcome.response)
        return True

    def carry_out(self, partition: Partition, flight: Flight, outcome: Retry | Dead) -> bool:
        """The same for what a worker has decided, by the policy of its handler; it has told the failure as well."""
        reason = outcome.reason[:MAX_ERROR_CHARS]
        wait_ms = outcome.after_ms if isinstance(outcome, Retry) else None
        wait_ms = UNTRIED_WAIT_MS if wait_ms is None else wait_ms
        if isinstance(outcome, Retry) and outcome.untried:
            self._place_again(partition, flight, wait_ms, flight.body)
            return False
        verdict = GiveUp(reason) if isinstance(outcome, Dead) else Wait(wait_ms)
        if self._parks(partition, flight, outcome, verdict, self._clock.now_ms()):
            if self._lanes.of(flight.body.target).on_failure == "block":
                # The worker has told of another attempt: that the lane has waited too long for it is known here only.
                outcome.brief = "its run on a worker failed"  # what its handler said stays with the task
                self._report(flight, outcome, reason, "parked")
            self._park(partition, flight, reason)
            return False
        if isinstance(outcome, Dead):
            self._bury(partition, flight, reason)
            return True
        return self._retry_later(partition, flight, wait_ms, reason)

    def _parks(
        self, partition: Partition, flight: Flight, outcome: Retry | Dead, verdict: Wait | GiveUp, now_ms: int
    ) -> bool:
        """Is this the failure after which its lane stands still until somebody acts?"""
        lane = flight.body.lane
        if lane is None or has_expired(outcome.reason) or outcome.reason.startswith(DROPPED):
            return False
        policy = self._lanes.of(flight.body.target)
        if policy.on_failure == "park":
            return True
        # From its first failure: that it was put off before, untried, counts for nothing.
        since_ms = now_ms if flight.attempt == 1 else partition.lanes.since.get(lane, 0) or now_ms
        blocks = policy.on_failure == "block" and isinstance(verdict, Wait)
        return blocks and isinstance(verdict, Wait) and now_ms + verdict.ms > since_ms + policy.max_block_ms

    def _park(self, partition: Partition, flight: Flight, reason: str) -> None:
        """Head first into the lane's hold slice: there it waits with the others."""
        lane, now_ms = flight.body.lane, self._clock.now_ms()
        assert lane is not None
        self.meters.retried[_kind(flight)] += 1
        body = _failed_once_more(flight, reason)
        hold = partition.held_work.park(lane, reason, now_ms)
        body = msgspec.structs.replace(body, due_ms=flight.due_ms, original_due_ms=flight.original_due_ms)
        row = row_of(hold.place, flight, body)
        partition.unwritten.retries.append(_leaving(flight, hold.place, row))
        self._hold_lane(partition, lane, flight.idh, now_ms, parked=True)

    def _report(
        self, flight: Flight, outcome: Retry | Dead, reason: str, fate: Fate, next_at_ms: int | None = None
    ) -> None:
        failure = Failure(
            id=flight.id,
            target=flight.target,
            attempt=flight.attempt,
            error=reason,
            brief=outcome.brief or "",
            outcome=fate,
            next_at_ms=next_at_ms,
            lane=flight.lane,
            original_due_ms=flight.original_due_ms,
            idempotency_key=flight.idempotency_key,
            response=outcome.response,
            exception=outcome.error,
        )
        self._failures.report(failure)

    def _retry_later(self, partition: Partition, flight: Flight, wait_ms: int, reason: str) -> bool:
        """True when its lane goes on meanwhile."""
        self.meters.retried[_kind(flight)] += 1
        if flight.attempt == 1 and flight.body.lane is not None:
            partition.lanes.since.pop(flight.body.lane, None)
        skips = flight.body.lane is not None and self._lanes.of(flight.body.target).on_failure == "skip"
        self._place_again(partition, flight, wait_ms, _failed_once_more(flight, reason), waits=not skips)
        return skips

    def _place_again(
        self, partition: Partition, flight: Flight, wait_ms: int, body: Body, *, waits: bool = True
    ) -> None:
        now_ms = self._clock.now_ms()
        due_ms = now_ms + in_time_ms(wait_ms, body.expires_ms, now_ms)
        place = Slice.at(due_ms, SECOND_MS)
        body = msgspec.structs.replace(body, due_ms=None, original_due_ms=flight.original_due_ms)
        # A retry of a schedule's run is marked as well: its end is the end of the run.
        flags = INDEXED | (LANE if body.lane is not None else 0) | (flight.row[4] & SCHEDULED)
        row = entry(due_ms - place.start_ms, flags, flight.idh, body)
        partition.unwritten.retries.append(_leaving(flight, place, row))
        if body.lane is not None and waits:
            self._hold_lane(partition, body.lane, flight.idh, due_ms)

    def _hold_lane(self, partition: Partition, lane: str, idh: bytes, until_ms: int, *, parked: bool = False) -> None:
        """The lane waits for this task. Kept on the server too: a new owner must know it."""
        now_ms = self._clock.now_ms()
        partition.held_work.head_stands(lane, inside=parked)
        head = Head(idh, partition.lanes.since.get(lane, 0) or now_ms)
        partition.lanes.hold(lane, idh, since_ms=head.since_ms, until_ms=until_ms)
        partition.unwritten.holds.append((lane, head.pack()))
        partition.held_work.spill_lanes(now_ms)

    def _bury(self, partition: Partition, flight: Flight, reason: str, response: Response | None = None) -> None:
        now_ms = self._clock.now_ms()
        body, due_ms = flight.body, flight.original_due_ms
        sent = was_sent(reason)
        letter = DeadLetter.of(body, flight.id, reason, now_ms, due_ms, flight.address, sent=sent)
        partition.unwritten.deaths.append(Death(flight.idh, letter.answered(response).encode(), now_ms))
        self.meters.buried(_kind(flight), reason)

    def bury_damaged(self, partition: Partition, damaged: Damaged) -> None:
        """An entry nobody can read keeps its bytes, so that a person can."""
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
        partition.unwritten.deaths.append(Death(idh, letter.encode(), now_ms))
        self.meters.buried("unreadable", letter.reason)
