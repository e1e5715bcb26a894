"""Schedules under settings: the policy and the timeout that count, and the findings about them."""

from typing import Any

import pytest

from mainspring.config.config import Config
from mainspring.model.errors import InvalidInput
from mainspring.model.schedule.definition import check_definition
from mainspring.model.schedule.input import define
from mainspring.node.schedule_lint import findings_of, runs_ahead, terms_of

NOW_MS = 1_800_000_000_000
CONFIG = Config(
    http_timeout_s=3,
    retry="6 base=1s",  # type: ignore[arg-type]
    queue={"mail": {"retry": "5 base=1s"}},  # type: ignore[arg-type]
    commands={
        "backup": {"argv": ["true"], "timeout": "7s", "retry": "4"},
        "plain": {"argv": ["true"], "queue": "mail"},
    },  # type: ignore[arg-type]
    targets={  # type: ignore[arg-type]
        "shop": {"url": "https://example.com/", "timeout": "9s", "retry": "3"},
        "slow": {"url": "https://example.com/"},
        "alias": {"address": "https://example.com/"},
    },
)


@pytest.mark.parametrize(
    ("target", "attempts", "timeout_ms"),
    [
        ("log:", 6, 0),
        ("https://example.com/", 6, 3_000),
        ("target:shop", 3, 9_000),
        ("target:slow", 6, 3_000),
        ("target:alias", 6, 3_000),
        ("target:unknown", 6, 0),
        ("queue:mail/send", 5, 0),
        ("queue:other/send", 6, 0),
        ("command:backup", 4, 7_000),
        ("command:plain", 5, 3_600_000),
        ("command:unknown", 6, 0),
    ],
)
def test_the_nearest_policy_and_the_nearest_timeout_count(target: str, attempts: int, timeout_ms: int) -> None:
    terms = terms_of(define("job", every="1h", target=target), CONFIG)
    assert (terms.policy.max_attempts, terms.timeout_ms) == (attempts, timeout_ms)
    own = terms_of(define("job", every="1h", target=target, retry="2", timeout="1s"), CONFIG)
    assert (own.policy.max_attempts, own.timeout_ms) == (2, 1_000)


def too_long(**fields: Any) -> list[str]:
    found = findings_of(define("job", **{"every": "30s", "target": "https://example.com/", **fields}), NOW_MS, CONFIG)
    return [finding.message for finding in found if finding.code in ("too-long", "default-retries")]


def test_a_run_that_may_outlast_the_interval_is_reported_with_the_sum() -> None:
    [message] = too_long()
    assert "6 x 3 s + 1 s + 2 s + 4 s + 8 s + 16 s = 49 s" in message
    assert "the next comes after 30 s" in message
    assert too_long(every="49s") == []


def test_runs_that_do_not_wait_for_each_other_may_last_as_long_as_they_like() -> None:
    assert too_long(overlap="buffer_one") != []
    assert too_long(overlap="allow") == too_long(max_runs=1) == []
    assert too_long(every=None, after_end="1s") == []


def test_a_schedule_with_a_policy_of_its_own_is_judged_by_the_usual_timeout_of_webhooks() -> None:
    call: dict[str, Any] = {"every": "5s", "retry": "3 base=200ms"}
    with pytest.raises(InvalidInput, match=r"3 x 15 s .* = 45.6 s .* give a shorter timeout"):
        check_definition(define("hook", target="https://example.com/", **call), NOW_MS)
    check_definition(define("hook", target="https://example.com/", timeout="1s", **call), NOW_MS)
    check_definition(define("hook", target="https://example.com/", overlap="allow", **call), NOW_MS)
    check_definition(define("hook", target="log:", **call), NOW_MS)


def test_a_schedule_is_not_refused_for_what_it_leaves_to_the_settings() -> None:
    check_definition(define("hook", target="https://example.com/", every="1s"), NOW_MS)


def test_the_search_for_runs_ends_in_time_and_says_so() -> None:
    job = define("job", every="1s", target="log:")
    assert runs_ahead(job, NOW_MS, 3, 10) == ([NOW_MS + 1_000, NOW_MS + 2_000, NOW_MS + 3_000], False)
    assert runs_ahead(job, NOW_MS, 3, 0) == ([], True)


def test_default_retries_are_distinguished_from_chosen_ones() -> None:
    def codes(**fields: Any) -> set[str]:
        found = findings_of(define("job", every="30s", target="https://example.com/", **fields), NOW_MS, CONFIG)
        return {finding.code for finding in found}

    assert codes() == {"default-retries"}
    assert codes(timeout="31s") == {"too-long"}, "one attempt alone may take longer"
    assert codes(retry="3 base=20s") == {"too-long"}
