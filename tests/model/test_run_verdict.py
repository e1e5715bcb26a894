"""The verdict on a task after an attempt: one function decides, for nodes and for workers."""

import pytest

from mainspring.model.delivery import DONE, EXPIRED, Body, Dead, Outcome, Response, Retry
from mainspring.model.lane import LanePolicy
from mainspring.model.retry import RetryPolicy
from mainspring.model.run import DELIVERED, RunRecord, Verdict, code_of, judge, parked

_POLICY = RetryPolicy(max_attempts=3, base_ms=1_000, jitter="none")
_NOW_MS = 1_800_000_000_000


def _judge(
    said: Outcome, *, attempt: int = 1, lane: LanePolicy | None = None, since_ms: int = _NOW_MS, expires: int = 0
) -> Verdict:
    body = Body("log:", b"{}", attempt=attempt, expires_ms=expires or None)
    return judge(said, body, _NOW_MS, _NOW_MS, _POLICY, lane, since_ms)


def test_a_delivered_task_is_done() -> None:
    assert _judge(DONE) == DELIVERED
    assert DELIVERED.is_over


def test_a_failed_attempt_waits_as_the_policy_says() -> None:
    verdict = _judge(Retry("busy"))
    assert (verdict.end, verdict.reason, verdict.wait_ms, verdict.counted) == ("retry", "busy", 1_000, True)
    assert not verdict.is_over


def test_the_last_attempt_is_the_last() -> None:
    assert _judge(Retry("busy"), attempt=3) == Verdict("dead", "busy")


def test_a_receiver_that_was_not_asked_costs_no_attempt() -> None:
    verdict = _judge(Retry("paused", untried=True), attempt=3)
    assert (verdict.end, verdict.wait_ms, verdict.counted) == ("retry", 1_000, False)


def test_an_attempt_that_was_not_made_waits_no_longer_than_the_task_lives() -> None:
    assert _judge(Retry("paused", untried=True, after_ms=60_000), expires=_NOW_MS + 500).wait_ms == 501


def test_a_task_that_expired_did_not_fail() -> None:
    assert _judge(Dead(EXPIRED)).end == "expired"
    assert _judge(Dead(EXPIRED), lane=LanePolicy("park")).end == "expired"


@pytest.mark.parametrize("said", [Retry("busy"), Dead("bad")])
def test_a_lane_that_parks_is_parked_by_any_failure(said: Outcome) -> None:
    assert _judge(said, lane=LanePolicy("park")).end == "parked"


def test_a_lane_that_blocks_is_parked_once_its_head_blocks_for_too_long() -> None:
    lane = LanePolicy("block", 60_000)
    assert _judge(Retry("busy"), lane=lane).end == "retry"
    assert _judge(Retry("busy"), lane=lane, since_ms=_NOW_MS - 59_500).end == "parked"
    assert _judge(Dead("bad"), lane=lane, since_ms=_NOW_MS - 59_500).end == "dead"


def test_a_postponement_parks_no_lane() -> None:
    assert _judge(Retry("paused", untried=True), lane=LanePolicy("park")).end == "retry"


def test_the_owner_parks_by_its_own_clock_what_a_worker_retries() -> None:
    by_worker = Verdict("retry", "busy", 1_000)
    assert parked(by_worker, "busy", LanePolicy("block", 60_000), _NOW_MS, _NOW_MS - 60_000).end == "parked"


def test_a_record_names_its_schedule_only_for_its_runs() -> None:
    record = RunRecord(b"x" * 16, "done", 1, _NOW_MS, _NOW_MS, _NOW_MS, "log:", "n1", id="a@b")
    assert record.schedule is None
    assert RunRecord(b"x" * 16, "done", 1, 0, 0, 0, "log:", "n1", id="daily@t", planned_ms=1).schedule == "daily"


def test_a_code_is_the_status_or_the_type_of_the_exception() -> None:
    assert code_of(Retry("no", response=Response(503))) == 503
    assert code_of(Retry("no", error=TimeoutError())) == "TimeoutError"
    assert code_of(Dead("no")) is None
