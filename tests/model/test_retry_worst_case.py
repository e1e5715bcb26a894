"""How long a task may take at worst, shown as a sum and held against the interval."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.errors import InvalidInput
from mainspring.model.retry import RetryPolicy, added_ms, worst_case


def test_three_retries_at_200_ms_with_up_to_500_ms_of_jitter_take_2900_ms() -> None:
    policy = RetryPolicy.of(retries=3, base="200ms", jitter="500ms")
    assert worst_case(policy) == (2_900, "200 ms + 400 ms + 800 ms + 3 x 500 ms = 2.9 s")
    assert policy.worst_case_ms() == 2_900


def test_the_attempts_themselves_count_with_their_timeout() -> None:
    policy = RetryPolicy.of(retries=3, base="200ms", jitter="500ms")
    assert worst_case(policy, 1_000).text == "4 x 1 s + 200 ms + 400 ms + 800 ms + 3 x 500 ms = 6.9 s"


def test_waits_at_the_cap_are_counted_together() -> None:
    policy = RetryPolicy(max_attempts=6, base_ms=1_000, cap_ms=2_000, jitter="none")
    assert worst_case(policy, 10).text == "6 x 10 ms + 1 s + 4 x 2 s = 9.06 s"


def test_a_single_attempt_waits_for_nothing() -> None:
    assert worst_case(RetryPolicy(1), 300) == (300, "300 ms = 300 ms")
    assert worst_case(RetryPolicy(1)).ms == 0


def test_max_age_bounds_the_sum() -> None:
    policy = RetryPolicy(max_attempts=100, base_ms=1_000, max_age_ms=5_000)
    assert worst_case(policy, 200) == (5_200, "max_age 5 s + 200 ms = 5.2 s")


def test_a_rule_with_a_longer_wait_counts() -> None:
    policy = RetryPolicy.of(max_attempts=3, base="100ms", jitter="none", on={"429": "retry 150ms"})
    assert worst_case(policy).text == "150 ms + 200 ms = 350 ms"


@given(
    st.integers(1, 40), st.integers(1, 5_000), st.sampled_from(["full", "equal", "none", "700ms"]), st.integers(0, 900)
)
def test_no_run_takes_longer_than_the_sum_says(attempts: int, base_ms: int, jitter: str, timeout_ms: int) -> None:
    policy = RetryPolicy(attempts, base_ms, 1.7, 60_000, jitter)
    took_ms = attempts * timeout_ms + sum(policy.wait_ms(n) or 0 for n in range(1, attempts))
    assert took_ms <= policy.worst_case_ms(timeout_ms)
    waits = sum(policy.backoff_ms(n) + added_ms(jitter) for n in range(1, attempts))
    assert policy.worst_case_ms(timeout_ms) == attempts * timeout_ms + waits


def test_a_policy_that_outlasts_the_interval_is_refused_with_its_sum() -> None:
    policy = RetryPolicy.of(retries=3, base="200ms", jitter="500ms")
    policy.check_against(2_900)
    with pytest.raises(InvalidInput) as caught:
        policy.check_against(2_899)
    assert "200 ms + 400 ms + 800 ms + 3 x 500 ms = 2.9 s" in str(caught.value)
    assert "the next is due after 2.899 s" in str(caught.value)
    with pytest.raises(InvalidInput, match=r"6.9 s"):
        policy.check_against(5_000, timeout_ms=1_000)
