"""When a failed delivery is tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.delivery import Body, Dead, Response, Retry
from mainspring.model.errors import InvalidInput
from mainspring.model.retry import Jitter, Policies, RetryPolicy, RetryRule, RetryWait, decide


def test_without_jitter_the_waits_double_up_to_the_cap() -> None:
    policy = RetryPolicy(max_attempts=7, base_ms=100, factor=2.0, cap_ms=1_000, jitter="none")
    assert [policy.wait_ms(n) for n in range(1, 7)] == [100, 200, 400, 800, 1_000, 1_000]


def test_after_the_last_attempt_there_is_no_further_one() -> None:
    policy = RetryPolicy(max_attempts=3)
    assert policy.wait_ms(2) is not None
    assert policy.wait_ms(3) is None
    assert RetryPolicy(max_attempts=1).wait_ms(1) is None


@given(st.integers(1, 5_000), st.sampled_from(["full", "equal", "none"]))
def test_a_wait_is_never_zero_and_never_over_the_cap(failed: int, jitter: Jitter) -> None:
    policy = RetryPolicy(max_attempts=10_000, base_ms=1, cap_ms=60_000, jitter=jitter)
    wait_ms = policy.wait_ms(failed)
    assert wait_ms is not None
    assert 1 <= wait_ms <= 60_000


@given(st.integers(1, 6))
def test_equal_jitter_waits_at_least_half(failed: int) -> None:
    wait_ms = RetryPolicy(max_attempts=9, base_ms=1_000, jitter="equal").wait_ms(failed)
    assert wait_ms is not None
    assert wait_ms >= 1_000 * 2 ** (failed - 1) // 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"base_ms": 0}, "base of 0 ms"),
        ({"base_ms": 10, "cap_ms": 9}, "cap of 9 ms"),
        ({"factor": 0.5}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": 101}, "factor"),
        ({"jitter": "some"}, "jitter is 'some'"),
        ({"jitter": "5 apples"}, "jitter"),
        ({"max_age_ms": 0}, "max_age_ms"),
        ({"on": (RetryRule("429"), RetryRule("429", dead=True))}, "each for a different failure"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(settings: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        RetryPolicy(**settings)  # type: ignore[arg-type]


def test_added_jitter_never_shortens_a_wait() -> None:
    policy = RetryPolicy.of(max_attempts=9, base="200ms", jitter="500ms")
    waits = {policy.wait_ms(2) for _ in range(200)}
    assert all(wait is not None and 400 <= wait <= 900 for wait in waits)
    assert len(waits) > 1


# -- what a failure means -------------------------------------------------------------------------------------------


class OutOfStock(LookupError):
    """An error of somebody's own."""


PLAIN = RetryPolicy(max_attempts=3, base_ms=100, jitter="none")


def status(code: int) -> Retry:
    return Retry(f"HTTP {code}", response=Response(code))


def after(policy: RetryPolicy, outcome: Retry | Dead, *, attempt: int = 1, age_ms: int = 0) -> int | str:
    """The wait, or the reason why there is none."""
    decision = decide(policy, attempt, outcome, original_due_ms=1_000, now_ms=1_000 + age_ms)
    return decision.ms if isinstance(decision, RetryWait) else decision.reason


def test_a_failure_waits_by_the_policy_until_the_last_attempt() -> None:
    assert [after(PLAIN, Retry("no"), attempt=n) for n in (1, 2, 3)] == [100, 200, "no"]


def test_dead_is_dead_at_the_first_attempt() -> None:
    assert after(PLAIN, Dead("never")) == "never"


def test_a_time_that_the_target_named_goes_before_rule_and_policy() -> None:
    ruled = RetryPolicy(on=(RetryRule("503", wait_ms=7),))
    assert after(ruled, Retry("busy", after_ms=5_000, response=Response(503))) == 5_000
    assert after(ruled, status(503)) == 7
    assert after(PLAIN, Retry("busy", after_ms=5_000), attempt=3) == "busy", "the attempts are used up all the same"


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (status(503), 100),
        (status(500), "HTTP 500"),
        (status(404), "HTTP 404"),
        (status(429), 30_000),
        (status(302), 100),
        (Dead("HTTP 409", response=Response(409)), 100),
        (Dead("HTTP 410", response=Response(410)), "HTTP 410"),
        (Retry("no answer", error=TimeoutError()), 2_000),
        (Retry("wrong", error=KeyError("x")), "wrong"),
        (Retry("sold out", error=OutOfStock()), 100),
        (Retry("other", error=RuntimeError()), 100),
    ],
)
def test_the_narrowest_rule_decides(outcome: Retry | Dead, expected: int | str) -> None:
    on = {
        "4xx": "dead", "400-410": "dead", "409": "retry", "429": "retry 30s", "500": "dead",
        "LookupError": "dead", "OutOfStock": "retry", "TimeoutError": "retry 2s",
    }  # fmt: skip
    policy = RetryPolicy.of(max_attempts=3, base="100ms", jitter="none", on=on)
    assert after(policy, outcome) == expected


def test_an_error_may_be_named_with_its_module() -> None:
    policy = RetryPolicy.of(on={f"{__name__}.OutOfStock": "dead", "somewhere.else.OutOfStock": "retry"})
    assert after(policy, Retry("sold out", error=OutOfStock())) == "sold out"


def test_no_attempt_begins_later_than_max_age_after_the_original_due() -> None:
    policy = RetryPolicy(max_attempts=99, base_ms=100, jitter="none", max_age_ms=1_000)
    assert after(policy, Retry("no"), age_ms=900) == 100
    reason = after(policy, Retry("no"), age_ms=901)
    assert isinstance(reason, str)
    assert reason.startswith("no (no further attempt")
    assert isinstance(after(policy, Retry("no", after_ms=1_001)), str), "nor when the target asks for it"


# -- which policy applies -------------------------------------------------------------------------------------------


def test_the_nearest_policy_wins_as_a_whole() -> None:
    default, target, queue = (RetryPolicy(max_attempts=n) for n in (2, 3, 4))
    policies = Policies(default, {"target:shop": target})
    assert policies.of(Body("log:", b"")) == default
    assert policies.of(Body("target:shop", b"")) == target
    assert policies.of(Body("target:shop", b""), queue) == queue
    assert policies.of(Body("target:shop", b"", retry="9 base=1ms"), queue) == RetryPolicy(9, base_ms=1)


def test_a_policy_that_cannot_be_read_is_as_good_as_none() -> None:
    assert Policies(RetryPolicy(7)).of(Body("log:", b"", retry="from the future=1")).max_attempts == 7
