"""The server's time as a node knows it: a little behind, never ahead."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.model import clock as module
from mainspring.model.clock import DRIFT, OLD_S, ManualClock, ServerClock, steady_s

SERVER_US = 1_800_000_000_000_000


class Machine:
    """This machine's own clocks, moved by hand."""

    def __init__(self) -> None:
        self.monotonic_s = 5_000.0
        self.wall_s = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.monotonic_s

    def time(self) -> float:
        return self.wall_s


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(module, "time", made)
    return made


def test_before_the_first_sample_the_machines_own_clock_must_do(machine: Machine) -> None:
    assert ServerClock().now_ms() == 1_700_000_000_000


def test_the_first_sample_is_taken_even_if_this_machine_is_far_off(machine: Machine) -> None:
    for offset_us in (-3_600_000_000, -1, 0, 1, 3_600_000_000):
        clock = ServerClock()
        clock.sample(int(machine.wall_s * 1e6) + offset_us)
        assert clock.now_ms() == (int(machine.wall_s * 1e6) + offset_us) // 1000


def test_between_samples_it_counts_on_200_ppm_too_slowly(machine: Machine) -> None:
    clock = ServerClock()
    clock.sample(SERVER_US)
    machine.monotonic_s += 1_000
    assert DRIFT == 200e-6
    assert clock.now_ms() == SERVER_US // 1000 + 1_000_000 - 200


def test_a_step_of_this_machines_wall_clock_changes_nothing(machine: Machine) -> None:
    clock = ServerClock()
    clock.sample(SERVER_US)
    machine.wall_s += 86_400
    assert clock.now_ms() == SERVER_US // 1000


def test_a_larger_sample_is_better_because_every_reply_is_older_than_its_arrival(machine: Machine) -> None:
    clock = ServerClock()
    clock.sample(SERVER_US)
    clock.sample(SERVER_US + 5_000)
    assert clock.now_ms() == SERVER_US // 1000 + 5


def test_a_sample_a_little_behind_only_came_slowly(machine: Machine) -> None:
    clock = ServerClock()
    clock.sample(SERVER_US)
    clock.sample(SERVER_US - 249_000)
    assert clock.now_ms() == SERVER_US // 1000


def test_a_sample_far_behind_means_that_the_servers_clock_was_set_back(machine: Machine) -> None:
    clock = ServerClock()
    clock.sample(SERVER_US)
    clock.sample(SERVER_US - 250_000)
    assert clock.now_ms() == SERVER_US // 1000 - 250


def test_a_sample_grows_old_and_a_worse_one_is_as_good_as_new(machine: Machine) -> None:
    clock = ServerClock()
    old = [clock.old]
    clock.sample(SERVER_US)
    machine.monotonic_s += OLD_S - 0.1
    old.append(clock.old)
    clock.sample(SERVER_US + int((OLD_S - 0.2) * 1e6))
    machine.monotonic_s += 0.2
    old.append(clock.old)
    machine.monotonic_s += OLD_S
    old.append(clock.old)
    assert old == [True, False, False, True]


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 0.2), st.floats(-150.0, 150.0)), max_size=30))
def test_a_clock_is_never_ahead_of_a_server_that_drifts_by_less_than_200_ppm(
    steps: list[tuple[float, float, float]],
) -> None:
    machine = Machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", machine)
        clock = ServerClock()
        clock.sample(SERVER_US)
        server_us = float(SERVER_US)
        for pause_s, delay_s, ppm in steps:
            machine.monotonic_s += pause_s
            server_us += pause_s * (1e6 + ppm)
            read_us = int(server_us)  # the server reads its clock, then the reply travels
            machine.monotonic_s += delay_s
            server_us += delay_s * (1e6 + ppm)
            clock.sample(read_us)
            assert clock.now_ms() * 1000 <= server_us + 1


def test_a_manual_clock_stops_until_it_is_moved() -> None:
    clock = ManualClock(1_000)
    assert clock.manual
    clock.sample(99_000_000)
    assert clock.now_ms() == 1_000
    assert clock.advance(ms=5, seconds=1.5) == 2_505
    assert clock.advance(ms=-5) == 2_500
    clock.set(7)
    assert clock.now_ms() == 7


def test_steady_seconds_also_pass_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(CLOCK_BOOTTIME=7, clock_gettime={7: 12.5}.__getitem__)
    monkeypatch.setattr(module, "time", fake)
    assert steady_s() == 12.5


def test_without_a_boot_clock_the_monotonic_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 3.0))
    assert steady_s() == 3.0
    monkeypatch.undo()
    assert steady_s() <= steady_s()
    assert steady_s() >= time.monotonic() - 1
