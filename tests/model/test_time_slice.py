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


def length_s(time_slice: TimeSlice, clock: list[float]) -> float:
    """From the beginning until it is over, to a tenth of a millisecond."""
    began = clock[0]
    while not time_slice.over:
        clock[0] += 0.0001
    return clock[0] - began


@pytest.mark.parametrize(
    ("others_s", "expected_s"),
    [(0.0, LEAST_S), (LEAST_S, LEAST_S), (0.02, 0.02 * SHARE), (5.0, LONGEST_S)],
)
def test_a_time_slice_is_a_share_of_the_others_turn(clock: list[float], others_s: float, expected_s: float) -> None:
    time_slice = TimeSlice(LEAST_S)
    time_slice.begin()
    assert length_s(time_slice, clock) == pytest.approx(LEAST_S, abs=0.0002)
    time_slice.end()
    clock[0] += others_s
    time_slice.begin()
    assert length_s(time_slice, clock) == pytest.approx(expected_s, abs=0.0002)


def test_idle_time_does_not_lengthen_a_time_slice(clock: list[float]) -> None:
    time_slice = TimeSlice(LEAST_S)
    time_slice.begin()
    clock[0] += 60
    time_slice.begin()
    assert length_s(time_slice, clock) == pytest.approx(LEAST_S, abs=0.0002)
