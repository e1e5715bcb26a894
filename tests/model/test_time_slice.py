"""Work in pieces: short on a loop that is free, longer where the others keep it for long."""

import time

import pytest

from mainspring.model.clock import LONGEST_S, SHARE, TimeSlice

LEAST_S = 0.002


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def length_s(stint: TimeSlice, clock: list[float]) -> float:
    """From the beginning until it is over, to a tenth of a millisecond."""
    began = clock[0]
    while not stint.over:
        clock[0] += 0.0001
    return clock[0] - began


@pytest.mark.parametrize(
    ("others_s", "expected_s"),
    [(0.0, LEAST_S), (LEAST_S, LEAST_S), (0.02, 0.02 * SHARE), (5.0, LONGEST_S)],
)
def test_a_stint_is_a_share_of_the_others_turn(clock: list[float], others_s: float, expected_s: float) -> None:
    stint = TimeSlice(LEAST_S)
    stint.begin()
    assert length_s(stint, clock) == pytest.approx(LEAST_S, abs=0.0002)
    stint.step_aside()
    clock[0] += others_s
    stint.begin()
    assert length_s(stint, clock) == pytest.approx(expected_s, abs=0.0002)


def test_time_in_which_there_was_no_work_is_nobodys_turn(clock: list[float]) -> None:
    stint = TimeSlice(LEAST_S)
    stint.begin()
    clock[0] += 60
    stint.begin()
    assert length_s(stint, clock) == pytest.approx(LEAST_S, abs=0.0002)
