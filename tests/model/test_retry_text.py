"""Retry policies as people write them: tables, one line of text, and back."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.errors import InvalidInput
from mainspring.model.retry import RetryPolicy, RetryRule, policy_table, read_policy, retry_line
from mainspring.model.targets.named import Plain, Targets
from mainspring.model.targets.webhook import Webhook

rules = st.builds(
    lambda when, dead, wait: RetryRule(when, dead, None if dead else wait),
    st.sampled_from(["429", "5xx", "400-499", "ValueError", "app.errors.Busy"]),
    st.booleans(),
    st.none() | st.integers(1, 10**8),
)
policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 10_000),
    base_ms=st.integers(1, 10**6),
    factor=st.floats(1, 100, allow_nan=False).map(lambda factor: round(factor, 3)),
    cap_ms=st.integers(10**6, 10**9),
    jitter=st.sampled_from(["full", "equal", "none", "500ms", "2s"]),
    max_age_ms=st.none() | st.integers(1, 10**9),
    on=st.lists(rules, max_size=4, unique_by=lambda rule: rule.when).map(tuple),
)


@given(policies)
def test_a_policy_is_the_same_after_its_line_and_its_table(policy: RetryPolicy) -> None:
    assert RetryPolicy.parse(str(policy)) == policy
    assert read_policy(policy_table(policy)) == policy


def test_a_line_says_only_what_is_not_the_default() -> None:
    assert str(RetryPolicy()) == "6"
    policy = RetryPolicy.of(
        retries=4,
        base="200ms",
        factor=3,
        cap="90s",
        jitter="full",
        max_age="1h",
        on={"429": "retry 30s", "4xx": "dead"},
    )
    assert str(policy) == "5 base=200ms factor=3 cap=90s jitter=full max_age=1h 429=retry:30s 4xx=dead"


def test_a_line_may_be_written_with_names_and_commas() -> None:
    assert RetryPolicy.parse("max_attempts=5, base=200ms, 4xx=dead") == RetryPolicy.parse("5 base=200ms 4xx=dead")


def test_durations_may_be_timedeltas_in_code() -> None:
    policy = RetryPolicy.of(base=timedelta(milliseconds=200), jitter=timedelta(seconds=2))
    assert (policy.base_ms, policy.jitter) == (200, "2s")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_atempts=3", "max_atempts is not a setting of a retry policy; use max_attempts, retries, base"),
        ("3 base=5", "base: '5' is not a delay"),
        ("nonsense", "'nonsense' is not name=value"),
        ("429=retry:soon", "on 429: 'soon' is not a delay"),
        ("42=dead", "on '42': give a status such as '429'"),
        ("499-400=dead", "the range is empty"),
        ("3 4", "max_attempts is given twice"),
        ("3 retries=2", "retries and max_attempts are both set"),
        ("0", "max_attempts is 0; it must be at least 1"),
        ("1 " + "x" * 2000, "at most 1024 bytes"),
    ],
)
def test_a_wrong_line_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        RetryPolicy.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"base": 5}, "base: expected a duration with its unit such as '5s', not 5"),
        ({"max_attempts": True}, "max_attempts: expected a whole number, not True"),
        ({"factor": "two"}, "factor: expected a number, not 'two'"),
        ({"on": {"429": "later"}}, "on 429: 'later' is not an action; write 'dead', 'retry' or 'retry 30s'"),
        ({"on": {"429": 5}}, "on 429: 5 is not an action"),
        ({"on": 3}, "on: expected a table of rules"),
        ({"times": 3}, "times is not a setting of a retry policy"),
    ],
)
def test_a_wrong_table_is_refused_with_the_reason(table: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_policy(table)
    assert message in str(caught.value)


def test_a_task_takes_a_policy_or_its_line_and_nothing_else() -> None:
    assert retry_line(RetryPolicy(3)) == retry_line("max_attempts=3") == "3"
    with pytest.raises(InvalidInput, match="retry is of type int"):
        retry_line(3)  # type: ignore[arg-type]


def test_a_named_target_of_any_kind_may_have_a_policy() -> None:
    tables = {
        "shop": {"url": "https://shop.example/hook", "retry": {"max_attempts": 3, "on": {"404": "retry"}}},
        "ticks": {"address": "kafka:ticks", "retry": "9 base=5s"},
        "plain": {"address": "log:"},
    }
    targets = Targets.read(tables)
    assert targets["ticks"] == Plain("kafka:ticks", RetryPolicy(9, base_ms=5_000))
    shop = targets["shop"]
    assert isinstance(shop, Webhook)
    assert shop.retry == RetryPolicy(3, on=(RetryRule("404"),))
    assert targets.retries() == {"target:shop": shop.retry, "target:ticks": RetryPolicy(9, base_ms=5_000)}
    assert Targets.read(targets.tables()) == targets
    with pytest.raises(InvalidInput, match="shop: retry: max_attempts is 0"):
        Targets.read({"shop": {"address": "log:", "retry": "0"}})
