"""The circuit breaker, with a clock held by hand."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model.errors import InvalidInput
from mainspring.model.flow import IDLE_MS, Breaker, BreakerPolicy

POLICY = BreakerPolicy(min_calls=10, window_ms=10_000, open_ms=1_000, max_open_ms=4_000, probes=2, ramp_ms=10_000)


def opened(policy: BreakerPolicy = POLICY) -> Breaker:
    breaker = Breaker(policy)
    assert breaker.record(0, 10, 0) == "open"
    return breaker


def half_open() -> Breaker:
    breaker = opened()
    assert breaker.room(1_000) == 2
    return breaker


def test_a_breaker_opens_when_too_large_a_share_fails() -> None:
    breaker = Breaker(POLICY)
    assert breaker.record(6, 0, 0) == "closed"
    assert breaker.record(0, 5, 100) == "closed", "5 of 11"
    assert breaker.room(100) == inf
    assert breaker.record(0, 1, 200) == "open", "6 of 12"
    assert breaker.room(200) == 0


def test_a_breaker_closes_when_nothing_is_sent_for_long() -> None:
    breaker = opened()
    assert not breaker.rest(1_000 + IDLE_MS - 1)
    assert breaker.rest(1_000 + IDLE_MS)
    assert (breaker.state, breaker.room(1_000 + IDLE_MS)) == ("closed", inf)


def test_a_breaker_does_not_close_as_idle_while_probes_are_sent() -> None:
    breaker = half_open()
    breaker.took(1, IDLE_MS)
    assert not breaker.rest(2 * IDLE_MS)
    assert breaker.rest(2 * IDLE_MS + 1_000)


def test_a_ramp_ends_although_nothing_is_sent() -> None:
    breaker = half_open()
    breaker.took(2, 1_000)
    assert breaker.record(2, 0, 1_000) == "ramp"
    assert not breaker.rest(10_999)
    assert breaker.rest(11_000)
    assert breaker.state == "closed"


def test_a_few_failures_say_nothing() -> None:
    breaker = Breaker(POLICY)
    assert breaker.record(0, 9, 0) == "closed"
    assert breaker.record(0, 1, 1) == "open"


def test_outcomes_older_than_the_window_are_forgotten() -> None:
    breaker = Breaker(POLICY)
    breaker.record(0, 9, 0)
    assert breaker.record(0, 1, 10_000) == "closed"
    assert breaker.record(0, 9, 10_500) == "open"


def test_after_its_time_a_few_probes_leave() -> None:
    breaker = opened()
    assert breaker.room(999) == 0
    assert breaker.room(1_000) == 2
    breaker.took(2, 1_000)
    assert breaker.room(1_000) == 0
    assert breaker.state == "half-open"


def test_one_probe_that_fails_opens_it_for_twice_as_long_up_to_the_most() -> None:
    breaker, now_ms, waits = opened(), 0, []
    for _ in range(4):
        waits.append(breaker.next_ms - now_ms)
        now_ms = breaker.next_ms
        assert breaker.room(now_ms) == 2
        breaker.took(1, now_ms)
        assert breaker.record(0, 1, now_ms) == "open"
    assert waits == [1_000, 2_000, 4_000, 4_000]


def test_a_breaker_closes_when_all_probes_succeeded() -> None:
    breaker = half_open()
    breaker.took(2, 1_000)
    assert breaker.record(1, 0, 1_010) == "half-open"
    assert breaker.record(1, 0, 1_020) == "ramp"


def test_probes_without_an_outcome_are_sent_again() -> None:
    breaker = half_open()
    breaker.took(2, 1_000)
    assert breaker.room(1_999) == 0
    assert breaker.room(2_000) == 2


def test_a_refused_probe_is_replaced_by_another() -> None:
    breaker = half_open()
    breaker.took(2, 1_000)
    assert breaker.record(0, 0, 1_010, refused=2) == "half-open", "that says nothing of the receiver"
    assert breaker.room(1_010) == 2
    breaker.took(2, 1_010)
    breaker.record(1, 0, 1_020, refused=1)
    assert breaker.room(1_020) == 1
    breaker.took(1, 1_020)
    assert breaker.record(1, 0, 1_030) == "ramp"


def test_calls_begun_before_a_breaker_opened_change_nothing() -> None:
    breaker = opened()
    assert breaker.record(100, 0, 10) == "open"
    assert breaker.record(0, 100, 10) == "open"
    assert breaker.next_ms == 1_000


def test_on_recovery_the_backlog_is_let_out_at_a_growing_rate() -> None:
    breaker = half_open()
    breaker.took(2, 1_000)
    breaker.record(2, 0, 1_000)
    left = []
    for second in range(11):
        count = 0
        for now_ms in range(1_000 + second * 1_000, 2_000 + second * 1_000, 100):
            room = breaker.room(now_ms)
            if room == inf:
                break
            breaker.took(int(room), now_ms)
            count += int(room)
        left.append(count)
    assert left[0] < 20, "about ten in the first second"
    assert all(later > 1.5 * earlier for earlier, later in pairwise(left[:10]))
    assert left[10] == 0
    assert breaker.state == "closed", "nothing bounds it after the ramp"


def test_a_breaker_opens_again_on_the_ramp() -> None:
    breaker = half_open()
    breaker.took(2, 1_000)
    breaker.record(2, 0, 1_000)
    assert breaker.record(5, 5, 1_500) == "open"
    assert breaker.next_ms == 1_500 + 2_000, "for longer than the first time"
    assert breaker.opened_ms == 0


def test_without_a_ramp_it_closes_at_once() -> None:
    breaker = opened(BreakerPolicy(min_calls=10, probes=1, ramp_ms=0))
    assert breaker.room(5_000) == 1
    assert breaker.record(1, 0, 5_000) == "closed"
    assert breaker.room(5_000) == inf


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 8), st.integers(0, 8)), max_size=60))
def test_a_receiver_that_recovers_is_always_sent_everything_again(
    events: list[tuple[int, int, int]],
) -> None:
    breaker, now_ms = Breaker(POLICY), 0
    for passed_ms, done, failed in events:
        now_ms += passed_ms
        breaker.took(int(min(breaker.room(now_ms), 50)), now_ms)
        breaker.record(done, failed, now_ms)
    for _ in range(300):
        now_ms += 100
        room = int(min(breaker.room(now_ms), 100))
        breaker.took(room, now_ms)
        breaker.record(room, 0, now_ms)
    assert breaker.room(now_ms) == inf


@pytest.mark.parametrize("text", ["off", "failure_rate=0.3", "open=10s max_open=1m probes=1 ramp=0s"])
def test_a_policy_is_the_same_after_its_line(text: str) -> None:
    policy = BreakerPolicy.read(text)
    assert BreakerPolicy.read(str(policy)) == policy


def test_a_policy_is_read_from_a_table_too() -> None:
    assert BreakerPolicy.read({"open": "10s", "probes": 1}) == BreakerPolicy(open_ms=10_000, probes=1)
    assert BreakerPolicy.read(False).off


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("on", "'on' is not name=value"),
        ({"opn": "1s"}, "opn is not a setting of a breaker; use failure_rate, min_calls, window"),
        ({"failure_rate": 2}, "failure_rate is 2.0; it must lie between 0.01 and 1"),
        ({"probes": "few"}, "probes: expected a number, not 'few'"),
        ({"open": 5}, "open is of type int; give a timedelta or a text such as '30m'"),
        ({"open": "10m"}, "max_open is less than open"),
        (3, "expected a table of settings, or 'off', not 3"),
    ],
)
def test_a_wrong_policy_is_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        BreakerPolicy.read(value)
    assert message in str(caught.value)


def test_a_receiver_that_a_former_owner_found_failing_is_probed_at_once() -> None:
    breaker = Breaker(POLICY)
    breaker.suspect(5, now_ms=1_000)
    assert (breaker.state, breaker.opened_ms, breaker.room(1_000)) == ("half-open", 5, 2)
    breaker.took(2, 1_000)
    assert breaker.room(1_000) == 0
    assert breaker.record(2, 0, 1_010) == "ramp"
    failing = Breaker(POLICY)
    failing.suspect(5, now_ms=1_000)
    failing.took(1, 1_000)
    assert failing.record(0, 1, 1_010) == "open"


def test_a_receiver_that_answered_here_lately_continues_at_its_former_rate() -> None:
    breaker = Breaker(POLICY)
    for second in range(10):
        breaker.record(640, 0, second * 1_000)
    breaker.suspect(5, now_ms=10_000)
    assert breaker.state == "ramp"
    assert 500 <= breaker.ramp_rate(10_000) <= 800
    assert breaker.room(14_500) == inf, "what is left of the ramp"


def test_an_answer_of_long_ago_proves_nothing() -> None:
    breaker = Breaker(POLICY)
    breaker.record(1_000, 0, 0)
    breaker.suspect(5, now_ms=POLICY.window_ms + 1_000)
    assert breaker.state == "half-open"


def test_an_open_breaker_ignores_what_a_former_owner_found() -> None:
    breaker = opened()
    breaker.suspect(5, now_ms=10)
    assert (breaker.state, breaker.room(10)) == ("open", 0)
