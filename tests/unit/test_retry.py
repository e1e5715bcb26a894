"""When a failed delivery is tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.errors import InvalidInput
from mainspring.model.retry import Jitter, RetryPolicy


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
        ({"base_ms": 0}, "base_ms"),
        ({"base_ms": 10, "cap_ms": 9}, "cap_ms"),
        ({"factor": 0.5}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": 101}, "factor"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(settings: dict[str, int], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        RetryPolicy(**settings)  # type: ignore[arg-type]
